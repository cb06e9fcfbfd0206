"""A batch that nobody got, because something raised, is taken again: no turn is skipped, none comes twice."""

from __future__ import annotations

import collections
import itertools
import warnings

import pytest
from tests.collectors.llm.fakes import FakeUser
from tests.collectors.llm.shares import Talks, buffer, expected, make, tally, turns
from tests.collectors.llm.test_resume import copied
from tests.variants import in_turn

MODES = {
    "turns": {"dialog_turns_per_batch": 20},
    "reset": {"dialog_turns_per_batch": 20, "reset_at_each_iter": True},
    "stream": {"dialog_turns_per_batch": 7, "async_envs": True},
    "conversations": {"trajs_per_batch": 2},
    "groups": {"groups_per_batch": 1},
}
CASES = [(mode, plain) for mode in MODES for plain in (False, True) if (mode, plain) != ("stream", True)]
KINDS = {f"{mode}{' plain' * plain}": (mode, plain) for mode, plain in sorted(CASES, key=lambda case: case[1])}


class Failing:
    """Raises at some of its calls."""

    def __init__(self, at):
        self.calls, self.at = itertools.count(1), at  # drawn at once: replies are made in several threads

    def __call__(self, batch=None):
        if next(self.calls) in self.at:
            raise OSError("no connection")
        return batch


def check(found, wanted, mode):
    if mode != "reset":
        assert found == wanted, tally(found, wanted)
    else:  # which conversations are cut depends on the batch that they begin in
        assert set(found.values()) == {1}
        assert {name for name in found if not name[-1]} == {name for name in wanted if not name[-1]}


def delivered(**options):
    """All turns that are delivered, whatever raises, and how often something did."""
    found, failed = collections.Counter(), 0
    with make(0, delay_s=0.0, **options) as collector:
        while True:
            try:
                batch = collector.next()
            except Exception as error:
                if "no connection" not in str(error):
                    raise
                failed += 1
                continue
            if batch is None and ("replay_buffer" not in options or collector.completed):
                break
            if batch is not None:
                found.update(turns(batch))
        if "replay_buffer" in options:
            found.update(turns(options["replay_buffer"][:]))
    return found, failed


@pytest.mark.parametrize(("kind", "where"), in_turn(KINDS, ("yielded", "stored")))
def test_a_postproc_that_raises(kind, where):
    (mode, plain), stored = KINDS[kind], where == "stored"
    options = {**MODES[mode], "env": {"prompts": 12, "repeats": 2}, "plain": plain}
    wanted = expected(**options)
    if stored:
        options["replay_buffer"] = buffer()
    found, failed = delivered(**options, postproc=Failing({1, 2, 4, 5}))
    assert failed == 4
    check(found, wanted, mode)


@pytest.mark.parametrize(("mode", "plain"), CASES)
def test_an_environment_that_raises(mode, plain, monkeypatch):
    env = {"prompts": 12, "repeats": 2, **({} if plain else {"rewarded": True, "slots": 4})}
    options = {**MODES[mode], "env": env, "plain": plain}
    wanted = expected(**options)
    calls = Failing({5, 9, 15} if mode == "reset" else {5, 9, 20, 24})

    cls = Talks if plain else FakeUser
    reply = cls.reply
    monkeypatch.setattr(cls, "reply", lambda self, messages: (calls(), reply(self, messages))[1])
    found, failed = delivered(**options)
    assert failed == len(calls.at)
    check(found, wanted, mode)


@pytest.mark.filterwarnings("ignore:.*turns of it were delivered")
@pytest.mark.parametrize("mode", ["turns", "stream", "conversations"])
def test_conversations_that_cannot_be_saved_begin_again_or_end(mode):
    env = {"prompts": 12, "repeats": 2, "saves": False}
    options = {**MODES[mode], "env": env}
    wanted = expected(**options)
    found, failed = delivered(**options, postproc=Failing({3}))
    assert failed == 1
    assert set(found.values()) == {1}
    assert {name for name in found if not name[-1]} == {name for name in wanted if not name[-1]}
    assert found.keys() <= wanted.keys()
    assert mode != "conversations" or found == wanted


def test_an_engine_that_raises():
    options = {**MODES["stream"], "env": {"prompts": 12, "repeats": 2}}
    wanted = expected(**options)
    with make(0, delay_s=0.0, **options) as collector:
        fails, engine = Failing({4, 11}), collector.policy.engine
        results = engine.results
        engine.results = lambda timeout=None: (fails(), results(timeout))[1]
        found, failed = collections.Counter(), 0
        while True:
            try:
                batch = collector.next()
            except OSError:
                failed += 1
                continue
            if batch is None:
                break
            found.update(turns(batch))
    assert failed == 2
    assert found == wanted, tally(found, wanted)


@pytest.mark.parametrize(
    ("mode", "calls"), in_turn(["turns", "stream", "conversations", "groups"], [{9, 30, 31}, {14, 25, 40, 41}])
)
def test_groups_that_wait_for_their_reward_are_whole_after_errors(mode, calls, monkeypatch):
    options = {**MODES[mode], "env": {"prompts": 10, "repeats": 3, "rewarded": True, "slots": 5}}
    options |= {"dialog_turns_per_batch": 10} if mode == "turns" else {}
    wanted = expected(**options)
    fails, reply = Failing(calls), FakeUser.reply
    monkeypatch.setattr(FakeUser, "reply", lambda self, messages: (fails(), reply(self, messages))[1])
    found, failed = delivered(**options)
    assert failed
    assert found == wanted, tally(found, wanted)


@pytest.mark.parametrize("plain", [False, True])
def test_what_could_not_be_delivered_at_the_end_of_the_data_is_offered_again(plain):
    options = {"trajs_per_batch": 1, "env": {"prompts": 3, "repeats": 2}, "plain": plain}
    wanted = expected(**options)
    found, failed = delivered(**options, postproc=Failing({2, 6, 7, 9}))
    assert failed == 4
    assert found == wanted, tally(found, wanted)


@pytest.mark.parametrize("mode", ["stream", "groups"])
def test_a_state_is_saved_though_what_is_waited_for_raises(mode):
    options = {**MODES[mode], "async_envs": True, "env": {"prompts": 9, "repeats": 2, "rewarded": True, "slots": 4}}
    wanted = expected(**options)
    found, said = collections.Counter(), []
    collector = make(0, delay_s=0.0, **options)
    while (batch := collector.next()) is not None:
        found.update(turns(batch))
        conversations, fails = collector.env.conversations, Failing({1})
        outcomes = conversations.outcomes
        conversations.outcomes = lambda timeout=None, fails=fails, outcomes=outcomes: (fails(), outcomes(timeout))[1]
        with warnings.catch_warnings(action="ignore"):
            state = copied(collector.state_dict())
        conversations.outcomes = outcomes
        said += state["unsaved"]
        if len(said) % 2:  # this one goes on, too
            continue
        other = make(0, delay_s=0.0, **options)
        for _ in range(2):
            other.next()
        collector.shutdown()
        collector = other
        collector.load_state_dict(state)
    collector.shutdown()
    assert found == wanted, tally(found, wanted)
    assert said
    assert all("asked again" in line and "no connection" in line for line in said)
