"""VideoRecorder: which images it gathers, and where it writes them."""

from __future__ import annotations

import imageio.v3 as imageio
import numpy as np
import pytest
import torch
from gymnasium import Env, spaces
from tensordict import TensorDict

from rollwright.collectors import Collector, Evaluator
from rollwright.collectors.loggers import CSVLogger
from rollwright.envs import GymWrapper, SerialEnv
from rollwright.envs.transforms import Compose, GrayScale, ToTensorImage, TransformedEnv, VideoRecorder


class Painted(Env):
    """Shows the number of the step as a colour."""

    observation_space = spaces.Dict({"pixels": spaces.Box(0, 255, (8, 6, 3), np.uint8)})
    action_space = spaces.Discrete(2)

    def __init__(self, shade=0, length=4):
        self.shade, self.length = shade, length

    def _seen(self):
        return {"pixels": np.full((8, 6, 3), self.shade + self.t, np.uint8)}

    def reset(self, *, seed=None, options=None):
        self.t = 0
        return self._seen(), {}

    def step(self, action):
        self.t += 1
        return self._seen(), 1.0, self.t == self.length, False, {}


class Kept:
    """A logger that keeps videos."""

    def __init__(self):
        self.videos = []

    def log_video(self, name, video, step=None, **kwargs):
        self.videos.append((name, step, kwargs, video))

    def colours(self):
        return [video[0, :, 0, 0, 0].tolist() for *_, video in self.videos]


def painted(shade=0):
    return GymWrapper(Painted(shade))


def collect(env, frames):
    with Collector(env, frames_per_batch=frames, total_frames=frames) as collector:
        return collector.next()


def test_it_gathers_each_image_of_each_episode_once_and_changes_none():
    logger = Kept()
    batch = collect(TransformedEnv(painted(), VideoRecorder(logger, "run", skip=1, fps=5)), 6)
    assert logger.colours() == [[0, 1, 2, 3, 4, 0, 1, 2]]
    [(name, step, kwargs, video)] = logger.videos
    assert (name, step, kwargs, video.shape, video.dtype) == ("run", 0, {"fps": 5}, (1, 8, 3, 8, 6), torch.uint8)
    assert batch["pixels"][:, 0, 0, 0].tolist() == [0, 1, 2, 3, 0, 1]


def test_of_a_single_environment_every_second_image_is_kept():
    logger = Kept()
    collect(TransformedEnv(painted(), VideoRecorder(logger, "run")), 6)
    assert logger.colours() == [[1, 3, 0, 2]]


def test_a_batch_is_shown_side_by_side_with_what_its_rows_last_showed():
    logger = Kept()
    env = SerialEnv(3, [lambda i=i: painted(10 * i) for i in range(3)])
    collect(TransformedEnv(env, VideoRecorder(logger, "run")), 6)
    [(*_, video)] = logger.videos
    assert video.shape == (1, 3, 3, 16, 12)  # two rows of two, the last one black
    assert video[0, :, 0, ::8, ::6].tolist() == [[[t, 10 + t], [20 + t, 0]] for t in range(3)]


def test_where_a_part_of_a_batch_is_reset_no_image_is_added():
    logger = Kept()
    env = SerialEnv(2, [lambda: GymWrapper(Painted(0, 2)), lambda: GymWrapper(Painted(10, 4))])
    collect(TransformedEnv(env, VideoRecorder(logger, "run")), 10)
    [(*_, video)] = logger.videos
    shown = [tuple(frame) for frame in video[0, :, 0, 0, ::6].tolist()]
    assert shown == [(0, 10), (1, 11), (2, 12), (1, 13), (2, 14), (0, 10), (1, 11)]


def test_it_sees_what_the_transforms_before_it_make():
    before, after = Kept(), Kept()
    first, second = VideoRecorder(before, "colour", skip=1), VideoRecorder(after, "grey", skip=1, center_crop=4)
    collect(TransformedEnv(painted(250), Compose(first, ToTensorImage(), GrayScale(), second)), 2)
    assert before.colours() == [[250, 251, 252]]
    assert after.colours() == [[250, 251, 252]]  # of one channel and from 0 to 1, as three of 0 to 255
    assert [video.shape[-2:] for *_, video in (before.videos[0], after.videos[0])] == [(8, 6), (4, 4)]


def test_an_evaluator_writes_one_video_for_each_evaluation(tmp_path):
    def make():
        return TransformedEnv(painted(), VideoRecorder(CSVLogger(tmp_path, video_format="gif"), "eval", skip=1))

    with Evaluator(make, num_trajectories=1, max_steps=4) as evaluator:
        for _ in range(2):
            evaluator.evaluate()
    videos = sorted(path.name for path in (tmp_path / "videos").iterdir())
    assert videos == ["eval_0.gif", "eval_1.gif"]
    assert len(imageio.imread(tmp_path / "videos" / "eval_1.gif", index=None)) == 5


def test_paths_are_numbered_where_there_is_more_than_one_video(tmp_path):
    recorder = VideoRecorder(tmp_path / "run.gif", "run")
    for _ in range(2):
        recorder(TensorDict({"pixels": torch.zeros(4, 8, 6, 3, dtype=torch.uint8)}, [4]))
        recorder.dump()
        recorder.dump()  # nothing was gathered
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.gif", "run_1.gif"]


def test_a_run_with_a_recorder_is_saved_and_resumed_without_its_images():
    def make():
        return TransformedEnv(painted(), VideoRecorder(logger, "run", skip=1))

    logger = Kept()
    with Collector(make, frames_per_batch=3) as first, Collector(make, frames_per_batch=3) as second:
        first.next()
        state = first.state_dict()
        expected = first.next()
        second.load_state_dict(state)
        assert (second.next() == expected).all()
    assert not state["unsaved"]
    assert logger.colours() == [[4, 0, 1, 2], [0, 1, 2, 3, 4, 0, 1, 2]]  # the second is closed first


def test_torchrl_loggers_take_its_videos(tmp_path):
    loggers = pytest.importorskip("torchrl.record.loggers")
    logger = loggers.CSVLogger("run", log_dir=str(tmp_path), video_format="pt")
    collect(TransformedEnv(painted(), VideoRecorder(logger, "video", skip=1)), 3)
    [path] = tmp_path.rglob("*.pt")
    assert torch.load(path).shape == (1, 4, 3, 8, 6)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"logger": 3}, TypeError, "logger: expected a path, or an object with log_video"),
        ({"skip": 0}, ValueError, "skip: expected an integer of at least 1, or None, got 0"),
        ({"center_crop": 2.0}, ValueError, "center_crop: expected an integer of at least 1, or None, got 2.0"),
        ({"tag": None}, TypeError, "tag: expected the name of the video, got None"),
        ({"out_keys": ["other"]}, ValueError, "out_keys: expected 'pixels', the in_keys"),
    ],
)
def test_wrong_arguments_are_refused(arguments, error, text):
    with pytest.raises(error, match=text):
        VideoRecorder(**{"logger": Kept(), "tag": "run", **arguments})


def test_what_is_no_image_is_named():
    env = TransformedEnv(painted(), VideoRecorder(Kept(), "run", in_keys=[("next", "reward")], skip=1))
    with pytest.raises(Exception, match="reward"):
        collect(env, 2)
    with pytest.raises(ValueError, match=r"expected images.*'observation', got shape \[4\]"):
        VideoRecorder(Kept(), "run", in_keys=["observation"])(TensorDict({"observation": torch.zeros(4)}))
