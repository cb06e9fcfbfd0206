"""What is measured over Ray, as data. Needs torch and gymnasium only, so that the peer can read it."""

from __future__ import annotations

from benchmarks.workers_cases import CARTPOLE, Case

CASES = (
    Case(CARTPOLE, 2, 200),
    Case(CARTPOLE, 2, 2000),
    Case(CARTPOLE, 2, 100, 1),
)


def case_name(case: Case) -> str:
    """What tables and peers call it."""
    return f"{case.env_name}; {case.steps * case.workers:,} frames a batch"


def find_case(name: str) -> Case:
    """The case of that name."""
    return next(case for case in CASES if case_name(case) == name)
