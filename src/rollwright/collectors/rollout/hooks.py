"""Hooks: functions of the user that are called before and after each rollout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tensordict import TensorDictBase

PreHook = Callable[[], None]
PostHook = Callable[[TensorDictBase], None]


class Hooks:
    """Two callables, each may be None.

    Attributes:
        pre_collect_hook: called without arguments before each rollout.
        post_collect_hook: called with each batch just before it is delivered.
    """

    def __init__(self, pre: PreHook | None, post: PostHook | None) -> None:
        self.pre_collect_hook, self.post_collect_hook = pre, post

    def set(self, name: str, hook: Any) -> None:
        """Set one of them.

        Raises:
            TypeError: it cannot be called.
        """
        if hook is not None and not callable(hook):
            raise TypeError(f"{name}: expected a callable or None, got {type(hook).__name__}: {hook!r}.")
        setattr(self, name, hook)
