from __future__ import annotations

import os
import pickle
import sys
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from rollwright.collectors import Collector, Evaluator
from rollwright.collectors.loggers import TensorBoardLogger
from rollwright.envs import GymEnv
from rollwright.errors import MissingExtraError

try:
    import tensorboard
except ModuleNotFoundError:
    tensorboard = None
needs_tensorboard = pytest.mark.skipif(tensorboard is None, reason="tensorboard is not installed")


def curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Points of all curves in the files of one folder, as TensorBoard reads them."""
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    found = defaultdict(list)
    for file in sorted(path for path in folder.iterdir() if path.is_file()):
        for event in LegacyEventFileLoader(str(file)).Load():
            for value in event.summary.value:
                found[value.tag].append((event.step, value.simple_value))
    return found


def batch(reward: float, done: list[bool], version: int | None = None) -> TensorDict:
    flags = torch.tensor(done).unsqueeze(-1)
    frames = TensorDict({"next": {"reward": torch.full(flags.shape, reward), "done": flags}}, [len(done)])
    return frames if version is None else frames.set("policy_version", torch.full((len(done),), version))


@needs_tensorboard
def test_every_number_in_the_statistics_becomes_a_point(tmp_path):
    with TensorBoardLogger(tmp_path) as log, Collector(GymEnv("CartPole-v1"), total_frames=400) as collector:
        said = []
        for _ in collector:
            said.append(collector.stats())
            log(said[-1])
    found = curves(tmp_path)
    assert found["collector/frames"] == [(200, 200), (400, 400)]
    assert found["collector/episodes"] == [(stats["frames"], stats["episodes"]) for stats in said]
    assert found["collector/seconds/policy"][1] == (400, pytest.approx(said[1]["seconds"]["policy"]))
    assert found["collector/completed"] == [(200, 0), (400, 1)]
    assert not any("paths" in name or "devices" in name for name in found)  # which are text


@needs_tensorboard
def test_results_of_evaluations_are_points_at_their_steps(tmp_path):
    with (
        TensorBoardLogger(tmp_path, prefix="") as log,
        Evaluator(lambda: GymEnv("CartPole-v1"), num_trajectories=1, on_result=log) as evaluator,
    ):
        for step in (700, 1400):
            evaluator.evaluate(step=step)
    found = curves(tmp_path)
    assert [step for step, _ in found["eval/reward"]] == [700, 1400]


@needs_tensorboard
def test_workers_have_curves_of_their_own(tmp_path):
    with TensorBoardLogger(tmp_path, prefix="") as log:
        log({"frames": 7, "workers": [{"frames": 3, "state": "waiting"}, {"frames": 4, "seconds": {"env": 0.5}}]})
    assert curves(tmp_path) == {
        "frames": [(7, 7)],
        "workers/0/frames": [(7, 3)],
        "workers/1/frames": [(7, 4)],
        "workers/1/seconds/env": [(7, 0.5)],
    }


@needs_tensorboard
def test_as_a_hook_it_writes_means_of_batches(tmp_path):
    log = TensorBoardLogger(tmp_path)
    with Collector(GymEnv("CartPole-v1"), frames_per_batch=100, total_frames=300, post_collect_hook=log) as collector:
        ended = [int(batch["next", "done"].sum()) for batch in collector]
    log.close()
    found = curves(tmp_path)
    assert found["collector/reward"] == [(100, 1.0), (200, 1.0), (300, 1.0)]
    assert [count for _, count in found["collector/episodes_ended"]] == ended
    assert [step for step, rate in found["collector/frames_per_second"] if rate > 0] == [200, 300]
    assert "collector/policy_version" not in found


@needs_tensorboard
def test_padding_and_frames_that_were_not_taken_count_for_nothing(tmp_path):
    padded = torch.stack([batch(2.0, [False, True], version=1), batch(0.0, [True, True], version=9)], 0)
    with TensorBoardLogger(tmp_path / "padded") as log:
        log(padded.clone().set(("collector", "mask"), torch.tensor([[True, True], [True, False]])))
    with TensorBoardLogger(tmp_path / "cut") as log:
        log(padded.clone().set(("collector", "traj_ids"), torch.tensor([[0, 0], [1, -1]])))
    for folder in ("padded", "cut"):
        found = curves(tmp_path / folder)
        assert found["collector/reward"] == [(3, pytest.approx(4 / 3))]
        assert found["collector/episodes_ended"] == [(3, 2.0)]
        assert found["collector/policy_version"] == [(3, 9.0)]


@needs_tensorboard
def test_batches_that_are_not_written_are_counted(tmp_path):
    with TensorBoardLogger(tmp_path, every_s=1000.0) as log:
        log(batch(1.0, [False, True], version=3))
        log(batch(2.0, [True, True]))
        log.every_s = 0.0
        log(batch(3.0, [False, True]))
    found = curves(tmp_path)
    assert found["collector/reward"] == [(2, 1.0), (6, 3.0)]
    assert found["collector/episodes_ended"] == [(2, 1.0), (6, 3.0)]
    assert found["collector/policy_version"] == [(2, 3.0)]


@needs_tensorboard
def test_another_process_writes_into_a_folder_of_its_own(programs, tmp_path):
    log = TensorBoardLogger(tmp_path)
    log({"frames": 1})
    (tmp_path / "pickled").write_bytes(pickle.dumps(log))
    code = "import pickle, sys; pickle.load(open(sys.argv[1], 'rb'))({'frames': 2}); import os; print(os.getpid())"
    done = programs.run("-c", code, tmp_path / "pickled", timeout=60)
    assert done.returncode == 0, done.stderr
    log({"frames": 3})
    log.close()
    assert curves(tmp_path)["collector/frames"] == [(1, 1), (3, 3)]
    assert curves(tmp_path / f"process-{int(done.stdout)}")["collector/frames"] == [(2, 2)]


@needs_tensorboard
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_leaves_the_file_of_its_parent_alone(tmp_path):
    log = TensorBoardLogger(tmp_path)
    log({"frames": 1})
    pid = os.fork()
    if not pid:
        log({"frames": 2})
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    log({"frames": 3})
    assert curves(tmp_path)["collector/frames"] == [(1, 1), (3, 3)]
    assert curves(tmp_path / f"process-{pid}")["collector/frames"] == [(2, 2)]
    log.close()


@needs_tensorboard
def test_what_was_written_is_on_disk_before_the_file_is_closed(tmp_path):
    log = TensorBoardLogger(tmp_path)
    assert not list(tmp_path.iterdir())
    log({"frames": 1})
    assert curves(tmp_path)["collector/frames"] == [(1, 1)]
    log.close()
    log.close()
    log({"frames": 2})
    log.close()
    assert len(list(tmp_path.iterdir())) == 2


@needs_tensorboard
def test_wrong_arguments_are_refused(tmp_path):
    with pytest.raises(ValueError, match="every_s: expected 0 or more seconds, got -1"):
        TensorBoardLogger(tmp_path, every_s=-1)
    with pytest.raises(TypeError, match=r"expected collector.stats\(\) or a batch, got int"):
        TensorBoardLogger(tmp_path)(3)


def test_a_missing_package_is_named_with_the_command(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    for name in [name for name in sys.modules if name.startswith("tensorboard.")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(MissingExtraError, match=r"pip install 'rollwright\[tensorboard\]'"):
        TensorBoardLogger(tmp_path)
