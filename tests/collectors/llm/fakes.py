"""An engine and conversations without a model: which tokens are written depends on prompt and seed alone."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rollwright.data import Composite, NonTensor, Unbounded
from rollwright.data.llm.turns import FinishReason
from rollwright.envs import EnvBase
from rollwright.envs.llm.conversations import DatasetConversations
from rollwright.envs.llm.core import Answer, Conversations, Opening, Outcome
from rollwright.envs.llm.opening import PromptFormat
from rollwright.envs.llm.replies import Dialogue
from rollwright.envs.llm.rewards import Reward
from rollwright.envs.llm.sources import DatasetSource
from rollwright.modules.llm.engine import Completion, Engine, Request, Sampling

VOCABULARY = 97


def numbers(*of: Any) -> bytes:
    return hashlib.blake2b(repr(of).encode(), digest_size=32).digest()


class FakeTokenizer:
    """A token for each character from the space on."""

    eos_token_id = None
    name_or_path = "fake"

    def __init__(self):
        self.added_tokens_decoder = {}

    def __call__(self, text, **options):
        return {"input_ids": [ord(letter) - 32 for letter in text]}

    def decode(self, tokens, **options):
        return "".join(chr(32 + token) for token in tokens)


class FakeEngine(Engine):
    """Writes 1 to ``longest`` tokens, one each step, of all requests in progress; ``longest=0``: 4, at once."""

    def __init__(self, longest: int = 16, delay_s: float = 0.0) -> None:
        self.tokenizer, self.sampling = FakeTokenizer(), Sampling(max_new_tokens=16)
        self.max_length, self.vocab_size, self.end_ids = None, VOCABULARY, ()
        self._longest, self._delay_s = longest, delay_s
        self._open: dict[Any, list[Any]] = {}  # request, tokens, how many are written
        self._over: list[Completion] = []
        self._version: Any = 0
        self.seeds: list[int] = []
        self.closed = False

    def submit(self, requests: Sequence[Request]) -> None:
        for request in requests:
            if not len(request.prompt):
                raise ValueError("prompt: expected at least one token, got none.")
            if self.max_length is not None and len(request.prompt) >= self.max_length:
                raise ValueError(f"prompt: expected less than {self.max_length} tokens, got {len(request.prompt)}.")
        for request in requests:
            assert request.key not in self._open
            self.seeds.append(request.seed)
            if self._longest:
                of = numbers(request.prompt.tolist(), request.seed)
                tokens = torch.tensor([byte % VOCABULARY for byte in of[: 1 + of[31] * of[30] // 256 % self._longest]])
            else:
                tokens = torch.tensor([1, 2, 3, request.seed % VOCABULARY])
            self._open[request.key] = [request, tokens, [] if self._longest else [self._version] * 4]
            if not self._longest:
                self._end(request.key)

    def _end(self, key: Any, reason: FinishReason = FinishReason.STOP) -> None:
        request, tokens, versions = self._open.pop(key)
        kept = tokens[: len(versions)]
        stamps = versions if isinstance(self._version, str) else torch.tensor(versions, dtype=torch.int64)
        seconds = {"queue": 0.0, "generation": 0.0}
        self._over.append(Completion(request.key, kept, -kept.float() / VOCABULARY, stamps, reason, seconds))

    def step(self, tokens: int = 1) -> None:
        for key in list(self._open):
            written = self._open[key][2]
            written.append(self._version)
            if len(written) == len(self._open[key][1]):
                self._end(key)
        time.sleep(self._delay_s)

    def results(self, timeout: float | None = None) -> list[Completion]:
        until = None if timeout is None else time.monotonic() + timeout
        while self._open and not self._over:
            self.step()
            if until is not None and time.monotonic() > until:
                break
        over, self._over = self._over, []
        return over

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        raise NotImplementedError

    def cancel(self, keys: Sequence[Any]) -> None:
        for key in keys:
            if key in self._open:
                self._end(key, FinishReason.CANCELLED)

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def update_weights(self, weights: Any, version: Any = None) -> None:
        self.weights = weights
        self._version = self._version + 1 if version is None else version

    @property
    def version(self) -> Any:
        return self._version

    @version.setter
    def version(self, version: Any) -> None:
        self._version = version

    def close(self) -> None:
        self.closed = True


class FakePolicy:
    """What a collector takes for a policy with an engine."""

    def __init__(self, **options: Any) -> None:
        self.engine = FakeEngine(**options)

    def __call__(self, td: Any) -> Any:
        raise AssertionError("the native path calls the engine")


class FakeConversations(Conversations):
    """Conversations of tokens, of 1 to ``most_turns`` turns; what follows depends on the answer alone.

    ``slow``: every third outcome comes when it is asked for the second time. ``of_group``: rewards come when all of
    a group have ended.
    """

    template = None

    def __init__(self, num_slots: int, source: Any, most_turns: int = 3, *, slow=False, of_group=False, saves=True):
        self.num_slots, self.source, self.most_turns = num_slots, source, most_turns
        self._slow, self._of_group, self._saves = slow, of_group, saves
        self._draws: dict[int, Any] = {}
        self._turn: dict[int, int] = {}
        self._waiting: dict[int, tuple[int, Outcome]] = {}
        self._groups: dict[int, set[int]] = {}
        self.num_outcomes = 0
        self.closed = False

    def open(self, slot: int) -> Opening:
        draw = self.source.draw()
        self._begin(slot, draw)
        return Opening(draw, tokens=torch.tensor([1 + draw.row["number"] % (VOCABULARY - 1), 1]))

    def _begin(self, slot: int, draw: Any) -> None:
        self._draws[slot], self._turn[slot] = draw, 0
        self._waiting.pop(slot, None)

    def submit(self, answers: Mapping[int, Answer]) -> None:
        for slot, answer in answers.items():
            draw = self._draws[slot]
            assert slot not in self._waiting
            turn = self._turn[slot] = self._turn[slot] + 1
            over = turn > numbers(draw.origin.index, draw.origin.repeat)[0] % self.most_turns
            said = [{"role": "user", "content": "go on"}]
            outcome = Outcome([] if over else said, float(answer.tokens.sum()), terminated=over)
            self.num_outcomes += 1
            self._waiting[slot] = (self._slow and self.num_outcomes % 3 == 0, outcome)
            if over and self._of_group:
                self._groups.setdefault(draw.origin.group, set()).add(slot)

    def outcomes(self, timeout: float | None = None) -> dict[int, Outcome]:
        found = {}
        while self._waiting:
            later = False
            for slot, (delayed, outcome) in list(self._waiting.items()):
                group = self._draws[slot].origin.group
                if self._of_group and outcome.terminated:
                    whole = len(self._groups[group]) == self.source.group_size(self._draws[slot].origin)
                    if not whole:
                        continue
                if delayed:
                    self._waiting[slot], later = (False, outcome), True
                else:
                    found[slot] = outcome
                    del self._waiting[slot]
            if found or timeout == 0 or not later:
                return found
        return found

    def state(self, slot: int) -> dict[str, Any]:
        if not self._saves:
            raise RuntimeError("a file is open")
        return {"turn": self._turn[slot]}

    def ended_state(self, slot: int) -> dict[str, Any]:
        return {**self.state(slot), "waiting": self._waiting[slot][1]}

    def load(self, slot: int, opening: Opening, messages: Any, state: Mapping[str, Any]) -> None:
        self._begin(slot, opening.draw)
        self._turn[slot] = state.get("turn", 0)
        if "waiting" in state:
            self._waiting[slot] = (False, state["waiting"])
            self._groups.setdefault(opening.draw.origin.group, set()).add(slot)

    def clear(self) -> None:
        self._waiting.clear()
        self._groups.clear()

    def close(self) -> None:
        self.closed = True


class FakeUser:
    """Replies up to twice; it can be saved."""

    def __init__(self, row: Mapping[str, Any]) -> None:
        self.left = row["number"] % 3

    def reply(self, messages: Sequence[Any]) -> Any:
        self.left -= 1
        return "go on", 1.0, self.left < 0

    def state_dict(self) -> dict[str, int]:
        return {"left": self.left}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.left = state["left"]


def length_in_group(completions: Sequence[str], **columns: Any) -> list[float]:
    time.sleep(0.001)
    return [float(len(completion)) / len(completions) for completion in completions]


class FakeEnv(EnvBase):
    """An environment of conversations."""

    def __init__(self, num_slots: int = 1, *, prompts: int = 40, repeats: int = 1, epochs: int | None = 1, **options):
        super().__init__(batch_size=[num_slots])
        rows = [{"number": number} for number in range(prompts)]
        self.source = DatasetSource(rows, repeats=repeats, epochs=epochs)
        self.conversations = FakeConversations(num_slots, self.source, **options)
        self.observation_spec = Composite(text=NonTensor((num_slots,)), shape=[num_slots])
        self.action_spec = Composite(text_response=NonTensor((num_slots,)), shape=[num_slots])
        self.reward_spec = Unbounded((num_slots, 1))

    @classmethod
    def rewarded(cls, num_slots: int = 4, *, prompts: int = 40, repeats: int = 4) -> FakeEnv:
        """Of conversations of the library, with a user, and a reward of each group."""
        env = cls(num_slots)
        rows = [{"number": number, "tokens": [1 + number % (VOCABULARY - 1), 1]} for number in range(prompts)]
        env.source = DatasetSource(rows, repeats=repeats, epochs=1)
        env.conversations = DatasetConversations(
            env.source,
            num_slots,
            prompts=PromptFormat("tokens"),
            rewards=Reward(length_in_group, per="group"),
            dialogue=Dialogue(FakeUser),
        )
        return env

    def _set_seed(self, seed):
        self.source.set_seed(seed)

    def close(self, *, raise_if_closed=True):
        self.conversations.close()
        super().close(raise_if_closed=raise_if_closed)
