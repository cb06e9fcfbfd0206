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
        """What is in progress, and what of it cannot be saved; None: environment and current TensorDict are all."""
        return {"row_ids": None}, [f"{self._env}: steps are in progress in it, and its environments are reset"]

    def load_state_dict(self, state_dict: Mapping[str, Any], *, ids_are_free: bool) -> None:
        """Go on from a saved state."""
        self._path.forget()


class Stepped(NamedTuple):
    """A step of an environment that has ended.

    Attributes:
        env_index: of the environment.
        frame: the step, ``[]``.
        root: what the next one is taken from, ``[]``.
        over: whether its trajectory ends with it.
        reward: the sum of its rewards.
    """

    env_index: int
    frame: TensorDictBase
    root: TensorDictBase
    over: bool
    reward: float


class PoolSteps:
    """Steps of the environments of a pool: a policy acts on those that are ready.

    Args:
        parts: of the path.
        env: the pool, each of its environments of batch size ``[]``, or ``[1]``.
        call: calls the policy.
        fresh_outputs: whether its outputs are new tensors at each call.
    """

    def __init__(self, parts: PathParts, env: AsyncEnvPool, call: Call, *, fresh_outputs: bool) -> None:
        options, devices = parts.options, parts.devices
        self.env = env
        self._stamp = parts.stamp if options.track_policy_version else None
        self._move_back = stages.mover(devices.env if devices.cast_to_env else None, parts.syncs.env)
        self._policy = stages.build_act(
            call,
            stages.mover(devices.policy if devices.cast_to_policy else None, parts.syncs.policy),
            stages.action_check(env),
            fresh_outputs=fresh_outputs,
            stale=stages.stale_actions(env, parts.acting.policy),
        )

    def send(self, roots: Mapping[int, TensorDictBase], ids: Mapping[int, int]) -> None:
        """Let environments step.

        Args:
            roots: what the steps are taken from, ``[]``, by index of the environment.
            ids: of their trajectories.
        """
        ready = sorted(roots)
        rows = [roots[index].exclude(INDEX) for index in ready]
        for index, row in zip(ready, rows, strict=True):
            row.set(IDS, torch.tensor(ids[index], device="cpu"))
        acted = self._move_back(self._policy(LazyStackedTensorDict.maybe_dense_stack(rows, 0)))
        if self._stamp is not None:
            stamp = self._stamp()
            tag: Any = torch.tensor(stamp, device="cpu") if isinstance(stamp, int) else NonTensorData(stamp)
            made = [row.copy() for row in acted.unbind(0)]
            for row in made:
                row.set(VERSION, tag)
            acted = LazyStackedTensorDict.lazy_stack(made, 0)
        if self.env.ndim > 1:
            acted = LazyStackedTensorDict(
                *[LazyStackedTensorDict(row, stack_dim=0) for row in acted.unbind(0)], stack_dim=0
            )
        self.env.async_step_and_maybe_reset_send(acted, env_index=ready)

    def receive(self, index: int | None = None) -> list[Stepped]:
        """The steps that have ended, of one environment if that is named; waits until there is one."""
        env = self.env
        stepped, following = env.async_step_and_maybe_reset_recv(env_index=None if index is None else [index])
        ends = end_of_trajectory(stepped.get("next"), env.done_groups, env.ndim).reshape(-1).tolist()
        found = []
        for frame, root, over in zip(stepped.unbind(0), following.unbind(0), ends, strict=True):
            place, frame = first_index(frame.get(INDEX)), frame.exclude(INDEX)
            if env.ndim > 1:
                frame, root = frame[0].copy(), root[0]
            reward = sum(float(frame.get(("next", key)).sum()) for key in env.reward_keys)
            found.append(Stepped(place, frame, root, over, reward))
        return found


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
        self.cursor = _Restarts(self, env)
        self._env, self._ids, self._storing = env, parts.ids, parts.devices.storing
        self._steps = PoolSteps(parts, env, call, fresh_outputs=fresh_outputs)
        self._delivers_whole = parts.options.delivers_whole
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
        """Whether there is a current TensorDict."""
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
        """Drop the current TensorDict for good: what it came from has changed."""
        self._drain()
        self.current = None

    def _drain(self) -> None:
        """Wait for steps that are in progress; nobody gets them."""
        env = self._env
        while env.busy:
            with suppress(EnvError):  # of an environment that is reset next
                env.async_step_and_maybe_reset_recv(env_index=env.busy[:1])

    def reset(self, **kwargs: Any) -> None:
        """Reset all environments; trajectory ids are to be set next."""
        self._drain()
        self._row.clear()
        self._begin(range(self._env.num_envs), list(self._env.reset(**kwargs).unbind(0)))
        self._started = True

    def reset_some(self, marked: torch.Tensor, **kwargs: Any) -> None:
        """Reset where ``marked``, bool ``[*env]``, says; the other environments go on."""
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
        """Give each environment the id, int64 ``[*env]``, of the trajectory that it is in."""
        self._id = ids.reshape(-1).tolist()

    def replace_ids(self, ended: torch.Tensor) -> None:
        """Give fresh ids where ``ended``, bool ``[*env]``, says."""
        for index in ended.reshape(-1).nonzero().reshape(-1).tolist():
            self._id[index] = int(self._ids.take(1)[0])

    # A rollout ----------------------------------------------------------------------------------------

    def conform(self, outputs: TensorDictBase | None) -> None:
        """Give batches of random actions the entries that the policy writes, zero where no action is."""

    def begin(self, *, random: bool) -> None:
        """Open a batch, with random actions or with the policy's."""
        if random:
            raise NotNative("environments of a pool take no random actions one by one")
        self._batch = []

    def act(self, t: int) -> None:
        """See :meth:`Path.act`: on all environments that are ready."""
        if not self._roots:
            return
        self._steps.send(self._roots, dict(enumerate(self._id)))
        self._roots.clear()

    def step(self, t: int) -> None:
        """See :meth:`Path.step`: steps that have ended; waits until there is a frame to record."""
        while not self._row:
            self.act(t)
            for each in self._steps.receive():
                self._take(each)

    def _take(self, stepped: Stepped) -> None:
        index, over = stepped.env_index, stepped.over
        total, length = self._totals[index]
        total += stepped.reward
        ended = (total, length + 1) if over else None
        self._keep(index, PoolFrame(stepped.frame, self._id[index], index, ended))
        self._totals[index] = (0.0, 0) if over else (total, length + 1)
        self._roots[index] = stepped.root
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
        """The frame goes into the batch's memory."""
        self._batch.append(self._row.popleft())

    def frame(self, t: int) -> TensorDictBase:
        """The frame ``[*env]`` of time ``t``, which was recorded last, as the batch will hold it."""
        return self._batch[t].td

    def finish(self, steps: int) -> TensorDictBase:
        """Close the batch after ``steps`` steps; times that were not taken are zero, their ids -1."""
        taken, self._batch = self._batch, []
        self.frames_taken = len(taken)
        self._ended = [each.ended for each in taken if each.ended is not None]
        batch = stack_frames([each.td for each in taken], 0)
        return batch if self._storing is None else batch.to(self._storing)

    def ended(self) -> Sequence[tuple[float, int]]:
        """Returns and lengths of the trajectories that ended in the last batch; None: the batch shows them."""
        return self._ended

    # State --------------------------------------------------------------------------------------------

    def row_ids(self) -> NDArray[Any] | None:
        """See :meth:`Path.row_ids`."""
        return np.asarray([self._row[0].id if self._row else -1], np.int64) if self._started else None

    def stats(self) -> dict[str, Any]:
        """What it adds to ``stats()`` of a collector."""
        return {"turns_ahead": len(self._row) + sum(map(len, self._held)), "environments_busy": len(self._env.busy)}
