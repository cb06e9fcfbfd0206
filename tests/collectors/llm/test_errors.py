"""A batch that nobody got, because something raised, is taken again: no turn is skipped, none comes twice."""

from __future__ import annotations

import collections

import pytest
from tests.collectors.llm.fakes import FakeUser
from tests.collectors.llm.shares import Talks, buffer, expected, make, tally, turns

MODES = {
    "turns": {"dialog_turns_per_batch": 20},
    "reset": {"dialog_turns_per_batch": 20, "reset_at_each_iter": True},
    "stream": {"dialog_turns_per_batch": 7, "async_envs": True},
    "conversations": {"trajs_per_batch": 2},
    "groups": {"groups_per_batch": 1},
}
CASES = [(mode, plain) for mode in MODES for plain in (False, True) if (mode, plain) != ("stream", True)]


class Failing:
    """Raises at some of its calls."""

    def __init__(self, at):
        self.calls, self.at = 0, at

    def __call__(self, batch=None):
        self.calls += 1
        if self.calls in self.at:
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


@pytest.mark.parametrize("stored", [False, True], ids=["yielded", "stored"])
@pytest.mark.parametrize(("mode", "plain"), CASES)
def test_a_postproc_that_raises(mode, plain, stored):
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


@pytest.mark.parametrize("mode", ["turns", "stream", "conversations"])
def test_conversations_that_cannot_be_saved_begin_again(mode):
    env = {"prompts": 12, "repeats": 2, "saves": False}
    options = {**MODES[mode], "env": env}
    wanted = expected(**options)
    found, failed = delivered(**options, postproc=Failing({3}))
    assert failed == 1
    assert found.keys() == wanted.keys()
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
