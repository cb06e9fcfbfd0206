"""New weights of a policy with an engine, in every form; each token is stamped with the version that sampled it."""

from __future__ import annotations

import copy
import os
import signal
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from tensordict import TensorDict
from tests import llm_models
from tests.collectors.llm.fakes import FakeEngine, FakeEnv, FakePolicy
from tests.collectors.workers.processes import wait_until
from torch import nn

from rollwright.collectors.llm import LLMCollector
from rollwright.data.replay_buffers import LazyStackStorage, ReplayBuffer
from rollwright.envs.llm import LLMEnv, PolicyVersion
from rollwright.modules.llm import TransformersWrapper
from rollwright.weight_update import (
    MultiProcessWeightSyncScheme,
    NoWeightSyncScheme,
    SharedMemWeightSyncScheme,
    VanillaWeightUpdater,
)
from rollwright.weight_update.forms import flat_state, of_part, prepare

pytestmark = pytest.mark.llm


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def wrapper():
    return TransformersWrapper(
        llm_models.model(), tokenizer=llm_models.tokenizer(), generate_kwargs={"max_new_tokens": 4}
    )


def env():
    return LLMEnv.from_dataloader(
        [{"text": "one"}, {"text": "two"}], tokenizer=llm_models.tokenizer(), batch_size=1, epochs=None
    )


def trained():
    """A model that is not the engine's: always of one token."""
    model = llm_models.model()
    with torch.no_grad():
        model.get_output_embeddings().weight.zero_()
    return model


FORMS = {
    "module": trained,
    "state dict": lambda: trained().state_dict(),
    "TensorDict": lambda: TensorDict.from_module(trained()).data,
    "state dict of the wrapper": lambda: {f"model.{key}": value for key, value in trained().state_dict().items()},
}


def versions(batch):
    return {int(version) for row in batch.reshape(-1).unbind(0) for version in row["tokens_policy_version"]}


def changed(batch):
    """Whether all tokens have the probability that the trained model gives to all of them."""
    found = torch.cat([row["log_probs"] for row in batch.reshape(-1).unbind(0)])
    return bool((found == found[0]).all())


@pytest.mark.parametrize("form", FORMS)
def test_weights_of_another_model_go_to_the_engine(form):
    options = {"dialog_turns_per_batch": 1, "track_policy_version": True}
    with LLMCollector(env(), wrapper(), **options) as collector:
        first = collector.next()
        assert versions(first) == {0}
        assert not changed(first)
        assert collector.update_policy_weights_(FORMS[form]()) == 1
        batch = collector.next()
        assert versions(batch) == {1}
        assert changed(batch)
        with pytest.raises(ValueError, match="names differ"):
            collector.update_policy_weights_({"other": torch.ones(1)})
        assert collector.policy_version == 1
        assert versions(collector.next()) == {1}


class EngineWithModel(FakeEngine):
    """Checks weights as an engine of transformers does, by the names of its model."""

    def __init__(self):
        super().__init__()
        self.model = nn.Linear(3, 1)

    def update_weights(self, weights, version=None):
        prepare(self.model, of_part(flat_state(weights, "it"), self.model.state_dict().keys(), "model"), "the engine")()
        super().update_weights(weights, version)


class PolicyWithModel(FakePolicy):
    def __init__(self):
        self.engine = EngineWithModel()


def linear(value):
    made = nn.Linear(3, 1)
    nn.init.constant_(made.weight, value)
    return made


IN_WORKERS = [
    linear,
    lambda value: linear(value).state_dict(),
    lambda value: TensorDict.from_module(linear(value)).data,
    lambda value: {f"model.{key}": weight for key, weight in linear(value).state_dict().items()},
]


def test_weights_go_to_the_engines_of_workers_in_every_form():
    options = {"dialog_turns_per_batch": 2, "track_policy_version": True, "num_collectors": 1}
    with LLMCollector(partial(FakeEnv, 2, epochs=None), policy_factory=PolicyWithModel, **options) as collector:
        assert versions(collector.next()) == {0}
        for version, form in enumerate(IN_WORKERS, 1):
            assert collector.update_policy_weights_(form(float(version))) == version
            next(found for found in collector if versions(found) == {version})
            assert collector.get_distant_attr("policy.engine.model.weight")[0].tolist() == [[version] * 3]
        with pytest.raises(ValueError, match="names differ"):
            collector.update_policy_weights_({"other": torch.ones(1)})


class PolicyWithAdapter(PolicyWithModel):
    def __init__(self):
        super().__init__()
        self.engine.model.lora_A = nn.ModuleDict({"default": nn.Linear(3, 1, bias=False)})


@pytest.mark.parametrize("workers", [0, 2])
def test_weights_of_an_adapter_reach_the_engine(workers):
    options = {"dialog_turns_per_batch": 2, "policy_factory": PolicyWithAdapter}
    options |= {"num_collectors": workers} if workers else {}
    with LLMCollector(partial(FakeEnv, 2, epochs=None), **options) as collector:
        collector.next()
        assert collector.update_policy_weights_({"lora_A.weight": torch.full((1, 3), 5.0)}) == 1
        with pytest.raises(ValueError, match=r"unknown: 'lora_B.weight'"):
            collector.update_policy_weights_({"lora_B.weight": torch.ones(1, 3)})
        next(iter(collector))
        found = collector.getattr_policy("engine.model.lora_A.default.weight")
        assert [weight.tolist() for weight in (found if workers else [found])] == [[[5.0] * 3]] * (workers or 1)


def test_a_saved_state_has_the_weights_of_the_engine_where_asked():
    policies = [PolicyWithModel() for _ in range(2)]
    first, second = (LLMCollector(FakeEnv(2), policy, dialog_turns_per_batch=2) for policy in policies)
    first.update_policy_weights_(linear(3.0))
    assert "engine_state_dict" not in first.state_dict()
    state = first.state_dict(engine_weights=True)
    second.load_state_dict(state)
    assert policies[1].engine.model.weight.tolist() == [[3.0] * 3]
    assert policies[1].engine.version == 1
    third = LLMCollector(FakeEnv(2), FakePolicy(), dialog_turns_per_batch=2)
    with pytest.raises(TypeError, match=r"engine_weights=True: .* got FakeEngine"):
        third.state_dict(engine_weights=True)
    for collector in (first, second, third):
        collector.shutdown()


class RefusesPartway(EngineWithModel):
    """Takes half of the weights that it refuses."""

    def update_weights(self, weights, version=None):
        if "bias" not in weights:
            with torch.no_grad():
                self.model.weight.copy_(weights["weight"])
            raise ValueError("the engine takes a bias, too")
        super().update_weights(weights, version)


def test_an_engine_that_refuses_a_state_partway_has_the_weights_of_before():
    policies = [PolicyWithModel(), PolicyWithModel()]
    policies[1].engine = RefusesPartway()
    first, second = (LLMCollector(FakeEnv(2), policy, dialog_turns_per_batch=2) for policy in policies)
    second.update_policy_weights_(linear(2.0).state_dict())
    second.next()
    first.update_policy_weights_(linear(3.0))
    state, before = first.state_dict(engine_weights=True), copy.deepcopy(second.state_dict())
    del state["engine_state_dict"]["bias"]
    with pytest.raises(ValueError, match="takes a bias"):
        second.load_state_dict(state)
    assert policies[1].engine.model.weight.tolist() == [[2.0] * 3]
    assert policies[1].engine.version == 1
    after = second.state_dict()
    for name in ("frames", "iter", "policy_version", "traj_pool"):
        assert after[name] == before[name]
    assert str(after["trajectories"]) == str(before["trajectories"])
    for collector in (first, second):
        collector.shutdown()


def test_a_version_tracker_that_refuses_leaves_the_rest():
    first, second = (
        LLMCollector(FakeEnv(2), FakePolicy(), dialog_turns_per_batch=2, track_policy_version=PolicyVersion())
        for _ in range(2)
    )
    first.next()
    first.update_policy_weights_({"weight": torch.ones(1)})
    state = first.state_dict()
    assert state["version_tracker"]["version"] == 1
    for wrong, says in (({"other": 3}, "expected 'version'"), (3, "expected that of a PolicyVersion")):
        with pytest.raises((KeyError, TypeError), match=says):
            second.load_state_dict({**state, "version_tracker": wrong})
    with pytest.raises(KeyError, match="streams"):
        second.load_state_dict({name: value for name, value in state.items() if name != "streams"})
    assert (second.policy_version, second.stats()["frames"]) == (0, 0)
    second.load_state_dict(state)
    assert (second.policy_version, second.stats()["frames"]) == (1, 2)
    for collector in (first, second):
        collector.shutdown()


def test_a_saved_state_of_workers_has_the_weights_of_their_engines_where_asked():
    make = partial(LLMCollector, partial(FakeEnv, 2), policy_factory=PolicyWithModel, groups_per_batch=1)
    with make(num_collectors=1) as first:
        first.update_policy_weights_(linear(3.0))
        state = first.state_dict(engine_weights=True)
    with make(num_collectors=1) as second:
        second.load_state_dict(state)
        assert second.get_distant_attr("policy.engine.model.weight")[0].tolist() == [[3.0] * 3]


def test_the_engine_that_a_factory_made_is_closed_where_the_construction_fails():
    policy = FakePolicy()
    with pytest.raises(TypeError, match="weight_updater"):
        LLMCollector(FakeEnv(2), policy_factory=lambda: policy, dialog_turns_per_batch=2, weight_updater=lambda: 3)
    assert policy.engine.closed


def test_an_engine_without_a_module_gets_weights_in_a_worker_too():
    make = partial(FakeEnv, 2, epochs=None)
    options = {"dialog_turns_per_batch": 2, "track_policy_version": True, "num_collectors": 1}
    with LLMCollector(make, policy_factory=FakePolicy, **options) as collector:
        collector.next()
        collector.update_policy_weights_({"weight": torch.ones(3)})
        next(found for found in collector if versions(found) == {1})
        [weights] = collector.get_distant_attr("policy.engine.weights")
        assert weights["weight"].tolist() == [1.0, 1.0, 1.0]


def scheme_from(model, cls=SharedMemWeightSyncScheme, strategy="tensordict"):
    """The two ends of a scheme."""
    sender = cls(strategy=strategy)
    sender.init_on_sender("policy", model=model)
    return sender, copy.copy(sender)


@pytest.mark.parametrize("cls", [SharedMemWeightSyncScheme, MultiProcessWeightSyncScheme])
@pytest.mark.parametrize("strategy", ["tensordict", "state_dict"])
@pytest.mark.parametrize("source", ["model", "wrapper"])
def test_schemes_bring_weights_to_the_engine(cls, strategy, source):
    sent = trained()
    if source == "wrapper":
        sent = TransformersWrapper(sent, tokenizer=llm_models.tokenizer(), generate=False)
    sender, receiver = scheme_from(sent, cls, strategy)
    with LLMCollector(env(), wrapper(), dialog_turns_per_batch=1, track_policy_version=True) as collector:
        collector.register_scheme_receiver({"policy": receiver}, synchronize_weights=False)
        collector.receive_weights()
        first = collector.next()
        assert versions(first) == {0}  # nothing was sent
        assert not changed(first)
        sender.send()
        collector.receive_weights()
        assert collector.policy_version == 1
        batch = collector.next()
        assert versions(batch) == {1}
        assert changed(batch)
        collector.receive_weights()
        assert versions(collector.next()) == {1}  # nothing was sent since


def test_the_first_weights_of_a_scheme_act_from_the_first_token_on():
    sender, receiver = scheme_from(trained())
    sender.connect()
    options = {"dialog_turns_per_batch": 1, "track_policy_version": True}
    with LLMCollector(env(), wrapper(), **options) as collector:
        collector.register_scheme_receiver({"policy": receiver})
        batch = collector.next()
        assert versions(batch) == {collector.policy_version} == {1}
        assert changed(batch)


def test_a_scheme_that_sends_nothing_changes_nothing():
    sender, receiver = scheme_from(trained(), NoWeightSyncScheme)
    with LLMCollector(env(), wrapper(), dialog_turns_per_batch=1, track_policy_version=True) as collector:
        collector.register_scheme_receiver({"policy": receiver})
        sender.send()
        collector.receive_weights()
        batch = collector.next()
        assert versions(batch) == {0}
        assert not changed(batch)


@pytest.mark.parametrize("workers", [0, 1])
def test_schemes_bring_weights_to_an_engine_without_a_module(workers):
    sender, receiver = scheme_from(linear(3.0))
    options = {"dialog_turns_per_batch": 2, "track_policy_version": True, "policy_factory": FakePolicy}
    options |= {"num_collectors": workers} if workers else {}
    with LLMCollector(partial(FakeEnv, 2, epochs=None), **options) as collector:
        collector.register_scheme_receiver({"policy": receiver}, synchronize_weights=False)
        sender.send()
        collector.receive_weights()
        next(found for found in collector if versions(found) == {1})
        weights = collector.getattr_policy("engine.weights")
        assert (weights[0] if workers else weights)["weight"].tolist() == [[3.0] * 3]


def test_weights_of_a_scheme_reach_an_engine_that_generates_in_a_thread():
    sender, receiver = scheme_from(linear(3.0))
    policy, buffer = PolicyWithModel(), ReplayBuffer(storage=LazyStackStorage(100_000))
    options = {"dialog_turns_per_batch": 2, "track_policy_version": True, "replay_buffer": buffer}
    with LLMCollector(FakeEnv(2, epochs=None), policy, **options) as collector:
        collector.register_scheme_receiver({"policy": receiver}, synchronize_weights=False)
        collector.start()
        assert wait_until(lambda: buffer.write_count > 2)
        sender.send()
        collector.receive_weights()
        assert collector.policy_version == 1
        written = buffer.write_count
        assert wait_until(lambda: buffer.write_count > written + 20)
        assert policy.engine.model.weight.tolist() == [[3.0] * 3]
    stamped = [int(version) for row in buffer[:] for version in row["tokens_policy_version"]]
    assert stamped == sorted(stamped)
    assert set(stamped) == {0, 1}


@pytest.mark.parametrize("in_place", [False, True])
def test_weights_that_an_updater_brings_are_counted_once(in_place):
    policy = wrapper()
    weights = TensorDict.from_module(policy.model) if in_place else None
    updater = VanillaWeightUpdater(weight_getter=lambda: TensorDict.from_module(trained()), policy_weights=weights)
    options = {"dialog_turns_per_batch": 1, "track_policy_version": True, "weight_updater": updater}
    with LLMCollector(env(), policy, **options) as collector:
        assert versions(collector.next()) == {0}
        assert collector.update_policy_weights_() == collector.policy_version == 1
        batch = collector.next()
        assert versions(batch) == {1}
        assert changed(batch)


def test_weights_of_a_scheme_that_do_not_fit_change_nothing():
    sender, receiver = scheme_from(nn.Linear(2, 1))
    with LLMCollector(env(), wrapper(), dialog_turns_per_batch=1, track_policy_version=True) as collector:
        collector.register_scheme_receiver({"policy": receiver}, synchronize_weights=False)
        sender.send()
        with pytest.raises(ValueError, match="names differ"):
            collector.receive_weights()
        assert collector.policy_version == 0
        batch = collector.next()
        assert versions(batch) == {0}
        assert not changed(batch)


class Remembers(FakeEngine):
    """Keeps how it was updated; a worker sends it as text."""

    def update_weights(self, weights, version=None, **how):
        self.how = str(how)
        super().update_weights(weights, version)


class RemembersPolicy(FakePolicy):
    def __init__(self):
        self.engine = Remembers()


@pytest.mark.parametrize("options", [{}, {"weight_update_mode": "between_turns"}, {"weight_update_cache": "rebuild"}])
@pytest.mark.parametrize("where", ["here", "thread", "worker"])
def test_how_weights_are_updated_reaches_the_engine(options, where):
    given = {"dialog_turns_per_batch": 2, "policy_factory": RemembersPolicy, **options}
    given |= {"num_collectors": 1} if where == "worker" else {}
    given |= {"replay_buffer": ReplayBuffer(storage=LazyStackStorage(100_000))} if where == "thread" else {}
    with LLMCollector(partial(FakeEnv, 2, epochs=None), **given) as collector:
        if where == "thread":
            collector.start()
        collector.update_policy_weights_({"weight": torch.ones(1)})
        if where == "thread":
            assert wait_until(lambda: hasattr(collector.policy.engine, "how"))
        else:
            next(iter(collector))
        found = collector.getattr_policy("engine.how")
        expected = {name.removeprefix("weight_update_"): value for name, value in options.items()}
        assert (found[0] if where == "worker" else found) == str(expected)


def test_unknown_ways_to_update_weights_are_errors():
    for name in ("weight_update_mode", "weight_update_cache"):
        with pytest.raises(ValueError, match=f"{name}: expected .* got 'later'"):
            LLMCollector(FakeEnv(2), FakePolicy(), dialog_turns_per_batch=2, **{name: "later"})


def weights_of(version):
    generator = torch.Generator().manual_seed(version)
    state = llm_models.model(tie_word_embeddings=False).state_dict()
    return {name: value + 0.05 * torch.randn(value.shape, generator=generator) for name, value in state.items()}


def difference(row):
    """The largest difference of a log-probability from that of a forward pass under the version of its token."""
    model, stamps, worst = llm_models.model(tie_word_embeddings=False), row["tokens_policy_version"], 0.0
    for version in set(stamps.tolist()):
        model.load_state_dict(weights_of(version))
        with torch.no_grad():
            logits = model(row["tokens"][None]).logits[0, -len(stamps) - 1 : -1].log_softmax(-1)
        found = logits.gather(-1, row["tokens_response"][:, None])[:, 0] - row["log_probs"]
        worst = max(worst, float(found[stamps == version].abs().max()))
    return worst


@pytest.mark.parametrize("mode", ["in_flight", "between_turns", "wait", "resubmit"])
def test_updates_while_a_thread_collects_lose_no_conversation(mode):
    tokenizer, buffer = llm_models.tokenizer(), ReplayBuffer(storage=LazyStackStorage(1000))
    data = [{"text": "one" * (index % 5 + 1)} for index in range(64)]
    model = llm_models.model(tie_word_embeddings=False)
    model.load_state_dict(weights_of(0))
    policy = TransformersWrapper(model, tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 24})
    envs = LLMEnv.from_dataloader(data, tokenizer=tokenizer, batch_size=8, epochs=1)
    options = {"dialog_turns_per_batch": 8, "track_policy_version": True, "async_envs": True, "replay_buffer": buffer}
    how = {"weight_update_mode": mode, "weight_update_cache": "rebuild"}
    with LLMCollector(envs, policy, **options, **how) as collector:
        collector.start()
        for version in range(1, 8):
            assert collector.update_policy_weights_(weights_of(version)) == version
            assert wait_until(lambda to=8 * version: buffer.write_count >= to)
        assert wait_until(lambda: buffer.write_count == 64)
        discarded = collector.stats()["tokens_discarded"]
        assert discarded > 0 if mode == "resubmit" else discarded == 0
    rows = list(buffer[:])
    assert sorted(int(row["prompt_index"]) for row in rows) == list(range(64))
    assert max(difference(row) for row in rows[::4]) < 1e-4
    mixed = sum(len(set(row["tokens_policy_version"].tolist())) > 1 for row in rows)
    assert mixed > 0 if mode == "in_flight" else mixed == 0


def test_of_updates_that_come_at_once_the_engine_gets_the_last_with_its_own_version(monkeypatch):
    policy, given = wrapper(), []
    load = policy.engine.update_weights
    monkeypatch.setattr(
        policy.engine, "update_weights", lambda weights, version, **how: given.append(version) or load(weights, version)
    )
    buffer = ReplayBuffer(storage=LazyStackStorage(1000))
    with LLMCollector(env(), policy, dialog_turns_per_batch=1, replay_buffer=buffer) as collector:
        collector.start()
        with collector._background.thread.condition:  # its thread takes no weights meanwhile
            assert [collector.update_policy_weights_(trained()) for _ in range(3)] == [1, 2, 3]
        wait_until(lambda: policy.engine.version == 3)
        assert given == [3]


class EngineThatNotes(FakeEngine):
    """Writes the versions that it is given into a file."""

    def __init__(self, file):
        super().__init__()
        self.file = file

    def update_weights(self, weights, version=None):
        super().update_weights(weights, version)
        with self.file.open("a") as notes:
            notes.write(f"{version} ")


@contextmanager
def stopped(pid):
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


class PolicyThatNotes(FakePolicy):
    def __init__(self, file):
        self.engine = EngineThatNotes(file)


def test_of_updates_that_come_at_once_the_engine_of_a_worker_gets_the_last_with_its_own_version(tmp_path):
    make = partial(PolicyThatNotes, tmp_path / "versions")
    with LLMCollector(
        partial(FakeEnv, 2), policy_factory=make, dialog_turns_per_batch=2, num_collectors=1
    ) as collector:
        weights = {"weight": torch.ones(1)}
        collector.update_policy_weights_(weights)
        collector.next()
        collector.next()
        with stopped(collector.stats()["workers"][0]["pid"]):  # it takes no weights meanwhile
            assert [collector.update_policy_weights_(weights) for _ in range(3)] == [2, 3, 4]
        collector.next()
        collector.next()
        assert (tmp_path / "versions").read_text() == "1 4 "
