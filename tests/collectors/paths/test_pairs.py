"""Every environment with every policy that fits it: arrays and TensorDicts give the same bits."""

from __future__ import annotations

import pytest


def test_paths_agree(both, lab, env_name):
    make = lab.envs[env_name]
    example = make()
    fitting = [kind for kind in lab.kinds if kind == "none" or lab.build(example, kind) is not None]
    example.close()
    for kind in fitting:
        both(make, kind)
