"""RecordMaker: TensorDicts of the turns of a batch."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, cast

import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase

from rollwright.collectors.rollout.paths.conversations.dialogs import EndedTurn
from rollwright.data.layout import TRAJ_IDS
from rollwright.data.llm.records import RecordLayout, empty_record, record

Times = Sequence[Sequence[EndedTurn | None]]


class RecordMaker:
    """Makes TensorDicts of turns.

    Args:
        layout: of records.
        batch_size: of the environment.
        flat: a batch is ``[N]``; False: ``[*env, T]``.
        streams: there is one row, and a frame is ``[]``.
    """

    def __init__(self, layout: RecordLayout, batch_size: Sequence[int], *, flat: bool, streams: bool) -> None:
        self._layout, self._batch_size, self._flat, self._streams = layout, batch_size, flat or streams, streams

    def _record(self, ended: EndedTurn) -> TensorDict:
        return record(ended.turn, self._layout, ended.id)

    def frame(self, turns: Sequence[EndedTurn | None]) -> TensorDictBase:
        """The turns of one time."""
        found = [self._record(each) for each in turns if each is not None]
        return found[0] if self._streams else cast(TensorDictBase, self._nested(found))

    def batch(self, times: Times) -> TensorDictBase:
        """The turns of a batch, by time and row; None: the row has none then."""
        made = [[None if each is None else self._record(each) for each in turns] for turns in times]
        if self._flat:
            records = [each for row in zip(*made, strict=True) for each in row if each is not None]
            return cast(TensorDictBase, LazyStackedTensorDict(*records, stack_dim=0, stack_dim_name="time"))
        steps = [self._nested(turns) for turns in _filled(made)]
        stacked: Any = LazyStackedTensorDict(*steps, stack_dim=len(self._batch_size), stack_dim_name="time")
        return cast(TensorDictBase, stacked)

    def _nested(self, rows: list[Any]) -> Any:
        """Records of one time as ``[*env]``."""
        for size in reversed(self._batch_size):
            rows = [LazyStackedTensorDict(*rows[i : i + size], stack_dim=0) for i in range(0, len(rows), size)]
        return rows[0]


def _filled(times: list[list[TensorDict | None]]) -> list[list[TensorDict]]:
    """Records by time and row, with an empty one of the id -1 where a row has none."""
    if all(each is not None for each in itertools.chain(*times)):
        return cast(list[list[TensorDict]], times)
    blank = empty_record(next(each for each in itertools.chain(*times) if each is not None))
    blank.set(TRAJ_IDS, torch.tensor(-1, device="cpu"))
    return [[blank if each is None else each for each in turns] for turns in times]
