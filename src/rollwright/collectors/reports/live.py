"""Reports of running collectors, in files of this user: written once a second, and read by ``rollwright top``."""

from __future__ import annotations

import itertools
import json
import logging
import os
import stat
import sys
import tempfile
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from rollwright._processes.threads import DaemonThread
from rollwright.collectors.reports.statistics import CollectorStats

SWITCH = "ROLLWRIGHT_TOP"  # the environment variable that turns reports on in a program that does not ask for them

_EVERY_S = 1.0
_KEPT_S = 3600.0  # of a process that writes no more: its number may be that of another one by now
_log = logging.getLogger(__name__)
_numbers = itertools.count()


class Reported(NamedTuple):
    """A collector that runs, as it has reported itself.

    Attributes:
        pid: of its process.
        program: what the process runs.
        name: of the collector's class.
        age_s: of the report, in seconds.
        stats: what its ``stats()`` returned.
    """

    pid: int
    program: str
    name: str
    age_s: float
    stats: CollectorStats


def wants_reports() -> bool:
    """Whether ``ROLLWRIGHT_TOP=1`` is set; read when a collector is constructed."""
    return os.environ.get(SWITCH, "0") not in ("", "0")


class LiveReport(DaemonThread):
    """Writes what ``stats()`` returns into a file once a second, until it is stopped or the collector is gone.

    Args:
        stats: a method of the collector.
        name: of the collector's class.
    """

    def __init__(self, stats: Callable[[], CollectorStats], name: str) -> None:
        super().__init__("rollwright-report")
        self._stats = weakref.WeakMethod(stats)
        self._name = name

    def _work(self) -> None:
        path: Path | None = None
        is_there, told = True, ""
        while is_there and not self.stopping:
            try:
                path = path or reports_folder() / f"{os.getpid()}-{next(_numbers)}.json"
                is_there = self._write(path)
            except Exception as error:  # collecting goes on; a disk may have room again
                if told != (told := str(error)):
                    _log.warning("rollwright top cannot show this %s: %s", self._name, error)
            with self.condition:
                self.condition.wait_for(lambda: self.stopping, _EVERY_S if is_there else 0.0)
        if path is not None:
            with suppress(OSError):
                path.unlink(missing_ok=True)

    def _write(self, path: Path) -> bool:
        """Replace the report; returns whether the collector is still there."""
        stats = self._stats()
        if stats is None:
            return False
        try:
            found = {"pid": os.getpid(), "program": _program(), "name": self._name, "stats": stats()}
        except Exception:  # it is being constructed, or changes under our eyes: the report of before grows older
            return True
        report, new = json.dumps(found), path.with_suffix(".new")
        try:
            new.write_text(report)
            new.replace(path)
        except OSError:
            new.unlink(missing_ok=True)
            raise
        return True


def reports_folder() -> Path:
    """The folder of this user's reports.

    Raises:
        OSError: it cannot be made, or others may write into it.
    """
    folder = Path(tempfile.gettempdir()) / f"rollwright-reports-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"{folder} is not a folder that only you can write to. Remove it.")
    return folder


def running() -> list[Reported]:
    """Collectors of this user on this machine that report themselves; files of those that were killed are removed.

    Raises:
        OSError: the folder cannot be read.
    """
    found = []
    for path in reports_folder().glob("*.new"):  # of those that were killed while they wrote
        pid = path.name.partition("-")[0]
        if pid.isdigit() and not _runs(int(pid)):
            path.unlink(missing_ok=True)
    for path in sorted(reports_folder().glob("*.json")):
        try:
            age_s = max(0.0, time.time() - path.stat().st_mtime)
            report = json.loads(path.read_text())
        except FileNotFoundError:  # it has just ended
            continue
        if age_s > _KEPT_S or not _runs(report["pid"]):
            path.unlink(missing_ok=True)
        else:
            found.append(Reported(report["pid"], report["program"], report["name"], age_s, report["stats"]))
    return found


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it has another user by now
        return False
    return True


def _program() -> str:
    """What this process runs, in short: ``train.py``."""
    return Path(sys.argv[0]).name if sys.argv and sys.argv[0] not in ("", "-c") else "python"
