"""TensorDictBuilder builds what the constructor of TensorDict builds."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict, assert_close

from rollwright._keys import place
from rollwright.data.replay_buffers.storages.batches import TensorDictBuilder


@pytest.mark.parametrize(
    "keys",
    [
        ["a"],
        ["a", "b"],
        [("a", "b")],
        ["a", ("next", "a"), ("next", "b", "c"), ("next", "b", "d"), ("x", "y", "z")],
        [],
    ],
)
def test_it_equals_the_constructor(keys):
    values = [torch.randn(4, *range(2, 2 + n % 3)) for n in range(len(keys))]
    nested: dict = {}
    for key, value in zip(keys, values, strict=True):
        place(nested, key, value)
    expected = TensorDict(nested, [4], device="cpu")
    built = TensorDictBuilder(keys).build(values, (4,), torch.device("cpu"))
    assert_close(built, expected, rtol=0, atol=0)
    assert built.device == expected.device
    assert built.names == expected.names
    for key, td in expected.items(True):
        if isinstance(td, TensorDict):
            assert (built[key].batch_size, built[key].device) == (td.batch_size, td.device)


def test_what_is_built_is_a_tensordict_like_any_other():
    built = TensorDictBuilder(["a", ("b", "c")]).build([torch.zeros(4), torch.ones(4, 2)], (4,), torch.device("cpu"))
    built["b", "new"] = torch.zeros(4, 1)
    with pytest.raises(RuntimeError, match="batch dimension mismatch"):
        built["a"] = torch.zeros(3)
    assert built.clone()["b", "new"].shape == (4, 1)
    assert built.reshape(2, 2)["b", "c"].shape == (2, 2, 2)
    assert torch.stack([built, built]).shape == (2, 4)
