"""Offsets of the counters of a ledger: int64 each, in shared memory or in a file."""

from __future__ import annotations

NUM_SLOTS, NUM_GAPS = 512, 8192  # reservations in progress at a time, and gaps remembered
HEADER, SLOT, GAP = 16, 4, 4  # numbers in each; the header comes first, then the slots, then the gaps

# In the header
CAPACITY, ISSUED, SETTLED, PUBLISHED, BASE, REVISION, GAPS, OLDEST_GAP, IDS, HINT = range(10)
UNCOUNTED = 10  # rows given before the count of rows was last set back
PASSED = 11  # positions that were passed over, so that what is written after a clear() begins at the first row
SKIPPED, BASE_CHECK = HEADER - 2, HEADER - 1  # rows that were given and have no position; ~base

# In a slot
START, STOP, STATE, OWNER = range(4)
OPEN, DONE, ABANDONED = range(1, 4)  # states

# In a gap, beside start and stop
LOST = 2  # positions lost so far
