"""Open files: their limit, and locks on bytes of a file between processes."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import os
import resource
import struct
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rollwright._files import unnamed_file
from rollwright._processes.forks import on_fork

if TYPE_CHECKING:
    from rollwright._memory import Segment


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


_SETLK, _GETLK = getattr(fcntl, "F_OFD_SETLK", None), getattr(fcntl, "F_OFD_GETLK", None)
_FLOCK = "@hhqqi4x"  # struct flock of 64-bit Linux: type, whence, start, length, pid


class FileLocks:
    """This process's locks on single bytes of a file.

    On Linux they belong to an open file description, made here and known to nobody else: they are dropped by
    :meth:`release`, or when this process ends, and by nothing else. A forked child makes one of its own: it holds none
    of its parent's locks, and keeps none alive.

    Elsewhere they are POSIX record locks of the process. Those are dropped as soon as the process closes *any*
    descriptor of the file (``shutil.copytree`` of its folder does): whoever holds a lock for long has to test that
    nobody else has taken it for dead.

    Threads share the locks: what one of them takes, each may release.

    Args:
        file: the file, whose content does not matter.

    Attributes:
        lasting: whether they belong to an open file description.

    Example:
        >>> from rollwright._memory import Segment
        >>> file = Segment()
        >>> one, other = FileLocks(file), FileLocks(file)
        >>> one.take(3, exclusive=True), other.take(3, exclusive=False), other.is_taken(3)
        (True, False, True)
        >>> one.release(3)
        >>> other.is_taken(3)
        False
    """

    def __init__(self, file: Segment) -> None:
        self.lasting = _are_lasting()
        self._files = [file]
        self._fd = _opened_anew(file.fd) if self.lasting else file.fd
        if self.lasting:
            self._close = weakref.finalize(self, os.close, self._fd)
            self._close.atexit = False
            on_fork(self)

    def reset_after_fork(self) -> None:
        """In a forked child, which shares its parent's description so far."""
        try:
            fresh = _opened_anew(self._fd)
        except OSError:  # too many open files: every later call fails, rather than act for the parent
            self._close()
            self._fd = -1
            raise
        os.dup2(fresh, self._fd, inheritable=False)
        os.close(fresh)

    def keep_open(self, file: Segment) -> None:
        """Close no descriptor of the file while there are locks: that of another segment over it."""
        if not self.lasting and file not in self._files:
            self._files.append(file)

    def take(self, byte: int, *, exclusive: bool) -> bool:
        """Lock a byte, or change its lock, if no other holder prevents it; whether that worked."""
        try:
            if self.lasting:
                fcntl.fcntl(self._fd, _SETLK, _request(fcntl.F_WRLCK if exclusive else fcntl.F_RDLCK, byte))  # type: ignore[arg-type]
            else:
                fcntl.lockf(self._fd, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB, 1, byte)
        except (BlockingIOError, PermissionError):
            return False
        return True

    def release(self, byte: int) -> None:
        """Unlock a byte."""
        if self.lasting:
            fcntl.fcntl(self._fd, _SETLK, _request(fcntl.F_UNLCK, byte))  # type: ignore[arg-type]
        else:
            fcntl.lockf(self._fd, fcntl.LOCK_UN, 1, byte)

    def is_taken(self, byte: int) -> bool:
        """Whether somebody else holds a byte. Where locks are not lasting: not for use while others may take it."""
        if self.lasting:
            found = fcntl.fcntl(self._fd, _GETLK, _request(fcntl.F_WRLCK, byte))  # type: ignore[arg-type]
            return bool(struct.unpack_from("@h", found)[0] != fcntl.F_UNLCK)
        if not self.take(byte, exclusive=True):
            return True
        self.release(byte)
        return False


@functools.lru_cache(maxsize=4096)
def _request(kind: int, byte: int) -> bytes:
    return struct.pack(_FLOCK, kind, os.SEEK_SET, byte, 1, 0)


def _opened_anew(fd: int) -> int:
    """A descriptor of the same file with a description of its own; the file needs no name any more."""
    return os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)


@functools.cache
def _are_lasting() -> bool:
    """Whether the system has locks that belong to an open file description, and lets a file be reopened."""
    if _SETLK is None or struct.calcsize("P") != 8:
        return False
    with contextlib.suppress(OSError):
        file = unnamed_file()
        try:
            fd = _opened_anew(file)
            try:
                fcntl.fcntl(fd, _SETLK, _request(fcntl.F_WRLCK, 0))
                return True
            finally:
                os.close(fd)
        finally:
            os.close(file)
    return False
