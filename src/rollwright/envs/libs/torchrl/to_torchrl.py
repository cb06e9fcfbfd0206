"""to_torchrl: an environment of this library as one of TorchRL."""

from __future__ import annotations

from functools import cache
from typing import Any

from tensordict import TensorDictBase

from rollwright._foreign import class_path, is_torchrl_env
from rollwright._keys import leaf_keys
from rollwright.data.specs.torchrl import to_torchrl as spec_to_torchrl
from rollwright.envs.base import EnvBase
from rollwright.envs.libs.torchrl.wrapper import TorchRLWrapper
from rollwright.errors import require

__all__ = ["holder_of", "to_torchrl"]


def to_torchrl(env: EnvBase) -> Any:
    """An environment of this library as one of TorchRL, for its collectors, transforms and batches of environments.

    TorchRL has to be installed. TorchRL's environment steps and closes ``env``, which is its attribute
    ``rollwright_env``, and whose public attributes it has.

    Args:
        env: of this library; one of TorchRL is returned as it is, and a :class:`TorchRLWrapper` gives back what it is
            around.

    Returns:
        A ``torchrl.envs.EnvBase`` of the same batch size, device and specs.

    Raises:
        TypeError: it is no environment.
        SpecError: TorchRL has no spec of the same domain.
        MissingExtraError: TorchRL is not installed.
    """
    if is_torchrl_env(env):
        return env
    if isinstance(env, TorchRLWrapper):
        return env.torchrl_env
    if not isinstance(env, EnvBase):
        raise TypeError(
            f"env: expected an environment of rollwright, got {class_path(env)}: {env!r}. Wrap a gymnasium environment "
            "in GymWrapper."
        )
    return _kind()(env)


def holder_of(env: EnvBase, transform: Any) -> Any:
    """TorchRL's ``TransformedEnv`` of an environment of this library and one transform of TorchRL.

    The transform has ``env`` for its parent then, as TorchRL's environment, and keeps its mode of training. Nothing
    that TorchRL does closes ``env``.

    Args:
        env: what the transform is to meet.
        transform: of TorchRL, on no environment.

    Raises:
        SpecError: TorchRL has no spec of the same domain.
        MissingExtraError: TorchRL is not installed.
    """
    envs = _torchrl_envs()
    modes = [(part, part.training) for part in transform.modules()]
    holder = envs.TransformedEnv(_view_kind()(env), transform, auto_unwrap=False)
    for part, mode in modes:
        part.training = mode
    return holder


def _torchrl_envs() -> Any:
    return require("torchrl.envs", extra="torchrl", purpose="to_torchrl")


@cache
def _view_kind() -> type:
    """The class of environments that TorchRL's transforms meet and do not own."""
    base: Any = _kind()

    class RollwrightView(base):  # type: ignore[misc]
        """An environment of rollwright as a transform of TorchRL sees it."""

        def close(self, *, raise_if_closed: bool = True) -> None:
            """Nothing: who made the environment closes it."""

    return RollwrightView


@cache
def _kind() -> type:
    """The class, made when it is first needed: its base is TorchRL's."""
    base: Any = _torchrl_envs().EnvBase

    class RollwrightEnv(base):  # type: ignore[misc]
        """An environment of rollwright that TorchRL steps."""

        def __init__(self, env: EnvBase) -> None:
            super().__init__(device=env.device, batch_size=env.batch_size, allow_done_after_reset=True)
            self.rollwright_env = env
            for name in ("observation", "state", "action", "reward", "done"):
                setattr(self, f"full_{name}_spec", spec_to_torchrl(env.full_spec(name)))

        def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
            return self.rollwright_env.reset_outcome(tensordict, **kwargs)

        def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
            outcome = self.rollwright_env.step_outcome(tensordict)
            preset = tensordict.get("next", None)
            return outcome if preset is None else outcome.update(preset.exclude(*leaf_keys(outcome)))

        def _set_seed(self, seed: int | None) -> None:
            self.rollwright_env.set_seed(seed)

        def close(self, *, raise_if_closed: bool = True) -> None:
            super().close(raise_if_closed=raise_if_closed)
            self.rollwright_env.close(raise_if_closed=False)

        @property
        def is_closed(self) -> bool:
            """Whether the environment of rollwright is; it stays open when this object is deleted."""
            return bool(self.rollwright_env.is_closed)

        @is_closed.setter
        def is_closed(self, value: bool) -> None:
            """Nothing: TorchRL sets it when it makes and closes an environment."""

        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)
            except AttributeError:
                env = self.__dict__.get("_modules", {}).get("rollwright_env")
                if env is None or name.startswith("_") or hasattr(type(self), name):
                    raise
            return getattr(env, name)

    return RollwrightEnv
