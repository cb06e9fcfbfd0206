"""Conversations that fail: what is raised, dropped or masked, tried again and counted, and that the others go on."""

from __future__ import annotations

import collections
from functools import partial

import pytest
from tests.collectors.llm.fakes import VOCABULARY, FakeEngine, FakeEnv, FakePolicy
from tests.collectors.llm.shares import answers, chats, turns
from tests.collectors.llm.test_resume import copied

from rollwright.collectors.llm import LLMCollector
from rollwright.data.llm import group_advantages, padded
from rollwright.data.llm.turns import FinishReason
from rollwright.envs.llm.conversations import DatasetConversations
from rollwright.envs.llm.opening import PromptFormat
from rollwright.envs.llm.replies import Dialogue
from rollwright.envs.llm.sources import DatasetSource
from rollwright.errors import EnvError

MODES = {
    "turns": {"dialog_turns_per_batch": 8},
    "stream": {"dialog_turns_per_batch": 5, "async_envs": True},
    "conversations": {"trajs_per_batch": 2, "async_envs": True},
    "in turn": {"trajs_per_batch": 2, "async_envs": False},
    "groups": {"groups_per_batch": 1, "async_envs": True},
}
BAD = 4  # the prompt that fails


class Twice:
    """Replies once, as a user does, and ends the conversation then."""

    def __init__(self, row):
        self.row, self.left = row, 1
        if row.get("fails") == "opening":
            raise OSError("no connection")

    def reply(self, messages):
        if self.row.get("fails") == "reply" and not self.left:
            raise OSError("no connection")
        self.left -= 1
        return "go on", 1.0, self.left < 0

    def state_dict(self):
        return {"left": self.left}

    def load_state_dict(self, state):
        self.left = state["left"]


def rewarded(completions, fails, **columns):
    if "reward" in fails:
        raise OSError("no connection")
    return [float(len(completions[0]))] * len(completions)


def env(fails=None, *, prompts=9, repeats=2, slots=4, all_of_them=False):
    made = FakeEnv(slots)
    bad = range(prompts) if all_of_them else [BAD]
    rows = [
        {
            "number": number,
            "tokens": [1 + number % (VOCABULARY - 1)] * (90 if fails == "length" and number in bad else 2),
            "fails": fails if number in bad else "",
        }
        for number in range(prompts)
    ]
    made.source = DatasetSource(rows, repeats=repeats, epochs=1)
    made.conversations = DatasetConversations(
        made.source, slots, prompts=PromptFormat("tokens"), rewards=rewarded, dialogue=Dialogue(Twice)
    )
    return made


class Failing(FakeEngine):
    """Fails in every fourth answer, the first time it is asked for."""

    asked = 0

    def submit(self, requests):
        for request in requests:
            self.asked += 1
            super().submit([request])
            if self.asked % 4 == 0:
                self._end(request.key, FinishReason.ERROR)
                self._over[-1].error = OSError("no connection")


def policy(kind=FakeEngine):
    made = FakePolicy()
    made.engine = kind(longest=6)
    made.engine.max_length = 80
    return made


def make(mode="turns", fails=None, workers=0, engine=FakeEngine, **options):
    of_env = {name: options.pop(name) for name in ("prompts", "repeats", "slots", "all_of_them") if name in options}
    count = {"num_collectors": workers} if workers else {}
    factory = partial(policy, engine)
    return LLMCollector(partial(env, fails, **of_env), policy_factory=factory, **MODES[mode], **count, **options)


def delivered(collector, most=200):
    """Records by name, and the errors that were raised, until nothing more comes of it but one error."""
    found, errors, in_a_row = {}, [], 0
    with collector:
        for _ in range(most):
            try:
                batch = collector.next()
            except Exception as error:
                errors.append(str(error))
                in_a_row += 1
                if in_a_row == 12:  # nothing else is left
                    break
                continue
            in_a_row = 0
            if batch is None:
                break
            for row in batch.reshape(-1).unbind(0):
                if row["collector", "traj_ids"] >= 0:
                    (name,) = turns(row)
                    assert name not in found
                    found[name] = row
        return found, errors, collector.stats()


WHOLE, _, _ = delivered(make("turns"))


@pytest.mark.parametrize("fails", ["length", "opening", "reply", "reward"])
@pytest.mark.parametrize("mode", MODES)
def test_an_error_is_raised_and_all_others_are_delivered(mode, fails):
    found, errors, stats = delivered(make(mode, fails, repeats=1))
    assert {name[0] for name in found if name[3] == 1} >= set(range(9)) - {BAD}
    assert (BAD, 0, 0, 1) not in found
    assert all(f"prompt {BAD} " in error for error in errors)
    assert all(row["tokens"].tolist() == WHOLE[name]["tokens"].tolist() for name, row in found.items())
    assert set(stats["conversations_failed"]) == ({"ValueError"} if fails == "length" else {"OSError"})


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("fails", "workers"), [("length", 0), ("opening", 0), ("reply", 0), ("reward", 0), ("length", 2), ("reward", 2)]
)
def test_what_fails_is_dropped_and_counted(mode, fails, workers):
    found, errors, stats = delivered(make(mode, fails, workers, on_error="drop"))
    assert not errors
    last = {name for name in found if name[3] == 1}
    assert last == {(number, 0, repeat, 1) for number in range(9) for repeat in range(2) if number != BAD}
    assert mode == "turns" or mode == "stream" or not any(name[0] == BAD for name in found)
    assert sum(stats["conversations_failed"].values()) == 2
    assert stats["completed"]


@pytest.mark.parametrize("fails", ["length", "opening", "reply", "reward"])
@pytest.mark.parametrize("mode", MODES)
def test_what_fails_is_masked(mode, fails):
    found, errors, stats = delivered(make(mode, fails, on_error="mask"))
    assert not errors
    bad = {name: row for name, row in found.items() if name[0] == BAD}
    assert {name[2] for name in bad} == {0, 1}
    for row in bad.values():
        ended = bool(row["next", "done"])
        assert (row["finish_reason"] == "error") == ended
        assert bool(row["next", "truncated"]) == ended
        assert float(row["next", "reward"].sum()) == (0.0 if ended else 1.0)
        masked = ended or mode in ("conversations", "groups")
        assert bool(row["assistant_mask"].any()) != masked or (mode == "in turn" and not ended)
    assert {name for name in found if name[0] != BAD} == {name for name in WHOLE if name[0] != BAD}
    assert sum(stats["conversations_failed"].values()) == 2


def test_a_masked_conversation_is_left_out_of_its_group():
    fails, made = {(BAD, 1)}, collections.Counter()

    class One(Twice):
        def __init__(self, row):
            super().__init__(row)
            made[row["number"]] += 1
            self.repeat = made[row["number"]] - 1

        def reply(self, messages):
            if (self.row["number"], self.repeat) in fails:
                raise OSError("no connection")
            _, _, over = super().reply(messages)
            return "go on", float(self.repeat), over

    def of_one():
        given = env(slots=3, repeats=3)
        given.conversations = DatasetConversations(
            given.source, 3, prompts=PromptFormat("tokens"), dialogue=Dialogue(One)
        )
        return given

    for on_error, size in (("mask", 3), ("drop", 2)):
        made.clear()
        with LLMCollector(of_one, policy_factory=policy, groups_per_batch=1, on_error=on_error) as collector:
            [batch] = [batch for batch in collector if int(batch["prompt_index"][0]) == BAD]
        assert len(set(batch["repeat"].tolist())) == size
        group_advantages(batch, trajectory_return="sum", scale=False)
        found = {int(row["repeat"]): float(row["advantage"].flatten()[0]) for row in batch.unbind(0)}
        assert found == ({0: -2.0, 1: 0.0, 2: 2.0} if on_error == "mask" else {0: -2.0, 2: 2.0})
        assert padded(batch, "assistant_mask").sum() == sum(
            len(row["tokens_response"]) for row in batch.unbind(0) if int(row["repeat"]) != 1
        )


@pytest.mark.parametrize("mode", MODES)
def test_an_answer_that_failed_is_asked_for_again(mode):
    found, errors, stats = delivered(make(mode, engine=Failing, max_retries=3))
    assert not errors
    assert {name: row["tokens"].tolist() for name, row in found.items()} == {
        name: row["tokens"].tolist() for name, row in WHOLE.items()
    }
    assert stats["conversations_failed"] == {}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("retries", [0, 2])
def test_an_engine_that_raises_now_and_then_loses_nothing(mode, retries):
    class Raising(FakeEngine):
        calls = 0

        def results(self, timeout=None):
            self.calls += 1
            if self.calls % 7 in (3, 4):
                raise OSError("no connection")
            return super().results(timeout)

    found, errors, _ = delivered(make(mode, engine=Raising, max_retries=retries))
    assert bool(errors) == (not retries)
    assert found.keys() == WHOLE.keys()


@pytest.mark.parametrize("mode", MODES)
def test_a_conversation_is_tried_again_from_before(mode):
    raised = collections.Counter()
    reply = Twice.reply

    class Flaky(Twice):
        def reply(self, messages):
            key = self.row["number"], self.left
            raised[key] += 1
            if raised[key] == 1 and sum(key) % 3 == 0:
                raise OSError("no connection")
            return reply(self, messages)

    def flaky():
        made = env(repeats=1, prompts=8)
        made.conversations = DatasetConversations(
            made.source, 4, prompts=PromptFormat("tokens"), rewards=rewarded, dialogue=Dialogue(Flaky)
        )
        return made

    found, errors, stats = delivered(
        LLMCollector(flaky, policy_factory=policy, max_retries=1, on_error="drop", **MODES[mode])
    )
    assert not errors
    assert stats["conversations_failed"] == {}
    wanted = {name: row["tokens"].tolist() for name, row in WHOLE.items() if not name[2] and name[0] < 8}
    assert {name: row["tokens"].tolist() for name, row in found.items()} == wanted


@pytest.mark.parametrize("on_error", ["drop", "mask"])
@pytest.mark.parametrize("async_envs", [False, True])
def test_a_run_in_which_nothing_ends_well_stops_with_the_cause(on_error, async_envs):
    collector = make(
        "turns" if not async_envs else "stream", "reward", on_error=on_error, max_failures=5, all_of_them=True
    )
    with collector, pytest.raises(EnvError, match=r"5 conversations have failed.*no connection.*larger max_failures"):
        list(collector)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("workers", [0, 2])
def test_data_that_ends_with_failures_ends_the_collector(mode, workers):
    found, errors, stats = delivered(make(mode, "length", workers, on_error="drop", all_of_them=True, prompts=3))
    assert not found
    assert not errors
    assert stats["conversations_failed"] == {"ValueError": 6}
    assert stats["completed"]


@pytest.mark.parametrize("mode", MODES)
def test_what_was_dropped_is_not_begun_again_after_a_resume(mode):
    found, state = [], None
    for _ in range(60):
        with make(mode, "reward", on_error="drop") as collector:
            if state is not None:
                collector.load_state_dict(state)
            batch = collector.next()
            if batch is None:
                break
            found += turns(batch)
            state = copied(collector.state_dict())
    assert {name for name in found if name[0] != BAD} == {name for name in WHOLE if name[0] != BAD}
    assert len(found) == len(set(found))
    assert collector.stats()["conversations_failed"] == {"OSError": 2}


@pytest.mark.parametrize("mode", ["conversations", "in turn"])
def test_what_ended_before_an_error_counts_when_it_is_delivered(mode):
    with make(mode, "reward", repeats=1, slots=2) as collector:
        found, errors = [], 0
        for _ in range(6):
            try:
                found += turns(collector.next())
            except EnvError:
                errors += 1
        assert errors
        source = collector.env.source.state_dict()
    ended = {name[0] for name in found}
    assert {position for position, _ in source["delivered"]} | set(range(source["position"])) == ended


def test_failures_of_one_need_an_engine():
    with pytest.raises(ValueError, match=r"on_error='drop', max_retries=0: expected conversations .* with an engine"):
        LLMCollector(partial(chats, 2, prompts=3, repeats=1), answers(0.0), dialog_turns_per_batch=2, on_error="drop")


def test_a_run_of_which_all_has_failed_says_so_where_it_ends():
    options = {"all_of_them": True, "on_error": "drop", "max_failures": 100}
    with (
        make("in turn", "reply", **options) as collector,
        pytest.warns(UserWarning, match=r"turns were taken, and are not delivered; 18 conversations have failed"),
    ):
        assert list(collector) == []
