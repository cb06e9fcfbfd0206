"""Network interfaces of this machine: their names, and which has an address."""

from __future__ import annotations

import fcntl
import socket
import struct

_SIOCGIFADDR = 0x8915  # of Linux: the IPv4 address of an interface


def check_interface(name: str, value: object) -> object:
    """Check the name of a network interface of this machine.

    Raises:
        ValueError: there is none of that name.
    """
    there = [interface for _, interface in socket.if_nameindex()]
    if value not in there:
        raise ValueError(
            f"{name}: expected a network interface, of which this machine has {', '.join(there)}; got {value!r}. Leave "
            "it out for the one that the collector is reached by."
        )
    return value


def interface_of(address: str) -> str | None:
    """The interface that has an address; None: not known.

    Example:
        >>> interface_of("127.0.0.1")
        'lo'
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as end:
        for _, name in socket.if_nameindex():
            try:
                found = fcntl.ioctl(end.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # it has none
                continue
            if socket.inet_ntoa(found[20:24]) == address:
                return name
    return None
