"""Errors of commands: an exit status and a short message."""

from __future__ import annotations

import re

from rollwright.errors import RollwrightError

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


class Failure(RollwrightError):
    """Ends a command; its text is for the person who typed it.

    Args:
        message: a line or two, with the remedy.
        status: the exit status; 2 for what was asked wrongly, 1 for what failed.
    """

    status = 1  # of one that was raised in a worker

    def __init__(self, message: str, status: int = 2) -> None:
        super().__init__(message)
        self.status = status


def plain(text: object) -> str:
    r"""Text in one line, without a terminal's colours.

    >>> plain("\x1b[33mWARN: old\n  name\x1b[0m")
    'WARN: old name'
    """
    return " ".join(_COLOURS.sub("", str(text)).split())


def brief(error: BaseException) -> str:
    r"""An error in a line: ours as they are, others with their type in front and cut where they grow long.

    >>> brief(RuntimeError("shapes cannot\n be multiplied"))
    'RuntimeError: shapes cannot be multiplied'
    """
    if isinstance(error, RollwrightError):
        return plain(error)
    text = plain(error)
    if len(text) > 400:
        text = f"{text[:400]} ..."
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
