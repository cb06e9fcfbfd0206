"""The benchmark of groups counts each of them."""

from __future__ import annotations

from benchmarks import llm_groups


def test_each_group_is_delivered_or_counted_with_its_reason():
    found = llm_groups.run(groups=60, slots=16, repeats=2, seed=3)
    assert found["delivered"] + found["filtered"]["drawn by lot"] + found["held at the end"] == 60
    assert found["held at the end"] < 8
    assert found["conversations unfinished"] == 2 * found["held at the end"]
    assert found["updates"] > 0
    assert found["p"] > 0.01
