"""TorchRL's actors, values and exploration on arrays give the bits of the plain path, where torchrl is installed."""

import copy
from functools import partial

import numpy as np
import pytest
import torch
from tensordict.nn import InteractionType as Type
from tensordict.nn import NormalParamExtractor, TensorDictModule, TensorDictSequential
from torch import nn

from rollwright.collectors import Collector
from rollwright.policies import array_policy
from rollwright.policies.nodes import Ask

modules = pytest.importorskip("torchrl.modules")
data = pytest.importorskip("torchrl.data")

N = 3


def net(outputs=N):
    return modules.MLP(in_features=4, out_features=outputs, num_cells=[16, 16], activation_class=nn.Tanh)


def gaussian(kind, **options):
    body = nn.Sequential(net(2 * N), NormalParamExtractor())
    module = modules.SafeModule(body, ["observation"], ["loc", "scale"])
    options = {"return_log_prob": True, "default_interaction_type": Type.RANDOM, **options}
    return modules.ProbabilisticActor(module, ["loc", "scale"], distribution_class=kind, **options)


def logits(kind, **options):
    module = TensorDictModule(net(), ["observation"], ["logits"])
    options = {"return_log_prob": True, "default_interaction_type": Type.RANDOM, **options}
    return modules.ProbabilisticActor(module, ["logits"], distribution_class=kind, **options)


def masked():
    def mask(observation):
        allowed = observation[..., :N] > 0
        allowed[..., 0] = True
        return allowed

    parts = TensorDictSequential(
        TensorDictModule(net(), ["observation"], ["logits"]), TensorDictModule(mask, ["observation"], ["mask"])
    )
    options = {"return_log_prob": True, "default_interaction_type": Type.RANDOM}
    return modules.ProbabilisticActor(
        parts, ["logits", "mask"], distribution_class=modules.MaskedCategorical, **options
    )


def box(low=-1.0):
    return data.Bounded(low, 1.0, shape=(N,))


POLICIES = {
    "tanh normal": lambda: gaussian(modules.TanhNormal),
    "tanh normal without log-prob": lambda: gaussian(modules.TanhNormal, return_log_prob=False),
    "tanh normal with bounds": lambda: gaussian(
        modules.TanhNormal, distribution_kwargs={"low": -2 * torch.ones(N), "high": torch.tensor([1.0, 2.0, 3.0])}
    ),
    "tanh normal with tanh_loc": lambda: gaussian(
        modules.TanhNormal, distribution_kwargs={"tanh_loc": True, "safe_tanh": False}
    ),
    "partial": lambda: gaussian(partial(modules.TanhNormal, low=-3.0)),
    "independent normal": lambda: gaussian(modules.IndependentNormal),
    "safe": lambda: gaussian(modules.IndependentNormal, spec=box(-0.1), safe=True),
    "truncated normal": lambda: gaussian(modules.TruncatedNormal),
    "one-hot": lambda: logits(modules.OneHotCategorical),
    "categorical": lambda: logits(torch.distributions.Categorical),
    "masked": masked,
    "delta": lambda: modules.ProbabilisticActor(
        TensorDictModule(net(), ["observation"], ["param"]), ["param"], distribution_class=modules.TanhDelta, spec=box()
    ),
    "greedy": lambda: modules.QValueActor(net(), spec=data.Categorical(N), in_keys=["observation"]),
    "greedy, one-hot": lambda: modules.QValueActor(net(), spec=data.OneHot(N), in_keys=["observation"]),
    "epsilon-greedy": lambda: TensorDictSequential(
        modules.QValueActor(net(), spec=data.OneHot(N), in_keys=["observation"]),
        modules.EGreedyModule(data.OneHot(N), eps_init=0.5),
    ),
    "noise": lambda: TensorDictSequential(
        modules.Actor(net(), in_keys=["observation"], spec=box()),
        modules.TanhModule(in_keys=["action"], spec=box()),
        modules.AdditiveGaussianModule(box(), sigma_init=0.9),
    ),
}


@pytest.mark.parametrize(("kind", "batch"), [(Type.RANDOM, ()), (Type.RANDOM, (3,)), (Type.DETERMINISTIC, (3,))])
@pytest.mark.parametrize("name", list(POLICIES))
@pytest.mark.filterwarnings("ignore")
def test_theirs_on_arrays(lab, name, batch, kind):
    policy = POLICIES[name]()
    flat = array_policy(copy.deepcopy(policy), exploration_type=kind, batch_shape=batch, available=lab.available)
    assert not any(isinstance(node, Ask) for node in flat.nodes)
    torch.manual_seed(5)
    expected = lab.plain_steps(policy, batch, kind)
    state = torch.get_rng_state()
    torch.manual_seed(5)
    written = lab.flat_steps(flat, batch, kind)
    assert torch.equal(torch.get_rng_state(), state)
    for ours, theirs in zip(written, expected, strict=True):
        assert set(ours) == set(theirs)
        for key, value in ours.items():
            np.testing.assert_array_equal(value, theirs[key].numpy(), err_msg=str(key))


@pytest.mark.parametrize(
    ("name", "phrase"),
    [
        ("tanh normal", "built at each step"),
        ("independent normal", "built at each step"),
        ("one-hot", "built at each step"),
        ("masked", "built at each step"),
    ],
)
def test_known_distributions_are_not_built(lab, name, phrase):
    flat = array_policy(POLICIES[name](), exploration_type=Type.RANDOM, batch_shape=(3,), available=lab.available)
    assert phrase not in flat.how


@pytest.mark.parametrize("options", [{}, {"sigma_min": 0.02, "n_steps_annealing": 20}], ids=["constant", "falling"])
@pytest.mark.filterwarnings("ignore")
def test_their_process_of_noise_on_arrays(options):
    envs = pytest.importorskip("torchrl.envs")
    found = []
    for given in ({}, {"use_buffers": False}):
        env = envs.TransformedEnv(envs.GymEnv("Pendulum-v1"), envs.InitTracker())
        env.set_seed(0)
        torch.manual_seed(3)
        actor = modules.Actor(modules.MLP(in_features=3, out_features=1, num_cells=[8]), spec=env.action_spec)
        noise = modules.OrnsteinUhlenbeckProcessModule(env.action_spec, **options)
        policy = TensorDictSequential(actor, noise)
        with Collector(env, policy, frames_per_batch=230, **given) as collector:
            found.append(collector.next().clone())
            how = collector.stats()["paths"]["policy"]
        assert how.startswith("plain" if given else "native"), how
    assert all(torch.equal(found[0][key], found[1][key]) for key in found[1].keys(True, True))
    assert found[0]["action"].std() > 0
