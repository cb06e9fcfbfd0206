"""Functions on TensorDicts as transforms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tensordict import TensorDictBase

from rollwright._foreign import class_path, foreign_transform, is_torchrl_transform, library_of_env
from rollwright.envs.base import EnvBase
from rollwright.envs.transforms.base import Transform
from rollwright.envs.transforms.foreign import ForeignTransform

__all__ = ["CallableTransform", "as_transform"]


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
        """See :class:`Transform`."""
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
