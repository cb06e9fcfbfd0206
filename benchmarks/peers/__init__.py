"""Other packages, each in an environment of its own, behind one small protocol."""
