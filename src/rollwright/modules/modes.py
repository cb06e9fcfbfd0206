"""Eval mode for a while: afterwards each module has the mode that it had before."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

from torch import nn

_lock = threading.Lock()
_held: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()  # modules that were training, and how many hold them


@contextmanager
def in_eval_mode(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Put modules into eval mode within a ``with`` block.

    Afterwards those are in training mode again that were before; one that was in eval mode (a frozen part, say) stays
    so. Threads may be in such blocks with the same modules at once: the last one that leaves gives the modes back.
    ``train()`` and ``eval()`` of a module are not called, for they may do more than set a mode.

    The mode is a module's, not a thread's: whoever calls the same module in another thread meanwhile calls it in eval
    mode.

    Args:
        modules: which; those inside of them are not meant, ``module.modules()`` has all.

    Example:
        >>> layers = nn.Sequential(nn.Dropout(), nn.Dropout().eval())
        >>> with in_eval_mode(layers.modules()):
        ...     layers.training, [layer.training for layer in layers]
        (False, [False, False])
        >>> layers.training, [layer.training for layer in layers]
        (True, [True, False])
    """
    with _lock:
        mine = {module for module in modules if module.training or module in _held}
        for module in mine:
            _held[module] = _held.get(module, 0) + 1
            module.training = False
    try:
        yield
    finally:
        with _lock:
            for module in mine:
                _held[module] -= 1
                if not _held[module]:
                    del _held[module]
                    module.training = True
