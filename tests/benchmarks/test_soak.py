import pytest
import torch
from benchmarks.soak import IDS, STEPS, Look, gaps, grown, look_at, run, table_rows
from tensordict import TensorDict


@pytest.fixture(autouse=True)
def _threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_all_of_it_runs_and_nothing_is_lost():
    found = run(1.0, workers=1, samplers=1)
    assert found.wrong == []
    assert set(found.looks) == {"main", "sampler 0", "worker 0"}
    assert found.counts["frames stepped"] == found.counts["rows"] > 0
    assert min(found.counts.values()) > 0
    assert len(table_rows(found.looks)) == 3


def looks(uss: list[int], files: list[int]) -> list[Look]:
    return [Look(1 << 30, mib << 20, count, 3) for mib, count in zip(uss, files, strict=True)]


def test_what_grows_is_noticed():
    flat, n = [100] * 16, [20] * 16
    assert grown(looks(flat, n)) == []
    assert grown(looks([100, *range(200, 215)], n)) == []  # a little
    assert grown(looks([100 + 10 * i for i in range(16)], n)) == ["private memory: 155 to 235 MiB"]
    assert grown(looks(flat, [*n[:-1], 21])) == ["files: 20 to 21"]
    assert grown(looks(flat[:8], [*n[:7], 30])) == []  # too few to tell
    assert look_at(2**22 + 1) is None


def test_what_is_missing_is_noticed():
    ids = torch.tensor([3, 3, 4, 3, 4, 5, 6])
    steps = torch.tensor([7, 8, 0, 9, 1, 0, 0]).unsqueeze(-1)
    assert gaps(TensorDict({IDS: ids, STEPS: steps}, [7]), 1) == []
    assert gaps(TensorDict({IDS: ids, STEPS: steps}, [7])[[0, 1, 2, 4, 5, 6]], 0) == []  # at the end of one: not begun
    assert gaps(TensorDict({IDS: ids, STEPS: steps}, [7])[[0, 2, 3, 4, 5, 6]], 0) == [
        "1 frames are missing inside trajectories"
    ]
    assert gaps(TensorDict({IDS: ids, STEPS: steps}, [7])[[0, 1, 3, 5, 6]], 0) == ["1 trajectories are missing"]
