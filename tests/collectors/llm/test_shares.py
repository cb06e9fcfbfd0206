"""Workers that are killed and replaced go on with their share of the data: no turn is skipped, none comes twice."""

from __future__ import annotations

import pytest
from tests.collectors.llm.shares import delivered_under_kills, expected, tally

MODES = {
    "turns": {"dialog_turns_per_batch": 10},
    "stream": {"dialog_turns_per_batch": 6, "async_envs": True},
    "conversations": {"trajs_per_batch": 2},
    "groups": {"groups_per_batch": 1, "async_envs": True},
}


@pytest.mark.parametrize("stored", [False, True], ids=["yielded", "stored"])
@pytest.mark.parametrize("mode", MODES)
def test_replaced_workers_go_on_behind_what_was_delivered(mode, stored):
    wanted = expected(**MODES[mode])
    found, killed = delivered_under_kills(3, 1, stored=stored, **MODES[mode])
    assert killed == 3
    assert found == wanted, tally(found, wanted)
