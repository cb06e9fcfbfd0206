"""Translations of TorchRL's environments; where torchrl is installed (docs/coming_from_torchrl.md)."""

import copy
import re
import warnings

import gymnasium
import numpy as np
import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn

from rollwright.collectors import Collector
from rollwright.envs import Compose, GymWrapper, ParallelEnv, RewardSum, SerialEnv, StepCounter, TransformedEnv
from rollwright.envs.libs.torchrl import TorchRLWrapper
from rollwright.errors import EnvError

envs = pytest.importorskip("torchrl.envs")
data = pytest.importorskip("torchrl.data")
collectors = pytest.importorskip("torchrl.collectors")
Unbounded = data.Unbounded
PENDULUM, CART_POLE = "Pendulum-v1", "CartPole-v1"


class Doubles(gymnasium.Env):
    """Observations of float64; ends after seven steps."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (5,), np.float64)
    action_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        return self.np_random.normal(size=5), {}

    def step(self, action):
        self.count += 1
        value = self.np_random.normal(size=5) * 3 + float(action.sum())
        return value, float(value[0]), self.count == 7, False, {}


class Shift(envs.Transform):
    """A transform of a user's own."""

    def _call(self, next_tensordict):
        return next_tensordict.set("observation", next_tensordict["observation"] + 1)

    def _reset(self, tensordict, tensordict_reset):
        return self._call(tensordict_reset)


class Counted(envs.RewardSum):
    """A subclass of a known transform."""


class Adds(envs.Transform):
    """Adds the action to the observation, in place, and writes an entry that no spec announces after some steps."""

    def __init__(self, first=10**9):
        super().__init__()
        self.first, self.count = first, 0

    def _step(self, tensordict, next_tensordict):
        self.count += 1
        next_tensordict["observation"] += tensordict["action"].sum()
        if self.count > self.first:
            next_tensordict.set("extra", next_tensordict["reward"] + 1)
        return next_tensordict

    def _reset(self, tensordict, tensordict_reset):
        return tensordict_reset.set("observation", tensordict_reset["observation"] * (1 + len(tensordict.keys())))


class Drift(envs.EnvBase):
    """An environment of a user's own: moves by chance, and ends by chance; its state lies in it or in the data."""

    def __init__(self, batch=(), truncates=True, first=10**9, in_data=False, **options):
        super().__init__(batch_size=batch, **options)
        seen = {"observation": Unbounded((*batch, 2)), "n": Unbounded((*batch, 1), dtype=torch.int64)}
        self.observation_spec = data.Composite(**seen, shape=batch)
        if in_data:
            self.state_spec = self.observation_spec.clone()
        self.action_spec = data.Bounded(-1.0, 1.0, (*batch, 2))
        self.reward_spec = Unbounded((*batch, 1))
        self.done_spec = data.Categorical(2, shape=(*batch, 1), dtype=torch.bool)
        if truncates:
            self.add_truncated_keys()
        self.first, self.calls, self.in_data = first, 0, in_data

    def _reset(self, tensordict=None, **kwargs):
        mask = None if tensordict is None else tensordict.get("_reset", None)
        fresh, zeros = torch.rand(*self.batch_size, 2), torch.zeros(*self.batch_size, 1, dtype=torch.int64)
        if mask is not None and self.batch_size:
            mask = mask.reshape(*self.batch_size, 1)
            fresh, zeros = torch.where(mask, fresh, self.x), torch.where(mask, zeros, self.n)
        self.x, self.n = fresh, zeros
        return TensorDict({"observation": self.x.clone(), "n": self.n.clone()}, self.batch_size)

    def _step(self, tensordict):
        self.calls += 1
        before = tensordict["observation"] if self.in_data else self.x
        self.x, self.n = before + tensordict["action"] / 8 + torch.randn(*self.batch_size, 2) / 8, self.n + 1
        chance = torch.rand(*self.batch_size, 1)
        found = {"observation": self.x.clone(), "n": self.n.clone(), "reward": self.x.sum(-1), "done": chance < 0.2}
        if "truncated" in self.done_keys:
            found |= {"terminated": chance < 0.1, "truncated": (chance >= 0.1) & (chance < 0.2)}
        if self.calls > self.first:
            found["extra"] = chance + 1
        return TensorDict(found, self.batch_size)

    def _set_seed(self, seed):
        pass


class Shaped(Drift):
    """Returns rewards of the shape of their spec."""

    def _step(self, tensordict):
        found = super()._step(tensordict)
        return found.set("reward", found["reward"].unsqueeze(-1))


def around(env, *transforms):
    return envs.TransformedEnv(env, envs.Compose(*transforms))


def norm(**options):
    return envs.VecNorm(**{"in_keys": ["observation"], "decay": 0.99, **options})


def primer(**options):
    specs = {"hidden": Unbounded((4,)), "count": Unbounded((1,), dtype=torch.int64)}
    return envs.TensorDictPrimer(specs, default_value={"hidden": 0.5, "count": 3.0}, **options)


ENVS = {
    "bare": lambda: envs.GymEnv(CART_POLE),
    "categorical": lambda: envs.GymEnv(CART_POLE, categorical_action_encoding=True),
    "with a device": lambda: envs.GymEnv(PENDULUM, device="cpu"),
    "wrapper": lambda: envs.GymWrapper(gymnasium.make(CART_POLE)),
    "counts": lambda: around(envs.GymEnv(CART_POLE), envs.StepCounter(9), envs.RewardSum(), envs.InitTracker()),
    "doubles": lambda: around(envs.GymWrapper(Doubles()), envs.DoubleToFloat()),
    "statistics of doubles": lambda: around(envs.GymWrapper(Doubles()), norm(), envs.DoubleToFloat()),
    "statistics": lambda: around(envs.GymEnv(PENDULUM), norm(in_keys=["observation", "reward"]), envs.StepCounter(20)),
    "scaled": lambda: around(
        envs.GymWrapper(Doubles()),
        envs.DoubleToFloat(),
        envs.ObservationNorm(0.3, 2.0, in_keys=["observation"], standard_normal=True),
        envs.ObservationNorm(torch.rand(5), torch.rand(5), in_keys=["observation"]),
        envs.RewardScaling(0.1, 0.2),
        envs.RewardSum(),
    ),
    "nested": lambda: envs.TransformedEnv(
        around(envs.GymWrapper(Doubles()), envs.DoubleToFloat()), envs.StepCounter(5), auto_unwrap=False
    ),
    "ours around": lambda: TransformedEnv(around(envs.GymEnv(CART_POLE), envs.StepCounter()), RewardSum()),
    "primed": lambda: around(envs.GymEnv(PENDULUM), primer(), envs.StepCounter(9)),
    "several primed": lambda: around(
        envs.SerialEnv(2, lambda: around(envs.GymEnv(PENDULUM), envs.StepCounter(4))), primer(expand_specs=True)
    ),
    "several": lambda: envs.SerialEnv(3, lambda: around(envs.GymEnv(CART_POLE), envs.StepCounter(9))),
    "around several": lambda: around(
        envs.SerialEnv(2, lambda: around(envs.GymEnv(PENDULUM), norm())), envs.RewardSum(), envs.StepCounter(9)
    ),
    "statistics of several": lambda: around(  # they end at different times
        envs.SerialEnv(3, lambda: envs.GymEnv(CART_POLE)), norm(in_keys=["observation", "reward"]), envs.RewardSum()
    ),
    "statistics of doubles of several": lambda: around(
        envs.SerialEnv(2, lambda: envs.GymWrapper(Doubles())), envs.DoubleToFloat(), norm(decay=1.0)
    ),
    "own shift": lambda: around(envs.GymWrapper(Doubles()), Shift(), envs.DoubleToFloat(), envs.RewardSum()),
    "own subclass": lambda: around(envs.GymEnv(CART_POLE), Counted(), envs.StepCounter(9)),
    "own that reads": lambda: around(envs.GymWrapper(Doubles()), envs.StepCounter(5), Adds(), envs.DoubleToFloat()),
    "own around batch": lambda: around(
        envs.SerialEnv(3, lambda: envs.GymEnv(CART_POLE)), Shift(), envs.RewardSum(), Adds(), envs.StepCounter(9)
    ),
    "own in ours": lambda: TransformedEnv(GymWrapper(Doubles()), Compose(Shift(), RewardSum(), Adds())),
    "own unannounced": lambda: around(envs.GymEnv(CART_POLE), Adds(17), envs.StepCounter(5), envs.RewardSum()),
    "ours around own": lambda: TransformedEnv(around(envs.GymEnv(CART_POLE), Adds(17)), RewardSum()),
    "theirs": Drift,
    "theirs in a batch": lambda: Drift((3,)),
    "theirs without truncation": lambda: Drift((3,), truncates=False),
    "theirs with a state": lambda: Drift((3,), in_data=True),
    "theirs with a device": lambda: Drift((3,), device="cpu"),
    "theirs below own transforms": lambda: around(Drift(), envs.StepCounter(5), Adds(), envs.RewardSum()),
    "theirs below transforms": lambda: around(Drift(), envs.StepCounter(5), envs.RewardSum(), norm()),
    "theirs without truncation below transforms": lambda: around(
        Drift(truncates=False), envs.RewardSum(), envs.StepCounter(4)
    ),
    "theirs with a state below transforms": lambda: around(
        Drift((3,), in_data=True), envs.InitTracker(), envs.StepCounter(4)
    ),
    "theirs in turn below statistics": lambda: around(
        envs.SerialEnv(3, Drift), norm(in_keys=["observation", "reward"]), envs.RewardSum()
    ),
    "theirs in turn of batches": lambda: around(envs.SerialEnv(2, lambda: Shaped((3,))), envs.StepCounter(4)),
    "theirs in turn with more than announced": lambda: envs.SerialEnv(2, lambda: Drift(first=9)),
    "theirs in ours": lambda: TransformedEnv(Drift((3,)), RewardSum()),
    "theirs in turn": lambda: envs.SerialEnv(3, Drift),
    "theirs in turn below transforms": lambda: around(
        envs.SerialEnv(3, lambda: around(Drift(), Shift(), envs.StepCounter(4))), envs.RewardSum()
    ),
    "theirs in ours in turn": lambda: SerialEnv(3, Drift),
    "theirs in processes": lambda: envs.ParallelEnv(2, Drift, mp_start_method="spawn"),
    "own members in turn": lambda: envs.SerialEnv(2, lambda: around(envs.GymEnv(PENDULUM), Adds())),
    "theirs in our processes": lambda: ParallelEnv(2, Drift, mp_start_method="spawn"),
    "theirs that skips": lambda: envs.GymEnv(PENDULUM, frame_skip=2),
    "theirs unannounced": lambda: Drift((3,), first=13),
    "theirs unannounced below transforms": lambda: around(Drift(first=13), envs.StepCounter(5), envs.RewardSum()),
    "theirs in turn, unannounced": lambda: SerialEnv(3, lambda: Drift(first=13)),
    "ours of several": lambda: SerialEnv(3, lambda: around(envs.GymEnv(PENDULUM), envs.StepCounter(6))),
}

REMEMBERING = {
    "primed members": lambda: envs.SerialEnv(2, lambda: around(envs.GymEnv(PENDULUM), envs.StepCounter(9), primer())),
    "primed members of ours": lambda: SerialEnv(
        2, lambda: around(envs.GymEnv(PENDULUM), envs.StepCounter(9), primer())
    ),
    "theirs primed": lambda: around(Drift((2,)), primer(expand_specs=True)),
    "ours primed by theirs": lambda: TransformedEnv(GymWrapper(gymnasium.make(PENDULUM)), primer()),
    "own primed": lambda: around(envs.GymEnv(PENDULUM), Shift(), primer()),
}


UNFIT = (
    "own unannounced",
    "ours around own",
    "theirs unannounced",
    "theirs unannounced below transforms",
    "theirs in turn, unannounced",
)


def make_policy(env):
    torch.manual_seed(3)
    if not env.action_spec.dtype.is_floating_point:
        return None
    size, width = env.observation_spec["observation"].shape[-1], env.action_spec.shape[-1]
    dtype = env.observation_spec["observation"].dtype
    net = nn.Sequential(nn.Linear(size, width, dtype=dtype), nn.Tanh())
    return TensorDictModule(net, in_keys=["observation"], out_keys=["action"])


def collect(env, **options):
    env.set_seed(0)
    policy = make_policy(env)
    torch.manual_seed(1)
    with Collector(env, policy, frames_per_batch=30, total_frames=90, **options) as collector:
        return torch.cat([batch.clone() for batch in collector], -1), collector.stats()["paths"]["env"]


@pytest.mark.filterwarnings("ignore::FutureWarning")
class TestParity:
    @pytest.mark.parametrize("random", [0, 30])
    @pytest.mark.parametrize("name", ENVS)
    def test_arrays_and_tensordicts(self, name, random):
        torch.manual_seed(5)
        native, how = collect(ENVS[name](), init_random_frames=random)
        torch.manual_seed(5)
        plain, _ = collect(ENVS[name](), init_random_frames=random, use_buffers=False)
        if not (name.endswith("several") and random):
            assert how.startswith("plain: " if name in UNFIT else "native: NumPy arrays"), how
            assert name in UNFIT or ("TensorDicts" in how) == ("own" in name.split()), how
            assert name in UNFIT or ("TorchRL steps it" in how) == (name.startswith("theirs") or "members" in name), how
        assert set(native.keys(True, True)) == set(plain.keys(True, True))
        for key in plain.keys(True, True):
            assert native[key].dtype == plain[key].dtype, key
            assert torch.equal(native[key], plain[key]), key

    @pytest.mark.parametrize("name", [name for name in [*ENVS, *REMEMBERING] if "primed" in name])
    def test_states_that_the_policy_writes(self, name):
        """What it writes below "next" is what its next call reads, whoever steps the environment."""
        found = []
        for options in ({}, {"use_buffers": False}):
            env = {**ENVS, **REMEMBERING}[name]()
            env.set_seed(0)
            torch.manual_seed(1)
            remember = TensorDictModule(lambda hidden: hidden * 0.5 + 1, ["hidden"], [("next", "hidden")])
            width = env.action_spec.shape[-1]
            act = TensorDictModule(lambda hidden, width=width: hidden[..., :width], ["hidden"], ["action"])
            with Collector(env, TensorDictSequential(remember, act), frames_per_batch=40, **options) as collector:
                found.append(collector.next().clone())
                assert collector.stats()["paths"]["env"].startswith("plain" if options else "native")
        native, plain = found
        assert (native["next", "hidden"] == native["hidden"] * 0.5 + 1).all()
        for key in plain.keys(True, True):
            assert torch.equal(native[key], plain[key]), key

    @pytest.mark.parametrize("frozen", [False, True])
    def test_statistics_stay_where_torchrl_keeps_them(self, frozen):
        found = []
        for options in ({}, {"use_buffers": False}):
            env = ENVS["statistics"]()
            env.set_seed(7)
            torch.manual_seed(7)
            env.rollout(5)
            transform = env.transform[0]
            transform.frozen = frozen
            before = transform.loc["observation"].clone()
            collect(env, **options)
            assert torch.equal(transform.loc["observation"], before) == frozen
            found.append([transform.loc.clone(), transform.scale.clone()])
        assert all((ours == theirs).all() for ours, theirs in zip(*found, strict=True))

    def test_shared_statistics(self):
        zeros = {"observation_sum": torch.zeros(4), "observation_ssq": torch.zeros(4)}
        shared = TensorDict({**zeros, "observation_count": torch.zeros(1)}).share_memory_()
        env = around(envs.GymEnv(CART_POLE), norm(shared_td=shared))
        _, how = collect(env)
        assert how == "native: NumPy arrays"
        assert shared["observation_count"] > 10


def flags(**found):
    return {key: torch.tensor([value]) for key, value in found.items()}


WAYS = {
    "all": lambda end, cut: flags(done=end or cut, terminated=end, truncated=cut),
    "none": lambda end, cut: {},
    "done": lambda end, cut: flags(done=end),
    "terminated": lambda end, cut: flags(terminated=end),
    "both causes": lambda end, cut: flags(terminated=end, truncated=cut),
    "no truncated": lambda end, cut: flags(done=end or cut, terminated=end),
    "causes without done": lambda end, cut: flags(done=cut, terminated=end, truncated=cut),
    "without a dimension": lambda end, cut: {"done": torch.tensor(end)},
    "with more dimensions": lambda end, cut: {"done": torch.tensor([[end]])},
}


class Flagged(Drift):
    """Returns flags that depend on the number of steps, in one of several ways, and rewards of some shape."""

    def __init__(self, way, shape=(1,)):
        super().__init__()
        self.way, self.reward_size, self.steps = WAYS[way], shape, 0

    def _reset(self, tensordict=None, **kwargs):
        self.x, self.n = torch.full((2,), 0.5 / (1 + self.steps)), torch.zeros(1, dtype=torch.int64)
        return TensorDict({"observation": self.x.clone(), "n": self.n.clone()}, self.batch_size)

    def _step(self, tensordict):
        self.steps += 1
        self.x, self.n = self.x + tensordict["action"] / 8, self.n + 1
        found = {"observation": self.x.clone(), "n": self.n.clone(), "reward": self.x.sum().reshape(self.reward_size)}
        return TensorDict(found | self.way(self.steps % 7 == 0, self.steps % 5 == 0), self.batch_size)


class Mended(Flagged):
    """Changes what its steps return where they are completed."""

    def _step_proc_data(self, next_tensordict_out):
        return super()._step_proc_data(next_tensordict_out.set("n", next_tensordict_out["n"] + 5))


FLAGGED = {
    **{way: lambda way=way: Flagged(way) for way in WAYS},
    "rewards without a dimension": lambda: Flagged("done", ()),
    "rewards with more dimensions": lambda: Flagged("all", (1, 1)),
    "completes by itself": lambda: Mended("done"),
    **{
        f"{way}, in turn": lambda way=way: envs.SerialEnv(2, lambda: Flagged(way))
        for way in WAYS
        if way != "with more dimensions"  # which TorchRL refuses
    },
    **{
        f"{way}, below transforms": lambda way=way: around(Flagged(way), envs.StepCounter(4), envs.RewardSum())
        for way in WAYS
    },
    "in turn, below transforms": lambda: around(envs.SerialEnv(2, lambda: Flagged("done")), envs.StepCounter(4)),
    "in turn, rewards without a dimension": lambda: envs.SerialEnv(2, lambda: Flagged("done", ())),
}
# TorchRL's collector counts trajectories there that were not reset.
UNCOUNTED = ("causes without done", "terminated, in turn", "both causes, in turn")


class TestSteps:
    @pytest.mark.parametrize("options", [{}, {"use_buffers": False}], ids=["arrays", "tensordicts"])
    @pytest.mark.parametrize("name", FLAGGED)
    def test_frames_are_those_of_torchrls_collector(self, name, options):
        found = []
        for kind, given in ((collectors.Collector, {}), (Collector, options)):
            torch.manual_seed(3)
            env = FLAGGED[name]()
            policy = make_policy(env)
            collector = kind(env, policy, frames_per_batch=20, total_frames=40, **given)
            torch.manual_seed(1)
            found.append(torch.cat([batch.clone() for batch in collector], -1))
            collector.shutdown()
        theirs, ours = found
        assert set(ours.keys(True, True)) == set(theirs.keys(True, True))
        for key in theirs.keys(True, True):
            if key != ("collector", "traj_ids") or not name.startswith(UNCOUNTED):
                assert torch.equal(ours[key], theirs[key]), key

    @pytest.mark.parametrize("options", [{}, {"use_buffers": False}], ids=["arrays", "tensordicts"])
    @pytest.mark.parametrize("make", [lambda make: make(), lambda make: around(make(), envs.StepCounter(5))])
    def test_other_dtypes_are_cast_as_in_torchrls_collector(self, make, options):
        found = []
        for kind, given in ((collectors.Collector, {}), (Collector, options)):
            torch.manual_seed(3)
            env = make(lambda: Doubled("done"))
            policy = make_policy(env)
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                collector = kind(env, policy, frames_per_batch=20, total_frames=20, **given)
                found.append(next(iter(collector)).clone())
                collector.shutdown()
        texts = [str(warning.message) for warning in warned if "It is cast" in str(warning.message)]
        assert [text.split(" returned ")[1].split(" ")[0] for text in texts] == ["'n'", "'reward'"]
        assert all(torch.equal(found[1][key], found[0][key]) for key in found[0].keys(True, True))
        assert found[1]["next", "reward"].dtype == torch.float32

    @pytest.mark.parametrize("lacking", ["n", "reward"])
    def test_missing_entries_in_turn_are_those_of_torchrl(self, lacking):
        """Its memory has the value of the step before; where nothing keeps that, a missing entry is an error."""
        found = []
        for kind in (collectors.Collector, Collector):
            torch.manual_seed(3)
            env = envs.SerialEnv(2, lambda: Lacking("all", lacking))
            collector = kind(env, make_policy(env), frames_per_batch=20, total_frames=20)
            torch.manual_seed(1)
            found.append(next(iter(collector)).clone())
            collector.shutdown()
        assert all(torch.equal(found[1][key], found[0][key]) for key in found[0].keys(True, True))
        env = TorchRLWrapper(Lacking("all", lacking))
        with pytest.raises(EnvError, match=f"no '{lacking}'|raised in step"):
            env.rollout(7, policy=make_policy(env), break_when_any_done=False)

    def test_partial_steps_of_a_batch_are_torchrls(self):
        found = []
        for wrap in (lambda env: env, TorchRLWrapper):
            torch.manual_seed(3)
            env = wrap(envs.SerialEnv(2, lambda: Flagged("all")))
            td = env.reset()
            for step in (torch.tensor([True, False]), torch.tensor([True, True])):
                td = env.step(td.set("action", torch.ones(2, 2)).set("_step", step))["next"].clone()
            found.append(td)
        assert all(torch.equal(found[1][key], found[0][key]) for key in ("observation", "n", "done"))

    @pytest.mark.parametrize("batch", [SerialEnv, ParallelEnv])
    def test_members_are_reset_without_a_collector(self, batch):
        env = batch(2, Drift)  # TorchRL's base class marks it as closed from the start
        assert env.rollout(4, break_when_any_done=False).shape == (2, 4)
        env.close()

    @pytest.mark.parametrize("options", [{}, {"use_buffers": False}], ids=["arrays", "tensordicts"])
    def test_what_a_step_writes_into_its_input_is_not_recorded(self, options):
        found = []
        for kind in (Flagged, Scribbles):
            torch.manual_seed(3)
            env = kind("all")
            with Collector(env, make_policy(env), frames_per_batch=20, **options) as collector:
                found.append(collector.next())
        one, other = found
        assert set(one.keys(True, True)) == set(other.keys(True, True))
        assert all(torch.equal(one[key], other[key]) for key in one.keys(True, True))

    def test_a_copy_steps_its_own_environment(self):
        first = TorchRLWrapper(Flagged("done"))
        other = copy.deepcopy(first)
        other.rollout(3, policy=make_policy(first))
        assert (first.torchrl_env.steps, other.torchrl_env.steps) == (0, 3)


class Allowing(gymnasium.Env):
    """Allows one action of four, another one in each step; the reward says whether it was taken."""

    observation_space = gymnasium.spaces.Dict(
        action_mask=gymnasium.spaces.MultiBinary(4), observation=gymnasium.spaces.Box(-1, 1, (2,))
    )
    action_space = gymnasium.spaces.Discrete(4)
    count = 0

    def reset(self, *, seed=None, options=None):
        return self.seen(), {}

    def step(self, action):
        reward, self.count = float(self.seen()["action_mask"][action]), self.count + 1
        return self.seen(), reward, False, False, {}

    def seen(self):
        return {"action_mask": np.eye(4, dtype=np.int8)[self.count % 4], "observation": np.zeros(2, np.float32)}


class OwnAllowing(envs.EnvBase):
    """The same as an environment of TorchRL."""

    def __init__(self):
        super().__init__(batch_size=())
        self.observation_spec = data.Composite(action_mask=data.Binary(4, dtype=torch.bool))
        self.action_spec, self.reward_spec = data.Categorical(4), Unbounded((1,))
        self.done_spec = data.Categorical(2, shape=(1,), dtype=torch.bool)
        self.add_truncated_keys()
        self.inner = Allowing()

    def _reset(self, tensordict=None, **kwargs):
        return TensorDict({"action_mask": torch.from_numpy(self.inner.seen()["action_mask"]).bool()}, ())

    def _step(self, tensordict):
        seen, reward, *_ = self.inner.step(int(tensordict["action"]))
        found = {"action_mask": torch.from_numpy(seen["action_mask"]).bool(), "reward": torch.tensor([reward])}
        return TensorDict(found | flags(done=False, terminated=False, truncated=False), ())

    def _set_seed(self, seed):
        pass


MASKED = {
    "gymnasium": lambda: around(
        envs.GymWrapper(Allowing(), categorical_action_encoding=True), envs.StepCounter(5), envs.ActionMask()
    ),
    "own": lambda: around(OwnAllowing(), envs.ActionMask(), envs.StepCounter(5)),
    "in turn": lambda: around(envs.SerialEnv(2, OwnAllowing), envs.ActionMask()),
    "around ours": lambda: TransformedEnv(GymWrapper(Allowing(), categorical_action_encoding=True), envs.ActionMask()),
    "ours around own": lambda: TransformedEnv(OwnAllowing(), Compose(StepCounter(5), envs.ActionMask())),
}


@pytest.mark.parametrize("options", [{}, {"use_buffers": False}], ids=["arrays", "tensordicts"])
@pytest.mark.parametrize("name", MASKED)
def test_random_actions_are_those_that_a_mask_of_torchrl_allows(name, options):
    with Collector(MASKED[name](), None, frames_per_batch=40, **options) as collector:
        assert (collector.next()["next", "reward"] == 1).all()
        assert collector.stats()["paths"]["env"].startswith("plain" if options else "native")


class Doubled(Flagged):
    """Returns other dtypes than its specs say."""

    def _step(self, tensordict):
        found = super()._step(tensordict)
        return found.set("n", found["n"].int()).set("reward", found["reward"].double())


class Lacking(Flagged):
    """Leaves out an entry in every third step."""

    def __init__(self, way, lacking):
        super().__init__(way)
        self.lacking = lacking

    def _step(self, tensordict):
        found = super()._step(tensordict)
        return found.exclude(self.lacking) if self.steps % 3 == 0 else found


class Scribbles(Flagged):
    """Writes into what its steps are given."""

    def _step(self, tensordict):
        found = super()._step(tensordict)
        tensordict.set("observation", tensordict["observation"] - 5).set("extra", tensordict["action"])
        tensordict.pop("action")
        return found


class TestHeldBack:
    @pytest.mark.parametrize(
        ("make", "reason"),
        [
            (lambda: envs.GymEnv(CART_POLE, frame_skip=2), r"skips frames.*rollwright.envs.GymEnv"),
            (lambda: around(envs.GymEnv(PENDULUM), envs.ActionScaling()), "ActionScaling"),
        ],
        ids=["frame_skip", "actions"],
    )
    def test_the_reason_is_named(self, make, reason):
        with Collector(make(), None, frames_per_batch=10, total_frames=10) as collector:
            assert collector.next() is not None
            how = collector.stats()["paths"]["env"]
        assert how.startswith("native: NumPy arrays; ")
        assert re.search(reason, how), how
