"""TorchRL's transforms around our environments; tests that need torchrl run where it is installed."""

import copy
import io
from types import SimpleNamespace

import cloudpickle
import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn

from rollwright.collectors import Collector
from rollwright.envs import (
    Compose,
    GymEnv,
    ParallelEnv,
    RewardSum,
    SerialEnv,
    StepCounter,
    TransformedEnv,
    check_env_specs,
    to_torchrl,
)
from rollwright.envs.libs.torchrl import trim_by
from rollwright.envs.transforms.foreign import ForeignTransform
from rollwright.errors import EnvError
from rollwright.testing.mocking_classes import CountingEnv

CARTPOLE, PENDULUM = "CartPole-v1", "Pendulum-v1"


class TestWithoutTorchRL:
    """What needs no environment, with a stand-in that says that it is of TorchRL."""

    def base(self):
        class Transform(nn.Module):
            in_keys = out_keys = in_keys_inv = out_keys_inv = ()
            container = parent = None

            def clone(self):
                return copy.copy(self)

            def _inv_call(self, td):
                return td

            def inv(self, td):
                return self._inv_call(td.copy())

        Transform.__module__ = "torchrl.stand_in"
        return Transform

    def double(self):
        class Double(self.base()):
            def __init__(self):
                super().__init__()
                self.factor, self.register = 2, nn.Linear(1, 1)

            def forward(self, td):
                return td.set("x", td["x"] * self.factor)

            def _inv_call(self, td):
                return td.set("x", td["x"] / self.factor)

            def transform_observation_spec(self, spec):
                return spec

        return Double()

    def test_a_chain_calls_it(self):
        double = self.double()
        chain = Compose(double, lambda td: td.set("y", td["x"] + 1))
        td = chain(TensorDict(x=torch.ones(1)))
        assert (td["x"].item(), td["y"].item()) == (2, 3)
        assert chain.inv(td)["x"].item() == 1
        assert td["x"].item() == 2  # as it was

    def test_attributes_and_state_are_its_own(self):
        foreign = Compose(self.double())[0]
        assert type(foreign) is ForeignTransform
        assert foreign.factor == 2
        foreign.factor = 3
        assert foreign.torchrl_transform.factor == 3
        assert sorted(foreign.state_dict()) == ["register.bias", "register.weight"]
        other = ForeignTransform(self.double())
        other.load_state_dict(foreign.state_dict())
        assert torch.equal(other.register.weight, foreign.register.weight)
        assert foreign.clone().factor == 3
        with pytest.raises(AttributeError):
            foreign.no_such_thing  # noqa: B018

    def test_a_transform_on_their_environment_is_refused(self):
        taken = self.double()
        taken.container = SimpleNamespace()
        with pytest.raises(RuntimeError, match="already belongs to SimpleNamespace of TorchRL"):
            Compose(taken)

    def test_frames_are_changed_in_place(self):
        class Late(self.base()):
            def _post_step_mdp_hooks(self, td, td_):
                return td.copy(), td_

        with pytest.raises(EnvError, match=r"Late: expected _post_step_mdp_hooks to return .* in\s+place"):
            trim_by(Late(), TensorDict(), TensorDict(), [])

    def test_other_things_are_refused(self):
        with pytest.raises(TypeError, match=r"expected one of TorchRL, got .*RewardSum"):
            ForeignTransform(RewardSum())


@pytest.fixture
def theirs():
    """TorchRL's environments and transforms, with some of a user's own."""
    envs, data = pytest.importorskip("torchrl.envs"), pytest.importorskip("torchrl.data")

    class Seen(envs.Transform):
        """Writes a copy of the observation, and how often it was called."""

        def __init__(self):
            super().__init__(in_keys=["observation"], out_keys=["twice"])
            self.register_buffer("seen", torch.zeros(()))
            self.calls = 0

        def _apply_transform(self, obs):
            return obs * 2

        def _reset(self, tensordict, tensordict_reset):
            return self._call(tensordict_reset)

        def _call(self, next_tensordict):
            self.seen += 1
            self.calls += 1
            shape = (*next_tensordict.batch_size, 1)
            next_tensordict["seen"] = self.seen.expand(shape) + self.calls
            return super()._call(next_tensordict)

        def transform_observation_spec(self, observation_spec):
            observation_spec["twice"] = observation_spec["observation"].clone()
            observation_spec["seen"] = data.Unbounded((*observation_spec.shape, 1))
            return observation_spec

    class Negated(envs.Transform):
        """Turns the action round, and says which the environment was given."""

        def __init__(self):
            super().__init__(in_keys_inv=["action"], out_keys_inv=["action"])

        def _inv_apply_transform(self, state):
            return -state

        def _step(self, tensordict, next_tensordict):
            return next_tensordict.set("given", tensordict["action"].clone())

        def _reset(self, tensordict, tensordict_reset):
            assert set(tensordict.keys()) <= {"_reset"}
            return tensordict_reset.set("given", self.parent.full_action_spec.zero()["action"])

        def transform_observation_spec(self, observation_spec):
            observation_spec["given"] = self.parent.full_action_spec["action"].clone()
            return observation_spec

    class More(envs.Transform):
        """Adds one to rewards."""

        def _call(self, next_tensordict):
            return next_tensordict.set("reward", next_tensordict["reward"] + 1)

    return SimpleNamespace(envs=envs, data=data, Seen=Seen, Negated=Negated, More=More)


def curious(theirs):
    torch.manual_seed(7)
    return theirs.envs.transforms.RNDTransform(nn.Linear(4, 3), nn.Linear(4, 3))


# By name: the environment, and a function that makes a transform of TorchRL.
CASES = {
    "TrajCounter": (CARTPOLE, lambda t: t.envs.TrajCounter()),
    "StepCounter": (CARTPOLE, lambda t: t.envs.StepCounter(7)),
    "VecNorm": (CARTPOLE, lambda t: t.envs.VecNorm(in_keys=["observation"])),
    "VecNormV2": (CARTPOLE, lambda t: t.envs.VecNormV2(in_keys=["observation"])),
    "RNDTransform": (CARTPOLE, curious),
    "CatFrames": (CARTPOLE, lambda t: t.envs.CatFrames(N=3, dim=-1, in_keys=["observation"])),
    "TargetReturn": (CARTPOLE, lambda t: t.envs.TargetReturn(50.0)),
    "TimeMaxPool": (CARTPOLE, lambda t: t.envs.TimeMaxPool(in_keys=["observation"], T=3)),
    "DeviceCastTransform": (CARTPOLE, lambda t: t.envs.DeviceCastTransform("cpu")),
    "FrameSkipTransform": (PENDULUM, lambda t: t.envs.FrameSkipTransform(2)),
    "ActionDiscretizer": (PENDULUM, lambda t: t.envs.ActionDiscretizer(num_intervals=4)),
    "DTypeCastTransform": (
        PENDULUM,
        lambda t: t.envs.DTypeCastTransform(torch.float32, torch.float64, ["observation"], ["observation"], ["action"]),
    ),
    "Seen": (CARTPOLE, lambda t: t.Seen()),
    "Negated": (PENDULUM, lambda t: t.Negated()),
    "More": (CARTPOLE, lambda t: t.More()),
    "Compose": (
        CARTPOLE,
        lambda t: t.envs.Compose(t.envs.StepCounter(9), t.Seen(), t.envs.RewardSum(), t.envs.TrajCounter()),
    ),
    "RandomTruncationTransform": (
        CARTPOLE,
        lambda t: t.envs.Compose(t.envs.StepCounter(), t.envs.RandomTruncationTransform(3, 8)),
    ),
}
ALONE = {
    "NextObservationDelta": (CARTPOLE, lambda t: t.envs.Compose(t.envs.NextObservationDelta(), t.envs.StepCounter())),
    "NoopResetEnv": (PENDULUM, lambda t: t.envs.NoopResetEnv(3, random=True)),
}  # around single environments
WIDE = ["TrajCounter", "VecNormV2", "RNDTransform", "ActionDiscretizer", "Negated", "Compose"]


def policy_of(env):
    """A policy that depends on the third number of the observation."""
    spec, ndim = env.full_action_spec["action"], len(env.batch_size)

    def act(observation):
        third = observation.reshape(*observation.shape[:ndim], -1)[..., 2]
        if spec.dtype.is_floating_point:
            return torch.tanh(third)[..., None].to(spec.dtype)
        right = (third > 0).long()
        return right[..., None] * 3 if spec.shape[-1] == 1 else nn.functional.one_hot(right, 2)

    return TensorDictModule(act, in_keys=["observation"], out_keys=["action"])


def base_env(name, batch):
    def one():
        return GymEnv(name)

    kinds = {"one": lambda _, make: make(), "serial": SerialEnv, "parallel": ParallelEnv}
    return kinds[batch](2, one)


def rolled_out(env):
    torch.manual_seed(5)
    env.set_seed(1)
    found = env.rollout(120, policy_of(env), break_when_any_done=False)
    env.close()
    return found


def collected(kind, env):
    policy = policy_of(env)
    env.set_seed(1)
    torch.manual_seed(6)
    collector = kind(env, policy, frames_per_batch=40, total_frames=120)
    found = torch.cat([batch.clone() for batch in collector], -1)
    collector.shutdown()
    return found


def assert_equal(ours, theirs):
    assert set(ours.keys(True, True)) == set(theirs.keys(True, True))
    for key in theirs.keys(True, True):
        assert torch.equal(ours[key], theirs[key]), key
        assert ours[key].dtype == theirs[key].dtype, key


class TestFrames:
    """Frames equal those of the same transform in TorchRL's environment, around the same environment."""

    @pytest.mark.parametrize(
        ("name", "batch"),
        [
            *[(name, "one") for name in [*CASES, *ALONE]],
            *[(name, "serial") for name in CASES],
            *[(name, "parallel") for name in WIDE],
        ],
    )
    def test_rollout(self, theirs, name, batch):
        env, make = (CASES | ALONE)[name]
        expected = rolled_out(theirs.envs.TransformedEnv(to_torchrl(base_env(env, batch)), make(theirs)))
        found = rolled_out(TransformedEnv(base_env(env, batch), make(theirs)))
        assert_equal(found, expected)
        if env == CARTPOLE:
            assert expected["next", "done"].any()  # there were resets

    @pytest.mark.parametrize(
        ("name", "batch"), [*[(name, "one") for name in [*CASES, *ALONE]], *[(name, "serial") for name in WIDE]]
    )
    def test_collector(self, theirs, name, batch):
        collectors = pytest.importorskip("torchrl.collectors")
        env, make = (CASES | ALONE)[name]
        around = theirs.envs.TransformedEnv(to_torchrl(base_env(env, batch)), make(theirs))
        expected = collected(collectors.Collector, around)
        found = collected(Collector, TransformedEnv(base_env(env, batch), make(theirs)))
        for key in [("collector", "traj_ids")]:
            found, expected = found.exclude(key), expected.exclude(key)
        assert_equal(found, expected)

    @pytest.mark.parametrize("name", WIDE)
    def test_within_a_batch(self, theirs, name):
        """Each environment of the batch has a transform of its own."""
        env, make = CASES[name]
        found = rolled_out(SerialEnv(2, lambda: TransformedEnv(GymEnv(env), make(theirs))))
        again = rolled_out(ParallelEnv(2, lambda: TransformedEnv(GymEnv(env), make(theirs))))
        assert_equal(again, found)
        alone = rolled_out(TransformedEnv(GymEnv(env), make(theirs)))
        for key in alone.keys(True, True):
            assert torch.equal(found[0][key], alone[key]), key

    def test_around_their_environment(self, theirs):
        def make(kind):
            return kind(theirs.envs.GymEnv(CARTPOLE), theirs.envs.Compose(theirs.Seen(), theirs.envs.TrajCounter()))

        assert_equal(rolled_out(make(TransformedEnv)), rolled_out(make(theirs.envs.TransformedEnv)))

    @pytest.mark.parametrize("workers", [0, 2])
    @pytest.mark.parametrize("kind", ["ours", "theirs"])
    def test_what_is_taken_away_from_frames(self, theirs, kind, workers):
        def make():
            if kind == "ours":
                return TransformedEnv(GymEnv(CARTPOLE), theirs.envs.NextObservationDelta())
            return theirs.envs.TransformedEnv(theirs.envs.GymEnv(CARTPOLE), theirs.envs.NextObservationDelta())

        options = {"num_collectors": workers, "sync": True} if workers else {}
        collector = Collector(make if workers else make(), frames_per_batch=40, total_frames=80, **options)
        for batch in collector:
            assert ("next", "observation") not in batch.keys(True, True)
            assert ("delta", "observation") not in batch.keys(True, True)
            delta, ids = batch["next", "delta", "observation"], batch["collector", "traj_ids"]
            goes_on = ids[..., 1:] == ids[..., :-1]
            moved = (batch["observation"][..., 1:, :] - batch["observation"][..., :-1, :]).to(torch.float16)
            assert torch.equal(delta[..., :-1, :][goes_on], moved[goes_on])
        fake = make().fake_tensordict()
        assert fake["next", "delta", "observation"].dtype is torch.float16
        collector.shutdown()

    def test_ours_and_theirs_in_one_chain(self, theirs):
        env = TransformedEnv(GymEnv(CARTPOLE), Compose(StepCounter(5), theirs.More(), RewardSum()))
        env.append_transform(theirs.envs.TrajCounter())
        check_env_specs(env)
        frames = env.rollout(10, break_when_any_done=False)
        assert frames["next", "step_count"].flatten().tolist() == [1, 2, 3, 4, 5] * 2
        assert frames["next", "episode_reward"].flatten().tolist() == [2, 4, 6, 8, 10] * 2
        assert frames["traj_count"].diff(dim=0).flatten().tolist() == [0, 0, 0, 0, 1, 0, 0, 0, 0]

    def test_a_partial_reset_leaves_the_others(self, theirs):
        env = TransformedEnv(SerialEnv(3, lambda: CountingEnv(max_steps=100)), theirs.envs.TrajCounter())
        td = env.step(env.reset().update(env.full_action_spec.one()))["next"]
        assert td["traj_count"].flatten().tolist() == [0, 1, 2]
        td["_reset"] = torch.tensor([[False], [True], [False]])
        td = env.reset(td)
        assert td["traj_count"].flatten().tolist() == [0, 3, 2]
        assert td["observation"].flatten().tolist() == [1, 0, 1]


class TestPaths:
    def test_those_with_an_array_form_run_on_arrays(self, theirs):
        env = TransformedEnv(GymEnv(CARTPOLE), theirs.envs.Compose(theirs.envs.StepCounter(7), theirs.envs.RewardSum()))
        with Collector(env, None, frames_per_batch=10, total_frames=10) as collector:
            assert collector.stats()["paths"]["env"].startswith("native")

    @pytest.mark.filterwarnings("ignore::FutureWarning")
    def test_statistics_of_a_batch_count_what_is_not_reset(self, theirs):
        env = TransformedEnv(SerialEnv(2, lambda: GymEnv(CARTPOLE)), theirs.envs.VecNorm(in_keys=["observation"]))
        with Collector(env, None, frames_per_batch=10, total_frames=10) as collector:
            assert "rows of a batch that are not reset" in collector.stats()["paths"]["env"]

    def test_the_path_names_the_transform(self, theirs):
        env = TransformedEnv(GymEnv(CARTPOLE), theirs.envs.TrajCounter())
        with Collector(env, None, frames_per_batch=10, total_frames=10) as collector:
            assert "TrajCounter works on TensorDicts" in collector.stats()["paths"]["env"]


class TestEnvironment:
    def test_their_transform_meets_the_environment(self, theirs):
        env = TransformedEnv(CountingEnv(batch_size=[2]), Compose(RewardSum(), theirs.Seen()))
        seen = env.transform[1]
        assert seen.parent.observation_keys == ["episode_reward", "observation"]
        inner = seen.torchrl_transform
        assert seen.set_missing_tolerance(False) is None  # a method: the environment is there from now on
        assert isinstance(inner.parent, theirs.envs.EnvBase)
        assert inner.parent.batch_size == (2,)
        assert inner.parent.reset_keys == ["_reset"]
        assert "episode_reward" in inner.parent.observation_spec
        assert "twice" in inner.container.observation_spec
        assert inner.parent.base_env.max_steps == env.base_env.max_steps
        inner.parent.base_env.close()
        assert not env.is_closed

    def test_it_follows_changes_of_the_chain(self, theirs):
        env = TransformedEnv(GymEnv(CARTPOLE), theirs.Seen())
        env.rollout(2)
        env.insert_transform(0, RewardSum())
        env.rollout(2)
        assert "episode_reward" in env.transform[1].torchrl_transform.parent.observation_spec

    def test_it_can_go_to_another_environment(self, theirs):
        seen = theirs.Seen()
        env = TransformedEnv(GymEnv(CARTPOLE), Compose(seen))
        env.rollout(2)
        env.transform.pop()
        other = theirs.envs.TransformedEnv(theirs.envs.GymEnv(CARTPOLE), seen)
        with pytest.raises(RuntimeError, match="already belongs to TransformedEnv of TorchRL"):
            TransformedEnv(GymEnv(CARTPOLE), seen)
        assert other.rollout(2).shape == (2,)
        assert TransformedEnv(GymEnv(CARTPOLE), seen.clone()).rollout(2).shape == (2,)

    def test_modes(self, theirs):
        env = TransformedEnv(GymEnv(CARTPOLE), rnd := curious(theirs))
        assert not rnd.training
        env.train()
        env.rollout(2)
        assert rnd.training
        assert rnd.obs_rms.count > 1

    def test_their_recorder(self, theirs, tmp_path):
        record, loggers = pytest.importorskip("torchrl.record"), pytest.importorskip("torchrl.record.loggers")
        pytest.importorskip("pygame")
        logger = loggers.CSVLogger("run", log_dir=str(tmp_path), video_format="pt")
        env = GymEnv(CARTPOLE, from_pixels=True, pixels_only=False)
        recorder = record.VideoRecorder(logger, tag="video", skip=1)
        env = TransformedEnv(env, recorder)
        env.rollout(3)
        env.apply(lambda module: module.dump() if isinstance(module, record.VideoRecorder) else None)
        (file,) = tmp_path.rglob("*.pt")
        assert len(torch.load(file)[0]) == 4  # of the reset and three steps

    def test_batch_sizes_stay(self, theirs):
        one = theirs.envs.BatchSizeTransform(reshape_fn=lambda data: data.reshape(1))
        with pytest.raises(EnvError, match=r"BatchSizeTransform: expected a transform that keeps the batch size \[\]"):
            TransformedEnv(GymEnv(CARTPOLE), one).rollout(2)

    def test_auto_reset_is_refused(self, theirs):
        with pytest.raises(TypeError, match="AutoResetTransform is for environments that reset themselves"):
            TransformedEnv(GymEnv(CARTPOLE), theirs.envs.AutoResetTransform())

    def test_their_chains_hold_ours(self, theirs):
        env = TransformedEnv(GymEnv(CARTPOLE), theirs.envs.Compose(StepCounter(3), theirs.More()))
        assert [type(part) for part in env.transform] == [StepCounter, ForeignTransform]
        assert env.rollout(9)["next", "step_count"].flatten().tolist() == [1, 2, 3]


class TestState:
    def env(self, theirs):
        torch.manual_seed(3)
        parts = theirs.envs.TrajCounter(), theirs.envs.VecNormV2(in_keys=["observation"]), theirs.Seen(), RewardSum()
        return TransformedEnv(GymEnv(CARTPOLE), Compose(*parts, curious(theirs)))

    def test_names_are_theirs(self, theirs):
        env = self.env(theirs)
        env.rollout(20)
        state = env.state_dict()
        assert {"transform.transforms.0.traj_count", "transform.transforms.2.seen"} < state.keys()
        assert "transform.transforms.4.target_network.weight" in state
        assert env.transform[0].state_dict() == {"traj_count": 1}
        other = self.env(theirs)
        other.rollout(2)
        other.load_state_dict(state)
        assert torch.equal(other.transform[2].seen, env.transform[2].seen)
        assert other.transform[0].state_dict() == env.transform[0].state_dict()

    def test_a_collector_goes_on_bit_for_bit(self, theirs):
        first = Collector(self.env(theirs), None, frames_per_batch=30, total_frames=120)
        first.set_seed(0)
        first.next()
        saved = io.BytesIO()
        torch.save(first.state_dict(), saved)
        expected = first.next()
        saved.seek(0)
        state = torch.load(saved, weights_only=True)
        assert not state.get("unsaved")
        second = Collector(self.env(theirs), None, frames_per_batch=30, total_frames=120)
        second.load_state_dict(state)
        assert_equal(second.next(), expected)
        first.shutdown(), second.shutdown()

    @pytest.mark.parametrize("copied", [copy.deepcopy, lambda env: cloudpickle.loads(cloudpickle.dumps(env))])
    def test_copies(self, theirs, copied):
        env = TransformedEnv(GymEnv(CARTPOLE), theirs.Seen())
        env.rollout(3)
        env.set_seed(0)
        other = copied(env)
        calls = env.transform.calls
        assert calls >= 4
        assert other.transform.calls == calls
        other.rollout(3)
        assert (env.transform.calls, other.transform.calls) == (calls, calls + 4)
        assert other.transform.container is other

    def test_workers(self, theirs):
        def make():
            return TransformedEnv(GymEnv(CARTPOLE), theirs.envs.Compose(theirs.Seen(), theirs.envs.TrajCounter()))

        options = {"frames_per_batch": 20, "total_frames": 40, "num_collectors": 2, "sync": True}
        with Collector(make, None, **options) as collector:
            for batch in collector:
                assert batch.shape == (2, 10)
                assert torch.equal(batch["next", "twice"], batch["next", "observation"] * 2)
