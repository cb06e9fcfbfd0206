"""What runs on arrays, what does not and why, and what such a policy notices."""

from __future__ import annotations

import copy
import warnings

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import InteractionType as Type
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictModuleBase,
    TensorDictSequential,
    WrapModule,
    set_composite_lp_aggregate,
    set_interaction_type,
    set_skip_existing,
)
from tensordict.nn.distributions import CompositeDistribution
from torch import distributions as D
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from rollwright.data import Binary, Bounded, Categorical, Composite, MultiCategorical, NonTensor, OneHot, Unbounded
from rollwright.errors import NotNative, PolicyError
from rollwright.modules import RandomPolicy
from rollwright.modules.signature import SignaturePolicy
from rollwright.policies import array_policy
from rollwright.policies.draws.basic import _race_is_exact, race


def flat_of(lab, policy, batch=(), kind=Type.RANDOM, available=None):
    return array_policy(policy, exploration_type=kind, batch_shape=batch, available=available or lab.available)


def linear(reads="observation", writes="action", **options):
    return TensorDictModule(nn.Linear(4, 2), [reads], [writes], **options)


# Reasons ------------------------------------------------------------------------------------------


class Overriding(TensorDictModule):
    def forward(self, tensordict):
        return super().forward(tensordict)


class Unknown(TensorDictModuleBase):
    def __init__(self):
        super().__init__()
        self.in_keys, self.out_keys = ["observation"], ["action"]

    def forward(self, tensordict):
        return tensordict


def hooked():
    policy = linear()
    policy.register_forward_hook(lambda module, args, out: out)
    return policy


def compiled_part():
    policy = linear()
    policy.compile()
    return policy


def patched():
    policy = linear()
    policy.forward = lambda tensordict: tensordict
    return policy


def edited():
    policy = ProbabilisticTensorDictSequential(
        linear(writes="logits"),
        ProbabilisticTensorDictModule(["logits"], ["action"], distribution_class=D.Categorical),
    )
    policy.module[0] = linear(writes="logits")  # past the sequence, which goes on running the first
    return policy


def rescoring():
    return ProbabilisticTensorDictSequential(
        TensorDictModule(lambda x: (x, x.argmax(-1)), ["observation"], ["logits", "action"]),
        ProbabilisticTensorDictModule(["logits"], ["action"], distribution_class=D.Categorical, return_log_prob=True),
    )


def drawing(**options):
    options = {"distribution_class": D.Categorical, **options}
    return TensorDictSequential(
        linear(writes="logits"), ProbabilisticTensorDictModule(["logits"], ["action"], **options)
    )


def composite():
    return drawing(
        distribution_class=CompositeDistribution, distribution_kwargs={"distribution_map": {"action": D.Normal}}
    )


REASONS = {
    r"^it has hooks \(TensorDictModule\)$": hooked,
    r"^a part was compiled \(TensorDictModule\)$": compiled_part,
    r"^forward was replaced on an instance \(TensorDictModule\)$": patched,
    r"^Overriding is no module": lambda: Overriding(nn.Linear(4, 2), ["observation"], ["action"]),
    r"^Unknown is no module": Unknown,
    r"^WrapModule is no module": lambda: TensorDictSequential(WrapModule(lambda td: td), linear()),
    r"^function is no TensorDict module$": lambda: lambda td: td,
    r"^Linear is no TensorDict module$": lambda: nn.Linear(4, 2),
    r"^it reads 'missing', which is no tensor": lambda: linear(reads="missing"),
    r"^TensorDictModule\(Linear\) has inplace=False$": lambda: linear(inplace=False),
    r"^TensorDictSequential has inplace='empty'$": lambda: TensorDictSequential(linear(), inplace="empty"),
    r"^'agent' would replace a nest": lambda: linear(writes="agent"),
    r"runs other modules than it holds$": edited,
    r"^an earlier module writes what the distribution would draw$": rescoring,
    r"^a distribution has num_samples$": lambda: drawing(num_samples=2),
    r"^a distribution reads its generator": lambda: drawing(generator="seed"),
    r"^it samples a CompositeDistribution with Normal": composite,
    r"^the random policy has no spec yet$": RandomPolicy,
    r"^the spec of 'action' is a NonTensor$": lambda: RandomPolicy(Composite(action=NonTensor())),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.compile, about its own parts
@pytest.mark.parametrize("reason", REASONS)
def test_not_flat_says_why(lab, reason):
    made = REASONS[reason]()
    with pytest.raises(NotNative, match=reason):
        flat_of(lab, *made if isinstance(made, tuple) else (made,))


def test_selected_outputs_of_a_single_module_are_a_hook(lab):
    policy = TensorDictModule(lambda x: (x, x), ["observation"], ["a", "b"]).select_out_keys("a")
    with pytest.raises(NotNative, match="hooks"):
        flat_of(lab, policy)


def test_settings_of_the_process_are_reasons(lab):
    with set_skip_existing(True), pytest.raises(NotNative, match="set_skip_existing"):
        flat_of(lab, linear())
    policy = drawing(return_log_prob=True)
    with set_composite_lp_aggregate(True), pytest.raises(NotNative, match="composite_lp_aggregate"):
        flat_of(lab, policy)
    handle = nn.modules.module.register_module_forward_hook(lambda *args: None)
    try:
        with pytest.raises(NotNative, match="global module hooks"):
            flat_of(lab, linear())
    finally:
        handle.remove()


def test_an_aggregated_log_prob_goes_to_its_key(lab):
    with set_composite_lp_aggregate(True):
        policy = lab.logits_policy()
        assert flat_of(lab, policy).out_keys == ["logits", "action", "sample_log_prob"]


# Changes ------------------------------------------------------------------------------------------


def test_hooks_on_a_layer_act(lab):
    policy = lab.logits_policy()
    seen = []
    policy[0].module[0].register_forward_hook(lambda module, args, out: seen.append(1) or 2 * out)
    flat = flat_of(lab, copy.deepcopy(policy))
    torch.manual_seed(0)
    expected = lab.plain_steps(policy, (), Type.RANDOM)
    torch.manual_seed(0)
    for ours, theirs in zip(lab.flat_steps(flat, (), Type.RANDOM), expected, strict=True):
        assert all(np.array_equal(ours[key], theirs[key].numpy()) for key in ours)
    assert len(seen) == 8  # 4 steps each


@pytest.mark.parametrize(
    "change",
    [
        lambda policy: policy[0].register_forward_hook(lambda module, args, out: out),
        lambda policy: policy[0].module[0].register_forward_pre_hook(lambda module, args: args),
        lambda policy: setattr(policy[0].module[0], "forward", lambda x: x),
        lambda policy: policy[0].module.__setitem__(1, nn.ReLU()),
        lambda policy: policy[0].module.append(nn.Identity()),
        lambda policy: setattr(policy[0], "module", nn.Linear(4, 3)),
        lambda policy: policy.module.append(linear()),
        lambda policy: setattr(policy[0], "in_keys", ["other"]),
        lambda policy: setattr(policy[-1], "distribution_class", D.Bernoulli),
        lambda policy: policy.eval(),
    ],
)
def test_a_change_is_noticed_at_start(lab, change):
    policy = lab.logits_policy()
    flat = flat_of(lab, policy)
    flat.start(1)
    change(policy)
    with pytest.raises(NotNative, match="the policy has changed"):
        flat.start(1)


@pytest.mark.parametrize("change", ["in place", "replaced", "loaded", "assigned", "data"])
def test_new_weights_act_at_once(lab, change):
    policy = lab.logits_policy()
    flat = flat_of(lab, policy)
    layer, other = policy[0].module[2], lab.logits_policy()
    if change == "in place":
        with torch.no_grad():
            layer.weight.mul_(2)
    elif change == "replaced":
        layer.weight = nn.Parameter(torch.randn_like(layer.weight))
    elif change == "data":
        layer.weight.data = torch.randn_like(layer.weight)
    else:
        policy.load_state_dict(other.state_dict(), assign=change == "assigned")
    expected = lab.plain_steps(policy, (), Type.DETERMINISTIC)
    for ours, theirs in zip(lab.flat_steps(flat, (), Type.DETERMINISTIC), expected, strict=True):
        assert np.array_equal(ours["logits"], theirs["logits"].numpy())


# Outputs ------------------------------------------------------------------------------------------


def test_partial_tolerance_changes_nothing_where_all_is_there(lab):
    policy = TensorDictSequential(linear(writes="hidden"), linear(), partial_tolerant=True)
    assert flat_of(lab, policy).out_keys == ["hidden", "action"]


def test_keys_written_twice_count_once(lab):
    policy = TensorDictSequential(linear(), TensorDictModule(nn.Tanh(), ["action"], ["action"]))
    flat = flat_of(lab, policy)
    assert (flat.in_keys, flat.out_keys, flat.how) == (["observation"], ["action"], "2 calls on tensors")


@pytest.mark.parametrize("part", [nn.Identity(), nn.Flatten(-1), lambda x: x, lambda x: x.mul_(1)])
def test_outputs_have_memory_of_their_own(lab, part):
    flat = flat_of(lab, TensorDictModule(part, ["observation"], ["action"]))
    flat.start(1)
    x = np.ones(4, np.float32)
    (action,) = flat(x)
    x[:] = 0
    assert (action == 1).all()


def test_parameters_may_be_outputs(lab):
    bias = nn.Parameter(torch.ones(2))
    flat = flat_of(lab, TensorDictModule(lambda x: bias, ["observation"], ["action"]))
    flat.start(1)
    with torch.no_grad():
        assert flat(np.ones(4, np.float32))[0].tolist() == [1, 1]


@pytest.mark.parametrize("value", [3.0, [1.0, 2.0], np.ones(2), True])
def test_outputs_become_tensors_as_in_the_plain_path(lab, value):
    policy = TensorDictModule(lambda x: value, ["observation"], ["action"])
    expected = policy(TensorDict(observation=torch.ones(4)))["action"].numpy()
    flat = flat_of(lab, policy)
    flat.start(1)
    (ours,) = flat(np.ones(4, np.float32))
    assert np.array_equal(ours, expected)
    assert ours.dtype == expected.dtype


def test_an_object_is_no_output(lab):
    flat = flat_of(lab, TensorDictModule(lambda x: "left", ["observation"], ["action"]))
    flat.start(1)
    with pytest.raises(NotNative, match=r"TensorDictModule\(function\) returned a"):
        flat(np.ones(4, np.float32))


def test_a_wrong_number_of_outputs_is_an_error(lab):
    flat = flat_of(lab, TensorDictModule(lambda x: (x, x), ["observation"], ["action"]))
    flat.start(1)
    with pytest.raises(RuntimeError, match="returned 2 outputs for 1 out_keys"):
        flat(np.ones(4, np.float32))


def test_outputs_without_the_batch_size_are_an_error(lab):
    flat = flat_of(lab, TensorDictModule(lambda x: x.sum(), ["observation"], ["action"]), batch=(3,))
    flat.start(1)
    with pytest.raises(PolicyError, match=r"with shape \[\], which must begin with the batch size"):
        flat(np.ones((3, 4), np.float32))


def test_one_step_of_the_usual_policy_takes_few_operations(lab):
    policy = lab.logits_policy(outputs=2, hidden=64)
    counts = {}
    for batch in ((), (64,)):
        flat = flat_of(lab, policy, batch)
        flat.start(2)
        x = lab.root(batch)["observation"]
        with torch.no_grad(), set_interaction_type(Type.RANDOM):
            flat(x)
            with Counter() as counter:
                flat(x)
        counts[batch] = counter.operations
    # In: 1. Net: 3 layers, 2 tanh. Draw: 13. Log-prob: 2. Out: 3 of 4 each, which do nothing.
    assert counts == {(): 33, (64,): 33}


class Noted(nn.Module):
    """Notes whether it was called in inference mode, and keeps what it made."""

    def __init__(self):
        super().__init__()
        self.layer, self.modes = nn.Linear(4, 2), []

    def forward(self, x):
        self.modes.append(torch.is_inference_mode_enabled())
        self.last = self.layer(x)
        return self.last * 2


def test_a_module_of_the_user_is_never_run_in_inference_mode(lab):
    module = Noted()
    flat = flat_of(lab, TensorDictModule(nn.Sequential(nn.Linear(4, 4), module), ["observation"], ["action"]))
    for _ in range(2):
        flat.start(2)
        flat(np.ones(4, np.float32))
        flat(np.ones(4, np.float32))
    assert module.modes == [False] * 4
    assert not module.last.is_inference()


def test_known_layers_leave_no_mode_and_weights_that_can_be_trained(lab):
    policy = lab.logits_policy(outputs=2, hidden=8)
    flat = flat_of(lab, policy, (3,))
    x = lab.root((3,))["observation"]
    with torch.no_grad():
        flat.start(2)
        flat(x)
        outputs = flat(x)
    assert not torch.is_inference_mode_enabled()
    assert all(parameter.requires_grad and not parameter.is_inference() for parameter in policy.parameters())
    kept = torch.from_numpy(outputs[0])
    assert not kept.is_inference()
    policy(TensorDict(observation=torch.from_numpy(x), batch_size=[3]))["action_log_prob"].sum().backward()


class Counter(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    @property
    def operations(self):
        return len(self.names)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


class Halves(nn.Module):
    def forward(self, x):
        self.calls = getattr(self, "calls", 0) + 1  # which keeps it from being taken apart
        return x.chunk(2, -1)


def test_outputs_of_own_modules_are_copied_without_a_tensor_operation(lab):
    policy = TensorDictModule(Halves(), ["observation"], ["action", "other"])
    flat = flat_of(lab, policy, (3,))
    x = lab.root((3,))["observation"]
    with torch.no_grad():
        flat.start(2)
        flat(x)
        with Counter() as counter:
            outputs = flat(x)
    assert counter.names == ["aten::lift_fresh", "aten::split", *["aten::detach"] * 2]  # the last ones are of numpy()
    assert not any(np.shares_memory(value, x) for value in outputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_race_draws_what_multinomial_draws(dtype):
    assert _race_is_exact(dtype, torch.device("cpu"))
    p = torch.rand(50, 7, dtype=dtype).softmax(-1)
    torch.manual_seed(4)
    drawn = torch.multinomial(p, 1, True).squeeze(-1)
    state = torch.get_rng_state()
    torch.manual_seed(4)
    assert torch.equal(race(p).squeeze(-1), drawn)
    assert torch.equal(torch.get_rng_state(), state)


def test_the_race_equals_multinomial_where_memory_is_permuted():
    p = torch.rand(4, 5, 6).softmax(-1).permute(2, 0, 1).contiguous().permute(1, 2, 0)
    torch.manual_seed(4)
    drawn = torch.multinomial(p.reshape(-1, 6), 1, True).reshape(4, 5)
    torch.manual_seed(4)
    assert torch.equal(race(p).squeeze(-1), drawn)


@pytest.mark.parametrize("scored", [False, True])
def test_a_scale_below_zero_does_not_pass_in_silence(lab, scored, monkeypatch):
    monkeypatch.setattr(D.Distribution, "_validate_args", True)  # torch.compile turns it off in its process
    module = TensorDictModule(lambda x: (x, x - 100), ["observation"], ["loc", "scale"])
    policy = lab.sampled(module, ["loc", "scale"], D.Normal, return_log_prob=scored)
    flat = flat_of(lab, policy)
    if scored:  # at the end of the batch, by whoever tests the finite keys
        assert flat.finite_keys == ["action_log_prob"]
        assert np.isnan(lab.flat_steps(flat, (), Type.RANDOM, 1)[0]["action_log_prob"]).all()
    else:
        with pytest.raises(ValueError, match="scale"):
            lab.flat_steps(flat, (), Type.RANDOM, 1)


# Other policies -----------------------------------------------------------------------------------

SPECS = {
    "one-hot": lambda batch: Composite(action=OneHot(3, shape=(*batch, 3)), shape=batch),
    "nested": lambda batch: Composite(
        a=Bounded(-1, 1, shape=(*batch, 2)),
        b=Composite(c=Categorical(4, shape=batch), d=Binary(3, shape=(*batch, 3)), shape=batch),
        e=MultiCategorical([2, 5], shape=(*batch, 2)),
        shape=batch,
    ),
    "no batch of its own": lambda batch: Composite(action=Unbounded(shape=(2,))),
    "one action": lambda batch: Bounded(-1, 1, shape=(*batch, 2)),
    "one masked action": lambda batch: Categorical(3, mask=torch.tensor([True, False, True])).expand(batch),
}


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("batch", [(), (3,)], ids=str)
def test_random_actions_equal_the_plain_path(lab, name, batch):
    policy = RandomPolicy(SPECS[name](batch))
    flat = flat_of(lab, policy, batch)
    torch.manual_seed(8)
    expected = lab.plain_steps(policy, batch, Type.RANDOM)
    state = torch.get_rng_state()
    torch.manual_seed(8)
    for ours, theirs in zip(lab.flat_steps(flat, batch, Type.RANDOM), expected, strict=True):
        assert set(ours) == set(theirs)
        for key, value in ours.items():
            assert np.array_equal(value, theirs[key].numpy())
            assert value.dtype == theirs[key].numpy().dtype
    assert torch.equal(torch.get_rng_state(), state)


def test_a_new_spec_is_noticed(lab):
    policy = RandomPolicy(Bounded(-1, 1, shape=(2,)))
    flat = flat_of(lab, policy)
    policy.action_spec = Bounded(0, 1, shape=(2,))
    with pytest.raises(NotNative, match="changed"):
        flat.start(1)


def test_a_module_called_by_name_keeps_the_batch_size(lab):
    flat = flat_of(lab, SignaturePolicy(lambda observation: observation.sum(), ["observation"], "action"), (3,))
    flat.start(1)
    with pytest.raises(PolicyError, match="must begin with the batch size"):
        flat(np.ones((3, 4), np.float32))


@pytest.mark.parametrize("outputs", [1, 3])
def test_a_module_called_by_name_equals_the_plain_path(lab, outputs):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 2)

        def forward(self, observation, h):
            y = self.linear(observation) + torch.rand(2)
            return y if outputs == 1 else (y, h + 1, y.sum(-1))

    policy = SignaturePolicy(Net(), ["observation", "h"], "action")
    flat = flat_of(lab, copy.deepcopy(policy), (3,))
    torch.manual_seed(1)
    expected = lab.plain_steps(policy, (3,), Type.RANDOM)
    torch.manual_seed(1)
    with torch.no_grad():
        flat.start(20)
        for i, theirs in enumerate(expected):
            entries = lab.root((3,), i)
            written = flat(*[entries[key] for key in flat.in_keys])
            ours = dict(zip(flat.out_keys, written, strict=True))
            assert set(ours) == set(theirs) == {"action", *(f"output{i}" for i in range(1, outputs))}
            assert all(np.array_equal(ours[key], theirs[key].numpy()) for key in ours)


def test_flattening_warns_of_nothing_and_draws_nothing(lab):
    state = torch.get_rng_state()
    policies = [make() for make in lab.policies.values()]
    state = torch.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for policy in policies:
            flat_of(lab, policy)
    assert torch.equal(torch.get_rng_state(), state)
