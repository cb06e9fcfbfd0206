"""Environments whose batch is in their tensors: nothing is read by the host in a step, and few operations are made."""

from __future__ import annotations

from collections import Counter
from functools import partial

import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from tensordict import TensorDict
from tensordict.nn import (
    InteractionType,
    NormalParamExtractor,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictSequential,
)
from torch import nn
from torch.distributions import Normal
from torch.utils._python_dispatch import TorchDispatchMode

from rollwright.collectors import Collector
from rollwright.data import Composite, LazyTensorStorage, ReplayBuffer, Unbounded
from rollwright.envs import (
    CatFrames,
    Compose,
    EnvBase,
    GymWrapper,
    InitTracker,
    ObservationNorm,
    RenameTransform,
    RewardScaling,
    RewardSum,
    SelectTransform,
    StepCounter,
    Transform,
    TransformedEnv,
)
from rollwright.errors import EnvError

NUM, STEPS = 6, 12


class Arm(EnvBase):
    """Ends after a number of steps that differs between rows; resets draw no random numbers."""

    resets_by_mask = True

    def __init__(self, num=NUM, device=None):
        super().__init__(batch_size=[num], device=device)
        self.num, on = num, torch.device("cpu" if device is None else device)
        self.make_specs(on)
        self.add_truncated_keys()
        self.at, self.count = torch.zeros(num, 3, device=on), torch.zeros(num, 1, dtype=torch.int64, device=on)
        self.limit = 2 + torch.arange(num, device=on).unsqueeze(-1) % 5

    def make_specs(self, on):
        self.observation_spec = Composite(at=Unbounded((self.num, 3), device=on), shape=[self.num], device=on)
        self.action_spec = Unbounded((self.num, 3), device=on)
        self.reward_spec = Unbounded((self.num, 1), device=on)

    def seen(self):
        return {"at": self.at}

    def act(self, td):
        return td["action"]

    def rewarded(self, action):
        return {"reward": action.sum(-1, keepdim=True)}

    def _reset(self, tensordict=None, **kwargs):
        marks = None if tensordict is None else tensordict.get("_reset", None)
        if marks is None:
            self.at, self.count = torch.ones_like(self.at), torch.zeros_like(self.count)
        else:
            self.at, self.count = torch.where(marks, 1.0, self.at), torch.where(marks, 0, self.count)
        return TensorDict(self.seen(), [self.num], device=self.device)

    def _step(self, tensordict):
        action = self.act(tensordict)
        self.at, self.count = self.at * 0.9 + action, self.count + 1
        over = self.count >= self.limit
        flags = {"terminated": over, "truncated": torch.zeros_like(over), "done": over}
        return TensorDict({**self.seen(), **self.rewarded(action), **flags}, [self.num], device=self.device)

    def _set_seed(self, seed):
        pass


class Agents(Arm):
    """The same below the names of two agents, with a batch size of their own."""

    def make_specs(self, on):
        nest = partial(Composite, shape=(self.num, 2), device=on)
        agents = nest(at=Unbounded((self.num, 2, 3), device=on))
        self.observation_spec = Composite(agents=agents, shape=[self.num], device=on)
        acts = nest(action=Unbounded((self.num, 2, 3), device=on))
        self.action_spec = Composite(agents=acts, shape=[self.num], device=on)
        rewards = nest(reward=Unbounded((self.num, 2, 1), device=on))
        self.reward_spec = Composite(agents=rewards, shape=[self.num], device=on)

    def seen(self):
        seen = torch.stack([self.at, self.at * 2], 1)
        return {"agents": TensorDict({"at": seen}, [self.num, 2], device=self.device)}

    def act(self, td):
        self.action = td["agents", "action"]
        return self.action.sum(1)

    def rewarded(self, action):
        reward = self.action.sum(-1, keepdim=True)
        return {"agents": TensorDict({**self.seen()["agents"], "reward": reward}, [self.num, 2], device=self.device)}


class Teams(Agents):
    """The same, with flags of the agents beside those of all; the first agent is done before."""

    def make_specs(self, on):
        super().make_specs(on)
        shape = (self.num, 2, 1)
        flags = {name: Unbounded(shape, dtype=torch.bool, device=on) for name in ("done", "terminated", "truncated")}
        agents = Composite(flags, shape=(self.num, 2), device=on)
        root = {name: Unbounded((self.num, 1), dtype=torch.bool, device=on) for name in flags}
        self.done_spec = Composite({**root, "agents": agents}, shape=[self.num], device=on)

    def rewarded(self, action):
        first = self.count >= self.limit - 1
        over = torch.stack([first, self.count >= self.limit], 1)
        found = super().rewarded(action)
        return {"agents": found["agents"].update({"terminated": over, "truncated": ~over & over, "done": over})}


class Live(Arm):
    """The same in memory that is written again."""

    def _reset(self, tensordict=None, **kwargs):
        held = self.at
        super()._reset(tensordict, **kwargs)
        self.at = held.copy_(self.at)
        return TensorDict(self.seen(), [self.num], device=self.device)

    def _step(self, tensordict):
        held = self.at
        out = super()._step(tensordict)
        self.at = held.copy_(self.at)
        return out.set("at", self.at)


class Cubes(VectorEnv):
    """A vector environment of gymnasium whose data are tensors."""

    resets_by_mask = True

    def __init__(self, mode, tells_last=True, device=None):
        self.num_envs, self.mode, self.tells_last = NUM, mode, tells_last
        self.metadata = {"autoreset_mode": mode}
        self.single_observation_space = spaces.Dict({"at": spaces.Box(-np.inf, np.inf, (3,), np.float32)})
        self.single_action_space = spaces.Box(-1, 1, (3,), np.float32)
        self.observation_space = batch_space(self.single_observation_space, NUM)
        self.action_space = batch_space(self.single_action_space, NUM)
        self.arm = Arm(device=device)

    def reset(self, *, seed=None, options=None):
        marks = (options or {}).get("reset_mask")
        given = None if marks is None else TensorDict({"_reset": torch.as_tensor(marks).unsqueeze(-1)}, [NUM])
        return {"at": self.arm._reset(given)["at"]}, {}

    def step(self, actions):
        out = self.arm._step(TensorDict({"action": torch.as_tensor(actions)}, [NUM]))
        seen, info = {"at": out["at"]}, {}
        if self.mode is AutoresetMode.SAME_STEP:
            info = {"final_obs": seen} if self.tells_last else {}
            seen, _ = self.reset(options={"reset_mask": out["terminated"].squeeze(-1)})
        return seen, out["reward"].squeeze(-1), out["terminated"].squeeze(-1), out["truncated"].squeeze(-1), info


class Shown(Transform):
    """A user's transform, which says what is done in a step on a TensorDict."""

    def transform_observation_spec(self, observation_spec):
        return observation_spec.clone().set("shown", Unbounded((NUM, 1), device=observation_spec.device))

    def _call(self, next_tensordict):
        return next_tensordict.set("shown", next_tensordict["agents", "at"].sum((-1, -2)).unsqueeze(-1))

    def _reset(self, tensordict, tensordict_reset):
        return self._call(tensordict_reset)


def chain(env, *more):
    """Transforms of this library that change, keep, add, move and drop entries."""
    reward, at, norm = ("agents", "reward"), ("agents", "at"), ("agents", "norm")
    first = [StepCounter(4), InitTracker(), RewardScaling(0.5, 2.0, [reward]), RewardSum([reward])]
    keep = [ObservationNorm(0.1, 2.0, [at], [norm]), CatFrames(3, -1, [norm], [("agents", "last")])]
    move = [RenameTransform(["is_init"], ["first"]), SelectTransform(at, ("agents", "last"), "first")]
    return TransformedEnv(env, Compose(*first, *keep, *move, *more))


def live(device=None):
    sums, norm = RewardSum(["reward"], reset_keys=["_reset"]), ObservationNorm(0.0, 2.0, ["at"], ["twice"])
    return TransformedEnv(Live(device=device), Compose(sums, norm))


ENVS = {
    "own": Arm,
    "chain": lambda device=None: chain(Agents(device=device)),
    "chain of teams": lambda device=None: chain(Teams(device=device)),
    "live and transforms": live,
    "agents": Agents,
    "teams": Teams,
    "live": Live,
    "transforms": lambda device=None: TransformedEnv(Agents(device=device), RewardSum(in_keys=[("agents", "reward")])),
    "resets itself": lambda device=None: GymWrapper(Cubes(AutoresetMode.SAME_STEP, device=device), device=device),
    "is reset": lambda device=None: GymWrapper(Cubes(AutoresetMode.DISABLED, device=device), device=device),
}


def policy(env, device="cpu"):
    (key,) = [key for key in env.observation_keys if "at" in (key if isinstance(key, tuple) else (key,))]
    torch.manual_seed(2)
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh()).to(device)
    return TensorDictModule(net, [key], list(env.action_keys))


class Reads(TorchDispatchMode):
    """Notes operations, and those by which the host reads."""

    READ = ("_local_scalar_dense", "nonzero", "masked_select", "equal")

    def __init__(self):
        super().__init__()
        self.count, self.reads = Counter(), []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        self.count[name] += 1
        if name in self.READ or (
            name == "index" and any(one is not None and one.dtype is torch.bool for one in args[1])
        ):
            self.reads.append(name)
        return func(*args, **(kwargs or {}))


def steps_of(collector, count):
    """The path of a collector in the middle of a batch, after ``count`` steps of it."""
    rollout = collector._rollout
    rollout._begin()
    for t in range(count):
        for part in (rollout.path.act, rollout.path.step, rollout.path.record, rollout.path.follow):
            part(t)
    return rollout.path


def made(name, device=None, **options):
    env = ENVS[name](device=device)
    options = {"frames_per_batch": NUM * STEPS, "total_frames": -1, **options}
    return Collector(env, policy(env, device), **options)


@pytest.mark.parametrize("name", ENVS)
def test_the_host_reads_nothing_in_a_step(name, monkeypatch):
    with made(name) as collector, torch.no_grad():
        collector.next()
        assert collector.stats()["paths"]["env"] == "native: tensors"
        path = steps_of(collector, 2)

        def refuse(*args, **kwargs):
            raise AssertionError("the host reads a tensor")

        for read in ("item", "numpy", "tolist", "__bool__", "__int__", "__float__", "cpu", "__array__"):
            monkeypatch.setattr(torch.Tensor, read, refuse)
        with Reads() as reads:
            for t in range(2, STEPS):
                for part in (path.act, path.step, path.record, path.follow):
                    part(t)
        monkeypatch.undo()
        assert not reads.reads
        assert bool(path.finish(STEPS)["next", "done"].sum() > NUM)


VIEWS = {
    "view",
    "_unsafe_view",
    "reshape",
    "unsqueeze",
    "squeeze",
    "expand",
    "select",
    "detach",
    "alias",
    "t",
    "unbind",
}
VIEWS |= {"slice", "transpose", "permute", "as_strided", "_reshape_alias", "lift_fresh"}


@pytest.mark.parametrize("name", ["own", "agents", "live"])
def test_a_step_makes_few_operations_of_its_own(name):
    """At most one for each column written, one for each that a reset changes, and ten."""
    with made(name) as collector, torch.no_grad():
        collector.next()
        path = steps_of(collector, 3)
        env, acts = collector.env, collector.policy

        def count(call):
            with Reads() as reads:
                call()
            return sum(number for op, number in reads.count.items() if op not in VIEWS)

        td = path.current
        marks = TensorDict({"_reset": torch.ones(NUM, 1, dtype=torch.bool)}, [NUM])
        theirs = count(lambda: acts(td)) + count(lambda: env._step(td)) + count(lambda: env._reset(marks))

        def step():
            for part in (path.act, path.step, path.record, path.follow):
                part(3)

        ours = count(step) - theirs
        batch = path.finish(STEPS)
        written = len([key for key in batch.keys(True, True) if key not in (("collector", "traj_ids"),)])
    assert ours <= written + len(list(env.observation_keys)) + 10
    assert ours <= 20


def test_trajectory_ids_taken_at_the_end_are_those_of_each_step():
    class Reading(Arm):
        resets_by_mask = False

    found = []
    for kind in (Arm, Reading):
        env = kind()
        with Collector(env, policy(env), frames_per_batch=NUM * STEPS, total_frames=4 * NUM * STEPS) as collector:
            found.append([batch.clone() for batch in collector])
    for ours, theirs in zip(*found, strict=True):
        for key in theirs.keys(True, True):
            assert torch.equal(ours[key], theirs[key]), key
    ids = torch.cat([batch["collector", "traj_ids"] for batch in found[0]], 1)
    assert len(ids.unique()) == int(ids.max()) + 1 > 4 * NUM


@pytest.mark.parametrize(
    "options", [{}, {"reset_when_done": False}, {"reset_at_each_iter": True}, {"track_policy_version": True}], ids=str
)
@pytest.mark.parametrize("name", [name for name in ENVS if name not in ("resets itself", "is reset")])
def test_frames_are_those_of_steps_on_tensordicts(name, options):
    found = []
    for buffers in (None, False):
        with made(name, total_frames=3 * NUM * STEPS, use_buffers=buffers, **options) as collector:
            found.append([batch.clone() for batch in collector])
            assert collector.stats()["paths"]["env"].startswith("plain" if buffers is False else "native: tensors")
    for ours, theirs in zip(*found, strict=True):
        assert set(ours.keys(True, True)) == set(theirs.keys(True, True))
        for key in theirs.keys(True, True):
            assert torch.equal(ours[key], theirs[key]), key


@pytest.mark.parametrize("name", ["own", "is reset"])
def test_frames_are_stored_with_each_step(name):
    found = []
    for extend in (True, False):
        buffer = ReplayBuffer(storage=LazyTensorStorage(2 * NUM * STEPS), batch_size=4)
        options = {"replay_buffer": buffer, "extend_buffer": extend, "track_policy_version": True}
        with made(name, total_frames=2 * NUM * STEPS, **options) as collector:
            for _ in collector:
                pass
        data = buffer[:]
        ids, at = data["collector", "traj_ids"], data["next", "at"][:, 0]
        found.append(data[sorted(range(len(data)), key=lambda i, ids=ids, at=at: (int(ids[i]), float(at[i])))])
    assert len(found[0]) == len(found[1]) == 2 * NUM * STEPS
    for key in found[0].keys(True, True):
        assert torch.equal(found[0][key], found[1][key]), key


def test_a_compiled_policy_keeps_the_version_that_its_batch_began_with():
    env = Arm()
    options = {"compile_policy": True, "track_policy_version": True, "frames_per_batch": NUM * STEPS}
    with Collector(env, policy(env), total_frames=-1, **options) as collector:
        collector.next()
        step, count = env._step, []

        def publish(td):
            count.append(1)
            if len(count) == 4:
                collector.update_policy_weights_()
            return step(td)

        env._step = publish
        assert collector.stats()["paths"]["policy"].startswith("native: NumPy program")
        assert len(collector.next()["policy_version"].unique()) == 1
        assert int(collector.next()["policy_version"].unique()) == 1


@pytest.mark.parametrize("name", ["resets itself", "is reset"])
def test_vector_environments_give_the_frames_of_an_own_one(name):
    found = []
    for each in (name, "own"):
        with made(each, total_frames=3 * NUM * STEPS) as collector:
            found.append([batch.clone() for batch in collector])
    for ours, theirs in zip(*found, strict=True):
        for key in theirs.keys(True, True):
            assert torch.equal(ours[key], theirs[key]), key


@pytest.mark.parametrize("name", ["own", "chain", "resets itself"])
def test_workers_deliver_what_one_process_does(name):
    found = []
    for workers in (None, 1):
        more = {} if workers is None else {"num_collectors": workers, "sync": True}
        env = ENVS[name]
        acts = policy(env())
        options = {"frames_per_batch": NUM * STEPS, "total_frames": 3 * NUM * STEPS, **more}
        with Collector(env if workers else env(), acts, **options) as collector:
            found.append([batch.reshape(-1).clone() for batch in collector])
    for ours, theirs in zip(*found, strict=True):
        for key in ours.keys(True, True):
            assert torch.equal(ours[key], theirs[key]), key


def test_a_users_transform_among_others_is_given_tensordicts():
    found = []
    for buffers in (None, False):
        env = chain(Agents(), Shown())
        with Collector(
            env, policy(env), frames_per_batch=NUM * STEPS, total_frames=2 * NUM * STEPS, use_buffers=buffers
        ) as collector:
            found.append([batch.clone() for batch in collector])
            assert collector.stats()["paths"]["env"].startswith("plain" if buffers is False else "native: tensors")
    for ours, theirs in zip(*found, strict=True):
        assert set(ours.keys(True, True)) == set(theirs.keys(True, True))
        for key in theirs.keys(True, True):
            assert torch.equal(ours[key], theirs[key]), key
    assert bool((found[0][0]["shown"] != 0).any())


def test_transforms_of_this_library_are_given_no_tensordicts(monkeypatch):
    for method in ("transform_step", "transform_reset"):
        monkeypatch.setattr(Transform, method, None)
    with made("chain") as collector, torch.no_grad():
        path = steps_of(collector, STEPS)
        assert bool(path.finish(STEPS)["next", "done"].sum() > NUM)


@pytest.mark.parametrize("name", ["agents", "transforms"])
def test_steps_are_taken_on_a_device_that_holds_no_numbers(name):
    """On "meta" nothing can be read, and no entry of another device can be mixed in."""
    env = ENVS[name](device="meta")
    with (
        Collector(env, policy(env, "meta"), frames_per_batch=NUM * STEPS, total_frames=-1) as collector,
        torch.no_grad(),
    ):
        assert collector.stats()["paths"]["env"] == "native: tensors"
        path = steps_of(collector, STEPS)
        assert path.current["agents", "at"].device.type == "meta"


@pytest.mark.cuda
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("name", ENVS)
def test_the_host_waits_for_nothing_of_a_gpu_in_a_step(name):
    with made(name, "cuda") as collector, torch.no_grad():
        collector.next()
        assert collector.stats()["paths"]["env"] == "native: tensors"
        path = steps_of(collector, 2)
        try:
            torch.cuda.set_sync_debug_mode("error")
            for t in range(2, STEPS):
                for part in (path.act, path.step, path.record, path.follow):
                    part(t)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        batch = path.finish(STEPS)
        assert batch["next", "done"].is_cuda
        assert bool(batch["next", "done"].sum() > NUM)


@pytest.mark.cuda
@pytest.mark.parametrize("options", [{}, {"storing_device": "cpu"}, {"cudagraph_policy": True}], ids=str)
@pytest.mark.parametrize("name", ENVS)
def test_a_gpu_gives_the_frames_of_the_cpu(name, options):
    found = []
    for device in (None, "cuda"):
        more = options if device else {}
        with made(name, device, total_frames=3 * NUM * STEPS, **more) as collector:
            found.append([batch.cpu().clone() for batch in collector])
    for ours, theirs in zip(*found, strict=True):
        assert set(ours.keys(True, True)) == set(theirs.keys(True, True))
        for key in ours.keys(True, True):
            torch.testing.assert_close(ours[key], theirs[key], rtol=1e-3, atol=1e-4)


@pytest.mark.cuda
@pytest.mark.parametrize("mode", [InteractionType.RANDOM, InteractionType.MEAN, InteractionType.MODE], ids=str)
def test_a_policy_taken_apart_on_a_gpu_gives_the_bits_of_its_modules(mode):
    net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 6), NormalParamExtractor()).cuda()
    acts = ProbabilisticTensorDictSequential(
        TensorDictModule(net, ["at"], ["loc", "scale"]),
        ProbabilisticTensorDictModule(["loc", "scale"], ["action"], distribution_class=Normal, return_log_prob=True),
    )
    found = []
    for policy in (acts, lambda td: acts(td)):
        torch.manual_seed(0)
        options = {"frames_per_batch": NUM * STEPS, "total_frames": 3 * NUM * STEPS, "exploration_type": mode}
        with Collector(Arm(device="cuda"), policy, **options) as collector:
            found.append([batch.clone() for batch in collector])
            assert collector.stats()["paths"]["policy"].startswith("native" if policy is acts else "plain")
    for ours, theirs in zip(*found, strict=True):
        for key in theirs.keys(True, True):
            assert torch.equal(ours[key], theirs[key]), key


class Dead(Arm):
    """Is done right after each reset of some rows."""

    def _reset(self, tensordict=None, **kwargs):
        out = super()._reset(tensordict, **kwargs)
        return out if tensordict is None else out.set("done", tensordict["_reset"])


def test_what_is_done_right_after_a_reset_is_an_error_at_the_end_of_the_batch():
    env = Dead()
    collector = Collector(env, policy(env), frames_per_batch=NUM * STEPS, total_frames=-1)
    with collector, pytest.raises(EnvError, match="True right after reset"):
        collector.next()


def test_last_observations_that_are_missing_are_an_error_at_the_end_of_the_batch():
    env = GymWrapper(Cubes(AutoresetMode.SAME_STEP, tells_last=False))
    collector = Collector(env, policy(env), frames_per_batch=NUM * STEPS, total_frames=-1)
    with collector, pytest.raises(EnvError, match="final_obs"):
        collector.next()


def test_a_policy_may_write_into_what_it_is_given():
    def act(td):
        return td.set("action", td["at"].mul_(0.5).tanh())

    found = []
    for buffers in (None, False):
        options = {"frames_per_batch": NUM * STEPS, "total_frames": 2 * NUM * STEPS, "use_buffers": buffers}
        with Collector(Arm(), act, **options) as collector:
            found.append([batch.clone() for batch in collector])
    for ours, theirs in zip(*found, strict=True):
        for key in theirs.keys(True, True):
            assert torch.equal(ours[key], theirs[key]), key


def assert_equal_to_plain(make, acts, **options):
    found = []
    for buffers in (None, False):
        more = {"frames_per_batch": NUM * STEPS, "total_frames": 3 * NUM * STEPS, "use_buffers": buffers, **options}
        with Collector(make(), acts, **more) as collector:
            found.append([batch.clone() for batch in collector])
            assert collector.stats()["paths"]["env"].startswith("plain" if buffers is False else "native: tensors")
    for ours, theirs in zip(*found, strict=True):
        assert set(ours.keys(True, True)) == set(theirs.keys(True, True))
        for key in theirs.keys(True, True):
            assert ours[key].dtype == theirs[key].dtype
            assert torch.equal(ours[key], theirs[key]), key


def test_random_actions_have_the_form_that_the_policy_writes():
    class Seeded(Arm):
        def act(self, td):
            return td["action"].float()

        def _reset(self, tensordict=None, **kwargs):
            if tensordict is None:
                torch.manual_seed(3)
            return super()._reset(tensordict, **kwargs)

    acts = TensorDictModule(nn.Linear(3, 3).double(), ["far"], ["action"])
    whole = TensorDictSequential(TensorDictModule(lambda at: at.double(), ["at"], ["far"]), acts)
    assert_equal_to_plain(Seeded, whole, init_random_frames=NUM * STEPS, reset_at_each_iter=True)


@pytest.mark.parametrize("by_mask", [False, True])
def test_a_reset_that_returns_more_is_taken_in_on_tensordicts(by_mask):
    class Tells(Arm):
        resets_by_mask = by_mask

        def _reset(self, tensordict=None, **kwargs):
            out = super()._reset(tensordict, **kwargs)
            ends = tensordict is not None and bool(tensordict["_reset"].any())
            return out.set("told", torch.ones(self.num, 1)) if ends else out

    found = []
    for buffers in (None, False):
        env = Tells()
        options = {"frames_per_batch": NUM * STEPS, "total_frames": 2 * NUM * STEPS, "use_buffers": buffers}
        with Collector(env, policy(env), **options) as collector:
            found.append([batch.clone() for batch in collector])
    for ours, theirs in zip(*found, strict=True):
        for key in ("at", ("next", "at"), ("next", "done"), ("collector", "traj_ids")):
            assert torch.equal(ours[key], theirs[key]), key


def test_a_policy_of_an_environment_whose_ends_are_read_is_given_trajectory_ids():
    class Reading(Arm):
        resets_by_mask = False

    def acts(td):
        return td.set("action", td["at"].tanh()).set("ids", td["collector", "traj_ids"].clone())

    assert_equal_to_plain(Reading, acts)


def test_a_run_goes_on_after_it_was_saved():
    env = Arm()
    with Collector(env, policy(env), frames_per_batch=NUM * STEPS, total_frames=4 * NUM * STEPS) as collector:
        whole = [batch.clone() for batch in collector]
    env = Arm()
    with Collector(env, policy(env), frames_per_batch=NUM * STEPS, total_frames=4 * NUM * STEPS) as collector:
        first = iter(collector)
        begun = [next(first).clone() for _ in range(2)]
        state, at, count = collector.state_dict(), env.at.clone(), env.count.clone()
    env = Arm()
    env.at, env.count = at, count
    with Collector(env, policy(env), frames_per_batch=NUM * STEPS, total_frames=4 * NUM * STEPS) as collector:
        collector.load_state_dict(state)
        rest = [batch.clone() for batch in collector]
    for ours, theirs in zip([*begun, *rest], whole, strict=True):
        assert torch.equal(ours["next", "reward"], theirs["next", "reward"])
        assert torch.equal(ours["collector", "traj_ids"], theirs["collector", "traj_ids"])
