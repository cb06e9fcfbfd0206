"""Transforms that change how episodes begin, go on and end."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from rollwright._keys import NestedKey, as_keys, leaf_keys, unravel, without
from rollwright.data.layout import deciding_groups, end_of_trajectory
from rollwright.data.specs import Bounded, Composite, TensorSpec, Unbounded
from rollwright.envs._results import Masks, merge_reset
from rollwright.envs.arrays import STEPPED, ArrayEnv, ArrayTransform, Values
from rollwright.envs.base import EnvBase
from rollwright.envs.columns import Columns
from rollwright.envs.transforms.actions import ActionMask
from rollwright.envs.transforms.base import Transform, map_spec
from rollwright.envs.transforms.bookkeeping import Adding, Cutting
from rollwright.errors import EnvError, NotNative


class InnerEnv:
    """The environment that a transform follows: the base environment, and the transforms before this one.

    :attr:`Transform.parent` has the same specs, and clones of those transforms; here they act themselves, so that
    what they keep (past frames, statistics) follows each step.

    Args:
        transform: the one that takes steps.

    Raises:
        RuntimeError: it is on no environment.
    """

    def __init__(self, transform: Transform) -> None:
        env, parent = transform.container, transform.parent
        if env is None or parent is None:
            name = type(transform).__name__
            raise RuntimeError(f"{name} steps an environment and is on none. Use TransformedEnv(env, {name}(...)).")
        self.base_env: EnvBase = env.base_env
        self.parent: EnvBase = parent
        self._before = transform.transforms_before()

    def step(self, given: TensorDictBase) -> TensorDictBase:
        """What comes below ``"next"``; ``given`` is what the base environment is given."""
        outcome = self.base_env.step_outcome(given)
        preset = given.get("next", None)
        if preset is not None:
            outcome.update(preset.exclude(*leaf_keys(outcome)))
        for transform in self._before:
            outcome = transform.transform_step(given, outcome)
        return outcome

    def random_step(self, root: TensorDictBase) -> TensorDictBase:
        """What comes below ``"next"`` after a random action, which is written into ``root``."""
        if any(isinstance(transform, ActionMask) for transform in self._before):
            root.update(self._masked_actions().rand())
        else:
            self.parent.rand_action(root)
        given = root.clone(False)
        for transform in reversed(self._before):
            given = transform.inv(given)
        return self.step(given)

    def _masked_actions(self) -> Composite:
        """The spec of the actions that are allowed now, which the clones of :attr:`parent` do not follow."""
        spec = self.base_env.full_action_spec.clone()
        for transform in self._before:
            spec = transform.transform_action_spec(spec)
        return spec

    def reset(self) -> TensorDictBase:
        """First data of a new trajectory."""
        fresh = self.base_env.reset_outcome(None)
        for transform in self._before:
            fresh = transform.transform_reset(fresh.empty(), fresh)
        return fresh

    def carried_on(self, root: TensorDictBase, outcome: TensorDictBase) -> TensorDictBase:
        """The root of the step after the one that began at ``root``."""
        actions = self.parent.action_keys
        return without(self.parent.step_mdp(root.clone(False).set("next", outcome)), *actions)

    def ended(self, outcome: TensorDictBase) -> torch.Tensor:
        """Where a trajectory ended, bool ``[*batch]``."""
        return end_of_trajectory(outcome, deciding_groups(self.parent.done_groups), self.parent.ndim)


class EndOfLifeTransform(Adding):
    """Marks the steps in which a life is lost, or the trajectory ends.

    Adds two observations: ``eol_key``, bool of the shape of ``done_key``, and ``lives_key``, int64 ``[*batch]``, the
    lives that are left. No flag is set, so that environments are reset when the game is over. Losses read the mark as
    their flag: ``loss.set_keys(done="end-of-life", terminated="end-of-life")``, which :meth:`register_keys` does.

    Lives are read from the environment itself, after each step. Around a ``ParallelEnv`` that is a call to its
    processes: put the transform on each environment inside. Vector environments of gymnasium have no lives to read.

    Args:
        eol_key: where the mark is written.
        lives_key: where the lives are written.
        done_key: the flag that says when a trajectory ends.
        eol_attribute: attribute of the gymnasium environment, or of its parts, that is the number of lives or returns
            it.

    Example:
        >>> from rollwright.envs import GymEnv, TransformedEnv
        >>> env = TransformedEnv(GymEnv("ALE/Breakout-v5", obs_type="ram"), EndOfLifeTransform())
        >>> env.reset()["lives"]
        tensor(5)
    """

    def __init__(
        self,
        eol_key: NestedKey = "end-of-life",
        lives_key: NestedKey = "lives",
        done_key: NestedKey = "done",
        eol_attribute: str = "unwrapped.ale.lives",
    ) -> None:
        super().__init__([done_key], [eol_key, lives_key])
        (self.eol_key,), (self.lives_key,), (self.done_key,) = as_keys(eol_key), as_keys(lives_key), as_keys(done_key)
        if not isinstance(eol_attribute, str) or not eol_attribute:
            raise TypeError(f"eol_attribute: expected a name such as 'unwrapped.ale.lives', got {eol_attribute!r}.")
        self.eol_attribute = eol_attribute.split(".")

    def _lives(self) -> Any:
        """The lives of the environment, or a list of those of each."""
        env = self.container
        if env is None:
            raise RuntimeError("EndOfLifeTransform needs an environment: TransformedEnv(env, EndOfLifeTransform()).")
        try:
            return _found(env.base_env, self.eol_attribute)
        except AttributeError as error:
            raise EnvError(
                f"EndOfLifeTransform: {env.base_env} has no attribute {'.'.join(self.eol_attribute)!r}: {error}. Put "
                "the transform on an Atari environment (on each one inside a batch of them), or pass eol_attribute=."
            ) from error

    def _counted(self, kind: Any) -> Any:
        lives = torch.as_tensor(self._lives(), dtype=torch.int64, device=kind.device or self._flag_spec().device)
        return kind.whole(lives.reshape(kind.batch))

    resets_by_mask = False

    def _change(self, kind: Any, root: Columns, out: Columns) -> None:
        lives, done = self._counted(kind), self._read(out, self.done_key)
        lost = self._carried(root, self.lives_key) > lives
        out[self.eol_key] = lost.reshape(lost.shape + (1,) * (np.ndim(done) - lost.ndim)) | done
        out[self.lives_key] = lives

    def _begin(self, kind: Any, given: Columns, fresh: Columns) -> None:
        fresh[self.eol_key], fresh[self.lives_key] = kind.full(self._flag_spec(), False), self._counted(kind)

    def _flag_spec(self) -> Any:
        parent = self.parent
        flags = None if parent is None else parent.full_done_spec
        if flags is None or self.done_key not in flags:
            names = None if flags is None else list(flags.keys(True, True))
            raise KeyError(f"EndOfLifeTransform: done_key={self.done_key!r} is none of the flags {names}. Name one.")
        return flags[self.done_key]

    def on_arrays(self, env: ArrayEnv) -> ArrayTransform:
        """The form of this transform for steps on NumPy arrays; see :meth:`Transform.on_arrays`."""
        if self.done_key != "done":
            raise NotNative(f"EndOfLifeTransform reads {self.done_key!r}")
        parent = self.parent
        if parent is None or tuple(parent.batch_size) != env.batch:
            raise NotNative("EndOfLifeTransform reads the lives of all environments at once")
        return super().on_arrays(env).replace(reads=[self.lives_key], reads_env=True)

    def _added(self, batch: torch.Size) -> dict[NestedKey, TensorSpec]:
        flag = self._flag_spec()
        return {self.eol_key: flag, self.lives_key: Unbounded(batch, device=flag.device, dtype=torch.int64)}

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Announce the mark and the lives."""
        self._lives()
        return super().transform_observation_spec(observation_spec)

    def transform_state_spec(self, state_spec: Composite) -> Composite:
        """A step reads the lives."""
        state_spec = state_spec.clone()
        state_spec.set(self.lives_key, Unbounded(state_spec.shape, device=self._flag_spec().device, dtype=torch.int64))
        return state_spec

    def register_keys(self, loss_or_advantage: Any) -> None:
        """Let a loss, or what estimates its values, read the mark as its flag."""
        loss_or_advantage.set_keys(done=self.eol_key, terminated=self.eol_key)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """An error: there is no environment to ask in data."""
        raise RuntimeError("EndOfLifeTransform needs an environment: TransformedEnv(env, EndOfLifeTransform()).")

    def __repr__(self) -> str:
        return f"EndOfLifeTransform(eol_key={self.eol_key!r}, lives_key={self.lives_key!r})"


def _found(value: Any, names: list[str]) -> Any:
    """The attribute of an attribute..., called if it can be; of a list, of each."""
    for name in names:
        value = [getattr(each, name) for each in value] if isinstance(value, list) else getattr(value, name)
    if isinstance(value, list):
        return [each() if callable(each) else each for each in value]
    return value() if callable(value) else value


_TRIALS = 11


class NoopResetEnv(Transform):
    """Takes some random actions after each reset, so that trajectories begin in different states.

    The number of actions and the actions are drawn from torch's generator. Transforms before it follow these steps (a
    ``StepCounter`` counts them), those after it do not. Where a trajectory ends meanwhile, another one is begun.

    It works on one environment: put it on each one inside a batch, as in
    ``SerialEnv(8, lambda: TransformedEnv(GymEnv(...), NoopResetEnv()))``.

    Args:
        noops: number of actions; with ``random`` there are fewer: 0 to ``noops - 1``.
        random: draw their number at each reset.

    Raises:
        ValueError: ``noops`` is no such number.
        EnvError: the trajectory ended early in eleven trials; or the environment is a batch.

    Example:
        >>> from rollwright.envs import TransformedEnv
        >>> from rollwright.testing.mocking_classes import CountingEnv
        >>> env = TransformedEnv(CountingEnv(max_steps=1000), NoopResetEnv(3, random=False))
        >>> env.reset()["observation"].shape
        torch.Size([1])
    """

    def __init__(self, noops: int = 30, random: bool = True) -> None:
        super().__init__()
        least = 1 if random else 0
        if not isinstance(noops, int) or isinstance(noops, bool) or noops < least:
            raise ValueError(f"noops: expected an integer of at least {least}, got {noops!r}.")
        self.noops = noops
        self.random = bool(random)

    def _reset(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase) -> TensorDictBase:
        inner = InnerEnv(self)
        self._check_single(inner.parent.numel())
        count = int(torch.randint(self.noops, (1,), device="cpu")) if self.random else self.noops
        known = without(tensordict, "next", *inner.parent.reset_keys)
        for _ in range(_TRIALS):
            root = self._act(inner, known.clone(False).update(tensordict_reset), count)
            if root is not None:
                return tensordict_reset.update(root.select(*leaf_keys(tensordict_reset), strict=False))
            tensordict_reset = inner.reset()
        raise EnvError(
            f"NoopResetEnv: {_TRIALS} trajectories ended within {count} random actions, which are to come before "
            "the first step. Pass a smaller noops."
        )

    def _act(self, inner: InnerEnv, root: TensorDictBase, count: int) -> TensorDictBase | None:
        """The root after ``count`` random actions; None if the trajectory ends."""
        for _ in range(count):
            outcome = inner.random_step(root)
            if bool(inner.ended(outcome).any()):
                return None
            root = inner.carried_on(root, outcome)
        return root

    def _check_single(self, number: int) -> None:
        if number > 1:
            raise EnvError(
                f"NoopResetEnv: expected a single environment, got {number}, which are not reset together. Put it on "
                "each of them: SerialEnv(n, lambda: TransformedEnv(env, NoopResetEnv(...))), or ParallelEnv."
            )

    def on_arrays(self, env: ArrayEnv) -> ArrayTransform:
        """The form of this transform for steps on NumPy arrays; see :meth:`Transform.on_arrays`."""
        entries = dict(env.entries)

        def reset(fresh: Values) -> None:
            td = TensorDict({}, batch_size=env.batch)
            for key, entry in entries.items():
                td.set(key, torch.from_numpy(np.asarray(fresh[key], entry.dtype).reshape(entry.shape).copy()))
            td = self._reset(td.empty(), td)
            for key, entry in entries.items():
                value = td.get(key).numpy()
                fresh[key] = value[..., 0][()] if entry.column else value

        return ArrayTransform({}, [], lambda root, out: None, reset)

    def transform_output_spec(self, output_spec: Composite) -> Composite:
        """The same.

        Raises:
            EnvError: the environment is a batch.
        """
        self._check_single(output_spec.shape.numel())
        return output_spec

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """An error: there is no environment to step in data."""
        raise RuntimeError("NoopResetEnv steps an environment: TransformedEnv(env, NoopResetEnv(...)).")

    def __repr__(self) -> str:
        return f"NoopResetEnv(noops={self.noops}, random={self.random})"


class FrameSkipTransform(Transform):
    """Repeats each action, and sums the rewards.

    Observations and flags are those of the last frame taken. A trajectory that ends inside takes no more frames: its
    last observation and its flags are the true ones. In a batch the other rows go on, and those that ended keep what
    they had; in a ``SerialEnv`` or ``ParallelEnv`` they are not stepped. In a batch of your own they are, and the
    result is dropped.

    Transforms before it are applied to each frame, each time from the data that the step began from: a ``StepCounter``
    before it counts one a step. Put those that sum up (``RewardSum``) after it.

    Args:
        frame_skip: number of frames of a step, in all.

    Raises:
        ValueError: ``frame_skip`` is no integer of at least 1.

    Example:
        >>> from rollwright.envs import StepCounter, TransformedEnv
        >>> from rollwright.testing.mocking_classes import CountingEnv
        >>> env = TransformedEnv(CountingEnv(max_steps=5), FrameSkipTransform(3))
        >>> env.rollout(9, lambda td: td.set("action", torch.ones(1)))["next", "observation"].flatten()
        tensor([3, 6], dtype=torch.int32)
    """

    def __init__(self, frame_skip: int = 1) -> None:
        super().__init__()
        if not isinstance(frame_skip, int) or isinstance(frame_skip, bool) or frame_skip < 1:
            raise ValueError(f"frame_skip: expected an integer of at least 1, got {frame_skip!r}.")
        self.frame_skip = frame_skip

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        if self.frame_skip == 1:
            return next_tensordict
        inner = InnerEnv(self)
        for _ in range(self.frame_skip - 1):
            ended = inner.ended(next_tensordict)
            if bool(ended.all()):
                break
            given = tensordict.clone(False).set(STEPPED, ~ended) if ended.ndim and bool(ended.any()) else tensordict
            outcome = inner.step(given)
            for key in inner.parent.reward_keys:
                outcome.set(key, self._read(next_tensordict, key) + self._read(outcome, key))
            masks: Masks | None = {(): ~ended} if bool(ended.any()) else None
            next_tensordict = merge_reset(inner.parent, next_tensordict, outcome, masks)
        return next_tensordict

    def on_arrays(self, env: ArrayEnv) -> ArrayTransform:
        """The form of this transform for steps on NumPy arrays; see :meth:`Transform.on_arrays`."""
        again, rewards, last = env.stepper(), list(env.rewards), self.frame_skip - 1

        def step(root: Values, out: Values) -> None:
            for _ in range(last):
                ended = out["done"]
                if np.all(ended):
                    break
                frame = again({**root, STEPPED: ~ended} if np.any(ended) else root)
                for key in rewards:
                    frame[key] = out[key] + frame[key]
                if np.any(ended):
                    _keep(ended, out, frame)
                out.update(frame)

        return ArrayTransform({}, [], step, _nothing, reads_env=True)

    def transform_reward_spec(self, reward_spec: Composite) -> Composite:
        """Rewards, with the bounds of sums."""
        pairs = [(unravel(key), unravel(key)) for key in reward_spec.leaves()]
        return map_spec(reward_spec, pairs, self._summed) if self.frame_skip > 1 else reward_spec

    def _summed(self, spec: TensorSpec) -> TensorSpec:
        if not isinstance(spec, Bounded):
            return Unbounded(spec.shape, device=spec.device, dtype=spec.dtype or torch.float32)
        low, high = (
            torch.minimum(spec.low, spec.low * self.frame_skip),
            torch.maximum(spec.high, spec.high * self.frame_skip),
        )
        return Bounded(low, high, spec.shape, spec.device, spec.dtype)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """An error: there is no environment to step in data."""
        raise RuntimeError("FrameSkipTransform steps an environment: TransformedEnv(env, FrameSkipTransform(...)).")

    def __repr__(self) -> str:
        return f"FrameSkipTransform(frame_skip={self.frame_skip})"


def _nothing(fresh: Values) -> None:
    """A reset changes nothing."""


def _keep(ended: Any, out: Values, frame: Values) -> None:
    """Put what ``out`` holds in rows that ended into ``frame``."""
    for key, value in frame.items():
        if key in out:
            rows = ended.reshape(ended.shape + (1,) * (np.ndim(value) - ended.ndim))
            frame[key] = np.where(rows, out[key], value)


class RandomTruncationTransform(Cutting):
    """Cuts trajectories at lengths that it draws, so that environments that began together do not end together.

    The first trajectory of each environment is cut after 1 to ``max_horizon`` steps. A later one is cut after
    ``min_horizon`` to ``max_horizon`` steps with a probability of ``prob``, and after ``max_horizon`` otherwise.
    Lengths are drawn from torch's generator, evenly. They are buffers, part of ``state_dict()``.

    It reads the count of a ``StepCounter`` before it, and sets ``truncated`` and ``done`` beside that.

    Args:
        min_horizon: least length of later trajectories.
        max_horizon: greatest length, as a rule the ``max_episode_steps`` of the environment.
        prob: of cutting a later trajectory at random.
        first_episode_prob: the same for the second trajectory; None: ``prob``.
        step_count_key: name of the count.
        truncated_key: name of the flag that is set.
        done_key: ``"done"``.

    Raises:
        ValueError: a number is out of range.
        KeyError: there is no count, once specs are asked for.

    Example:
        >>> from rollwright.envs import Compose, GymEnv, StepCounter, TransformedEnv
        >>> cut = RandomTruncationTransform(min_horizon=5, max_horizon=20)
        >>> env = TransformedEnv(GymEnv("Pendulum-v1"), Compose(StepCounter(), cut))
        >>> len(env.rollout(100)) <= 20
        True
    """

    def __init__(
        self,
        min_horizon: int,
        max_horizon: int,
        prob: float = 0.0,
        first_episode_prob: float | None = None,
        *,
        step_count_key: str = "step_count",
        truncated_key: str = "truncated",
        done_key: str = "done",
    ) -> None:
        for name, number in (("min_horizon", min_horizon), ("max_horizon", max_horizon)):
            if not isinstance(number, int) or isinstance(number, bool) or number < 1:
                raise ValueError(f"{name}: expected an integer of at least 1, got {number!r}.")
        if min_horizon > max_horizon:
            raise ValueError(f"min_horizon: expected at most max_horizon={max_horizon}, got {min_horizon}.")
        first = prob if first_episode_prob is None else first_episode_prob
        for name, share in (("prob", prob), ("first_episode_prob", first)):
            if not 0 <= share <= 1:
                raise ValueError(f"{name}: expected a probability from 0 to 1, got {share!r}.")
        if done_key != "done":
            raise ValueError(f"done_key: expected 'done', by which environments are reset, got {done_key!r}.")
        if not isinstance(step_count_key, str):
            raise TypeError(
                f"step_count_key: expected a plain name, beside each group of flags, got {step_count_key!r}."
            )
        super().__init__(step_count_key, truncated_key, True)
        self.min_horizon, self.max_horizon = min_horizon, max_horizon
        self.prob, self.first_episode_prob = prob, first
        self.step_count_key, self.done_key = step_count_key, done_key
        self.register_buffer("horizons_0", None)
        self.register_buffer("first_0", None)

    # Lengths ----------------------------------------------------------------------------------

    def _draw(self, index: int, shape: torch.Size, device: torch.device | None, rows: torch.Tensor | None) -> None:
        """New lengths for trajectories of a group that begin in ``rows``, bool of ``shape``; None: in all."""
        horizons, first = self._buffers.get(f"horizons_{index}"), self._buffers.get(f"first_{index}")
        if horizons is None or first is None or horizons.shape != shape:
            self._buffers[f"horizons_{index}"] = torch.randint(1, self.max_horizon + 1, shape, device=device)
            self._buffers[f"first_{index}"] = torch.ones(shape, dtype=torch.bool, device=device)
            return
        rows = torch.ones_like(first) if rows is None else rows.reshape(shape)
        number = int(rows.sum())
        if not number:
            return
        drawn = torch.full((number,), self.max_horizon, device=device)
        if self.prob or self.first_episode_prob:
            lengths = torch.randint(self.min_horizon, self.max_horizon + 1, (number,), device=device)
            shares = torch.where(first[rows], self.first_episode_prob, self.prob)
            drawn = torch.where(torch.rand(number, device=device) > shares, drawn, lengths)
        self._buffers[f"horizons_{index}"] = horizons.masked_scatter(rows, drawn)
        self._buffers[f"first_{index}"] = first & ~rows

    def _horizons(self, index: int) -> torch.Tensor:
        horizons = self._buffers.get(f"horizons_{index}")
        if horizons is None:
            raise RuntimeError("RandomTruncationTransform has drawn no lengths yet. Reset the environment first.")
        return horizons

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for key in state_dict:  # of further groups of flags, whose number the environment decides
            name = key.removeprefix(prefix)
            if key.startswith(prefix) and name.startswith(("horizons_", "first_")):
                self._buffers.setdefault(name, None)
        super()._load_from_state_dict(state_dict, prefix, *args)

    # Data -------------------------------------------------------------------------------------

    resets_by_mask = False

    def _change(self, kind: Any, root: Columns, out: Columns) -> None:
        for index, (group, key) in enumerate(self._entries):
            self._cut(out, group, self._read(out, key) >= kind.column(self._horizons(index)))

    def _begin(self, kind: Any, given: Columns, fresh: Columns) -> None:
        for index, ((group, _), (_, flag)) in enumerate(zip(self._entries, self._beside_flags(), strict=True)):
            shape = torch.Size((*kind.batch, *flag.shape[self._batch_ndim() :]))
            self._draw(index, shape, kind.device or flag.device, given.get(group.reset, None))

    def on_arrays(self, env: ArrayEnv) -> ArrayTransform:
        """The form of this transform for steps on NumPy arrays; see :meth:`Transform.on_arrays`."""
        self._needs_all_rows(env)
        return self._on_rows(env, restarts=True)

    # Specs ------------------------------------------------------------------------------------

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """The same.

        Raises:
            KeyError: there is no count.
        """
        for key in self._keys:
            if key not in observation_spec:
                raise KeyError(
                    f"RandomTruncationTransform: there is no count {key!r}. Put StepCounter() before it, or pass "
                    "step_count_key=."
                )
        return observation_spec

    def __repr__(self) -> str:
        least, most = self.min_horizon, self.max_horizon
        return f"RandomTruncationTransform(min_horizon={least}, max_horizon={most}, prob={self.prob})"
