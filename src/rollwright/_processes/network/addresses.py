"""Addresses and secrets of runs, as options name them."""

from __future__ import annotations

import os

SECRET = "ROLLWRIGHT_SECRET"
"""The environment variable that holds the secret of a run."""


def parse_address(name: str, value: object) -> tuple[str, int]:
    """Host and port of ``"HOST:PORT"``.

    Raises:
        ValueError: it is something else.

    Example:
        >>> parse_address("address", "10.0.0.1:29400")
        ('10.0.0.1', 29400)
    """
    host, colon, port = str(value).rpartition(":")
    if not isinstance(value, str) or not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"{name}: expected 'HOST:PORT', such as '10.0.0.1:29400', got {value!r}.")
    return host.strip("[]"), int(port)


def checked_address(name: str, value: object) -> object:
    """The value, if it is an address.

    Raises:
        ValueError: it is something else.
    """
    parse_address(name, value)
    return value


def checked_secret(name: str, value: object) -> object:
    """The value, if it is a text that is long enough.

    Raises:
        ValueError: it is something else.
    """
    if not isinstance(value, str) or len(value) < 16:
        raise ValueError(
            f"{name}: expected a text of at least 16 characters that nobody can guess, got {type(value).__name__}"
            f"{f' of {len(value)}' if isinstance(value, str) else ''}. Pass for example secrets.token_hex(16)."
        )
    return value


def secret_of(given: str | None) -> str | None:
    """The secret of a run: the one given, or that of the environment variable; None: there is neither.

    Raises:
        ValueError: the variable is empty, or too short.
    """
    if given is None and SECRET in os.environ:
        given = os.environ[SECRET]
        checked_secret(SECRET, given)
    return given
