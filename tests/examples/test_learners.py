"""The examples that learn from environments: options, logs, curve, checkpoint, resume, goal, Ctrl-C."""

from __future__ import annotations

import csv
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tests.patience import patient

from rollwright.data import Bounded, Composite, Unbounded
from rollwright.envs import EnvBase

EXAMPLES = Path(__file__).parents[2] / "examples"
PPO, CONTINUOUS, RECURRENT = "ppo_cartpole.py", "ppo_continuous.py", "recurrent_ppo.py"
DQN, ATARI, SAC = "dqn_replay.py", "dqn_atari.py", "sac_async.py"
SHORT = {  # options of a short run, the frames of a round, and of the rounds until the checkpoint is written
    PPO: (["--num-envs", 4, "--steps", 32, "--epochs", 1], 128, 3),
    RECURRENT: (["--num-envs", 4, "--steps", 32, "--epochs", 1], 128, 3),
    CONTINUOUS: (["--env", "Pendulum-v1", "--num-envs", 4, "--steps", 32, "--epochs", 1, "--normalize"], 128, 3),
    DQN: (["--sync", "--warm-up", 256, "--updates-per-round", 2], 128, 5),
    SAC: (["--sync", "--warm-up", 64, "--updates-per-round", 1, "--frames-per-test", 64], 32, 6),
    ATARI: (["--warm-up", 32, "--size", 42, "--frames-per-round", 16, "--updates-per-round", 1], 16, 4),
}
POINT = re.compile(r"([\d,]+) frames, mean return (-?[\d.]+)")
LAST = re.compile(
    r"^(interrupted|goal reached|no frames left): ([\d,]+) frames, mean return (\S+), \d+ s$", re.MULTILINE
)


def points_of(out: str) -> list[tuple[int, float]]:
    return [(int(frames.replace(",", "")), float(value)) for frames, value in POINT.findall(out)]


def command(name: str, *options: Any) -> list[Any]:
    quiet = ["-W", "error"] if name != ATARI else []  # its emulator cannot be saved, and a warning says so
    return [*quiet, EXAMPLES / name, *options]


@pytest.mark.parametrize("name", SHORT)
def test_goes_on_from_its_checkpoint_as_if_it_had_not_ended(programs, tmp_path, name):
    if name == ATARI:
        pytest.importorskip("ale_py")
    options, frames, rounds = SHORT[name]
    first, whole = tmp_path / "first", tmp_path / "whole"
    whole_options = [*options, "--total-frames", frames * (rounds + 2)]
    done = programs.run(*command(name, *options, "--total-frames", frames * rounds, "--log-dir", first))
    assert done.returncode == 1, done.stderr  # the goal was not reached
    picture = tmp_path / "curve.png"
    resumed = programs.run(*command(name, *whole_options, "--log-dir", first, "--resume", "--plot", picture))
    uninterrupted = programs.run(*command(name, *whole_options, "--log-dir", whole))
    if name not in (ATARI, CONTINUOUS, PPO, RECURRENT):  # the learning rate of the latter falls to the end
        assert points_of(resumed.stdout)[-1] == points_of(uninterrupted.stdout)[-1]
        assert not resumed.stderr
    assert LAST.search(resumed.stdout)[1] == "no frames left"
    assert int(LAST.search(resumed.stdout)[2].replace(",", "")) == frames * (rounds + 2)
    assert picture.read_bytes()[1:4] == b"PNG"
    with (first / "progress.csv").open() as file:
        logged = [int(float(row["collector/frames"])) for row in csv.DictReader(file)]
    assert logged[-1] == frames * (rounds + 2)
    assert sorted(path.name for path in whole.iterdir()) == ["checkpoint.pt", "progress.csv"]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_resumed_run_of_ppo_has_the_weights_of_the_uninterrupted_one(programs, tmp_path, workers):
    options = ["--epochs", 1, "--total-frames", 3 * 2048, "--workers", workers, "--log-dir"]
    first = programs.run(*command(PPO, *options, tmp_path / "first", "--goal", 10))
    assert points_of(first.stdout)[-1][0] < 3 * 2048
    programs.run(*command(PPO, *options, tmp_path / "first", "--goal", 1e9, "--resume"))
    programs.run(*command(PPO, *options, tmp_path / "whole", "--goal", 1e9))
    resumed, whole = (torch.load(tmp_path / name / "checkpoint.pt", weights_only=True) for name in ("first", "whole"))
    assert workers or resumed["curve"] == whole["curve"]  # with workers, the mean return differs
    for name in ("actor", "critic"):
        for key, value in whole[name].items():
            assert torch.equal(resumed[name][key], value)


ENDLESS = {
    PPO: ["--num-envs", 4, "--steps", 64, "--workers", 2],
    DQN: ["--workers", 2, "--warm-up", 256],
    SAC: ["--warm-up", 64, "--frames-per-test", 32],
}


@pytest.mark.parametrize("name", ENDLESS)
def test_ctrl_c_ends_it_with_a_checkpoint(programs, tmp_path, name):
    options = [*ENDLESS[name], "--goal", 1e9, "--total-frames", 10**8, "--log-dir", tmp_path]
    program = programs.start(*command(name, *options))
    out = ""
    while len(points_of(out)) < 2:
        out += program.stdout.read(1)
    program.send_signal(signal.SIGINT)
    rest, errors = program.communicate(timeout=patient(60))
    assert not errors
    assert program.returncode == 1
    why, frames, _ = LAST.search(out + rest).groups()
    assert why == "interrupted"
    state = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert "collector" in state
    assert f"{state['curve'][-1][0]:,}" == frames
    assert not (tmp_path / "checkpoint.tmp").exists()


@pytest.mark.parametrize("options", [(PPO, "--workers", 2), (PPO, "--workers", 2, "--no-sync"), (DQN,)])
def test_stops_at_the_goal(programs, options):
    done = programs.run(*command(*options, "--goal", 12))  # random actions give 20
    assert not done.stderr
    assert done.returncode == 0
    assert LAST.search(done.stdout)[1] == "goal reached"
    assert float(LAST.search(done.stdout)[3]) >= 12


def test_same_returns_with_workers_twice(programs):
    options = ["--num-envs", 4, "--steps", 32, "--epochs", 1, "--total-frames", 512, "--workers", 2]
    first, second = (points_of(programs.run(*command(PPO, *options)).stdout) for _ in range(2))
    assert len(first) >= 4
    assert first == second


def test_options_are_explained_and_checked(programs):
    done = programs.run(*command(PPO, "--help"))
    assert "--learning-rate" in done.stdout
    assert "seeds environments, networks, and what is drawn (default: 0)" in " ".join(done.stdout.split())
    done = programs.run(*command(PPO, "--resume"))
    assert done.returncode == 2
    assert "--resume: needs the folder of the run, --log-dir" in done.stderr
    done = programs.run(*command(PPO, "--logger", "paper"))
    assert "--logger: expected one of csv, tensorboard, wandb, mlflow, got paper" in done.stderr


class Chase(EnvBase):
    """Two agents of each of 32 environments are rewarded for actions like what they see."""

    resets_by_mask = True

    def __init__(self, agents=(2,)):
        super().__init__(batch_size=[32])
        self.rows = (32, *agents)
        nest = {"observation": Unbounded((*self.rows, 2))}, {"action": Bounded(-1, 1, (*self.rows, 2))}
        rewards = {"reward": Unbounded((*self.rows, 1))}
        made = [Composite(entries, shape=self.rows) for entries in (*nest, rewards)]
        made = [Composite(agents=one, shape=[32]) for one in made] if agents else made
        self.observation_spec, self.action_spec, self.reward_spec = made
        self.add_truncated_keys()
        self.agents, self.count = bool(agents), 0

    def seen(self, **more):
        self.goal = torch.rand(*self.rows, 2) - 0.5
        entries = {"observation": self.goal, **more}
        return TensorDict({"agents": TensorDict(entries, self.rows)} if self.agents else entries, [32])

    def _reset(self, tensordict=None, **kwargs):
        return self.seen()

    def _step(self, tensordict):
        action = tensordict["agents", "action"] if self.agents else tensordict["action"]
        reward = -(action - self.goal).square().sum(-1, keepdim=True)
        self.count += 1
        over = torch.full((32, 1), self.count % 10 == 0)
        return self.seen(reward=reward).update({"terminated": over & ~over, "truncated": over, "done": over})

    def _set_seed(self, seed):
        torch.manual_seed(seed)


@pytest.mark.parametrize("agents", [(2,), ()], ids=["agents", "one"])
def test_learns_what_simulators_return(monkeypatch, agents):
    """The simulators themselves need not be installed."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import ppo_continuous

    settings = ppo_continuous.Settings(num_envs=32, steps=20, epochs=4, learning_rate=3e-3, total_frames=32 * 20 * 8)
    run = ppo_continuous.train(settings, lambda *_: Chase(agents))
    values = [value for _, value in run.curve]
    assert len(values) == 8
    assert values[-1] > values[0] + 0.5
    for name in ("ppo_continuous", "common"):
        del sys.modules[name]


LEARNS = {
    "ppo": (PPO, []),
    "ppo with workers": (PPO, ["--workers", 2]),
    "dqn": (DQN, []),
    "sac": (SAC, []),
    "sac with workers": (SAC, ["--workers", 2]),
    "recurrent": (RECURRENT, ["--goal", 400]),
}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("case", LEARNS)
def test_learns(programs, case, seed):
    name, options = LEARNS[case]
    done = programs.run(*command(name, *options, "--seed", seed), timeout=880)
    assert not done.stderr
    assert done.returncode == 0, done.stdout[-300:]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_memory_is_what_it_takes(programs):
    done = programs.run(*command(RECURRENT, "--no-memory"), timeout=880)
    assert done.returncode == 1
    assert float(LAST.search(done.stdout)[3]) < 100
