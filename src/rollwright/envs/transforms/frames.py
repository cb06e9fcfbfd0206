"""Transforms that keep observations: CatFrames, the last N joined, and TimeMaxPool, their greatest."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from tensordict import TensorDictBase

from rollwright._keys import NestedKey, as_keys, as_tuple, checked_key, unravel
from rollwright.data.layout import DONE
from rollwright.data.replay_buffers import SliceSampler
from rollwright.data.replay_buffers.samplers.sampler import Draw
from rollwright.data.replay_buffers.storages.batches import positive
from rollwright.data.replay_buffers.storages.storage import Storage
from rollwright.data.specs import Bounded, Composite, TensorSpec, Unbounded
from rollwright.envs.arrays import ArrayEnv, ArrayTransform, Entry
from rollwright.envs.columns import Columns
from rollwright.envs.transforms.base import KeySeq, Transform, map_spec
from rollwright.envs.transforms.bookkeeping import expand_right, time_axis, trajectory_starts
from rollwright.errors import NotNative


class StatefulTransform(Transform):
    """Changes each of some observations by what it keeps of its past; each row of a batch has its own.

    Attributes:
        reset_key: ``"_reset"`` entry that begins it again; None: that of the environment, or of the group of agents
            that the observation is of.
    """

    reset_key: NestedKey | None = None

    @abstractmethod
    def _next(self, kind: Any, index: int, value: torch.Tensor) -> torch.Tensor:
        """The new value of the entry at ``index``, a place among ``in_keys``, in a step."""

    @abstractmethod
    def _first(self, kind: Any, index: int, value: torch.Tensor, fresh: torch.Tensor | None) -> torch.Tensor:
        """The same at a reset of the rows that are ``fresh``; None: of all."""

    def _keep(self, kind: Any, name: str, begun: torch.Tensor, fresh: torch.Tensor | None) -> None:
        """Keep in a buffer what was begun, and in rows that are not ``fresh`` what is there."""
        past = self._buffers[name]
        if fresh is not None and past is not None and past.shape == begun.shape:
            self._buffers[name] = torch.where(fresh, begun, past)
        else:
            self._buffers[name] = kind.kept(begun)

    def _change(self, kind: Any, root: Columns, out: Columns) -> None:
        for index, (in_key, out_key) in enumerate(self._pairs()):
            out[out_key] = kind.whole(self._next(kind, index, kind.tensor(index, self._read(out, in_key))))

    def _begin(self, kind: Any, given: Columns, fresh: Columns) -> None:
        for index, (in_key, out_key) in enumerate(self._pairs()):
            if (column := fresh.get(in_key, None)) is None:
                continue
            value = kind.tensor(index, column)
            marks = self._fresh(kind, given, in_key, value)
            if self.reset_key is not None and (mask := given.get(self.reset_key, None)) is not None:
                marks = mask.reshape(mask.shape + (1,) * (value.ndim - mask.ndim))
            fresh[out_key] = kind.whole(self._first(kind, index, value, marks))

    def on_arrays(self, env: ArrayEnv) -> ArrayTransform:
        """See :meth:`Transform.on_arrays`."""
        self._needs_all_rows(env)
        name = type(self).__name__
        if self.reset_key not in (None, *(group.reset for group in self._groups)):
            raise NotNative(f"{name} has a reset_key of its own")
        entries: dict[NestedKey, Entry] = {}
        forms: list[Entry] = []
        for key, out_key in self._pairs():
            entry = {**env.entries, **entries}.get(key)
            if entry is None:
                raise NotNative(f"{name} changes {key!r}, which is no observation")
            forms.append(entry)
            entries[out_key] = self._changed_entry(key, entry, len(env.batch))
        return self._on_rows(env, forms, restarts=True, entries=entries)

    def _changed_entry(self, key: NestedKey, entry: Entry, ndim: int) -> Entry:
        """What an entry becomes on arrays.

        Args:
            key: of the entry.
            entry: its form.
            ndim: dimensions of the batch.
        """
        return entry.replace(column=False)


_Join = Callable[[TensorDictBase, torch.Tensor], dict[NestedKey, torch.Tensor]]


class SliceForEach(SliceSampler):
    """Draws a slice for each element that is asked for: that element, and those before it."""

    def draw(self, storage: Storage, batch_size: int, generator: torch.Generator | None = None) -> Draw:
        """See :meth:`SliceSampler.draw`; ``[n * slice_len]`` at most."""
        return super().draw(storage, batch_size * (self.slice_len or 1), generator)


class LastOfSlices(Transform):
    """Of a batch of slices the last element of each, with what was joined over the slice.

    Args:
        join: is called with the batch ``[n]``, and with the place where the slice of each element begins, int64
            ``[n]``; returns the entries that it has joined.
        begins: entry in which the first element of each slice is marked.
        keep: keep that entry.
        owner: what was joined, for messages.
        leave_out: entries that are not stored, since they are joined.
    """

    leaves_out = ends_slices = True

    def __init__(
        self, join: _Join, begins: NestedKey, *, keep: bool, owner: str, leave_out: Sequence[NestedKey]
    ) -> None:
        super().__init__()
        self._leave_out = leave_out
        self._join, self._begins, self._keep, self._owner = join, begins, keep, owner

    @property
    def inverts(self) -> bool:
        """Whether the transform changes what the environment is given."""
        return bool(self._leave_out)

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase:
        return tensordict.exclude(*self._leave_out)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Join, and leave out all but the last of each slice."""
        begins = tensordict.get(self._begins, None)
        if begins is None:
            raise KeyError(
                f"transform: {self!r} expected slices, marked in {self._begins!r}, got a batch without them. Give the "
                "buffer the sampler that was made with it; read single elements with buffer.storage[...]."
            )
        marks = begins.reshape(len(tensordict), -1).any(-1)
        place = torch.arange(len(marks), device=marks.device)
        joined = self._join(tensordict, torch.where(marks, place, 0).cummax(0).values)
        last = torch.cat([marks[1:], marks.new_ones(1)])
        kept = tensordict.exclude(*joined, *(() if self._keep else (self._begins,)))[last]
        for key, value in joined.items():
            kept.set(key, value[last])
        return kept

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Refuse: environments take steps, not slices.

        Raises:
            TypeError: always.
        """
        raise TypeError(f"transform: {self!r} is for batches of a replay buffer. Put {self._owner} on the environment.")

    def __repr__(self) -> str:
        return f"LastOfSlices({self._owner})"


PADDINGS = ("same", "constant")
_BEGINS: NestedKey = "_slice_begins"  # marks of the sampler, which the transform takes out again


class CatFrames(StatefulTransform):
    """Joins each observation with the ``N - 1`` before it in the trajectory, oldest first.

    At the start of a trajectory, what is missing is the first observation repeated (``padding="same"``) or
    ``padding_value`` (``padding="constant"``). In an environment the past frames are buffers of the
    transform, part of ``state_dict()``; each row of a batch has its own.

    Called on data with a time dimension, it joins along time within trajectories (see
    :meth:`forward`): store single frames, and join them when training. For a replay buffer of which single elements are
    drawn, :meth:`make_rb_transform_and_sampler` makes what does that.

    Args:
        N: number of observations to join.
        dim: dimension to join along, negative, so that batch dimensions do not matter.
        in_keys: observations; default ``["pixels"]``.
        out_keys: where to write; default: ``in_keys``.
        padding: ``"same"`` or ``"constant"``.
        padding_value: see ``padding``.
        as_inverse: False, as in other packages; frames are joined in what an environment or a buffer returns.
        reset_key: ``"_reset"`` entry that begins the frames again; None: that of the environment, or of the group of
            agents that the observation is of.
        done_key: entry below ``"next"`` of the flags that end trajectories in data.

    Raises:
        ValueError: an argument is out of range.

    Example:
        >>> from tensordict import TensorDict
        >>> data = TensorDict({"x": torch.arange(1, 5).unsqueeze(-1)}, [4])
        >>> CatFrames(N=2, dim=-1, in_keys=["x"])(data)["x"]
        tensor([[1, 1],
                [1, 2],
                [2, 3],
                [3, 4]])
    """

    def __init__(
        self,
        N: int,
        dim: int,
        in_keys: KeySeq = None,
        out_keys: KeySeq = None,
        padding: str = "same",
        padding_value: float = 0,
        as_inverse: bool = False,
        *,
        reset_key: NestedKey | None = None,
        done_key: NestedKey = DONE,
    ) -> None:
        if N < 1:
            raise ValueError(f"N: expected at least 1, got {N}.")
        if dim >= 0:
            raise ValueError(f"dim: expected a negative number, counted from the last dimension, got {dim}.")
        if padding not in PADDINGS:
            raise ValueError(f"padding: expected one of {PADDINGS}, got {padding!r}.")
        if as_inverse:
            raise ValueError(
                "as_inverse: expected False, got True: frames are joined in what is returned. Leave it out, and append "
                "the transform to the buffer, or call it on the data."
            )
        super().__init__("pixels" if in_keys is None else in_keys, out_keys)
        self.N = N
        self.dim = dim
        self.padding = padding
        self.padding_value = padding_value
        self.reset_key = None if reset_key is None else checked_key("reset_key", reset_key)
        self.done_key = checked_key("done_key", done_key)
        for index in range(len(self.in_keys)):
            self.register_buffer(f"frames_{index}", None)

    # In an environment ------------------------------------------------------------------------

    def _next(self, kind: Any, index: int, value: torch.Tensor) -> torch.Tensor:
        past = self.past(index, value)
        size = value.shape[self.dim]
        joined = torch.cat([past.narrow(self.dim, size, size * (self.N - 1)), value], self.dim)
        self._buffers[f"frames_{index}"] = kind.kept(joined)
        return joined

    def _first(self, kind: Any, index: int, value: torch.Tensor, fresh: torch.Tensor | None) -> torch.Tensor:
        self._check_dim(value.ndim - len(kind.batch), self.in_keys[index])
        begins = value if self.padding == "same" else torch.full_like(value, self.padding_value)
        joined = torch.cat([begins] * (self.N - 1) + [value], self.dim)
        self._keep(kind, f"frames_{index}", joined, fresh)
        return joined

    def held(self, index: int) -> torch.Tensor | None:
        """The past frames of an entry, by its place among ``in_keys``; None before the first reset."""
        return self._buffers[f"frames_{index}"]

    def past(self, index: int, frame: torch.Tensor) -> torch.Tensor:
        """The frames that ``frame`` is the next of.

        Raises:
            RuntimeError: there are none that fit.
        """
        past = self.held(index)
        shape = list(frame.shape)
        shape[self.dim] *= self.N
        if past is None or list(past.shape) != shape:
            held = "none" if past is None else f"frames of shape {list(past.shape)}"
            raise RuntimeError(
                f"CatFrames: expected past frames of shape {shape} for {self.in_keys[index]!r}, got {held}. "
                "Reset the environment before stepping it."
            )
        return past

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Observations ``N`` times as long along ``dim``."""
        for key, _ in self._pairs():
            if key in observation_spec:
                self._check_dim(observation_spec[key].ndim - observation_spec.ndim, key)
        return map_spec(observation_spec, self._pairs(), self._lengthen)

    def _check_dim(self, ndim: int, key: NestedKey) -> None:
        if -self.dim > ndim:
            raise ValueError(
                f"dim: expected one of the {ndim} dimensions that {key!r} has below the batch, got {self.dim}. "
                f"Pass a number from {-ndim} to -1."
            )

    def _lengthen(self, spec: TensorSpec) -> TensorSpec:
        if isinstance(spec, Bounded):
            low, high = (torch.cat([end] * self.N, self.dim) for end in (spec.low, spec.high))
            if self.padding == "constant":
                low, high = low.clamp_max(self.padding_value), high.clamp_min(self.padding_value)
            return Bounded(low, high, low.shape, spec.device, spec.dtype)
        shape = list(spec.shape)
        shape[self.dim] *= self.N
        return Unbounded(shape, device=spec.device, dtype=spec.dtype or torch.float32)

    # On arrays --------------------------------------------------------------------------------

    def _changed_entry(self, key: NestedKey, entry: Entry, ndim: int) -> Entry:
        self._check_dim(len(entry.shape) - ndim, key)
        shape = list(entry.shape)
        shape[self.dim] *= self.N
        return Entry(tuple(shape), entry.dtype, False)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # New buffers: those that there are may be what was handed out as arrays.
        self._buffers.update(dict.fromkeys(self._buffers))
        super()._load_from_state_dict(state_dict, prefix, *args)

    # On data with a time dimension ------------------------------------------------------------

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Join observations along the time dimension (the one named "time", else the last).

        Trajectories end with ``("next", done_key)`` and where the trajectory id changes, and slices of them begin where
        ``"is_init"`` is set; one that began before the data is padded as if it began with them. For an
        in_key ``("next", key)`` the past is read from ``key``, which must be there.

        Raises:
            KeyError: an entry is missing.
            ValueError: the data have no batch dimension.
        """
        axis = time_axis(tensordict, "CatFrames")
        starts = trajectory_starts(tensordict, axis, unravel(("next", *as_tuple(self.done_key))))
        joined = {out_key: self._windows(tensordict, in_key, axis, starts) for in_key, out_key in self._pairs()}
        for out_key, value in joined.items():
            tensordict.set(out_key, value)
        return tensordict

    def make_rb_transform_and_sampler(
        self, batch_size: int, **sampler_options: Any
    ) -> tuple[LastOfSlices, SliceForEach]:
        """What joins the frames of a replay buffer that stores them once, when they are drawn.

        What an environment with this transform has joined under other names (``out_keys``) is left out of what is
        written.

        The sampler draws a slice of ``N`` frames for each element that is asked for, and the transform joins its
        observations, below ``"next"`` too, and keeps its last element: batches are what the environment with this
        transform would have given. Elements before which fewer than ``N - 1`` frames are stored are not drawn, unless
        ``span=(True, False)`` is among the options: what is missing is then padded.

        Args:
            batch_size: elements of a batch; the buffer may be asked for others.
            sampler_options: of the :class:`~rollwright.data.replay_buffers.SliceSampler`, ``strict_length=True`` if not
                given.

        Returns:
            ``(transform, sampler)``, which belong together.

        Raises:
            ValueError: an option that fills slices up, lets them end before their last element, gives them another
                length, or leaves their beginnings unmarked.

        Example:
            >>> from tensordict import TensorDict
            >>> from rollwright.data import LazyTensorStorage, ReplayBuffer
            >>> transform, sampler = CatFrames(N=2, dim=-1, in_keys=["x"]).make_rb_transform_and_sampler(3)
            >>> buffer = ReplayBuffer(storage=LazyTensorStorage(9), sampler=sampler, transform=transform, batch_size=3)
            >>> data = TensorDict({"x": torch.arange(5.0).unsqueeze(-1), "episode": torch.zeros(5)}, [5])
            >>> _ = buffer.extend(data)
            >>> batch = buffer.sample()
            >>> batch["x"].shape, batch["x"].diff().flatten().tolist()
            (torch.Size([3, 2]), [1.0, 1.0, 1.0])
        """
        positive("batch_size", batch_size)
        options = {"strict_length": True, "init_key": _BEGINS, **sampler_options}
        begins = options["init_key"]
        if begins is None or options.get("pad_output"):
            raise ValueError(
                "make_rb_transform_and_sampler: expected slices that are marked and not filled up, got "
                f"init_key={begins!r}, pad_output={options.get('pad_output')!r}. Leave the two out."
            )
        span = options.get("span", False)
        if span[1] if isinstance(span, list | tuple) and len(span) == 2 else span:
            raise ValueError(
                f"span: expected slices of which the last element is stored, got {span!r}. Pass span=(True, False), or "
                "leave it out."
            )
        if "slice_len" in options:
            raise ValueError(
                f"slice_len: expected none, got {options['slice_len']!r}. Leave it out: they have N={self.N}."
            )
        sampler = SliceForEach(slice_len=self.N, **options)
        transform = LastOfSlices(
            self._of_slices, begins, keep=begins != _BEGINS, owner=repr(self), leave_out=self._made_again()
        )
        return transform, sampler

    def _made_again(self) -> list[NestedKey]:
        """What is joined of other entries, at the root and below ``"next"``."""
        made = [unravel(key) for key in self.out_keys if key not in self.in_keys]
        return [*made, *(unravel(("next", *as_tuple(key))) for key in made if as_tuple(key)[0] != "next")]

    def _of_slices(self, td: TensorDictBase, starts: torch.Tensor) -> dict[NestedKey, torch.Tensor]:
        pairs = [(in_key, out_key) for in_key, out_key in self._pairs() if as_tuple(in_key)[0] != "next"]
        below = [(unravel(("next", *as_tuple(a))), unravel(("next", *as_tuple(b)))) for a, b in pairs]
        named = [pair for pair in self._pairs() if pair not in pairs]
        there = td.keys(True)
        pairs += dict.fromkeys([*named, *(pair for pair in below if pair[0] in there)])
        return {out_key: self._windows(td, in_key, 0, starts) for in_key, out_key in pairs}

    def _windows(self, td: TensorDictBase, key: NestedKey, axis: int, starts: torch.Tensor) -> torch.Tensor:
        frame = self._read(td, key)
        path = as_tuple(key)
        is_next = path[0] == "next"
        past = self._read(td, unravel(path[1:])) if is_next else frame
        ordinal = torch.arange(td.batch_size[axis], device=starts.device)
        ordinal = ordinal.reshape([-1] + [1] * (starts.ndim - axis - 1))
        parts = []
        for back in range(self.N - 1, 0, -1):
            index = ordinal - back + is_next
            before = past.gather(axis, expand_right(index.maximum(starts), past))
            if self.padding == "constant":
                before = torch.where(expand_right(index < starts, past), self.padding_value, before)
            parts.append(before)
        return torch.cat([*parts, frame], self.dim)

    def __repr__(self) -> str:
        return f"CatFrames(N={self.N}, dim={self.dim}, keys={self.in_keys})"


class TimeMaxPool(StatefulTransform):
    """Takes the greatest of each element's last ``T`` values in the trajectory.

    What is missing at the begin of a trajectory counts as zeros: values below zero appear once there are ``T``. The
    past values are buffers of the transform, part of ``state_dict()``; each row of a batch has its own.

    Args:
        in_keys: observations; default ``["observation"]``.
        out_keys: where to write; default: ``in_keys``.
        T: number of values to look at.
        reset_key: ``"_reset"`` entry that begins them again; None: that of the environment, or of the group of agents
            that the observation is of.

    Raises:
        ValueError: ``T`` is no integer of at least 1.

    Example:
        >>> from rollwright.envs import GymEnv, TransformedEnv
        >>> env = TransformedEnv(GymEnv("Pendulum-v1"), TimeMaxPool(["observation"], ["greatest"], T=4))
        >>> rollout = env.rollout(6)
        >>> bool((rollout["greatest"][5] == rollout["observation"][2:6].amax(0)).all())
        True
    """

    def __init__(
        self, in_keys: KeySeq = None, out_keys: KeySeq = None, T: int = 1, reset_key: NestedKey | None = None
    ) -> None:
        super().__init__("observation" if in_keys is None else in_keys, out_keys)
        if not isinstance(T, int) or isinstance(T, bool) or T < 1:
            raise ValueError(f"T: expected an integer of at least 1, got {T!r}.")
        self._pairs()
        self.T = T
        self.reset_key = None if reset_key is None else as_keys(reset_key)[0]
        for index in range(len(self.in_keys)):
            self.register_buffer(f"values_{index}", None)

    def _next(self, kind: Any, index: int, value: torch.Tensor) -> torch.Tensor:
        past = self._buffers[f"values_{index}"]
        if past is None or past.shape[1:] != value.shape:
            held = "none" if past is None else f"some of shape {list(past.shape[1:])}"
            raise RuntimeError(
                f"TimeMaxPool: expected past values of shape {list(value.shape)} for {self.in_keys[index]!r}, got "
                f"{held}. Reset the environment before stepping it."
            )
        self._buffers[f"values_{index}"] = past = torch.cat([past[1:], value.unsqueeze(0)])
        return past.amax(0)

    def _first(self, kind: Any, index: int, value: torch.Tensor, fresh: torch.Tensor | None) -> torch.Tensor:
        zeros = torch.zeros_like(value)
        begun = torch.stack([zeros] * (self.T - 1) + [value])
        self._keep(kind, f"values_{index}", begun, fresh)
        return begun.amax(0)

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Observations that may be zero."""
        return map_spec(observation_spec, self._pairs(), self._with_zero)

    def _with_zero(self, spec: TensorSpec) -> TensorSpec:
        if self.T == 1 or not isinstance(spec, Bounded):
            return spec.clone()
        low, high = spec.low.clamp_max(0), spec.high.clamp_min(0)
        return Bounded(low, high, spec.shape, spec.device, spec.dtype)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """An error: it follows an environment from its reset on."""
        raise RuntimeError("TimeMaxPool follows an environment: TransformedEnv(env, TimeMaxPool(...)).")

    def __repr__(self) -> str:
        return f"TimeMaxPool(T={self.T}, keys={self.in_keys})"
