"""EndOfLifeTransform: marks where a life of an Atari game ends."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase

from rollwright._keys import NestedKey, as_keys
from rollwright.data.specs import Composite, TensorSpec, Unbounded
from rollwright.envs.arrays import ArrayEnv, ArrayTransform
from rollwright.envs.on_arrays.columns import Columns
from rollwright.envs.transforms.bookkeeping import Adding
from rollwright.errors import EnvError, NotNative

__all__ = ["EndOfLifeTransform"]


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
