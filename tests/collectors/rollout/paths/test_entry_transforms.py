"""Transforms of entries give the same bits on both paths."""

from __future__ import annotations

import numpy as np
import pytest
from gymnasium import spaces

from rollwright.envs import (
    BinarizeReward,
    CatTensors,
    CenterCrop,
    ClipTransform,
    Compose,
    ExcludeTransform,
    FlattenObservation,
    GrayScale,
    RenameTransform,
    Resize,
    RewardClipping,
    RewardSum,
    SelectTransform,
    SerialEnv,
    SignTransform,
    SqueezeTransform,
    StepCounter,
    ToTensorImage,
    TransformedEnv,
    UnsqueezeTransform,
)

PIXELS = spaces.Dict(pixels=spaces.Box(0, 255, (12, 10, 3), np.uint8))
TWO = spaces.Dict(b=spaces.Box(-1.0, 1.0, (3,), np.float32), a=spaces.Box(-2.0, 1.0, (2,), np.float32))

CHAINS = {
    "clip": (None, lambda: [ClipTransform(["observation", "reward"], low=-0.25, high=0.1), RewardSum()]),
    "clip from below": (None, lambda: [ClipTransform(["observation"], ["clipped"], low=0.0)]),
    "clip rewards": (None, lambda: [RewardClipping(-0.1, 0.1)]),
    "sign": (None, lambda: [SignTransform(["observation", "reward"], ["observation", "sign"])]),
    "binarize": (None, lambda: [BinarizeReward(), StepCounter()]),
    "flatten": (PIXELS, lambda: [FlattenObservation(-3, -1, ["pixels"], ["flat"])]),
    "flatten by position": (PIXELS, lambda: [FlattenObservation(0, 2, allow_positive_dim=True)]),
    "unsqueeze": (None, lambda: [UnsqueezeTransform(-1, in_keys=["observation"])]),
    "unsqueeze and squeeze": (
        None,
        lambda: [
            UnsqueezeTransform(0, allow_positive_dim=True, in_keys=["observation"]),
            SqueezeTransform(-2, in_keys=["observation"]),
        ],
    ),
    "rename": (None, lambda: [RenameTransform(["observation", "reward"], ["seen", "gain"])]),
    "rename a copy": (None, lambda: [RenameTransform(["observation"], ["seen"], create_copy=True)]),
    "exchange": (TWO, lambda: [RenameTransform(["a", "b"], ["b", "a"])]),
    "select": (TWO, lambda: [StepCounter(), RewardSum(), SelectTransform("a")]),
    "exclude": (TWO, lambda: [StepCounter(), ExcludeTransform("a")]),
    "join": (TWO, lambda: [CatTensors(["b", "a"], "joined")]),
    "join in order": (TWO, lambda: [CatTensors(["b", "a"], "joined", sort=False, del_keys=False)]),
    "join all": (TWO, lambda: [CatTensors()]),
    "images": (PIXELS, lambda: [ToTensorImage(), GrayScale(), Resize(6, 5), CenterCrop(4)]),
    "images as they are": (PIXELS, lambda: [ToTensorImage(from_int=False), Resize(6, interpolation="nearest")]),
    "cubic": (PIXELS, lambda: [ToTensorImage(unsqueeze=True), Resize(8, interpolation="bicubic")]),
}


def made(lab, space, chain):
    make = lab.toy() if space is None else lab.toy(space)
    return lambda: TransformedEnv(make(), Compose(*chain()))


@pytest.mark.parametrize("name", list(CHAINS))
@pytest.mark.parametrize("number", [1, 3], ids=["one", "three"])
def test_the_same_bits_on_both_paths(both, lab, name, number):
    make = made(lab, *CHAINS[name])
    both(make if number == 1 else lambda: SerialEnv(number, make), "none")


@pytest.mark.parametrize("name", ["clip", "flatten", "join", "images", "select"])
def test_around_a_batch_of_environments(both, lab, name):
    space, chain = CHAINS[name]
    make = lab.toy() if space is None else lab.toy(space)
    both(lambda: TransformedEnv(SerialEnv(3, make), Compose(*chain())), "deterministic")


@pytest.mark.parametrize(
    ("chain", "reason"),
    [
        (lambda: [ExcludeTransform("truncated")], "flags"),
        (lambda: [ExcludeTransform("q", inverse=True)], "given"),
    ],
    ids=["flags", "inverse"],
)
def test_what_has_no_array_form_says_so(both, lab, chain, reason):
    both(made(lab, None, chain), "none", expect=reason)
