"""Environments of tensors that keep the conventions of Isaac Lab, mjlab and ManiSkill: they reset within the step."""

from __future__ import annotations

from types import SimpleNamespace

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from tensordict.nn import TensorDictModule
from torch import nn

from rollwright.collectors import Collector
from rollwright.envs import GymWrapper
from rollwright.errors import EnvError

NUM, STEPS = 6, 12
SPACE, ACTIONS = (spaces.Box(-np.inf, np.inf, (3,), np.float32) for _ in range(2))


class Scene:
    """What is simulated: rows that terminate far away and are truncated after some steps, in memory written again."""

    def __init__(self, device="cpu"):
        self.device, self.seed = torch.device(device), 0
        self.at = torch.zeros(NUM, 3, device=device)
        self.steps, self.episodes = (torch.zeros(NUM, dtype=torch.int64, device=device) for _ in range(2))
        self.limit = 3 + torch.arange(NUM, device=device) % 4

    def begin(self, rows):
        start = torch.frac(0.37 * self.episodes + 0.11 * torch.arange(NUM, device=self.device) + self.seed)
        self.at.copy_(torch.where(rows.unsqueeze(-1), start.unsqueeze(-1) - 0.5, self.at))
        self.steps, self.episodes = torch.where(rows, 0, self.steps), self.episodes + rows.long()

    def begin_all(self, seed=None):
        if seed is not None:
            self.seed, self.episodes = seed / 10, torch.zeros_like(self.episodes)
        self.begin(torch.ones(NUM, dtype=torch.bool, device=self.device))

    def move(self, action):
        self.at.add_(0.3 * action + 0.05)
        self.steps = self.steps + 1
        return self.at.sum(-1), self.at[:, 0].abs() > 0.7, self.steps >= self.limit


class Lab(gymnasium.Env):
    """As environments of Isaac Lab: many in one ``gymnasium.Env``, and no last observations."""

    is_vector_env = True
    metadata = {"render_modes": []}  # noqa: RUF012

    def __init__(self, device="cpu"):
        self.scene, self.num_envs = Scene(device), NUM
        self.device = str(device)
        self.single_observation_space, self.single_action_space = spaces.Dict(policy=SPACE), ACTIONS
        self.action_space = gymnasium.vector.utils.batch_space(ACTIONS, NUM)
        self.observation_space = gymnasium.vector.utils.batch_space(self.single_observation_space, NUM)

    def reset(self, seed=None, env_ids=None, options=None):
        self.scene.begin_all(seed)
        return {"policy": self.scene.at}, {}

    def step(self, action):
        reward, terminated, truncated = self.scene.move(action)
        self.scene.begin(terminated | truncated)
        return {"policy": self.scene.at}, reward, terminated, truncated, {}


class OwnBox(SimpleNamespace):
    """A space that is not gymnasium's."""


class Mjlab:
    """As mjlab's: no class of gymnasium at all."""

    is_vector_env = True
    metadata = {"render_modes": []}  # noqa: RUF012

    def __init__(self):
        self.lab, self.num_envs, self.cfg = Lab(), NUM, SimpleNamespace(auto_reset=True)
        self.device = "cpu"
        own = OwnBox(low=-np.inf, high=np.inf, shape=(3,), dtype=np.float32)
        self.single_observation_space = OwnBox(spaces={"policy": own})
        self.single_action_space = OwnBox(low=-1.0, high=1.0, shape=(3,), dtype=np.float32)
        self.unwrapped = self

    def reset(self, *, seed=None, env_ids=None, options=None):
        return self.lab.reset(seed)

    def step(self, action):
        return self.lab.step(action)

    def close(self):
        pass


class Skill(VectorEnv):
    """As ManiSkillVectorEnv: last observations are in ``info`` where something has ended, and no mode is declared."""

    def __init__(self, device="cpu", *, masked=False):
        self.scene, self.auto_reset, self.num_envs, self.masked = Scene(device), True, NUM, masked
        self.single_observation_space, self.single_action_space = spaces.Dict(policy=SPACE), ACTIONS
        self.action_space = gymnasium.vector.utils.batch_space(ACTIONS, NUM)
        self.observation_space = gymnasium.vector.utils.batch_space(self.single_observation_space, NUM)

    @property
    def unwrapped(self):
        return self.scene

    def reset(self, *, seed=None, options=None):
        self.scene.begin_all(seed)
        return {"policy": self.scene.at}, {}

    def step(self, action):
        reward, terminated, truncated = self.scene.move(action)
        ended, info = terminated | truncated, {}
        if self.scene.device.type == "meta" or ended.any():
            info = {"final_observation": {"policy": self.scene.at.clone()}, "_final_observation": ended}
            if self.masked:
                info["_final_observation"] = ended & ~truncated
        self.scene.begin(ended)
        return {"policy": self.scene.at}, reward, terminated, truncated, info


class Late(Skill):
    """The same without a device, in which its first reset alone shows that it returns tensors."""

    unwrapped = None
    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}  # noqa: RUF012

    def __init__(self, device="cpu"):
        self.unwrapped = SimpleNamespace()
        super().__init__(device)


class Masked(Late):
    """One that is reset where ``reset_mask`` says."""

    metadata = {"autoreset_mode": AutoresetMode.DISABLED}  # noqa: RUF012
    resets_by_mask = True

    def __init__(self, device="cpu"):
        super().__init__(device)
        self.unwrapped = self

    def reset(self, *, seed=None, options=None):
        if options is None or "reset_mask" not in options:
            return super().reset(seed=seed)
        self.scene.begin(options["reset_mask"])
        return {"policy": self.scene.at}, {}

    def step(self, action):
        reward, terminated, truncated = self.scene.move(action)
        return {"policy": self.scene.at}, reward, terminated, truncated, {}


ENVS = {"lab": Lab, "mjlab": Mjlab, "skill": Skill, "late": Late, "masked": Masked}
TELLS_LAST = ("skill", "late", "masked")
names = pytest.mark.parametrize("name", ENVS)


def network():
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(3, 3), nn.Tanh())


def made(name, *, workers=None, **options):
    policy = TensorDictModule(network(), ["policy"], ["action"])
    more = {} if workers is None else {"num_collectors": workers, "sync": True}
    options = {"frames_per_batch": NUM * STEPS, "total_frames": 4 * NUM * STEPS, **more, **options}
    collector = Collector(ENVS[name] if workers else ENVS[name](), policy, **options)
    collector.set_seed(3)
    return collector


def by_hand(name, batches):
    """Frames of a loop over the scene alone."""
    scene, net, rows = Scene(), network(), []
    scene.begin_all(3)
    for _ in range(batches * STEPS):
        before = scene.at.clone()
        with torch.no_grad():
            action = net(before)
        reward, terminated, truncated = scene.move(action)
        ended, after = terminated | truncated, scene.at.clone()
        if name not in TELLS_LAST:
            after[terminated], after[ended & ~terminated] = 0.0, torch.nan
        row = {"policy": before, "action": action, ("next", "policy"): after, ("next", "reward"): reward}
        flags = {"terminated": terminated, "truncated": truncated, "done": ended}
        row |= {("next", flag): value for flag, value in flags.items()}
        if name not in ("late", "masked"):
            row["next", "observation_missing"] = ended & (name not in TELLS_LAST)
            row["observation_missing"] = torch.zeros_like(ended)
        rows.append({key: value.reshape(NUM, -1) for key, value in row.items()})
        scene.begin(ended)
    return {key: torch.stack([row[key] for row in rows], 1) for key in rows[0]}


def assert_as_by_hand(name, batches):
    data = torch.cat([batch.reshape(NUM, STEPS) for batch in batches], 1)
    expected = by_hand(name, len(batches))
    for key, value in expected.items():
        assert torch.equal(data[key].nan_to_num(7.0), value.nan_to_num(7.0)), key
    assert (data["next", "truncated"] & ~data["next", "terminated"]).any()
    assert data["next", "terminated"].any()
    done, ids = data["next", "done"].squeeze(-1), data["collector", "traj_ids"]
    assert torch.equal(ids[:, 1:] != ids[:, :-1], done[:, :-1])
    assert ("observation_missing" in set(data.keys())) == ("observation_missing" in expected)


@names
@pytest.mark.parametrize("buffers", [None, False])
def test_frames_are_those_of_a_loop_by_hand(name, buffers):
    with made(name, use_buffers=buffers) as collector:
        batches = [batch.clone() for batch in collector]
        assert collector.stats()["paths"]["env"].startswith("native: tensors" if buffers is None else "plain")
    assert_as_by_hand(name, batches)


@names
def test_a_collector_goes_on_from_its_state(name):
    with made(name) as collector:
        batches = [collector.next().clone() for _ in range(2)]
        state = collector.state_dict()
    with made(name) as collector:
        collector.load_state_dict(state)
        batches += [collector.next().clone() for _ in range(2)]
    assert_as_by_hand(name, batches)


@names
def test_a_worker_delivers_what_one_process_does(name):
    with made(name, workers=1) as collector:
        assert_as_by_hand(name, [batch.clone() for batch in collector])


@names
def test_tensors_are_known_before_the_first_step(name, monkeypatch):
    monkeypatch.setattr(GymWrapper, "step_values", None)  # which steps on arrays
    with made(name) as collector:
        collector.next()
        assert collector.stats()["paths"]["env"] == "native: tensors"


@pytest.mark.parametrize("name", ["lab", "skill", "masked"])
def test_data_are_on_the_device_of_the_environment(name):
    """On "meta" nothing can be read, and no entry of another device can be mixed in."""
    env = GymWrapper(ENVS[name]("meta"), device="meta")
    td = env._reset()
    assert td["policy"].device.type == "meta"
    td = env._step(td.set("action", torch.zeros(NUM, 3, device="meta")))
    assert td["policy"].device.type == td["reward"].device.type == "meta"


def test_a_collector_chooses_its_path_again_where_the_first_reset_shows_tensors(monkeypatch):
    monkeypatch.setattr("rollwright.envs.own_tensors.OwnTensors.check_batch", lambda self: None)
    env = GymWrapper(Late("meta"), device="meta")
    monkeypatch.setattr("rollwright.envs.base.check_alive", lambda *args: None)
    monkeypatch.setattr("rollwright.envs._results.check_alive", lambda *args: None)
    policy = TensorDictModule(network().to("meta"), ["policy"], ["action"])
    with Collector(env, policy, frames_per_batch=NUM * STEPS) as collector, torch.no_grad():
        rollout = collector._rollout
        assert collector.stats()["paths"]["env"].startswith("plain")
        rollout._begin()
        assert collector.stats()["paths"]["env"] == "native: tensors"
        for t in range(STEPS):
            for part in (rollout.path.act, rollout.path.step, rollout.path.record, rollout.path.follow):
                part(t)


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["lab", "skill", "late", "masked"])
def test_a_gpu_gives_the_frames_of_the_cpu(name):
    env = GymWrapper(ENVS[name]("cuda"), device="cuda")
    policy = TensorDictModule(network().cuda(), ["policy"], ["action"])
    options = {"frames_per_batch": NUM * STEPS, "total_frames": 3 * NUM * STEPS}
    with Collector(env, policy, **options) as collector:
        collector.set_seed(3)
        data = torch.cat([batch.cpu().clone() for batch in collector], 1)
        assert collector.stats()["paths"]["env"] == "native: tensors"
    for key, value in by_hand(name, 3).items():
        torch.testing.assert_close(data[key], value, rtol=1e-3, atol=1e-4, equal_nan=True)


@names
def test_direct_steps_keep_what_has_ended(name):
    env = GymWrapper(ENVS[name]())
    env.set_seed(3)
    policy = TensorDictModule(network(), ["policy"], ["action"])
    td = env.rollout(20, policy, break_when_all_done=True)
    expected = by_hand(name, 2)
    for row in range(NUM):
        end = int(expected["next", "done"][row].squeeze(-1).nonzero()[0])
        assert torch.equal(td["policy"][row, : end + 1], expected["policy"][row, : end + 1])
        last = expected["next", "policy"][row, end].nan_to_num(7.0)
        assert (td["next", "policy"][row, end:].nan_to_num(7.0) == last).all()
        assert not td["next", "reward"][row, end + 1 :].any()
        assert td["next", "done"][row, end:].all()
    env.set_seed(3)
    again = env.rollout(2 * STEPS, policy, break_when_any_done=False)
    assert torch.equal(again["policy"][:, 1], td["policy"][:, 1])
    assert not again["policy"].isnan().any()


def test_rows_whose_last_observation_is_missing_are_told_by_a_mask():
    env = GymWrapper(Skill(masked=True))
    policy = TensorDictModule(network(), ["policy"], ["action"])
    with Collector(env, policy, frames_per_batch=NUM * STEPS, total_frames=NUM * STEPS) as collector:
        (batch,) = collector
    missing = batch["next", "observation_missing"]
    assert torch.equal(missing, batch["next", "truncated"])
    only = batch["next", "truncated"] & ~batch["next", "terminated"]
    assert torch.equal(batch["next", "policy"].isnan().all(-1, keepdim=True), only)
    assert missing.any()


def test_whole_numbers_that_are_missing_are_zero():
    lab = Lab()
    lab.single_observation_space = spaces.Dict(policy=spaces.Box(-9, 9, (3,), np.int64))
    lab.scene.at = lab.scene.at.long()
    lab.scene.begin = lambda rows: None
    lab.scene.move = lambda action: (torch.zeros(NUM), torch.zeros(NUM) > 1, torch.ones(NUM) > 0)
    td = GymWrapper(lab).rollout(1)
    assert td["next", "observation_missing"].all()
    assert not td["next", "policy"].any()


def test_some_rows_of_what_resets_by_itself_cannot_be_reset_alone():
    env = GymWrapper(Lab())
    td = env.reset()
    td["_reset"] = torch.arange(NUM).unsqueeze(-1) == 2
    with pytest.raises(EnvError, match=r"cannot reset its environments \[2\] alone"):
        env.reset(td)
    td["_reset"] = torch.ones(NUM, 1, dtype=torch.bool)
    assert not env.reset(td)["done"].any()


def test_what_cannot_be_taken():
    skill = Skill()
    skill.auto_reset, skill.metadata = None, {}
    with pytest.raises(ValueError, match=r"does not say when it resets .* such as ManiSkillVectorEnv"):
        GymWrapper(skill)
    mjlab = Mjlab()
    mjlab.single_action_space = OwnBox(n=3)
    with pytest.raises(TypeError, match="env: expected spaces of gymnasium, or a Box or Dict like its own"):
        GymWrapper(mjlab)
    mjlab = Mjlab()
    mjlab.cfg.auto_reset = False
    with pytest.raises(ValueError, match="does not read options\\['reset_mask'\\]"):
        GymWrapper(mjlab)
