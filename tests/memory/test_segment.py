"""Segment: memory of a file, mapped without a descriptor of its own."""

from __future__ import annotations

import os
import weakref

import pytest

from rollwright._memory import Segment


def num_fds():
    return len(os.listdir("/proc/self/fd"))


def test_mappings_share_their_bytes_and_outlive_the_descriptor():
    segment = Segment()
    segment.grow(20_000)
    one, other = segment.map(8, 10_000), segment.map(4096 + 8, 100)
    other[:3] = b"abc"
    assert bytes(one[4096:4099]) == b"abc"
    segment.close()
    one[4099] = 7
    assert other[3] == 7


def test_a_mapping_keeps_no_descriptor_and_goes_with_its_last_view():
    segment = Segment()
    segment.grow(1 << 20)
    before = num_fds()
    views = [segment.map(0, 1 << 20) for _ in range(50)]
    assert num_fds() == before
    gone = weakref.ref(views[0].obj)
    name = os.stat(segment.fd).st_ino
    views.clear()
    assert gone() is None
    with open("/proc/self/maps") as maps:
        assert not any(line.split()[4] == str(name) and "rollwright" in line for line in maps)


def test_bytes_beyond_the_end_are_an_error():
    segment = Segment()
    segment.grow(100)
    with pytest.raises(ValueError, match="100"):
        segment.map(0, 101)


def test_a_closed_segment_is_an_error():
    segment = Segment()
    segment.grow(100)
    segment.close()
    with pytest.raises(OSError, match="descriptor"):
        segment.map(0, 100)
