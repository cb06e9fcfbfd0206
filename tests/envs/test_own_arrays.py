"""Environments that users write, on arrays: the bits of the plain path."""

from __future__ import annotations

import warnings
from functools import partial

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import NormalParamExtractor, ProbabilisticTensorDictModule, TensorDictModule, TensorDictSequential
from tests.envs.libs.test_pettingzoo_arrays import assert_equal
from torch import nn

from rollwright.collectors import Collector
from rollwright.data import Bounded, Categorical, Composite, Unbounded
from rollwright.envs import (
    Compose,
    DoubleToFloat,
    EnvBase,
    GymEnv,
    ObservationNorm,
    RewardSum,
    SerialEnv,
    StepCounter,
    Transform,
    TransformedEnv,
)
from rollwright.envs.arrays import array_form
from rollwright.errors import EnvError, NotNative
from rollwright.modules import IndependentNormal


class Drift(EnvBase):
    """Moves by chance, in memory that is written again; ends by chance, too, and is reset in parts."""

    flags = ("done", "terminated", "truncated")

    def __init__(self, batch=(), truncates=True, flags=None, **options):
        super().__init__(batch_size=batch, **options)
        self.observation_spec = Composite(
            observation=Unbounded((*batch, 2)), n=Unbounded((*batch, 1), dtype=torch.int64), shape=batch
        )
        self.action_spec = Bounded(-1.0, 1.0, (*batch, 2))
        self.reward_spec = Unbounded((*batch, 1))
        self.done_spec = Categorical(2, shape=(*batch, 1), dtype=torch.bool)
        if truncates:
            self.add_truncated_keys()
        self.flags = flags or (self.flags if truncates else self.flags[:2])
        self.x, self.n = torch.zeros(*batch, 2), torch.zeros(*batch, 1, dtype=torch.int64)
        self.given = []

    def _data(self, **more):
        return TensorDict({"observation": self.x, "n": self.n, **more}, self.batch_size)

    def _reset(self, tensordict=None, **kwargs):
        mask = None if tensordict is None else tensordict.get("_reset", None)
        self.given.append(None if tensordict is None else sorted(map(str, tensordict.keys())))
        mask = torch.ones(*self.batch_size, 1, dtype=torch.bool) if mask is None else mask
        shift = 0.0 if tensordict is None else tensordict.get("observation", self.x)
        self.x.copy_(torch.where(mask, torch.rand_like(self.x) + shift / 8, self.x))
        self.n.masked_fill_(mask, 0)
        return self._data()

    def _step(self, tensordict):
        self.x += tensordict["action"] / 8 + torch.randn_like(self.x) / 8
        self.n += 1
        chance = torch.rand(*self.batch_size, 1)
        causes = {"terminated": chance < 0.2, "truncated": chance > 0.8}
        if "truncated" not in self.done_keys:
            causes["truncated"] = causes["terminated"]
        found = {**causes, "done": causes["terminated"] | causes["truncated"]}
        return self._data(reward=self.x.sum(-1), **{flag: found[flag] for flag in self.flags})

    def _set_seed(self, seed):
        pass


class Sees(Drift):
    """Observes all that its step and its reset are given."""

    def _seen(self, td):
        total = torch.zeros(*self.batch_size, 2)
        for key in sorted(td.keys(True, True), key=str):
            value = td.get(key)
            total = total * 0.5 + value.reshape(*self.batch_size, -1).float().sum(-1, keepdim=True) + value.ndim
        return total

    def _step(self, tensordict):
        return super()._step(tensordict).set("observation", self._seen(tensordict))

    def _reset(self, tensordict=None, **kwargs):
        out = super()._reset(tensordict, **kwargs)
        return out if tensordict is None else out.set("observation", self._seen(tensordict))


def stacked(env):
    env = TransformedEnv(env, StepCounter(max_steps=4))
    env.append_transform(RewardSum())
    env.append_transform(ObservationNorm(0.1, 1.5, ["observation"]))
    return env


ENVS = {
    "single": Drift,
    "batch": lambda: Drift((3,)),
    "two dimensions": lambda: Drift((2, 2)),
    "no truncation": lambda: Drift(truncates=False),
    "batch without truncation": lambda: Drift((3,), truncates=False),
    "done alone": lambda: Drift((3,), flags=("done",)),
    "causes alone": lambda: Drift((3,), flags=("terminated", "truncated")),
    "truncated alone": lambda: Drift(flags=("truncated",)),
    "terminated alone": lambda: Drift((3,), truncates=False, flags=("terminated",)),
    "transforms": lambda: stacked(Drift((3,))),
    "transforms of one": lambda: stacked(Drift()),
    "transforms that cut": lambda: stacked(Drift(truncates=False)),
    "transforms without truncation": lambda: TransformedEnv(Drift((3,), truncates=False), RewardSum()),
    "sees all": Sees,
    "sees all in a batch": lambda: Sees((3,)),
    "sees all below transforms": lambda: stacked(Sees((3,))),
    "sees all in turn": lambda: stacked(SerialEnv(2, lambda: stacked(Sees()))),
    "on a device": lambda: Drift((3,), device="cpu"),
    "serial": lambda: SerialEnv(3, Drift),
    "serial of batches": lambda: SerialEnv(2, lambda: Drift((2,))),
    "serial without truncation": lambda: SerialEnv(3, lambda: Drift(truncates=False)),
    "serial of transforms": lambda: SerialEnv(3, lambda: stacked(Drift())),
    "transforms of serial": lambda: stacked(SerialEnv(3, Drift)),
}


def acting():
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(2, 4), NormalParamExtractor())
    draw = ProbabilisticTensorDictModule(
        ["loc", "scale"], ["action"], distribution_class=IndependentNormal, return_log_prob=True
    )
    return TensorDictSequential(TensorDictModule(body, ["observation"], ["loc", "scale"]), draw)


POLICIES = {
    "tensors": acting,
    "TensorDicts": lambda: partial(TensorDictSequential.forward, acting()),
    "random": lambda: None,
}


def batches(env, policy, num=3, **options):
    collector = Collector(env, policy, frames_per_batch=36, total_frames=36 * num, **options)
    try:
        collector.set_seed(1)
        return [batch.clone() for batch in collector], collector.stats()["paths"]["env"]
    finally:
        collector.shutdown()


def assert_paths_agree(make, policy=None, **options):
    ours, path = batches(make(), policy, **options)
    compared = {key: value for key, value in options.items() if key != "return_same_td"}
    theirs, plain = batches(make(), policy, **compared, use_buffers=False)
    assert plain.startswith("plain")
    for one, other in zip(ours, theirs, strict=True):
        assert_equal(one, other)
    return ours, path


@pytest.mark.parametrize("kind", POLICIES)
@pytest.mark.parametrize("name", ENVS)
def test_frames_are_those_of_the_plain_path(name, kind):
    ours, path = assert_paths_agree(ENVS[name], POLICIES[kind]())
    assert path in ("native: NumPy arrays", "native: tensors")
    assert sum(int(batch["next", "done"].sum()) for batch in ours) > 5


class Halved(Transform):
    """Changes an entry by itself."""

    def _apply_transform(self, obs):
        return obs / 2


class Ends(Transform):
    """Reads all flags that it is given, and sets one of them now and then."""

    def __init__(self, flag=None):
        super().__init__()
        self.flag = flag

    def _step(self, tensordict, next_tensordict):
        flags = sorted(key for key in Drift.flags if key in next_tensordict)
        next_tensordict["observation"] += len(flags)
        if self.flag:
            next_tensordict[self.flag] = next_tensordict[self.flag] | (next_tensordict["n"] == 3)
        return next_tensordict

    def _reset(self, tensordict, tensordict_reset):
        return tensordict_reset


class Widens(Halved):
    """Gives an entry another form than its spec announces, later on."""

    def _apply_transform(self, obs):
        return obs.double() if obs.sum() > 1 else obs


OWN_TRANSFORMS = {
    "by entry": lambda: [Halved(["observation"])],
    "whole": lambda: [Ends()],
    "before truncation": lambda: [Ends(), StepCounter(4)],
    "after truncation": lambda: [StepCounter(4), Ends()],
    "with an end": lambda: [Ends("done")],
    "with a cause": lambda: [StepCounter(5), Ends("terminated"), RewardSum()],
}
WITHOUT_TRUNCATION = {
    "single": lambda: Drift(truncates=False),
    "batch": lambda: Drift((3,), truncates=False),
    "serial": lambda: SerialEnv(2, lambda: Drift(truncates=False)),
}


@pytest.mark.parametrize("name", WITHOUT_TRUNCATION)
@pytest.mark.parametrize("kind", OWN_TRANSFORMS)
def test_own_transforms_need_no_truncation(kind, name):
    ours, path = assert_paths_agree(
        lambda: TransformedEnv(WITHOUT_TRUNCATION[name](), Compose(*OWN_TRANSFORMS[kind]())), acting()
    )
    assert path.startswith("native: NumPy arrays; ")
    assert ("truncated" in ours[0]["next"]) == ("truncation" in kind or kind == "with a cause")


def test_own_transforms_that_break_their_specs_need_no_truncation():
    def make():
        return TransformedEnv(Drift(truncates=False), Compose(Widens(["observation"]), RewardSum()))

    with pytest.raises(EnvError) as ours:
        batches(make(), None)
    with pytest.raises(EnvError) as theirs:
        batches(make(), None, use_buffers=False)
    assert (type(ours.value), str(ours.value)) == (type(theirs.value), str(theirs.value))


@pytest.mark.parametrize(
    "options",
    [
        {"compact_obs": True},
        {"set_truncated": True},
        {"return_same_td": True},
        {"init_random_frames": 72},
        {"reset_at_each_iter": True},
        {"track_traj_ids": False},
        {"max_frames_per_traj": 3},
        {"track_policy_version": True},
    ],
    ids=str,
)
def test_options_give_the_bits_of_the_plain_path(options):
    _, path = assert_paths_agree(lambda: Drift((3,)), acting(), **options)
    assert path.startswith("native")


@pytest.mark.parametrize("batch", [(), (3,)])
def test_a_reset_is_given_what_the_plain_path_gives_it(batch):
    given = []
    for use_buffers in (None, False):
        env = Drift(batch)
        batches(env, acting(), use_buffers=use_buffers, track_traj_ids=False)
        given.append(env.given)
    assert given[0] == given[1]
    assert None in given[0]
    assert any(keys is not None and "_reset" in keys and "loc" in keys for keys in given[0])


def test_flags_may_contradict_one_another():
    class Contradicts(Drift):
        def _step(self, tensordict):
            out = super()._step(tensordict)
            return out.set("done", torch.rand(3, 1) < 0.1)

    ours, path = assert_paths_agree(lambda: Contradicts((3,)), acting())
    assert path == "native: tensors"
    following = torch.cat(ours, -1)["next"]
    assert (following["done"] & ~following["terminated"] & ~following["truncated"]).any()


# What arrays cannot hold ------------------------------------------------------------------------------


class More(Drift):
    """Returns an entry that no spec announces, from a step or a reset on."""

    first, at_reset = 1, False

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.calls = 0

    def _step(self, tensordict):
        out = super()._step(tensordict)
        if self.at_reset:
            return out
        self.calls += 1
        return out.set("info", torch.rand(*self.batch_size, 1)) if self.calls >= self.first else out

    def _reset(self, tensordict=None, **kwargs):
        out = super()._reset(tensordict, **kwargs)
        if not self.at_reset:
            return out
        self.calls += 1
        return out.set("info", torch.rand(*self.batch_size, 1)) if self.calls >= self.first else out


def more(first, at_reset, batch, wrap):
    return wrap(type("Some", (More,), {"first": first, "at_reset": at_reset})(batch))


@pytest.mark.parametrize("wrap", [lambda env: env, stacked], ids=["bare", "transforms"])
@pytest.mark.parametrize("batch", [(), (3,)])
@pytest.mark.parametrize("at_reset", [False, True])
@pytest.mark.parametrize("first", [1, 2, 5])
def test_entries_that_no_spec_announces_are_collected_on_tensordicts(first, at_reset, batch, wrap):
    ours, path = assert_paths_agree(lambda: more(first, at_reset, batch, wrap), acting())
    call = "reset" if at_reset else "step"
    assert path == f"plain: its {call} returns 'info', which no spec announces"
    assert ours[-1].get("info", None) is not None


@pytest.mark.parametrize("first", [1, 5])
@pytest.mark.parametrize("batch", [(), (3,)])
def test_environments_with_a_device_go_on_with_it(batch, first):
    kind = type("Some", (More,), {"first": first})
    for make in (lambda: kind(batch, device="cpu"), lambda: stacked(kind(batch, device="cpu"))):
        _, path = assert_paths_agree(make, acting())
        assert path.startswith("plain: its step returns 'info'")


@pytest.mark.parametrize("first", [1, 4, 9, 11])
def test_random_batches_are_handed_over_too(first):
    _, path = assert_paths_agree(lambda: more(first, False, (3,), lambda env: env), acting(), init_random_frames=36)
    assert path.startswith("plain: its step returns 'info'")


def test_the_first_step_may_lack_what_others_have():
    assert_paths_agree(lambda: more(2, True, (3,), lambda env: env), acting(), compact_obs=True)


@pytest.mark.parametrize("first", [1, 3])
def test_environments_in_turn_go_on_with_tensordicts_together(first):
    kind = type("Some", (More,), {"first": first})
    ours, path = assert_paths_agree(lambda: SerialEnv(3, kind), acting())
    assert path.startswith("plain: its step returns 'info'")
    assert ours[-1]["next", "info"].shape == (3, 12, 1)


@pytest.mark.parametrize("call", ["step", "reset"])
def test_rows_of_different_entries_are_the_error_of_the_plain_path(call):
    kinds = [type("Some", (More,), {"at_reset": call == "reset", "first": first}) for first in (9, 2)]
    texts = []
    for use_buffers in (None, False):
        env = SerialEnv(3, [Drift, *kinds])
        with Collector(env, None, frames_per_batch=300, use_buffers=use_buffers) as collector:
            collector.set_seed(0)
            with pytest.raises(EnvError) as caught:
                collector.next()
        texts.append(str(caught.value))
    assert texts[0] == texts[1]
    assert "raised in" in texts[0]


class Odd(Drift):
    """Every fourth step returns the same in another form."""

    def __init__(self, form=None, at=0):
        super().__init__()
        self.form, self.calls = form, at

    def _step(self, tensordict):
        out = super()._step(tensordict)
        self.calls += 1
        return out if self.form is None or self.calls % 4 else FORMS[self.form](out)


FORMS = {
    "a plain dictionary's order": lambda out: TensorDict(dict(reversed(list(out.items()))), []),
    "no truncated": lambda out: out.set("done", out["done"] | out["truncated"]).exclude("truncated"),
    "done alone": lambda out: out.exclude("truncated", "terminated"),
    "rewards of two shapes": lambda out: out.set("reward", out["reward"].reshape(1, 1, 1)),
    "gradients": lambda out: out.set("observation", out["observation"].clone().requires_grad_()),
    "flags without a dimension": lambda out: out.set("done", out["done"].squeeze(-1)),
    "causes without an end": lambda out: out.set("done", torch.zeros(1, dtype=torch.bool)),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rows", [(0, 1, 1), (0, 0, 1), (1, 1, 1)])
def test_rows_in_other_forms_are_those_of_the_plain_path(form, rows):
    def make():
        return SerialEnv(3, [partial(Odd, form if row else None, at) for at, row in enumerate(rows)])

    assert_paths_agree(make, acting())


def test_rows_keep_their_own_memory():
    class Keeps(Drift):
        """Observes what its last step was given, which it has kept."""

        last = None

        def _step(self, tensordict):
            seen = self.last
            self.last = tensordict["loc"]
            out = super()._step(tensordict)
            return out if seen is None else out.set("observation", seen)

    assert_paths_agree(lambda: SerialEnv(3, Keeps), acting())


class Flat(Drift):
    """Flags without a last dimension."""

    def __init__(self):
        super().__init__((3,))
        flag = Categorical(2, shape=(3,), dtype=torch.bool)
        self.done_spec = Composite(done=flag, terminated=flag.clone(), shape=(3,))
        self.flags = ("done", "terminated")

    def _step(self, tensordict):
        out = super()._step(tensordict)
        return out.update({flag: out[flag].squeeze(-1) for flag in self.flags})

    def _reset(self, tensordict=None, **kwargs):
        marks = None if tensordict is None else TensorDict({"_reset": tensordict["_reset"].unsqueeze(-1)}, [3])
        return super()._reset(marks)


def test_flags_of_another_shape_keep_it():
    ours, path = assert_paths_agree(Flat)
    assert path.startswith("plain: its flags have another shape")
    assert ours[0]["next", "done"].shape == (3, 12)


class Contradicts(Drift):
    """Terminates without ``done``; the first read fails where the batch size is not given."""

    bare = False

    def _step(self, tensordict):
        out = super()._step(tensordict)
        out = TensorDict({**out, "terminated": out["done"], "done": torch.zeros_like(out["done"])}, out.batch_size)
        out.pop("truncated", None)
        return TensorDict(dict(out.items()), []) if self.bare else out


@pytest.mark.parametrize("bare", [False, True])
@pytest.mark.parametrize("batch", [(), (3,)])
def test_causes_without_an_end_are_those_of_the_plain_path(batch, bare):
    kind = type("Some", (Contradicts,), {"bare": bare})
    assert_paths_agree(lambda: kind(batch), acting())
    assert_paths_agree(lambda: kind(batch, truncates=False), acting())


def test_a_step_that_is_exchanged_is_the_one_that_is_called():
    env = Drift()
    with Collector(env, None, frames_per_batch=4) as collector:
        collector.next()
        seen, inner = [], env._step
        env._step = lambda td: seen.append(1) or inner(td)
        collector.next()
    assert len(seen) == 4


def test_dtypes_that_arrays_do_not_know_take_the_plain_path():
    env = Drift()
    env.observation_spec = Composite(observation=Unbounded((2,), dtype=torch.float8_e4m3fn))
    with pytest.raises(NotNative, match="is of dtype"):
        array_form(env, unfit=True)


class Broken(Drift):
    def __init__(self, change, **options):
        super().__init__(**options)
        self.change = change

    def _step(self, tensordict):
        return self.change(super()._step(tensordict), tensordict)


def fail(out, td):
    raise ZeroDivisionError("no way")


ERRORS = {
    "returned no 'n'": lambda out, td: out.exclude("n"),
    "'n' with dtype torch.float32": lambda out, td: out.set("n", out["n"].float()),
    r"'observation' with shape \[2, 1\]": lambda out, td: out.set("observation", out["observation"].unsqueeze(-1)),
    "'reward' with dtype": lambda out, td: out.set("reward", out["reward"].double()),
    "returned no 'done'": lambda out, td: out.exclude("done", "terminated", "truncated"),
    "returned the TensorDict it was given": lambda out, td: td.update(out),
    "an entry 'next'": lambda out, td: out.set("next", TensorDict({})),
    "must return a TensorDict, got dict": lambda out, td: dict(out),
    "raised in step: ZeroDivisionError: no way": fail,
    "raised in step: KeyError": lambda out, td: td["nothing"],
}


@pytest.mark.parametrize("said", ERRORS)
def test_errors_of_a_row_are_those_of_the_plain_path(said):
    found = []
    for use_buffers in (None, False):
        env = SerialEnv(3, [Drift, partial(Broken, ERRORS[said]), Drift])
        with pytest.raises(EnvError, match=said) as raised:
            batches(env, acting(), use_buffers=use_buffers, track_traj_ids=False)
        found.append((type(raised.value), str(raised.value)))
    assert found[0] == found[1]
    assert "SerialEnv[1]" in found[0][1]


@pytest.mark.parametrize("said", ERRORS)
def test_errors_are_those_of_the_plain_path(said):
    found = []
    for use_buffers in (None, False):
        with pytest.raises(EnvError, match=said) as raised:
            batches(Broken(ERRORS[said]), acting(), use_buffers=use_buffers, track_traj_ids=False)
        found.append((type(raised.value), str(raised.value)))
    assert found[0] == found[1]


def test_what_is_done_right_after_a_reset_is_an_error():
    class Ends(Drift):
        def _reset(self, tensordict=None, **kwargs):
            return super()._reset(tensordict, **kwargs).set("done", torch.tensor([tensordict is not None]))

    for use_buffers in (None, False):
        with pytest.raises(EnvError, match="'done' is True right after reset"):
            batches(Ends(), acting(), use_buffers=use_buffers)


class Pulls(Drift):
    def step_outcome(self, tensordict):
        return super().step_outcome(tensordict)


class Stateful(Drift):
    def __init__(self):
        super().__init__()
        self.state_spec = Composite(k=Unbounded((1,)))


class Stepped(GymEnv):
    def _step(self, tensordict):
        return super()._step(tensordict)


REFUSED = {
    "Pulls overrides step_outcome": Pulls,
    "it has states that are no observations": Stateful,
    "run_type_checks=True": lambda: Drift(run_type_checks=True),
    "Stepped overrides _step": lambda: Stepped("CartPole-v1"),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_has_no_array_form_says_why(why):
    with pytest.raises(NotNative, match=why):
        array_form(REFUSED[why](), unfit=True)


def test_only_who_can_go_on_with_tensordicts_takes_the_array_form():
    recreated = partial(SerialEnv, 2, Drift, on_env_failure="recreate")
    for make in (Drift, partial(SerialEnv, 2, Drift), recreated, lambda: TransformedEnv(Drift(), DoubleToFloat())):
        with pytest.raises(NotNative, match="may return what its specs do not announce"):
            array_form(make())
        assert array_form(make(), unfit=True).may_be_unfit


# State ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("saved_by", [None, False])
def test_a_restored_collector_goes_on_with_the_same_bits(saved_by):
    def make(use_buffers):
        return Collector(stacked(Drift((3,))), policy, frames_per_batch=12, total_frames=60, use_buffers=use_buffers)

    policy = acting()
    collector = make(saved_by)
    collector.set_seed(4)
    iterator = iter(collector)
    next(iterator)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state = collector.state_dict()
    expected = next(iterator).clone()
    for use_buffers in (None, False):
        other = make(use_buffers)
        other.load_state_dict(state)
        assert_equal(next(iter(other)), expected)
        other.shutdown()
    collector.shutdown()


def test_specs_that_change_are_seen():
    env = Drift()
    collector = Collector(env, acting(), frames_per_batch=5, total_frames=10)
    iterator = iter(collector)
    next(iterator)
    env.observation_spec = Composite(observation=Unbounded((2,)), n=Unbounded((1,), dtype=torch.float32))
    with pytest.raises(EnvError, match="'n' with dtype"):
        next(iterator)
    collector.shutdown()
