"""Bad input of every kind: the error's type, and that its message says what is wrong and what to do.

Each case does one wrong thing. The words that its message must hold name the argument (or the key, or the
environment) and what came, and end with the remedy.
"""

from __future__ import annotations

from typing import NamedTuple

import gymnasium
import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn

from rollwright.collectors import Collector, Interruptor, SyncDataCollector
from rollwright.collectors.utils import restore_next, split_trajectories
from rollwright.data import Bounded, Categorical, Composite, Unbounded
from rollwright.envs import EnvBase, GymEnv, SerialEnv, StepCounter, TransformedEnv
from rollwright.errors import EnvError, EnvKeyError, PolicyError, PolicyKeyError
from rollwright.testing.mocking_classes import CountingEnv, EnvWithDynamicSpec


class Case(NamedTuple):
    """``cause`` raises ``error`` with a message that holds ``words``."""

    name: str
    cause: object
    error: type[Exception]
    counters: tuple[str, ...]


def collect(env=CountingEnv, policy=None, **options):
    """Collect one batch."""
    options = {"frames_per_batch": 4, **options}
    with Collector(env, policy, **options) as collector:
        return collector.next()


def using(call, policy=None, env=CountingEnv, **options):
    """Make a good collector and misuse it."""
    with Collector(env, policy, frames_per_batch=4, total_frames=16, **options) as collector:
        call(collector)


def pendulum():
    return GymEnv("Pendulum-v1")


def cartpole():
    return GymEnv("CartPole-v1")


def linear(inputs=3, outputs=1, in_keys=("observation",), out_keys=("action",)):
    return TensorDictModule(nn.Linear(inputs, outputs), in_keys=list(in_keys), out_keys=list(out_keys))


def named_observation(name):
    env = CountingEnv()
    env.observation_spec = Composite({name: Unbounded((1,))})
    return env


def returns(value):
    return lambda td: value


def writes(value, key="action"):
    return lambda td: td.set(key, value)


class Takes(nn.Module):
    def forward(self, picture, pose):
        return picture


def missing_observation(td):
    return td["observatoin"]


# Environments that break their specs, each in one way.


class Bad(EnvBase):
    """A good environment, as long as ``outcome`` is not changed."""

    def __init__(self):
        super().__init__()
        self.observation_spec = Composite(position=Unbounded((2,)))
        self.action_spec = Bounded(-1.0, 1.0, (1,))

    def _reset(self, tensordict=None, **kwargs):
        return TensorDict({"position": torch.zeros(2)})

    def _step(self, tensordict):
        outcome = {"position": torch.zeros(2), "reward": torch.zeros(1), "done": torch.zeros(1, dtype=torch.bool)}
        return self.spoil(TensorDict(outcome), tensordict)

    def spoil(self, outcome, tensordict):
        return outcome

    def _set_seed(self, seed):
        pass


def bad(spoil):
    """An environment class of which ``spoil(outcome, tensordict)`` is what ``_step`` returns."""
    return type("Bad", (Bad,), {"spoil": lambda self, outcome, td: spoil(outcome, td)})


def bad_reset(reset):
    return type("Bad", (Bad,), {"_reset": lambda self, tensordict=None, **kwargs: reset()})


def raises(*_):
    raise OSError("cable unplugged")


class NoStep(Bad):
    _step = EnvBase._step


class NoReset(Bad):
    _reset = EnvBase._reset


class BatchSpec(EnvBase):
    def __init__(self):
        super().__init__(batch_size=[3])
        self.observation_spec = Composite(position=Unbounded((2,)))


class LeafSpec(EnvBase):
    def __init__(self):
        super().__init__()
        self.state_spec = Unbounded((2,))


# fmt: off
OPTIONS = [
    Case("no frames", lambda: collect(frames_per_batch=0), ValueError, ("frames_per_batch", "at least 1", "0")),
    Case("negative frames", lambda: collect(frames_per_batch=-4), ValueError, ("frames_per_batch", "at least 1", "-4")),
    Case("True frames", lambda: collect(frames_per_batch=True), TypeError, ("frames_per_batch", "integer", "True")),
    Case("frames in words", lambda: collect(frames_per_batch="200"), TypeError, ("frames_per_batch", "integer", "str")),
    Case("half a frame", lambda: collect(frames_per_batch=2.5), TypeError, ("frames_per_batch", "integer", "2.5")),
    Case("None frames", lambda: collect(frames_per_batch=None), TypeError, ("frames_per_batch", "integer", "None")),
    Case("no total", lambda: collect(total_frames=0), ValueError, ("total_frames", "-1", "0")),
    Case("negative total", lambda: collect(total_frames=-7), ValueError, ("total_frames", "-1", "-7")),
    Case("infinite total", lambda: collect(total_frames=float("inf")), (TypeError, ValueError), ("total_frames",
         "inf")),
    Case("total that does not divide, legacy", lambda: SyncDataCollector(CountingEnv, None, frames_per_batch=30,
         total_frames=100), ValueError, ("total_frames", "frames_per_batch=30", "100", "120")),
    Case("limit in words", lambda: collect(max_frames_per_traj="50"), TypeError, ("max_frames_per_traj", "str")),
    Case("random frames in words", lambda: collect(init_random_frames="5"), TypeError, ("init_random_frames", "str")),
    Case("limit on steps that are counted already", lambda: collect(TransformedEnv(CountingEnv(), StepCounter()),
         max_frames_per_traj=5), ValueError, ("max_frames_per_traj", "step_count", "Leave")),
    Case("misspelt option", lambda: collect(frame_per_batch=3), TypeError, ("Collector", "'frame_per_batch'",
         "'frames_per_batch'")),
    Case("option of workers", lambda: collect(restart_delay=3.0), TypeError, ("restart_delay", "num_collectors=")),
    Case("unknown option", lambda: collect(zzz=3), TypeError, ("Collector", "'zzz'", "frames_per_batch")),
    Case("no device", lambda: collect(device="gpu"), ValueError, ("device", "'gpu'", "cuda:0")),
    Case("no storing device", lambda: collect(storing_device=[1]), ValueError, ("storing_device", "[1]", "cpu")),
    Case("flag in words", lambda: collect(reset_at_each_iter="yes"), TypeError, ("reset_at_each_iter", "True or False",
         "'yes'")),
    Case("flag as number", lambda: collect(split_trajs=1), TypeError, ("split_trajs", "True or False", "1")),
    Case("exploration type in words", lambda: collect(exploration_type="random"), TypeError, ("exploration_type",
         "ExplorationType", "'random'", "Import")),
    Case("exploration mode, legacy", lambda: SyncDataCollector(CountingEnv, frames_per_batch=4,
         exploration_mode="greedy"), ValueError, ("exploration_mode", "'random'", "'greedy'")),
    Case("postproc", lambda: collect(postproc=3), TypeError, ("postproc", "callable", "int")),
    Case("postproc that returns nothing", lambda: collect(postproc=lambda td: None), TypeError, ("postproc",
         "TensorDict", "NoneType", "return")),
    Case("pre hook", lambda: collect(pre_collect_hook="log"), TypeError, ("pre_collect_hook", "callable", "'log'")),
    Case("post hook set later", lambda: using(lambda c: setattr(c, "post_collect_hook", 3)), TypeError,
         ("post_collect_hook", "callable", "3")),
    Case("split without ids", lambda: collect(split_trajs=True, track_traj_ids=False), ValueError, ("split_trajs",
         "track_traj_ids", "Drop")),
    Case("interruption without ids", lambda: collect(interruptor=Interruptor(), track_traj_ids=False), ValueError,
         ("interruptor", "track_traj_ids", "Drop")),
    Case("interruptor", lambda: collect(interruptor=object()), TypeError, ("interruptor", "object", "Interruptor()")),
    Case("one object without memory", lambda: collect(return_same_td=True, use_buffers=False), ValueError,
         ("return_same_td", "use_buffers=False", "Drop")),
    Case("buffers for growing frames", lambda: collect(EnvWithDynamicSpec, use_buffers=True), ValueError,
         ("use_buffers", "observation", "Leave use_buffers out")),
    Case("compiler by name", lambda: collect(compile_policy="max"), TypeError, ("compile_policy", "dictionary",
         "'max'")),
    Case("worker before the first", lambda: collect(worker_idx=-1), ValueError, ("worker_idx", "at least 0", "-1")),
    Case("factory", lambda: collect(policy_factory="make"), TypeError, ("policy_factory", "callable", "'make'")),
]

ENVIRONMENTS = [
    Case("a name of no version", lambda: collect("CartPole-v9"), EnvError, ("CartPole-v9", "v0", "v1")),
    Case("a misspelt name", lambda: collect("Cartpol-v1"), EnvError, ("Cartpol-v1", "CartPole")),
    Case("an environment's space", lambda: collect(gymnasium.make("CartPole-v1").action_space), TypeError,
         ("create_env_fn", "Discrete", "EnvBase")),
    Case("a callable that returns nothing", lambda: collect(lambda: None), TypeError, ("create_env_fn", "NoneType")),
    Case("two factories", lambda: collect([CountingEnv, CountingEnv]), ValueError, ("create_env_fn", "2", "SerialEnv")),
    Case("no factory", lambda: collect([]), ValueError, ("create_env_fn", "0")),
    Case("arguments for what is made", lambda: collect(CountingEnv(), create_env_kwargs={"max_steps": 3}), ValueError,
         ("create_env_kwargs", "made", "callable")),
    Case("arguments as a list", lambda: collect(create_env_kwargs=[3]), TypeError, ("create_env_kwargs", "dictionary",
         "list")),
    Case("step raises", lambda: collect(bad(raises)), EnvError, ("Bad", "step", "OSError", "cable unplugged")),
    Case("reset raises", lambda: collect(bad_reset(raises)), EnvError, ("Bad", "reset", "OSError", "cable unplugged")),
    Case("no _step", lambda: collect(NoStep), EnvError, ("NoStep", "_step", "define")),
    Case("no _reset", lambda: collect(NoReset), EnvError, ("NoReset", "_reset", "define")),
    Case("step returns an array", lambda: collect(bad(lambda o, td: o["position"])), EnvError, ("Bad", "_step",
         "TensorDict", "Return")),
    Case("step returns nothing", lambda: collect(bad(lambda o, td: None)), EnvError, ("Bad", "_step", "NoneType",
         "Return")),
    Case("step nests", lambda: collect(bad(lambda o, td: TensorDict({"next": o}))), EnvError, ("Bad", "'next'",
         "Return")),
    Case("step returns what it was given", lambda: collect(bad(lambda o, td: td.update(o))), EnvError, ("Bad", "given",
         "Return a new one")),
    Case("no observation", lambda: collect(bad(lambda o, td: o.exclude("position"))), EnvKeyError, ("Bad", "step",
         "'position'", "Return")),
    Case("no observation at reset", lambda: collect(bad_reset(lambda: TensorDict({}))), EnvKeyError, ("Bad", "reset",
         "'position'", "Return")),
    Case("no reward", lambda: collect(bad(lambda o, td: o.exclude("reward"))), EnvKeyError, ("Bad", "'reward'",
         "Return")),
    Case("no done", lambda: collect(bad(lambda o, td: o.exclude("done"))), EnvKeyError, ("Bad", "'done'", "Return")),
    Case("observation of another shape", lambda: collect(bad(lambda o, td: o.set("position", torch.zeros(3)))),
         EnvError, ("Bad", "'position'", "[3]", "[2]", "Reshape")),
    Case("observation of another dtype", lambda: collect(bad(lambda o, td: o.set("position", torch.zeros(2).double()))),
         EnvError, ("Bad", "'position'", "float64", "float32", "Cast")),
    Case("two rewards", lambda: collect(bad(lambda o, td: o.set("reward", torch.zeros(2)))), EnvError, ("Bad",
         "'reward'", "[2]", "[1]", "Reshape")),
    Case("flags as numbers", lambda: collect(bad(lambda o, td: o.set("done", torch.zeros(1)))), EnvError, ("Bad",
         "'done'", "float32", "bool", "Cast")),
    Case("done at once", lambda: collect(bad_reset(lambda: TensorDict({"position": torch.zeros(2), "done": torch.ones(1,
         dtype=torch.bool)}))), EnvError, ("Bad", "'done'", "reset", "allow_done_after_reset=True")),
    Case("spec without the batch size", BatchSpec, ValueError, ("observation_spec", "[3]", "Pass")),
    Case("states of a leaf", LeafSpec, TypeError, ("state_spec", "Composite", "Write")),
]

POLICIES = [
    Case("a number", lambda: collect(policy=3), TypeError, ("policy", "callable", "int")),
    Case("a class", lambda: collect(pendulum, Takes), TypeError, ("policy", "class Takes", "Takes(...)")),
    Case("arguments that are no entries", lambda: collect(pendulum, Takes()), TypeError, ("policy", "picture",
         "observation", "in_keys")),
    Case("a misspelt argument", lambda: collect(CountingEnv, lambda obsrvation, pose: 0), TypeError, ("policy",
         "obsrvation", "observation", "TensorDictModule")),
    Case("reads what is not there", lambda: collect(pendulum, linear(in_keys=["pixels"])), PolicyKeyError, ("policy",
         "'pixels'", "'observation'", "in_keys")),
    Case("writes no action", lambda: collect(pendulum, linear(out_keys=["acton"])), PolicyKeyError, ("policy",
         "'action'", "'acton'", "out_keys")),
    Case("a function that writes no action", lambda: collect(pendulum, lambda td: td), PolicyKeyError, ("policy",
         "'action'", "GymEnv", "Add")),
    Case("actions of another shape", lambda: collect(pendulum, linear(3, 2)), PolicyError, ("policy", "'action'", "[2]",
         "[1]", "GymEnv")),
    Case("an index where one-hot is meant", lambda: collect(cartpole, writes(torch.tensor([1]))), PolicyError,
         ("policy", "'action'", "one-hot", "categorical_action_encoding=True")),
    Case("logits where an index is meant", lambda: collect("CartPole-v1", writes(torch.ones(2))), PolicyError,
         ("policy", "'action'", "takes indices", "ProbabilisticActor")),
    Case("an action of one environment for many", lambda: collect(lambda: SerialEnv(2, pendulum),
         writes(torch.zeros(1)), frames_per_batch=4), (PolicyError, RuntimeError), ("action", "[2")),
    Case("NaN", lambda: collect(pendulum, writes(torch.full((1, ), torch.nan))), (PolicyError, EnvError), ("policy",
         "'action'", "NaN")),
    Case("NaN that the environment swallows", lambda: collect(Bad, writes(torch.full((1, ), torch.nan))), PolicyError,
         ("policy", "'action'", "NaN", "Look for")),
    Case("returns a tensor", lambda: collect(pendulum, returns(torch.zeros(1))), PolicyError, ("policy", "TensorDict",
         "Tensor", "Write the action")),
    Case("factory returns nothing", lambda: collect(policy_factory=lambda: None), TypeError, ("policy_factory",
         "return", "None")),
    Case("a misspelt entry", lambda: collect(pendulum, missing_observation), KeyError, ("observatoin", "observation")),
    Case("an action that the game does not have", lambda: collect(lambda: GymEnv("CartPole-v1",
         categorical_action_encoding=True), writes(torch.tensor(7))), (EnvError, PolicyError), ("CartPole", "7")),
]

METHODS = [
    Case("shut down", lambda: using(lambda c: (c.shutdown(), c.next())), RuntimeError, ("shut down", "Make a new one")),
    Case("reset of one that is not there", lambda: using(lambda c: c.reset(7), env=SerialEnv(2, CountingEnv)),
         IndexError, ("index=7", "batch [2]")),
    Case("an observation named as the collector's entry", lambda: collect(lambda: named_observation("collector")),
         ValueError, ("'collector'", "Rename")),
    Case("an observation named policy_version", lambda: collect(lambda: named_observation("policy_version"),
         track_policy_version=True), ValueError, ("'policy_version'", "Rename")),
    Case("reset of one of one", lambda: using(lambda c: c.reset(0)), RuntimeError, ("index=0", "CountingEnv",
         "reset()")),
    Case("reset beyond the batch", lambda: using(lambda c: c.reset(9), env=lambda: CountingEnv(batch_size=[2])),
         IndexError, ("9", "2")),
    Case("profile too late", lambda: using(lambda c: (c.next(), c.enable_profile())), RuntimeError, ("enable_profile",
         "before", "new collector")),
    Case("profile nothing", lambda: using(lambda c: c.enable_profile(num_rollouts=1)), ValueError, ("num_rollouts",
         "warmup_rollouts", "Raise")),
    Case("profile what is not there", lambda: using(lambda c: c.enable_profile(activities=["tpu"])), ValueError,
         ("activities", "cuda", "tpu")),
    Case("worker unknown", lambda: using(lambda c: c.worker_idx), RuntimeError, ("worker_idx", "Pass")),
    Case("state of something else", lambda: using(lambda c: c.load_state_dict({"weights": 1})), KeyError, ("state_dict",
         "env_state_dict", "weights")),
    Case("seed in words", lambda: using(lambda c: c.set_seed("one")), TypeError, ("seed", "int", "'one'")),
    Case("weights with another name", lambda: using(lambda c: c.update_policy_weights_({"w": torch.ones(1)}), linear(),
         pendulum), ValueError, ("weights", "module.weight", "'w'")),
    Case("weights of another shape", lambda: using(lambda c: c.update_policy_weights_(linear(3, 5)), linear(),
         pendulum), ValueError, ("weights", "module.weight", "[5, 3]", "[1, 3]")),
    Case("weights in words", lambda: using(lambda c: c.update_policy_weights_("latest"), linear(), pendulum), TypeError,
         ("weights", "state_dict", "str")),
    Case("weights twice", lambda: using(lambda c: c.update_policy_weights_(linear(), policy=linear()), linear(),
         pendulum), ValueError, ("policy_or_weights", "policy", "one way")),
    Case("weights for a random policy", lambda: using(lambda c: c.update_policy_weights_({"w": torch.ones(1)})),
         TypeError, ("RandomPolicy", "nn.Module", "Pass")),
    Case("weights for an unknown model", lambda: using(lambda c: c.update_policy_weights_(linear(), model_id="critic"),
         linear(), pendulum), ValueError, ("model_id", "'policy'", "'critic'")),
    Case("weights for another worker", lambda: using(lambda c: c.update_policy_weights_({3: linear()}), linear(),
         pendulum), ValueError, ("worker", "0", "3")),
    Case("a path that leads nowhere", lambda: using(lambda c: c.cascade_execute("env.nothing")), AttributeError,
         ("env.nothing", "nothing")),
    Case("arguments that do not pair", lambda: using(lambda c: c.map_fn("reset", [(), ()], [{}])), ValueError,
         ("list_of_args", "list_of_kwargs", "2", "1")),
    Case("split without boundaries", lambda: split_trajectories(TensorDict({"x": torch.zeros(3)}, [3])), KeyError,
         ("traj_ids", "done", "track_traj_ids=True")),
    Case("split without time", lambda: split_trajectories(TensorDict({})), ValueError, ("rollout_tensordict", "[]",
         "Pass")),
    Case("restore what is whole", lambda: restore_next(collect()), KeyError, ("batch", "compact_obs=True")),
    Case("no spec for random actions", lambda: __import__("rollwright.modules").modules.RandomPolicy("action"),
         TypeError, ("action_spec", "str", "env.action_spec")),
]

# fmt: on
CASES = OPTIONS + ENVIRONMENTS + POLICIES + METHODS


def test_there_are_thirty_kinds_and_more():
    assert len({case.name for case in CASES}) == len(CASES) >= 30


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_error_says_what_is_wrong_and_what_to_do(case):
    with pytest.raises(case.error) as caught:
        case.cause()
    message = str(caught.value)
    for word in case.counters:
        assert word in message, f"{word!r} is not in: {message}"
    assert len(message) < 1500  # read, not scrolled


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("name", ["device", "policy_device", "env_device", "storing_device"])
def test_a_cuda_device_where_there_is_none(name):
    with pytest.raises(ValueError, match=rf"{name}.*'cuda:0'.*no CUDA device.*'cpu'"):
        collect(**{name: "cuda:0"})


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_cuda_graph_where_there_is_no_cuda():
    with pytest.raises(ValueError, match=r"cudagraph_policy.*CUDA device.*Leave it out"):
        collect(cudagraph_policy=True)


def test_the_environments_own_error_is_the_cause():
    with pytest.raises(EnvError) as caught:
        collect(bad(raises))
    assert isinstance(caught.value.__cause__, OSError)


def test_the_policys_own_error_keeps_its_type():
    with pytest.raises(ZeroDivisionError):
        collect(policy=lambda td: 1 / 0)


def test_a_batched_environment_names_the_one_that_failed():
    class Third(CountingEnv):
        def _step(self, tensordict):
            raise OSError("cable unplugged")

    with pytest.raises(EnvError, match=r"cable unplugged") as caught:
        collect(lambda: SerialEnv(4, [CountingEnv, CountingEnv, Third, CountingEnv]), frames_per_batch=4)
    assert "2" in str(caught.value)
    assert "Third" in str(caught.value)


def test_values_outside_the_spec_are_found_where_asked_for():
    class Outside(Bad):
        def __init__(self):
            super().__init__()
            self.run_type_checks = True
            self.observation_spec = Composite(position=Categorical(3, shape=(2,), dtype=torch.float32))

        def spoil(self, outcome, tensordict):
            return outcome.set("position", torch.tensor([1.0, 9.0]))

    with pytest.raises(EnvError, match=r"Outside.*'position'.*outside"):
        collect(Outside)


def test_an_environment_of_another_library_is_not_called():
    class OtherEnv(torch.nn.Module):
        def forward(self, tensordict=None):
            raise AssertionError

    with pytest.raises(TypeError, match=r"create_env_fn: expected the name of .*OtherEnv"):
        Collector(OtherEnv(), frames_per_batch=4)


class NoAction(EnvBase):
    """Steps by itself."""

    def __init__(self):
        super().__init__()
        self.observation_spec = Composite(observation=Unbounded((3,)))

    def _reset(self, tensordict=None, **kwargs):
        return TensorDict({"observation": torch.zeros(3)})

    def _step(self, tensordict):
        return TensorDict({"observation": torch.zeros(3), "reward": 1.0, "done": False})

    def _set_seed(self, seed):
        pass


@pytest.mark.parametrize("policy", [None, linear()])
def test_an_environment_without_an_action_is_refused(policy):
    for make in (NoAction, lambda: SerialEnv(2, NoAction), lambda: TransformedEnv(NoAction(), StepCounter())):
        with pytest.raises(
            EnvError, match=r"create_env_fn: .*NoAction.* whose action_spec is empty\. Set it in the con"
        ):
            Collector(make, policy, frames_per_batch=4)
    assert "action" not in NoAction().rollout(3)  # which may be meant


@pytest.mark.parametrize("options", [{"num_collectors": 2}, {"backend": "process"}])
def test_a_subclass_makes_no_workers(options):
    class Mine(Collector):
        pass

    name = next(iter(options))
    with pytest.raises(
        TypeError, match=rf"{name}: Mine collects in this process, .*got {name}=.*Call Collector itself"
    ):
        Mine(CountingEnv, None, frames_per_batch=4, **options)
