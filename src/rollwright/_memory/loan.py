"""Loan: memory that is borrowed, and released when the last tensor over it is gone."""

from __future__ import annotations

import weakref


class Loan:
    """Says whether anything still reads memory that was borrowed.

    Whatever is made of the view that :meth:`borrow` returns keeps it alive: tensors (``torch.frombuffer``), views of
    them, arrays that share their memory. The owner writes the memory itself, which does not count.

    Args:
        memory: to be borrowed.

    Example:
        >>> import torch
        >>> loan = Loan(memoryview(bytearray(64)))
        >>> row = torch.frombuffer(loan.borrow(), dtype=torch.float32)[:4]
        >>> loan.borrowed
        True
        >>> del row
        >>> loan.borrowed
        False
    """

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self._view: weakref.ref[memoryview] | None = None

    def borrow(self) -> memoryview:
        """The memory for a borrower; the same view while it is borrowed."""
        view = None if self._view is None else self._view()
        if view is None:
            view = self._memory[:]
            self._view = weakref.ref(view)
        return view

    @property
    def borrowed(self) -> bool:
        """Whether something still reads the memory."""
        return self._view is not None and self._view() is not None
