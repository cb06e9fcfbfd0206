"""BackgroundCore: a collector that can fill its replay buffer in a thread."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import nn

from rollwright.collectors._delivering import DeliveringCore
from rollwright.collectors.delivery.background import Background, paused_error
from rollwright.collectors.delivery.checks import buffer_of
from rollwright.collectors.rollout import policy as policies
from rollwright.collectors.rollout.policy_copies import copied_policy
from rollwright.modules import RandomPolicy

__all__ = ["BackgroundCore"]


class BackgroundCore(DeliveringCore):
    """The part of :class:`~rollwright.collectors.Collector` that starts and ends."""

    _background: Background | None = None
    _policy_target: nn.Module | None = None  # what takes new weights where that is not the policy itself
    _leave_limiter: Callable[[], None] | None = None  # takes this collector from those that the buffer's limiter asks
    _mapper: int | None = None  # thread that is inside map_fn()
    _none_to_publish = False  # whether the thread's policy has no weights that anyone could publish

    @property
    def _running(self) -> Background | None:
        """The thread that collects, if one does."""
        background = self._background
        return background if background is not None and background.running else None

    @property
    def _in_background(self) -> bool:
        """See :class:`DeliveringCore`."""
        return self._running is not None

    def start(self) -> None:
        """Collect in a thread, into the replay buffer, until ``total_frames`` are stepped or :meth:`async_shutdown`.

        The thread acts with a copy of the policy: train yours, and call :meth:`update_policy_weights_` when it is to
        act with the new weights. Of a bound method, a ``functools.partial`` or another callable object, the modules in
        it are copied and updated; a function cannot be copied, and what it reads is read as it stands (a warning says
        so where that is a module). What goes wrong in the thread is raised at the next call of :meth:`pause`,
        :meth:`update_policy_weights_`, :meth:`reset`, :meth:`state_dict`, :meth:`async_shutdown` or iteration, or by a
        ``sample()`` of the buffer that waits (its ``limiter``), once; ``stats()["background"]`` tells of it before.
        Where the buffer has a limiter, the thread waits between two batches, and ``stats()["waiting_for"]`` says so.
        Meanwhile:

        - :meth:`stats`, :meth:`pause`, :meth:`update_policy_weights_`: at any time.
        - :meth:`reset`, :meth:`set_seed`, :meth:`state_dict`, :meth:`load_state_dict`: the thread ends its batch
          between two steps, writes it, and rests until they are done.
        - iteration, :meth:`next`, :meth:`rollout`: an error.

        Raises:
            RuntimeError: there is no replay buffer, the thread runs already, or the collector was shut down.
            TypeError: the policy cannot be copied.

        Warns:
            UserWarning: modules act that could not be copied.

        Example:
            >>> import time
            >>> from rollwright.collectors import Collector
            >>> from rollwright.data import LazyTensorStorage, ReplayBuffer
            >>> from rollwright.envs import GymEnv
            >>> buffer = ReplayBuffer(storage=LazyTensorStorage(1000), batch_size=32)
            >>> collector = Collector(lambda: GymEnv("CartPole-v1"), frames_per_batch=50, replay_buffer=buffer)
            >>> collector.start()
            >>> while len(buffer) < 50:
            ...     time.sleep(0.001)
            >>> buffer.sample().shape
            torch.Size([32])
            >>> collector.async_shutdown()
        """
        self._check_open()
        self._raise_of_background()
        if self.options.replay_buffer is None:
            raise RuntimeError(
                "start: this collector has no replay buffer, and nobody would get what the thread collects. Pass "
                "replay_buffer= to it, or iterate over it."
            )
        if self._running is not None:
            raise RuntimeError("start: this collector runs already. Call async_shutdown() to end it.")
        self._take_copy_of_policy()
        interrupted = self._interrupted
        background = Background(
            self._deliver_one,
            interrupted,
            applied=lambda version: setattr(self, "_policy_version", version),
            ended=lambda: setattr(self, "_interrupted", interrupted),
            version=self._policy_version,
            exploration_type=self.options.exploration_type,
        )
        self._background, self._interrupted = background, background.checkpoint
        self._join_limiter()
        background.start()

    def _deliver_one(self) -> bool:
        if not self._delivery.ready():
            self._delivery.ended()
            return False
        if self._delivery.has_room():
            self._delivery.next()
        else:
            self._delivery.await_room(stop=self._is_to_look_again)
        return True  # what was asked of the thread while it waited may have changed what is to be delivered

    def _is_to_look_again(self) -> bool:
        return self._background is None or not self._background.goes_on() or self.completed

    def _join_limiter(self) -> None:
        """Let who samples and waits know what becomes of the thread."""
        limiter = getattr(buffer_of(self.options), "insert_limiter", None)
        if limiter is not None:
            self._part_from_limiter()
            self._leave_limiter = limiter.add_inserter(self._inserts)

    def _part_from_limiter(self) -> None:
        if self._leave_limiter is not None:
            self._leave_limiter()
            self._leave_limiter = None

    def _inserts(self) -> str:
        self._raise_of_background()
        background = self._background
        if background is None or not background.running:
            return f"{type(self).__name__} has ended, after {self._frames:,} frames"
        return f"the thread of {type(self).__name__} is in {background.doing()}"

    def _take_copy_of_policy(self) -> None:
        """Act with weights that nobody else writes."""
        policy = self.policy
        if self._policy_source is not None or isinstance(policy, RandomPolicy):
            return  # it is a copy already, or has no weights
        twin = copied_policy(policy)
        if twin.live:
            warnings.warn(
                "start: the policy is a function around a module, or uses one that cannot be copied with it; the "
                "thread acts with weights that may change in the middle of a step. Pass an nn.Module or a "
                "TensorDictModule.",
                UserWarning,
                stacklevel=3,
            )
        self._policy_source, self._policy_target = twin.source, twin.target
        self._none_to_publish = twin.source is None and not twin.live
        if twin.policy is policy:
            return
        self.policy = twin.policy
        self._policy_call = policies.wrap_policy(twin.policy, self.options, self.env)
        self._change_path()

    # While it runs ----------------------------------------------------------------------------

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Keep the thread of :meth:`start` between two steps inside the ``with`` block; it always goes on after it.

        The replay buffer stays as it is inside the block, also if ``map_fn`` is called: what would end the batch under
        way is an error there. Only :meth:`reset`, :meth:`set_seed`, :meth:`state_dict` and :meth:`load_state_dict`,
        called themselves, end that batch and write it: save the buffer after the collector's state.

        Raises:
            TimeoutError: the step under way takes longer than a minute.
        """
        background = self._background
        if background is None:
            yield
            return
        background.raise_error()
        with background.resting(between_batches=False):
            yield

    def map_fn(
        self,
        method_name: str,
        list_of_args: Sequence[Sequence[Any]] | None = None,
        list_of_kwargs: Sequence[Mapping[str, Any]] | None = None,
    ) -> Any:
        """See :meth:`BaseCollector.map_fn`.

        Raises:
            RuntimeError: inside :meth:`pause`, for what would end the batch under way.
        """
        before, self._mapper = self._mapper, threading.get_ident()
        try:
            return super().map_fn(method_name, list_of_args, list_of_kwargs)
        finally:
            self._mapper = before

    def _version_loaded(self) -> None:
        """See :class:`DeliveringCore`."""
        if self._background is not None:
            self._background.version = self._policy_version

    def _raise_of_background(self) -> None:
        """Raise, once, what went wrong in the thread."""
        if self._background is not None:
            self._background.raise_error()

    def _check_idle(self, what: str) -> None:
        background = self._background
        if background is None or background.inside:
            return
        background.raise_error()
        if background.running:
            raise RuntimeError(
                f"{what}: a thread collects for this collector, since start(). Sample from its replay buffer; call "
                "async_shutdown() to end the thread."
            )

    def _between_batches(self) -> AbstractContextManager[None]:
        background = self._background
        if background is None:
            return nullcontext()
        if not background.inside:
            background.raise_error()
            if self._mapper == threading.get_ident() and background.rests_in_a_batch:
                raise paused_error("map_fn: the method")
        return background.resting(between_batches=True)

    def _background_stats(self) -> dict[str, Any]:
        background = self._background
        waiting = {"waiting_for": self._delivery.waiting_for}
        if background is None:
            return waiting
        return {**waiting, "background": background.stats(), "policy_version_acting": self._policy_version}

    # The end ----------------------------------------------------------------------------------

    def shutdown(self, timeout: float | None = None, close_env: bool = True, raise_on_error: bool = True) -> None:
        """End the thread of :meth:`start`, close the environment, write what a profiler has recorded.

        The thread ends between two steps, and what it collected is written. May be called again.

        Args:
            timeout: seconds to wait for the thread; None: 10. A thread that is stuck in a step is left behind, and
                closes the environment when it comes back; it does not keep the interpreter from exiting.
            close_env: close the environment too.
            raise_on_error: if False, errors of the thread and of the environment's ``close`` are dropped.

        Raises:
            TimeoutError: the thread did not end in time; the message says what it is doing.
        """
        background = self._background
        if self.closed and background is None:
            return
        try:
            if background is not None:
                self._end(background, timeout, close_env, raise_on_error)
        finally:
            if self._background is None and not self.closed:
                self._close(close_env, raise_on_error)
            self.closed = True

    def _end(self, background: Background, timeout: float | None, close_env: bool, raise_on_error: bool) -> None:
        """End the thread; :attr:`_background` is None if it has ended."""
        told = self.closed
        ended = background.stop(timeout, at_end=lambda: self._close(close_env, False))
        if ended:
            self._background = None
            self._part_from_limiter()
            if raise_on_error:
                background.raise_error()
        elif raise_on_error and not told and not background.inside:
            limit = "10 s" if timeout is None else f"{timeout:g} s"
            raise TimeoutError(
                f"shutdown: waited {limit} for {background.doing()} to end. The thread is left behind, and writes what "
                "it has when the step ends. Look there for what it waits for."
            )

    def _close(self, close_env: bool, raise_on_error: bool) -> None:
        try:
            self.disable_profile()
            if close_env:
                self.env.close(raise_if_closed=False)
        except Exception:
            if raise_on_error:
                raise
