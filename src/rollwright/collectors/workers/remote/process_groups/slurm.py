"""SubmititLauncher: starts remote groups as jobs of Slurm, or of submitit's executor for one machine."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollwright.collectors.workers.remote.joining import join
from rollwright.errors import require

_LOOK_S = 0.5
_CANCEL_S = 15.0  # for a job to end by itself: an interpreter with torch takes seconds, on a busy machine many
_JOB_MIN = 24 * 60  # of a job that is not limited otherwise; submitit's own limit is minutes


def runs_slurm() -> bool:
    """Whether jobs go to Slurm if nothing else is asked for."""
    submitit = require("submitit", extra="submitit", purpose="launcher='submitit'")
    return str(submitit.AutoExecutor.which()) == "slurm"


class SubmititLauncher:
    """Starts groups as jobs; see :class:`~rollwright.collectors.workers.remote.launchers.Launcher`.

    Args:
        executor: arguments of ``submitit.AutoExecutor``.
        job: its parameters: partition, GPUs, time and so on.

    Raises:
        MissingExtraError: submitit is not installed.
        TypeError, ValueError: submitit does not take an argument.
    """

    def __init__(self, executor: Mapping[str, Any] | None, job: Mapping[str, Any] | None) -> None:
        submitit = require("submitit", extra="submitit", purpose="launcher='submitit'")
        given = dict(executor or {})
        folder = given.pop("folder", None)
        if folder is None and given.get("cluster") != "local" and runs_slurm():
            raise ValueError(
                "submitit_kwargs: jobs of Slurm lie in a folder that all machines see, and none is given. Pass "
                "submitit_kwargs={'folder': ...}."
            )
        self._scratch = tempfile.mkdtemp(prefix="rollwright-jobs-") if folder is None else None
        try:
            self._executor = self._configured(submitit, Path(folder or self._scratch or ""), given, job)
        except BaseException:
            self.close()
            raise
        self._submitting = threading.Lock()

    @staticmethod
    def _configured(submitit: Any, folder: Path, given: dict[str, Any], job: Mapping[str, Any] | None) -> Any:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder = Path(tempfile.mkdtemp(prefix="rollwright-", dir=folder))  # nobody else reads the secret in its jobs
        try:
            executor = submitit.AutoExecutor(folder=folder, **given)
        except (TypeError, ValueError, AssertionError, RuntimeError) as error:
            raise ValueError(f"submitit_kwargs: {error}") from error
        parameters = {"name": "rollwright", **(job or {})}
        if not {"timeout_min", "slurm_time"} & parameters.keys():
            parameters["timeout_min"] = _JOB_MIN
        try:
            executor.update_parameters(**parameters)
        except (TypeError, ValueError, NameError, AssertionError) as error:
            raise ValueError(f"slurm_kwargs: {error}") from error
        return executor

    def launch(self, group: int, address: tuple[str, int], secret: bytes) -> _Job:
        """See :class:`~rollwright.collectors.workers.remote.launchers.Launcher`."""
        return _Job(self._submit, address, secret, group)

    def _submit(self, address: tuple[str, int], secret: bytes, group: int) -> Any:
        with self._submitting:
            job = self._executor.submit(_join, address, secret, group)
        with contextlib.suppress(OSError):  # it lies in a folder of this user's alone, and may be gone by now
            job.paths.submitted_pickle.chmod(0o600)
        return job

    def close(self) -> None:
        """Remove the folder of jobs, if it was made here."""
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)


class _Job:
    """A job; a thread submits it and asks after it, since both call programs of Slurm."""

    def __init__(self, submit: Any, address: tuple[str, int], secret: bytes, group: int) -> None:
        self._ended: str | None = None
        self._stop, self._over = threading.Event(), threading.Event()
        self._thread = threading.Thread(
            target=self._follow, args=(submit, address, secret, group), name="rollwright-job", daemon=True
        )
        self._thread.start()

    def _follow(self, submit: Any, *args: Any) -> None:
        job = None
        try:
            job = submit(*args)
            while not self._stop.wait(_LOOK_S) and not job.done():
                pass
            if not job.done():
                self._end(job)
            self._ended = _how(job)
        except Exception as error:
            self._ended = f"could not be followed as a job: {error}" if job else f"was not taken as a job: {error}"
        finally:
            self._over.set()

    @staticmethod
    def _end(job: Any) -> None:
        until = time.monotonic() + _CANCEL_S  # to end by itself, since the collector has hung up
        while time.monotonic() < until and not job.done():
            time.sleep(_LOOK_S / 10)
        if not job.done():
            with contextlib.suppress(Exception):
                job.cancel()

    def how_it_ended(self) -> str | None:
        """See :class:`~rollwright.collectors.workers.remote.launchers.Host`."""
        return self._ended

    def end(self, timeout_s: float) -> None:
        """See :class:`~rollwright.collectors.workers.remote.launchers.Host`."""
        self._stop.set()
        self._over.wait(timeout_s + _CANCEL_S)
        self._thread.join(1.0)


def _how(job: Any) -> str:
    """How a job has ended, and where its output lies."""
    why = f"state {job.state}"
    with contextlib.suppress(Exception):  # there may be no result
        error = job.exception()
        if error is not None:
            why = str(error).strip().splitlines()[-1]
    return f"was job {job.job_id}, which has ended: {why} (its output: {job.paths.stderr})"


def _join(address: tuple[str, int], secret: bytes, group: int) -> None:
    """What a job runs."""
    job = os.environ.get("SLURM_JOB_ID") or os.environ.get("SUBMITIT_LOCAL_JOB_ID")
    join(address, secret, group=group, name=f"{socket.gethostname()} (group {group}, job {job})")
