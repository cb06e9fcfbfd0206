"""Members of a ParallelEnv that TensorDicts are made for are stepped on arrays, and give what the plain path gives."""

from __future__ import annotations

import os
import signal
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from tensordict import TensorDict
from tests.collectors.rollout.paths.test_on_tensordicts import (
    CHAINS,
    UNANNOUNCED,
    Episodes,
    Extra,
    ExtraAtSecondReset,
    Raises,
    RaisesAtReset,
    SeesRoot,
)
from tests.envs.libs.test_pettingzoo_arrays import assert_equal
from tests.variants import in_turn

from rollwright import Collector
from rollwright.collectors import MultiSyncCollector
from rollwright.data import Bounded, Composite, Unbounded
from rollwright.envs import EnvBase, ParallelEnv, SerialEnv, TransformedEnv
from rollwright.envs.arrays import array_form
from rollwright.envs.transforms import (
    Compose,
    InitTracker,
    RewardSum,
    StepCounter,
    TensorDictPrimer,
    Transform,
)
from rollwright.errors import EnvError, NotNative

OPTIONS = {
    "versions": {"track_policy_version": True},
    "no ids": {"track_traj_ids": False},
    "compact": {"compact_obs": True},
    "random": {"init_random_frames": 20},
    "anew": {"reset_at_each_iter": True},
}


def parallel(make, n=3):
    return ParallelEnv(n, make, num_processes=2)


@contextmanager
def closing(env):
    """Close it at the end, if no collector has."""
    try:
        yield env
    finally:
        env.close(raise_if_closed=False)


def chained(make, chain):
    return TransformedEnv(make(), chain())


SOME = ["way in of all, counted", "sees root", "episodes", "truncated alone", "shaped", "renamed", "between", "several"]


@pytest.mark.parametrize(("chain", "option"), in_turn(SOME, OPTIONS))
def test_frames_are_those_of_the_plain_path(both, lab, chain, option):
    make = partial(chained, lab.envs["reused buffer"], CHAINS[chain])
    first, _ = both(lambda: parallel(make), "one-hot", batches=4, options=lambda: OPTIONS[option])
    assert first.then["env"].startswith("native")
    assert "on TensorDicts" in first.then["env"]


@pytest.mark.parametrize("base", ["sync disabled", "serial"])
def test_members_that_are_batches(both, lab, base):
    make = partial(chained, lab.envs[base], CHAINS["several"])
    both(lambda: parallel(make, 2), "one-hot", batches=4)


def test_members_see_what_transforms_around_the_batch_have_written(both, lab):
    def make():
        inner = parallel(partial(chained, lab.envs["init"], lambda: Compose(SeesRoot(), StepCounter())))
        return TransformedEnv(inner, Compose(RewardSum(), TensorDictPrimer(h=Unbounded((5,)))))

    both(make, "recurrent", batches=4, options=lambda: {"track_policy_version": True})


class Dims(Transform):
    """Writes how many dimensions the entries of the root have."""

    def _step(self, tensordict, next_tensordict):
        dims = sum(value.ndim for value in tensordict.values(True, True))
        return next_tensordict.set("reward", next_tensordict["reward"] + dims)


def test_roots_have_the_shapes_of_the_plain_path(both, lab):
    make = partial(chained, lab.envs["reused buffer"], Dims)
    both(lambda: TransformedEnv(parallel(make, 2), StepCounter()), "one-hot", batches=2)


def test_the_forms_of_roots_are_those_of_the_batch_that_is_stepped(lab):
    """Two environments over the same processes, in turn: each has other columns in its roots."""

    def frames(use_buffers):
        make = partial(chained, lab.envs["reused buffer"], SeesRoot)
        with closing(parallel(make)) as env:
            outer = [TransformedEnv(env, RewardSum()), TransformedEnv(env, StepCounter())]
            collectors = [Collector(each, frames_per_batch=12, use_buffers=use_buffers) for each in outer]
            outer[0].set_seed(0)
            collected = []
            for i in range(4):
                collectors[i % 2].reset()
                collected.append(collectors[i % 2].next().exclude(("collector", "traj_ids")))
            return collected

    for one, other in zip(frames(None), frames(False), strict=True):
        lab.assert_equal(one, other)


# What arrays do not hold -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chain", UNANNOUNCED)
def test_what_specs_do_not_announce_is_kept(both, lab, chain):
    make = partial(chained, lab.envs["reused buffer"], UNANNOUNCED[chain])
    first, _ = both(lambda: parallel(make), "one-hot", batches=4, options=lambda: {"track_policy_version": True})
    assert first.then["env"].startswith("plain"), first.then


class Sees(Transform):
    """Changes the recurrent state that the policy has written for the next step."""

    def _step(self, tensordict, next_tensordict):
        if next_tensordict.get("h", None) is not None:
            next_tensordict.set("h", next_tensordict["h"] * 0.5)
        return next_tensordict


def primed(inner):
    return TransformedEnv(inner, TensorDictPrimer(h=Unbounded((5,))))


@pytest.mark.parametrize("chain", ["changed", "extra"])
def test_what_the_policy_writes_for_the_next_step(both, lab, chain):
    """A member may change it, and nothing of it is lost where members leave arrays."""
    of_member = {"changed": Sees, "extra": lambda: Compose(StepCounter(3), Extra(5))}[chain]
    make = partial(chained, lab.envs["reused buffer"], of_member)
    first, _ = both(lambda: primed(parallel(make)), "recurrent", batches=4)
    assert first.then["env"].startswith("plain"), first.then
    assert (first.batches[-1]["next", "h"] != 0).any()


def test_some_members_write_more_than_others_as_on_the_plain_path(lab):
    """What differs between rows cannot be stacked: the error is that of the plain path."""
    texts = []
    for use_buffers in (None, False):
        makes = [partial(chained, lab.envs["reused buffer"], partial(Extra, first)) for first in (9, 3, 9)]
        env = ParallelEnv(3, makes, num_processes=2)
        with Collector(env, frames_per_batch=30, use_buffers=use_buffers) as collector:
            collector.set_seed(0)
            with pytest.raises(EnvError) as caught:
                collector.next()
        texts.append((type(caught.value), str(caught.value)))
    assert texts[0] == texts[1]


class Doubled(Transform):
    """Gives the observation another dtype than announced at some step of one member; the reward shows that it ran."""

    def __init__(self, at=4):
        super().__init__()
        self.at, self.count = at, 0

    def _call(self, next_tensordict):
        self.count += 1
        return next_tensordict.set("reward", next_tensordict["reward"] + self.count)

    def _step(self, tensordict, next_tensordict):
        next_tensordict = self._call(next_tensordict)
        if self.count == self.at:
            ended = torch.zeros_like(next_tensordict["done"])
            next_tensordict.set("terminated", ended).set("truncated", ended)
            next_tensordict.set("done", ~ended)
        return next_tensordict


def test_one_member_that_deviates_takes_all_along_and_none_is_stepped_twice(both, lab):
    def make():
        makes = [partial(chained, lab.envs["reused buffer"], partial(Doubled, at)) for at in (99, 4, 99)]
        return ParallelEnv(3, makes, num_processes=2)

    first, _ = both(make, "one-hot", batches=4)
    assert "'done' is not" in first.then["env"]


@pytest.mark.parametrize("rows", [None, [1]])
def test_a_reset_by_hand_that_returns_more(both, lab, rows):
    def script(collector, i):
        if i == 1:
            collector.reset(rows)

    make = partial(chained, lab.envs["reused buffer"], ExtraAtSecondReset)
    if rows is None:
        both(lambda: parallel(make), "one-hot", batches=3, script=script, options=lambda: {"frames_per_batch": 3})
    else:
        both(lambda: parallel(make, 2), "one-hot", batches=1, options=lambda: {"frames_per_batch": 2})


# Environments of a user's own --------------------------------------------------------------------------------------


class Own(EnvBase):
    """A walk that ends by chance; ``extra_at`` is the step that returns an entry of no spec."""

    def __init__(self, cuts=True, extra_at=-1, dies_at=-1, fails_at=-1):
        super().__init__(batch_size=())
        self.observation_spec = Composite(position=Unbounded((2,)), memory=Composite(last=Unbounded((2,))))
        self.action_spec = Bounded(-1.0, 1.0, (2,))
        self.reward_spec = Unbounded((1,))
        if cuts:
            self.add_truncated_keys()
        self.cuts, self.extra_at, self.dies_at, self.fails_at, self.steps = cuts, extra_at, dies_at, fails_at, 0
        self.random = torch.Generator().manual_seed(0)

    def _set_seed(self, seed):
        self.random = torch.Generator().manual_seed(seed)

    def _reset(self, tensordict=None, **kwargs):
        self.at = torch.rand(2, generator=self.random)
        return TensorDict({"position": self.at, "memory": {"last": torch.zeros(2)}}, [])

    def _step(self, tensordict):
        self.steps += 1
        if self.steps == self.dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.steps == self.fails_at:
            raise RuntimeError("of the user")
        last = tensordict["memory", "last"] * 0.5 + tensordict["position"]
        self.at = self.at + 0.1 * tensordict["action"]
        ended = torch.rand(1, generator=self.random) < 0.15
        out = {"position": self.at, "memory": {"last": last}, "reward": last.sum(-1, keepdim=True), "terminated": ended}
        if self.cuts:
            out["truncated"] = torch.rand(1, generator=self.random) < 0.1
        if self.steps >= self.extra_at > 0:
            out["more"] = self.at * 2
        return TensorDict(out, [])


def wrapped(**options):
    return TransformedEnv(Own(**options), Compose(StepCounter(), RewardSum()))


def batches(make, use_buffers, number=3, kind=Collector, **options):
    with closing(make()) as env:
        torch.manual_seed(1)
        with kind(env, frames_per_batch=24, use_buffers=use_buffers, **options) as collector:
            collector.set_seed(0)
            collected = [collector.next().clone() for _ in range(number)]
            return collected, collector.stats()["paths"]["env"]


def assert_paths_agree(lab, make, **options):
    ours, path = batches(make, None, **options)
    plain, other = batches(make, False, **options)
    assert other.startswith("plain")
    for one, another in zip(ours, plain, strict=True):
        lab.assert_equal(one, another)
    return ours, path


@pytest.mark.parametrize("cuts", [True, False])
@pytest.mark.parametrize("member", [Own, wrapped])
def test_environments_of_ones_own(lab, cuts, member):
    ours, path = assert_paths_agree(lab, lambda: parallel(partial(member, cuts=cuts)), track_traj_ids=cuts)
    assert path == "native: NumPy arrays"
    assert all(batch["next", "done"].any() for batch in ours)
    assert (("next", "truncated") in ours[0].keys(True)) is cuts


@pytest.mark.parametrize("extra_at", [1, 5, 12])
@pytest.mark.parametrize("around", [False, True])
def test_entries_that_no_spec_announces(lab, extra_at, around):
    def make():
        inner = parallel(partial(Own, extra_at=extra_at))
        return TransformedEnv(inner, Compose(RewardSum(), InitTracker())) if around else inner

    ours, path = assert_paths_agree(lab, make)
    assert path == "plain: its step returns 'more', which no spec announces"
    assert ours[-1].get("more", None) is not None


def test_members_that_are_serial(lab):
    _, path = assert_paths_agree(lab, lambda: parallel(lambda: SerialEnv(2, Own), 2))
    assert path == "native: NumPy arrays"


# Failures ----------------------------------------------------------------------------------------------------------


FAULTS = {
    "raises": lambda: Raises(3),
    "drops": lambda: Raises(3, "drop"),
    "at a reset": RaisesAtReset,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_errors_are_those_of_the_plain_path(lab, fault):
    texts = []
    for use_buffers in (None, False):
        make = partial(chained, lab.envs["reused buffer"], FAULTS[fault])
        with closing(parallel(make)) as env, Collector(env, frames_per_batch=21, use_buffers=use_buffers) as collector:
            collector.set_seed(0)
            with pytest.raises(EnvError) as caught:
                collector.next()
            texts.append(str(caught.value))
    assert texts[0] == texts[1]


RECREATED = [(ParallelEnv, "dies_at"), (ParallelEnv, "fails_at"), (SerialEnv, "fails_at")]


@pytest.mark.filterwarnings("ignore:ParallelEnv", "ignore:SerialEnv")
@pytest.mark.parametrize(("kind", "fault"), RECREATED)
def test_members_that_are_recreated_have_the_bits_of_the_plain_path(kind, fault):
    def make():
        return kind(2, partial(Own, **{fault: 4}), on_env_failure="recreate")

    ours, path = batches(make, None, 1)
    assert path.startswith("native: NumPy arrays")
    assert ours[0]["next", "truncated"].any()
    assert_equal(ours[0], batches(make, False, 1)[0][0])


@pytest.mark.parametrize(
    ("kind", "chain"),
    in_turn([SerialEnv, ParallelEnv], ["from the third step", "from the second reset", "from the first reset"]),
)
def test_members_that_may_be_recreated_and_return_more_than_announced(both, lab, kind, chain):
    make = partial(chained, lab.envs["reused buffer"], UNANNOUNCED[chain])
    first, _ = both(lambda: kind(2, make, on_env_failure="recreate"), "one-hot", batches=4)
    assert first.then["env"].startswith("plain: "), first.then


def test_a_member_that_is_killed_is_an_error_that_names_it():
    with (
        Collector(parallel(partial(Own, dies_at=4)), frames_per_batch=30) as collector,
        pytest.raises(EnvError, match=r"ParallelEnv\[\d\]: its process"),
    ):
        collector.next()


# Collectors --------------------------------------------------------------------------------------------------------


def test_groups_are_refused_with_the_reason(lab):
    make = partial(chained, lab.envs["reused buffer"], Episodes)
    with closing(parallel(make)) as env, pytest.raises(ValueError, match="Episodes works on TensorDicts"):
        Collector(env, frames_per_batch=12, env_groups=2)


@pytest.mark.parametrize("chain", ["sees root", "from the thirteenth step"])
def test_in_workers(lab, chain):
    make = partial(chained, lab.envs["reused buffer"], {**CHAINS, **UNANNOUNCED}[chain])
    runs = []
    for use_buffers in (None, False):
        torch.manual_seed(0)
        with MultiSyncCollector(
            [lambda: parallel(make)] * 2, frames_per_batch=48, use_buffers=use_buffers
        ) as collector:
            collector.set_seed(0)
            runs.append([collector.next().clone() for _ in range(3)])
    for one, other in zip(*runs, strict=True):
        lab.assert_equal(one, other)


def test_the_form_is_refused_where_outcomes_must_be_arrays(lab):
    make = partial(chained, lab.envs["reused buffer"], CHAINS["clipped"])
    with closing(parallel(make)) as env, pytest.raises(NotNative, match="Clipped"):
        array_form(env)
