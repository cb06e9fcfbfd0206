"""Prioritised sampling, and the trees that it draws by."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from rollwright._tensors import as_tensor
from rollwright.data.replay_buffers.ledger.ledger import Span
from rollwright.data.replay_buffers.samplers.sampler import Draw, Sampler
from rollwright.data.replay_buffers.storages.batches import positive
from rollwright.data.replay_buffers.storages.storage import Storage

FAN_OUT = 32  # children of a node: few levels and few calls, while a row still fits four cache lines
TOP = 1024  # a level this short is reduced and searched as a whole
MANY = 500  # leaves of an update that may lie side by side
_BELOW_ONE = 1.0 - 2.0**-52

Floats = NDArray[np.float64]
Index = NDArray[np.int64]


class _Tree(ABC):
    """Levels over ``size`` leaves; each node is the reduction of the :data:`FAN_OUT` nodes below it.

    A node is always computed again from the nodes below it, never by adding differences: nothing drifts.

    Args:
        size: number of leaves.
        empty: value of leaves that hold nothing, neutral in the reduction.

    Raises:
        ValueError: ``size`` is below 1.
    """

    def __init__(self, size: int, empty: float) -> None:
        if size < 1:
            raise ValueError(f"size: expected at least 1 leaf, got {size}.")
        self.size = size
        self._rows: list[Floats] = []  # the levels from the leaves up, but for the top: [nodes / FAN_OUT, FAN_OUT]
        self._flat: list[Floats] = []  # all levels, [nodes]
        width = size
        while width > TOP:
            width = -(-width // FAN_OUT)
            self._rows.append(np.full((width, FAN_OUT), empty))
            self._flat.append(self._rows[-1].reshape(-1))
            width = width if width <= TOP else -(-width // FAN_OUT) * FAN_OUT
        self._flat.append(np.full(width, empty))
        self._top = self._flat[-1]

    @property
    def leaves(self) -> Floats:
        """The leaves, float64 ``[size]``, to be read."""
        return self._flat[0][: self.size]

    def update(self, index: Index, value: Floats | float) -> None:
        """Set leaves in O(n log size); where an index is repeated its last value counts.

        Args:
            index: int64 ``[n]``, ``0 <= index < size``.
            value: float64 ``[n]``, or one for all.
        """
        self._flat[0][index] = value
        for rows, above in zip(self._rows, self._flat[1:], strict=True):
            index = index // FAN_OUT
            if len(index) > MANY:  # neighbours have one parent; to look for more of them does not pay
                index = index[np.append(True, index[1:] != index[:-1])]
            above[index] = self._reduce(rows.take(index, axis=0))

    def fill(self, start: int, stop: int, value: Floats | float) -> None:
        """Set the leaves ``start <= i < stop`` in O(stop - start + log size).

        Args:
            start: first leaf.
            stop: leaf after the last.
            value: float64 ``[stop - start]``, or one for all.
        """
        if start >= stop:
            return
        self._flat[0][start:stop] = value
        for rows, above in zip(self._rows, self._flat[1:], strict=True):
            start, stop = start // FAN_OUT, (stop - 1) // FAN_OUT + 1
            above[start:stop] = self._reduce(rows[start:stop])

    @abstractmethod
    def _reduce(self, rows: Floats) -> Floats:
        """``[n, FAN_OUT]`` to ``[n]``: each row for itself, so that the bits do not depend on the rows beside it."""


class SumTree(_Tree):
    """Draws leaves in proportion to their values.

    Args:
        size: number of leaves, all 0 at first.

    Example:
        >>> tree = SumTree(4)
        >>> tree.update(np.array([0, 2, 2]), np.array([1.0, 7.0, 3.0]))
        >>> tree.total
        4.0
        >>> tree.find(np.array([0.0, 0.9, 1.0, 3.9]))
        array([0, 0, 2, 2])
    """

    def __init__(self, size: int) -> None:
        super().__init__(size, 0.0)
        self._reached: Floats | None = None  # sums over the top from its beginning

    def update(self, index: Index, value: Floats | float) -> None:
        """Set leaves; values are finite and at least 0."""
        self._reached = None
        super().update(index, value)

    def fill(self, start: int, stop: int, value: Floats | float) -> None:
        """Set the leaves ``start <= i < stop``; values are finite and at least 0."""
        self._reached = None
        super().fill(start, stop, value)

    def _reduce(self, rows: Floats) -> Floats:
        summed: Floats = np.einsum("ij->i", rows)
        return summed

    def _reach(self) -> Floats:
        if self._reached is None:
            self._reached = self._top.cumsum()
        return self._reached

    @property
    def total(self) -> float:
        """Sum of all leaves."""
        return float(self._reach()[-1])

    def find(self, mass: Floats) -> Index:
        """The leaves where the sum from the beginning first exceeds ``mass``; never one whose value is 0.

        Args:
            mass: float64 ``[n]``, ``0 <= mass < total``; what lies beyond finds the last leaf above 0.

        Returns:
            int64 ``[n]``.

        Raises:
            ValueError: all leaves are 0.
        """
        reached = self._reach()
        if not reached[-1] > 0.0:
            raise ValueError("cannot draw in proportion: all values are 0.")
        # Sums of a level and of the one below agree but for rounding. Each level is searched in sums over its own
        # values, for a mass kept below their total: some value brings the sum over it, so that value is above 0.
        mass = np.minimum(mass, reached[-1] * _BELOW_ONE)
        node = reached.searchsorted(mass, "right")
        value, upto = self._top.take(node), reached.take(node)
        for rows in reversed(self._rows):
            mass = np.maximum(mass - (upto - value), 0.0)
            children = rows.take(node, axis=0)
            sums: Floats = torch.from_numpy(children).cumsum(1).numpy()  # NumPy takes seven times as long
            mass = np.minimum(mass, sums[:, -1] * _BELOW_ONE)
            child = (sums > mass[:, None]).argmax(1)
            within = child + np.arange(0, children.size, FAN_OUT)
            value, upto = children.take(within), sums.take(within)
            node = node * FAN_OUT + child
        return node


class MinTree(_Tree):
    """Keeps the least of its leaves.

    Args:
        size: number of leaves, all infinite at first.

    Example:
        >>> tree = MinTree(4)
        >>> tree.update(np.array([1, 3]), np.array([5.0, 2.0]))
        >>> tree.least
        2.0
    """

    def __init__(self, size: int) -> None:
        super().__init__(size, np.inf)

    def _reduce(self, rows: Floats) -> Floats:
        return torch.from_numpy(rows).amin(1).numpy()  # NumPy takes five times as long over short rows

    @property
    def least(self) -> float:
        """The least leaf, infinite where there is none."""
        return float(self._top.min())


WEIGHT = "priority_weight"
Reduction = Literal["max", "min", "mean", "median"]
_REDUCTIONS: dict[str, Callable[..., Any]] = {"max": np.max, "min": np.min, "mean": np.mean, "median": np.median}
_SMALLEST = 1e-300  # what lives can be drawn, whatever the exponent makes of its priority
_LARGEST = 1e290  # of a mass, so that the sum of as many as there may be stays finite


class PrioritizedSampler(Sampler):
    r"""Elements in proportion to their priorities, with weights that correct for it.

    With the priority :math:`p_i \ge 0` of each of N elements (Schaul et al., 2016, "Prioritized Experience Replay",
    equation 1 and section 3.4; their proportional variant, :math:`p_i = |\delta_i|`)::

        P(i) = (p_i + eps)^alpha / sum_k (p_k + eps)^alpha
        w_i  = (N P(i))^-beta / max_k (N P(k))^-beta

    The batch has w as ``"priority_weight"``; the maximum is over all that is stored. A new element gets the largest
    priority so far, 1 at first. What is overwritten, or was never written, is never drawn.

    Args:
        max_capacity: elements of the storage, at most; rounded up to whole rows, as the storage's own size is.
        alpha: at least 0; 0: uniform.
        beta: at least 0; 0: all weights 1.
        eps: above 0.
        dtype: of the weights.
        reduction: "max", "min", "mean" or "median": makes one priority of several for an element.
        max_priority_within_buffer: a new element gets the largest priority of what is stored, instead.
        device: accepted for programs of the field; it changes nothing here: priorities lie in memory of the CPU.

    Attributes:
        max_capacity: elements of the storage, at most.

    Example:
        >>> from tensordict import TensorDict
        >>> from rollwright.data import LazyTensorStorage, TensorDictReplayBuffer
        >>> sampler = PrioritizedSampler(100, alpha=1.0, beta=1.0)
        >>> buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(100), sampler=sampler, batch_size=4)
        >>> index = buffer.extend(TensorDict({"obs": torch.arange(3)}, [3]))
        >>> buffer.update_priority(index, torch.tensor([0.0, 5.0, 0.0]))
        >>> batch = buffer.sample()
        >>> batch["obs"]
        tensor([1, 1, 1, 1])
        >>> batch["priority_weight"].shape
        torch.Size([4])
    """

    repeatable = True
    state_entries = ("priorities", "low", "high", "largest", "alpha", "beta")

    def __init__(
        self,
        max_capacity: int,
        alpha: float,
        beta: float,
        eps: float = 1e-8,
        dtype: torch.dtype = torch.float32,
        reduction: Reduction = "max",
        max_priority_within_buffer: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        self.max_capacity = positive("max_capacity", max_capacity)
        self._alpha, self._beta = _at_least_zero("alpha", alpha), _at_least_zero("beta", beta)
        if not eps > 0 or not math.isfinite(eps):
            raise ValueError(f"eps: expected a number above 0, so that every element can be drawn, got {eps}.")
        if not dtype.is_floating_point:
            raise ValueError(f"dtype: expected a floating point type, got {dtype}.")
        if reduction not in _REDUCTIONS:
            raise ValueError(f"reduction: expected one of {sorted(_REDUCTIONS)}, got {reduction!r}.")
        self.eps, self.dtype, self.reduction = float(eps), dtype, reduction
        self.max_priority_within_buffer = bool(max_priority_within_buffer)
        self._reset()

    def _reset(self) -> None:
        size = min(self.max_capacity, 1024)  # grows with what is stored
        self._masses, self._priorities = SumTree(size), MinTree(size)  # (p + eps)^alpha, 0; p, infinite: not live
        self._low = self._high = 0  # positions taken in
        self._largest = 1.0
        self._stale = False  # the largest priority stored is not known
        self._storage: Storage | None = None
        self._capacity, self._columns = 0, 1  # of the storage
        self._loaded: Floats | None = None  # priorities that wait for a storage, which says where they lie
        self._waiting: list[tuple[torch.Tensor, torch.Tensor]] = []  # updates that came before there was a storage

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_storage": None}

    # Options that may change ------------------------------------------------------------------

    @property
    def alpha(self) -> float:
        """Exponent of priorities; setting it costs O(stored)."""
        return self._alpha

    @alpha.setter
    def alpha(self, value: float) -> None:
        self._alpha = _at_least_zero("alpha", value)
        self._refill()

    @property
    def beta(self) -> float:
        """Exponent of the weights."""
        return self._beta

    @beta.setter
    def beta(self, value: float) -> None:
        self._beta = _at_least_zero("beta", value)

    @property
    def default_priority(self) -> float:
        """The priority of a new element."""
        if self._stale:
            stored = self._priorities.leaves
            largest = float(stored.max(initial=-1.0, where=stored < np.inf))
            self._largest = 1.0 if largest < 0 else largest
            self._stale = False
        return self._largest

    # Keeping up with the storage --------------------------------------------------------------

    def follow(self, storage: Storage) -> None:
        """Take in what was written since the last call.

        Raises:
            ValueError: more elements are stored than ``max_capacity``.
        """
        self._follow(storage, storage.ledger.span())

    def _follow(self, storage: Storage, span: Span) -> None:
        low, high, _ = span
        if low == self._low and high == self._high and storage is self._storage:
            return
        if high < self._high or (self._storage is not None and storage is not self._storage):
            self._reset()
        self._storage, self._capacity, self._columns = storage, storage.capacity, storage.columns
        if self._loaded is not None:
            self._place_loaded(self._loaded, storage)
        self._make_room(min(high, storage.capacity) * storage.columns)
        for start, stop in self._ring(self._low, min(low, self._high)):
            self._clear(start, stop)
        for begin, end in storage.ledger.ranges(span, self._high):
            for start, stop in self._ring(begin, end):
                self._admit(start, stop)
        self._low, self._high = low, high
        if self._waiting and high > low:
            waiting, self._waiting = self._waiting, []
            for index, priority in waiting:
                self.update_priority(storage.flat(index), priority, storage)

    def _ring(self, low: int, high: int) -> list[tuple[int, int]]:
        """Ranges of flat elements that the positions ``low <= p < high`` lie in, in order of positions."""
        low = max(low, high - self._capacity)
        if low >= high:
            return []
        row, end = low % self._capacity, low % self._capacity + high - low
        pieces = [(row, min(end, self._capacity)), (0, end - self._capacity)]
        return [(start * self._columns, stop * self._columns) for start, stop in pieces if start < stop]

    def _make_room(self, size: int) -> None:
        held = self._priorities.size
        if size <= held:
            return
        limit = -(-self.max_capacity // self._columns) * self._columns
        if size > limit:
            raise ValueError(
                f"max_capacity: expected at least the {size} elements that the storage holds, got {self.max_capacity}. "
                "Make the sampler with the storage's max_size."
            )
        size = min(limit, max(size, 2 * held))
        masses, priorities = self._masses.leaves, self._priorities.leaves
        self._masses, self._priorities = SumTree(size), MinTree(size)
        self._masses.fill(0, held, masses)
        self._priorities.fill(0, held, priorities)

    def _clear(self, start: int, stop: int) -> None:
        if self.max_priority_within_buffer and not self._stale:
            gone = self._priorities.leaves[start:stop]
            self._stale = bool(((gone >= self._largest) & (gone < np.inf)).any())
        self._masses.fill(start, stop, 0.0)
        self._priorities.fill(start, stop, np.inf)

    def _admit(self, start: int, stop: int) -> None:
        priority = self.default_priority
        self._priorities.fill(start, stop, priority)
        self._masses.fill(start, stop, self._mass(np.array([priority]))[0])

    def _refill(self) -> None:
        """Compute all masses again from the priorities."""
        drawable = self._drawable()
        masses = self._mass(np.where(drawable, self._priorities.leaves, 0.0))
        self._masses.fill(0, self._masses.size, np.where(drawable, masses, 0.0))

    def _drawable(self) -> NDArray[np.bool_]:
        """Which elements may be drawn, bool ``[size]``."""
        drawable: NDArray[np.bool_] = self._priorities.leaves < np.inf
        return drawable

    def _mass(self, priority: Floats) -> Floats:
        with np.errstate(over="ignore"):
            mass: Floats = np.clip((priority + self.eps) ** self._alpha, _SMALLEST, _LARGEST)
        return mass

    # Sampling ---------------------------------------------------------------------------------

    def draw(self, storage: Storage, batch_size: int, generator: torch.Generator | None = None) -> Draw:
        """Choose elements by priority; ``info`` has ``"priority_weight"``, of ``dtype``."""
        self.follow(storage)
        index = self._draw(batch_size, generator)
        return Draw(index, {WEIGHT: self._weight(index)})

    def _draw(self, n: int, generator: torch.Generator | None) -> Index:
        share = torch.rand(n, dtype=torch.float64, generator=generator, device="cpu").numpy()
        return self._masses.find(share * self._masses.total)

    def _weight(self, index: Index) -> torch.Tensor:
        least = self._mass(np.array([self._priorities.least]))[0]
        weight: Floats = (self._masses.leaves.take(index) / least) ** -self._beta
        return torch.from_numpy(weight).to(self.dtype)

    def update_priority(self, index: Index | torch.Tensor, priority: Any, storage: Storage | None = None) -> None:
        """Learn how much elements matter; those that are not stored any more are left out.

        Where no storage is known yet, priorities wait for the first that is drawn from.

        Raises:
            ValueError: priorities of another number than elements, below 0, or not finite.
            IndexError: an element beyond the storage.
        """
        if storage is None:
            storage = self._storage
            if storage is None:
                self._await_storage(index, priority)
                return
            index = storage.flat(index)
        self.follow(storage)
        where = np.asarray(index.numpy(force=True) if isinstance(index, torch.Tensor) else index, np.int64).reshape(-1)
        value = self._one_each(priority, len(where))
        if not len(where):
            return
        size = storage.capacity * storage.columns
        if where.max() >= size:
            raise IndexError(f"index: expected elements below {size}, got {where.max()}. Pass what sample() gave.")
        held = (where >= 0) & (where < self._priorities.size)
        if not held.all():
            where, value = where[held], value[held]
        before = self._priorities.leaves.take(where)
        live = before < np.inf
        if not live.all():
            where, value, before = where[live], value[live], before[live]
        if not len(where):
            return
        self._priorities.update(where, value)
        self._masses.update(where, self._masses_at(where, value))
        if self.max_priority_within_buffer:  # of an element that is named twice the last counts
            value = self._priorities.leaves.take(where)
        largest = float(value.max())
        if largest >= self._largest:
            self._largest, self._stale = largest, False
        elif self.max_priority_within_buffer and before.max() >= self._largest:
            self._stale = True

    def _await_storage(self, index: Index | torch.Tensor, priority: Any) -> None:
        """Keep priorities until a storage says what lies where."""
        places = torch.atleast_1d(as_tensor(index, dtype=torch.int64)).cpu().clone()
        value = self._one_each(priority, len(places))
        self._waiting.append((places, torch.from_numpy(value)))
        self._largest = max(self._largest, float(value.max(initial=0.0)))

    def mark_update(self, index: Any, *, storage: Storage | None = None) -> None:
        """Give elements the priority of new ones."""
        self.update_priority(index, self.default_priority, storage)

    def _masses_at(self, index: Index, priority: Floats) -> Floats:
        """What elements with these priorities weigh in a draw."""
        return self._mass(priority)

    def check_priorities(self, priority: Any, number: int) -> None:
        """Test priorities of so many elements, which :meth:`update_priority` would take.

        Raises:
            ValueError: they are of another number, below 0, or not finite.
        """
        self._one_each(priority, number)

    def _one_each(self, priority: Any, n: int) -> Floats:
        """Priorities as float64 ``[n]``."""
        value = np.asarray(priority.numpy(force=True) if isinstance(priority, torch.Tensor) else priority, np.float64)
        if value.size == 1:
            value = np.full(n, value.reshape(()))
        elif value.ndim == 0 or value.shape[0] != n:
            if value.size % max(n, 1) or not n:
                raise ValueError(
                    f"priority: expected one for each of the {n} elements, got shape {list(value.shape)}. "
                    "Pass the elements' index along with it."
                )
            value = value.reshape(n, -1)
        if value.ndim > 1:
            value = _REDUCTIONS[self.reduction](value.reshape(n, -1), axis=1) if n else np.zeros(0)
        fine = (value >= 0) & (value < np.inf)
        if not fine.all():
            raise ValueError(
                f"priority: expected finite numbers of at least 0, got {value[~fine][:5].tolist()}. "
                "Pass absolute errors."
            )
        return value

    # State ------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Priorities in the order of positions, not of rows: a storage of another size has them in other rows.

        Returns:
            ``"priorities"``, float64 ``[(high - low) * columns]``, infinite where nothing lies; ``"low"`` and
            ``"high"``, the positions that they belong to; the largest so far; ``alpha`` and ``beta``; ``"waiting"``,
            what came before there was a storage.
        """
        priorities = self._loaded
        if priorities is None:
            held = [self._priorities.leaves[start:stop] for start, stop in self._ring(self._low, self._high)]
            priorities = np.concatenate([np.zeros(0), *held])
        return {
            "priorities": torch.from_numpy(priorities.copy()),
            "low": self._low,
            "high": self._high,
            "largest": self.default_priority,
            "alpha": self._alpha,
            "beta": self._beta,
            "waiting": [(index.clone(), priority.clone()) for index, priority in self._waiting],
        }

    def check_state(self, state_dict: Any) -> None:
        """Test that a state is one of such a sampler, before anything is changed.

        Raises:
            ValueError: its priorities are not those of its positions, or there are more than ``max_capacity``.
        """
        super().check_state(state_dict)
        priorities, low, high = state_dict["priorities"], int(state_dict["low"]), int(state_dict["high"])
        if high < low or (len(priorities) % (high - low) if high > low else len(priorities)):
            raise ValueError(
                f"state_dict: expected as many priorities for each of the {high - low} positions, got "
                f"{len(priorities)}. Pass what state_dict() gave."
            )
        columns = len(priorities) // (high - low) if high > low else 1
        if len(priorities) > -(-self.max_capacity // max(columns, 1)) * columns:
            raise ValueError(
                f"max_capacity: expected at least the {len(priorities)} elements of the state, got "
                f"{self.max_capacity}. Make the sampler with the storage's max_size."
            )
        for name in ("alpha", "beta"):
            _at_least_zero(name, state_dict[name])

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a state of :meth:`state_dict`; where elements lie is known when a storage is followed next.

        Raises:
            ValueError: see :meth:`check_state`.
        """
        self.check_state(state_dict)
        priorities = state_dict["priorities"].numpy(force=True).astype(np.float64)
        waiting = [(index.clone(), priority.clone()) for index, priority in state_dict.get("waiting", ())]
        largest = float(state_dict["largest"])
        self._reset()
        self._low, self._high, self._loaded = int(state_dict["low"]), int(state_dict["high"]), priorities
        self._largest, self._waiting = largest, waiting
        self._alpha, self._beta = float(state_dict["alpha"]), float(state_dict["beta"])

    def _place_loaded(self, priorities: Floats, storage: Storage) -> None:
        """Put priorities of positions, ``[(high - low) * columns]``, to the elements of a storage."""
        low, high = self._low, self._high
        if len(priorities) != (high - low) * self._columns or high - low > self._capacity:
            self._reset()
            raise ValueError(
                f"state_dict: expected priorities of a storage like this one, of {storage.capacity} rows of "
                f"{storage.columns} elements, got {len(priorities)} for {high - low} positions. "
                "Load the state of the storage with that of the sampler."
            )
        self._loaded = None
        self._make_room(min(high, self._capacity) * self._columns)
        for start, stop in self._ring(low, high):
            self._priorities.fill(start, stop, priorities[: stop - start])
            priorities = priorities[stop - start :]
        self._refill()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(alpha={self._alpha}, beta={self._beta}, eps={self.eps})"


def _at_least_zero(name: str, value: float) -> float:
    if not value >= 0 or not math.isfinite(value):
        raise ValueError(f"{name}: expected a number of at least 0, got {value}.")
    return float(value)
