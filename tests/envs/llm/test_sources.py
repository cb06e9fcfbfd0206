"""Prompts of a dataset: what is drawn, and the place in the data, which follows what was delivered."""

from __future__ import annotations

import json
import pickle
import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from rollwright.data.llm.turns import Origin
from rollwright.envs.llm.sources import DatasetSource
from rollwright.errors import EnvError

ROWS = [{"text": f"prompt {i}", "answer": i} for i in range(10)]


class Loader:
    """A stateful dataloader of batches; counts what it fetched."""

    def __init__(self, batch_size: int = 3) -> None:
        self.batch_size, self.at, self.fetched = batch_size, 0, 0

    def __iter__(self) -> Iterator[dict[str, list[Any]]]:
        while self.at < len(ROWS):
            rows = ROWS[self.at : self.at + self.batch_size]
            self.at += len(rows)
            self.fetched += 1
            yield {name: [row[name] for row in rows] for name in rows[0]}
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.at = state_dict["at"]


def torch_loader() -> Any:
    return DataLoader(ROWS, batch_size=4)  # type: ignore[arg-type]


def lines(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in ROWS) + "\n\n")
    return path


DATASETS: dict[str, Callable[[], Any]] = {
    "list": lambda: ROWS,
    "factory": lambda: lambda: iter(ROWS),
    "stateful": Loader,
    "batches": torch_loader,
}


def drain(source: DatasetSource, most: int = 10_000) -> list[Any]:
    draws = []
    while len(draws) < most:
        try:
            draws.append(source.draw())
        except StopIteration:
            break
    return draws


def places(draws: list[Any]) -> list[tuple[int, int, int]]:
    return [(draw.origin.epoch, draw.origin.index, draw.origin.repeat) for draw in draws]


@pytest.mark.parametrize("name", DATASETS)
def test_every_row_comes_once_an_epoch_and_repeat(name: str) -> None:
    source = DatasetSource(DATASETS[name](), repeats=2, epochs=2)
    draws = drain(source)
    assert places(draws) == [(epoch, row, repeat) for epoch in range(2) for row in range(10) for repeat in range(2)]
    assert [draw.row["text"] for draw in draws[:20:2]] == [row["text"] for row in ROWS]
    assert len({draw.origin.group for draw in draws}) == 20


def test_a_file_of_json_lines(tmp_path: Path) -> None:
    assert [draw.row for draw in drain(DatasetSource(lines(tmp_path), epochs=1))] == ROWS
    shuffled = [draw.origin.index for draw in drain(DatasetSource(lines(tmp_path), epochs=1, shuffle=True))]
    assert sorted(shuffled) == list(range(10))
    assert shuffled != list(range(10))


def test_a_line_that_is_no_json_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "good"}\n{"text": \n')
    with pytest.raises(EnvError, match=r"row 1 of .*rows\.jsonl is no JSON"):
        drain(DatasetSource(path, epochs=1))


def test_shuffling_follows_the_seed_and_differs_by_epoch() -> None:
    def order(seed: int) -> list[int]:
        return [draw.origin.index for draw in drain(DatasetSource(ROWS, shuffle=True, seed=seed, epochs=2))]

    assert order(1) == order(1) != order(2)
    assert order(1)[:10] != order(1)[10:]
    assert sorted(order(1)[10:]) == list(range(10))
    source = DatasetSource(ROWS, shuffle=True, epochs=2)
    source.set_seed(1)
    assert [draw.origin.index for draw in drain(source)] == order(1)
    assert source.state_dict()["seed"] == 1


def test_an_iterator_is_read_once_and_others_without_an_end() -> None:
    assert len(drain(DatasetSource(iter(ROWS)))) == 10
    assert len(drain(DatasetSource(ROWS), most=1000)) == 1000
    with pytest.raises(ValueError, match=r"epochs: expected 1 for list_iterator.*Pass a function"):
        DatasetSource(iter(ROWS), epochs=2)


def test_interleaved_prompts_take_turns() -> None:
    draws = drain(DatasetSource(ROWS[:3], repeats=2, interleave=2, epochs=1))
    assert [(d.origin.index, d.origin.repeat) for d in draws] == [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (2, 1)]


@pytest.mark.parametrize("name", DATASETS)
def test_shards_divide_the_groups(name: str) -> None:
    parts = []
    for index in range(3):
        source = DatasetSource(DATASETS[name](), repeats=2, epochs=2)
        source.shard(index, 3)
        parts.append(drain(source))
    assert sorted(place for part in parts for place in places(part)) == places(
        drain(DatasetSource(ROWS, repeats=2, epochs=2))
    )
    groups = [{draw.origin.group for draw in part} for part in parts]
    assert not groups[0] & groups[1]
    assert not groups[1] & groups[2]
    seeds = [{draw.origin.seed for draw in part} for part in parts]
    assert seeds[0] == seeds[1] == seeds[2]


def test_columns_of_batches_may_be_tensors() -> None:
    source = DatasetSource([{"tokens": torch.arange(6).reshape(2, 3), "n": [1, 2]}], batched=True, epochs=1)
    draws = drain(source)
    assert [draw.row["tokens"].tolist() for draw in draws] == [[0, 1, 2], [3, 4, 5]]
    assert [draw.row["n"] for draw in draws] == [1, 2]


@pytest.mark.parametrize(
    ("dataset", "batched", "message"),
    [
        ([], None, r"dataset: expected at least one row.*Check its path"),
        (lambda: iter([]), None, r"dataset: expected at least one row.*Check its path"),
        ([3], None, r"dataset: row 0 is a int, expected a mapping"),
        ([["one", "two"], ["three"]], None, r"row 0 is a list, .*a batch of rows: pass itertools.chain.from_iterable"),
        (iter([{"a": [1], "b": [1, 2]}]), True, r"item 0 is no batch.*batched=False"),
        ({"text": []}, None, r"dataset: expected rows, got one mapping with \['text'\]"),
        (3, None, r"dataset: expected an iterable, .* got int"),
    ],
)
def test_data_that_cannot_be_read_is_named(dataset: Any, batched: bool | None, message: str) -> None:
    with pytest.raises((ValueError, TypeError, EnvError), match=message):
        DatasetSource(dataset, batched=batched).draw()


def test_a_stream_cannot_be_shuffled() -> None:
    with pytest.raises(ValueError, match=r"shuffle: .* cannot be shuffled.*Pass a list"):
        DatasetSource(lambda: iter(ROWS), shuffle=True)


def test_origins_of_another_shard_are_an_error() -> None:
    source = DatasetSource(ROWS)
    source.shard(0, 2)
    with pytest.raises(ValueError, match=r"origin: .* is not of this source"):
        source.delivered(Origin(0, 0, 0, 1, 0))
    source.draw()
    with pytest.raises(RuntimeError, match=r"shard: a prompt was drawn before"):
        source.shard(0, 3)


def test_only_the_missing_repeat_of_a_group_is_drawn_again() -> None:
    source = DatasetSource(ROWS, repeats=4)
    draws = [source.draw() for _ in range(6)]
    for draw in draws[:2] + draws[3:4]:
        source.delivered(draw.origin)
    restored = DatasetSource(ROWS, repeats=4)
    restored.load_state_dict(source.state_dict())
    again = [restored.draw() for _ in range(3)]
    assert again == [draws[2], draws[4], draws[5]]
    assert restored.group_size(again[0].origin) == 1
    assert restored.group_size(again[1].origin) == 4


def test_a_claimed_prompt_is_not_drawn_again() -> None:
    source = DatasetSource(ROWS)
    draws = [source.draw() for _ in range(3)]
    restored = DatasetSource(ROWS)
    restored.load_state_dict(source.state_dict())
    restored.claim(draws[1].origin)
    assert [restored.draw(), restored.draw()] == [draws[0], draws[2]]


def test_what_was_claimed_and_delivered_before_the_first_draw_is_not_drawn_again() -> None:
    rows = [{"text": str(number)} for number in range(4)]
    first = DatasetSource(rows, epochs=1)
    drawn = [first.draw().origin for _ in range(3)]
    first.delivered(drawn[1])
    restored = DatasetSource(rows, epochs=1)
    restored.load_state_dict(first.state_dict())
    for origin in (drawn[0], drawn[2]):
        restored.claim(origin)
        restored.delivered(origin)
    assert restored.draw().row["text"] == "3"
    with pytest.raises(StopIteration):
        restored.draw()


def test_a_stateful_loader_fetches_no_batch_again_that_was_delivered() -> None:
    source = DatasetSource(Loader(), epochs=None)
    draws = [source.draw() for _ in range(19)]
    for draw in draws[:17]:
        source.delivered(draw.origin)
    loader = Loader()
    restored = DatasetSource(loader)
    restored.load_state_dict(pickle.loads(pickle.dumps(source.state_dict())))
    assert [restored.draw(), restored.draw()] == draws[17:]
    assert loader.fetched == 1


def test_other_repeats_or_rows_than_were_saved_are_an_error() -> None:
    state = DatasetSource(ROWS, repeats=2).state_dict()
    with pytest.raises(ValueError, match=r"repeats: the saved place has 2, this source has 3"):
        DatasetSource(ROWS, repeats=3).load_state_dict(state)
    with pytest.raises(ValueError, match="a dataset of 10 rows, this one has 4"):
        DatasetSource(ROWS[:4], repeats=2).load_state_dict(state)


def test_a_new_seed_begins_the_data_again() -> None:
    source = DatasetSource(ROWS)
    drain(source, 3)
    source.set_seed(5)
    draw = source.draw()
    assert (draw.origin.index, draw.origin.seed) == (0, 5)
    once = DatasetSource(iter(ROWS))
    drain(once, 3)
    once.set_seed(5)
    draw = once.draw()
    assert (draw.origin.index, draw.origin.seed) == (3, 5)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    name=st.sampled_from(sorted(DATASETS)),
    repeats=st.integers(1, 4),
    interleave=st.integers(1, 3),
    shard=st.sampled_from([(0, 1), (1, 2), (2, 3)]),
)
def test_kills_lose_and_double_nothing(
    seed: int, name: str, repeats: int, interleave: int, shard: tuple[int, int]
) -> None:
    """A run is killed again and again; what it has delivered since the last save is known to the consumer alone."""
    rng = random.Random(seed)

    def make() -> DatasetSource:
        source = DatasetSource(
            DATASETS[name](), repeats=repeats, epochs=3, interleave=interleave, shuffle=name == "list"
        )
        source.shard(*shard)
        return source

    wanted = Counter(places(drain(make())))
    got: Counter[tuple[int, int, int]] = Counter()
    groups: dict[int, tuple[int, int]] = {}
    source = make()
    while True:
        state = json.loads(json.dumps(source.state_dict())) if name != "batches" else source.state_dict()
        source = make()
        source.load_state_dict(state)
        running: list[tuple[int, Any]] = []  # turns to go, and the draw: skewed lengths, as 1 to 16 turns
        over = False
        for _ in range(rng.randrange(1, 60)):
            while len(running) < 8 and not over:
                try:
                    running.append((int(2 ** rng.uniform(0, 4)), source.draw()))
                except StopIteration:
                    over = True
            running = [(left - 1, draw) for left, draw in running]
            for _, draw in [item for item in running if item[0] <= 0]:
                source.delivered(draw.origin)
                got[places([draw])[0]] += 1
                groups.setdefault(draw.origin.group, (draw.origin.epoch, draw.origin.index))
                assert groups[draw.origin.group] == (draw.origin.epoch, draw.origin.index)
            running = [item for item in running if item[0] > 0]
        if over and not running:
            break
    assert got == wanted


def test_what_is_delivered_after_a_load_and_before_a_draw_is_not_drawn_again():
    rows = [{"text": str(number)} for number in range(3)]
    source, restored = DatasetSource(rows, repeats=2, epochs=1), DatasetSource(rows, repeats=2, epochs=1)
    first, second = source.draw(), source.draw()
    source.delivered(first.origin)
    restored.load_state_dict(source.state_dict())
    restored.claim(second.origin)
    restored.delivered(second.origin)
    assert restored.draw().row["text"] == "1"


ENTRIES = ("seed", "repeats", "shard", "position", "delivered", "reader")


@pytest.mark.parametrize("wrong", [*ENTRIES, "other rows", "reader.position"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_load_that_raises_changes_nothing(wrong: str, stream: bool) -> None:
    def made(rows: Any = ROWS) -> DatasetSource:
        return DatasetSource((lambda: iter(rows)) if stream else rows, epochs=None)

    other, source, twin = made(), made(), made()
    other.set_seed(5)
    for each, count in ((other, 3), (source, 2), (twin, 2)):
        for _ in range(count):
            each.delivered(each.draw().origin)
    state = other.state_dict()
    if wrong == "other rows":
        state["reader"] = {"rows": 99}
    elif wrong == "reader.position":
        state["reader"] = {name: value for name, value in state["reader"].items() if name not in ("position", "rows")}
    else:
        del state[wrong]
    with pytest.raises((KeyError, ValueError), match=r"expected|rows"):
        source.load_state_dict(state)
    assert source.state_dict() == twin.state_dict()
    assert [source.draw().origin for _ in range(5)] == [twin.draw().origin for _ in range(5)]
