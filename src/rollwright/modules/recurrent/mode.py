"""Whether recurrent modules take one step for each element, or run over the time dimension."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar, Token
from functools import wraps
from typing import Literal, ParamSpec, TypeVar

Mode = bool | Literal["recurrent", "sequential"] | None
P = ParamSpec("P")
R = TypeVar("R")

_NAMES: dict[object, bool] = {"recurrent": True, "sequential": False}
_mode: ContextVar[bool | None] = ContextVar("rollwright_recurrent_mode", default=None)


def as_flag(argument: str, mode: Mode) -> bool | None:
    """A mode as True (recurrent), False (sequential) or None (the modules' own).

    Raises:
        ValueError: it is none of these.
    """
    if mode is None or isinstance(mode, bool):
        return mode
    if isinstance(mode, str) and mode.lower() in _NAMES:
        return _NAMES[mode.lower()]
    raise ValueError(
        f"{argument}: expected 'recurrent' (or True), 'sequential' (or False) or None, got {mode!r}. "
        "Say 'recurrent' for a batch with a time dimension."
    )


def recurrent_mode() -> bool | None:
    """True in recurrent mode, False in sequential mode, None where :class:`set_recurrent_mode` sets nothing.

    Example:
        >>> with set_recurrent_mode("recurrent"):
        ...     recurrent_mode()
        True
        >>> recurrent_mode() is None
        True
    """
    return _mode.get()


class set_recurrent_mode:
    """Sets how recurrent modules read their input, in a ``with`` block or, as a decorator, during calls.

    Holds for the thread (or task) that enters it: a collector that acts in a thread of its own is not concerned.

    Args:
        mode: ``"recurrent"`` or True: the last batch dimension is time. ``"sequential"`` or False: each element of
            the batch takes one step. None: each module's ``default_recurrent_mode``, which is sequential unless given.

    Raises:
        ValueError: ``mode`` is none of these.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from rollwright.modules import GRUModule
        >>> gru = GRUModule(3, 5, in_key="observation", out_key="features")
        >>> batch = TensorDict({
        ...     "observation": torch.randn(6, 3),
        ...     "recurrent_state": torch.zeros(6, 1, 5),
        ...     "is_init": torch.tensor([1, 0, 0, 0, 1, 0], dtype=torch.bool).unsqueeze(-1),
        ... }, [6])
        >>> with set_recurrent_mode("recurrent"):
        ...     gru(batch)["features"].shape  # of two pieces, of 4 steps and of 2
        torch.Size([6, 5])
    """

    def __init__(self, mode: Mode = True) -> None:
        self.mode = as_flag("mode", mode)
        self._tokens: list[Token[bool | None]] = []

    def __enter__(self) -> None:
        self._tokens.append(_mode.set(self.mode))

    def __exit__(self, *_: object) -> None:
        _mode.reset(self._tokens.pop())

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """A function that runs in this mode."""

        @wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            with set_recurrent_mode(self.mode):
                return function(*args, **kwargs)

        return run
