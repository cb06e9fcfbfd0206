"""Transforms that work on TensorDicts are called on TensorDicts while the environment is stepped on arrays."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict
from tests.variants import in_turn
from torch import nn

from rollwright import Collector
from rollwright.data import Composite, Unbounded
from rollwright.envs import SerialEnv, TransformedEnv
from rollwright.envs.transforms import (
    Compose,
    DoubleToFloat,
    ExcludeTransform,
    FrameSkipTransform,
    InitTracker,
    ObservationNorm,
    RewardSum,
    StepCounter,
    TensorDictPrimer,
    Transform,
)
from rollwright.errors import EnvError

KEY = ["observation"]


class Clipped(Transform):
    """Changes an entry by one function, at resets too."""

    def _apply_transform(self, obs):
        return obs.clamp(-0.5, 0.5)

    def _reset(self, tensordict, tensordict_reset):
        return self._call(tensordict_reset)


class InPlace(Transform):
    """Writes into the tensors that it is given."""

    def _call(self, next_tensordict):
        next_tensordict["observation"].mul_(2)
        if next_tensordict.get("reward", None) is not None:
            next_tensordict["reward"].add_(1)
        return next_tensordict

    def _reset(self, tensordict, tensordict_reset):
        return self._call(tensordict_reset)


class SeesRoot(Transform):
    """Writes all that it sees of the root into an entry."""

    def transform_observation_spec(self, observation_spec):
        spec = observation_spec.clone()
        return spec.set("seen", Unbounded((*self.parent.batch_size, 1)))

    def _step(self, tensordict, next_tensordict):
        total = torch.zeros(*tensordict.batch_size, 1)
        for key in sorted(tensordict.keys(True, True), key=str):
            value = tensordict.get(key)
            total = total * 0.5 + value.reshape(*tensordict.batch_size, -1).float().sum(-1, keepdim=True)
        return next_tensordict.set("seen", total)

    def _reset(self, tensordict, tensordict_reset):
        return tensordict_reset.set(
            "seen", torch.full((*tensordict_reset.batch_size, 1), float(len(tensordict.keys())))
        )


class Episodes(Transform):
    """Counts episodes, from what went on before a reset."""

    def transform_observation_spec(self, observation_spec):
        spec = observation_spec.clone()
        return spec.set(("count", "episodes"), Unbounded((*self.parent.batch_size, 1), dtype=torch.int64))

    def _step(self, tensordict, next_tensordict):
        return next_tensordict.set(("count", "episodes"), tensordict["count", "episodes"].clone())

    def _reset(self, tensordict, tensordict_reset):
        before = tensordict.get(("count", "episodes"), None)
        marks = tensordict.get("_reset", None)
        count = torch.zeros(*tensordict_reset.batch_size, 1, dtype=torch.int64) if before is None else before.clone()
        count += 1 if marks is None else marks.long()
        return tensordict_reset.set(("count", "episodes"), count)


class Cut(Transform):
    """Ends a trajectory after some steps, by one flag."""

    def __init__(self, flag, after=4):
        super().__init__()
        self.flag, self.after = flag, after

    def _step(self, tensordict, next_tensordict):
        ends = next_tensordict["step_count"] >= self.after
        return next_tensordict.set(self.flag, next_tensordict[self.flag] | ends)


class TwoEntries(Transform):
    """Makes two entries of one, which it changes as well; and one of the reward."""

    def __init__(self):
        super().__init__(["observation", "observation", "reward"], ["a", "b", "reward"])

    def _apply_transform(self, obs):
        return obs.mul_(0.5) + 1

    def transform_observation_spec(self, observation_spec):
        spec = observation_spec.clone()
        return spec.set("a", spec["observation"].clone()).set("b", spec["observation"].clone())


class Replaced(Transform):
    """Gives the tensors that it was given other memory, or other strides."""

    def _call(self, next_tensordict):
        next_tensordict["observation"].data = next_tensordict["observation"] * 2 + 1
        next_tensordict["terminated"].set_(next_tensordict["terminated"].clone())
        return next_tensordict


class ReplacedByEntry(Transform):
    """The same, of one entry."""

    def _apply_transform(self, obs):
        obs.data = obs * 2
        return obs


class Shaped(Transform):
    """Adds to the reward what the observation has gained, and keeps the mean of all observations."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))

    def _step(self, tensordict, next_tensordict):
        gain = (next_tensordict["observation"] - tensordict["observation"]).sum(-1, keepdim=True)
        self.mean.mul_(0.9).add_(next_tensordict["observation"].reshape(-1, 3).mean(0), alpha=0.1)
        next_tensordict.set("reward", next_tensordict["reward"] + gain + self.mean.sum())
        return next_tensordict


class Renamed(Transform):
    """Takes an entry away, and adds one with a batch of its own."""

    def transform_observation_spec(self, observation_spec):
        spec = observation_spec.clone()
        leaf = spec["observation"]
        del spec["observation"]
        return spec.set("agent", Composite(seen=leaf, shape=self.parent.batch_size))

    def _call(self, next_tensordict):
        value = next_tensordict.pop("observation")
        return next_tensordict.set(("agent", "seen"), value)

    def _reset(self, tensordict, tensordict_reset):
        return self._call(tensordict_reset)


class Louder(Transform):
    """Doubles the action on the way in."""

    def _inv_apply_transform(self, state):
        return state.clone()


def loud():
    return Louder(in_keys_inv=["action"], out_keys_inv=["action"])


class WayIn(Transform):
    """Moves some of the actions on, by chance, and writes what it was given."""

    def _inv_call(self, tensordict):
        action = tensordict["action"]
        moved = torch.rand(*tensordict.batch_size, 1) < 0.3
        total = sum(value.double().sum() for value in tensordict.values(True, True))
        tensordict["total"] = torch.full((*tensordict.batch_size, 1), float(total))
        return tensordict.set("action", torch.where(moved, action.roll(1, -1), action))


class WayInOfAll(WayIn):
    """Changes an observation and a count, too, in place and not; drops an entry; and shows what it has done."""

    def _inv_call(self, tensordict):
        tensordict["observation"] = tensordict["observation"] + 1
        if tensordict.get("step_count", None) is not None:
            tensordict["step_count"] = tensordict["step_count"] * 2
        return TensorDict(
            {"seen": tensordict["observation"].sum(-1, keepdim=True), **tensordict}, tensordict.batch_size
        )

    def _step(self, tensordict, next_tensordict):
        seen = tensordict["seen"] + ("is_init" in tensordict)
        return next_tensordict.set("observation", next_tensordict["observation"] + seen / 100)


CHAINS = {
    "way in": WayIn,
    "way in, counted": lambda: Compose(StepCounter(9), WayIn(), RewardSum()),
    "way in of all": lambda: Compose(WayInOfAll(), StepCounter(9)),
    "way in of all, counted": lambda: Compose(StepCounter(9), WayInOfAll(), InitTracker()),
    "clipped": lambda: Clipped(KEY),
    "in place": InPlace,
    "two of one": TwoEntries,
    "replaced": Replaced,
    "replaced by entry": lambda: ReplacedByEntry(KEY),
    "sees root": SeesRoot,
    "episodes": Episodes,
    "truncated alone": lambda: Compose(StepCounter(), Cut("truncated")),
    "terminated alone": lambda: Compose(StepCounter(), Cut("terminated"), RewardSum()),
    "shaped": lambda: Compose(Shaped(), RewardSum()),
    "renamed": Renamed,
    "on the way in": loud,
    "between": lambda: Compose(ObservationNorm(0.1, 2.0, KEY), Clipped(KEY), RewardSum(), SeesRoot(), StepCounter(3)),
    "several": lambda: Compose(Clipped(KEY), SeesRoot(), InitTracker(), Episodes(), InPlace()),
    "primed": lambda: Compose(TensorDictPrimer(r=Unbounded((2,)), random=True), SeesRoot()),
}
BASES = ["reused buffer", "sync disabled", "sync same step", "serial", "transformed serial"]


def chained(make, chain):
    return lambda: TransformedEnv(make(), CHAINS[chain]())


def inside(make, chain):
    """A batch of environments that each have a chain of their own."""
    return lambda: SerialEnv(3, chained(make, chain))


@pytest.mark.parametrize(("chain", "base"), in_turn(CHAINS, BASES))
def test_frames_are_those_of_the_plain_path(both, lab, base, chain):
    first, _ = both(chained(lab.envs[base], chain), "one-hot", batches=4)
    assert "on TensorDicts" in first.then["env"]
    assert first.then["env"].startswith("native")


@pytest.mark.parametrize(("chain", "base"), in_turn(CHAINS, ["reused buffer", "init", "sync disabled"]))
def test_frames_of_members_are_those_of_the_plain_path(both, lab, base, chain):
    if base == "init" and chain == "several":
        chain = "between"  # an environment has one InitTracker
    first, _ = both(inside(lab.envs[base], chain), "one-hot", batches=4)
    assert "on TensorDicts" in first.then["env"]


OPTIONS = {
    "versions": {"track_policy_version": True},
    "no ids": {"track_traj_ids": False},
    "compact": {"compact_obs": True},
    "cut": {"set_truncated": True},
    "random": {"init_random_frames": 20},
    "same td": {"return_same_td": True},
    "anew": {"reset_at_each_iter": True},
    "trajectories": {"max_frames_per_traj": 5},
}


@pytest.mark.parametrize(("option", "base"), in_turn(OPTIONS, ["reused buffer", "serial"]))
@pytest.mark.parametrize("chain", ["sees root", "several"])
def test_options(both, lab, option, base, chain):
    both(chained(lab.envs[base], chain), "one-hot", batches=4, options=lambda: OPTIONS[option])


@pytest.mark.parametrize("base", ["h", "primed serial"])
def test_recurrent_states_are_seen(both, lab, base):
    both(lambda: TransformedEnv(lab.envs[base](), SeesRoot()), "recurrent", batches=4)
    both(lambda: SerialEnv(2, lambda: TransformedEnv(lab.envs[base](), SeesRoot())), "recurrent", batches=4)


@pytest.mark.parametrize("base", ["reused buffer", "init"])
def test_members_see_what_transforms_around_the_batch_have_written(both, lab, base):
    def make():
        inner = SerialEnv(3, lambda: TransformedEnv(lab.envs[base](), Compose(SeesRoot(), StepCounter())))
        return TransformedEnv(inner, Compose(RewardSum(), Episodes(), Clipped(["seen"])))

    both(make, "one-hot", batches=4, options=lambda: {"track_policy_version": True})


class SecondReward(Transform):
    """Another reward."""

    def transform_reward_spec(self, reward_spec):
        return reward_spec.clone().set("r2", reward_spec["reward"].clone())

    def _call(self, next_tensordict):
        return next_tensordict.set("r2", next_tensordict["reward"] * 2)


def test_no_root_holds_rewards_of_transforms_around(both, lab):
    def make():
        inner = SerialEnv(2, lambda: TransformedEnv(lab.envs["reused buffer"](), SeesRoot()))
        return TransformedEnv(inner, SecondReward())

    both(make, "one-hot", batches=3)


class Deep(Transform):
    """Writes a nested TensorDict with a batch size of its own."""

    def transform_observation_spec(self, observation_spec):
        batch = self.parent.batch_size
        return observation_spec.clone().set("agent", Composite(x=Unbounded((*batch, 3, 1)), shape=(*batch, 3)))

    def _call(self, next_tensordict):
        inner = TensorDict({"x": next_tensordict["observation"][..., None]}, [*next_tensordict.batch_size, 3])
        return next_tensordict.set("agent", inner)

    def _reset(self, tensordict, tensordict_reset):
        return self._call(tensordict_reset)


def test_batch_sizes_of_nested_entries_are_kept(both, lab):
    first, _ = both(lambda: TransformedEnv(lab.envs["serial"](), Deep()), "one-hot", batches=3)
    assert first.batches[0]["agent"].batch_size == (3, 4, 3)


def test_frame_skips_above_such_transforms_are_taken_on_tensordicts(both, lab):
    def members():
        inner = SerialEnv(2, lambda: TransformedEnv(lab.envs["reused buffer"](), InPlace()))
        return TransformedEnv(inner, FrameSkipTransform(3))

    both(members, "one-hot", batches=3, expect="its steps cannot be repeated")


def test_contradictions_inside_a_batch_with_other_forms_around_it(both, lab):
    class Quiet2(Quiet):
        """Contradicts at some steps."""

    def make():
        inner = SerialEnv(2, lambda: TransformedEnv(lab.envs["reused buffer"](), Compose(InitTracker(), Quiet2())))
        return TransformedEnv(inner, ExcludeTransform("is_init"))

    both(make, "one-hot", batches=3)


@pytest.mark.parametrize("index", [None, 0, [0, 2]])
def test_resets_by_hand(both, lab, index):
    def script(collector, i):
        if i in (1, 3):
            collector.reset(index)

    both(chained(lab.envs["serial"], "several"), "one-hot", batches=5, script=script)


# What specs do not announce ----------------------------------------------------------------------------------------


class Extra(Transform):
    """Writes an entry that no spec announces, from some step on."""

    def __init__(self, first=0, at_reset=False):
        super().__init__()
        self.first, self.at_reset, self.count = first, at_reset, 0

    def _call(self, next_tensordict):
        self.count += 1
        if self.count > self.first:
            next_tensordict.set("extra", next_tensordict["observation"] * 2)
        return next_tensordict

    def _reset(self, tensordict, tensordict_reset):
        return self._call(tensordict_reset) if self.at_reset else tensordict_reset


class Late(Extra):
    """Gives the observation another dtype than announced, from some step on, for the next transform to mend."""

    def _call(self, next_tensordict):
        self.count += 1
        if self.count > self.first:
            next_tensordict.set("observation", next_tensordict["observation"].double())
        return next_tensordict


class ExtraAtSecondReset(Extra):
    """Writes an entry that no spec announces at resets after the first."""

    def _call(self, next_tensordict):
        return next_tensordict

    def _reset(self, tensordict, tensordict_reset):
        self.count += 1
        return (
            tensordict_reset.set("extra", tensordict_reset["observation"] * 2) if self.count > 1 else tensordict_reset
        )


class Wide(Transform):
    """Gives the observation a dtype that its specs do not announce, by one function."""

    def __init__(self, first=0):
        super().__init__(KEY)
        self.first, self.count = first, 0

    def _apply_transform(self, obs):
        self.count += 1
        return obs.double() if self.count > self.first else obs


class Mended(Transform):
    """Gives the observation its dtype again."""

    def _call(self, next_tensordict):
        return next_tensordict.set("observation", next_tensordict["observation"].float())

    def _reset(self, tensordict, tensordict_reset):
        return self._call(tensordict_reset)


UNANNOUNCED = {
    "a function": lambda: Compose(lambda td: td.set("extra", td["observation"] * 2), RewardSum()),
    "from the first reset": lambda: Compose(InitTracker(), Extra(at_reset=True), StepCounter(3)),
    "from the first step": lambda: Compose(Extra(), RewardSum()),
    "from the third step": lambda: Compose(StepCounter(), Extra(3), RewardSum(), SeesRoot()),
    "from the thirteenth step": lambda: Compose(StepCounter(4), Extra(13), Episodes()),
    "from the second reset": lambda: Compose(StepCounter(4), ExtraAtSecondReset(), Episodes()),
    "mended": lambda: Compose(Late(at_reset=True), Mended(), RewardSum()),
    "by entry, mended late": lambda: Compose(Wide(12), Mended(), StepCounter(3)),
    "mended late": lambda: Compose(Late(12), Mended(), StepCounter(3)),
}


@pytest.mark.parametrize(("chain", "base"), in_turn(UNANNOUNCED, ["reused buffer", "sync same step", "serial"]))
def test_what_specs_do_not_announce_is_kept(both, lab, base, chain):
    def make():
        return TransformedEnv(lab.envs[base](), UNANNOUNCED[chain]())

    first, _ = both(make, "one-hot", batches=4, options=lambda: {"track_policy_version": True})
    assert first.then["env"].startswith("plain"), first.then


@pytest.mark.parametrize("chain", UNANNOUNCED)
def test_what_specs_of_members_do_not_announce_is_kept(both, lab, chain):
    def make():
        return SerialEnv(3, lambda: TransformedEnv(lab.envs["reused buffer"](), UNANNOUNCED[chain]()))

    first, _ = both(make, "one-hot", batches=4)
    assert first.then["env"].startswith("plain"), first.then


@pytest.mark.parametrize("base", ["reused buffer", "serial"])
def test_a_partial_reset_by_hand_that_returns_more(both, lab, base):
    def script(collector, i):
        if i == 1:
            collector.reset(None if base == "reused buffer" else [1])

    def make():
        return TransformedEnv(lab.envs[base](), ExtraAtSecondReset())

    both(make, "one-hot", batches=1, options=lambda: {"frames_per_batch": 1})
    both(make, "one-hot", batches=3, script=script, options=lambda: {"frames_per_batch": 1})


# Errors ------------------------------------------------------------------------------------------------------------


class Raises(Transform):
    def __init__(self, at=3, what="raise"):
        super().__init__()
        self.at, self.what, self.count = at, what, 0

    def _call(self, next_tensordict):
        self.count += 1
        if self.count < self.at:
            return next_tensordict
        match self.what:
            case "raise":
                raise ZeroDivisionError("of the user")
            case "drop":
                del next_tensordict["observation"]
            case "dtype":
                next_tensordict.set("observation", next_tensordict["observation"].double())
            case "shape":
                next_tensordict.set("observation", next_tensordict["observation"][..., :2])
            case "nothing":
                return None
        return next_tensordict


class DoneAtReset(Transform):
    def _reset(self, tensordict, tensordict_reset):
        return tensordict_reset.set("done", torch.ones_like(tensordict_reset["done"]))


class RaisesAtReset(Transform):
    def _reset(self, tensordict, tensordict_reset):
        raise ZeroDivisionError("of the user")


FAULTS = {
    **{what: lambda what=what: Raises(what=what) for what in ("raise", "drop", "dtype", "shape", "nothing")},
    "first": lambda: Raises(1),
    "done at a reset": DoneAtReset,
    "raises at a reset": RaisesAtReset,
}


@pytest.mark.parametrize(("fault", "base"), in_turn(FAULTS, ["reused buffer", "serial"]))
def test_errors_are_those_of_the_plain_path(lab, base, fault):
    texts = []
    for use_buffers in (None, False):
        env = TransformedEnv(lab.envs[base](), Compose(RewardSum(), FAULTS[fault]()))
        with Collector(env, frames_per_batch=21, use_buffers=use_buffers) as collector:
            collector.set_seed(0)
            with pytest.raises(EnvError) as caught:
                collector.next()
        texts.append((str(caught.value), type(caught.value.__cause__)))
    assert texts[0] == texts[1]


class Quiet(Transform):
    """Ends nothing: takes ``done`` away from what has ended."""

    def _call(self, next_tensordict):
        return next_tensordict.set("terminated", torch.zeros_like(next_tensordict["terminated"]))


def test_flags_that_contradict_are_those_of_the_plain_path(both, lab):
    first, _ = both(lambda: TransformedEnv(lab.envs["reused buffer"](), Quiet()), "one-hot", batches=4)
    assert "'done' is not" in first.then["env"]


# Where they are not taken --------------------------------------------------------------------------------------------


class Given(Transform):
    def _reset_env_preprocess(self, tensordict):
        return tensordict


class Other(Transform):
    def inv(self, tensordict):
        return tensordict


def test_transforms_of_what_the_environment_is_given_take_the_plain_path(both, lab):
    for kind, reason in ((Given, "Given changes what a reset is given"), (Other, "Other changes what the environment")):
        both(lambda kind=kind: TransformedEnv(lab.envs["reused buffer"](), kind()), "one-hot", expect=reason)


# Saved states, and what stays of them --------------------------------------------------------------------------------


def test_a_saved_run_goes_on_with_the_same_bits(lab):
    def make():
        env = TransformedEnv(lab.envs["serial"](), Compose(Shaped(), Episodes(), StepCounter(4)))
        return Collector(env, lab.build(env, "one-hot"), frames_per_batch=12)

    with make() as collector, make() as other:
        collector.set_seed(1)
        for _ in range(3):
            collector.next()
        state = collector.state_dict()
        rest = [collector.next() for _ in range(3)]
        other.load_state_dict(state)
        for batch in rest:
            lab.assert_equal(other.next(), batch)


def test_the_transform_is_given_memory_of_its_own(lab):
    kept = []

    class Keeps(Transform):
        def _call(self, next_tensordict):
            kept.append(next_tensordict["observation"])
            return next_tensordict

    env = TransformedEnv(lab.envs["reused buffer"](), Keeps())
    with Collector(env, frames_per_batch=10) as collector:
        batch = collector.next()
    assert torch.equal(torch.stack(kept), batch["next", "observation"])


def test_what_holds_a_run_back_is_named(lab):
    env = TransformedEnv(lab.envs["reused buffer"](), Compose(Clipped(KEY), RewardSum(), SeesRoot()))
    with Collector(env, frames_per_batch=10) as collector:
        how = collector.stats()["paths"]["env"]
    assert "Clipped, SeesRoot work on TensorDicts" in how
    assert "register_array_form" in how


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.uint8])
def test_dtypes(both, lab, dtype):
    box = spaces.Box(0, 5, (2, 2), dtype)
    rest = [DoubleToFloat(KEY)] if dtype is np.float64 else []
    both(lambda: TransformedEnv(lab.toy(box)(), Compose(InPlace(), *map(copy.copy, rest))), "deterministic", batches=3)


class Layer(Transform):
    """A module among a transform's parts, without a gradient."""

    def __init__(self):
        super().__init__(in_keys=KEY, out_keys=["encoded"])
        self.layer = nn.Linear(3, 4)

    def transform_observation_spec(self, observation_spec):
        return observation_spec.clone().set("encoded", Unbounded((*self.parent.batch_size, 4)))

    def _apply_transform(self, obs):
        return self.layer(obs)

    def _reset(self, tensordict, tensordict_reset):
        return self._call(tensordict_reset)


def test_an_encoder_of_observations(both, lab):
    def make():
        torch.manual_seed(4)
        return TransformedEnv(lab.envs["serial"](), Layer())

    both(make, "one-hot", batches=3)
