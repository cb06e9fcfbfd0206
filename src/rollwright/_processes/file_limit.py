"""The limit of open files of this process: raised once, and named in the errors that it causes."""

from __future__ import annotations

import contextlib
import errno
import functools
import resource
from collections.abc import Iterator


@functools.cache
def raise_file_limit() -> None:
    """Raise the soft limit of open files to the hard one, once in a process; those that it starts inherit it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):  # some systems have a lower limit that they do not show
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def is_file_limit(error: OSError) -> bool:
    """Whether a call has failed since this process, or the system, has too many open files."""
    return error.errno in (errno.EMFILE, errno.ENFILE)


@contextlib.contextmanager
def file_limit_named(what: str) -> Iterator[None]:
    """Say in an error of too many open files how many there may be, and what to do.

    Args:
        what: what needs them, for messages.

    Raises:
        OSError: there are too many.
    """
    try:
        yield
    except OSError as error:
        if not is_file_limit(error):
            raise
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        raise OSError(
            error.errno,
            f"{what}: this process may have {most} open files, and needs more. Raise the limit (ulimit -n) in the "
            "shell that starts it, or start fewer workers",
        ) from error
