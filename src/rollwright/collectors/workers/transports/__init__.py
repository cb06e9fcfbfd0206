"""How workers are started and reached: the protocol, the backends by name, and processes of this machine."""
