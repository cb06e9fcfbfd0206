"""Exploration, greedy values and projections on arrays: changes that act in a running policy, and what is refused."""

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import InteractionType as Type
from tensordict.nn import TensorDictModule, TensorDictSequential
from tests.variants import in_turn
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from rollwright.collectors import Collector
from rollwright.data import Bounded, Categorical
from rollwright.envs import GymEnv, InitTracker, TransformedEnv
from rollwright.errors import NotNative
from rollwright.modules import (
    AdditiveGaussianModule,
    EGreedyModule,
    OrnsteinUhlenbeckProcessModule,
    QValueActor,
    SafeModule,
)
from rollwright.policies import array_policy, compile_policy


def array(policy, kind=Type.RANDOM, batch=(3,)):
    return array_policy(policy, exploration_type=kind, batch_shape=batch, available=["observation"])


def greedy(eps):
    network = nn.Linear(4, 50)
    module = EGreedyModule(Categorical(50), eps_init=eps, eps_end=0.0, annealing_num_steps=10)
    return TensorDictSequential(QValueActor(network, spec=Categorical(50)), module), module


@pytest.mark.parametrize("compiled", [False, True])
def test_annealing_acts_in_a_running_policy(compiled):
    policy, module = greedy(1.0)
    flat, observation = array(policy, batch=()), np.ones(4, np.float32)
    with torch.no_grad():
        if compiled:
            flat = compile_policy(flat, example={"observation": observation})
            assert flat.how.startswith("NumPy program")
        place = flat.out_keys.index("action")
        flat.start(80)
        assert len({int(flat(observation)[place]) for _ in range(40)}) > 10
        module.step(10)
        assert len({int(flat(observation)[place]) for _ in range(40)}) == 1


class Operations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


SPEC = Bounded(-1, 1, shape=(2,))


@pytest.mark.parametrize(
    ("module", "data", "most"),
    [
        (AdditiveGaussianModule(SPEC, sigma_init=0.01, sigma_end=0.01), {}, 8),  # draw, scale, add, compare
        (AdditiveGaussianModule(SPEC, sigma_init=99.0), {}, 10),  # and project
        (EGreedyModule(Categorical(9), annealing_num_steps=10), {"action": torch.zeros(3, dtype=torch.int64)}, 5),
        (OrnsteinUhlenbeckProcessModule(SPEC), {"is_init": torch.zeros(3, 1, dtype=torch.bool)}, 19),
    ],
)
def test_the_work_of_exploration(module, data, most):
    td = TensorDict({"action": torch.zeros(3, 2), **data}, batch_size=[3])
    if "is_init" in data:
        td = module(td)  # which begins the noise
    with torch.no_grad(), Operations() as operations:
        module(td)
    assert len(operations.names) <= most, operations.names


def test_exploration_acts_at_random_alone():
    policy, _ = greedy(1.0)
    assert len(array(policy, Type.DETERMINISTIC).nodes) == len(array(policy).nodes) - 1


def test_a_hook_that_is_added_is_noticed():
    module = SafeModule(nn.Linear(4, 2), ["observation"], ["action"], spec=Bounded(-1, 1, shape=(2,)), safe=True)
    flat = array(module)
    flat.start(1)
    module.register_forward_hook(lambda module, inputs, td: td)
    with pytest.raises(NotNative, match="has changed"):
        flat.start(1)
    with pytest.raises(NotNative, match="it has hooks"):
        array(module)


def test_a_spec_that_is_given_later_acts():
    noise = AdditiveGaussianModule(sigma_init=1.0)
    policy = TensorDictSequential(TensorDictModule(nn.Linear(4, 2), ["observation"], ["action"]), noise)
    noise.spec = Bounded(-0.01, 0.01, shape=(2,))
    flat = array(policy)
    flat.start(1)
    with torch.no_grad():
        (action,) = flat(np.ones((3, 4), np.float32))
    assert np.abs(action).max() <= 0.0101


def with_process(spec, **options):
    torch.manual_seed(0)
    return TensorDictSequential(
        TensorDictModule(nn.Linear(3, 1), ["observation"], ["action"]), OrnsteinUhlenbeckProcessModule(spec, **options)
    )


def test_noise_that_cannot_begin_again_is_named():
    with pytest.raises(NotNative, match=r"reads 'is_init': append InitTracker\(\)"):
        array(with_process(Bounded(-1, 1, shape=(1,))))


PROCESSES = {
    "plain": {"safe": False},
    "projected": {"sigma": 9.0, "dt": 1.0},
    "annealed": {"sigma_min": 0.1, "n_steps_annealing": 5, "x0": torch.tensor([0.3]), "mu": 0.5},
}


OPTIONS = [{}, {"init_random_frames": 16}, {"compile_policy": {"backend": "eager"}}]


@pytest.mark.parametrize(("options", "num_envs"), in_turn(OPTIONS, [3, 1]))
@pytest.mark.parametrize("process", PROCESSES)
def test_batches_of_a_process_are_those_of_the_plain_path(process, num_envs, options):
    found = []
    if "init_random_frames" in options:
        options = {"init_random_frames": 16 * num_envs}
    for more in (options, {"use_buffers": False, **options, "compile_policy": False}):
        env = GymEnv("Pendulum-v1", max_episode_steps=10, **({} if num_envs == 1 else {"num_envs": num_envs}))
        env = TransformedEnv(env, InitTracker())
        policy = with_process(GymEnv("Pendulum-v1").action_spec, **PROCESSES[process])
        collector = Collector(env, policy, frames_per_batch=16 * num_envs, total_frames=-1, **more)
        collector.set_seed(0)
        torch.manual_seed(1)
        batches = [collector.next().clone(), collector.next().clone()]
        collector.reset()
        batches.append(collector.next().clone())
        found.append((torch.cat(batches, -1), collector.stats()["paths"]["policy"]))
        collector.shutdown()
    (batch, how), (expected, _) = found
    assert how.startswith("native")
    assert set(batch.keys(True, True)) == set(expected.keys(True, True))
    for key in batch.keys(True, True):
        if "compile_policy" in options:
            torch.testing.assert_close(batch[key], expected[key], rtol=1e-3, atol=1e-4)
        else:
            assert torch.equal(batch[key], expected[key]), key


def collected(use_buffers):
    torch.manual_seed(0)
    env = GymEnv("CartPole-v1")
    actor = QValueActor(nn.Linear(4, 2), spec=env.action_spec)
    policy = TensorDictSequential(actor, EGreedyModule(env.action_spec, eps_init=0.5))
    collector = Collector(env, policy, frames_per_batch=64, total_frames=64, use_buffers=use_buffers)
    collector.set_seed(0)
    torch.manual_seed(1)
    (batch,) = collector
    path = collector.stats()["paths"]["policy"]
    collector.shutdown()
    return batch, path


def test_batches_of_epsilon_greedy_values():
    (batch, path), (expected, plain) = collected(None), collected(False)
    assert (path.split(":")[0], plain.split(":")[0].split(",")[0]) == ("native", "plain")
    for key in ("observation", "action", "action_value", "chosen_action_value"):
        assert torch.equal(batch[key], expected[key])


def test_noise_of_each_environment_goes_on_until_its_episode_ends():
    env = TransformedEnv(GymEnv("Pendulum-v1", max_episode_steps=10), InitTracker())
    spec = env.action_spec
    policy = TensorDictSequential(
        TensorDictModule(nn.Linear(3, 1), ["observation"], ["action"]),
        OrnsteinUhlenbeckProcessModule(spec),
        TensorDictModule(torch.clone, ["_ou_steps"], ["count"]),
    )
    collector = Collector(env, policy, frames_per_batch=25, total_frames=25)
    (batch,) = collector
    collector.shutdown()
    assert batch["is_init"].sum() == 3
    assert batch["count"].tolist() == [*range(1, 11), *range(1, 11), *range(1, 6)]
