"""ForeignTransform: a transform of TorchRL around an environment of this library."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Self

import torch
from tensordict import TensorDictBase
from torch import nn

from rollwright._foreign import class_path, is_torchrl_transform, kind_in
from rollwright._keys import NestedKey
from rollwright.data.specs import Composite, TensorSpec
from rollwright.data.specs.torchrl import from_torchrl, to_torchrl
from rollwright.envs.arrays import ArrayEnv, ArrayTransform
from rollwright.envs.libs.torchrl.frames import only_below_next, transform_trims, trim_by
from rollwright.envs.libs.torchrl.masks import Masks
from rollwright.envs.libs.torchrl.to_torchrl import holder_of
from rollwright.envs.libs.torchrl.transforms import called_on_tensordicts, translated
from rollwright.envs.on_arrays.tensordicts import OnTensorDicts, RootTensorDicts
from rollwright.envs.transforms.base import Transform
from rollwright.errors import EnvError, NotNative

__all__ = ["ForeignTransform", "parts_of"]

_KEYS = ("in_keys", "out_keys", "in_keys_inv", "out_keys_inv")


class ForeignTransform(Transform):
    """A transform of TorchRL as one of this library; ``TransformedEnv`` and ``Compose`` make it by themselves.

    TorchRL's transform does what it did: steps, resets, the way in, specs. It meets its ``parent`` and its
    ``container`` as environments of TorchRL. Attributes that this object does not have are those of TorchRL's
    transform, and so are those that are set. Both have one ``state_dict()``.

    Args:
        transform: of TorchRL, one of a user's own class included; it must not be on an environment.

    Attributes:
        torchrl_transform: ``transform``.

    Raises:
        TypeError: it is none, or for environments that reset themselves.
        RuntimeError: it belongs to an environment of TorchRL.
    """

    inner_name = "torchrl_transform"  # among its modules
    _not_saved = ("_held",)

    def __init__(self, transform: Any) -> None:
        _check(transform)
        super().__init__()
        for name in _KEYS:  # they are TorchRL's
            delattr(self, name)
        self.__dict__["_held"] = None
        self._modules[self.inner_name] = transform

    # What TorchRL's transform does --------------------------------------------------------------

    def _theirs(self, name: str, *args: Any) -> Any:
        """The result of a method that is for those who write transforms."""
        return getattr(self._placed(), name)(*args)

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        changed: TensorDictBase = self._theirs("_call", next_tensordict)
        return changed

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        changed: TensorDictBase = self._theirs("_step", tensordict, next_tensordict)
        self._take_masks()
        return changed

    def _reset(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase) -> TensorDictBase:
        changed: TensorDictBase = self._theirs("_reset", self._reset_data(tensordict), tensordict_reset)
        self._take_masks()
        return changed

    def _take_masks(self) -> None:
        """What TorchRL's transform has written into the action's spec, such as ``ActionMask``."""
        env, held = self.container, self.__dict__["_held"]
        if env is not None and held is not None:
            self._remember("masks", lambda: Masks(held.full_action_spec, env.full_action_spec, env.action_keys)).take()

    def _reset_env_preprocess(self, tensordict: TensorDictBase | None) -> TensorDictBase | None:
        given = None if tensordict is None else self._reset_data(tensordict)
        changed: TensorDictBase | None = self._theirs("_reset_env_preprocess", given)
        return tensordict if changed is given else changed

    def _reset_data(self, tensordict: TensorDictBase) -> TensorDictBase:
        """What TorchRL's environments pass to a transform at a reset: marks, and what a step reads."""
        env = self.container
        if env is None:
            return tensordict
        keys = self._remember("reset_data", lambda: [*env.reset_keys, *env.state_keys])
        return tensordict.select(*keys, strict=False)

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase:
        changed: TensorDictBase = self._theirs("_inv_call", tensordict)
        return changed

    def inv(self, tensordict: TensorDictBase) -> TensorDictBase:
        """See :class:`Transform`."""
        changed: TensorDictBase = self._placed().inv(tensordict)
        return changed

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """See :class:`Transform`."""
        changed: TensorDictBase = self._placed()(tensordict)
        return changed

    def trim_frame(self, frame: TensorDictBase, following: TensorDictBase) -> None:
        """See :class:`Transform`."""
        if self._trims:
            trim_by(self._placed(), frame, following, self._remember("dropped", self._only_below_next))

    @property
    def _trims(self) -> bool:
        return self._remember("trims", lambda: transform_trims(self._inner))

    def _only_below_next(self) -> list[NestedKey]:
        return [] if self.container is None else only_below_next(self.container.fake_tensordict())

    def complete_fake(self, fake: TensorDictBase) -> TensorDictBase:
        """See :class:`Transform`."""
        changed: TensorDictBase = self._theirs("transform_fake_tensordict", fake)
        return changed

    def _apply_transform(self, obs: torch.Tensor) -> torch.Tensor:
        changed: torch.Tensor = self._theirs("_apply_transform", obs)
        return changed

    def _inv_apply_transform(self, state: torch.Tensor) -> torch.Tensor:
        changed: torch.Tensor = self._theirs("_inv_apply_transform", state)
        return changed

    @property
    def inverts(self) -> bool:
        """True: TorchRL's transforms are always asked."""
        return True

    def dump(self, **kwargs: Any) -> Any:
        """Write out what TorchRL's transform has gathered."""
        return self._placed().dump(**kwargs)

    def close(self) -> None:
        """Close TorchRL's transform."""
        self._inner.close()

    @property
    def is_known(self) -> bool:
        """Whether TorchRL's transform has a counterpart in this library."""
        try:
            return translated(self._placed()) is not None
        except NotNative:
            return False

    def on_arrays(self, env: ArrayEnv) -> ArrayTransform:
        """What the counterpart of TorchRL's transform does, with the tensors of that.

        Raises:
            NotNative: it has none.
        """
        ours = translated(self._placed())
        ours.set_parent(self.parent)
        return ours.on_arrays(env)

    def on_tensordicts(self, env: ArrayEnv, roots: RootTensorDicts) -> OnTensorDicts:
        """See :meth:`Transform.on_tensordicts`; for a transform of TorchRL without a counterpart.

        Raises:
            NotNative: it changes what a reset or a step is given.
        """
        inner, parent = self._placed(), self.parent
        if parent is None:
            raise NotNative(f"{class_path(inner)} is on no environment")
        spec = self.transform_output_spec(parent.output_spec.clone())
        return called_on_tensordicts(self, inner, env, roots, list(parent.done_keys), spec)

    # Specs ------------------------------------------------------------------------------------

    def _changed(self, method: str, spec: Composite) -> Composite:
        """A spec after TorchRL's transform."""
        changed: TensorSpec = from_torchrl(getattr(self._placed(), method)(to_torchrl(spec)))
        if not isinstance(changed, Composite):
            raise EnvError(f"{self}: {method} must return a Composite, got {type(changed).__name__}. Return all specs.")
        for name, child in spec.items():  # TorchRL has None for an empty one
            if name not in changed and isinstance(child, Composite) and not child.keys():
                changed[name] = child.clone()
        return changed

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """See :class:`Transform`."""
        return self._changed("transform_observation_spec", observation_spec)

    def transform_reward_spec(self, reward_spec: Composite) -> Composite:
        """See :class:`Transform`."""
        return self._changed("transform_reward_spec", reward_spec)

    def transform_done_spec(self, done_spec: Composite) -> Composite:
        """See :class:`Transform`."""
        return self._changed("transform_done_spec", done_spec)

    def transform_action_spec(self, action_spec: Composite) -> Composite:
        """See :class:`Transform`."""
        return self._changed("transform_action_spec", action_spec)

    def transform_state_spec(self, state_spec: Composite) -> Composite:
        """See :class:`Transform`."""
        return self._changed("transform_state_spec", state_spec)

    def transform_output_spec(self, output_spec: Composite) -> Composite:
        """See :class:`Transform`."""
        return self._changed("transform_output_spec", output_spec)

    def transform_input_spec(self, input_spec: Composite) -> Composite:
        """See :class:`Transform`."""
        return self._changed("transform_input_spec", input_spec)

    # The environment around -------------------------------------------------------------------

    @property
    def _inner(self) -> Any:
        return self._modules[self.inner_name]

    def _placed(self) -> Any:
        """TorchRL's transform, which knows the environment around."""
        if self.__dict__["_held"] is None and (parent := self.parent) is not None:
            self._check_place(parent)
            self.__dict__["_held"] = holder_of(parent, self._inner)
        return self._inner

    def _check_place(self, env: Any) -> None:
        """Test that the transform leaves batch size and device of the environment as they are."""
        inner = self._inner
        size, device = inner.transform_env_batch_size(env.batch_size), inner.transform_env_device(env.device)
        if tuple(size) != tuple(env.batch_size):
            raise EnvError(
                f"{class_path(inner)}: expected a transform that keeps the batch size {list(env.batch_size)}, got one "
                f"that makes it {list(size)}. Put it into TorchRL's TransformedEnv around "
                "rollwright.envs.to_torchrl(env), which collectors take."
            )
        if device != env.device and {str(device), str(env.device)} != {"None", "cpu"}:
            raise EnvError(
                f"{class_path(inner)}: expected a transform that keeps the device {env.device}, got one that makes it "
                f"{device}. Move the environment with env.to(device), or pass storing_device= to the collector."
            )

    def _release(self) -> None:
        super()._release()
        self._forget()

    def empty_cache(self) -> None:
        """See :class:`Transform`."""
        super().empty_cache()
        self._forget()

    def _forget(self) -> None:
        """Let TorchRL's transform meet its environment anew."""
        if self.__dict__.get("_held") is not None:
            self.__dict__["_held"] = None
            self.__dict__["_memo"].pop("masks", None)
            self._inner.reset_parent()

    # The object -------------------------------------------------------------------------------

    def clone(self) -> Self:
        """A copy without an environment, around TorchRL's own copy."""
        return type(self)(self._inner.clone())

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Move TorchRL's transform; returns this one."""
        self._forget()
        self._modules[self.inner_name] = self._inner.to(*args, **kwargs)
        return self

    def state_dict(self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """The state of TorchRL's transform."""
        if args:  # as torch takes them, by place
            destination, prefix, keep_vars = (*args, prefix, keep_vars)[:3] if len(args) < 3 else args
        found = self._inner.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        if destination is None or found is destination:
            return found
        destination.update({prefix + name: value for name, value in found.items()})  # a method of its own made it
        return destination

    @property
    def has_own_state(self) -> bool:
        """Whether TorchRL's transform has more in its ``state_dict()`` than parameters and buffers."""
        kind = type(self._inner)
        return kind.state_dict is not nn.Module.state_dict or kind.get_extra_state is not nn.Module.get_extra_state

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        inner = self._inner
        state = {name: state_dict.pop(name) for name in list(state_dict) if name.startswith(prefix)}
        if type(inner).load_state_dict is not nn.Module.load_state_dict:
            inner.load_state_dict({name.removeprefix(prefix): value for name, value in state.items()})
            state = nn.Module.state_dict(inner, prefix=prefix)  # torch goes on with its parts
        state_dict.update(
            {f"{prefix}{self.inner_name}.{name.removeprefix(prefix)}": value for name, value in state.items()}
        )
        super()._load_from_state_dict(state_dict, prefix, *args)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            inner = self.__dict__.get("_modules", {}).get(self.inner_name)
            if inner is None or name.startswith("__") or hasattr(type(self), name):
                raise
        value = getattr(inner, name)
        if callable(value) and not isinstance(value, nn.Module):
            self._placed()  # it may ask for the environment
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        inner = self.__dict__.get("_modules", {}).get(self.inner_name)
        if inner is None or name in self.__dict__ or hasattr(type(self), name):
            super().__setattr__(name, value)
        else:
            setattr(inner, name, value)

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        return state | {"_held": None, "_modules": {self.inner_name: self._inner.clone()}}  # the environment stays here

    def __repr__(self) -> str:
        return repr(self._inner)


def parts_of(thing: Any) -> list[Any] | None:
    """The transforms of TorchRL's ``Compose``, taken out of it; None: it is something else, or a class of its own."""
    if type(thing).__name__ != "Compose" or kind_in("torchrl", thing)[:2] != ["Compose", "Transform"]:
        return None
    _check_free(thing)
    return list(_taken_out(thing))


def _taken_out(chain: Any) -> Iterator[Any]:
    for part in list(chain):
        part.reset_parent()
        called = getattr(part, "func", None) if type(part).__name__ == "_CallableTransform" else None
        yield called if isinstance(called, Transform) else part  # TorchRL takes ours for functions


def _check_free(transform: Any) -> None:
    if transform.container is not None:
        raise RuntimeError(
            f"transform: this {class_path(transform)} already belongs to {type(transform.container).__name__} of "
            "TorchRL. It can follow only one environment; pass transform.clone()."
        )


def _check(transform: Any) -> None:
    if not is_torchrl_transform(transform):
        raise TypeError(f"transform: expected one of TorchRL, got {class_path(transform)}. Pass it as it is.")
    _check_free(transform)
    name = class_path(transform)
    if "AutoResetTransform" in kind_in("torchrl", transform):
        raise TypeError(
            f"transform: {name} is for environments that reset themselves, which those of rollwright do not. Leave it "
            "out."
        )
