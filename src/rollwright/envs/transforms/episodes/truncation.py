"""RandomTruncationTransform: trajectories are cut at random, so that environments do not end together."""

from __future__ import annotations

from typing import Any

import torch

from rollwright.data.specs import Composite
from rollwright.envs.arrays import ArrayEnv, ArrayTransform
from rollwright.envs.on_arrays.columns import Columns
from rollwright.envs.transforms.bookkeeping import Cutting

__all__ = ["RandomTruncationTransform"]


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
