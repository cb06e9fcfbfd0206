"""Compose: a chain of transforms, and functions on TensorDicts as transforms."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Self, cast, overload

from tensordict import TensorDictBase
from torch import nn

from rollwright._foreign import class_path, foreign_transform, is_torchrl_transform, library_of_env
from rollwright.data.specs import Composite
from rollwright.envs.base import EnvBase
from rollwright.envs.transforms.base import Transform
from rollwright.envs.transforms.foreign import ForeignTransform, parts_of


class CallableTransform(Transform):
    """A function on TensorDicts as a transform: called on what steps and resets return.

    Where it has an inverse (a method ``inv``), that is called on what is passed to the environment, or written to a
    buffer.

    Attributes:
        leaves_out: whether it may return fewer elements of a batch than it is given.
    """

    def __init__(self, function: Callable[[TensorDictBase], TensorDictBase | None]) -> None:
        super().__init__()
        self.function = function
        self.leaves_out = bool(getattr(function, "leaves_out", False))

    @property
    def inverts(self) -> bool:
        """Whether the transform changes what the environment is given."""
        return callable(getattr(self.function, "inv", None))

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase:
        inverse: Any = getattr(self.function, "inv", None)
        changed = inverse(tensordict) if callable(inverse) else tensordict
        on_env = self.parent is not None  # elsewhere, None says that nothing is left of what is written to a buffer
        return tensordict if changed is None and on_env else changed

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        changed = self.function(next_tensordict)
        return next_tensordict if changed is None else changed

    def _reset(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase) -> TensorDictBase:
        return self._call(tensordict_reset)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Call the function on ``tensordict``."""
        return self._call(tensordict)

    def __repr__(self) -> str:
        return f"CallableTransform({self.function!r})"


def as_transform(transform: object) -> Transform:
    """A transform from a transform, one of TorchRL included, or from a function on TensorDicts.

    Raises:
        TypeError: it is neither, or a transform of another library.
        RuntimeError: it is of TorchRL, and on an environment there.
    """
    if isinstance(transform, Transform):
        return transform
    if isinstance(transform, type):
        name = transform.__name__
        raise TypeError(f"transform: expected an object, got the class {name}. Call it: {name}().")
    if not callable(transform):
        remedy = " Write Compose(*transforms)." if isinstance(transform, (list, tuple)) else ""
        raise TypeError(
            f"transform: expected a Transform, or a function from a TensorDict to a TensorDict, got "
            f"{type(transform).__name__}.{remedy or ' Subclass Transform.'}"
        )
    if isinstance(transform, EnvBase) or library_of_env(transform):
        raise TypeError(
            f"transform: expected a Transform, or a function from a TensorDict to a TensorDict, got "
            f"{class_path(transform)}, an environment. Put the transform around it: TransformedEnv(env, transform)."
        )
    if is_torchrl_transform(transform):
        return ForeignTransform(transform)
    foreign = foreign_transform(transform)
    if foreign is not None:
        raise TypeError(
            f"transform: expected a Transform of rollwright.envs, or a function from a TensorDict to a TensorDict, got "
            f"{foreign}, a transform of another library, of which no more than its forward() would be called. Use the "
            "transform of that name in rollwright.envs, subclass rollwright.envs.Transform, or pass its forward method "
            "if that is all that it has to do."
        )
    return CallableTransform(transform)


TransformLike = Transform | Callable[[TensorDictBase], Any]


class Compose(Transform):
    """Applies transforms one after the other; for what the environment is given, last first.

    Args:
        *transforms: transforms, or functions on TensorDicts; one list of them is accepted too.

    Raises:
        TypeError: an element is neither.
        RuntimeError: an element belongs to an environment or to a chain already.

    Example:
        >>> from rollwright.envs.transforms import InitTracker, StepCounter
        >>> chain = Compose(StepCounter())
        >>> chain.append(InitTracker())
        >>> len(chain), chain[1]
        (2, InitTracker(init_key='is_init'))
    """

    def __init__(self, *transforms: TransformLike | list[Any]) -> None:
        super().__init__()
        listed = transforms[0] if len(transforms) == 1 and isinstance(transforms[0], list) else transforms
        self.transforms = nn.ModuleList()
        for transform in cast(Iterable[TransformLike], listed):
            self._put(len(self), as_chain(transform))

    def _put(self, index: int, transform: Transform) -> None:
        transform.set_container(self)
        self.transforms.insert(index, transform)

    def check_free(self) -> None:
        """Test that neither this chain nor any transform in it belongs to an environment."""
        super().check_free()
        for transform in self:
            transform.check_free()

    def share(self, transform: Transform) -> None:
        """Add a transform that goes on belonging to another chain or environment as well."""
        transform.add_container(self)
        self.transforms.append(transform)

    def append(self, transform: TransformLike) -> None:
        """Add a transform at the end (those of a ``Compose``, one by one)."""
        self.insert(len(self), transform)

    def insert(self, index: int, transform: TransformLike) -> None:
        """Add a transform before the one at ``index`` (those of a ``Compose``, one by one).

        Raises:
            IndexError: ``index`` lies outside the chain.
        """
        if not -len(self) <= index <= len(self):
            raise IndexError(f"index: expected one from {-len(self)} to {len(self)}, got {index}.")
        index += len(self) if index < 0 else 0
        transform = as_chain(transform)
        added = list(transform) if type(transform) is Compose else [transform]
        if type(transform) is Compose:
            transform.check_free()
            for part in added:
                part.reset_parent()
        for offset, part in enumerate(added):
            self._put(index + offset, part)
            part.eval()
        self._changed()

    def pop(self, index: int = -1) -> Transform:
        """Take a transform out and return it."""
        transform = self[index]
        del self.transforms[index]
        transform.reset_parent()
        self._changed()
        return transform

    def _changed(self) -> None:
        env = self.container
        if env is not None:
            env.empty_cache()
        else:
            self.empty_cache()

    @overload
    def __getitem__(self, index: int) -> Transform: ...
    @overload
    def __getitem__(self, index: slice) -> Compose: ...
    def __getitem__(self, index: int | slice) -> Transform:
        """The transform at ``index``; for a slice, a ``Compose`` of clones."""
        if isinstance(index, slice):
            return Compose(*(transform.clone() for transform in list(self)[index]))
        return cast(Transform, self.transforms[index])

    def __setitem__(self, index: int, transform: TransformLike) -> None:
        """Put a transform (those of a ``Compose``, one by one) in the place of the one at ``index``."""
        new, old = as_chain(transform), self[index]
        place = index + len(self) if index < 0 else index
        if new is not old:
            new.check_free()
            self.pop(place)
            self.insert(place, new)

    def __delitem__(self, index: int) -> None:
        """Take the transform at ``index`` out."""
        self.pop(index)

    def __len__(self) -> int:
        return len(self.transforms)

    def __iter__(self) -> Iterator[Transform]:
        return iter(cast(Iterable[Transform], self.transforms))

    # Data -------------------------------------------------------------------------------------

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        for transform in self:
            next_tensordict = transform._call(next_tensordict)
        return next_tensordict

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        for transform in self:
            next_tensordict = transform.transform_step(tensordict, next_tensordict)
        return next_tensordict

    def _reset(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase) -> TensorDictBase:
        for transform in self:
            tensordict_reset = transform.transform_reset(tensordict, tensordict_reset)
        return tensordict_reset

    def _reset_env_preprocess(self, tensordict: TensorDictBase | None) -> TensorDictBase | None:
        for transform in reversed(list(self)):
            tensordict = transform.transform_reset_input(tensordict)
        return tensordict

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase:
        for transform in reversed(list(self)):
            tensordict = transform._inv_call(tensordict)
            if tensordict is None:
                break  # a filter of a buffer has left nothing
        return tensordict

    def trim_frame(self, frame: TensorDictBase, following: TensorDictBase) -> None:
        """Let each transform change a frame after the next step was taken from it."""
        for transform in self:
            transform.trim_frame(frame, following)

    def complete_fake(self, fake: TensorDictBase) -> TensorDictBase:
        """Let each transform complete what :meth:`EnvBase.fake_tensordict` returns."""
        for transform in self:
            fake = transform.complete_fake(fake)
        return fake

    @property
    def inverts(self) -> bool:
        """Whether any transform in the chain changes what the environment gets."""
        return any(transform.inverts for transform in self)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Apply each transform's ``forward``."""
        for transform in self:
            tensordict = transform(tensordict)
        return tensordict

    # Specs: the policy's side is reached from the environment's in the order of the chain, inputs included.

    def _fold(self, method: str, spec: Composite) -> Composite:
        of_one_entry = not isinstance(spec, Composite)
        for transform in self:
            spec = getattr(transform, method)(spec)
            if not (of_one_entry or isinstance(spec, Composite)):
                raise TypeError(f"{transform}: {method} must return a Composite, got {type(spec).__name__}.")
        return spec

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """The spec of all observations after the chain."""
        return self._fold("transform_observation_spec", observation_spec)

    def transform_reward_spec(self, reward_spec: Composite) -> Composite:
        """The spec of all rewards after the chain."""
        return self._fold("transform_reward_spec", reward_spec)

    def transform_done_spec(self, done_spec: Composite) -> Composite:
        """The spec of all flags after the chain."""
        return self._fold("transform_done_spec", done_spec)

    def transform_action_spec(self, action_spec: Composite) -> Composite:
        """The spec of all actions, as the policy sees them."""
        return self._fold("transform_action_spec", action_spec)

    def transform_state_spec(self, state_spec: Composite) -> Composite:
        """The spec of what a step reads beside the action."""
        return self._fold("transform_state_spec", state_spec)

    def transform_output_spec(self, output_spec: Composite) -> Composite:
        """The specs of what the environment returns after the chain."""
        return self._fold("transform_output_spec", output_spec)

    def transform_input_spec(self, input_spec: Composite) -> Composite:
        """The specs of what the environment is given, as the policy sees them."""
        return self._fold("transform_input_spec", input_spec)

    # The object -------------------------------------------------------------------------------

    def empty_cache(self) -> None:
        """Forget what was derived from the environment's specs."""
        super().empty_cache()
        for transform in self:
            transform.empty_cache()

    def reset_parent(self) -> None:
        """Remove the chain from what holds it, so that another environment can use it."""
        super().reset_parent()
        self.empty_cache()

    def clone(self) -> Self:
        """A chain of clones without an environment."""
        return type(self)(*(transform.clone() for transform in self))

    def dump(self, **kwargs: Any) -> None:
        """Call :meth:`Transform.dump` of each transform."""
        for transform in self:
            transform.dump(**kwargs)

    def close(self) -> None:
        """Close each transform."""
        for transform in self:
            transform.close()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        for transform in self:
            transform.set_container(self)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, self))})"


def as_chain(transform: object) -> Transform:
    """See :func:`as_transform`; a ``Compose`` of TorchRL becomes one of this library, with its transforms."""
    parts = parts_of(transform)
    return as_transform(transform) if parts is None else Compose(*parts)
