"""Weight synchronization schemes, and the publisher: how weights travel from a learner to receivers."""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence, Set
from enum import StrEnum
from functools import partial
from multiprocessing.context import get_spawning_popen
from typing import Any, ClassVar

from torch import nn

from rollwright._foreign import is_torchrl_scheme
from rollwright._memory import Segment
from rollwright.weight_update.forms import State, Strategy, check_state, describe, flat_state, split_by_worker
from rollwright.weight_update.shared import SharedWeights
from rollwright.weight_update.subscribing import HasModels, StateReceiver, WeightSubscriber

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
    per_worker_weights: bool = False
    """Whether each worker has memory of its own even for what is for all."""

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
        self._publisher: Publisher | None = None
        self._subscriber: WeightSubscriber | None = None
        self._role: _Role | None = None
        self._synchronized = False

    @classmethod
    def from_backend(cls, backend: str, **kwargs: Any) -> WeightSyncScheme:
        """The scheme for a kind of worker.

        Args:
            backend: ``"none"`` or ``"direct"``: :class:`NoWeightSyncScheme`; ``"shared"`` or ``"thread"``:
                :class:`SharedMemWeightSyncScheme`; ``"process"`` or ``"multiprocessing"``:
                :class:`MultiProcessWeightSyncScheme`; ``"distributed"``: :class:`DistributedWeightSyncScheme`;
                ``"rpc"``: :class:`RPCWeightSyncScheme`; ``"ray"``: :class:`RayWeightSyncScheme`; ``"vllm"``:
                :class:`VLLMWeightSyncScheme`.
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
        if getattr(scheme, "per_worker_weights", False):
            counterpart.per_worker_weights = True
        return counterpart

    def __init_subclass__(cls, backends: Sequence[str] = (), **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _BY_BACKEND.update(dict.fromkeys(backends, cls))

    @property
    def shares(self) -> bool:
        """Whether workers that get the same weights read them from the same memory."""
        return not self.per_worker_weights

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
        alike = copy.copy(self)  # without models
        self._become(_Role.SENDER, model_id or "policy", context, model)
        if devices is not None and num_workers not in (None, len(devices)):
            raise ValueError(f"devices: expected one for each of {num_workers} receivers, got {len(devices)}.")
        known = getattr(context, "num_workers", 1) if devices is None else len(devices)
        count = known if num_workers is None else num_workers
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ValueError(f"num_workers: expected a count of at least 1, got {count!r}.")
        self._initial = weights
        self._publisher = Publisher(count, {model_id or "policy": alike})

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
        publisher, split = self._sending("send"), split_by_worker(weights, worker_ids)
        if split is None and worker_ids is not None:
            split = dict.fromkeys([worker_ids] if isinstance(worker_ids, int) else worker_ids, weights)
        unknown = sorted((split or {}).keys() - set(range(len(publisher))))
        if unknown:
            raise ValueError(f"worker_ids: expected some of 0 to {len(publisher) - 1}, got {unknown}.")
        states: list[tuple[list[int] | None, State]] = (
            [(None, self._checked(weights))]
            if split is None
            else [([worker], self._checked(given)) for worker, given in split.items()]
        )
        self.version += 1
        for workers, state in states if self.sends else ():
            publisher.publish(self.version, {self.model_id or "policy": state}, workers)
        return self.version

    def wait_until_taken(self, timeout_s: float, worker_ids: Sequence[int] | None = None) -> None:
        """Wait until receivers have what was sent last.

        Raises:
            TimeoutError: some have not; the message names them.
        """
        publisher = self._sending("wait_until_taken")
        until = time.monotonic() + timeout_s
        while self.sends:
            late = [worker for worker in worker_ids or range(len(publisher)) if not publisher.has_taken(worker)]
            if not late:
                return
            if time.monotonic() > until:
                raise TimeoutError(
                    f"waited {timeout_s:g} s for workers {late} to receive the weights of {self.model_id!r}"
                )
            time.sleep(_NAP_S)

    def _sending(self, what: str) -> Publisher:
        """What a sender publishes with."""
        self._check_role(_Role.SENDER, what)
        assert self._publisher is not None  # of a sender
        return self._publisher

    def _checked(self, weights: Any) -> State:
        model, name = self.model, self.model_id or "policy"
        state = self.state_of(model if weights is None else weights, name)
        if model is not None:
            check_state(state, describe(model, name), name)
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
        if self._publisher is None:
            raise RuntimeError(
                "init_on_receiver: this scheme comes from no sender. Call init_on_sender() on it, and hand it to the "
                "process of the receiver."
            )
        if context is None and model is None:
            raise ValueError("init_on_receiver: expected context= or model=, got neither. Pass what takes the weights.")
        worker = getattr(context, "_worker_idx", None) if worker_idx is None else worker_idx
        worker = 0 if worker is None else worker
        if not 0 <= worker < len(self._publisher):
            raise ValueError(f"worker_idx: expected 0 to {len(self._publisher) - 1}, got {worker}.")
        self._become(_Role.RECEIVER, model_id or self.model_id or "policy", context, model)
        self.worker_idx = worker
        self._subscriber = WeightSubscriber(self._publisher.weights_of(worker))

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
        assert self._subscriber is not None  # of a receiver
        until = time.monotonic() + (timeout or 0.0)
        while not self._subscriber.due:
            if not self.sends or time.monotonic() >= until:
                return None
            time.sleep(_NAP_S)
        self.version = self._subscriber.apply(self)
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
        self._publisher = self._subscriber = self._model = self.context = self._role = None

    def __getstate__(self) -> Mapping[str, Any]:
        # What a receiver needs: the models of the sender stay there.
        kept = {
            "context": None,
            "_model": None,
            "_subscriber": None,
            "_role": None,
            "_synchronized": False,
            "_initial": None,
        }
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


class SharedMemWeightSyncScheme(WeightSyncScheme, backends=("shared", "thread")):
    """Workers that get the same weights read them from the same memory: a publication is copied once, for all.

    Args:
        strategy: see :class:`WeightSyncScheme`.
        per_worker_weights: publish to each worker by itself even what is for all.

    Example:
        >>> import copy
        >>> import torch
        >>> from torch import nn
        >>> learner, actor = nn.Linear(2, 1), nn.Linear(2, 1)
        >>> sender = SharedMemWeightSyncScheme()
        >>> sender.init_on_sender(model=learner)
        >>> receiver = copy.copy(sender)  # or what a process gets that is started with it
        >>> receiver.init_on_receiver(model=actor)
        >>> sender.send(), receiver.receive(), receiver.receive()
        (1, 1, None)
        >>> torch.equal(learner.weight, actor.weight)
        True
    """

    def __init__(self, strategy: Strategy = "tensordict", *, per_worker_weights: bool = False) -> None:
        super().__init__(strategy)
        self.per_worker_weights = per_worker_weights


class MultiProcessWeightSyncScheme(WeightSyncScheme, backends=("process", "multiprocessing")):
    """Each worker has memory of its own: a publication is copied once for each."""

    per_worker_weights = True


class NoWeightSyncScheme(WeightSyncScheme, backends=("none", "direct")):
    """Nothing travels: workers act with the weights that they began with, or get them elsewhere."""

    sends: ClassVar[bool] = False


class DistributedWeightSyncScheme(WeightSyncScheme, backends=("distributed",)):
    """Weights for groups of workers on other machines: a publication is sent once to each group.

    It is what collectors with ``backend="distributed"`` do without a scheme, too: the collector holds the weights, and
    its connections to the groups bring them there.

    Args:
        strategy: see :class:`WeightSyncScheme`.

    Example:
        >>> WeightSyncScheme.from_backend("distributed")
        DistributedWeightSyncScheme(strategy='tensordict')
    """


class RPCWeightSyncScheme(WeightSyncScheme, backends=("rpc",)):
    """Weights for groups of workers that are members of a group of RPC: a publication is sent once to each group.

    It is what collectors with ``backend="rpc"`` do without a scheme, too.

    Args:
        strategy: see :class:`WeightSyncScheme`.

    Example:
        >>> WeightSyncScheme.from_backend("rpc")
        RPCWeightSyncScheme(strategy='tensordict')
    """


class RayWeightSyncScheme(SharedMemWeightSyncScheme, backends=("ray",)):
    """Weights for workers in actors of Ray: they cross the network once for each actor, whatever workers it has.

    They go by the connection of a collector with ``backend="ray"``, which takes the scheme as
    ``weight_sync_schemes={"policy": RayWeightSyncScheme()}``; it is what such a collector does without one, too.

    Args:
        strategy: see :class:`WeightSyncScheme`.
        backend: a backend of ``torch.distributed``, for programs that name one: none is used.

    Example:
        >>> RayWeightSyncScheme.from_backend("ray")
        RayWeightSyncScheme(strategy='tensordict')
    """

    def __init__(self, strategy: Strategy = "tensordict", backend: str = "gloo") -> None:
        super().__init__(strategy)

    def __getstate__(self) -> Mapping[str, Any]:
        if self._publisher is not None and get_spawning_popen() is None:  # memory of this machine
            raise TypeError(
                "RayWeightSyncScheme: a sender cannot be sent to an actor. Pass the scheme to RayCollector as "
                "weight_sync_schemes={'policy': scheme}, which brings the weights there."
            )
        return super().__getstate__()


class VLLMWeightSyncScheme(SharedMemWeightSyncScheme, backends=("vllm",)):
    """Weights for engines of vLLM: a publication is copied once for all workers, and each gives it to its engine.

    The engine knows how its weights travel: by file, or from GPU to GPU by vLLM's own transfer; see
    :class:`~rollwright.modules.llm.AsyncVLLM`. A collector does the same without a scheme.

    Args:
        strategy: see :class:`WeightSyncScheme`.
        master_address, master_port, gpus_per_replica, num_replicas: for programs that name them: engines agree about
            addresses by themselves, and know their GPUs.

    Example:
        >>> WeightSyncScheme.from_backend("vllm", gpus_per_replica=1)
        VLLMWeightSyncScheme(strategy='state_dict')
    """

    def __init__(
        self,
        strategy: Strategy = "state_dict",
        *,
        master_address: str | None = None,
        master_port: int | None = None,
        gpus_per_replica: int = 1,
        num_replicas: int = 1,
    ) -> None:
        super().__init__(strategy)


_DEFAULT = SharedMemWeightSyncScheme(strategy="state_dict")


class Publisher:
    """Publishes the weights of several models to several receivers, whole for each.

    What is for all goes to common memory, and is copied once; what is for some, or is of a scheme that keeps receivers
    apart, goes to their own. All models of a publication go to the same memory, so that a receiver gets them together.

    Args:
        num_receivers: how many there are.
        schemes: by model; a model without one is shared, and what its ``state_dict()`` holds is published.

    Example:
        >>> import torch
        >>> publisher = Publisher(2)
        >>> publisher.publish(1, {"policy": {"weight": torch.zeros(3)}}, [1])
        >>> [[weights.version for weights in publisher.weights_of(receiver)] for receiver in range(2)]
        [[-1, -1], [-1, 1]]
    """

    def __init__(self, num_receivers: int, schemes: Mapping[str, WeightSyncScheme] | None = None) -> None:
        self._schemes = dict(schemes or {})
        self._common = SharedWeights()
        self._own = [SharedWeights() for _ in range(num_receivers)]

    def __len__(self) -> int:
        return len(self._own)

    def scheme(self, model_id: str) -> WeightSyncScheme:
        """How a model's weights travel."""
        return self._schemes.get(model_id, _DEFAULT)

    def publish(
        self,
        version: int,
        models: Mapping[str, State],
        receivers: Sequence[int] | None = None,
        *,
        timeout_s: float = 1.0,
    ) -> None:
        """Publish weights; see :meth:`SharedWeights.publish`.

        Args:
            version: of the publication.
            models: flat states by model.
            receivers: who gets them; None: all.
            timeout_s: how long to wait for receivers that cannot keep up, for each memory that is written.
        """
        models = {model_id: state for model_id, state in models.items() if self.scheme(model_id).sends}
        if receivers is None and all(self.scheme(model_id).shares for model_id in models):
            self._common.publish(version, models, timeout_s=timeout_s)
            return
        for receiver in range(len(self)) if receivers is None else receivers:
            self._own[receiver].publish(version, models, timeout_s=timeout_s)

    def weights_of(self, receiver: int) -> list[SharedWeights]:
        """What a receiver follows, with a :class:`WeightSubscriber`; to be handed over while its process starts."""
        return [self._common.as_reader(receiver), self._own[receiver].as_reader(receiver)]

    def has_taken(self, receiver: int) -> bool:
        """Whether a receiver has what was published last."""
        return all(weights.stamp_taken(receiver) >= weights.stamp for weights in (self._common, self._own[receiver]))

    def forget(self, receiver: int) -> None:
        """Wait no more for a receiver that is dead."""
        for weights in (self._common, self._own[receiver]):
            weights.forget(receiver)

    def segments(self) -> list[Segment]:
        """All of the memory."""
        return [weights.segment for weights in (self._common, *self._own)]


class Relay:
    """Takes weights for a collector whose models are elsewhere, to be handed on.

    Args:
        collector: its ``get_model(model_id)`` raises ``ValueError`` for a model that is not in this process.

    Example:
        >>> from torch import nn
        >>> class Workers:
        ...     def get_model(self, model_id):
        ...         raise ValueError(model_id)
        >>> sender, relay = WeightSyncScheme(), Relay(Workers())
        >>> sender.init_on_sender("env.transform[0]", model=nn.Linear(2, 1))
        >>> import copy
        >>> schemes = register_receivers(relay, {"env.transform[0]": copy.copy(sender)}, synchronize_weights=False)
        >>> sender.send(), receive_all(schemes), sorted(relay.weights("env.transform[0]"))
        (1, ['env.transform[0]'], ['bias', 'weight'])
    """

    def __init__(self, collector: HasModels) -> None:
        self._collector = collector
        self._held: dict[str, State] = {}

    def get_model(self, model_id: str) -> Any:
        """The model, where it is in this process; else what keeps weights for it."""
        try:
            return self._collector.get_model(model_id)
        except ValueError:
            return StateReceiver(partial(self._held.__setitem__, model_id))

    def weights(self, model_id: str) -> Any:
        """What came last for a model: the model itself where it is in this process; None if nothing came."""
        model = self.get_model(model_id)
        return self._held.get(model_id) if isinstance(model, StateReceiver) else model


def as_schemes(name: str, schemes: Any) -> Any:
    """Schemes by model, with this library's in place of TorchRL's.

    Args:
        name: of the argument.
        schemes: what was passed; None: no schemes.

    Returns:
        ``schemes`` itself where none is TorchRL's.

    Raises:
        TypeError: they are no dictionary from names of models to schemes.
    """
    if isinstance(schemes, Mapping) and any(is_torchrl_scheme(scheme) for scheme in schemes.values()):
        schemes = {model_id: WeightSyncScheme.from_torchrl(scheme) for model_id, scheme in schemes.items()}
    return check_schemes(name, schemes)


def check_schemes(name: str, schemes: Any) -> Any:
    """Check schemes by model, and return them.

    Args:
        name: of the argument.
        schemes: what was passed; None: no schemes.

    Raises:
        TypeError: they are no dictionary from names of models to schemes.
    """
    if schemes is None:
        return None
    if not isinstance(schemes, Mapping):
        raise TypeError(
            f"{name}: expected schemes by model, got {type(schemes).__name__}: {schemes!r}. Pass for example "
            "{'policy': SharedMemWeightSyncScheme()}."
        )
    for model_id, scheme in schemes.items():
        if not isinstance(model_id, str):
            raise TypeError(
                f"{name}: expected names of models, got {type(model_id).__name__}: {model_id!r}. Name them as "
                "'policy' or 'env.transform[0]'."
            )
        if not isinstance(scheme, WeightSyncScheme):
            kind = isinstance(scheme, type) and issubclass(scheme, WeightSyncScheme)
            raise TypeError(
                f"{name}[{model_id!r}]: expected a WeightSyncScheme, got {type(scheme).__name__}: {scheme!r}. "
                + (f"Make one: {scheme.__name__}()." if kind else "Pass for example SharedMemWeightSyncScheme().")
            )
    return schemes


def register_receivers(
    context: HasModels,
    schemes: Mapping[str, WeightSyncScheme],
    *,
    synchronize_weights: bool = True,
    timeout_s: float = 30.0,
) -> dict[str, WeightSyncScheme]:
    """Make schemes receive for a collector.

    Args:
        context: the collector, or what takes weights for it.
        schemes: by model, from a sender; those that are receivers already stay what they are.
        synchronize_weights: wait for the first weights of each, and take them.
        timeout_s: for each.

    Returns:
        The schemes, for :func:`receive_all`.

    Raises:
        TypeError: one is no scheme.
        RuntimeError: one comes from no sender, or is the sender.
        TimeoutError: a sender has sent nothing.
    """
    check_schemes("weight_recv_schemes", schemes)
    for model_id, scheme in schemes.items():
        if not scheme.initialized_on_receiver:
            scheme.init_on_receiver(model_id, context)
    if synchronize_weights:
        for scheme in schemes.values():
            if not scheme.synchronized_on_receiver:
                scheme.connect(timeout=timeout_s)
    return dict(schemes)


def receive_all(schemes: Mapping[str, WeightSyncScheme]) -> list[str]:
    """Take what senders have sent last; the models that something new came for."""
    return [model_id for model_id, scheme in schemes.items() if scheme.receive() is not None]
