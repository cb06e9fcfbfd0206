"""Entries of a TensorDict that are made when they are read."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from tensordict import NonTensorData, TensorDict, lazy_stack

from rollwright.data.entries import MadeEntries


class Source:
    """Makes tensors, text, and a part of its own; counts what it makes."""

    made: list[str]

    def __init__(self) -> None:
        self.made = []

    def __reduce__(self) -> Any:
        return Source, ()

    def _zeros(self) -> torch.Tensor:
        self.made.append("zeros")
        return torch.zeros(1000)

    def _text(self) -> NonTensorData:
        self.made.append("text")
        return NonTensorData("text")

    def _part(self) -> TensorDict:
        return MadeEntries.td(self, "part")

    def makers(self, kind: str) -> dict[str, Any]:
        if kind == "part":
            return {"zeros": Source._zeros, "text": Source._text}
        return {"zeros": Source._zeros, "part": Source._part}


@pytest.fixture
def td() -> TensorDict:
    return MadeEntries.td(Source(), "all")


def made(td: TensorDict) -> list[str]:
    entries = MadeEntries.of(td)
    assert entries is not None
    found: list[str] = entries.source.made
    return found


def test_an_entry_is_made_once_when_it_is_read(td: TensorDict) -> None:
    assert list(td.keys()) == ["zeros", "part"]
    assert "zeros" in td
    assert td["part", "text"] == "text"
    assert made(td) == ["text"]
    td["zeros"][0] = 5  # is kept
    assert td["zeros"][0] == 5
    assert made(td) == ["text", "zeros"]


WHOLE = {
    "items": lambda td: dict(td.items(True, True)),
    "dict of entries": lambda td: dict(td._tensordict),
    "clone": lambda td: td.clone(),
    "copy": lambda td: td.copy(),
    "deepcopy": copy.deepcopy,
    "exclude": lambda td: td.exclude("other"),
    "select": lambda td: td.select("zeros", "part"),
    "apply": lambda td: td.apply(lambda value: value + 1),
    "to_dict": lambda td: td.to_dict(),
    "flatten_keys": lambda td: td.flatten_keys("."),
    "update": lambda td: TensorDict({}).update(td),
    "lazy stack": lambda td: lazy_stack([td, td])["part", "zeros"],
    "contiguous stack": lambda td: lazy_stack([td, td]).contiguous(),
    "pop": lambda td: (td.pop("zeros"), td.pop(("part", "zeros"))),
    "popitem": lambda td: [td.popitem(), td.popitem()],
    "rename": lambda td: td.rename_key_("zeros", "ones"),
    "equal": lambda td: (td == td).all(),
}


@pytest.mark.parametrize("name", WHOLE)
def test_it_is_a_tensordict_as_any_other(td: TensorDict, name: str) -> None:
    plain = TensorDict({"zeros": torch.zeros(1000), "part": {"zeros": torch.zeros(1000), "text": "text"}})
    found, expected = WHOLE[name](td), WHOLE[name](plain)
    assert type(found) is type(expected)
    assert str(found) == str(expected)


def test_its_pickle_is_small_also_when_it_was_read_and_keeps_what_was_changed(td: TensorDict) -> None:
    small = len(pickle.dumps(td))
    td.clone()
    assert len(pickle.dumps(td)) == small < 1000
    td["part", "zeros"][3] = 1
    td["extra"] = torch.ones(2)
    td["part", "more"] = "yes"
    del td["zeros"]
    found = pickle.loads(pickle.dumps(td))
    assert found["part", "zeros"][3] == 1
    assert list(found.keys()) == ["part", "extra"]
    assert (found["part", "more"], found["extra"].tolist()) == ("yes", [1, 1])
