"""WeightSyncScheme: sends the weights of one model to receivers."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence, Set
from enum import StrEnum
from typing import Any, ClassVar

from torch import nn

from rollwright._foreign import is_torchrl_scheme
from rollwright.weight_update._boards import Boards
from rollwright.weight_update.feed import WeightFeed
from rollwright.weight_update.forms import State, Strategy, check_state, describe, flat_state, split_by_worker

__all__ = ["WeightSyncScheme"]

STRATEGIES: tuple[Strategy, ...] = ("tensordict", "state_dict")
_NAP_S = 1e-3


class _Role(StrEnum):
    """Of the end of a scheme."""

    SENDER = "sender"
    RECEIVER = "receiver"


class WeightSyncScheme:
    """How the weights of one model travel.

    A collector takes schemes by model (``weight_sync_schemes={"policy": scheme}``) and does the rest. By itself, a
    scheme connects processes: one calls :meth:`init_on_sender`, hands the scheme to those that it starts, and sends;
    they call :meth:`init_on_receiver` on what they were handed, and receive. All may call :meth:`connect` first.

    Sending publishes: it copies the weights and returns. A receiver takes the last publication when it calls
    :meth:`receive`, whole; it never changes in the middle of a step.

    Args:
        strategy: ``"tensordict"``: parameters and buffers; ``"state_dict"``: what ``state_dict()`` holds, extra state
            included.

    Raises:
        ValueError: a strategy of another name.
    """

    sends: ClassVar[bool] = True
    """Whether weights travel at all."""

    def __init__(self, strategy: Strategy = "tensordict") -> None:
        if strategy not in STRATEGIES:
            raise ValueError(f"strategy: expected {' or '.join(map(repr, STRATEGIES))}, got {strategy!r}.")
        self.strategy = strategy
        self.model_id: str | None = None
        self.worker_idx: int | None = None
        self.context: Any = None
        self.version = 0
        self._model: Any = None
        self._initial: Any = None
        self._boards: Boards | None = None
        self._feed: WeightFeed | None = None
        self._role: _Role | None = None
        self._synchronized = False

    @classmethod
    def from_backend(cls, backend: str, **kwargs: Any) -> WeightSyncScheme:
        """The scheme for a kind of worker.

        Args:
            backend: ``"none"`` or ``"direct"``: :class:`NoWeightSyncScheme`; ``"shared"`` or ``"thread"``:
                :class:`SharedMemWeightSyncScheme`; ``"process"`` or ``"multiprocessing"``:
                :class:`MultiProcessWeightSyncScheme`; ``"distributed"``: :class:`DistributedWeightSyncScheme`;
                ``"rpc"``: :class:`RPCWeightSyncScheme`; ``"ray"``: :class:`RayWeightSyncScheme`.
            **kwargs: for it.

        Raises:
            ValueError: a backend of another name.

        Example:
            >>> WeightSyncScheme.from_backend("process", strategy="state_dict")
            MultiProcessWeightSyncScheme(strategy='state_dict')
        """
        if backend not in _BY_BACKEND:
            raise ValueError(f"backend: expected one of {', '.join(map(repr, sorted(_BY_BACKEND)))}, got {backend!r}.")
        return _BY_BACKEND[backend](**kwargs)

    @classmethod
    def from_torchrl(cls, scheme: Any) -> Any:
        """The scheme of the same name, for one of TorchRL's own classes; other objects are returned unchanged."""
        of_name = {kind.__name__: kind for kind in _BY_BACKEND.values()}
        if not is_torchrl_scheme(scheme) or type(scheme).__name__ not in of_name:
            return scheme
        counterpart = of_name[type(scheme).__name__](strategy=scheme.strategy_str)
        if getattr(scheme, "per_worker_weights", False) and hasattr(counterpart, "per_worker_weights"):
            counterpart.per_worker_weights = True
        return counterpart

    def __init_subclass__(cls, backends: Sequence[str] = (), **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _BY_BACKEND.update(dict.fromkeys(backends, cls))

    @property
    def shares(self) -> bool:
        """Whether workers that get the same weights read them from the same memory."""
        return True

    def state_of(self, weights: Any, name: str = "policy", *, optional: Set[str] = frozenset()) -> State:
        """Weights in any form as what travels: a flat state, nothing is copied.

        Args:
            weights: a module, its ``state_dict``, or a (nested) TensorDict or dictionary.
            name: what takes them, for messages.
            optional: buffers that a ``state_dict`` leaves out, and that the receivers have.

        Raises:
            TypeError: ``weights`` is no module, TensorDict or dictionary.
        """
        return flat_state(weights, name, strategy=self.strategy, optional=optional)

    # The sender -------------------------------------------------------------------------------

    def init_on_sender(
        self,
        model_id: str | None = None,
        context: Any = None,
        *,
        model: nn.Module | None = None,
        weights: Any = None,
        num_workers: int | None = None,
        devices: Sequence[Any] | None = None,
    ) -> None:
        """Become the side that sends. Hand the scheme to other processes after this, while they start.

        Args:
            model_id: of the model, ``"policy"`` by default.
            context: has ``get_model(model_id)``, where the weights are read when none are given.
            model: is read instead.
            weights: are published by :meth:`connect` instead of the model's.
            num_workers: how many receivers there are; 1 where the context has no ``num_workers``.
            devices: of the receivers, instead of their number; weights travel on the CPU.

        Raises:
            RuntimeError: it was initialised before.
            ValueError: ``num_workers`` is less than 1, or not the number of devices.
        """
        self._become(_Role.SENDER, model_id or "policy", context, model)
        if devices is not None and num_workers not in (None, len(devices)):
            raise ValueError(f"devices: expected one for each of {num_workers} receivers, got {len(devices)}.")
        known = getattr(context, "num_workers", 1) if devices is None else len(devices)
        count = known if num_workers is None else num_workers
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ValueError(f"num_workers: expected a count of at least 1, got {count!r}.")
        self._initial = weights
        self._boards = Boards(count)

    def send(self, weights: Any = None, worker_ids: int | Sequence[int] | None = None) -> int:
        """Publish weights.

        Args:
            weights: a module, TensorDict, ``state_dict``, or a dictionary of these by worker; None: the model's.
            worker_ids: who gets them; None: all.

        Returns:
            The version of the publication; 1 is the first.

        Raises:
            RuntimeError: this is not the sender.
            ValueError: a worker that is not there, or weights that do not fit the model of the sender.
            TypeError: weights of no known form.
        """
        boards, split = self._sending("send"), split_by_worker(weights, worker_ids)
        if split is None and worker_ids is not None:
            split = dict.fromkeys([worker_ids] if isinstance(worker_ids, int) else worker_ids, weights)
        unknown = sorted((split or {}).keys() - set(range(len(boards))))
        if unknown:
            raise ValueError(f"worker_ids: expected some of 0 to {len(boards) - 1}, got {unknown}.")
        states: list[tuple[list[int] | None, State]] = (
            [(None, self._checked(weights))]
            if split is None
            else [([worker], self._checked(given)) for worker, given in split.items()]
        )
        self.version += 1
        for workers, state in states if self.sends else ():
            boards.publish(self.version, {self.model_id or "policy": state}, workers, shared=self.shares)
        return self.version

    def wait_until_taken(self, timeout_s: float, worker_ids: Sequence[int] | None = None) -> None:
        """Wait until receivers have what was sent last.

        Raises:
            TimeoutError: some have not; the message names them.
        """
        boards = self._sending("wait_until_taken")
        until = time.monotonic() + timeout_s
        while self.sends:
            late = [worker for worker in worker_ids or range(len(boards)) if not boards.has_taken(worker)]
            if not late:
                return
            if time.monotonic() > until:
                raise TimeoutError(
                    f"waited {timeout_s:g} s for workers {late} to receive the weights of {self.model_id!r}"
                )
            time.sleep(_NAP_S)

    def _sending(self, what: str) -> Boards:
        """The boards of a sender."""
        self._check_role(_Role.SENDER, what)
        assert self._boards is not None  # of a sender
        return self._boards

    def _checked(self, weights: Any) -> State:
        model, name = self.model, self.model_id or "policy"
        state = self.state_of(model if weights is None else weights, name)
        if model is not None:
            kind, signature, optional, _ = describe(model, name)
            check_state(state, signature, name, kind=kind, optional=optional)
        return state

    # The receiver -----------------------------------------------------------------------------

    def init_on_receiver(
        self, model_id: str | None = None, context: Any = None, *, model: Any = None, worker_idx: int | None = None
    ) -> None:
        """Become the side that receives, with a scheme that came from the sender.

        Args:
            model_id: of the model; None: as the sender has named it.
            context: has ``get_model(model_id)``, and perhaps ``worker_idx``.
            model: takes the weights instead.
            worker_idx: which of the receivers this is; 0 where the context does not give it.

        Raises:
            RuntimeError: it was initialised before, or does not come from a sender.
            ValueError: there is no receiver of that index, or nothing to receive for.
        """
        if self._boards is None:
            raise RuntimeError(
                "init_on_receiver: this scheme comes from no sender. Call init_on_sender() on it, and hand it to the "
                "process of the receiver."
            )
        if context is None and model is None:
            raise ValueError("init_on_receiver: expected context= or model=, got neither. Pass what takes the weights.")
        worker = getattr(context, "_worker_idx", None) if worker_idx is None else worker_idx
        worker = 0 if worker is None else worker
        if not 0 <= worker < len(self._boards):
            raise ValueError(f"worker_idx: expected 0 to {len(self._boards) - 1}, got {worker}.")
        self._become(_Role.RECEIVER, model_id or self.model_id or "policy", context, model)
        self.worker_idx = worker
        self._feed = WeightFeed(self._boards.of(worker))

    def receive(self, timeout: float | None = None) -> int | None:
        """Copy what was sent last into the model.

        Args:
            timeout: seconds to wait for something new; None: do not wait.

        Returns:
            Its version; None if nothing is new.

        Raises:
            RuntimeError: this is not the receiver.
        """
        self._check_role(_Role.RECEIVER, "receive")
        assert self._feed is not None  # of a receiver
        until = time.monotonic() + (timeout or 0.0)
        while not self._feed.due:
            if not self.sends or time.monotonic() >= until:
                return None
            time.sleep(_NAP_S)
        self.version = self._feed.apply(self)
        return self.version

    def get_model(self, model_id: str) -> Any:
        """The model that takes the weights."""
        return self._model if self._model is not None else self.context.get_model(self.model_id)

    # Both -------------------------------------------------------------------------------------

    def connect(self, *, worker_idx: int | None = None, weights: Any = None, timeout: float = 30.0) -> None:
        """The sender publishes the first weights; a receiver waits for them and takes them.

        Args:
            worker_idx: of a receiver, if it was not known before.
            weights: of a sender, instead of the model's.
            timeout: of a receiver, in seconds.

        Raises:
            RuntimeError: it was not initialised.
            TimeoutError: nothing was sent in time.
        """
        if self._role is _Role.SENDER:
            given = self._initial if weights is None else weights
            if given is not None or self.model is not None:
                self.send(given)
        elif self._role is _Role.RECEIVER:
            if worker_idx is not None and worker_idx != self.worker_idx:
                raise ValueError(f"worker_idx: this is receiver {self.worker_idx}, got {worker_idx}.")
            if self.sends and self.receive(timeout) is None:
                raise TimeoutError(
                    f"waited {timeout:g} s for the first weights of {self.model_id!r}. Call connect() or send() on the "
                    "sender."
                )
        else:
            raise RuntimeError("connect: call init_on_sender() or init_on_receiver() first.")
        self._synchronized = True

    @property
    def model(self) -> Any:
        """The model of this side; None where there is none."""
        if self._model is not None or not hasattr(self.context, "get_model"):
            return self._model
        return self.context.get_model(self.model_id)

    @property
    def initialized_on_sender(self) -> bool:
        """Whether this is the sender."""
        return self._role is _Role.SENDER

    @property
    def initialized_on_receiver(self) -> bool:
        """Whether this is a receiver."""
        return self._role is _Role.RECEIVER

    @property
    def synchronized_on_sender(self) -> bool:
        """Whether this is the sender, and has connected."""
        return self.initialized_on_sender and self._synchronized

    @property
    def synchronized_on_receiver(self) -> bool:
        """Whether this is a receiver, and has connected."""
        return self.initialized_on_receiver and self._synchronized

    def shutdown(self) -> None:
        """Let go of memory and models. May be called again."""
        self._boards = self._feed = self._model = self.context = self._role = None

    def __getstate__(self) -> Mapping[str, Any]:
        # What a receiver needs: the models of the sender stay there.
        kept = {"context": None, "_model": None, "_feed": None, "_role": None, "_synchronized": False, "_initial": None}
        return {**self.__dict__, **kept}

    def __repr__(self) -> str:
        return f"{type(self).__name__}(strategy={self.strategy!r})"

    def _become(self, role: _Role, model_id: str, context: Any, model: Any) -> None:
        if self._role is not None:
            raise RuntimeError(f"init_on_{role}: this scheme is a {self._role} already. Make one for each model.")
        self._role, self.model_id, self.context, self._model = role, model_id, context, model

    def _check_role(self, role: _Role, what: str) -> None:
        if self._role is not role:
            raise RuntimeError(f"{what}: this scheme is no {role}. Call init_on_{role}() first.")


_BY_BACKEND: dict[str, type[WeightSyncScheme]] = {}
