"""What a turn's tokens are copied on their way from the engine to batch and storage: at most once."""

from __future__ import annotations

import pytest
import torch
from tests.llm_models import model, tokenizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rollwright.collectors.llm import LLMCollector
from rollwright.data import LazyStackStorage, ReplayBuffer
from rollwright.envs.llm import ChatEnv, LLMEnv
from rollwright.modules.llm import TransformersWrapper

pytest.importorskip("transformers")
pytestmark = pytest.mark.llm

SLOTS, LONGEST = 4, 24


class Copies(TorchDispatchMode):
    """Follows memory from the results of the engine on: how many copies lie between these and any other memory."""

    def __init__(self):
        super().__init__()
        self.num = {}
        self._alive = []  # else memory is used again

    def engine_has_written(self, tensor):
        self.num[tensor.untyped_storage().data_ptr()] = 0
        self._alive.append(tensor)

    def between(self, tensor):
        return self.num[tensor.untyped_storage().data_ptr()]

    def is_new(self, tensor):
        """Whether it has nothing of what the engine has written."""
        return tensor.untyped_storage().data_ptr() not in self.num

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        read = args[1:] if name == "copy_" else args
        sources = [leaf for leaf in tree_leaves((read, kwargs)) if isinstance(leaf, torch.Tensor) and leaf.numel()]
        known = [self.num[place] for leaf in sources if (place := _place(leaf)) in self.num]
        for leaf in tree_leaves(result):
            if known and isinstance(leaf, torch.Tensor) and leaf.numel() and _place(leaf) not in map(_place, sources):
                self.num[_place(leaf)] = max(self.num.get(_place(leaf), 0), min(known) + 1)
                self._alive.append(leaf)
        return result


def _place(tensor):
    return tensor.untyped_storage().data_ptr()


def make(kind, **options):
    text = tokenizer("qwen")
    policy = TransformersWrapper(
        model("qwen3", eos_token_id=None), tokenizer=text, generate_kwargs={"max_new_tokens": LONGEST}
    )
    rows = [{"query": f"{i} + 1?", "text": f"{i} + 1?"} for i in range(8)]
    env = kind.from_dataloader(rows, tokenizer=text, batch_size=SLOTS)
    return LLMCollector(env, policy=policy, dialog_turns_per_batch=SLOTS, **options)


KEYS = {
    LLMEnv: ("tokens_response", "log_probs", "assistant_mask", "tokens_policy_version"),
    ChatEnv: (
        ("tokens", "response"),
        ("log_probs", "response"),
        ("masks", "all_assistant_mask"),
        ("tokens", "policy_version"),
    ),
}


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Seen(LazyStackStorage):
    """Keeps what it is given."""

    def append(self, data, *, dim=0):
        self.given = data
        return super().append(data, dim=dim)


@pytest.mark.parametrize("kind", [LLMEnv, ChatEnv])
@pytest.mark.parametrize("stored", [False, True], ids=["batch", "storage"])
def test_what_batch_and_storage_are_given_was_copied_at_most_once_since_the_engine(kind, stored):
    copies, storage = Copies(), Seen(64)
    into = {"replay_buffer": ReplayBuffer(storage=storage)} if stored else {}
    collector = make(kind, total_dialog_turns=SLOTS, **into)
    engine = collector.policy.engine
    results = engine.results

    def watched(timeout=None):
        found = results(timeout)
        for completion in found:
            for tensor in (completion.tokens, completion.log_probs, completion.versions):
                copies.engine_has_written(tensor)
        return found

    engine.results = watched
    with copies:
        batches = list(collector)
    collector.shutdown()
    given = (storage.given if stored else batches[0]).reshape(-1)
    ids, log_probs, mask, versions = KEYS[kind]
    found = {key: given.get(key, as_list=True) for key in (ids, log_probs, versions)}
    numbers = {key: max(map(copies.between, tensors)) for key, tensors in found.items()}
    assert numbers == {ids: 1, log_probs: 0, versions: 0}
    # The mask is made with the record; prompt, response and both are views of one memory.
    assert all(map(copies.is_new, given.get(mask, as_list=True)))
    for row in given.unbind(0):
        whole = row["tokens"] if kind is LLMEnv else row["tokens", "full"]
        assert row[ids].data_ptr() == whole[-LONGEST:].data_ptr()
        assert len(row[ids]) == LONGEST


def test_a_copy_is_counted():
    copies, written = Copies(), torch.arange(4)
    copies.engine_has_written(written)
    with copies:
        once = torch.zeros(8, dtype=torch.int64)
        once[2:6] = written[:]
        twice = once[1:3].clone()
    assert [copies.between(each) for each in (written[1:], once, twice)] == [0, 1, 2]
    assert copies.is_new(torch.zeros(4))
