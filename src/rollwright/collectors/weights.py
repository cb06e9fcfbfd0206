"""New weights for the policies of collectors: parsed, applied to a local policy, or taken from schemes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase

from rollwright.collectors.delivery.thread import Background
from rollwright.collectors.rollout.policy import ActingPolicy
from rollwright.collectors.rollout.rollout import Rollout
from rollwright.weight_update import WeightSyncScheme, WeightUpdaterBase
from rollwright.weight_update.forms import (
    Description,
    State,
    check_state,
    flat_state,
    prepare,
    split_by_worker,
    unsaved_buffers,
)
from rollwright.weight_update.policy_weights import weights_of
from rollwright.weight_update.schemes import receive_all, register_receivers
from rollwright.weight_update.subscribing import HasModels, StateReceiver


class Update(NamedTuple):
    """Weights for some workers.

    Attributes:
        workers: their indices; None: all.
        models: flat states by model.
    """

    workers: Sequence[int] | None
    models: Mapping[str, State]


def pick_weights(positional: Any, weights: Any, policy: Any, policy_weights: Any = None) -> Any:
    """The one of several arguments for weights that was used; None when none was.

    Raises:
        ValueError: several were used.
    """
    names = ("policy_or_weights", "weights", "policy", "policy_weights")
    given = dict(zip(names, (positional, weights, policy, policy_weights), strict=True))
    used = [name for name, value in given.items() if value is not None]
    if len(used) > 1:
        raise ValueError(f"{' and '.join(used)} were both given. Pass the weights in one way.")
    return given[used[0]] if used else None


def parse_update(
    given: Any,
    *,
    weights_dict: Mapping[str, Any] | None,
    model_id: str | None,
    worker_ids: Any,
    own: set[Any],
    fallback: Any,
) -> dict[str, Any]:
    """Weights by model, for a collector that is one worker.

    Args:
        given: of :func:`pick_weights`; may be a dictionary from worker indices to weights.
        weights_dict: weights by model.
        model_id: what ``given`` is for.
        worker_ids: the workers that are meant.
        own: the index and the device of this worker.
        fallback: where the policy's weights are read when nothing is given.

    Raises:
        ValueError: arguments contradict one another, or mean another worker.
    """
    _check_weights_dict(given, weights_dict, model_id)
    split = split_by_worker(given, worker_ids)
    if split is not None:
        worker_ids = sorted(split)
        given = split.get(worker_ids[0]) if len(split) == 1 else None
    named = worker_ids if isinstance(worker_ids, list | tuple) else [] if worker_ids is None else [worker_ids]
    strangers = [worker for worker in named if worker not in own]
    if strangers:
        index = next(worker for worker in own if isinstance(worker, int))
        raise ValueError(f"worker_ids: this collector is worker {index} alone, got {strangers}. Leave worker_ids out.")
    if weights_dict is not None:
        return dict(weights_dict)
    if given is None and model_id in (None, "policy"):
        given = fallback
    return {} if given is None else {model_id or "policy": given}


def parse_update_for_workers(
    given: Any,
    *,
    weights_dict: Mapping[str, Any] | None = None,
    model_id: str | None = None,
    worker_ids: Any = None,
    num_workers: int,
    devices: Sequence[torch.device | None] = (),
    fallback: Any = None,
    signature: Callable[[int, str], Description | None],
    state_of: Callable[[str, Any, Set[str]], State] | None = None,
) -> list[Update]:
    """What an update publishes to which workers; all of it is checked, nothing is copied.

    Args:
        given: of :func:`pick_weights`; may be a dictionary from worker indices to weights.
        weights_dict: weights by model.
        model_id: what ``given`` is for.
        worker_ids: indices or devices of the workers that are meant; None for all.
        num_workers: how many there are.
        devices: of their policies.
        fallback: where the policy's weights are read when nothing is given.
        signature: gives, for a worker and a model, what :func:`~rollwright.weight_update.forms.describe` says of
            the model in that worker; None: it checks weights itself.
        state_of: makes the weights for a model flat, given its name, the weights, and buffers that it may have; None:
            :func:`~rollwright.weight_update.forms.flat_state`.

    Returns:
        Updates for different workers, in the order of workers. One for None where all get the same. ``models`` is
        empty where nothing was given, and there is no fallback.

    Raises:
        ValueError: arguments contradict one another, or mean a worker that is not there; names or shapes differ from
            those of a worker's model.
        TypeError: weights of an unknown form.
    """
    _check_weights_dict(given, weights_dict, model_id)

    def flat(name: str, weights: Any, worker: int = 0) -> State:
        found = signature(worker, name)
        optional: Set[str] = frozenset() if found is None else found.optional
        return flat_state(weights, name, optional=optional) if state_of is None else state_of(name, weights, optional)

    name = model_id or "policy"
    split = split_by_worker(given, worker_ids)
    if split is not None:
        named = _workers(list(split), num_workers, devices)
        updates = [Update([worker], {name: flat(name, split[worker], worker)}) for worker in named]
    else:
        if weights_dict is None and given is None:
            if name != "policy":
                raise ValueError(f"model_id: got {name!r} and no weights for it. Pass some.")
            given = fallback
        by_model = dict(weights_dict) if weights_dict is not None else {} if given is None else {name: given}
        models = {model: flat(model, weights) for model, weights in by_model.items()}
        named = list(range(num_workers)) if worker_ids is None else _workers(worker_ids, num_workers, devices)
        updates = [Update(None if len(named) == num_workers else named, models)]
    for update in updates:
        for worker in range(num_workers) if update.workers is None else update.workers:
            for model, state in update.models.items():
                found = signature(worker, model)
                if found is not None:
                    check_state(state, found, model)
    return updates


def _workers(given: Any, num_workers: int, devices: Sequence[torch.device | None]) -> list[int]:
    """Indices of workers that are given by index or by device, in order, once each."""
    named = list(given) if isinstance(given, list | tuple | set | range) else [given]
    if not named:
        raise ValueError("worker_ids: got none. Leave worker_ids out to update all workers.")
    found: set[int] = set()
    for worker in named:
        if isinstance(worker, int) and not isinstance(worker, bool):
            here = {worker} & set(range(num_workers))
        elif isinstance(worker, str | torch.device):
            device = torch.device(worker)
            here = {index for index, at in enumerate(devices) if at is not None and _same(at, device)}
        else:
            raise TypeError(f"worker_ids: expected indices or devices, got {type(worker).__name__}: {worker!r}.")
        if not here:
            at = ", ".join(sorted({str(device) for device in devices})) or "unknown devices"
            raise ValueError(f"worker_ids: expected some of 0 to {num_workers - 1}, on {at}, got {worker!r}.")
        found |= here
    return sorted(found)


def _same(one: torch.device, other: torch.device) -> bool:
    return one.type == other.type and (one.index or 0) == (other.index or 0)


def _check_weights_dict(given: Any, weights_dict: Any, model_id: str | None) -> None:
    if weights_dict is None:
        return
    if given is not None or model_id is not None:
        raise ValueError("weights_dict excludes model_id and other weights. Put all weights into weights_dict.")
    if not isinstance(weights_dict, Mapping):
        raise TypeError(f"weights_dict: expected weights by model, got {type(weights_dict).__name__}.")


def snapshot(weights: Any, optional: Set[str] = frozenset()) -> Any:
    """A copy of weights in any form that :func:`prepare` takes; what it does not take is returned as it is.

    Args:
        weights: in any form.
        optional: see :func:`~rollwright.weight_update.forms.flat_state`.
    """
    with torch.no_grad():
        if callable(weights) and not isinstance(weights, Mapping | TensorDictBase):
            weights = flat_state(weights, "a copy", optional=optional)
        if isinstance(weights, TensorDictBase):
            return weights.clone()
        if isinstance(weights, Mapping):
            return {key: snapshot(value) for key, value in weights.items()}
        return weights.detach().clone() if isinstance(weights, torch.Tensor) else weights


class WeightTargets:
    """The models of a collector, for what receives weights; an engine takes whole states, between two tokens.

    Args:
        collector: has the models, by id.
        acting: the policy, perhaps with an engine.
        worker_idx: which of the receivers of a scheme this is.
        version: of the weights that an engine is given; None: the next one.
    """

    def __init__(
        self,
        collector: HasModels,
        acting: ActingPolicy,
        worker_idx: int | None = None,
        *,
        version: Callable[[], int] | None = None,
    ) -> None:
        self._collector, self._acting, self._worker_idx = collector, acting, worker_idx
        self._version = version

    def get_model(self, model_id: str) -> Any:
        """Where the weights of a model go."""
        if model_id == "policy" and self._acting.engine is not None:
            return StateReceiver(self._update_engine)
        return self._collector.get_model(model_id)

    def _update_engine(self, weights: Any) -> None:
        if self._version is None:
            self._acting.update_engine(weights)
        else:
            self._acting.take([partial(self._acting.update_engine, weights)], self._version())


class CollectorWeights(ABC):
    """Takes updates of weights; subclasses apply them here, or publish them to workers.

    Attributes:
        updater: of the user, or None.
        receiver_schemes: by model; None: there are none.
    """

    def __init__(self) -> None:
        self.updater: WeightUpdaterBase | None = None
        self.receiver_schemes: dict[str, WeightSyncScheme] | None = None

    @property
    @abstractmethod
    def version(self) -> int:
        """Number of updates so far."""

    @abstractmethod
    def apply(
        self,
        given: Any,
        *,
        weights_dict: Mapping[str, Any] | None = None,
        model_id: str | None = None,
        worker_ids: Any = None,
    ) -> int:
        """Apply an update, without asking the updater; returns its version."""

    @abstractmethod
    def count_update(self) -> int:
        """Count an update that the user has made; returns the new version."""

    @abstractmethod
    def receiving(self) -> AbstractContextManager[HasModels]:
        """What schemes write into; inside the ``with`` block, no model of this process acts in another thread."""

    @abstractmethod
    def received(self, models: Sequence[str]) -> None:
        """Schemes have brought new weights for models."""

    def pushed(self, before: int) -> int:
        """The updater has pushed weights; returns their version.

        Args:
            before: the version before.
        """
        return max(before, self.version)

    def update(
        self, given: Any, *, weights_dict: Mapping[str, Any] | None, model_id: str | None, worker_ids: Any
    ) -> int:
        """Apply an update, through the updater if there is one; returns the version."""
        if self.updater is not None and weights_dict is None and model_id in (None, "policy"):
            before = self.version
            self.updater.push_weights(given, worker_ids)
            return self.pushed(before)
        return self.apply(given, weights_dict=weights_dict, model_id=model_id, worker_ids=worker_ids)

    def use_updater(self, updater: Any, collector: Any) -> None:
        """Use an updater of the user's, or one that a function makes.

        Args:
            updater: of the user; None: none.
            collector: which it is to be registered in.

        Raises:
            TypeError: it is none.
        """
        if updater is None:
            return
        made = updater if isinstance(updater, WeightUpdaterBase) else updater()
        if not isinstance(made, WeightUpdaterBase):
            raise TypeError(
                f"weight_updater: expected a function that makes a WeightUpdaterBase, and it made {made!r}. Return an "
                "updater, or pass one."
            )
        made.register_collector(collector)
        self.updater = made

    def register_schemes(self, schemes: dict[str, WeightSyncScheme], *, synchronize_weights: bool) -> None:
        """Take weights from schemes whose senders are elsewhere."""
        with self.receiving() as end:
            self.receiver_schemes = register_receivers(end, schemes, synchronize_weights=synchronize_weights)
            brought = [model_id for model_id, scheme in self.receiver_schemes.items() if scheme.sends]
            if synchronize_weights and brought:
                self.received(brought)

    def receive(self, policy_or_weights: Any, weights: Any, policy: Any) -> None:
        """Take weights: those that schemes have brought, or those that are passed.

        Raises:
            ValueError: weights were passed, and schemes are registered.
        """
        given = pick_weights(policy_or_weights, weights, policy)
        if self.receiver_schemes is None:
            self.update(given, weights_dict=None, model_id=None, worker_ids=None)
        elif given is not None:
            raise ValueError(
                f"receive_weights: got weights, and schemes bring those of {', '.join(self.receiver_schemes)}. Call "
                "it without arguments."
            )
        else:
            with self.receiving():
                if new := receive_all(self.receiver_schemes):
                    self.received(new)


class LocalWeights(CollectorWeights):
    """Applies updates from the next batch on; while a thread collects, from its next step on.

    Args:
        collector: has the models, by id.
        rollout: has the policy.
        background: the thread, if there is one.
        worker_idx: gives the index of the collector among its siblings.
    """

    def __init__(
        self, collector: HasModels, rollout: Rollout, background: Background, worker_idx: Callable[[], int | None]
    ) -> None:
        super().__init__()
        self._collector, self._rollout, self._background = collector, rollout, background
        self._worker_idx = worker_idx

    @property
    def version(self) -> int:
        """Number of updates so far."""
        return self._background.version

    def apply(
        self,
        given: Any,
        *,
        weights_dict: Mapping[str, Any] | None = None,
        model_id: str | None = None,
        worker_ids: Any = None,
    ) -> int:
        """Apply an update, without asking the updater; returns its version.

        Raises:
            RuntimeError: a thread collects, nothing was given, and there is no module in the policy to read again.
        """
        rollout, acting = self._rollout, self._rollout.acting
        self._background.raise_error()
        update = parse_update(
            given,
            weights_dict=weights_dict,
            model_id=model_id,
            worker_ids=worker_ids,
            own={self._worker_idx() or 0, rollout.devices.policy},
            fallback=acting.source,
        )
        if self._background.running:
            if not update and acting.has_no_weights:
                raise RuntimeError(
                    f"update_policy_weights_: found no module in the policy ({type(acting.policy).__name__}) whose "
                    "weights could be published to the thread of start(). Pass an nn.Module or a TensorDictModule "
                    "as policy, or call increment_version() to count an update of your own."
                )
            update = {name: snapshot(new, self._unsaved(name)) for name, new in update.items()}
        return self._background.publish({name: self._prepared(name, new) for name, new in update.items()})

    def _unsaved(self, name: str) -> set[str]:
        """Buffers of a model that a ``state_dict`` leaves out."""
        module = weights_of(self._collector.get_model(name))
        return set() if module is None else unsaved_buffers(module)

    def _prepared(self, name: str, new: Any) -> Callable[[], None]:
        acting = self._rollout.acting
        if name == "policy" and acting.engine is not None:
            return partial(acting.update_engine, new)
        return prepare(self._collector.get_model(name), new, name)

    def count_update(self) -> int:
        """Count an update that the user has made; returns the new version."""
        return self._background.publish({})

    @contextmanager
    def receiving(self) -> Iterator[HasModels]:
        """What schemes write into; inside the ``with`` block, no model of this process acts in another thread."""
        with self._background.pause():
            yield WeightTargets(self._collector, self._rollout.acting, self._worker_idx())

    def pushed(self, before: int) -> int:
        """See :class:`CollectorWeights`; an updater that has not passed weights on has written them in place."""
        return self.version if self.version > before else self.count_update()

    def received(self, models: Sequence[str]) -> None:
        """Schemes have brought new weights for models."""
        self._background.publish({})
