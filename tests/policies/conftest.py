"""Policies that must run on arrays, and how to compare one with the plain path."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import (
    AddStateIndependentNormalScale,
    CompositeDistribution,
    NormalParamExtractor,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictModuleWrapper,
    TensorDictSequential,
    set_interaction_type,
)
from tensordict.nn import InteractionType as Type
from tensordict.nn.distributions import Delta
from torch import distributions as D
from torch import nn

from rollwright.data import Bounded, Categorical, OneHot
from rollwright.modules import (
    Actor,
    AdditiveGaussianModule,
    EGreedyModule,
    IndependentNormal,
    MaskedCategorical,
    OneHotCategorical,
    ProbabilisticActor,
    QValueActor,
    SafeModule,
    SafeSequential,
    TanhModule,
    TanhNormal,
    TruncatedNormal,
)

N_IN, N_ACTIONS = 4, 3


def net(outputs: int = N_ACTIONS, activation: Callable[[], nn.Module] = nn.Tanh, hidden: int = 16) -> nn.Module:
    return nn.Sequential(
        nn.Linear(N_IN, hidden), activation(), nn.Linear(hidden, hidden), activation(), nn.Linear(hidden, outputs)
    )


def sampled(module: Any, parameters: Any, kind: Any, **options: Any) -> ProbabilisticTensorDictSequential:
    options = {"return_log_prob": True, "default_interaction_type": Type.RANDOM, **options}
    return ProbabilisticTensorDictSequential(
        *(module if isinstance(module, list) else [module]),
        ProbabilisticTensorDictModule(
            parameters, options.pop("out_keys", ["action"]), distribution_class=kind, **options
        ),
    )


def logits_policy(**options: Any) -> ProbabilisticTensorDictSequential:
    network = net(**{k: options.pop(k) for k in ("outputs", "activation", "hidden") if k in options})
    kind = options.pop("kind", D.Categorical)
    return sampled(TensorDictModule(network, ["observation"], ["logits"]), ["logits"], kind, **options)


def gaussian_policy(*, split: bool = True, kind: Any = D.Normal, **options: Any) -> ProbabilisticTensorDictSequential:
    head = NormalParamExtractor() if split else AddStateIndependentNormalScale(N_ACTIONS)
    body = nn.Sequential(net(2 * N_ACTIONS if split else N_ACTIONS), head)
    return sampled(TensorDictModule(body, ["observation"], ["loc", "scale"]), ["loc", "scale"], kind, **options)


def independent_normal(**parameters: torch.Tensor) -> D.Distribution:
    return D.Independent(D.Normal(**parameters), 1)


class Outer(nn.Module):
    """A module of the user's own, with several outputs and memory that it uses again."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(N_IN, N_ACTIONS)
        self.cell = nn.GRUCell(N_IN, 5)
        self.register_buffer("kept", torch.zeros(()))

    def forward(self, observation: torch.Tensor, h: torch.Tensor) -> tuple[torch.Tensor, ...]:
        self.kept += 1
        flat_h = self.cell(observation.reshape(-1, N_IN), h.reshape(-1, 5)).reshape(h.shape)
        return self.lin(observation), flat_h, self.kept.expand(observation.shape[:-1])


def nested_sequence() -> TensorDictSequential:
    trunk = TensorDictSequential(
        TensorDictModule(nn.Linear(N_IN, 8), ["observation"], [("agent", "hidden")]),
        TensorDictModule(nn.ReLU(), [("agent", "hidden")], [("agent", "hidden")]),
    )
    head = TensorDictModule(nn.Linear(8, N_ACTIONS), [("agent", "hidden")], ["logits"])
    value = TensorDictModule(nn.Linear(8, 1), [("agent", "hidden")], ["_value"])
    return TensorDictSequential(trunk, value, sampled(head, ["logits"], D.Categorical))


def two_draws() -> ProbabilisticTensorDictSequential:
    options = {"return_log_prob": True, "default_interaction_type": Type.RANDOM}
    return ProbabilisticTensorDictSequential(
        TensorDictModule(net(), ["observation"], ["logits"]),
        ProbabilisticTensorDictModule(["logits"], ["choice"], distribution_class=D.OneHotCategorical, **options),
        TensorDictModule(nn.Sequential(nn.Linear(N_ACTIONS, 2), NormalParamExtractor()), ["choice"], ["loc", "scale"]),
        ProbabilisticTensorDictModule(["loc", "scale"], ["action"], distribution_class=D.Normal, **options),
        return_composite=True,
    )


class Named(TensorDictModule):
    """A subclass that changes nothing but its construction."""

    def __init__(self) -> None:
        super().__init__(net(), in_keys=["observation"], out_keys=["action"])

    def greet(self) -> str:
        return "hello"


def methods() -> TensorDictSequential:
    class Two(nn.Module):
        def scaled(self, x: torch.Tensor, *, by: float) -> torch.Tensor:
            return x * by

    def named(a: torch.Tensor, b: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"difference": a - b, "total": a + b}

    return TensorDictSequential(
        TensorDictModule(Two(), ["observation"], ["a"], method="scaled", method_kwargs={"by": 2.0}),
        TensorDictModule(lambda *, x, y: x * y, {"x": "a", "y": "observation"}, ["b"]),
        TensorDictModule(named, ["a", "b"], ["total", "difference"]),
        TensorDictModule(lambda x: (x + 1, x), ["total"], ["action", "_"]),
    )


def probs_policy(**options: Any) -> ProbabilisticTensorDictSequential:
    body = nn.Sequential(net(), nn.Softmax(-1))
    return sampled(TensorDictModule(body, ["observation"], ["probs"]), ["probs"], D.Categorical, **options)


def masked_policy(**options: Any) -> ProbabilisticTensorDictSequential:
    """The first outcome is allowed, and those of a positive input."""

    def mask(observation: torch.Tensor) -> torch.Tensor:
        allowed = observation[..., :N_ACTIONS] > 0
        allowed[..., 0] = True
        return allowed

    parts = [TensorDictModule(net(), ["observation"], ["logits"]), TensorDictModule(mask, ["observation"], ["mask"])]
    return sampled(parts, ["logits", "mask"], MaskedCategorical, **options)


def composite_policy(**options: Any) -> ProbabilisticActor:
    """Three choices."""

    def split(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x[..., :2], x[..., 2:5], x[..., 5:]

    body = TensorDictSequential(
        TensorDictModule(net(9), ["observation"], ["hidden"]),
        TensorDictModule(split, ["hidden"], [("params", name, "logits") for name in ("a", "b", "c")]),
    )
    settings = {
        "distribution_map": {"a": D.Categorical, "b": D.OneHotCategorical, "c": D.Categorical},
        "name_map": {"a": ("action", "a"), "b": ("action", "b"), "c": "c"},
    }
    kind = {"distribution_class": CompositeDistribution, "distribution_kwargs": settings}
    return ProbabilisticActor(body, ["params"], default_interaction_type=Type.RANDOM, **kind, **options)


def actor_policy(**options: Any) -> ProbabilisticActor:
    body = nn.Sequential(net(2 * N_ACTIONS), NormalParamExtractor())
    module = SafeModule(body, ["observation"], ["loc", "scale"])
    options = {"distribution_class": TanhNormal, "return_log_prob": True, **options}
    return ProbabilisticActor(module, ["loc", "scale"], default_interaction_type=Type.RANDOM, **options)


def greedy_policy(spec: Any, **options: Any) -> TensorDictSequential:
    return TensorDictSequential(QValueActor(net(), spec=spec), EGreedyModule(spec, eps_init=0.5, **options))


def noisy_policy() -> SafeSequential:
    spec = Bounded(-1, 1, shape=(N_ACTIONS,))
    return SafeSequential(
        Actor(net()), TanhModule(in_keys=["action"], spec=spec), AdditiveGaussianModule(spec, sigma_init=0.9)
    )


POLICIES: dict[str, Callable[[], Any]] = {
    "a linear layer": lambda: TensorDictModule(nn.Linear(N_IN, 2), ["observation"], ["action"]),
    "a subclass with a name": Named,
    "a wrapper": lambda: TensorDictModuleWrapper(Named()),
    "categorical": logits_policy,
    "categorical without log-prob": lambda: logits_policy(return_log_prob=False),
    "categorical with a key": lambda: logits_policy(log_prob_key=("stats", "lp")),
    "categorical of many outcomes": lambda: logits_policy(outputs=64),
    "categorical of probabilities": probs_policy,
    "one-hot": lambda: logits_policy(kind=D.OneHotCategorical),
    "one-hot without log-prob": lambda: logits_policy(kind=D.OneHotCategorical, return_log_prob=False),
    "normal": gaussian_policy,
    "normal without log-prob": lambda: gaussian_policy(return_log_prob=False),
    "normal with a free scale": lambda: gaussian_policy(split=False),
    "independent normal": lambda: gaussian_policy(kind=independent_normal),
    "independent normal by name": lambda: gaussian_policy(kind=IndependentNormal),
    "independent normal without log-prob": lambda: gaussian_policy(kind=IndependentNormal, return_log_prob=False),
    "tanh normal": lambda: gaussian_policy(kind=TanhNormal),
    "tanh normal without log-prob": lambda: gaussian_policy(kind=TanhNormal, return_log_prob=False),
    "tanh normal with bounds": lambda: gaussian_policy(
        kind=TanhNormal, distribution_kwargs={"low": -2.0, "high": torch.tensor([1.0, 2.0, 3.0])}
    ),
    "tanh normal of numbers": lambda: gaussian_policy(
        kind=TanhNormal, distribution_kwargs={"event_dims": 0, "safe_tanh": False}
    ),
    "tanh normal with tanh_loc": lambda: gaussian_policy(kind=TanhNormal, distribution_kwargs={"tanh_loc": True}),
    "truncated normal": lambda: gaussian_policy(kind=TruncatedNormal),
    "partial": lambda: gaussian_policy(kind=partial(TanhNormal, low=-3.0)),
    "laplace": lambda: gaussian_policy(kind=D.Laplace),
    "scaled independent normal": lambda: gaussian_policy(
        kind=lambda loc, scale: D.Independent(D.Normal(loc, 2 * scale), 1)
    ),
    "student": lambda: gaussian_policy(kind=lambda loc, scale: D.StudentT(3.0, loc, scale)),
    "logistic normal": lambda: gaussian_policy(kind=D.LogisticNormal),
    "mixture": lambda: gaussian_policy(
        kind=lambda loc, scale: D.MixtureSameFamily(D.Categorical(logits=loc), D.Normal(loc, scale))
    ),
    "one-hot of integers": lambda: logits_policy(kind=OneHotCategorical),
    "masked": masked_policy,
    "masked without cross entropy": lambda: masked_policy(distribution_kwargs={"use_cross_entropy": False}),
    "probabilistic actor": actor_policy,
    "safe probabilistic actor": lambda: actor_policy(
        spec=Bounded(-0.1, 0.1, shape=(N_ACTIONS,)), safe=True, distribution_class=IndependentNormal
    ),
    "several categoricals": lambda: composite_policy(return_log_prob=True),
    "several categoricals without log-prob": composite_policy,
    "greedy values": lambda: QValueActor(net(), spec=Categorical(N_ACTIONS)),
    "greedy one-hot values": lambda: QValueActor(net(), action_space="one_hot"),
    "epsilon-greedy": lambda: greedy_policy(Categorical(N_ACTIONS)),
    "epsilon-greedy, one-hot": lambda: greedy_policy(OneHot(N_ACTIONS)),
    "additive noise": noisy_policy,
    "bernoulli, unknown": lambda: logits_policy(kind=D.Bernoulli),
    "own generator": lambda: logits_policy(generator=3),
    "delta": lambda: sampled(
        TensorDictModule(net(), ["observation"], ["param"]), ["param"], Delta, return_log_prob=False
    ),
    "nested sequence": nested_sequence,
    "two draws": two_draws,
    "methods and names": methods,
    "recurrent": lambda: TensorDictModule(Outer(), ["observation", "h"], ["action", ("next", "h"), "count"]),
    "identity": lambda: TensorDictModule(nn.Identity(), ["observation"], ["action"]),
    "training dropout": lambda: TensorDictModule(
        nn.Sequential(nn.Linear(N_IN, 8), nn.Dropout(0.5)), ["observation"], ["action"]
    ),
    "selected keys": lambda: TensorDictSequential(
        TensorDictModule(net(), ["observation"], ["hidden"]),
        TensorDictModule(nn.Tanh(), ["hidden"], ["action"]),
        selected_out_keys=["action"],
    ),
}

TYPES = [Type.RANDOM, Type.DETERMINISTIC, Type.MODE, Type.MEAN]
BATCHES: list[tuple[int, ...]] = [(), (3,), (64,), (2, 3)]
AVAILABLE = ["observation", "h", ("agent", "other")]


def root(batch: tuple[int, ...], seed: int = 0, dtype: Any = np.float32) -> dict[Any, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "observation": rng.normal(size=(*batch, N_IN)).astype(dtype),
        "h": rng.normal(size=(*batch, 5)).astype(dtype),
        ("agent", "other"): rng.normal(size=(*batch, 2)).astype(dtype),
    }


def plain_steps(policy: Any, batch: tuple[int, ...], kind: Type, steps: int = 4) -> list[Any]:
    """What the plain path writes at each step."""
    written = []
    with torch.no_grad(), set_interaction_type(kind):
        for i in range(steps):
            entries = {key: torch.from_numpy(value) for key, value in root(batch, i).items()}
            before = TensorDict(entries, batch_size=batch)
            after = policy(before.copy())
            written.append({k: v.clone() for k, v in after.items(True, True) if v is not before.get(k, None)})
    return written


def flat_steps(flat: Any, batch: tuple[int, ...], kind: Type, steps: int = 4) -> list[dict[Any, np.ndarray]]:
    """What a policy on arrays writes at each step."""
    written = []
    with torch.no_grad(), set_interaction_type(kind), np.errstate(all="ignore"):
        flat.start(steps)
        for i in range(steps):
            entries = root(batch, i)
            written.append(dict(zip(flat.out_keys, flat(*[entries[k] for k in flat.in_keys]), strict=True)))
    return written


def pytest_generate_tests(metafunc: Any) -> None:
    """Parametrise by the names of policies, of batches and of exploration types."""
    for name, values in (("policy_name", list(POLICIES)), ("batch", BATCHES), ("kind", TYPES)):
        if name in metafunc.fixturenames and not any(
            name in mark.args[0] for mark in metafunc.definition.iter_markers("parametrize")
        ):
            metafunc.parametrize(name, values, ids=str)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(11)


@pytest.fixture
def lab() -> SimpleNamespace:
    """Policies and the two ways to run them."""
    return SimpleNamespace(
        available=AVAILABLE,
        flat_steps=flat_steps,
        gaussian_policy=gaussian_policy,
        logits_policy=logits_policy,
        net=net,
        plain_steps=plain_steps,
        policies=POLICIES,
        root=root,
        sampled=sampled,
    )
