"""What a turn costs does not grow with the turns before it: bytes and tensor elements are counted, turn 1 to 100."""

from __future__ import annotations

import gc
import pickle
from statistics import median

import pytest
import torch
from tests.collectors.llm.fakes import FakeEnv, FakePolicy
from torch.utils._python_dispatch import TorchDispatchMode

from rollwright.collectors.llm import LLMCollector
from rollwright.collectors.workers import schedule
from rollwright.data.llm import training_sequences
from rollwright.data.llm.records import RecordLayout
from rollwright.data.transcript import Transcript
from rollwright.envs.llm.conversations import DatasetConversations
from rollwright.envs.llm.opening import PromptFormat
from rollwright.envs.llm.replies import Dialogue
from rollwright.envs.llm.sources import DatasetSource

SLOTS, TURNS = 2, 100
WORDS = "go on with the next one"


class Patient:
    """Goes on for 100 turns."""

    def __init__(self, row):
        self.turns = 0

    def reply(self, messages):
        self.turns += 1
        return WORDS, 0.5, self.turns == TURNS

    def state_dict(self):
        return {"turns": self.turns}

    def load_state_dict(self, state):
        self.turns = state["turns"]


def long_env():
    env = FakeEnv(SLOTS)
    env.source = DatasetSource([{"text": f"prompt {n}"} for n in range(8)], epochs=1)
    prompts = PromptFormat("text")
    env.conversations = DatasetConversations(env.source, SLOTS, prompts=prompts, dialogue=Dialogue(Patient))
    env.layout = RecordLayout(nested=True, history=True)
    return env


def quick_policy():
    return FakePolicy(longest=0)


def collecting(**options):
    return LLMCollector(long_env(), quick_policy(), **{"dialog_turns_per_batch": SLOTS, **options})


def steady(values, first=2, last=TURNS - 2):
    """Whether the figure of each turn is that of the second one, within 10%; the first has the prompt."""
    return max(values[first : last + 1]) <= 1.1 * values[first]


class Elements(TorchDispatchMode):
    """Counts the elements of tensors that operations have written, views left out."""

    def __init__(self):
        super().__init__()
        self.written = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        places = {each.untyped_storage().data_ptr() for each in args if isinstance(each, torch.Tensor)}
        if func.overloadpacket.__name__ == "copy_":
            self.written += args[0].numel()
        elif isinstance(found, torch.Tensor) and found.untyped_storage().data_ptr() not in places:
            self.written += found.numel()
        return found


@pytest.mark.parametrize("async_envs", [False, True])
def test_elements_that_are_written_for_a_turn(async_envs):
    counter, written = Elements(), []
    with collecting(async_envs=async_envs) as collector, counter:
        batches = iter(collector)
        for _ in range(TURNS):
            before = counter.written
            next(batches)
            written.append(counter.written - before)
    early, late = median(written[1:34]), median(written[66:99])
    assert late <= 1.1 * early
    more = [each for each in written[1:] if each > 2 * early]
    assert len(more) <= 12  # memory that is full doubles, which the turns share that it then has room for


def test_bytes_that_a_worker_sends_for_a_turn(monkeypatch):
    sizes, unpack = [], schedule.unpack

    def counted(packed, *rest):
        sizes.append(packed.num_bytes)
        return unpack(packed, *rest)

    monkeypatch.setattr(schedule, "unpack", counted)
    options = {"policy_factory": quick_policy, "num_collectors": 1, "total_dialog_turns": SLOTS * TURNS}
    with LLMCollector(long_env, dialog_turns_per_batch=SLOTS, **options) as collector:
        theirs = list(collector)
    with collecting(total_dialog_turns=SLOTS * TURNS) as collector:
        ours = list(collector)
    assert len(sizes) == TURNS
    assert steady(sizes)
    for one, other in zip(ours, theirs, strict=True):
        left, right = (batch.reshape(-1)[1] for batch in (one, other))
        assert (
            left.exclude("seconds", "history").to_dict().keys() == right.exclude("seconds", "history").to_dict().keys()
        )
        assert left["text"].to_dict() == right["text"].to_dict()
        assert left["next", "history"].prompt.to_chats() == right["next", "history"].prompt.to_chats()
        for key in [("tokens", "full"), ("log_probs", "full"), ("masks", "all_assistant_mask"), ("next", "reward")]:
            assert torch.equal(left[key], right[key])


def test_a_saved_batch_has_each_conversation_once():
    with collecting(dialog_turns_per_batch=SLOTS * TURNS) as collector:
        batch = collector.next()
    size = len(pickle.dumps(batch))
    sequences = sum(len(pickle.dumps(one)) for one in training_sequences(batch))
    assert size < 3 * sequences + 700 * SLOTS * TURNS
    for one in batch.reshape(-1).unbind(0):
        one.get("masks").clone(), one.get("text").clone(), one.get("tokens").clone()  # which makes the entries
    saved = pickle.dumps(batch)
    assert len(saved) < 1.1 * size
    for kept, loaded in zip(batch[0].unbind(0), pickle.loads(saved)[0].unbind(0), strict=True):
        assert torch.equal(kept["tokens", "full"], loaded["tokens", "full"])
        assert kept["text", "full"] == loaded["text", "full"]


@pytest.mark.parametrize("trajs", [None, 2])
def test_a_saved_state_has_each_conversation_once(trajs):
    sizes = {}
    options = {"trajs_per_batch": trajs} if trajs else {"dialog_turns_per_batch": SLOTS}
    env = long_env()
    with LLMCollector(
        env, quick_policy(), async_envs=True, **{"dialog_turns_per_batch": SLOTS, **options}
    ) as collector:
        if trajs:
            collector._delivery.collect_trajectories()
        for turn in range(1, 91):
            if trajs:
                collector._delivery.collect_trajectories()
            else:
                collector.next()
            if turn in (30, 60, 90):
                sizes[turn] = len(pickle.dumps(collector.state_dict()))
    assert sizes[90] < 500_000  # of turns that each hold all before them it was 15 MB


def test_memory_of_a_conversation_goes_with_its_last_record():
    def alive():
        gc.collect()
        return sum(type(each) is Transcript for each in gc.get_objects())

    before = alive()
    options = {"policy_factory": quick_policy, "num_collectors": 1, "total_dialog_turns": 3 * SLOTS * TURNS}
    with LLMCollector(long_env, dialog_turns_per_batch=SLOTS * 50, **options) as collector:
        for _ in collector:
            pass
        assert alive() - before <= 3 * SLOTS
