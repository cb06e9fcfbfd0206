"""StalenessAwareSampler: elements of policies that are not too old, the newer the likelier."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from rollwright._keys import NestedKey, checked_key, key_str
from rollwright._options import whole
from rollwright.data.replay_buffers.samplers.sampler import Draw, Sampler
from rollwright.data.replay_buffers.storages.storage import Storage

Index = NDArray[np.int64]
Weight = Callable[[torch.Tensor], torch.Tensor]


class StalenessAwareSampler(Sampler):
    """Elements by the version of the policy that acted, the newer the likelier, and none that is too old.

    With v the version of an element and c :attr:`consumer_version`, which the program sets when its policy changes::

        staleness = c - v,    P(i) proportional to weight(staleness_i),  0 where staleness_i > max_staleness

    A batch has no element twice, unless it asks for more than may be drawn. ``info`` has ``"staleness"``, float32
    ``[n]``. Versions are read once, when elements are written; weights are computed again when something was written,
    or the version changes, which costs O(stored).

    Args:
        max_staleness: the most; below 0: any.
        staleness_weight_fn: makes weights of at least 0, float ``[n]``, from staleness, float32 ``[n]``; default:
            ``1 / (staleness + 1)``.
        version_key: the entry of versions, a number for each element.

    Attributes:
        consumer_version: the version of the policy that learns; from 0.

    Example:
        >>> from tensordict import TensorDict
        >>> from rollwright.data import LazyTensorStorage, TensorDictReplayBuffer
        >>> sampler = StalenessAwareSampler(max_staleness=1)
        >>> buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(100), sampler=sampler, batch_size=4)
        >>> _ = buffer.extend(TensorDict({"policy_version": torch.tensor([0, 1, 2, 3])}, [4]))
        >>> sampler.consumer_version = 3
        >>> set(buffer.sample()["policy_version"].tolist()) <= {2, 3}
        True
    """

    repeatable = False
    state_entries = ("consumer_version",)

    def __init__(
        self,
        max_staleness: int = -1,
        staleness_weight_fn: Weight | None = None,
        version_key: NestedKey = "policy_version",
    ) -> None:
        if staleness_weight_fn is not None and not callable(staleness_weight_fn):
            raise TypeError(f"staleness_weight_fn: expected a callable, got {staleness_weight_fn!r}.")
        self.max_staleness = cast(int, whole().call("max_staleness", max_staleness))
        self.version_key = checked_key("version_key", version_key)
        self._weight = staleness_weight_fn or _inverse
        self.consumer_version = 0
        self._forget()

    def _forget(self) -> None:
        self._versions: Index = np.zeros(0, np.int64)  # by flat element
        self._seen = (0, -1)  # positions, and revision
        self._storage: Storage | None = None
        self._known: tuple[Any, Index, NDArray[np.float64]] | None = None  # elements that may be drawn, their weights

    def __getstate__(self) -> dict[str, Any]:
        own = ("max_staleness", "version_key", "_weight", "consumer_version")
        return {name: self.__dict__[name] for name in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    def increment_consumer_version(self) -> int:
        """Count the version of the policy that learns up by one; returns it."""
        self.consumer_version += 1
        return self.consumer_version

    def follow(self, storage: Storage) -> None:
        """Read what was written since the last call."""
        _, high, revision = span = storage.ledger.span()
        if storage is not self._storage or revision != self._seen[1] or high < self._seen[0]:
            self._forget()
            if self.version_key not in storage.keys():  # noqa: SIM118 - a storage has no dictionary's methods
                return
            self._storage = storage
        columns, capacity = storage.columns, storage.capacity
        size = min(high, capacity) * columns
        if size > len(self._versions):
            grown = np.zeros(min(max(size, 2 * len(self._versions)), capacity * columns), np.int64)
            grown[: len(self._versions)] = self._versions
            self._versions = grown
        for start, stop in storage.ledger.ranges(span, self._seen[0]):
            versions = storage.entry(self.version_key, start, stop)
            if versions.size != (stop - start) * columns:
                raise ValueError(
                    f"version_key: expected one number for each element in {self.version_key!r}, got "
                    f"{list(versions.shape[2:])}. Name another entry."
                )
            self._versions[storage.elements_of(np.arange(start, stop))] = versions.reshape(-1)
        self._seen = (high, revision)

    def draw(self, storage: Storage, batch_size: int, generator: torch.Generator | None = None) -> Draw:
        """Choose elements; ``info`` has ``"staleness"``.

        Raises:
            KeyError: the storage has no entry ``version_key``.
            RuntimeError: all elements are too old.
        """
        self.follow(storage)
        if self._storage is None:
            raise KeyError(
                f"version_key: there is no entry {self.version_key!r}; the storage has {key_str(storage.keys())}. "
                "Collect with track_policy_version=True, or name the entry with version_key=."
            )
        index, sums = self._drawable(storage)
        if len(index) <= batch_size:  # as often as it takes
            chosen = _by_weight(sums, batch_size, generator) if len(index) < batch_size else np.arange(len(index))
        else:
            chosen = _distinct(sums, batch_size, generator)
        drawn = index[chosen]
        return Draw(drawn, {"staleness": torch.from_numpy(self.consumer_version - self._versions[drawn]).float()})

    def _drawable(self, storage: Storage) -> tuple[Index, NDArray[np.float64]]:
        """The elements that may be drawn, and the sums of their weights up to each."""
        state = (storage.ledger.span(), self.consumer_version, self.max_staleness)
        if self._known is None or self._known[0] != state:
            index = storage.live_index()
            staleness = self.consumer_version - self._versions[index]
            if self.max_staleness >= 0:
                fresh = staleness <= self.max_staleness
                index, staleness = index[fresh], staleness[fresh]
                if not len(index):
                    raise RuntimeError(
                        f"max_staleness: all {len(storage)} elements are older than {self.max_staleness} versions "
                        f"(consumer_version is {self.consumer_version}). Collect with newer weights, or pass a larger "
                        "max_staleness."
                    )
            weight = self._weight(torch.from_numpy(staleness).float()).double().numpy()
            if weight.shape != staleness.shape or not bool((np.isfinite(weight) & (weight >= 0)).all()):
                raise ValueError(
                    f"staleness_weight_fn: expected finite weights of at least 0, of shape {list(staleness.shape)}, "
                    f"got shape {list(weight.shape)} from {weight.min()} to {weight.max()}. An element newer than "
                    "consumer_version has a staleness below 0."
                )
            if not weight.sum() > 0:
                raise ValueError("staleness_weight_fn: expected a weight above 0 for some element, got 0 for all.")
            index = index[weight > 0]
            self._known = state, index, weight[weight > 0].cumsum()
        return self._known[1:]

    def state_dict(self) -> dict[str, Any]:
        """The version of the policy that learns."""
        return {"consumer_version": self.consumer_version}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a state of :meth:`state_dict`."""
        self.check_state(state_dict)
        self.consumer_version = int(state_dict["consumer_version"])
        self._forget()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(max_staleness={self.max_staleness}, consumer_version={self.consumer_version})"


def _inverse(staleness: torch.Tensor) -> torch.Tensor:
    return 1.0 / (staleness.clamp_min(0.0) + 1.0)  # what is newer than the consumer counts as new


def _by_weight(sums: NDArray[np.float64], n: int, generator: torch.Generator | None) -> Index:
    """``n`` places in proportion to the weights whose sums are given, with replacement."""
    share = torch.rand(n, dtype=torch.float64, generator=generator, device="cpu").numpy()
    found: Index = np.minimum(sums.searchsorted(share * sums[-1], "right"), len(sums) - 1)
    return found


def _distinct(sums: NDArray[np.float64], n: int, generator: torch.Generator | None) -> Index:
    """``n`` different places, one after the other in proportion to the weights of those that are left.

    Those of one draw with replacement that came before, in its order, are a draw without: draws go on until there are
    enough, or few enough are left to be looked at one by one.
    """
    chosen: Index = np.zeros(0, np.int64)
    for _ in range(8):
        chosen = np.concatenate([chosen, _by_weight(sums, n, generator)])
        chosen = chosen[np.sort(np.unique(chosen, return_index=True)[1])]
        if len(chosen) >= n:
            return chosen[:n]
    weight = np.diff(sums, prepend=0.0)
    weight[chosen] = 0.0
    left = np.flatnonzero(weight > 0)
    drawn = torch.empty(len(left), dtype=torch.float64, device="cpu").exponential_(generator=generator).numpy()
    keys = drawn / weight[left]
    more = left[keys.argsort()[: n - len(chosen)]]
    return np.concatenate([chosen, more])
