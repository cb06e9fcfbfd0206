"""Errors of policies name the module, what it reads, what was expected, and what it got."""

from __future__ import annotations

import pytest
import torch
from tensordict.nn import TensorDictModule, TensorDictModuleBase, TensorDictModuleWrapper, TensorDictSequential
from torch import nn

from rollwright.collectors import Collector
from rollwright.data import Unbounded
from rollwright.envs import GymEnv, TransformedEnv
from rollwright.envs.transforms import TensorDictPrimer
from rollwright.errors import PolicyError


def pendulum():
    return GymEnv("Pendulum-v1")


def net(*sizes):
    layers = [nn.Linear(*sizes[:2]), *(layer for size in sizes[2:] for layer in (nn.Tanh(), nn.Linear(*size)))]
    return nn.Sequential(*layers)


def reading(module, key="observation", out="action"):
    return TensorDictModule(module, [key], [out])


# At construction ---------------------------------------------------------------------------------------------------


def test_another_precision_than_the_environments_is_refused():
    policy = reading(net(3, 8, (8, 1)).double())
    with pytest.raises(
        PolicyError, match=r"'module\.0'.*expected float64 input.*got float32\. Call policy\.to\(torch\.fl"
    ):
        Collector(pendulum, policy, frames_per_batch=4)


@pytest.mark.parametrize("use_buffers", [True, False])
def test_another_precision_within_the_policy_is_named(use_buffers):
    inner = TensorDictSequential(reading(nn.Identity(), out="h"), reading(nn.Linear(3, 1).double(), "h"))
    with (
        Collector(pendulum, inner, frames_per_batch=4, use_buffers=use_buffers) as collector,
        pytest.raises(
            PolicyError, match=r"expected float64 input, as its weights are, got float32\. Call .*'h' \[3\] f"
        ),
    ):
        collector.next()


WRONG = {
    "alone": (lambda: reading(nn.Linear(4, 1)), "'module'", "observation", 3),
    "first": (lambda: reading(nn.Sequential(net(4, 8, (8, 1)))), r"'module\.0\.0'", "observation", 3),
    "in a sequence": (
        lambda: TensorDictSequential(reading(nn.Linear(3, 1)), reading(nn.Linear(4, 1), "h", "value")),
        r"'module\.1\.module'",
        "h",
        5,
    ),
    "wrapped": (lambda: TensorDictModuleWrapper(reading(nn.Linear(4, 1))), r"'td_module\.module'", "observation", 3),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_layer_of_another_width_than_the_spec_is_refused_at_construction(case):
    policy, path, key, width = WRONG[case]
    env = TransformedEnv(pendulum(), TensorDictPrimer(h=Unbounded((5,))))
    expected = (
        rf"policy: {path} \(Linear\(in_features=4, .*reads '{key}' and expected 4 features .*got shape \[{width}\]"
    )
    with pytest.raises(PolicyError, match=rf"{expected}.*in_features={width}"):
        Collector(env, policy(), frames_per_batch=4)


class Doubled(TensorDictModule):
    def forward(self, td):
        td["observation"] = td["observation"].repeat(2)
        return super().forward(td)


def hooked():
    layer = nn.Linear(6, 1)
    layer.register_forward_pre_hook(lambda module, args: (args[0].repeat(2),))
    return reading(layer)


RIGHT = {
    "it reads what another one writes": lambda: TensorDictSequential(
        reading(net(3, 6), out="observation"), reading(net(6, 1))
    ),
    "it changes what it reads": lambda: Doubled(nn.Linear(6, 1), ["observation"], ["action"]),
    "a hook does": hooked,
    "lazy": lambda: reading(nn.LazyLinear(1)),
    "two inputs": lambda: TensorDictModule(lambda one, two: one[:1], ["observation", "observation"], ["action"]),
}


@pytest.mark.parametrize("case", RIGHT)
def test_a_layer_is_not_refused_where_it_may_be_right(make, case):
    assert make(pendulum, RIGHT[case](), frames_per_batch=2).next().shape == (2,)


# When it acts --------------------------------------------------------------------------------------------------------


class Named(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.net = inner

    def forward(self, observation):
        return self.net(observation)


class Pixels(nn.Module):
    def forward(self, observation):
        return observation.expand(1, 4, 4, 3).movedim(-1, 1)


LATE = {
    "second layer": (
        lambda: reading(net(3, 8, (7, 1))),
        r"'module\.2' \(Linear\(in_features=7",
        "7 features",
        "8",
        "in_",
    ),
    "by name": (
        lambda: Named(net(3, 8, (7, 1))),
        r"'net\.2' \(Linear\(in_features=7",
        "7 features",
        "8",
        "in_features",
    ),
    "second module": (
        lambda: TensorDictSequential(reading(net(3, 8), out="h"), reading(net(7, 1), "h")),
        r"'module\.1\.module\.0' \(Linear\(in_features=7",
        "7 features",
        "8",
        "in_features",
    ),
    "channels": (
        lambda: reading(nn.Sequential(Pixels(), nn.Conv2d(4, 1, 3))),
        r"'module\.1' \(Conv2d\(4, 1",
        "4 channels",
        "3",
        "in_channels",
    ),
}


@pytest.mark.parametrize("options", [{}, {"use_buffers": False}, {"init_random_frames": 4}], ids=str)
@pytest.mark.parametrize("case", LATE)
def test_a_layer_of_another_width_is_named_when_it_acts(make, case, options):
    policy, path, expected, got, remedy = LATE[case]
    reads = "'h' \\[8\\]" if case == "second module" else "'observation' \\[3\\] float32"
    collector = make(pendulum, policy(), frames_per_batch=4, **options)
    words = rf"policy: {path}.*expected {expected} .*got {got}: shape .*reads {reads}.*{remedy}"
    with pytest.raises(PolicyError, match=words) as caught:
        collector.next()
    assert isinstance(caught.value.__cause__, RuntimeError)


class Code(Exception):
    """Of a program."""


class Wrong(nn.Module):
    def __init__(self, error):
        super().__init__()
        self.error = error

    def forward(self, observation):
        raise self.error


@pytest.mark.parametrize("plain", [False, True])
def test_what_a_policy_raises_is_a_policy_error_of_its_class(make, plain):
    options = {"frames_per_batch": 4, "use_buffers": False if plain else None}
    for error in (ZeroDivisionError("no"), KeyError("no"), AttributeError("no"), NotImplementedError("no")):
        collector = make(pendulum, reading(Wrong(error)), **options)
        kind = type(error).__name__
        words = rf"policy: 'module' \(Wrong\(\)\) raised {kind}: .*no.*input: \[3\] float32.* reads 'observation' \[3\]"
        with pytest.raises(type(error)) as caught:
            collector.next()
        assert isinstance(caught.value, PolicyError)
        assert caught.match(words)
        assert caught.value.__cause__ is error


def test_an_exception_of_the_programs_own_class_stays_and_gets_a_note(make):
    error = Code(7)
    with pytest.raises(Code) as caught:
        make(pendulum, reading(Wrong(error)), frames_per_batch=4).next()
    assert caught.value is error
    assert "'module' (Wrong()) raised Code: 7" in error.__notes__[-1]


def test_a_function_is_named_with_what_it_was_given(make):
    def acts(td):
        return td["missing"]

    with pytest.raises(
        KeyError, match=r"policy: .*acts raised KeyError: .*missing.*given .*'observation' \[3\] float32"
    ):
        make(pendulum, acts, frames_per_batch=4).next()


def test_an_error_of_the_environment_is_none_of_the_policy(make):
    env = pendulum()
    collector = make(env, reading(nn.Linear(3, 1)), frames_per_batch=4)
    env._env.unwrapped.step = lambda action: 1 / 0
    with pytest.raises(Exception, match="division") as caught:
        collector.next()
    assert not isinstance(caught.value, PolicyError)


# Without out_keys ----------------------------------------------------------------------------------------------------


class Silent(TensorDictModuleBase):
    """Says nothing of what it reads and writes."""

    def __init__(self):
        super().__init__()
        self.layer, self.calls = nn.Linear(3, 1), 0

    def forward(self, td):
        self.calls += 1
        assert td["observation"].any(), "called on observations that were made up"
        return td.set("action", self.layer(td["observation"])).set("value", torch.ones(1))


class Quiet(Silent):
    """Says what it reads."""

    def __init__(self, key="observation"):
        super().__init__()
        self.in_keys = [key]


@pytest.mark.parametrize("kind", [Quiet, Silent])
@pytest.mark.parametrize("options", [{}, {"use_buffers": False}, {"init_random_frames": 4}], ids=str)
def test_a_module_without_out_keys_is_seen_when_it_acts(make, kind, options):
    policy = kind()
    collector = make(pendulum, policy, frames_per_batch=4, **options)
    assert policy.calls == 0
    batches = [collector.next(), collector.next()]
    assert set(batches[0].keys(True, True)) == set(batches[1].keys(True, True)) > {"value", "action"}
    assert bool((batches[1]["value"] == 1).all())


def test_a_module_without_out_keys_that_lacks_an_entry(make):
    class Lost(Quiet):
        def forward(self, td):
            return td.set("action", td["elsewhere"])

    collector = make(pendulum, Lost("elsewhere"), frames_per_batch=4)
    with pytest.raises(PolicyError, match=r"policy: \(Lost\) raised KeyError: .*elsewhere"):
        collector.next()
