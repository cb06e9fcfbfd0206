"""PoolPath: a pool of environments and a policy on TensorDicts; frames come in the order in which they end."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDictBase

from rollwright.collectors.core import DataCursor, Path
from rollwright.collectors.rollout.paths import stages
from rollwright.collectors.rollout.paths.parts import PathParts
from rollwright.collectors.rollout.paths.stages import IDS, VERSION
from rollwright.data.layout import end_of_trajectory, stack_frames
from rollwright.envs.batched.async_halves import INDEX, first_index
from rollwright.envs.batched.async_pool import AsyncEnvPool
from rollwright.errors import EnvError, NotNative
from rollwright.modules.signature import Call


class PoolFrame(NamedTuple):
    """A frame that is ready for a batch.

    Attributes:
        td: the frame, of batch size ``[]``.
        id: of its trajectory.
        env_index: of its environment.
        ended: return and length of the trajectory, with its last frame; None before.
    """

    td: TensorDictBase
    id: int
    env_index: int
    ended: tuple[float, int] | None


class _Restarts(DataCursor):
    """Environments that go by themselves are not saved: they are reset."""

    def __init__(self, path: PoolPath, env: AsyncEnvPool) -> None:
        self._path, self._env = path, env

    def state_dict(self) -> tuple[dict[str, Any], list[str]]:
        """See :meth:`DataCursor.state_dict`."""
        return {"row_ids": None}, [f"{self._env}: steps are in progress in it, and its environments are reset"]

    def load_state_dict(self, state_dict: Mapping[str, Any], *, ids_are_free: bool) -> None:
        """See :meth:`DataCursor.load_state_dict`."""
        self._path.forget()


class PoolPath(Path):
    """Lets each environment of a pool go by itself: the policy acts on those that are ready while others step.

    A batch has one row, ``[N]``: frames in the order in which their steps have ended; where whole trajectories are
    delivered, in the order in which these have ended. Frames beyond a batch are kept for the next one.

    Args:
        parts: what it is made of.
        env: the pool, each of its environments of batch size ``[]``.
        call: calls the policy.
        fresh_outputs: whether its outputs are new tensors at each call.
    """

    def __init__(self, parts: PathParts, env: AsyncEnvPool, call: Call, *, fresh_outputs: bool) -> None:
        self.how = {
            "env": "plain: a pool whose environments go by themselves",
            "policy": "plain: acts on the environments that are ready",
        }
        options, devices = parts.options, parts.devices
        self.cursor = _Restarts(self, env)
        self._env, self._ids, self._storing = env, parts.ids, devices.storing
        self._delivers_whole = options.delivers_whole
        self._stamp = parts.stamp if options.track_policy_version else None
        self._move_back = stages.mover(devices.env if devices.cast_to_env else None, parts.syncs.env)
        self._policy = stages.build_act(
            call,
            stages.mover(devices.policy if devices.cast_to_policy else None, parts.syncs.policy),
            stages.action_check(env),
            fresh_outputs=fresh_outputs,
            stale=stages.stale_actions(env, parts.acting.policy),
        )
        self._roots: dict[int, TensorDictBase] = {}  # of environments that wait for an action
        self._id = [-1] * env.num_envs
        self._totals = [(0.0, 0)] * env.num_envs  # return and length so far
        self._held: list[list[PoolFrame]] = [[] for _ in range(env.num_envs)]
        self._row: deque[PoolFrame] = deque()
        self._batch: list[PoolFrame] = []
        self._ended: list[tuple[float, int]] = []
        self._started = False

    # The current TensorDict ----------------------------------------------------------------------

    @property
    def started(self) -> bool:
        """See :attr:`Path.started`."""
        return self._started

    @property
    def current(self) -> TensorDictBase | None:
        """See :attr:`Path.current`: None; each environment has one of its own."""
        return None

    @current.setter
    def current(self, current: TensorDictBase | None) -> None:
        self._started = False
        self._roots.clear()
        self._row.clear()
        self._batch = []

    def forget(self) -> None:
        """See :meth:`Path.forget`."""
        self._drain()
        self.current = None

    def _drain(self) -> None:
        """Wait for steps that are in progress; nobody gets them."""
        env = self._env
        while env.busy:
            with suppress(EnvError):  # of an environment that is reset next
                env.async_step_and_maybe_reset_recv(env_index=env.busy[:1])

    def reset(self, **kwargs: Any) -> None:
        """See :meth:`Path.reset`."""
        self._drain()
        self._row.clear()
        self._begin(range(self._env.num_envs), list(self._env.reset(**kwargs).unbind(0)))
        self._started = True

    def reset_some(self, marked: torch.Tensor, **kwargs: Any) -> None:
        """See :meth:`Path.reset_some`."""
        chosen = marked.reshape(-1).nonzero().reshape(-1).tolist()
        if not chosen:
            return
        for index in set(chosen) & set(self._env.busy):
            with suppress(EnvError):
                self._env.async_step_and_maybe_reset_recv(env_index=[index])
        self._env.async_reset_send(env_index=chosen, **kwargs)
        self._begin(chosen, list(self._env.async_reset_recv(env_index=chosen).unbind(0)))

    def _begin(self, chosen: Iterable[int], roots: Sequence[TensorDictBase]) -> None:
        for index, root in zip(chosen, roots, strict=True):
            self._roots[index] = root
            self._totals[index], self._held[index] = (0.0, 0), []

    def set_ids(self, ids: torch.Tensor) -> None:
        """See :meth:`Path.set_ids`."""
        self._id = ids.reshape(-1).tolist()

    def replace_ids(self, ended: torch.Tensor) -> None:
        """See :meth:`Path.replace_ids`."""
        for index in ended.reshape(-1).nonzero().reshape(-1).tolist():
            self._id[index] = int(self._ids.take(1)[0])

    # A rollout ----------------------------------------------------------------------------------------

    def conform(self, outputs: TensorDictBase | None) -> None:
        """See :meth:`Path.conform`."""

    def begin(self, *, random: bool) -> None:
        """See :meth:`Path.begin`."""
        if random:
            raise NotNative("environments of a pool take no random actions one by one")
        self._batch = []

    def act(self, t: int) -> None:
        """See :meth:`Path.act`: on all environments that are ready."""
        if not self._roots:
            return
        ready = sorted(self._roots)
        rows = [self._roots[index].exclude(INDEX) for index in ready]
        for index, row in zip(ready, rows, strict=True):
            row.set(IDS, torch.tensor(self._id[index], device="cpu"))
        current = LazyStackedTensorDict.maybe_dense_stack(rows, 0)
        acted = self._move_back(self._policy(current))
        if self._stamp is not None:
            stamp = self._stamp()
            tag: Any = torch.tensor(stamp, device="cpu") if isinstance(stamp, int) else NonTensorData(stamp)
            made = [row.copy() for row in acted.unbind(0)]
            for row in made:
                row.set(VERSION, tag)
            acted = LazyStackedTensorDict.lazy_stack(made, 0)
        self._env.async_step_and_maybe_reset_send(self._sent(acted), env_index=ready)
        self._roots.clear()

    def _sent(self, acted: TensorDictBase) -> TensorDictBase:
        """What environments are sent, of a current TensorDict ``[n]``."""
        return acted

    def step(self, t: int) -> None:
        """See :meth:`Path.step`: steps that have ended; waits until there is a frame to record."""
        while not self._row:
            self.act(t)
            self._receive()

    def _receive(self, index: int | None = None) -> None:
        """Take the steps that have ended; of one environment, if that is named."""
        chosen = None if index is None else [index]
        stepped, following = self._env.async_step_and_maybe_reset_recv(env_index=chosen)
        ends = end_of_trajectory(stepped.get("next"), self._env.done_groups, self._env.ndim).reshape(-1).tolist()
        for frame, root, over in zip(stepped.unbind(0), following.unbind(0), ends, strict=True):
            self._take(first_index(frame.get(INDEX)), frame.exclude(INDEX), root, over)

    def _take(self, index: int, frame: TensorDictBase, root: TensorDictBase, over: bool) -> None:
        """A step has ended.

        Args:
            index: of the environment.
            frame: the step, ``[]``.
            root: what the next one is taken from, ``[]``.
            over: whether its trajectory ends with it.
        """
        total, length = self._totals[index]
        total += sum(float(frame.get(("next", key)).sum()) for key in self._env.reward_keys)
        ended = (total, length + 1) if over else None
        self._keep(index, PoolFrame(frame, self._id[index], index, ended))
        self._totals[index] = (0.0, 0) if over else (total, length + 1)
        self._roots[index] = root
        if over:
            self._id[index] = int(self._ids.take(1)[0])

    def _keep(self, index: int, frame: PoolFrame) -> None:
        if not self._delivers_whole:
            self._row.append(frame)
            return
        self._held[index].append(frame)
        if frame.ended is not None:
            self._row.extend(self._held[index])
            self._held[index] = []

    def record(self, t: int) -> None:
        """See :meth:`Path.record`."""
        self._batch.append(self._row.popleft())

    def frame(self, t: int) -> TensorDictBase:
        """See :meth:`Path.frame`."""
        return self._batch[t].td

    def finish(self, steps: int) -> TensorDictBase:
        """See :meth:`Path.finish`."""
        taken, self._batch = self._batch, []
        self.frames_taken = len(taken)
        self._ended = [each.ended for each in taken if each.ended is not None]
        batch = stack_frames([each.td for each in taken], 0)
        return batch if self._storing is None else batch.to(self._storing)

    def ended(self) -> Sequence[tuple[float, int]]:
        """See :meth:`Path.ended`."""
        return self._ended

    # State --------------------------------------------------------------------------------------------

    def row_ids(self) -> NDArray[Any] | None:
        """See :meth:`Path.row_ids`."""
        return np.asarray([self._row[0].id if self._row else -1], np.int64) if self._started else None

    def stats(self) -> dict[str, Any]:
        """See :meth:`Path.stats`."""
        return {"turns_ahead": len(self._row) + sum(map(len, self._held)), "environments_busy": len(self._env.busy)}
