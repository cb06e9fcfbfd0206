"""Channel: messages between two processes over a pair of sockets; objects pickled with code by value."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import select
import socket
import sys
import threading
import time
import weakref
from collections.abc import Iterable
from importlib.machinery import ModuleSpec
from multiprocessing.reduction import DupFd
from types import ModuleType
from typing import Any

import cloudpickle  # type: ignore[import-untyped]

from rollwright._interrupts import uninterrupted
from rollwright._processes.connection import NOTHING
from rollwright._processes.forks import on_fork

_Packages = dict[str, tuple[ModuleSpec | None, tuple[str, ...]]]  # outermost ones, by name, and their folders

_lock = threading.RLock()  # a pickle may hold another
_is_found: dict[tuple[str, str], bool] = {}  # by a module's name and file
_last: tuple[list[Any], list[Any], dict[str, Any]] = ([], [], {})  # modules: all, those undecided, those not found
_registered: list[ModuleType] = []  # while something is pickled
_depth = threading.local()  # of the pickles in progress in a thread


def dumps(value: Any) -> bytes:
    """Pickle an object with the functions and classes of ``__main__``, and of modules that no search finds.

    The latter are those that were loaded from a path: by a test runner, a plug-in, a notebook. A search for the
    name of such a module finds nothing, or another file. Modules without a file go by name.

    >>> import pickle
    >>> pickle.loads(dumps(lambda x: x + 1))(2)
    3
    """
    with _lock:
        known = cloudpickle.list_registry_pickle_by_value()  # by the user, or by a pickle that holds this one
        _depth.now = getattr(_depth, "now", 0) + 1
        strangers = [ModuleType(name) for name in _strangers() if name in sys.modules and name not in known]
        try:
            for module in strangers:  # stand-ins with its name: a lazy one would be loaded by a look at it
                _registered.append(module)
                cloudpickle.register_pickle_by_value(module)
            pickled = dumps_by_name(value)
        finally:
            _depth.now -= 1
            _unregister(strangers)
    return pickled


def dumps_by_name(value: Any) -> bytes:
    """Pickle an object for a process that finds every module, such as a forked one."""
    file = io.BytesIO()
    _Pickler(file, 5).dump(value)
    return file.getvalue()


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # it has no types
    """Pickles a TensorDictModule around a function with all else: what it shares with others stays shared."""

    def reducer_override(self, obj: Any) -> Any:
        kind: Any = type(obj)
        module: Any = getattr(sys.modules.get("tensordict.nn"), "TensorDictModule", None)  # loads no torch in an actor
        if module is not None and isinstance(obj, module) and kind.__getstate__ is module.__getstate__:
            return object.__new__, (kind,), vars(obj), None, None, _set_attributes
        return super().reducer_override(obj)


def _set_attributes(thing: Any, attributes: dict[str, Any]) -> None:
    thing.__dict__.update(attributes)


def is_sending() -> bool:
    """Whether this thread pickles something for another process, with :func:`dumps`."""
    return getattr(_depth, "now", 0) > 0


def _unregister(modules: list[ModuleType]) -> None:
    for module in list(modules):
        with contextlib.suppress(ValueError):  # a fork meanwhile
            cloudpickle.unregister_pickle_by_value(module)
        with contextlib.suppress(ValueError):
            _registered.remove(module)


def _begin_anew() -> None:
    """In a forked process, where the thread that was pickling is not."""
    global _lock
    _lock = threading.RLock()
    _unregister(_registered)


os.register_at_fork(after_in_child=_begin_anew)


def _strangers() -> list[str]:
    """Names of the modules that another process would not find, or would mistake for others.

    Only new modules are looked at: in a forked process, a look at a module copies the memory that it lies in.
    """
    global _last
    seen, undecided, strangers = _last
    modules = list(sys.modules.copy().values())  # in one step: other threads import
    if modules != seen:
        decided = {id(module) for module in seen}.difference(map(id, undecided))
        packages: _Packages = {}
        undecided = []
        strangers = {name: module for name, module in strangers.items() if sys.modules.get(name) is module}
        for module in (module for module in modules if id(module) not in decided):
            file = _file_of(module)
            if file is None:
                undecided.append(module)
            elif not _is_importable(module, file, packages):
                strangers[_dict_of(module)["__name__"]] = module
        _last = modules, undecided, strangers
    return list(strangers)


def _file_of(module: Any) -> str | None:
    """Its file; None if nothing is looked up in it by its name, or it has no file, so far."""
    own = _dict_of(module)
    name, file = own.get("__name__"), own.get("__file__")
    if not isinstance(name, str) or not isinstance(file, str) or name == "__main__":
        return None
    return file if file and sys.modules.get(name) is module else None


def _is_importable(module: Any, file: str, packages: _Packages) -> bool:
    """Whether another process finds it by its name."""
    own = _dict_of(module)
    name = own["__name__"]
    if (name, file) not in _is_found:
        alias = getattr(own.get("__spec__"), "name", name)  # of collections.abc: that it was imported by
        names = [name, alias] if alias != name and sys.modules.get(alias) is module else [name]
        _is_found[name, file] = any(_finds(each, file, packages) for each in names)
    return _is_found[name, file]


def _dict_of(module: Any) -> dict[str, Any]:
    """Its attributes, without loading a lazy one."""
    own = object.__getattribute__(module, "__dict__") if issubclass(type(module), ModuleType) else None
    return own if isinstance(own, dict) else {}


def _finds(name: str, file: str, packages: _Packages) -> bool:
    """Whether that file is what another process imports under that name."""
    package, *rest = name.split(".")
    if package not in packages:
        spec = _search(package, None)
        packages[package] = spec, tuple(os.path.join(place, "") for place in _places(spec))
    spec, folders = packages[package]
    if rest and file.startswith(folders):
        return True  # most are, and need no search
    for part in rest:
        if spec is None:
            return False
        places, package = _places(spec), f"{package}.{part}"
        spec = _search(package, places)
    return spec is not None and _is_at(spec, file)


def _search(name: str, places: list[str] | None) -> ModuleSpec | None:
    """As an import would where the module is not loaded yet."""
    for finder in list(sys.meta_path):
        try:
            spec: ModuleSpec | None = finder.find_spec(name, places)
        except Exception:  # foreign code
            continue
        if spec is not None:
            return spec
    return None


def _places(spec: ModuleSpec | None) -> list[str]:
    """Where the modules of a package lie; it may have added to them when it was imported."""
    if spec is None or spec.submodule_search_locations is None:
        return []
    own = _dict_of(sys.modules.get(spec.name))
    added: Iterable[Any] = own.get("__path__") or () if _is_at(spec, own.get("__file__")) else ()
    return [place for place in (*spec.submodule_search_locations, *added) if isinstance(place, str)]


def _is_at(spec: ModuleSpec, file: str | None) -> bool:
    if not spec.has_location or spec.origin is None:
        return spec.loader is not None  # built in, frozen, or foreign
    if spec.origin == file:
        return True
    try:
        return file is not None and os.path.samefile(spec.origin, file)
    except OSError:
        return False


_HEADER = 8
_CHUNK = 1 << 16
_LONGEST_WAIT_S = 1e6  # that the system takes


class ChannelClosed(Exception):
    """The other end of a channel is gone, and all that it had sent was read.

    Nothing else raises it, so that an ``EOFError`` of the user's code is not taken for the end of a process.
    """


class ByValue:
    """An object that is pickled with the code that it needs: functions and classes of ``__main__``, lambdas.

    On the other side it is unpickled when :attr:`value` is read.

    Args:
        value: the object.

    Example:
        >>> import pickle
        >>> pickle.loads(pickle.dumps(ByValue(lambda x: x + 1))).value(2)
        3
    """

    def __init__(self, value: Any, *, pickled: bytes | None = None) -> None:
        self._value, self._pickled = value, pickled

    @property
    def value(self) -> Any:
        """The object."""
        pickled, self._pickled = self._pickled, None
        if pickled is not None:
            self._value = pickle.loads(pickled)
        return self._value

    def __reduce__(self) -> tuple[Any, ...]:
        return _from_bytes, (self._pickled or dumps(self._value),)


def _from_bytes(pickled: bytes) -> ByValue:
    return ByValue(None, pickled=pickled)


class Channel:
    """One end of a line between two processes that carries pickled messages, in order.

    There is no thread behind it: :meth:`send` writes before it returns; what :meth:`post` finds no room for waits for
    :meth:`flush`. Several threads may send. Pickling an end hands it on to a process that is being started. Tensors
    are sent by value.

    Attributes:
        has_received: whether a message was taken.

    Example:
        >>> mine, theirs = Channel.pair()
        >>> mine.send(("hello", 1))
        >>> theirs.recv(1.0)
        ('hello', 1)
        >>> mine.close()
        >>> theirs.recv(1.0)
        Traceback (most recent call last):
        ...
        rollwright._processes.channel.ChannelClosed: the other end is gone
    """

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        weakref.finalize(self, end.close).atexit = False
        end.setblocking(False)
        self._wait = select.poll()
        self._wait.register(end.fileno(), select.POLLIN)
        self._held, self.has_received = bytearray(), False
        self.reset_after_fork()
        on_fork(self)

    def reset_after_fork(self) -> None:
        """Have a lock that nobody holds, and nothing left to send."""
        self._sending = threading.Lock()
        self._unsent = bytearray()

    @classmethod
    def pair(cls) -> tuple[Channel, Channel]:
        """Two ends of a new line."""
        one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        return cls(one), cls(other)

    def __reduce__(self) -> tuple[Any, ...]:
        return _opened, (DupFd(self._socket.fileno()),)

    def fileno(self) -> int:
        """The socket, to wait for several; ask :meth:`poll` first: a message may have been read already."""
        return self._socket.fileno()

    def close(self) -> None:
        """Close the connection: the other end reads what was sent, and then ``ChannelClosed``. May be called again."""
        self._socket.close()

    @property
    def closed(self) -> bool:
        """Whether this end was closed."""
        return self._socket.fileno() < 0

    # Sending ----------------------------------------------------------------------------------

    def send(self, message: Any, timeout_s: float = 10.0) -> None:
        """Send a message, and wait until all of it is on the line. If Ctrl-C ends that wait, the rest goes next.

        Args:
            message: anything that can be pickled; see :class:`ByValue` for what users wrote.
            timeout_s: how long the other end may let the line be full; infinity if it may be busy for long.

        Raises:
            ChannelClosed: the other end is gone.
            TimeoutError: it does not read; part of the message may be in progress, so this end is closed.
        """
        self.post(message)
        until = None
        while self._unsent:
            until = until or time.monotonic() + timeout_s
            if not _writable(self._socket, min(_LONGEST_WAIT_S, until - time.monotonic())):
                self.close()
                raise TimeoutError(f"waited {timeout_s:g} s for the other process to read a message")
            self.flush()

    def post(self, message: Any) -> None:
        """Send as much of a message as there is room for, without waiting; the rest goes before the next.

        Raises:
            ChannelClosed: the other end is gone.
        """
        body = pickle.dumps(message, 5)
        with uninterrupted, self._sending:  # half a message would be read as the beginning of the next
            self._unsent += len(body).to_bytes(_HEADER, "little") + body
            self._push()

    def flush(self) -> None:
        """Send what there was no room for before, as far as there is now.

        Raises:
            ChannelClosed: the other end is gone.
        """
        with uninterrupted, self._sending:
            self._push()

    @property
    def behind(self) -> bool:
        """Whether something was posted that there was no room for."""
        return bool(self._unsent)

    def _push(self) -> None:
        try:
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent)]
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._unsent.clear()
            raise ChannelClosed("the other end is gone") from error

    # Receiving --------------------------------------------------------------------------------

    def recv(self, timeout_s: float, waiting_for: str = "a message") -> Any:
        """The next message.

        Raises:
            TimeoutError: none came in time; the message names what was waited for.
            ChannelClosed: the other end is gone.
        """
        message = self.take(timeout_s)
        if message is NOTHING:
            raise TimeoutError(f"waited {timeout_s:g} s for {waiting_for}")
        return message

    def take(self, timeout_s: float = 0.0) -> Any:
        """The next message, or ``NOTHING`` if none came in time.

        Raises:
            ChannelClosed: the other end is gone.
        """
        end = self._fill(timeout_s)
        if not end:
            return NOTHING
        body = self._held[_HEADER:end]
        del self._held[:end]
        self.has_received = True
        return pickle.loads(body)

    def poll(self, timeout_s: float = 0.0) -> bool:
        """Wait until :meth:`recv` would return, or raise ``ChannelClosed``, at once; whether it would."""
        try:
            return self._fill(timeout_s) > 0
        except ChannelClosed:
            return True

    @property
    def partial(self) -> bool:
        """Whether the beginning of a message was read, and the rest was not there yet."""
        return 0 < len(self._held) < self._end()

    def _end(self) -> int:
        """Where the first message ends in what is held, as far as that is known."""
        size = int.from_bytes(self._held[:_HEADER], "little") if len(self._held) >= _HEADER else 0
        return _HEADER + size

    def _fill(self, timeout_s: float) -> int:
        """Read until a whole message is held, and return its end; 0 if the time is over before."""
        until = time.monotonic() + timeout_s
        while len(self._held) < (end := self._end()):
            try:
                with uninterrupted:
                    got = self._socket.recv(max(end - len(self._held), _CHUNK))
                    self._held += got
            except (BlockingIOError, InterruptedError):
                rest = until - time.monotonic()
                if rest <= 0 and timeout_s > 0:
                    return 0
                if not self._wait.poll(max(0.0, rest) * 1e3):
                    return 0
                continue
            except OSError as error:
                raise ChannelClosed("the other end is gone") from error
            if not got:
                raise ChannelClosed("the other end is gone")
        return end


def _writable(end: socket.socket, timeout_s: float) -> bool:
    poll = select.poll()
    poll.register(end.fileno(), select.POLLOUT)
    return bool(timeout_s > 0 and poll.poll(timeout_s * 1e3))


def _opened(duplicate: Any) -> Channel:
    fd = duplicate.detach()
    os.set_inheritable(fd, False)
    return Channel(socket.socket(fileno=fd))
