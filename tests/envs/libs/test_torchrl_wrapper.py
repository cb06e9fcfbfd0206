"""TorchRL's environments in ours; those that need torchrl run where it is installed (docs/coming_from_torchrl.md)."""

import gc
import subprocess
import sys
from abc import ABCMeta
from types import SimpleNamespace

import gymnasium
import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn

from rollwright.collectors import Collector
from rollwright.data import Bounded, Categorical, Composite, OneHot, Unbounded, from_torchrl, to_torchrl
from rollwright.envs import (
    EnvCreator,
    GymEnv,
    ParallelEnv,
    RewardSum,
    SerialEnv,
    TorchRLWrapper,
    TransformedEnv,
    check_env_specs,
)
from rollwright.envs import to_torchrl as to_torchrl_env
from rollwright.errors import SpecError
from rollwright.modules import RandomPolicy
from rollwright.testing.mocking_classes import CountingEnv


def of_torchrl(name, *bases, **attributes):
    """A class that says it is of TorchRL."""
    return type(name, bases, {"__module__": "torchrl.stand_in", **attributes})


Spec = of_torchrl("TensorSpec", object)


def leaf(name, **attributes):
    spec = of_torchrl(name, Spec)()
    vars(spec).update({"shape": torch.Size(()), "dtype": torch.int64, "device": torch.device("cpu"), **attributes})
    return spec


def composite(shape=(), **entries):
    kind = of_torchrl("Composite", Spec, items=lambda self: self.entries.items())
    spec = kind()
    spec.__dict__.update(entries=entries, shape=torch.Size(shape), device=None)
    kind.__getitem__ = lambda self, key: self.entries[key]
    return spec


class Base(nn.Module):
    """What TorchRL's environments have in common; counts to three."""

    def __init__(self):
        super().__init__()
        self.batch_size, self.device, self.batch_locked, self.is_closed = torch.Size(()), None, True, False
        flag = {"space": Categorical(2).space, "dtype": torch.bool, "shape": torch.Size((1,))}
        self.full_observation_spec = composite(count=leaf("Unbounded", shape=torch.Size((1,))))
        self.full_state_spec = composite()
        self.full_action_spec = composite(action=leaf("Categorical", space=Categorical(2).space))
        self.full_reward_spec = composite(reward=leaf("Unbounded", shape=torch.Size((1,)), dtype=torch.float32))
        self.full_done_spec = composite(done=leaf("Categorical", **flag), terminated=leaf("Categorical", **flag))
        self.seeds, self.remark = [], "of TorchRL"

    def reset(self, tensordict=None, **kwargs):
        self.count = 0
        fresh = self.outcome()
        return fresh if tensordict is None else tensordict.exclude("_reset").update(fresh)

    def step(self, tensordict):
        self.count += 1
        return tensordict.set("next", self.outcome().set("reward", torch.ones(1)))

    def outcome(self):
        count, done = torch.tensor([self.count]), torch.tensor([self.count == 3])
        return TensorDict({"count": count, "done": done, "terminated": done.clone()})

    def rand_action(self, tensordict):
        return tensordict.set("action", torch.randint(2, ()))

    def set_seed(self, seed, static_seed=False):
        self.seeds.append(seed)
        return seed + 1

    def to(self, device):
        self.device = torch.device(device)
        return self

    def close(self):
        self.is_closed = True


EnvBase = of_torchrl("EnvBase", Base)
Counting = of_torchrl("Counting", EnvBase)


def always_one(td):
    return td.set("action", torch.ones(td.batch_size, dtype=torch.int64))


class TestWrapper:
    @pytest.mark.parametrize("given", [Counting(), Counting], ids=["instance", "factory"])
    def test_collector_takes_it(self, given):
        with Collector(given, always_one, frames_per_batch=8, total_frames=8) as collector:
            batch = collector.next()
        assert batch["next", "count"].squeeze(-1).tolist() == [1, 2, 3, 1, 2, 3, 1, 2]  # true last observations
        assert batch["count"].squeeze(-1).tolist() == [0, 1, 2, 0, 1, 2, 0, 1]
        assert batch["collector", "traj_ids"].tolist() == [0, 0, 0, 1, 1, 1, 2, 2]

    def test_an_instance_is_stepped_and_not_called(self):
        env = Counting()
        env.forward = lambda *_: pytest.fail("called")
        with Collector(env, None, frames_per_batch=4, total_frames=4) as collector:
            assert collector.next().shape == (4,)
        assert env.is_closed

    def test_an_instance_stays_open_when_construction_fails(self):
        env = Counting()
        with pytest.raises(TypeError, match="policy: expected a callable"):
            Collector(env, 3, frames_per_batch=4)
        assert not env.is_closed

    def test_batches_of_environments(self):
        rollout = SerialEnv(2, Counting).rollout(4, break_when_any_done=False)
        assert rollout["next", "count"][..., 0].tolist() == [[1, 2, 3, 1]] * 2

    def test_our_transforms(self):
        env = TransformedEnv(Counting(), RewardSum())
        assert env.rollout(3)["next", "episode_reward"].squeeze(-1).tolist() == [1, 2, 3]

    @pytest.mark.parametrize("make", [lambda e: SerialEnv(2, e), lambda e: ParallelEnv(2, e), EnvCreator])
    def test_an_instance_is_no_function(self, make):
        with pytest.raises(TypeError, match="create_env_fn: expected a function"):
            make(Counting())

    def test_seeds_devices_and_attributes_are_its_own(self):
        env = TorchRLWrapper(Counting())
        assert env.set_seed(5) == 6
        assert env.torchrl_env.seeds == [5]
        assert env.to("cpu").torchrl_env.device == torch.device("cpu")
        assert env.remark == "of TorchRL"
        with pytest.raises(AttributeError):
            env.no_such_thing  # noqa: B018

    def test_other_things_are_refused(self):
        with pytest.raises(TypeError, match=r"env: expected an environment of TorchRL, got .*CountingEnv"):
            TorchRLWrapper(CountingEnv())

    def test_workers_refuse_its_buffers(self):
        buffer = of_torchrl("ReplayBuffer", object, extend=len, add=len, sample=len)()
        with pytest.raises(ValueError, match=r"torchrl.stand_in.ReplayBuffer.*shared=True"):
            Collector(CountingEnv, None, frames_per_batch=4, num_collectors=1, replay_buffer=buffer)


class TestSpecs:
    def test_a_spec_without_counterpart(self):
        with pytest.raises(SpecError, match=r"torchrl.stand_in.Choice has no counterpart"):
            from_torchrl(leaf("Choice"))

    def test_what_is_none(self):
        with pytest.raises(TypeError, match=r"spec: expected a spec of TorchRL, got builtins.int"):
            from_torchrl(3)

    def test_ours_stays(self):
        spec = Bounded(0, 1)
        assert from_torchrl(spec) is spec

    def test_masks_are_copied(self):
        mask = torch.tensor([True, False])
        ours = from_torchrl(leaf("Categorical", space=Categorical(2).space, mask=mask))
        mask[1] = True
        assert ours.mask.tolist() == [True, False]
        assert len({ours, ours.clone()}) == 1

    def test_our_specs_count_as_its_specs_where_the_program_has_imported_it(self, monkeypatch):
        base = ABCMeta("TensorSpec", (), {})
        names = ["Composite", "Bounded", "Unbounded", "Categorical", "OneHot", "MultiCategorical", "MultiOneHot"]
        names += ["NonTensor", "Stacked", "StackedComposite", "Binary"]
        library = SimpleNamespace(TensorSpec=base, **{name: ABCMeta(name, (base,), {}) for name in names[:-1]})
        monkeypatch.setitem(sys.modules, "torchrl.data.tensor_specs", library)
        GymEnv("CartPole-v1")  # while it is being imported: nothing is there yet to be counted as
        assert not isinstance(Categorical(2), base)
        library.Binary = ABCMeta("Binary", (library.Categorical,), {})
        env = GymEnv("CartPole-v1")
        assert isinstance(env.action_spec, library.OneHot)
        assert isinstance(env.action_spec, base)
        assert isinstance(env.full_action_spec, library.Composite)
        assert not isinstance(env.action_spec, library.Bounded)

    def test_torchrl_is_not_imported(self):
        code = "import rollwright.collectors, rollwright.envs, sys; assert 'torchrl' not in sys.modules"
        subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


class TestWithTorchRL:
    """Frames equal those of TorchRL's collector."""

    @pytest.fixture(autouse=True)
    def _installed(self):
        pytest.importorskip("torchrl")

    def specs(self):
        data = pytest.importorskip("torchrl.data")
        return [
            data.Bounded(-1, 1, (3,)),
            data.Bounded(0, 255, (2, 3), dtype=torch.uint8),
            data.Unbounded((2,), dtype=torch.int64),
            data.Unbounded((), dtype=torch.float64),
            data.Categorical(4, (2,)),
            data.Categorical(2, (1,), dtype=torch.bool),
            data.OneHot(3, mask=torch.tensor([True, False, True])),
            data.MultiCategorical([3, 2]),
            data.MultiOneHot([3, 2]),
            data.Binary(4),
            data.Composite(a=data.Composite(b=data.Bounded(0, 1, (2, 1)), shape=(2,)), shape=(2,)),
            data.Composite(a=None, b=data.Unbounded((3,)), c=data.Composite(d=None)),
            torch.stack([data.Composite(a=data.Unbounded((3,))), data.Composite(a=data.Unbounded((4,)))]),
        ]

    def test_specs_both_ways(self):
        for spec in self.specs():
            ours = from_torchrl(spec)
            assert ours.shape == spec.shape
            assert to_torchrl(ours) == spec
            assert from_torchrl(to_torchrl(ours)) == ours
            assert spec.is_in(ours.rand())
            hash(ours)

    @pytest.mark.parametrize("kind", ["alone", "transformed", "serial", "of its own"])
    def test_its_environments_go_on_after_a_collector_has_closed_them(self, kind):
        envs = pytest.importorskip("torchrl.envs")
        from torchrl.envs.custom import PendulumEnv

        env = {
            "alone": lambda: envs.GymEnv("CartPole-v1"),
            "transformed": lambda: envs.TransformedEnv(envs.GymEnv("CartPole-v1"), envs.StepCounter()),
            "serial": lambda: envs.SerialEnv(2, lambda: envs.GymEnv("CartPole-v1")),
            "of its own": PendulumEnv,
        }[kind]()
        for options in ({}, {"use_buffers": False}, {}):
            collector = Collector(env, frames_per_batch=20, total_frames=20, **options)
            assert [batch.numel() for batch in collector] == [20]
            collector.shutdown()
            assert env.is_closed

    def test_its_composites_hold_our_specs(self):
        data = pytest.importorskip("torchrl.data")
        assert isinstance(GymEnv("Pendulum-v1").action_spec, data.Bounded)
        for leaf in (Bounded(-1, 1, (3,)), Categorical(4, (3,)), GymEnv("CartPole-v1").action_spec.expand(3, 2)):
            held = data.Composite(a=leaf, shape=(3,))
            assert held["a"] == leaf
            assert held.expand(2, 3)["a"].shape == (2, *leaf.shape)
            assert held.is_in(held.rand())
            assert held.rand((5,))["a"].shape == (5, *leaf.shape)

    def test_our_composites_take_its_specs(self):
        data = pytest.importorskip("torchrl.data")
        spec = Composite({("n", "a"): data.Bounded(-1, 1, (2, 3))}, b=data.Composite(c=data.OneHot(3)), shape=())
        spec["d"] = data.Composite(e=None, f=data.Unbounded((4,), dtype=torch.float64))
        assert spec["n", "a"] == Bounded(-1, 1, (2, 3))
        assert spec["b", "c"] == OneHot(3)
        assert spec["d"] == Composite(e=None, f=Unbounded((4,), dtype=torch.float64))
        spec.update({"b": data.Composite(c=data.Categorical(5))})
        assert spec["b", "c"] == Categorical(5)

    def test_our_random_policy_takes_its_specs(self):
        data = pytest.importorskip("torchrl.data")
        spec = data.Bounded(-1, 1, (3,))
        assert spec.is_in(RandomPolicy(spec)(TensorDict())["action"])
        assert RandomPolicy(data.Composite(a=spec, b=None))(TensorDict())["a"].shape == (3,)

    def test_its_losses_and_modules_take_our_specs(self):
        data, modules = pytest.importorskip("torchrl.data"), pytest.importorskip("torchrl.modules")
        objectives = pytest.importorskip("torchrl.objectives")
        env = GymEnv("CartPole-v1")
        assert isinstance(env.action_spec, data.OneHot)
        assert isinstance(env.full_action_spec, data.Composite)
        assert not isinstance(env.action_spec, data.Bounded)
        net = TensorDictModule(nn.Linear(4, 2), ["observation"], ["action_value"])
        actor = TensorDictSequential(net, modules.QValueModule(spec=env.action_spec))
        spec = modules.QValueModule(spec=env.full_action_spec).spec  # to which it adds what else it writes
        assert spec["action_value"] is None
        assert list(spec.leaves()) == ["action"]
        loss = objectives.DQNLoss(
            modules.QValueActor(nn.Linear(4, 2), spec=env.action_spec), action_space=env.action_spec
        )
        batch = Collector(env, actor, frames_per_batch=20).next()
        assert loss(batch)["loss"].isfinite()

    def test_its_composites_hold_ours(self):
        data = pytest.importorskip("torchrl.data")
        whole = data.Composite()
        whole["inner"] = Composite(a=Composite(b=Bounded(0, 1)))
        assert ("inner", "a", "b") in whole.keys(True)
        whole.update(data.Composite({"other": None}))
        assert set(whole.keys(True, True)) == {("inner", "a", "b"), "other"}

    def test_it_may_be_imported_when_there_are_environments(self):
        code = """if True:
            from rollwright.envs import GymEnv, TransformedEnv
            env = TransformedEnv(GymEnv("CartPole-v1"))
            from torchrl.data import Composite, OneHot
            assert isinstance(env.action_spec, OneHot)
            assert isinstance(env.full_done_spec, Composite)
        """
        subprocess.run([sys.executable, "-c", code], check=True, timeout=120)

    def envs(self):
        envs = pytest.importorskip("torchrl.envs")

        def one(*more):
            gym = envs.GymEnv("CartPole-v1")
            return envs.TransformedEnv(gym, envs.Compose(envs.StepCounter(20), envs.RewardSum(), *more))

        return {
            "one": one,
            "normalized": lambda: one(envs.VecNorm(in_keys=["observation"])),
            "serial": lambda: envs.SerialEnv(2, one),
            "around": lambda: envs.TransformedEnv(envs.SerialEnv(2, one), envs.InitTracker()),
            "parallel": lambda: envs.ParallelEnv(2, one, mp_start_method="fork"),
        }

    @pytest.mark.parametrize("name", ["one", "normalized", "serial", "around", "parallel"])
    def test_equal_frames(self, name):
        collectors = pytest.importorskip("torchrl.collectors")
        modules = pytest.importorskip("torchrl.modules")
        batches = []
        for kind in (collectors.Collector, Collector):
            env = self.envs()[name]()
            torch.manual_seed(0)
            net = TensorDictModule(nn.Linear(4, 2), in_keys=["observation"], out_keys=["logits"])
            policy = modules.ProbabilisticActor(
                net,
                in_keys=["logits"],
                spec=env.action_spec_unbatched,
                distribution_class=modules.OneHotCategorical,
                return_log_prob=True,
            )
            env.set_seed(1)
            collector = kind(env, policy, frames_per_batch=40, total_frames=120)
            torch.manual_seed(2)
            batches.append(torch.cat([batch.clone() for batch in collector], -1))
            collector.shutdown()
        theirs, ours = batches
        assert set(ours.keys(True, True)) == set(theirs.keys(True, True))
        for key in theirs.keys(True, True):
            assert torch.equal(ours[key], theirs[key]), key

    @pytest.mark.parametrize("name", ["LSTMModule", "GRUModule"])
    def test_recurrent_modules_bring_their_primers(self, name):
        modules = pytest.importorskip("torchrl.modules")
        recurrent = getattr(modules, name)(4, 8, in_key="observation", out_key="hidden")
        head = TensorDictModule(nn.Linear(8, 2), in_keys=["hidden"], out_keys=["action_value"])
        env = self.envs()["one"]()
        policy = TensorDictSequential(recurrent, head, modules.QValueModule(spec=env.action_spec))
        with Collector(env, policy, frames_per_batch=30, total_frames=30) as collector:
            batch = collector.next()
        for key in batch.keys(True, True):
            if "recurrent_state" in str(key) and not isinstance(key, tuple):
                starts = batch["is_init"].squeeze(-1)
                assert (batch[key][starts] == 0).all()
                assert torch.equal(batch[key][1:][~starts[1:]], batch["next", key][:-1][~starts[1:]])

    def test_images(self):
        envs, collectors = pytest.importorskip("torchrl.envs"), pytest.importorskip("torchrl.collectors")
        pytest.importorskip("ale_py")
        pytest.importorskip("torchvision")
        GymEnv("ALE/Pong-v5")
        batches = []
        for kind in (collectors.Collector, Collector):
            gym = envs.GymEnv("ALE/Pong-v5", repeat_action_probability=0.0)
            parts = envs.ToTensorImage(), envs.Resize(21, 21), envs.GrayScale(), envs.SignTransform(in_keys=["reward"])
            env = envs.TransformedEnv(gym, envs.Compose(*parts))
            env.set_seed(0)
            lean = TensorDictModule(lambda x: torch.eye(6)[2].expand(6), in_keys=["pixels"], out_keys=["action"])
            collector = kind(env, lean, frames_per_batch=20, total_frames=20)
            batches.append(next(iter(collector)).clone())
            collector.shutdown()
        theirs, ours = batches
        for key in ("pixels", ("next", "pixels"), ("next", "reward"), ("next", "done")):
            assert torch.equal(ours[key], theirs[key]), key

    def test_its_buffers_are_filled(self):
        data = pytest.importorskip("torchrl.data")
        buffer = data.ReplayBuffer(storage=data.LazyTensorStorage(100), batch_size=4)
        with Collector(self.envs()["one"], None, frames_per_batch=20, total_frames=60, replay_buffer=buffer) as found:
            assert list(found) == [None] * 3
        assert len(buffer) == 60

    def test_workers(self):
        make = self.envs()["one"]
        with Collector(make, None, frames_per_batch=20, total_frames=40, num_collectors=2, sync=True) as collector:
            assert [tuple(batch.shape) for batch in collector] == [(2, 10)] * 2

    def test_our_environments_under_its_transforms_in_our_collectors(self):
        envs = pytest.importorskip("torchrl.envs")
        ours = CountingEnv(max_steps=7)
        env = envs.TransformedEnv(
            to_torchrl_env(ours), envs.BatchSizeTransform(reshape_fn=lambda data: data.reshape(1))
        )
        assert (env.max_steps, env.is_closed) == (7, False)
        with Collector(env, None, frames_per_batch=10, total_frames=10) as collector:
            assert collector.next().shape == (1, 10)
        assert ours.is_closed

    def test_an_environment_outlives_what_was_made_of_it(self):
        env = CountingEnv()
        theirs = to_torchrl_env(env)
        del theirs
        gc.collect()
        assert not env.is_closed

    @pytest.mark.parametrize("batch", [None, 2])
    def test_our_environments_in_its_collectors(self, batch):
        collectors = pytest.importorskip("torchrl.collectors")

        def make():
            def one():
                return TransformedEnv(GymEnv("CartPole-v1"), RewardSum())

            return one() if batch is None else SerialEnv(batch, one)

        def lean(observation):
            return nn.functional.one_hot((observation[..., 2] > 0).long(), 2)

        net = TensorDictModule(lean, in_keys=["observation"], out_keys=["action"])
        batches = []
        for kind, wrap in ((collectors.Collector, to_torchrl_env), (Collector, lambda env: env)):
            env = make()
            env.set_seed(3)
            collector = kind(wrap(env), net, frames_per_batch=60, total_frames=120)
            batches.append(torch.cat([found.clone() for found in collector], -1))
            collector.shutdown()
        theirs, ours = batches
        for key in (("next", "observation"), ("next", "done"), ("next", "episode_reward"), "action"):
            assert torch.equal(ours[key], theirs[key]), key

    def test_there_and_back(self):
        theirs = self.envs()["one"]()
        assert to_torchrl_env(TorchRLWrapper(theirs)) is theirs
        assert to_torchrl_env(theirs) is theirs
        pytest.importorskip("torchrl.envs").check_env_specs(to_torchrl_env(GymEnv("Pendulum-v1")))
        with pytest.raises(TypeError, match=r"env: expected an environment of rollwright, got builtins\.int"):
            to_torchrl_env(3)


class TestSpecCheck:
    def test_what_is_no_environment_of_ours_is_named(self):
        with pytest.raises(TypeError, match=r"gymnasium.*GymWrapper"):
            check_env_specs(gymnasium.make("CartPole-v1"))

    def test_torchrl_checks_its_environments(self):
        envs = pytest.importorskip("torchrl.envs")
        check_env_specs(envs.GymEnv("CartPole-v1"), seed=3)

        class Wrong(envs.RewardSum):
            def transform_observation_spec(self, observation_spec):
                return observation_spec

        with pytest.raises((AssertionError, KeyError)):
            check_env_specs(envs.TransformedEnv(envs.GymEnv("CartPole-v1"), Wrong()))
