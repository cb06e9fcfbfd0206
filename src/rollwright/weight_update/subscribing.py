"""Takes published weights: into the models of a worker between two steps, or copied once, to be sent elsewhere."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from rollwright.weight_update.forms import State, is_extra, prepare
from rollwright.weight_update.policy_weights import weights_of
from rollwright.weight_update.shared import EntrySpec, ModelWeights, Publication, SharedWeights, copy_all

# What gives a module its own loading. Torch has no public names for most of these.
_METHODS = ("_load_from_state_dict", "load_state_dict", "state_dict", "get_extra_state")
_HOOKS = (
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
)


class Destination:
    """Copies weights into a module, as ``load_state_dict`` does.

    What weights of the same names and shapes need is found once, and again when the module has changed: where its
    parameters and buffers lie. A module that has its own loading (hooks, extra state) is given
    copies of the weights for its ``load_state_dict``, once they are known to be whole.

    Args:
        target: the module.
        specs: of the weights to come.
        tensors: some that are like them.
        name: what the module is, for messages.

    Raises:
        TypeError, ValueError: as :func:`~rollwright.weight_update.forms.prepare`.
    """

    def __init__(self, target: Any, specs: tuple[EntrySpec, ...], tensors: dict[str, torch.Tensor], name: str) -> None:
        prepare(target, tensors, name)
        self._target, self._specs, self._name = target, specs, name
        self._module = weights_of(target)
        self._parts = _parts(self._module)
        self._places = _places(self._parts, specs) if all(map(_is_plain, self._parts.values())) else None
        self._shapes = [shape for _, shape, _ in specs]

    @property
    def is_plain(self) -> bool:
        """Whether copying tensors is all that ``load_state_dict`` does."""
        return self._places is not None

    def fits(self, target: Any, specs: tuple[EntrySpec, ...]) -> bool:
        """Whether the module is this one, made of the same parts as before, and the weights are of the same kind."""
        if target is not self._target or (specs is not self._specs and specs != self._specs):
            return False
        # a search for what functions read takes longer than a copy of the weights
        parts = _parts(target if target is self._module else weights_of(target))
        return parts.keys() == self._parts.keys() and all(parts[name] is part for name, part in self._parts.items())

    def copy(self, tensors: dict[str, torch.Tensor]) -> bool:
        """Copy weights in place, in the order of the specs; False where the module must load them (nothing is done)."""
        if self._places is None:
            return False
        into = [getattr(part, key) for part, key in self._places]
        for tensor, shape in zip(into, self._shapes, strict=True):
            if tensor.shape != shape:
                return False
        with torch.no_grad():
            copy_all(into, list(tensors.values()))
        return True

    def load(self, weights: dict[str, Any]) -> None:
        """Give weights, tensors and extra state that nobody else writes, to the module's ``load_state_dict``."""
        prepare(self._target, weights, self._name)()


def _parts(module: nn.Module | None) -> dict[str, nn.Module]:
    return {} if module is None else dict(module.named_modules(remove_duplicate=False))


def _is_plain(part: nn.Module) -> bool:
    kind = type(part)
    usual = (nn.Module, _NormBase)  # batch norm loads numbers of batches that old states lack, and is plain otherwise
    return (
        all(any(getattr(kind, name) is getattr(base, name) for base in usual) for name in _METHODS)
        and not any(vars(part)[hooks] for hooks in _HOOKS)
        and not hasattr(part, "parametrizations")
    )


def _places(parts: dict[str, nn.Module], specs: tuple[EntrySpec, ...]) -> list[tuple[nn.Module, str]] | None:
    """The module and the name where each weight is kept; another tensor may be put there at any time."""
    places: list[tuple[nn.Module, str]] = []
    for name, _, _ in specs:
        path, _, key = name.rpartition(".")
        part = parts.get(path)
        if part is None or is_extra(name) or not isinstance(getattr(part, key, None), torch.Tensor):
            return None
        places.append((part, key))
    return places


_PASSES_BEFORE_PAUSE = 3


class HasModels(Protocol):
    """An object with models by id: every collector."""

    def get_model(self, model_id: str) -> Any:
        """The model that an id names."""


class StateReceiver(NamedTuple):
    """In place of a module: takes whole states, which nobody else writes, once they are known to be whole."""

    receive: Callable[[State], None]


class WeightSubscriber:
    """Follows what one publisher writes: the weights of all receivers, and those of this one alone.

    Read :attr:`due` before each step. After :meth:`apply`, the models are as one publication left them: each holds the
    last weights that were published for it up to there, in any of them.

    Args:
        sources: to follow, as this receiver.
        version: the version that the models have.

    Attributes:
        version: of the publication that the models hold; while they are loaded, that of the one that they will.

    Example:
        >>> from torch import nn
        >>> class Worker:
        ...     model = nn.Linear(2, 1, bias=False)
        ...     def get_model(self, model_id):
        ...         return self.model
        >>> source, worker = SharedWeights(), Worker()
        >>> subscriber = WeightSubscriber([source])
        >>> _ = source.publish(1, {"policy": nn.Linear(2, 1, bias=False).state_dict()})
        >>> subscriber.due, subscriber.apply(worker), subscriber.due
        (True, 1, False)
    """

    def __init__(self, sources: Sequence[SharedWeights], version: int = 0) -> None:
        self._sources = list(sources)
        self._seen = [0] * len(self._sources)  # stamps
        self._floor = 0
        self._stamps: dict[str, int] = {}
        self._overwritten: set[str] = set()  # models that older weights were written after
        self._destinations: dict[str, Destination] = {}
        self.version = version
        self._watch()

    @property
    def due(self) -> bool:
        """Whether something was published since :meth:`apply`."""
        for head, seen in self._watched:  # noqa: SIM110 - runs before each step; a generator takes twice as long
            if head[0] >> 1 != seen:
                return True
        return False

    @property
    def stamp(self) -> int:
        """Of the publication that the models hold; 0 before the first."""
        return max(self._seen, default=0)

    def skip(self) -> None:
        """Leave out what is published so far: the models have later weights, from elsewhere."""
        self._seen = [source.stamp for source in self._sources]
        self._floor = self.stamp
        self._watch()

    def apply(self, collector: HasModels, *, timeout_s: float = 30.0) -> int:
        """Copy what was published into the models.

        Args:
            collector: has the models.
            timeout_s: how long to try.

        Returns:
            The version that the models hold now.

        Raises:
            TypeError, ValueError: a model does not take the weights.
            TimeoutError: publications followed too fast all the time.
        """
        until = time.monotonic() + timeout_s
        passes = 0
        try:
            while not passes or self._overwritten or self._is_behind():
                passes += 1
                if passes > _PASSES_BEFORE_PAUSE:
                    self._ask_to_pause(True)
                again, self._overwritten = self._overwritten, set()
                for index, source in sorted(enumerate(self._sources), key=lambda found: found[1].stamp):
                    if source.stamp != self._seen[index] or again:
                        self._take(index, again, collector, max(0.0, until - time.monotonic()))
        finally:
            self._watch()
            if passes > _PASSES_BEFORE_PAUSE:
                self._ask_to_pause(False)
        return self.version

    def _is_behind(self) -> bool:
        """Whether one source has something that was published before the newest that is applied, of another."""
        newest = self.stamp
        return any(
            seen < newest and source.stamp != seen for source, seen in zip(self._sources, self._seen, strict=True)
        )

    def _take(self, index: int, again: set[str], collector: HasModels, timeout_s: float) -> None:
        since = {model_id: stamp - (model_id in again) for model_id, stamp in self._stamps.items()}
        loads: list[Callable[[], None]] = []

        def copy(publication: Publication) -> None:
            loads.clear()  # of weights that were being written
            for model_id, weights in sorted(publication.models.items(), key=lambda item: item[1].stamp):
                # One that has to be loaded may be the whole of those published after it, which therefore follow it.
                load = self._copy(collector.get_model(model_id), model_id, weights, at_once=not loads)
                if load is not None:
                    loads.append(load)

        found = self._sources[index].take(since, copy, floor=self._floor, timeout_s=timeout_s)
        if found is None:
            return
        before = self.version
        if found.stamp >= self.stamp:
            self.version = found.version  # which an engine stamps its tokens with from the moment that it loads
        try:
            for load in loads:
                load()
        except BaseException:
            self.version = before
            raise
        # One model may be a part of another ("policy" and "actor"): what was published last must be written last.
        oldest = min((weights.stamp for weights in found.models.values()), default=math.inf)
        later = {model_id for model_id, stamp in self._stamps.items() if stamp > oldest}
        self._overwritten |= later - found.models.keys()
        self._stamps.update({model_id: weights.stamp for model_id, weights in found.models.items()})
        self._seen[index] = found.stamp

    def _copy(self, target: Any, model_id: str, weights: ModelWeights, *, at_once: bool) -> Callable[[], None] | None:
        """Copy weights in place; where that is not enough, or too early, returns what to do once they are whole."""
        if isinstance(target, StateReceiver):
            return partial(target.receive, {**_copies(weights), **weights.extras})
        destination = self._destinations.get(model_id)
        if destination is None or not destination.fits(target, weights.specs):
            destination = Destination(target, weights.specs, weights.tensors, model_id)
            self._destinations[model_id] = destination
        if at_once and not weights.extras and destination.copy(weights.tensors):
            return None
        return partial(destination.load, {**_copies(weights), **weights.extras})

    def _ask_to_pause(self, pausing: bool) -> None:
        for source in self._sources:
            source.ask_to_pause(pausing)

    def _watch(self) -> None:
        self._watched = list(zip([source.head for source in self._sources], self._seen, strict=True))


def _copies(weights: ModelWeights) -> State:
    return {name: tensor.clone() for name, tensor in weights.tensors.items()}


class Forwarded(NamedTuple):
    """Weights that were published together.

    Attributes:
        receiver: who gets them; None: all.
        version: of the publication.
        models: by id, those that have changed: copies of their tensors by name, and what else belongs to their state.
    """

    receiver: int | None
    version: int
    models: dict[str, tuple[dict[str, torch.Tensor], dict[str, Any]]]


_Found = tuple[int, int, dict[str, Any]]  # stamp, version, models
Copies = dict[tuple[int | None, int, int], _Found | None]
"""By receiver, and the publications between which it was made."""


class Forwarder:
    """Takes what was published for some receivers since it was taken last.

    Example:
        >>> from rollwright.weight_update.schemes import Publisher
        >>> publisher, forwarder = Publisher(2), Forwarder()
        >>> for receiver in range(2):
        ...     forwarder.follow(receiver, publisher.weights_of(receiver))
        >>> publisher.publish(1, {"policy": {"weight": torch.zeros(3)}})
        >>> [(each.receiver, each.version) for each in forwarder.take()], list(forwarder.take())
        ([(None, 1)], [])
    """

    def __init__(self) -> None:
        self._sources: dict[int | None, SharedWeights] = {}
        self._taken: dict[int | None, int] = {}  # stamps

    def follow(self, receiver: int, sources: Sequence[SharedWeights]) -> None:
        """Take for a receiver, too, from its sources: the common one, and its own."""
        common, own = sources
        self._sources |= {None: common, receiver: own}
        self._taken.pop(receiver, None)

    def take(self, copies: Copies | None = None) -> Iterator[Forwarded]:
        """Publications that were not taken before, the earlier one first; each is whole.

        Args:
            copies: made so far by forwarders that follow the same weights for other receivers. What several take is
                copied once.
        """
        copies = {} if copies is None else copies
        for receiver, source in sorted(self._sources.items(), key=lambda item: item[1].stamp):
            since, stamp = self._taken.get(receiver, 0), source.stamp
            if stamp > since:
                key = receiver, since, stamp
                found = copies[key] = copies.get(key) or _copy(source, since)
                if found is not None:
                    self._taken[receiver], version, models = found
                    yield Forwarded(receiver, version, models)


def _copy(source: SharedWeights, since: int) -> _Found | None:
    models: dict[str, Any] = {}

    def copy(publication: Publication) -> None:
        models.clear()
        for model_id, weights in publication.models.items():
            if weights.stamp > since:
                models[model_id] = {name: each.clone() for name, each in weights.tensors.items()}, dict(weights.extras)

    found = source.take({}, copy)
    return None if found is None else (found.stamp, found.version, models)
