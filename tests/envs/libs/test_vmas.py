"""VMAS: its data are those of a loop by hand, its agents are in groups, and one thing is read in a step."""

from __future__ import annotations

import importlib.util
from functools import wraps
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tensordict.nn import TensorDictModule
from torch import nn

from rollwright.collectors import Collector
from rollwright.data import MultiOneHot, OneHot
from rollwright.envs import TransformedEnv, VmasEnv, VmasWrapper
from rollwright.envs.libs.pettingzoo import MarlGroupMapType
from rollwright.envs.transforms import RewardSum
from rollwright.errors import EnvError, MissingExtraError

NUM, STEPS, LIMIT = 5, 12, 7


def drawing_apart(call):
    """Let a method draw from the generators of its class."""

    @wraps(call)
    def drawn(self, *args, **kwargs):
        before, own = torch.get_rng_state(), self.vmas_random_state
        torch.set_rng_state(own[0])
        try:
            return call(self, *args, **kwargs)
        finally:
            own[0] = torch.get_rng_state()
            torch.set_rng_state(before)

    return drawn


class FakeEnvironment:
    """What VMAS does, in little: agents that are moved, and end where the first one is far away."""

    vmas_random_state = [torch.get_rng_state(), None, None]  # noqa: RUF012 - as VMAS has it

    def __init__(self, names, discrete=None, max_steps=LIMIT, terminated_truncated=False, sizes=None, device="cpu"):
        self.agents = [
            SimpleNamespace(name=name, size=size) for name, size in zip(names, sizes or [2] * 9, strict=False)
        ]
        self.discrete, self.max_steps, self.terminated_truncated = discrete, max_steps, terminated_truncated
        self.num_envs, self.device, self.dict_spaces = NUM, torch.device(device), True
        self.at = torch.zeros(NUM, len(self.agents), 2, device=device)
        self.reset()

    def get_agent_action_space(self, agent):
        if self.discrete is None:
            bound = np.full(agent.size, 1, np.float32)
            return SimpleNamespace(low=-bound, high=bound, shape=bound.shape)
        if isinstance(self.discrete, int):
            return SimpleNamespace(n=self.discrete)
        return SimpleNamespace(nvec=np.array(self.discrete))

    @drawing_apart
    def seed(self, seed):
        torch.manual_seed(seed)

    @drawing_apart
    def reset(self, seed=None, return_observations=True):
        self.at = torch.rand_like(self.at)
        self.steps = torch.zeros(NUM, device=self.device)
        return self._found(True, False, False, False)[0]

    @drawing_apart
    def reset_at(self, index, return_observations=True):
        self.at, self.steps = self.at.clone(), self.steps.clone()
        self.at[index] = torch.rand(self.at.shape[1:])
        self.steps[index] = 0

    @drawing_apart
    def step(self, actions):
        assert all(action.shape[0] == NUM and action.ndim == 2 for action in actions)
        moved = torch.stack([action.float().mean(-1, keepdim=True).expand(NUM, 2) for action in actions], 1)
        self.at, self.steps = 0.7 * self.at + 0.1 * moved + 0.3 * torch.rand_like(self.at), self.steps + 1
        return self._found(True, True, True, True)

    def get_from_scenario(self, get_observations, get_rewards, get_infos, get_dones):
        return self._found(get_observations, get_rewards, get_infos, get_dones)

    def _found(self, seen, rewards, infos, dones):
        def of_each(values):
            return dict(zip([agent.name for agent in self.agents], values, strict=True)) if self.dict_spaces else values

        found, at = [], self.at.unbind(1)
        if seen:
            found.append(of_each([one.clone() for one in at]))
        if rewards:
            found.append(of_each([one.sum(-1) for one in at]))
        if dones:
            terminated, truncated = self.at[:, 0, 0] > 0.7, self.steps >= self.max_steps
            found += [terminated, truncated] if self.terminated_truncated else [terminated + truncated]
        if infos:
            found.append(of_each([{"speed": one[:, 0].double(), "both": one} for one in at]))
        return found


FakeEnvironment.__name__ = FakeEnvironment.__qualname__ = "Environment"
FakeEnvironment.__module__ = "vmas.simulator"


def real(names=None, discrete=None, **kwargs):
    vmas = pytest.importorskip("vmas")
    return vmas.make_env("balance", NUM, max_steps=LIMIT, continuous_actions=discrete is None, **kwargs)


def fake(names=("agent_0", "agent_1", "agent_2"), **kwargs):
    return FakeEnvironment(names, **kwargs)


MAKERS = {"fake": fake, **({"real": real} if importlib.util.find_spec("vmas") else {})}
kinds = pytest.mark.parametrize("kind", MAKERS)


def network(width):
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(width, 2), nn.Tanh())


def made(kind, *, workers=None, env=None, together=False, **options):
    env = VmasWrapper(MAKERS[kind](), reset_together=together) if env is None else env
    width = env.observation_spec["agents", "observation"].shape[-1]
    policy = TensorDictModule(network(width), [("agents", "observation")], [("agents", "action")])
    more = {} if workers is None else {"num_collectors": workers, "sync": True}
    options = {"frames_per_batch": NUM * STEPS, "total_frames": 4 * NUM * STEPS, **more, **options}
    collector = Collector((lambda: VmasWrapper(MAKERS[kind]())) if workers else env, policy, **options)
    collector.set_seed(0)
    return collector


def by_hand(kind, batches):
    """Frames of a loop over VMAS alone, ``[num_envs, T]`` by key."""
    env = MAKERS[kind](terminated_truncated=True)
    env.dict_spaces = False
    env.seed(0)
    seen = torch.stack(env.reset(), 1)
    net, rows = network(seen.shape[-1]), []
    for _ in range(batches * STEPS):
        with torch.no_grad():
            action = net(seen)
        after, rewards, terminated, truncated, infos = env.step(list(action.unbind(1)))
        after, done = torch.stack(after, 1), terminated | truncated
        info = {key: torch.stack([one[key].float() for one in infos], 1) for key in infos[0]}
        rows.append(
            {
                ("agents", "observation"): seen,
                ("agents", "action"): action,
                ("next", "agents", "observation"): after,
                ("next", "agents", "reward"): torch.stack(rewards, 1).unsqueeze(-1),
                ("next", "terminated"): terminated.unsqueeze(-1),
                ("next", "truncated"): truncated.unsqueeze(-1),
                ("next", "done"): done.unsqueeze(-1),
                **{("next", "agents", "info", key): value.reshape(*after.shape[:2], -1) for key, value in info.items()},
            }
        )
        seen = after
        if done.all():
            seen = torch.stack(env.reset(), 1)
        elif done.any():
            for i in done.nonzero().flatten().tolist():
                env.reset_at(i, return_observations=False)
            seen = torch.stack(
                env.get_from_scenario(get_observations=True, get_rewards=False, get_infos=False, get_dones=False)[0], 1
            )
    return {key: torch.stack([row[key] for row in rows], 1) for key in rows[0]}


def assert_as_by_hand(kind, batches, first=0):
    expected = by_hand(kind, first + len(batches))
    data = torch.cat([batch.reshape(NUM, STEPS) for batch in batches], 1)
    for key, value in expected.items():
        assert torch.equal(data[key], value[:, first * STEPS :]), key
    assert data["next", "truncated"].any()
    assert data["next", "done"].sum() > 2 * NUM


def assert_equal(batch, other):
    assert set(batch.keys(True, True)) == set(other.keys(True, True))
    for key in other.keys(True, True):
        assert torch.equal(batch[key], other[key]), key


@kinds
@pytest.mark.parametrize("options", [{}, {"use_buffers": False}], ids=str)
def test_frames_are_those_of_a_loop_by_hand(kind, options):
    with made(kind, **options) as collector:
        batches = [batch.clone() for batch in collector]
        native = options.get("use_buffers", True)
        assert collector.stats()["paths"]["env"].startswith("native: tensors" if native else "plain")
    assert_as_by_hand(kind, batches)
    ids = torch.cat([batch["collector", "traj_ids"] for batch in batches], 1)
    done = torch.cat([batch["next", "done"].squeeze(-1) for batch in batches], 1)
    assert torch.equal(ids[:, 1:] != ids[:, :-1], done[:, :-1])


@kinds
def test_all_are_reset_together_and_those_that_go_on_are_put_back(kind):
    with made(kind, together=True) as collector:
        data = torch.cat([batch.clone() for batch in collector], 1)
    done, seen = data["next", "done"].squeeze(-1), data["agents", "observation"]
    after = data["next", "agents", "observation"]
    assert torch.equal(seen[:, 1:][~done[:, :-1]], after[:, :-1][~done[:, :-1]])
    assert not (seen[:, 1:][done[:, :-1]] == after[:, :-1][done[:, :-1]]).flatten(1).all(1).any()
    ends = [row.nonzero().flatten() for row in done]
    assert all(int(end.diff().max()) <= LIMIT for end in ends)
    assert data["next", "truncated"].any()


def test_a_scenario_that_draws_for_all_is_not_reset_together():
    env = fake()
    reset = env.reset

    def shifted(**kwargs):
        env.agents[0].goal = getattr(env.agents[0], "goal", 0) + 1
        return reset(**kwargs)

    found, env.reset, env.scenario = env._found, shifted, env
    env._found = lambda seen, rewards, infos, dones: [
        [one + getattr(env.agents[0], "goal", 0) for one in found(True, False, False, False)[0]],
        *found(False, rewards, infos, dones),
    ]
    with pytest.raises(ValueError, match="reset_together: expected a scenario whose state are tensors"):
        VmasWrapper(env, reset_together=True)


def test_what_is_terminated_and_what_is_truncated():
    with made("fake") as collector:
        data = torch.cat([batch.clone() for batch in collector], 1)["next"]
    assert data["terminated"].any()
    assert torch.equal(data["terminated"].squeeze(-1), data["agents", "observation"][..., 0, 0] > 0.7)
    assert (data["truncated"] & ~data["terminated"]).any()


@kinds
def test_a_collector_goes_on_from_its_state(kind):
    with made(kind) as collector:
        batches = [collector.next().clone() for _ in range(2)]
        state = collector.state_dict()
    with made(kind) as collector:
        collector.load_state_dict(state)
        batches += [collector.next().clone() for _ in range(2)]
    assert_as_by_hand(kind, batches)


@kinds
def test_a_worker_delivers_what_one_process_does(kind):
    with made(kind, workers=1) as collector:
        assert_as_by_hand(kind, [batch.clone() for batch in collector])


@kinds
def test_a_collector_takes_what_make_env_returns(kind):
    with Collector(MAKERS[kind](), None, frames_per_batch=NUM * STEPS, total_frames=NUM * STEPS) as collector:
        (batch,) = collector
        assert collector.stats()["paths"]["env"] == "native: tensors"
    assert batch["agents", "action"].shape == (NUM, STEPS, 3, 2)
    assert batch["next", "agents", "info"].batch_size == (NUM, STEPS, 3)


def test_one_thing_is_read_in_a_step(monkeypatch):
    with made("fake") as collector, torch.no_grad():
        rollout = collector._rollout
        rollout._begin()
        path, reads = rollout.path, []

        def step(t):
            for part in (path.act, path.step, path.record, path.follow):
                part(t)

        def noting(name, read):
            return lambda self, *args: reads.append(name) or read(self, *args)

        step(0)  # which lays out the batch
        for name in ("item", "numpy", "tolist", "__bool__", "__int__", "__float__", "__array__"):
            monkeypatch.setattr(torch.Tensor, name, noting(name, getattr(torch.Tensor, name)))
        for t in range(1, STEPS):
            step(t)
        monkeypatch.undo()
        assert reads == ["numpy"] * (STEPS - 1)
        assert path.finish(STEPS)["next", "done"].sum() > NUM


def test_transforms_follow_the_tensors():
    env = TransformedEnv(VmasWrapper(fake()), RewardSum(in_keys=[("agents", "reward")]))
    with made("fake", env=env) as collector:
        batches = [batch.clone() for batch in collector]
        assert collector.stats()["paths"]["env"] == "native: tensors"
    assert_as_by_hand("fake", batches)


@kinds
def test_environments_draw_from_generators_of_their_own(kind):
    def run(envs):
        tds = []
        for env in envs:
            env.set_seed(1)
            tds.append([env.reset()])
        for _ in range(3):
            for env, found in zip(envs, tds, strict=True):
                td = found[-1].clone().set(("agents", "action"), torch.zeros(env.action_spec["agents", "action"].shape))
                found.append(env.step_mdp(env.step(td)))
        return tds

    ((alone,), before) = run([VmasWrapper(MAKERS[kind]())]), torch.get_rng_state()
    envs = [VmasWrapper(MAKERS[kind]()) for _ in range(2)]
    for found in run(envs):
        for ours, theirs in zip(found, alone, strict=True):
            assert_equal(ours, theirs)
    assert torch.equal(before, torch.get_rng_state())
    assert envs[0].vmas_env.terminated_truncated is False


GROUPS = {
    ("agent_0", "agent_1"): {"agents": ["agent_0", "agent_1"]},
    ("red_0", "blue_0", "red_1"): {"red": ["red_0", "red_1"], "blue": ["blue_0"]},
    ("leader", "agent_1"): {"agents": ["leader", "agent_1"]},
}


@pytest.mark.parametrize("names", GROUPS)
def test_groups_follow_the_names(names):
    env = VmasWrapper(fake(names))
    assert env.group_map == GROUPS[names]
    env.check_env_specs()
    td = env.rollout(3, break_when_any_done=False)
    for group, agents in env.group_map.items():
        assert td["next", group, "reward"].shape == (NUM, 3, len(agents), 1)


def test_agents_that_differ_are_groups_of_their_own():
    env = VmasWrapper(fake(("agent_0", "agent_1"), sizes=[2, 3]))
    assert env.group_map == {"agent_0": ["agent_0"], "agent_1": ["agent_1"]}
    assert env.rollout(2, break_when_any_done=False)["agent_1", "action"].shape == (NUM, 2, 1, 3)
    with pytest.raises(EnvError, match=r"group_map: expected agents of the same spaces in group 'all'"):
        VmasWrapper(fake(("agent_0", "agent_1"), sizes=[2, 3]), group_map={"all": ["agent_0", "agent_1"]})
    with pytest.raises(ValueError, match="group_map: expected each of the agents"):
        VmasWrapper(fake(), group_map={"all": ["agent_0"]})
    one_each = VmasWrapper(fake(), group_map=MarlGroupMapType.ONE_GROUP_PER_AGENT)
    assert list(one_each.group_map) == ["agent_0", "agent_1", "agent_2"]


@kinds
@pytest.mark.parametrize("discrete", [9, [3, 3]], ids=str)
def test_choices_are_numbers_or_one_hot(kind, discrete):
    more = {"multidiscrete_actions": True} if kind == "real" and discrete != 9 else {}
    found = []
    for numbers in (True, False):
        env = VmasWrapper(MAKERS[kind](discrete=discrete, **more), categorical_actions=numbers)
        spec = env.action_spec["agents", "action"]
        if not numbers:
            assert isinstance(spec, OneHot if discrete == 9 else MultiOneHot)
        torch.manual_seed(0)
        choices = torch.randint(0, 3, (NUM, 3) if discrete == 9 else (NUM, 3, 2))
        env.set_seed(0)
        env.check_env_specs()
        env.set_seed(0)
        td = env.reset()
        td["agents", "action"] = choices if numbers else spec.to_categorical_spec().to_one_hot(choices).to(spec.dtype)
        found.append(env.step(td)["next"])
    assert_equal(*found)


def test_what_cannot_be_taken():
    with pytest.raises(TypeError, match=r"env: expected an environment of VMAS, got builtins\.dict.*make_env"):
        VmasWrapper({})
    env = VmasWrapper(fake())
    td = env.reset().set("_reset", torch.arange(NUM).unsqueeze(-1) == 1)
    with pytest.raises(EnvError, match=r"reset_at.* unexpected keyword"):
        env.reset(td, seed=1)


def test_environments_by_name(monkeypatch):
    if "real" not in MAKERS:
        with pytest.raises(MissingExtraError, match=r"pip install 'rollwright\[vmas\]'"):
            VmasEnv("balance", 2)
        monkeypatch.setitem(__import__("sys").modules, "vmas", SimpleNamespace(make_env=lambda *args, **kwargs: fake()))
        assert VmasEnv("any", NUM).batch_size == (NUM,)
        return
    assert "balance" in VmasEnv.available_envs
    env = VmasEnv("balance", 2, scenario_kwargs={"n_agents": 4}, seed=0, max_steps=2)
    assert env.rollout(2)["agents", "observation"].shape == (2, 2, 4, 16)
    with pytest.raises(EnvError, match=r"VmasEnv\('nothing'\): VMAS raised AssertionError: nothing.py scenario"):
        VmasEnv("nothing", 2)
    with pytest.raises(ValueError, match="num_envs: expected a number of environments of at least 1, got 0"):
        VmasEnv("balance", 0)
