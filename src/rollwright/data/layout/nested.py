"""NestedTrajectories: a stack of trajectories of any lengths, whose entries are read as nested tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase

from rollwright.data.layout.frames import blank_frame, is_dense, stack_frames

_FORMS = ("as_list", "as_padded_tensor", "as_nested_tensor")
Offsets = dict[tuple[torch.device, tuple[int, ...]], torch.Tensor]


class NestedTrajectories(LazyStackedTensorDict):
    """Trajectories ``[length]`` one above the other, ``[num_trajectories, -1]``; :func:`of` makes it.

    A row is a TensorDict of its own length. An entry is a nested tensor ``[num_trajectories, j, ...]`` of the layout
    ``torch.jagged``, also where all lengths are equal; all entries have the same ``j``, so they can be added, compared,
    and so on. Reading an entry copies; rows share their memory. An entry that varies beyond the length is read with
    ``get(key, as_list=True)``. Objects are as in any lazy stack.

    Example:
        >>> from tensordict import TensorDict
        >>> rows = [TensorDict({"x": torch.ones(n), "next": {"done": torch.ones(n, 1) > 0}}, [n]) for n in (1, 2)]
        >>> nested = NestedTrajectories.of(rows)
        >>> nested["x"].to_padded_tensor(0.0)
        tensor([[1., 0.],
                [1., 1.]])
        >>> nested["next", "done"].is_nested, nested[1]["x"]
        (True, tensor([1., 1.]))
    """

    offsets: Offsets | None = None  # by device and lengths; rows below are of the same lengths, and share them

    @classmethod
    def of(cls, rows: Sequence[TensorDictBase]) -> NestedTrajectories:
        """The stack of some trajectories, which are not copied."""
        return cls(*rows, stack_dim=0)

    # Every read of an entry calls this.
    def _get_str(self, key: Any, *args: Any, **kwargs: Any) -> Any:
        if any(kwargs.get(form) for form in _FORMS):
            return super()._get_str(key, *args, **kwargs)
        found = super()._get_str(key, *args, **{**kwargs, "as_list": True})
        if type(found) is LazyStackedTensorDict:
            below = NestedTrajectories.of(found.tensordicts)
            below.offsets = self._known_offsets()
            return below
        if isinstance(found, list) and any(isinstance(value, list) for value in found):
            found = [row._get_str(key, *args) for row in self.tensordicts]  # rows that are lazy stacks themselves
        if not isinstance(found, list) or not all(isinstance(value, torch.Tensor) for value in found):
            return found
        if len({value.shape[1:] for value in found}) > 1:
            return super()._get_str(key, *args, **kwargs)  # which says how such an entry is read
        lengths = [row.batch_size[0] for row in self.tensordicts]
        return torch.nested.nested_tensor_from_jagged(
            torch.cat(found),
            self._offsets_on(found[0].device),
            min_seqlen=min(lengths),
            max_seqlen=max(lengths),  # without it, torch pads to the sum of all
        )

    def _known_offsets(self) -> Offsets:
        if self.offsets is None:
            self.offsets = {}
        return self.offsets

    def _offsets_on(self, device: torch.device) -> torch.Tensor:
        """Where rows begin; torch takes nested tensors for alike where this is one object."""
        lengths = tuple(row.batch_size[0] for row in self.tensordicts)
        known = self._known_offsets()
        if (device, lengths) not in known:
            known[device, lengths] = torch.tensor([0, *lengths], device=device).cumsum(0)
        return known[device, lengths]

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        if type(found) is LazyStackedTensorDict and found.ndim == self.ndim and found.stack_dim == 0:
            return NestedTrajectories.of(found.tensordicts)
        return found

    def to_padded_tensor(self, padding: float = 0.0, mask_key: Any = None) -> Any:
        """All entries, padded at the end: ``[num_trajectories, longest]``, in memory of its own.

        Args:
            padding: the value; see :func:`~rollwright.data.layout.blank_frame` of text and objects.
            mask_key: where to put the mask, bool of that shape, True on real frames; None: nowhere.

        Raises:
            RuntimeError: an entry varies beyond the length.
        """
        lengths = torch.tensor([row.batch_size[0] for row in self.tensordicts], device="cpu")
        longest = int(lengths.max())
        rows: list[TensorDictBase] = []
        for row in self.tensordicts:
            missing = longest - row.batch_size[0]
            if not missing:
                rows.append(row.clone())
                continue
            blank = blank_frame([row[-1]], padding=padding, traj_id=padding)
            if is_dense(row):
                rest = blank.unsqueeze(0).expand(missing)
                rest.names = row.names
                rows.append(cast(TensorDictBase, torch.cat(cast(Any, [row, rest]))))
            else:
                rows.append(stack_frames([*row.unbind(0), *[blank] * missing], 0, row.names[0]))
        padded = cast(TensorDictBase, LazyStackedTensorDict.maybe_dense_stack(cast(Any, rows), 0))
        padded.names = [None, "time"]
        if mask_key is not None:
            padded.set(
                mask_key, (torch.arange(longest, device="cpu") < lengths.unsqueeze(-1)).to(padded.device or "cpu")
            )
        return padded
