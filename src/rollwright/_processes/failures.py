"""ExceptionInfo: an exception in a form that can be sent to another process."""

from __future__ import annotations

import pickle
import traceback
from dataclasses import dataclass
from typing import Any

import cloudpickle  # type: ignore[import-untyped]

from rollwright.errors import RemoteTraceback, WorkerError, text_of


@dataclass(frozen=True)
class ExceptionInfo:
    """An exception and its traceback, as text that can be sent.

    Attributes:
        kind: name of its class.
        text: its message.
        trace: the traceback, as Python prints it.
        pickled_kind: the class itself; None where it cannot be pickled.

    Example:
        >>> try:
        ...     raise KeyError("speed")
        ... except KeyError as error:
        ...     failure = ExceptionInfo.of(error)
        >>> raised = failure.error("worker 1")
        >>> str(raised), isinstance(raised, KeyError)
        ("worker 1: KeyError: 'speed'", True)
    """

    kind: str
    text: str
    trace: str
    pickled_kind: bytes | None

    @classmethod
    def of(cls, error: BaseException) -> ExceptionInfo:
        """Take down an exception."""
        try:
            kind = cloudpickle.dumps(type(error))
        except (pickle.PicklingError, TypeError, AttributeError, ValueError, RuntimeError, RecursionError):
            kind = None
        trace = "".join(traceback.format_exception(error))
        return cls(type(error).__qualname__, text_of(error), trace, kind)

    def error(self, where: str, worker: int | None = None) -> WorkerError:
        """The exception to raise in another process.

        Args:
            where: what it happened in, the beginning of its message.
            worker: index of the worker.
        """
        error = _class_for(self._class())(f"{where}: {self.kind}: {self.text}")
        error.worker, error.remote_type = worker, self.kind
        error.__cause__ = RemoteTraceback(self.trace)
        return error

    def _class(self) -> Any:
        if self.pickled_kind is None:
            return None
        try:
            return pickle.loads(self.pickled_kind)
        except (pickle.UnpicklingError, AttributeError, ImportError, EOFError, TypeError, ValueError):
            return None


def _class_for(kind: Any) -> type[WorkerError]:
    """A class whose instances are caught as those of ``kind`` are, too."""
    if not isinstance(kind, type) or not issubclass(kind, Exception) or issubclass(WorkerError, kind):
        return WorkerError
    try:
        made: Any = kind
        if not issubclass(kind, WorkerError):
            made = type(f"WorkerError({kind.__name__})", (WorkerError, kind), {"__init__": _plain, "__str__": _text})
        made("a trial")
    except Exception:  # a class of the user may refuse to be a base in any way it likes
        return WorkerError
    found: type[WorkerError] = made
    return found


def _plain(self: Exception, text: str) -> None:
    Exception.__init__(self, text)


def _text(self: Exception) -> str:
    return str(self.args[0])
