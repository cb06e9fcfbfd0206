"""Workers on other machines: remote groups, the links to them, and how they are started."""
