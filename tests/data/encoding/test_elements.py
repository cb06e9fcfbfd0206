"""Encoded elements: what goes in comes out, nothing in the bytes is run, and damage is noticed."""

from __future__ import annotations

import enum
import pickle
import uuid

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorClass, TensorDict, lazy_stack

from rollwright._keys import leaves
from rollwright.data.encoding import (
    Decoder,
    DecodingError,
    PackedRows,
    encode,
    pack_rows,
    register_tensorclass,
)
from rollwright.data.encoding import elements as objects_module
from rollwright.errors import DamagedFileError


class Message(TensorClass):
    role: str
    content: str
    score: torch.Tensor | None = None


def written(data) -> bytearray:
    found = encode(data)
    memory = bytearray(found.num_bytes)
    found.write(memory)
    return memory


def through(data):
    return Decoder().decode(written(data))


def assert_same(found, expected) -> None:
    assert found.batch_size == expected.batch_size
    one, other = leaves(found), leaves(expected)
    assert list(one) == list(other)
    for key, value in other.items():
        assert type(one[key]) is type(value), key
        if isinstance(value, torch.Tensor):
            assert one[key].dtype == value.dtype, key
            assert torch.equal(one[key], value), key
        else:
            assert found[key] == expected[key], key


texts = st.text(st.characters(codec=None), max_size=8)  # lone surrogates, too
numbers = st.one_of(st.integers(), st.floats(allow_nan=False), st.booleans(), st.none())
objects = st.recursive(
    st.one_of(texts, numbers),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.dictionaries(texts.filter(lambda key: key != "\0tuple"), inner, max_size=3),
    ),
    max_leaves=8,
)
DTYPES = [torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.complex64]
tensors = st.builds(
    lambda shape, dtype: (torch.arange(int(np.prod(shape))) % 5).reshape(shape).to(dtype),
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from(DTYPES),
)
leaf = st.one_of(texts, tensors, objects.map(NonTensorData))
names = st.text("abc", min_size=1, max_size=2)
entries = st.recursive(
    st.dictionaries(names, leaf, max_size=4), lambda inner: st.dictionaries(names, inner, max_size=3), max_leaves=4
)


@settings(max_examples=150, deadline=None)
@given(entries)
def test_what_goes_in_comes_out(nested):
    data = TensorDict(nested)
    assert_same(through(data), data)


@settings(max_examples=50, deadline=None)
@given(st.lists(objects, min_size=1, max_size=4))
def test_lists_of_objects_keep_their_places(values):
    data = TensorDict({"value": NonTensorStack(*[NonTensorData(value) for value in values])}, [len(values)])
    assert through(data)["value"] == values


def test_elements_with_batch_sizes():
    data = TensorDict(
        {
            "word": NonTensorData("all", batch_size=[2]),
            "grid": NonTensorStack(NonTensorStack("a", ["b"]), NonTensorStack(None, {"c": 1})),
            "inner": TensorDict({"x": torch.ones(2, 3)}, [2, 3]),
        },
        [2],
    )
    found = through(data)
    assert found["grid"] == [["a", ["b"]], [None, {"c": 1}]]
    assert (found["word"], found.get("word").batch_size) == ("all", (2,))
    assert found["inner"].batch_size == (2, 3)


def test_stacks_of_ragged_parts():
    data = TensorDict({"turns": lazy_stack([TensorDict({"ids": torch.arange(n), "text": "x" * n}) for n in (1, 4)])})
    found = through(data)["turns"]
    assert isinstance(found, LazyStackedTensorDict)
    assert [part["ids"].tolist() for part in found] == [[0], [0, 1, 2, 3]]
    assert list(found["text"]) == ["x", "xxxx"]


def test_text_is_what_its_constructor_makes():
    """Text is made without the constructor of NonTensorData, which is slow."""
    made, expected = through(TensorDict({"text": "a"})).get("text"), TensorDict({"text": "a"}).get("text")
    assert made.__dict__.keys() == expected.__dict__.keys()
    assert made._non_tensordict == expected._non_tensordict
    stacked = lazy_stack([TensorDict({"text": made}), TensorDict({"text": "b"})])
    assert list(stacked["text"]) == ["a", "b"]
    assert pickle.loads(pickle.dumps(made)).data == "a"
    assert made.clone().data == made.to("cpu").data == "a"


def test_numbers_of_numpy_and_enums_become_plain():
    class Reason(enum.StrEnum):
        STOP = "stop"

    found = through(TensorDict({"o": NonTensorData([np.int64(3), np.float32(0.5), np.bool_(True), Reason.STOP])}))["o"]
    assert found == [3, 0.5, True, "stop"]
    assert [type(value) for value in found] == [int, float, bool, str]


def test_tensors_come_from_any_view():
    base = torch.randn(4, 6, requires_grad=True)
    data = TensorDict(
        {"t": base.T, "step": base[::2, ::3], "conj": torch.tensor([1 + 2j]).conj(), "wide": torch.ones(1).expand(3)}
    )
    found = through(data)
    assert torch.equal(found["t"], base.T)
    assert torch.equal(found["step"], base[::2, ::3])
    assert found["conj"].tolist() == [1 - 2j]
    assert found["wide"].tolist() == [1, 1, 1]
    assert not found["t"].requires_grad


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (NonTensorData(object()), "builtins.object"),
        (NonTensorData({"a": [uuid.UUID(int=1)]}), "uuid.UUID"),
        (NonTensorData(b"raw"), "builtins.bytes"),
        (NonTensorData({1: 2}), "a dictionary with the key 1 of type int"),
        (NonTensorData({"a": {"\0tuple": [1]}}), "which stands for a tuple"),
        (NonTensorData(lambda: 0), "function"),
        (torch.eye(2).to_sparse(), "a tensor that is sparse_coo"),
    ],
)
def test_other_objects_are_refused_by_name(value, what):
    with pytest.raises(
        TypeError, match=r"got .*in \('next', 'odd'\).*exclude\(\('next', 'odd'\)\).*ListStorage"
    ) as error:
        encode(TensorDict({"next": {"odd": value}}))
    assert what in str(error.value)


def test_a_list_that_holds_itself_is_refused():
    value: list = []
    value.append(value)
    with pytest.raises(TypeError, match="one another"):
        encode(TensorDict({"loop": NonTensorData(value)}))


# Tensorclasses -------------------------------------------------------------------------------------


def test_a_tensorclass_comes_back_as_itself():
    data = TensorDict(
        {
            "one": Message(role="user", content="hi", score=torch.tensor([1.0])),
            "many": lazy_stack([Message(role="user", content="a"), Message(role="tool", content="bb")]),
            "batch": Message(role=["x", "y"], content="same", batch_size=[2]),
        }
    )
    found = through(data)
    assert type(found["one"]) is type(found["many"]) is type(found["batch"]) is Message
    assert (found["one"].role, found["one"].score.tolist()) == ("user", [1.0])
    assert found["one"].content == "hi"
    assert list(found["many"].content) == ["a", "bb"]
    assert found["many"][1].role == "tool"
    assert list(found["batch"].role) == ["x", "y"]


def test_a_class_that_nobody_registered_is_a_tensordict(monkeypatch):
    memory = written(TensorDict({"message": Message(role="user", content="hi")}))
    monkeypatch.setattr(objects_module, "_known", {})
    found = Decoder().decode(memory)["message"]
    assert type(found) is TensorDict
    assert (found["role"], found["content"]) == ("user", "hi")
    register_tensorclass(Message)
    assert type(Decoder().decode(memory)["message"]) is Message
    with pytest.raises(TypeError, match="expected a tensorclass"):
        register_tensorclass(int)


@pytest.mark.parametrize("path", ["os.system", "subprocess.Popen", "rollwright.__main__.main", "pickle.loads", "x"])
def test_reading_imports_and_runs_nothing(path, monkeypatch):
    monkeypatch.setattr(objects_module, "_known", {})
    monkeypatch.setattr(objects_module.importlib, "import_module", lambda name: pytest.fail(f"imported {name}"))
    name = f"{Message.__module__}.{Message.__qualname__}".encode()
    data = TensorDict({"message": Message(role="user", content="hi")})
    memory = written(data)
    at = memory.index(name)
    memory[at : at + len(name)] = path.encode().ljust(len(name), b"_")
    assert type(Decoder().decode(memory)["message"]) is TensorDict


# Damage --------------------------------------------------------------------------------------------

RECORD = TensorDict(
    {
        "text": "héllo",
        "ids": torch.arange(9),
        "meta": NonTensorData({"a": [1, (2, None)]}),
        "m": Message(role="user", content="hi"),
        "next": {"done": torch.tensor([True])},
    }
)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_damaged_bytes_are_read_as_something_or_refused(data):
    """By one error, and nothing else happens."""
    memory = written(RECORD)
    for _ in range(data.draw(st.integers(1, 4))):
        memory[data.draw(st.integers(0, len(memory) - 1))] = data.draw(st.integers(0, 255))
    memory = memory[: data.draw(st.one_of(st.just(len(memory)), st.integers(0, len(memory))))]
    try:
        Decoder().decode(memory)
    except DecodingError:
        return


def test_packed_rows_have_a_checksum():
    rows = [written(RECORD), b"", written(TensorDict({"text": "b"}))]
    packed = pack_rows(rows)
    assert [bytes(row) for row in PackedRows.of(packed)] == [bytes(row) for row in rows]
    flipped = packed["rows"].clone()
    flipped[40] ^= 1
    for wrong in (
        {**packed, "rows": flipped},
        {**packed, "rows": packed["rows"][:-1]},
        {**packed, "lengths": packed["lengths"] + 1},
        {**packed, "format": "another"},
        pack_rows([b"no element"]),
    ):
        with pytest.raises(DamagedFileError, match="elements: "):
            PackedRows.of(wrong)
