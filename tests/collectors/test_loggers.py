from __future__ import annotations

import csv
import os
import pickle
import sys
import threading
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import imageio.v3 as imageio
import numpy as np
import pytest
import torch
from tensordict import TensorDict
from tests.patience import patient

from rollwright.collectors import Collector, Evaluator
from rollwright.collectors.loggers import CSVLogger, MLflowLogger, TensorBoardLogger, WandbLogger
from rollwright.data import LazyTensorStorage, ReplayBuffer
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


# The other loggers --------------------------------------------------------------------------------

VIDEO = torch.arange(5 * 3 * 8 * 6, dtype=torch.int64).remainder(255).to(torch.uint8).reshape(5, 3, 8, 6)


def table(folder: Path) -> list[dict[str, str]]:
    with (folder / "progress.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def gif(data: bytes | Path):
    return imageio.imread(data, extension=".gif", index=None)


def test_csv_has_a_row_for_each_call_and_a_column_for_each_number(tmp_path):
    with CSVLogger(tmp_path) as logger:
        logger.log({"loss": 0.5, "who": "me"}, step=10)
        logger.log({"loss": torch.tensor([0.25]), "accuracy": np.float32(0.5), "deep": {"x": [1, True]}}, step=20)
        logger({"frames": 30, "mean_return": None})
    rows = table(tmp_path)
    assert [row["step"] for row in rows] == ["10", "20", "30"]
    assert [row["loss"] for row in rows] == ["0.5", "0.25", ""]
    assert [row["deep/x/1"] for row in rows] == ["", "1", ""]
    assert rows[2]["collector/frames"] == "30"
    assert "who" not in rows[0]
    assert [path.name for path in tmp_path.iterdir()] == ["progress.csv"]


def test_csv_goes_on_in_the_file_of_an_earlier_run(tmp_path):
    for step, values in ((1, {"loss": 3.0}), (2, {"accuracy": 0.5}), (3, {"loss": 1.0})):
        with CSVLogger(tmp_path) as logger:
            logger.log(values, step)
    assert [(row["step"], row["loss"], row["accuracy"]) for row in table(tmp_path)] == [
        ("1", "3.0", ""),
        ("2", "", "0.5"),
        ("3", "1.0", ""),
    ]


def test_csv_writes_what_several_threads_log_row_by_row(tmp_path):
    with CSVLogger(tmp_path) as logger, ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda i: logger.log({f"x{i % 7}": i}, step=i), range(100)))
    rows = table(tmp_path)
    assert sorted(int(row["step"]) for row in rows) == list(range(100))
    assert all(row[f"x{int(row['step']) % 7}"] == row["step"] for row in rows)


def test_csv_puts_videos_beside_its_table(tmp_path):
    with CSVLogger(tmp_path, video_format="gif") as logger:
        logger.log_video("run", VIDEO, step=7)
        logger.log_video("two", torch.stack([VIDEO, VIDEO]).float() / 255, step=7, fps=5)
    assert gif(tmp_path / "videos" / "run_7.gif").shape == (5, 8, 6, 3)
    assert gif(tmp_path / "videos" / "two_7.gif").shape == (5, 8, 12, 3)


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")  # of imageio
def test_an_mp4_has_the_frames_that_were_logged(tmp_path):
    pytest.importorskip("imageio_ffmpeg")
    with CSVLogger(tmp_path, video_format="mp4") as logger:
        logger.log_video("run", torch.full((5, 3, 32, 47), 200, dtype=torch.uint8))
    frames = imageio.imread(tmp_path / "videos" / "run_0.mp4", index=None)
    assert frames.shape == (5, 32, 48, 3)
    assert abs(int(frames[2, 5, 5, 0]) - 200) < 8


@needs_tensorboard
def test_tensorboard_shows_a_video_as_an_image(tmp_path):
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    with TensorBoardLogger(tmp_path) as logger:
        logger.log_video("run", VIDEO, step=7)
    [file] = tmp_path.iterdir()
    [event] = [event for event in LegacyEventFileLoader(str(file)).Load() if event.summary.value]
    [value] = event.summary.value
    assert (event.step, value.tag, value.image.height, value.image.width) == (7, "run", 8, 6)
    assert gif(value.image.encoded_image_string).shape == (5, 8, 6, 3)


@pytest.mark.filterwarnings("ignore")  # of wandb itself
def test_wandb_has_a_run_with_the_numbers_and_a_video(tmp_path):
    wandb = pytest.importorskip("wandb")
    with WandbLogger(tmp_path, mode="offline", config={"lr": 0.1}) as logger:
        with Collector(GymEnv("CartPole-v1"), frames_per_batch=100, total_frames=200) as collector:
            collector.log_to(logger)
            for _ in collector:
                pass
        logger.log({"eval/reward": 3.0}, step=50)  # of an earlier place on the axis
        logger.log_video("run", VIDEO, step=200)
        found = dict(logger.run.summary)
    assert found["collector/frames"] == 200
    assert (found["eval/reward"], found["run"]["_type"]) == (3.0, "video-file")
    [folder] = (tmp_path / "wandb").glob("offline-run-*")
    assert [path.stat().st_size > 0 for path in folder.glob("run-*.wandb")] == [True]
    [video] = folder.rglob("*.gif")
    assert gif(video).shape == (5, 8, 6, 3)
    wandb.teardown()  # ends its process


@pytest.mark.filterwarnings("ignore")  # of mlflow itself
def test_mlflow_has_a_run_with_the_numbers_and_a_video(tmp_path):
    mlflow = pytest.importorskip("mlflow")
    with MLflowLogger(tmp_path, experiment="mine") as logger:
        with Collector(GymEnv("CartPole-v1"), frames_per_batch=100, total_frames=200) as collector:
            collector.log_to(logger)
            for _ in collector:
                pass
        logger.log_video("a run", VIDEO, step=200)
        run = logger.run_id
    client = mlflow.MlflowClient(tracking_uri=tmp_path.as_uri())
    history = client.get_metric_history(run, "collector/frames")
    assert [(point.step, point.value) for point in history] == [(100, 100), (200, 200)]
    assert client.get_run(run).info.status == "FINISHED"
    assert [file.path.split(".")[0] for file in client.list_artifacts(run, "videos")] == ["videos/a run_200"]


@pytest.mark.parametrize(("kind", "package"), [(WandbLogger, "wandb"), (MLflowLogger, "mlflow")])
def test_a_missing_logger_is_named_with_the_command(tmp_path, monkeypatch, kind, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtraError, match=rf"{kind.__name__} needs.*pip install 'rollwright\[{package}\]'"):
        kind(tmp_path)


def test_what_is_no_video_is_refused(tmp_path):
    logger = CSVLogger(tmp_path)
    with pytest.raises(ValueError, match=r"frames: expected frames \[T, C, H, W\].*got shape \[5, 8, 6, 3\]"):
        logger.log_video("run", VIDEO.permute(0, 2, 3, 1))
    with pytest.raises(ValueError, match="video_format: expected 'mp4', 'gif' or None, got 'avi'"):
        CSVLogger(tmp_path, video_format="avi")
    with pytest.raises(TypeError, match="expected numbers by name, got int"):
        logger.log(3)


# Collectors that log --------------------------------------------------------------------------------


class Memory:
    """A logger of one's own."""

    def __init__(self, listener=None):
        self.points, self.broken, self.listener = [], False, listener

    def log(self, values, step=None):
        if self.broken:
            raise OSError("the disk is full")
        self.points.append((step, values))
        if self.listener is not None:
            self.listener(values)

    def log_video(self, name, frames, step=None, fps=30.0):
        raise NotImplementedError

    def close(self):
        raise NotImplementedError


def cartpole():
    return GymEnv("CartPole-v1")


@pytest.mark.parametrize("workers", [{}, {"num_collectors": 2, "sync": True}, {"num_collectors": 2, "sync": False}])
def test_each_batch_that_is_delivered_is_a_point(workers):
    logger = Memory()
    with Collector(cartpole, frames_per_batch=100, total_frames=400, **workers) as collector:
        collector.log_to(logger)
        seen = [collector.stats() for _ in collector]
    assert [step for step, _ in logger.points] == [stats["frames"] for stats in seen]
    assert len(seen) == 4
    last = logger.points[-1][1]
    assert last["collector/mean_return"] == seen[-1]["mean_return"]
    assert last["collector/episodes"] == seen[-1]["episodes"]
    assert ("collector/workers/1/frames" in last) == bool(workers)


@pytest.mark.parametrize("workers", [{}, {"num_collectors": 2}])
def test_batches_of_a_thread_are_points_too(workers):
    ended = threading.Event()
    logger = Memory(lambda values: ended.set() if values["frames"] >= 400 else None)
    buffer = ReplayBuffer(storage=LazyTensorStorage(1_000), batch_size=8, shared=bool(workers))
    with Collector(cartpole, frames_per_batch=100, total_frames=400, replay_buffer=buffer, **workers) as collector:
        collector.log_to(logger, prefix="")
        collector.start()
        ended.wait(patient(20))
    steps = [step for step, _ in logger.points]
    assert steps == ([100, 200, 300, 400] if not workers else sorted(steps))  # workers go on in between
    assert (len(steps), steps[-1]) == (4, 400)
    assert logger.points[-1][1]["write_count"] == 400


def test_seconds_between_points_leave_out_all_but_the_first_and_the_last():
    logger = Memory()
    with Collector(cartpole, frames_per_batch=50, total_frames=300) as collector:
        collector.log_to(logger, every_s=1_000)
        for _ in collector:
            pass
    assert [step for step, _ in logger.points] == [50, 300]


@pytest.mark.parametrize("workers", [{}, {"num_collectors": 2, "sync": True}])
def test_a_batch_whose_logging_failed_is_delivered_next(workers):
    logger = Memory()
    with Collector(cartpole, frames_per_batch=50, total_frames=150, **workers) as collector:
        collector.log_to(logger)
        collector.next()
        logger.broken = True
        with pytest.raises(OSError, match="the disk is full"):
            collector.next()
        logger.broken = False
        rest = [batch.numel() for batch in collector]
    assert rest == [50, 50]
    assert [step for step, _ in logger.points][-1] == 150


def test_what_is_no_logger_is_refused():
    with Collector(cartpole) as collector:
        with pytest.raises(TypeError, match=r"logger: expected an object with log\(values, step\).*got str"):
            collector.log_to("runs")
        with pytest.raises(ValueError, match="every_s: expected 0 or more seconds, got -1"):
            collector.log_to(Memory(), every_s=-1)
