"""Backend "ray" of evaluation: in an actor of a Ray cluster."""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch

from rollwright._options import names_of, refuse_unknown
from rollwright._processes.channel import ByValue, ChannelClosed
from rollwright._processes.failures import ExceptionInfo
from rollwright._processes.network.handshake import HandshakeRefused, IncomingHandshake, connect_to, parse_address
from rollwright._processes.network.line import Line, MessageForged
from rollwright._processes.network.ray import RaySession, check_cluster, configs_of
from rollwright._processes.network.sources import with_sources
from rollwright._processes.pickling import dumps
from rollwright.collectors.evaluation.backends import Backend, EvaluationFailed, ProcessStart
from rollwright.collectors.evaluation.episodes import (
    EpisodeRunner,
    EvaluationProgress,
    EvaluationRequest,
    Settings,
    Stopped,
)
from rollwright.collectors.workers.remote.ray import Options, RayLauncher
from rollwright.errors import WorkerError

_NAME = "Evaluator's Ray actor"
_TARGET = "rollwright.collectors.evaluation.ray:serve_evaluations"
_NAP_S, _BEAT_S, _JOIN_S = 0.2, 0.5, 20.0


class _Start(NamedTuple):
    """The first message to the actor; the content: settings and ``init_fn``."""

    content: ByValue
    num_threads: int


class _Beat(NamedTuple):
    """Frames of the current evaluation, whenever there are more."""

    frames: int


class _Ready(NamedTuple):
    """Environment and policy are made."""

    pid: int


def ray_backend(
    settings: Settings,
    progress: EvaluationProgress,
    start: ProcessStart,
    step_timeout_s: float,
    given: Mapping[str, Any] | None,
) -> Callable[[], Backend]:
    """What starts the actor.

    Raises:
        MissingExtraError: Ray is not installed.
        TypeError, ValueError: an option is wrong, or no node has what the actor asks for.
        ConnectionError: no cluster answers.
    """
    if given is not None and not isinstance(given, Mapping):
        raise TypeError(f"backend_options: expected a dictionary, got {type(given).__name__}: {given!r}.")
    known = [name for name in names_of(Options) if name != "num_workers_per_collector"]
    refuse_unknown(map(str, given or {}), known, "backend_options of Evaluator(backend='ray')")
    options = Options(**(given or {}))
    if isinstance(options.remote_configs, list | tuple):
        raise TypeError("backend_options: remote_configs: expected a dictionary, for the only actor, got a list.")
    configs = configs_of(options.remote_configs, [start.num_threads])
    session = RaySession(options.ray_init_config, num_cpus=float(configs[0]["num_cpus"]), purpose="backend='ray'")
    try:
        launcher = RayLauncher(session, configs, _TARGET, niceness=options.niceness)
        check_cluster(session, configs, grows=options.autoscales)
        address = parse_address("address", options.address or f"{session.node_ip}:0")
    except BaseException:
        session.close()
        raise
    return partial(RayBackend, settings, progress, session, launcher, address, start, step_timeout_s)


class RayBackend(Backend):
    """In an actor, which joins this process over a socket.

    Args:
        settings: what and how.
        progress: of this process; what the actor reports is entered there.
        session: with the cluster; closed with this.
        launcher: starts the actor.
        address: where it joins.
        start: how its process starts.
        step_timeout_s: without a step for longer, it counts as stuck.

    Raises:
        WorkerError: environment, policy or ``init_fn`` raised; or the actor ended.
        TimeoutError: it takes too long.
    """

    def __init__(
        self,
        settings: Settings,
        progress: EvaluationProgress,
        session: RaySession,
        launcher: RayLauncher,
        address: tuple[str, int],
        start: ProcessStart,
        step_timeout_s: float,
    ) -> None:
        self._progress, self._session, self._step_timeout_s = progress, session, step_timeout_s
        self._line: Line | None = None
        self._answers: list[Any] = []
        self._secret = secrets.token_hex(32).encode()
        self._socket = socket.create_server(address)
        self._socket.setblocking(False)
        self._host = launcher.launch(0, self._socket.getsockname()[:2], self._secret)
        try:
            self._progress.begin()
            self._join(time.monotonic() + start.timeout_s, start.timeout_s)
            sent = with_sources(dumps((settings, start.init_fn)))
            self._post(_Start(ByValue(None, pickled=sent), start.num_threads))
            ready = self._answer("its environment and policy", start.timeout_s)
            self.pid = ready.pid
        except BaseException:
            self.close(time.monotonic)
            raise

    def _join(self, until: float, timeout_s: float) -> None:
        """Wait for the actor to connect and to prove what it must."""
        greeting: IncomingHandshake | None = None
        while self._line is None:
            if self._progress.stopped:
                raise Stopped
            if (how := self._host.how_it_ended()) is not None:
                raise WorkerError(f"{_NAME} {how}.")
            if time.monotonic() > until:
                raise TimeoutError(
                    f"waited {timeout_s:g} s for {_NAME} to join. See whether the cluster has room for it, and whether "
                    "its nodes reach this machine (backend_options={'address': ...})."
                )
            _wait(self._socket.fileno() if greeting is None else greeting.end.fileno())
            with contextlib.suppress(BlockingIOError):
                if greeting is None:
                    greeting = IncomingHandshake(self._socket.accept()[0], self._secret)
            try:
                if greeting is not None and greeting.read() is not None:
                    self._line = greeting.accept()
                elif greeting is not None and time.monotonic() > greeting.expires_at:
                    raise HandshakeRefused("it said nothing in time")
            except HandshakeRefused:
                assert greeting is not None
                greeting.end.close()
                greeting = None
        self._socket.close()
        self._line.give_up_after(30.0)

    def _post(self, message: Any) -> None:
        assert self._line is not None
        try:
            self._line.post(message)
        except ChannelClosed:
            raise self._lost() from None

    def run(self, request: EvaluationRequest, begun: Callable[[], None]) -> dict[str, Any]:
        """Have the actor evaluate, and wait for its answer."""
        self._post(request)
        begun()
        answer: dict[str, Any] = self._answer("a step of its environment", self._step_timeout_s)
        return answer

    def _answer(self, waiting_for: str, silence_s: float) -> Any:
        """What the actor answers; it is given up if it takes no step."""
        assert self._line is not None
        while not self._answers:
            if self._progress.stopped:
                raise Stopped
            _wait(self._line.fileno())
            try:
                self._line.read(lambda message, sizes: [], lambda message, pieces: self._received(message))
            except ChannelClosed:
                if not self._answers:
                    raise self._lost() from None
            except MessageForged as error:
                self._line.close()
                self._host.kill()
                raise WorkerError(f"{_NAME} (pid {self.pid}) cannot be trusted: {error}.") from error
            if not self._answers and self._progress.silence_s > silence_s:
                self._line.close()
                self._host.kill()
                raise TimeoutError(
                    f"{_NAME} (pid {self.pid}): waited {silence_s:g} s for {waiting_for}, after "
                    f"{self._progress.frames} frames of this evaluation, and ended it. Look there for what blocks, "
                    "or raise env_step_timeout."
                )
        answer = self._answers.pop(0)
        if isinstance(answer, EvaluationFailed):
            raise answer.failure.error(_NAME)
        if isinstance(answer, ExceptionInfo):
            raise answer.error(_NAME)
        return answer

    def _received(self, message: Any) -> None:
        if isinstance(message, _Beat):
            self._progress.beat(message.frames - self._progress.frames)
        else:
            self._answers.append(message)

    def _lost(self) -> WorkerError:
        if self._progress.stopped:
            raise Stopped
        until = time.monotonic() + 1.0  # Ray knows why a moment later
        while (how := self._host.how_it_ended()) is None and time.monotonic() < until:
            time.sleep(0.01)
        return WorkerError(
            f"{_NAME} (pid {self.pid}) {how or 'has hung up'}, after {self._progress.frames} frames of an evaluation. "
            "Make a new Evaluator to go on."
        )

    def ended(self) -> WorkerError | None:
        """Why the actor has ended; None: it lives."""
        how = self._host.how_it_ended()
        return None if how is None else WorkerError(f"{_NAME} (pid {self.pid}) {how}. Make a new Evaluator to go on.")

    def close(self, until: Callable[[], float]) -> str:
        """Hang up, end the actor if it does not by then, and leave the cluster."""
        self._socket.close()
        if self._line is not None:
            self._line.close()
        while self._host.how_it_ended() is None and time.monotonic() < until():
            time.sleep(0.01)
        how = "ended" if self._line is None or self._host.how_it_ended() is not None else "killed"
        self._host.end(0.0)
        self._session.close()
        return how


def _wait(fd: int) -> None:
    if fd >= 0:
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        poll.poll(_NAP_S * 1e3)


# In the actor ---------------------------------------------------------------------------------------


def serve_evaluations(address: tuple[str, int], secret: bytes, group: int) -> None:
    """What the actor's process runs: evaluations, until the other side hangs up."""
    line = connect_to(address, secret, {"group": group}, _JOIN_S)
    arrived: list[Any] = []
    progress = EvaluationProgress()
    runner: EpisodeRunner | None = None
    threading.Thread(target=_beat, args=(line, progress), name="rollwright-beat", daemon=True).start()

    def gone() -> bool:
        try:
            line.read(lambda message, sizes: [], lambda message, pieces: arrived.append(message))
        except ChannelClosed:
            return True
        return False

    try:
        while True:
            while not arrived:
                _wait(line.fileno())
                if gone():
                    return
            message = arrived.pop(0)
            try:
                progress.begin()
                if isinstance(message, _Start):
                    settings, init_fn = message.content.value
                    if init_fn is not None:
                        init_fn()
                    torch.set_num_threads(message.num_threads)
                    runner = EpisodeRunner(settings, progress, gone, own_generators=True)
                    answer: Any = _Ready(os.getpid())
                else:
                    assert runner is not None
                    answer = runner.run(message, lambda: None)
            except Stopped:
                return
            except Exception as error:
                failure = ExceptionInfo.of(error)
                answer = failure if runner is None else EvaluationFailed(failure)
            line.post(answer)
            while line.behind and not gone():
                _wait(line.fileno())
    except ChannelClosed:
        return
    finally:
        line.close()
        if runner is not None:
            with contextlib.suppress(Exception):  # the process ends anyway, and an earlier error is the cause
                runner.close()


def _beat(line: Line, progress: EvaluationProgress) -> None:
    """Report frames while there are more; silence means that there are none."""
    shown = 0
    while True:
        time.sleep(_BEAT_S)
        beaten_at = progress.beaten_at
        if beaten_at != shown:
            shown = beaten_at
            try:
                line.post(_Beat(progress.frames))
            except ChannelClosed:
                return
