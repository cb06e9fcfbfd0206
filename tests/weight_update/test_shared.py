"""SharedWeights: what is published is what is taken, in one process."""

import copy
import os

import pytest
import torch
from torch import nn

from rollwright.weight_update import shared
from rollwright.weight_update.shared import SharedWeights

KINDS = {
    "float32": torch.randn(3, 4),
    "bfloat16": torch.randn(5).bfloat16(),
    "float16": torch.randn(5).half(),
    "float64": torch.randn(2, 2).double(),
    "int64": torch.arange(4),
    "uint8": torch.arange(3, dtype=torch.uint8),
    "bool": torch.tensor([True, False, True]),
    "complex64": torch.randn(3, dtype=torch.complex64),
    "scalar": torch.tensor(2.5),
    "empty": torch.zeros(0, 3),
    "transposed": torch.randn(3, 4).T,
    "every other": torch.arange(10.0)[::2],
    "expanded": torch.tensor([1.0]).expand(4),
    "parameter": nn.Parameter(torch.randn(2)),
}


def taken(board, since=None, **options):
    """What a reader copies: the publication, and its tensors and extra state by model."""
    copies = {}

    def apply(found):
        copies.clear()
        for model_id, weights in found.models.items():
            copies[model_id] = {name: tensor.clone() for name, tensor in weights.tensors.items()} | weights.extras

    return board.take(since or {}, apply, **options), copies


def filled(value, size=3):
    return {"w": torch.full((size,), float(value))}


def test_nothing_is_published_at_first():
    board = SharedWeights()
    assert (board.stamp, board.version) == (0, -1)
    assert taken(board) == (None, {})


def test_every_kind_of_tensor():
    board = SharedWeights()
    board.publish(1, {"policy": KINDS})
    _, copies = taken(board.as_reader(1))
    assert copies["policy"].keys() == KINDS.keys()
    for name, tensor in KINDS.items():
        assert copies["policy"][name].dtype == tensor.dtype
        assert copies["policy"][name].shape == tensor.shape
        assert torch.equal(copies["policy"][name], tensor)


def test_what_is_published_is_a_copy():
    board, weights = SharedWeights(), filled(1)
    board.publish(1, {"policy": weights})
    weights["w"].zero_()
    assert taken(board)[1]["policy"]["w"].tolist() == [1, 1, 1]


def test_tied_parameters():
    module = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    module["b"].weight = module["a"].weight
    board = SharedWeights()
    board.publish(1, {"policy": module.state_dict()})
    _, copies = taken(board)
    assert torch.equal(copies["policy"]["a.weight"], module["a"].weight)
    assert torch.equal(copies["policy"]["b.weight"], module["a"].weight)


def test_versions_and_stamps():
    board = SharedWeights()
    stamps = [board.publish(version, {"policy": filled(version)}) for version in (1, 2, 7, 3)]
    assert stamps == sorted(set(stamps))
    assert (board.version, board.stamp) == (3, stamps[-1])
    assert taken(board)[0][:2] == (stamps[-1], 3)


def test_a_publication_carries_the_other_models_on():
    board = SharedWeights()
    reader = board.as_reader(1)
    first = board.publish(1, {"actor": filled(1), "critic": filled(10, size=5)})
    for version in range(2, 6):
        board.publish(version, {"actor": filled(version)})
    found, copies = taken(reader)
    assert copies["actor"]["w"].tolist() == [5, 5, 5]
    assert copies["critic"]["w"].tolist() == [10] * 5
    assert found.models["critic"].stamp == first
    assert found.models["actor"].stamp == found.stamp


def test_a_reader_takes_what_it_does_not_have():
    board = SharedWeights()
    first = board.publish(1, {"actor": filled(1), "critic": filled(1)})
    second = board.publish(2, {"actor": filled(2)})
    assert taken(board, {"actor": first, "critic": first})[1].keys() == {"actor"}
    assert taken(board, {"actor": second, "critic": first})[1].keys() == set()
    assert taken(board, {"critic": first})[1].keys() == {"actor"}
    assert taken(board, floor=first)[1].keys() == {"actor"}


def test_a_version_without_weights():
    board = SharedWeights()
    board.publish(1, {"policy": filled(1)})
    board.publish(2, {})
    found, copies = taken(board)
    assert (found.version, copies["policy"]["w"].tolist()) == (2, [1, 1, 1])


def test_extra_state_of_any_size():
    class Local:
        def __init__(self, value):
            self.value = value

    board = SharedWeights()
    reader = board.as_reader(1)
    for length in (1, 10, 3, 100_000, 5, 0):
        board.publish(length, {"policy": {**filled(length), "norm._extra_state": {"text": "x" * length}}})
        assert taken(reader)[1]["policy"]["norm._extra_state"] == {"text": "x" * length}
    board.publish(1, {"policy": {**filled(1), "_extra_state": Local(torch.ones(2))}})
    assert taken(reader)[1]["policy"]["_extra_state"].value.tolist() == [1, 1]
    board.publish(1, {"policy": filled(1)})
    assert taken(reader)[1]["policy"].keys() == {"w"}


def test_names_shapes_and_dtypes_may_change():
    board = SharedWeights()
    reader = board.as_reader(1)
    for version, weights in enumerate(
        [filled(1), filled(2, size=100_000), filled(3), {"v": torch.zeros(2).double()}, {}, filled(4, size=200_000)]
    ):
        board.publish(version, {"policy": weights})
        found, copies = taken(reader)
        assert found.version == version
        assert copies["policy"].keys() == weights.keys()
        assert all(torch.equal(copies["policy"][name], value) for name, value in weights.items())


def test_models_may_be_added():
    board = SharedWeights()
    reader = board.as_reader(1)
    for count in range(1, 20):
        board.publish(count, {f"model {count}": filled(count, size=1000 * count)})
        _, copies = taken(reader)
        assert {name: int(state["w"][0]) for name, state in copies.items()} == {
            f"model {number}": number for number in range(1, count + 1)
        }


def test_memory_that_is_outgrown_is_given_back():
    board = SharedWeights()
    for size in range(1, 60):
        board.publish(size, {"policy": filled(size, size=size * 10_000)})
    in_memory = 512 * os.fstat(board.segment.fd).st_blocks
    assert in_memory < 4 * 60 * 10_000 * 4


def test_the_same_weights_take_no_new_memory():
    board = SharedWeights()
    for version in range(3):
        board.publish(version, {"policy": filled(version), "critic": filled(version)})
    size = board.segment.num_bytes
    for version in range(50):
        board.publish(version, {"policy": filled(version)})
        board.publish(version, {"critic": filled(version)})
    assert board.segment.num_bytes == size


def test_a_publication_that_fails_leaves_the_last_one():
    class Refuses(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            if "copy" in func.__name__:
                raise RuntimeError("no copy")
            return super().__torch_function__(func, types, args, kwargs)

    board = SharedWeights()
    board.publish(1, {"policy": filled(1), "critic": filled(10)})
    bad = {"w": torch.zeros(3).as_subclass(Refuses)}
    with pytest.raises(RuntimeError, match="no copy"):
        board.publish(2, {"policy": bad})
    assert board.version == 1
    assert taken(board)[1]["policy"]["w"].tolist() == [1, 1, 1]
    board.publish(3, {"policy": filled(3)})
    _, copies = taken(board.as_reader(1))
    assert {name: int(state["w"][0]) for name, state in copies.items()} == {"policy": 3, "critic": 10}


def test_a_copy_that_fails_half_way_is_not_taken_for_what_was_there(monkeypatch):
    def half(into, values):
        into[0].copy_(values[0])
        raise RuntimeError("no more")

    board = SharedWeights()
    board.publish(1, {"policy": filled(1), "critic": filled(10)})
    board.publish(2, {"policy": filled(2)})  # the critic is the same in both slots now
    board.publish(3, {"policy": filled(3)})
    with monkeypatch.context() as patch:
        patch.setattr(shared, "copy_all", half)
        with pytest.raises(RuntimeError, match="no more"):
            board.publish(4, {"critic": filled(11)})
    board.publish(5, {"policy": filled(5)})
    _, copies = taken(board)
    assert {name: int(state["w"][0]) for name, state in copies.items()} == {"policy": 5, "critic": 10}


def test_no_tensor_where_one_is_expected():
    with pytest.raises(TypeError, match="expected a tensor at 'w', got float"):
        SharedWeights().publish(1, {"policy": {"w": 1.0}})


def test_another_publisher_goes_on():
    first = SharedWeights()
    first.publish(1, {"actor": filled(1), "critic": filled(2)})
    first.publish(2, {"actor": filled(3)})
    second = copy.copy(first)
    for version in range(3, 6):
        second.publish(version, {"actor": filled(version)})
    _, copies = taken(first.as_reader(4))
    assert {name: int(state["w"][0]) for name, state in copies.items()} == {"actor": 5, "critic": 2}


# Readers that are overtaken.


def test_a_reader_that_is_overtaken_copies_again():
    board = SharedWeights()
    board.publish(0, {"policy": filled(0)})
    seen = []

    def apply(found):
        seen.append(found.version)
        if len(seen) < 3:
            board.publish(found.version + 1, {"policy": filled(1)})
            board.publish(found.version + 2, {"policy": filled(2)})

    found = board.as_reader(1).take({}, apply)
    assert seen == [0, 2, 4]
    assert found.version == 4


def test_one_publication_behind_is_whole():
    board = SharedWeights()
    board.publish(0, {"policy": filled(0)})
    seen = []

    def apply(found):
        seen.append(found.version)
        board.publish(1, {"policy": filled(1)})

    assert board.as_reader(1).take({}, apply).version == 0
    assert seen == [0]


def test_a_publisher_waits_for_a_reader_that_failed_three_times():
    board = SharedWeights()
    board.publish(0, {"policy": filled(0)})
    reader, pauses = board.as_reader(7), []

    def apply(found):
        pauses.append(int(board._pauses[7]))
        for _ in range(2):
            board.publish(found.version + 1, {"policy": filled(1)}, timeout_s=0.0)

    with pytest.raises(TimeoutError, match="Publish less often"):
        reader.take({}, apply, timeout_s=0.2)
    assert pauses[:4] == [0, 0, 0, 1]
    assert not board._pauses.any()


def test_a_dead_reader_is_waited_for_once():
    board = SharedWeights()
    board.publish(0, {"policy": filled(0)})
    board.as_reader(7).ask_to_pause(True)
    board.publish(1, {"policy": filled(1)}, timeout_s=0.01)
    assert not board._pauses.any()
    board.as_reader(7).ask_to_pause(True)
    board.forget(7)
    board.publish(2, {"policy": filled(2)}, timeout_s=1e9)


def test_what_a_reader_took_can_be_seen():
    board = SharedWeights()
    stamp = board.publish(0, {"policy": filled(0)})
    assert board.stamp_taken(3) == 0
    taken(board.as_reader(3))
    assert (board.stamp_taken(3), board.stamp_taken(2)) == (stamp, 0)
