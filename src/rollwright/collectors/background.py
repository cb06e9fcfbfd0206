"""Background: a thread that collects into a replay buffer, and what others may ask of it meanwhile."""

from __future__ import annotations

import atexit
import inspect
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FrameType
from typing import Any

import torch

from rollwright.envs.utils import ExplorationType, set_exploration_type

__all__ = ["Background"]

_WAIT_S = 60.0  # for a step to end, at most
_STOP_S = 10.0  # for the thread to end, unless the caller says otherwise
_EXIT_S = 1.0  # when the interpreter exits
_NAP_S = 1.0

_Apply = Callable[[], None]


class Background:
    """Runs ``deliver`` again and again in a thread.

    The thread comes by :meth:`checkpoint` once a step, between two steps. There it applies new weights, rests as long
    as somebody asks it to, or is told to cut the batch short. What it has to do there is looked at under a lock; where
    there is nothing, it costs reading one attribute.

    Args:
        deliver: collects and writes one batch; returns whether there may be more.
        interrupted: of the collector: whether the rollout ends after this step.
        applied: called with the version of weights that have just come into force.
        ended: called in the thread when it ends.
        version: of the weights in force.
        exploration_type: that of the thread, whatever other threads set meanwhile.
    """

    def __init__(
        self,
        deliver: Callable[[], bool],
        interrupted: Callable[[], bool],
        *,
        applied: Callable[[int], None],
        ended: Callable[[], None],
        version: int,
        exploration_type: ExplorationType,
    ) -> None:
        self._deliver, self._interrupted = deliver, interrupted
        self._applied, self._ended = applied, ended
        self._exploration = exploration_type
        self.version = version  # the newest that was published
        self._updates: dict[str, _Apply] = {}
        self._new_version = False
        self._condition = threading.Condition()
        self._calm = True  # nothing is asked of the thread
        self._pauses = self._holds = 0  # who wants it to rest between two steps, and between two batches
        self._stopping = False
        self._resting: str | None = None  # "step" or "batch", while it rests
        self._finished = False
        self.rest_s = 0.0  # spent at rest in the middle of batches
        self._error: BaseException | None = None
        self._at_end: _Apply | None = None
        self._num_torch_threads = torch.get_num_threads()
        self._thread = threading.Thread(target=self._run, name="rollwright-collector", daemon=True)

    # The thread -------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin."""
        _at_exit.add(self)
        self._thread.start()

    def _run(self) -> None:
        torch.set_num_threads(self._num_torch_threads)  # a new thread takes as many as there are cores
        try:
            with _of_this_thread(self._exploration):
                while self.goes_on() and self._deliver():
                    pass
        except BaseException as error:  # it is raised again, in the thread of the next caller
            self._error = error
        self._ended()
        with self._condition:
            self._apply_updates()
            self._finished = True
            at_end = self._at_end
            self._condition.notify_all()
        if at_end is not None:
            at_end()

    def checkpoint(self) -> bool:
        """Between two steps: whether the batch ends here."""
        if not self._calm and self._attend("step"):
            return True
        return self._interrupted()

    def goes_on(self) -> bool:
        """Between two batches, in the thread: do what is asked; returns whether the thread goes on."""
        return self._calm or not self._attend("batch")

    def _attend(self, place: str) -> bool:
        """Do what is asked; returns whether the batch (or, between two of them, the thread) ends."""
        with self._condition:
            while True:
                self._apply_updates()
                if self._stopping or (self._holds and place == "step"):
                    self._resting = None
                    return True
                if not self._pauses and not self._holds:
                    self._resting, self._calm = None, True
                    return False
                self._resting = place
                self._condition.notify_all()
                begun = time.perf_counter()
                self._condition.wait(_NAP_S)
                self.rest_s += (time.perf_counter() - begun) * (place == "step")

    def _apply_updates(self) -> None:
        updates, self._updates = self._updates, {}
        for apply in updates.values():
            apply()
        if self._new_version:
            self._new_version = False
            self._applied(self.version)

    # What others ask --------------------------------------------------------------------------------

    @property
    def running(self) -> bool:
        """Whether the thread has not ended."""
        return not self._finished

    @property
    def inside(self) -> bool:
        """Whether the caller is the thread itself."""
        return threading.current_thread() is self._thread

    def raise_error(self) -> None:
        """Raise what ended the thread, once."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def publish(self, updates: Mapping[str, _Apply]) -> int | None:
        """Let new weights come into force before the next step, all at once.

        Returns:
            Their version; None if the thread has ended: nothing was done.
        """
        with self._condition:
            if self._finished:
                return None
            self._updates.update(updates)  # of two updates of one model, the last counts
            self.version += 1
            self._new_version, self._calm = True, False
            self._condition.notify_all()
            return self.version

    def resting(self, *, between_batches: bool) -> AbstractContextManager[None]:
        """Keep the thread at rest inside the ``with`` block; no effect in the thread itself, or after its end.

        Args:
            between_batches: rest there; the batch under way is cut short, and written. Otherwise between two steps.

        Raises:
            TimeoutError: the step under way did not end in time.
        """
        return nullcontext() if self.inside else self._rest(between_batches)

    @contextmanager
    def _rest(self, between_batches: bool) -> Iterator[None]:
        name, places = ("_holds", ("batch",)) if between_batches else ("_pauses", ("step", "batch"))
        with self._condition:
            setattr(self, name, getattr(self, name) + 1)
            self._calm = False
            self._condition.notify_all()
        try:
            with self._condition:
                rests = self._wait(lambda: self._finished or self._resting in places, _WAIT_S)
            if not rests:
                raise TimeoutError(f"pause: waited {_WAIT_S:g} s for {self.doing()} to end. The collector goes on.")
            self.raise_error()
            yield
        finally:
            with self._condition:
                setattr(self, name, getattr(self, name) - 1)
                self._condition.notify_all()

    def _wait(self, condition: Callable[[], bool], seconds: float) -> bool:
        return self._condition.wait_for(condition, seconds)

    def stop(self, timeout_s: float | None, at_end: _Apply | None = None) -> bool:
        """End the thread between two steps; what was collected is written.

        Args:
            timeout_s: how long to wait for that.
            at_end: to be called in the thread if it takes longer.

        Returns:
            Whether it has ended.
        """
        with self._condition:
            self._stopping, self._calm = True, False
            self._condition.notify_all()
            limit = _STOP_S if timeout_s is None else timeout_s
            ended = self._finished if self.inside else self._wait(lambda: self._finished, limit)
            if not ended:
                self._at_end = at_end
        if ended and not self.inside:
            self._thread.join(_NAP_S)  # it has nothing left to do
        return ended

    def doing(self) -> str:
        """What the thread is doing, for a message."""
        if self._finished:
            return "nothing any more"
        if self._resting is not None:
            return f"a rest between two {'steps' if self._resting == 'step' else 'batches'}"
        frame = sys._current_frames().get(self._thread.ident or 0)
        where, what = "", "a batch"
        innermost = frame
        while frame is not None:
            what = _stage(frame) or what
            if what != "a batch":
                break
            frame = frame.f_back
        if innermost is not None:
            code = innermost.f_code
            where = f" (in {code.co_qualname}, {code.co_filename}:{innermost.f_lineno})"
        return what + where

    def stats(self) -> dict[str, Any]:
        """What ``stats()`` of a collector says of it."""
        error = self._error
        return {
            "running": self.running,
            "paused": self._resting is not None,
            "error": None if error is None else f"{type(error).__name__}: {error}",
        }


_STAGES = {"act": "a call of the policy", "step": "a step of the environment", "record": "a write of a frame"}


def _stage(frame: FrameType) -> str | None:
    """What a frame of the stack stands for."""
    code = frame.f_code
    of_a_path = code.co_qualname.split(".")[0] in ("AlternatingPath", "ArrayPath", "PlainPath")
    return _STAGES.get(code.co_name) if of_a_path else None


def _of_this_thread(exploration: ExplorationType) -> AbstractContextManager[Any]:
    """The exploration type of one thread, where tensordict knows that (from 0.15 on)."""
    if "thread_local" in inspect.signature(set_exploration_type.__init__).parameters:
        return set_exploration_type(exploration, thread_local=True)
    return nullcontext()


_at_exit: weakref.WeakSet[Background] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    """End all threads before the interpreter does: one that is stopped inside torch would crash it."""
    until = time.monotonic() + _EXIT_S
    running = [background for background in _at_exit if background.running]
    for background in running:
        background.stop(0.0)
    for background in running:
        background.stop(max(0.0, until - time.monotonic()))
