"""Actors, values of actions and exploration."""

from functools import partial

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import CompositeDistribution, NormalParamExtractor, TensorDictModule, TensorDictSequential
from torch import distributions as D
from torch import nn

from rollwright.collectors import Collector
from rollwright.data import Bounded, Categorical, Composite, MultiOneHot, OneHot
from rollwright.envs import SerialEnv
from rollwright.modules import (
    Actor,
    AdditiveGaussianModule,
    EGreedyModule,
    ExplorationType,
    IndependentNormal,
    OrnsteinUhlenbeckProcessModule,
    ProbabilisticActor,
    QValueActor,
    QValueModule,
    SafeModule,
    SafeSequential,
    TanhModule,
    TanhNormal,
    set_exploration_modules_spec_from_env,
    set_exploration_type,
)
from rollwright.testing.mocking_classes import ContinuousActionVecMockEnv, CountingEnv


def gaussian(**options):
    body = TensorDictModule(nn.Sequential(nn.Linear(4, 4), NormalParamExtractor()), ["observation"], ["loc", "scale"])
    return ProbabilisticActor(body, ["loc", "scale"], distribution_class=TanhNormal, **options)


def test_probabilistic_actor_draws_from_its_distribution():
    actor = gaussian(return_log_prob=True, spec=Bounded(-1, 1, shape=(2,)))
    td = TensorDict(observation=torch.randn(3, 4), batch_size=3)
    with set_exploration_type(ExplorationType.RANDOM):
        out = actor(td)
    assert out["action"].shape == (3, 2)
    score = actor.get_dist(td).log_prob(out["action"])
    torch.testing.assert_close(out["action_log_prob"], score, rtol=1e-3, atol=1e-3)
    assert list(actor.spec.keys(True, True)) == ["action"]


def test_probabilistic_actor_of_several_distributions():
    body = TensorDictModule(
        lambda x: (x[..., :2], x[..., 2:]), ["observation"], [("params", "a", "logits"), ("params", "b", "logits")]
    )
    settings = {"distribution_map": {"a": D.Categorical, "b": D.Categorical}}
    actor = ProbabilisticActor(body, ["params"], distribution_class=CompositeDistribution, distribution_kwargs=settings)
    assert set(actor(TensorDict(observation=torch.randn(3, 4), batch_size=3)).keys()) >= {"a", "b"}
    with pytest.raises(KeyError, match="distribution_map"):
        ProbabilisticActor(body, ["params"], distribution_class=CompositeDistribution)


def test_safe_modules_project():
    spec = Bounded(-1, 1, shape=(2,))
    module = SafeModule(nn.Identity(), ["x"], ["action"], spec=spec, safe=True)
    assert module(x=torch.tensor([5.0, 0.5])).tolist() == [1.0, 0.5]
    assert spec.is_in(SafeSequential(module).spec["action"].rand())
    with pytest.raises(RuntimeError, match="safe=True needs the spec"):
        SafeModule(nn.Identity(), ["x"], ["action"], safe=True)
    with pytest.raises(TypeError, match="spec: expected a TensorSpec"):
        Actor(nn.Identity(), spec=3)


@pytest.mark.parametrize("spec", [Categorical(3), OneHot(3), Composite(action=Categorical(3))])
def test_best_actions(spec):
    values = torch.tensor([[0.0, 2.0, 1.0], [3.0, 2.0, 1.0]])
    td = QValueActor(nn.Identity(), spec=spec)(TensorDict(observation=values, batch_size=2))
    leaf = spec["action"] if isinstance(spec, Composite) else spec
    assert bool(leaf.expand(2, *leaf.shape).is_in(td["action"].to(leaf.dtype)))
    assert td["chosen_action_value"].tolist() == [[2.0], [3.0]]


@pytest.mark.parametrize("composite", [False, True])
def test_best_actions_of_several_choices(composite):
    spec = MultiOneHot([3, 2])
    spec = Composite(action=spec) if composite else spec
    action, _, chosen = QValueActor(nn.Identity(), spec=spec)(observation=torch.tensor([0.0, 2.0, 1.0, 4.0, 3.0]))
    assert (action.tolist(), chosen.tolist()) == ([0, 1, 0, 1, 0], [6.0])


def test_best_of_allowed_actions():
    module = QValueModule("categorical", action_mask_key="mask")
    action, _, chosen = module(action_value=torch.tensor([1.0, 5.0]), mask=torch.tensor([True, False]))
    assert (int(action), chosen.tolist()) == (0, [1.0])


def test_bad_values_are_refused():
    with pytest.raises(ValueError, match="action_space: expected"):
        QValueModule()
    for module in (partial(QValueModule), partial(QValueActor, nn.Identity())):
        with pytest.raises(ValueError, match=r"spec: 'mult_one_hot' needs .* env.action_spec"):
            module(action_space="mult_one_hot")
    with pytest.raises(ValueError, match="action_space: expected that of the spec"):
        QValueActor(nn.Identity(), spec=OneHot(3), action_space="categorical")
    with pytest.raises(KeyError, match="action_value"):
        QValueActor(TensorDictModule(nn.Identity(), ["x"], ["y"]), action_space="categorical")
    with pytest.raises(RuntimeError, match="eps_end"):
        EGreedyModule(Categorical(2), eps_init=0.1, eps_end=0.2)


def test_epsilon_greedy_replaces_a_share():
    module = EGreedyModule(Categorical(1000), eps_init=0.3, eps_end=0.1, annealing_num_steps=100)
    td = TensorDict(action=torch.full((5000,), -1), batch_size=5000)
    share = float((module(td.clone())["action"] >= 0).float().mean())
    assert 0.25 < share < 0.35
    module.step(50)
    torch.testing.assert_close(module.eps, torch.tensor(0.2))
    module.step(500)
    torch.testing.assert_close(module.eps, torch.tensor(0.1))
    assert "eps" in module.state_dict()
    with set_exploration_type(ExplorationType.DETERMINISTIC):
        assert bool((module(td.clone())["action"] == -1).all())


def test_additive_noise_stays_in_bounds():
    module = AdditiveGaussianModule(Bounded(-1, 1, shape=(2,)), sigma_init=3.0)
    action = module(TensorDict(action=torch.zeros(500, 2), batch_size=500))["action"]
    assert float(action.abs().max()) == 1
    assert float(action.std()) > 0.5
    with pytest.raises(RuntimeError, match="spec"):
        AdditiveGaussianModule()(TensorDict(action=torch.zeros(2)))


@pytest.mark.parametrize("use_buffers", [None, False])
def test_additive_noise_takes_the_spec_of_a_collectors_environment(use_buffers):
    noise = AdditiveGaussianModule(sigma_init=9.0)
    policy = TensorDictSequential(TensorDictModule(nn.Linear(7, 7), ["observation"], ["action"]), noise)
    env = SerialEnv(2, ContinuousActionVecMockEnv)
    for batch in Collector(env, policy, frames_per_batch=4, total_frames=4, use_buffers=use_buffers):
        assert env.action_spec_unbatched.expand(2, 2, 7).is_in(batch["action"])
    assert noise.spec["action"] == env.action_spec_unbatched
    set_exploration_modules_spec_from_env(policy, CountingEnv())  # it has one
    assert noise.spec["action"] == env.action_spec_unbatched


def test_ornstein_uhlenbeck_noise_is_reset_by_environment():
    module = OrnsteinUhlenbeckProcessModule(Bounded(-9, 9, shape=(2,)), sigma=0.0, theta=0.5, mu=1.0, dt=1.0)
    td = TensorDict(action=torch.zeros(2, 2), is_init=torch.ones(2, 1, dtype=torch.bool), batch_size=2)
    td = module(td)
    td["is_init"] = torch.tensor([[False], [True]])
    td = module(td.set("action", torch.zeros(2, 2)))
    assert td["action"].tolist() == [[0.75, 0.75], [0.5, 0.5]]
    assert td["_ou_steps"].tolist() == [2, 1]
    with pytest.warns(UserWarning, match="InitTracker"):
        module(TensorDict(action=torch.zeros(2)))


def test_tanh_module_takes_bounds_of_specs():
    module = TanhModule(in_keys=["action"], spec=Bounded(-2, 4, shape=(1,)))
    assert module(action=torch.tensor([0.0])).tolist() == [1.0]
    with pytest.raises(ValueError, match="low: expected that of the spec"):
        TanhModule(in_keys=["action"], spec=Bounded(-2, 4, shape=(1,)), low=-3.0)


def test_modules_in_a_sequence():
    actor = TensorDictSequential(
        QValueActor(nn.Linear(4, 3), spec=Categorical(3)), EGreedyModule(Categorical(3), eps_init=0.0, eps_end=0.0)
    )
    td = actor(TensorDict(observation=torch.randn(5, 4), batch_size=5))
    assert torch.equal(td["action"], td["action_value"].argmax(-1))
    assert IndependentNormal(torch.zeros(2), 1.0).sample().shape == (2,)


@pytest.mark.parametrize("batch", [(), (1,), (3,), (2, 3)])
@pytest.mark.parametrize("of", [(), (1,), (5, 3)])
def test_of_a_spec_by_itself_all_but_the_action_is_a_batch(of, batch):
    actor = QValueActor(nn.Linear(3, 4), spec=OneHot(4, shape=(*of, 4)))
    assert actor(TensorDict(observation=torch.ones(*batch, 3), batch_size=batch))["action"].shape == (*batch, 4)


def test_of_a_composite_only_its_own_shape_is_a_batch():
    td = TensorDict(observation=torch.ones(1, 3), batch_size=[1])
    QValueActor(nn.Linear(3, 4), spec=Composite(action=OneHot(4, shape=(1, 4)), shape=(1,)))(td)
    with pytest.raises(RuntimeError, match=r"shape \[1, 4\], and by its spec it would have \[1, 1, 4\]"):
        QValueActor(nn.Linear(3, 4), spec=Composite(action=OneHot(4, shape=(1, 4))))(td)
