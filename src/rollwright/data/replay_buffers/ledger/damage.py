"""Checks the counters of a ledger, whose file may have been damaged."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rollwright.data.replay_buffers.ledger import counters as layout
from rollwright.data.replay_buffers.ledger.ledger import Ledger

_COUNTERS = {
    "capacity": layout.CAPACITY,
    "issued": layout.ISSUED,
    "settled": layout.SETTLED,
    "published": layout.PUBLISHED,
    "base": layout.BASE,
    "revision": layout.REVISION,
    "gaps": layout.GAPS,
    "oldest_gap": layout.OLDEST_GAP,
    "ids": layout.IDS,
    "skipped": layout.SKIPPED,
    "uncounted": layout.UNCOUNTED,
    "passed": layout.PASSED,
}

Numbers = NDArray[np.int64]


def wrong_in(ledger: Ledger, capacity: int | None) -> str:
    """What is wrong with a ledger's numbers, as a phrase; empty where nothing is. For use while writing.

    Each number is compared with others that say the same, so that rows which were never written are not taken for
    published ones. What a process leaves that was killed between two stores passes.

    Args:
        ledger: of a file that was opened.
        capacity: rows, as the description of the rows says; None: there is none, and so there are no rows.
    """
    head, slots, gaps = ledger.numbers()
    counters = {name: int(head[at]) for name, at in _COUNTERS.items()}
    for name, value in counters.items():
        if value < 0:
            return f"the counter {name!r} is {value}"
    if ledger.num_lost < 0:
        held_nothing = ledger.num_lost + counters["passed"]
        return f"{counters['passed']} positions were passed over, and {held_nothing} hold nothing"
    if capacity is None:
        used = [name for name in ("issued", "settled", "published", "gaps", "skipped") if counters[name]]
        return f"there are no rows, and the counter {used[0]!r} is {counters[used[0]]}" if used else ""
    if counters["capacity"] != capacity:
        return f"the counter 'capacity' is {counters['capacity']}, expected {capacity}"
    return (
        _wrong_in_slots(counters, slots)
        or _wrong_in_base(counters["base"], ~int(head[layout.BASE_CHECK]), ledger.end())
        or _wrong_in_gaps(counters, gaps, ledger.end())
    )


def _wrong_in_slots(counters: dict[str, int], slots: Numbers) -> str:
    """Reservations follow one another, and those in progress begin where the published positions end."""
    settled, published = counters["settled"], counters["published"]
    in_progress = counters["issued"] - settled
    if not 0 <= in_progress <= layout.NUM_SLOTS:
        return f"{counters['issued']} reservations were made, and {settled} of them ended"
    last = (settled - 1, settled)  # one may end just now
    ends = [int(slots[serial % layout.NUM_SLOTS][layout.STOP]) for serial in last]
    if in_progress < layout.NUM_SLOTS and published not in ends:
        return f"{published} positions are published, and the last reservation ended at {ends[0]}"
    at = published
    for serial in range(settled, settled + in_progress):
        start, stop, state, owner = slots[serial % layout.NUM_SLOTS].tolist()
        ends_now = serial == settled and start < stop == published
        follows = (start == at or ends_now) and start <= stop <= published + counters["capacity"]
        if not follows or not layout.OPEN <= state <= layout.ABANDONED or owner < 0:
            return f"a reservation in progress is of positions {start} to {stop} in state {state}, after {at}"
        at = stop
    return ""


def _wrong_in_base(base: int, check: int, end: int) -> str:
    if base == check or (base == 0 and check == -1):  # never set
        return ""
    if 0 <= base <= end and 0 <= check <= end:  # a process was killed between the two
        return ""
    return f"the counter 'base' is {base}, and its copy {check}, with {end} positions"


def _wrong_in_gaps(counters: dict[str, int], gaps: Numbers, end: int) -> str:
    """Gaps lie among the positions, and no count of lost positions grows by more than the gap is wide."""
    oldest, newest = counters["oldest_gap"], counters["gaps"]
    if not 0 <= newest - oldest <= layout.NUM_GAPS:
        return f"the gaps {oldest} to {newest} are more than {layout.NUM_GAPS}"
    serials = np.arange(max(0, newest - layout.NUM_GAPS), newest)
    start, stop, lost, _ = gaps[serials % layout.NUM_GAPS].T
    known = serials >= oldest
    wrong = known & ((start < 0) | (stop < start) | (stop > end))
    if newest:
        before = np.concatenate([lost[:1] if newest > layout.NUM_GAPS else np.zeros(1, np.int64), lost[:-1]])
        wrong |= (lost < before) | (known & (lost - before > stop - start))
        wrong |= ~known & (stop > start) & (stop > end - counters["capacity"])  # it is not over yet
    if wrong.any():
        at = int(np.flatnonzero(wrong)[0])
        return f"a gap is of positions {start[at]} to {stop[at]} of {end}, with {lost[at]} lost until then"
    next_start, next_stop, next_lost, _ = gaps[newest % layout.NUM_GAPS].tolist()
    total = int(lost[-1]) if newest else 0
    is_new = next_lost > total and next_start < next_stop <= counters["published"]
    if newest - oldest < layout.NUM_GAPS and is_new:
        return f"there are {newest} gaps, and another one of positions {next_start} to {next_stop}"
    return ""
