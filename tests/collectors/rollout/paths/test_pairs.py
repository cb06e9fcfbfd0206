"""Every environment with every policy that fits it: arrays and TensorDicts give the same bits."""

from __future__ import annotations

import pytest
from tests.collectors.rollout.paths.conftest import ENVS
from tests.variants import in_turn

# What a policy does hardly depends on these, and each run of them is slow or one of many.
FEW = {
    "async": ["one-hot", "none"],
    "async same step": ["one-hot"],
    "init": ["one-hot", "books"],
    "limit": ["one-hot", "books"],
    "sum": ["one-hot", "books"],
    "random": ["one-hot", "books"],
    "serial of one": ["one-hot"],
    "taxi categorical": ["categorical", "none"],
}


@pytest.mark.parametrize(("env_name", "third"), in_turn(ENVS, (0, 1, 2)))
def test_paths_agree(both, lab, env_name, third):
    """Each with every third policy that fits; with the rest where tests may be slow."""
    make = lab.envs[env_name]
    example = make()
    fitting = [kind for kind in FEW.get(env_name, lab.kinds) if kind == "none" or lab.build(example, kind) is not None]
    example.close()
    assert "none" in fitting or env_name in FEW
    for kind in fitting[third % len(fitting) :: 3]:
        both(make, kind)
