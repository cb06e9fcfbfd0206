"""The errors that rollwright raises, in one tree.

::

    RollwrightError
    ├── SpecError (ValueError)            data that does not match its spec
    ├── EnvError (RuntimeError)           an environment that raised or broke its contract
    │   └── EnvKeyError (KeyError)        ... by leaving an entry out
    ├── PolicyError (RuntimeError)        a policy that raised or broke its contract
    │   ├── PolicyKeyError (KeyError)     ... by leaving an entry out
    │   └── EngineLostError               ... whose engine of a language model is gone, or has unknown weights
    ├── WorkerError (RuntimeError)        what went wrong in another process, with its traceback
    │   └── ServiceLostError              ... a replay service that is gone for good
    ├── RemoteTraceback                   ... that traceback, as the cause of the error
    ├── DamagedFileError (ValueError)     a file that is cut short, or holds what cannot be
    ├── MissingExtraError (ImportError)   an optional dependency that is not installed
    └── NotNative                         an object that cannot take a native path, and why; never reaches the user

Wrong arguments are plain ``ValueError`` and ``TypeError``: the argument, what was expected, what
came and what to do stand in the message.
"""

from __future__ import annotations

import importlib
import os
import threading
from typing import Any

__all__ = [
    "DamagedFileError",
    "EngineLostError",
    "EnvError",
    "EnvKeyError",
    "MissingExtraError",
    "NoSilentEnd",
    "NotNative",
    "PolicyError",
    "PolicyKeyError",
    "RemoteTraceback",
    "RollwrightError",
    "ServiceLostError",
    "SpecError",
    "WorkerError",
    "require",
    "text_of",
]


class RollwrightError(Exception):
    """Root of every error that rollwright defines."""


class SpecError(RollwrightError, ValueError, AssertionError):
    """Data does not match the spec that describes it; an ``AssertionError`` too, which programs of the field expect."""


class EnvError(RollwrightError, RuntimeError):
    """An environment raised, or returned something that its specs do not describe."""


class EnvKeyError(EnvError, KeyError):
    """An environment left out an entry that its specs announce."""

    __str__ = Exception.__str__  # KeyError would print the message in quotes


class PolicyError(RollwrightError, RuntimeError):
    """A policy raised, or wrote something that the environment cannot use."""


class PolicyKeyError(PolicyError, KeyError):
    """A policy left out an entry that the environment needs."""

    __str__ = Exception.__str__


class EngineLostError(PolicyError):
    """An engine of a language model is gone, or did not take new weights; the message names it."""


class WorkerError(RollwrightError, RuntimeError):
    """Something went wrong in another process.

    It is an instance of the original exception's class too, where that allows it; its cause holds the traceback.

    Attributes:
        worker: index of the worker; None where there are no indices.
        remote_type: name of the class of the original exception; empty if there was none (the process was killed).
    """

    worker: int | None = None
    remote_type: str = ""


class ServiceLostError(WorkerError):
    """A replay service is gone for good. Workers that write to it are not replaced: others would not find it either."""


class RemoteTraceback(RollwrightError):
    """The traceback of an exception in another process, as text."""

    def __str__(self) -> str:
        return "\n" + str(self.args[0])


class DamagedFileError(RollwrightError, ValueError):
    """A file of a dataset or replay buffer is cut short, or holds what cannot be; the message names it and the damage.

    Nothing is read from such a file, and nothing is changed in it.
    """


class MissingExtraError(RollwrightError, ImportError):
    """An optional dependency is not installed."""


class NoSilentEnd:
    """A ``with`` block whose StopIteration is an error: raised on, it would end the loop that takes the batches.

    Args:
        who: runs in the block, for the message.

    Raises:
        RollwrightError: the block raised StopIteration.
    """

    def __init__(self, who: str) -> None:
        self._who = who

    def __enter__(self) -> None:
        """Enter the block."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        """Raise an error in place of StopIteration."""
        if isinstance(error, StopIteration):
            raise RollwrightError(f"{self._who} raised {type(error).__name__}: {error}") from error


class NotNative(RollwrightError):
    """An object has no native form; the message is the reason, as a phrase. The plain path is taken instead."""


class _Imports:
    """The lock of imports of optional dependencies: some fail where two threads import their parts at once."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.lock = threading.RLock()


_imports = _Imports()
os.register_at_fork(after_in_child=_imports.reset)  # another thread may have held it


def require(module: str, *, extra: str, purpose: str, name: str | None = None) -> Any:
    """Import an optional dependency, or name the command that installs it; one thread at a time.

    Args:
        module: dotted name to import, such as ``"envpool"``.
        extra: the extra of rollwright that installs it.
        purpose: what needs it, for the message.
        name: of an attribute of the module; some modules import what it needs when they are asked for it.

    Returns:
        The module, or its attribute.

    Raises:
        MissingExtraError: when the module is not installed.

    Example:
        >>> require("json", extra="none", purpose="an example").__name__
        'json'
    """
    try:
        with _imports.lock:
            importlib.import_module(module.partition(".")[0])
            found = importlib.import_module(module)
            return found if name is None else getattr(found, name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != module.split(".")[0]:
            raise
        raise MissingExtraError(
            f"{purpose} needs the package {module.split('.')[0]!r}, which is not installed. "
            f"Install it with: pip install 'rollwright[{extra}]'"
        ) from error


def text_of(error: BaseException) -> str:
    """The message of an exception of any class, also where its ``__str__`` raises.

    >>> text_of(ValueError("no such file"))
    'no such file'
    """
    try:
        return str(error)
    except Exception as broken:
        return f"<no message: its __str__ raised {type(broken).__name__}>"
