"""Transforms of replay buffers: a filter of old data, and next observations from the following steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from tensordict import TensorDictBase, is_tensor_collection
from torch import nn

from rollwright._keys import NestedKey, as_keys, as_tuple, checked_key, key_str, leaf_keys, unravel
from rollwright._options import whole
from rollwright._tensors import device_of
from rollwright._warnings import warn_user
from rollwright.data.layout import IS_INIT, MASK, NEXT_DONE, TRAJ_IDS


class PolicyAgeFilter(nn.Module):
    """Leaves out what policies acted that are too old, when it is written and when it is drawn.

    An element is kept where ``current_version - version <= max_policy_lag``; one of several frames counts by its
    oldest. Batches of ``sample`` may be smaller than was asked for; where slices lose steps, what is left of them is
    marked as slices are (``"is_init"``, and ``truncated_key`` of the sampler). ``extend`` returns the indices of what
    was stored; where nothing is left, nothing is stored.

    Args:
        current_version: the policy's version now, or a function that returns it, which is asked each time.
        max_policy_lag: versions that an element may be behind, at least 0.
        policy_version_key: the entry of versions, numbers.
        strict: data without that entry are an error; else they are let through, with a warning the first time.

    Example:
        >>> from tensordict import TensorDict
        >>> from rollwright.data import LazyTensorStorage, ReplayBuffer
        >>> keep_new = PolicyAgeFilter(lambda: 3, max_policy_lag=1)
        >>> buffer = ReplayBuffer(storage=LazyTensorStorage(100), transform=keep_new, batch_size=2)
        >>> buffer.extend(TensorDict({"policy_version": torch.tensor([0, 2, 2, 3])}, [4]))
        tensor([0, 1, 2])
    """

    leaves_out = True

    def __init__(
        self,
        current_version: int | Callable[[], int],
        max_policy_lag: int,
        *,
        policy_version_key: NestedKey = "policy_version",
        strict: bool = False,
    ) -> None:
        super().__init__()
        if not callable(current_version):
            whole().call("current_version", current_version)
        self.current_version = current_version
        self.max_policy_lag = cast(int, whole(0).call("max_policy_lag", max_policy_lag))
        self.policy_version_key, self.strict = checked_key("policy_version_key", policy_version_key), bool(strict)
        self._has_warned = False

    def forward(self, batch: Any) -> Any:
        """The batch, less what is too old by now."""
        kept = self._kept(batch)
        return batch if kept is None or bool(kept.all()) else batch[kept]

    def inv(self, data: Any) -> Any:
        """What is written, less what is too old; None: nothing is left."""
        if isinstance(data, list):
            items = [item for item in map(self.inv, data) if item is not None]
            return items or None
        kept = self._kept(data)
        if kept is None or bool(kept.all()):
            return data
        return data[kept] if kept.ndim and bool(kept.any()) else None

    def _kept(self, data: Any) -> torch.Tensor | None:
        version = data.get(self.policy_version_key, None) if is_tensor_collection(data) else None
        if version is None:
            self._miss(data)
            return None
        if not isinstance(version, torch.Tensor):
            raise TypeError(
                f"policy_version_key: expected numbers in {self.policy_version_key!r}, got {type(version).__name__}. "
                "Versions that are no numbers have no age."
            )
        oldest = version.reshape(len(data), -1).amin(-1) if data.ndim else version.amin()
        current = self.current_version() if callable(self.current_version) else self.current_version
        return current - oldest <= self.max_policy_lag

    def _miss(self, data: Any) -> None:
        has = key_str(leaf_keys(data)) if isinstance(data, TensorDictBase) else f"a {type(data).__name__}"
        message = f"policy_version_key: there is no entry {self.policy_version_key!r}; the data have {has}."
        if self.strict:
            raise KeyError(f"{message} Collect with track_policy_version=True, or name the entry.")
        if not self._has_warned:
            self._has_warned = True
            warn_user(f"{message} They are let through, whatever their age.")

    def extra_repr(self) -> str:
        """The settings that ``repr`` shows."""
        return f"max_policy_lag={self.max_policy_lag}, policy_version_key={self.policy_version_key!r}"


class NextStateReconstructor(nn.Module):
    """Writes ``("next", key)`` of each step from ``key`` of the step that follows it in the batch.

    For buffers that store observations once: leave ``("next", key)`` out of what is written, and draw slices. A step is
    followed where the next one has the same trajectory id, it is not done, and the next one begins no slice
    (``"is_init"``, where there is one) and is no padding (``("collector", "mask")``, where there is one). Elsewhere
    (the last step of each slice, and all steps of a sampler that draws single elements) the value is ``fill_value``.

    Args:
        keys: entries at the root.
        traj_key: entry of trajectory ids; None: not looked at.
        done_key: entry of flags that end a trajectory; None: not looked at.
        step_count_key: entry of numbers that grow by one with each step of a trajectory; None: not looked at.
        fill_value: where no step follows. NaN is for entries of floating point numbers.
        strict: an entry that is to be looked at and is missing is an error; else it is not looked at.

    Example:
        >>> from tensordict import TensorDict
        >>> ids = {"traj_ids": torch.tensor([0, 0, 0, 1])}
        >>> batch = TensorDict({"observation": torch.arange(4.0), "collector": ids}, [4])
        >>> NextStateReconstructor(done_key=None)(batch)["next", "observation"]
        tensor([1., 2., nan, nan])
    """

    def __init__(
        self,
        keys: NestedKey | Sequence[NestedKey] = ("observation",),
        *,
        traj_key: NestedKey | None = TRAJ_IDS,
        done_key: NestedKey | None = NEXT_DONE,
        step_count_key: NestedKey | None = None,
        fill_value: float = math.nan,
        strict: bool = True,
    ) -> None:
        super().__init__()
        one_each = isinstance(keys, tuple) and len(keys) == 1
        self.keys = as_keys(list(keys) if one_each else keys)
        if not self.keys:
            raise ValueError("keys: expected at least one entry, got none.")
        named = {"traj_key": traj_key, "done_key": done_key, "step_count_key": step_count_key}
        found = {name: None if key is None else checked_key(name, key) for name, key in named.items()}
        self.traj_key, self.done_key, self.step_count_key = found.values()
        self.fill_value, self.strict = float(fill_value), bool(strict)

    def forward(self, batch: TensorDictBase) -> TensorDictBase:
        """Write the entries into a batch ``[*env, T]``, time last; returns it.

        Raises:
            KeyError: an entry is missing.
            ValueError: there is no dimension of time, or ``fill_value`` does not fit an entry.
        """
        if not isinstance(batch, TensorDictBase) or not batch.ndim:
            got = list(batch.batch_size) if isinstance(batch, TensorDictBase) else type(batch).__name__
            raise ValueError(f"batch: expected a TensorDict with a dimension of time, got {got}.")
        time = batch.ndim - 1
        follows = self._follows(batch, time)
        for key in self.keys:
            value = self._entry(batch, "keys", key, required=True)
            assert value is not None
            if math.isnan(self.fill_value) and not (value.is_floating_point() or value.is_complex()):
                raise ValueError(
                    f"fill_value: expected a number for {key!r}, which is {value.dtype} and holds no NaN. Pass "
                    "fill_value=0, say."
                )
            shifted = torch.full_like(value, self.fill_value)
            shifted.narrow(time, 0, value.shape[time] - 1).copy_(value.narrow(time, 1, value.shape[time] - 1))
            there = follows.reshape(*follows.shape, *(1,) * (value.ndim - follows.ndim))
            batch.set(unravel(("next", *as_tuple(key))), shifted.masked_fill_(~there, self.fill_value))
        return batch

    def _follows(self, batch: TensorDictBase, time: int) -> torch.Tensor:
        """Whether the step after each follows it, bool ``[*env, T]``."""
        shape, last = batch.batch_size, batch.batch_size[-1] - 1
        follows = torch.ones(shape, dtype=torch.bool, device=device_of(batch))
        follows.narrow(time, last, 1).fill_(False)
        inner = follows.narrow(time, 0, last)

        def of_each(name: str, key: NestedKey | None, required: bool = True) -> torch.Tensor | None:
            value = None if key is None else self._entry(batch, name, key, required=required and self.strict)
            return None if value is None else value.reshape(*shape, -1).to(follows.device)

        ids = of_each("traj_key", self.traj_key)
        done = of_each("done_key", self.done_key)
        count = of_each("step_count_key", self.step_count_key)
        begins = of_each("is_init", IS_INIT, required=False)
        real = of_each("mask", MASK, required=False)
        if ids is not None:
            inner &= (ids.narrow(time, 1, last) == ids.narrow(time, 0, last)).all(-1)
        if done is not None:
            inner &= ~done.narrow(time, 0, last).bool().any(-1)
        if count is not None:
            inner &= (count.narrow(time, 1, last) == count.narrow(time, 0, last) + 1).all(-1)
        if begins is not None:
            inner &= ~begins.narrow(time, 1, last).bool().any(-1)
        if real is not None:
            inner &= real.narrow(time, 1, last).bool().all(-1)
        return follows

    def _entry(self, batch: TensorDictBase, name: str, key: NestedKey, *, required: bool) -> torch.Tensor | None:
        value: torch.Tensor | None = batch.get(key, None)
        if value is None and required:
            remedy = "" if name == "keys" else f", pass {name}=None, or strict=False"
            raise KeyError(
                f"{name}: there is no entry {key!r}; the batch has {key_str(leaf_keys(batch))}. Name one of these"
                f"{remedy}."
            )
        return value

    def extra_repr(self) -> str:
        """The settings that ``repr`` shows."""
        return f"keys={self.keys}, fill_value={self.fill_value}"
