"""Ragged entries of a batch, in four forms."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict, lazy_stack
from tests.data.llm.turn_examples import conversation

from rollwright.data.llm import RecordLayout, as_list, as_nested, flat_records, packed, padded, records

ROWS = [torch.tensor([1, 2, 3]), torch.tensor([4]), torch.tensor([], dtype=torch.int64), torch.tensor([5, 6])]


def _batch(rows: list[torch.Tensor]) -> Any:
    return lazy_stack([TensorDict({"inner": {"a": row}}) for row in rows])


def test_the_four_forms_hold_the_same_values() -> None:
    batch, key = _batch(ROWS), ("inner", "a")
    assert [row.tolist() for row in as_list(batch, key)] == [row.tolist() for row in ROWS]
    nested = as_nested(batch, key)
    assert nested.layout == torch.jagged
    assert [row.tolist() for row in nested.unbind()] == [row.tolist() for row in ROWS]
    values, offsets, longest = packed(batch, key)
    assert (values.tolist(), offsets.tolist(), longest) == ([1, 2, 3, 4, 5, 6], [0, 3, 4, 4, 6], 3)
    assert offsets.dtype == torch.int32
    assert padded(batch, key, value=-1).tolist() == [[1, 2, 3], [4, -1, -1], [-1, -1, -1], [5, 6, -1]]
    assert padded(batch, key, side="left").tolist() == [[1, 2, 3], [0, 0, 4], [0, 0, 0], [0, 5, 6]]


def test_rows_of_a_batch_of_two_dimensions_are_in_its_order() -> None:
    batch = records([conversation((4, 3), (2, 5)), conversation((6, 1), (1, 2))], RecordLayout())
    lengths = [len(row) for row in as_list(batch, ("tokens", "response"))]
    assert lengths == [3, 5, 1, 2] == [len(row) for row in as_list(batch.flatten(), ("tokens", "response"))]
    assert tuple(padded(batch, ("tokens", "full")).shape) == (2, 2, 14)
    assert as_list(batch, ("text", "response")) == ["answer 0", "answer 1"] * 2
    assert len(flat_records(batch)) == 4
    assert len(flat_records([batch[0], batch[1, :1]])) == 3


@pytest.mark.parametrize("trailing", [(), (2,)])
def test_what_follows_in_one_memory_is_not_copied(trailing: tuple[int, ...]) -> None:
    memory = torch.arange(12 * (2 if trailing else 1)).view(12, *trailing)
    batch = lazy_stack([TensorDict(a=memory[:5]), TensorDict(a=memory[5:6]), TensorDict(a=memory[6:])])
    values, offsets, longest = packed(batch, "a")
    assert values.data_ptr() == memory.data_ptr()
    assert torch.equal(values, memory)
    assert (offsets.tolist(), longest) == ([0, 5, 6, 12], 6)
    assert as_nested(batch, "a").values().data_ptr() == memory.data_ptr()
    dense = TensorDict(a=memory.view(3, 4, *trailing), batch_size=[3])
    assert padded(dense, "a").data_ptr() == memory.data_ptr()
    assert torch.equal(padded(dense, "a"), dense["a"])


def test_what_lies_elsewhere_is_copied() -> None:
    memory = torch.arange(12)
    for parts in (
        [memory[6:], memory[:6]],
        [memory[:5], memory[6:]],
        [memory[:4:2], memory[2:]],
        [memory[:3], ROWS[0]],
    ):
        values, _, _ = packed(_batch(list(parts)), ("inner", "a"))
        assert values.tolist() == torch.cat(list(parts)).tolist()
        assert values.data_ptr() != memory.data_ptr()


def test_records_without_tokens() -> None:
    batch = _batch([ROWS[2], ROWS[2]])
    assert tuple(padded(batch, ("inner", "a")).shape) == (2, 0)
    assert packed(batch, ("inner", "a"))[1].tolist() == [0, 0, 0]


def test_errors_name_the_entry() -> None:
    batch = _batch(ROWS)
    with pytest.raises(KeyError, match=r"no entry \('inner', 'b'\).*'a'"):
        as_list(batch, ("inner", "b"))
    with pytest.raises(ValueError, match="side must be 'left' or 'right'; got 'top'"):
        padded(batch, ("inner", "a"), side="top")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"'a' must be tensors that vary.*str.*as_list"):
        packed(lazy_stack([TensorDict(a="x"), TensorDict(a="y")]), "a")
    with pytest.raises(ValueError, match=r"'a' must be tensors that vary.*shape \(\)"):
        packed(TensorDict(a=torch.zeros(2), batch_size=[2]), "a")
