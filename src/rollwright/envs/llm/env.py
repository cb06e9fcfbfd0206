"""ConversationEnv: conversations as an environment on TensorDicts."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict, TensorDictBase, is_non_tensor

from rollwright.data.entries import unchecked_td
from rollwright.data.llm.chain import TokenChain
from rollwright.data.llm.history import ChatHistory, History
from rollwright.data.llm.records import RecordLayout, origins_in
from rollwright.data.llm.turns import FinishReason, InputMode, Message, Origin, turn_seed
from rollwright.data.specs import Composite, NonTensor, Unbounded
from rollwright.envs.base import EnvBase
from rollwright.envs.checkpoint import packed, unpacked
from rollwright.envs.llm.conversations import DatasetConversations
from rollwright.envs.llm.core import Answer, Opening, Outcome
from rollwright.envs.llm.slot_row import Pooled, SlotRow, Slots
from rollwright.envs.llm.talk import reward_key
from rollwright.errors import EnvError

if TYPE_CHECKING:
    from rollwright._keys import NestedKey

_NUMBERS = ("seed", "group_id", "repeat", "prompt_index", "epoch", "turn", "sequence")
_FLAT = ("text_response", "tokens_response", "log_probs", "assistant_mask", "tokens_policy_version", "attention_mask")


class ConversationEnv(Pooled, EnvBase):
    """Conversations as an environment of batch size ``[slots]``, one row for each; base of ``LLMEnv`` and ``ChatEnv``.

    The reward of a step is float32 ``[1]``, or ``[response, 1]`` where there is one for each token of an answer.

    A reset writes prompts, and a step reads answers and writes the next prompts. A prompt that was not answered stays
    through a reset, so that none is skipped. All conversations take their turns together; a collector with an engine
    for its policy uses :attr:`conversations` instead, where they do not wait for each other.

    When the data is over, slots become vacant: their rows repeat the prompt of another one, whose answer is theirs, and
    are done with each step. A reset of all slots is an error when all are vacant.

    Besides prompts, the root and ``"next"`` hold int64 ``[slots]``: ``seed`` (of the turn's generator), ``group_id``,
    ``repeat``, ``prompt_index``, ``epoch``, ``turn`` and ``sequence``. Below ``"next"``, the prompt of a conversation
    that is over is empty.

    Args:
        conversations: in slots.
        tokenizer: of the policy's model; None: prompts are texts or tokens alone, as the data has them.
        nested: keys are ``("tokens", "prompt")``, ``("text", "prompt")``; False: ``tokens``, ``text``.
        end_token_ids: tokens that end an answer, beside the tokenizer's.
        columns: specs of columns of the dataset that are observations, too.
        writes: which of messages, text and tokens are observations; None: as the prompts of the conversations.
        changes: the messages of a prompt may be changed before they are answered; ``num_messages``, int64 ``[slots]``,
            says of how many of them the prompt's tokens are.
        device: of the tensors.

    Attributes:
        conversations: the same without TensorDicts, for collectors.
        tokenizer: as given.
        layout: of the records that a collector makes.

    Raises:
        ValueError: messages are prompts, and there is no tokenizer.
    """

    returns_copies = True
    has_token_rewards = True
    _changes = False  # of environments that were saved before it could be True
    # save_remote() saves what changes; the rest is what the constructor was given.
    _not_saved = ("conversations", "tokenizer", "_slots", "_blank", "_ends", "_kept")

    def __init__(
        self,
        conversations: DatasetConversations,
        tokenizer: Any = None,
        *,
        nested: bool,
        end_token_ids: Collection[int] = (),
        columns: Composite | None = None,
        writes: InputMode | None = None,
        changes: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(device=device, batch_size=[conversations.num_slots])
        self.conversations, self.nested = conversations, nested
        self._mode = writes or conversations.prompts.mode
        self._changes = changes and self._mode == "history"
        self._columns = conversations.primers = columns
        self._end_token_ids = tuple(end_token_ids)
        self._ends = frozenset(end_token_ids)  # and those of the policy
        # A model that finds an answer beside a prompt would take that for the last one.
        self.ends_with_step = ("history", "text", "tokens", "log_probs", "masks") if nested else _FLAT
        self._slots = Slots(conversations, self._chain)
        self._has_own_tokenizer = tokenizer is not None
        self._use(tokenizer)

    def _use(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        mode = self._mode
        self._has_tokens = tokenizer is not None or mode == "tokens"
        self._has_text = tokenizer is not None or mode == "text"
        self.layout = RecordLayout(nested=self.nested, history=self.nested and mode == "history", text=self._has_text)
        self._blank: TokenChain | None = None
        self._set_specs()

    def fit_policy(self, policy: Any) -> bool:
        """Use what a policy says of its tokens; see :meth:`EnvBase.fit_policy`.

        The tokenizer, where the environment was given none (but for ``LLMEnv``), and the tokens that end an answer of
        its engine. Conversations in progress begin again where one of them is new.
        """
        found = getattr(policy, "tokenizer", None)
        ends = frozenset(getattr(getattr(policy, "engine", None), "end_ids", ())) | frozenset(self._end_token_ids)
        if self._has_own_tokenizer or not self.nested or found is None:
            found = self.tokenizer
        if found is self.tokenizer and ends == self._ends:
            return False
        openings = [row.opening for row in self._slots.rows if row is not None and not row.over]
        self._slots.interrupted()
        self._ends, self._blank = ends, None
        changed = found is not self.tokenizer
        if changed:
            self._use(found)
        self._slots.undelivered.begin_again(openings)
        return changed

    def _set_specs(self) -> None:
        size = self.batch_size
        text = NonTensor(size, example_data="", batched=True)
        tokens = Unbounded((*size, -1), dtype=torch.int64)
        observed: dict[str, Any] = {name: Unbounded(size, dtype=torch.int64) for name in _NUMBERS}
        if self._changes:
            observed["num_messages"] = Unbounded(size, dtype=torch.int64)
        if self.nested:
            parts: dict[str, Any] = {}
            if self._has_text:
                parts["text"] = text
            if self._has_tokens:
                parts["tokens"] = tokens
            observed |= {name: Composite(prompt=part, shape=size) for name, part in parts.items()}
            actions: dict[str, Any] = {
                name: Composite(response=part.clone(), shape=size) for name, part in parts.items()
            }
            if self._mode == "history":
                fields = {name: NonTensor((*size, -1), example_data="") for name in ("role", "content")}
                prompt = Composite(fields, shape=(*size, -1))
                observed["history"] = Composite(prompt=prompt, shape=size)
        else:
            if self._has_text:
                observed["text"] = text
            if self._has_tokens:
                observed |= {"tokens": tokens, "attention_mask": tokens.clone()}
            actions = {}
            if self._has_text:
                actions["text_response"] = text.clone()
            if self._has_tokens:
                actions["tokens_response"] = tokens.clone()
        if self._columns is not None:
            for key in self._columns.keys(True, True):
                observed[str(key)] = self._columns[key].clone().expand(*size, *self._columns[key].shape)
        if names := self.conversations.columns:
            column = NonTensor(size, example_data=None, batched=True)
            observed["columns"] = Composite({name: column.clone() for name in names}, shape=size)
        if rewards := self.conversations.rewards:
            number = Unbounded((*size, 1))
            observed["rewards"] = Composite({reward.name: number.clone() for reward in rewards}, shape=size)
        chosen = ("tokens" if self._has_tokens else "text") + ("" if self.nested else "_response")
        if not (self._has_tokens or self._has_text):  # messages alone: a policy answers in text, or by a message
            actions["text"] = Composite(response=text.clone(), shape=size)
            self.stand_ins = {("text", "response"): ("history", "response")}
        self.observation_spec = Composite(observed, shape=size)
        self.action_spec = Composite({chosen: actions[chosen]}, shape=size)
        if self._has_tokens and self._has_text:  # a policy may answer in text alone
            tokens_key: NestedKey = ("tokens", "response") if self.nested else "tokens_response"
            self.stand_ins = {tokens_key: ("text", "response") if self.nested else "text_response"}
        self.reward_spec = Unbounded((*size, 1))
        self.full_done_spec = self.full_done_spec
        self.add_truncated_keys()

    # Resets -----------------------------------------------------------------------------------------

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        if self.conversations.dialogue.opens:
            raise EnvError(
                f"{type(self).__name__}: its conversations begin with what a program asks, and its sampling. Use "
                "LLMCollector with a policy that has an engine (TransformersWrapper), without transforms but "
                "StepCounter(), RewardSum() and PolicyVersion()."
            )
        marks = None if tensordict is None else tensordict.get("_reset", None)
        slots, given = self._slots, self._given(tensordict)
        for slot in range(self.conversations.num_slots):
            if given and (marks is None or bool(marks[slot].any())):
                slots.begin(slot, given[slot])
            elif marks is None or bool(marks[slot].any()) or slots.rows[slot] is None:
                slots.open(slot)
        if marks is None or not any(slots.rows):
            self._check_data()
        return self._stacked([self._observed(slots.shown(slot)) for slot in range(len(slots.rows))])

    def _given(self, tensordict: TensorDictBase | None) -> list[Opening]:
        """How conversations begin by what was passed to a reset, one for each slot; none: by the data."""
        return []

    def _check_data(self) -> None:
        if self.is_over:
            raise EnvError(
                "dataset: all its epochs are over, or it is empty, and there is no prompt for the next conversation. "
                "Pass more data, or epochs=None to read it again and again."
            )

    def _chain(self, opening: Opening) -> TokenChain | None:
        if not self._has_tokens:
            return None
        if self._blank is None:
            conversations = self.conversations
            self._blank = TokenChain(
                self.tokenizer,
                conversations.template,
                history=conversations.history,
                end_token_ids=self._ends,
            )
        chain = self._blank.new()
        if opening.tokens is not None:
            chain.open(opening.tokens)
        else:
            chain.open(opening.messages if opening.text is None else opening.text)
        return chain

    def _observed(self, row: SlotRow) -> dict[str, Any]:
        """The entries of a row: of its next prompt, or of none where the conversation is over."""
        origin, chain = row.opening.draw.origin, row.chain
        seed = turn_seed(origin, row.turn)
        numbers = [seed, origin.group, origin.repeat, origin.index, origin.epoch, row.turn]
        numbers.append(0 if chain is None else chain.sequence)
        entries: dict[str, Any] = dict(zip(_NUMBERS, torch.tensor(numbers).unbind(), strict=True))
        if chain is not None:
            tokens = chain.tokens[:0] if row.over else chain.tokens
            if self.nested:
                entries["tokens"] = _td({"prompt": tokens})
            else:
                entries["tokens"], entries["attention_mask"] = tokens, torch.ones_like(tokens)
        if self._has_text:
            text = NonTensorData("" if row.over else row.text)
            entries["text"] = _td({"prompt": text}) if self.nested else text
        if self._changes:
            entries["num_messages"] = torch.tensor(len(row.messages))
        if self.nested and self._mode == "history":
            entries["history"] = ChatHistory(prompt=History.from_chats(row.messages), batch_size=())
        if self._columns is not None:
            for key in self._columns.keys(True, True):
                entries[str(key)] = self._columns[key].encode(row.opening.column(str(key), "primers"))
        if self.conversations.columns:
            names = self.conversations.columns
            entries["columns"] = _td({name: NonTensorData(row.opening.column(name, "columns")) for name in names})
        if self.conversations.rewards:
            entries["rewards"] = _td({reward.name: torch.zeros(1) for reward in self.conversations.rewards})
        return entries

    def _stacked(self, rows: list[dict[str, Any]]) -> TensorDictBase:
        stacked: TensorDictBase = LazyStackedTensorDict(*map(_td, rows), stack_dim=0)
        return stacked if self.device is None else stacked.to(self.device)

    # Steps ------------------------------------------------------------------------------------------

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        self._check_data()
        rows = enumerate(tensordict.unbind(0))
        answers = {slot: self._answer(slot, row) for slot, row in rows if slot not in self._slots.vacant}
        self.conversations.submit(answers)
        outcomes: dict[int, Outcome] = {}
        while len(outcomes) < len(answers):
            came = self.conversations.outcomes(None)
            if not came:
                waiting = sorted(answers.keys() - outcomes.keys())
                raise EnvError(
                    f"conversations: the rewards in slots {waiting} wait for others of their groups, and all slots "
                    "step together. Use LLMCollector with an engine for its policy, or Reward(..., per='conversation')."
                )
            for outcome in came.values():
                if outcome.error is not None:
                    raise outcome.error
            outcomes |= came
        followed = {slot: self._follow(slot, answers[slot], outcomes[slot]) for slot in answers}
        return self._stacked([followed.get(slot) or self._vacated(slot) for slot in range(len(self._slots.rows))])

    def _vacated(self, slot: int) -> dict[str, Any]:
        """Below ``"next"`` where there is no conversation: done, so that a reset looks for one."""
        flags = {"terminated": torch.tensor([True]), "truncated": torch.tensor([False]), "done": torch.tensor([True])}
        return self._observed(self._slots.shown(slot)) | flags | {"reward": torch.zeros(1)}

    def _answer(self, slot: int, td: TensorDictBase) -> Answer:
        row = self._slots.rows[slot]
        if row is None or row.over:
            raise EnvError(
                f"slot {slot}: there is no prompt to answer: the conversation is over, or was not begun. Call reset() "
                "for it first, or step_and_maybe_reset()."
            )
        if self._changes:
            self._take_changes(slot, row, td)
        tokens, text = self._response(td, "tokens"), self._response(td, "text")
        message: Message = {"role": "assistant", "content": text}
        if tokens is None and text is None:
            message = self._message(slot, td)
            text = str(message.get("content") or "")
        if row.chain is not None:
            if tokens is None:
                tokens = torch.tensor(self.tokenizer.encode(text, add_special_tokens=False), dtype=torch.int64)
            tokens = tokens.to("cpu", torch.int64)
            if text is None or text == "":
                text = row.chain.decode(tokens)
        reason = td.get("finish_reason", None)
        reason = FinishReason(str(_data(reason))) if reason is not None else FinishReason.STOP
        found = torch.zeros(0, dtype=torch.int64) if tokens is None else tokens
        return Answer({**message, "content": text}, text, found, reason, row.text)

    def _take_changes(self, slot: int, row: SlotRow, td: TensorDictBase) -> None:
        """Go on from the messages of the prompt, where others than those of the conversation were answered.

        Raises:
            EnvError: the policy has written them as other tokens than the environment does.
        """
        given = td.get(("history", "prompt"), None)
        if not isinstance(given, History) or given.batch_dims != 1 or len(given) == len(row.messages):
            return
        messages, before = given.to_chats(), None if row.chain is None else row.chain.tokens
        self.conversations.rewrite(slot, messages)
        row.rewrite(messages)
        read = td.get(("tokens", "prompt"), None)
        if row.chain is None or before is None or not isinstance(read, torch.Tensor):
            return
        if not any(torch.equal(read.cpu(), known) for known in (before, row.chain.tokens)):
            raise EnvError(
                f"slot {slot}: the policy has written the {len(messages)} messages of the changed prompt as other "
                "tokens than the environment. Pass the same tokenizer and arguments of the chat template to both "
                "(template_kwargs= of the environment, chat_template_kwargs= of the policy)."
            )

    def _message(self, slot: int, td: TensorDictBase) -> Message:
        """The answer of a policy that writes messages: the last one."""
        for key in ("response", "full"):
            given = td.get(("history", key), None) if self._mode == "history" and self.nested else None
            if isinstance(given, History) and given.numel():
                found: Message = given.reshape(-1)[-1].to_chats()
                return found
        keys = [key if self.nested else f"{key[0]}_response" for key in (("tokens", "response"), ("text", "response"))]
        raise EnvError(f"slot {slot}: found no answer. Expected {keys[0]!r} or {keys[1]!r}; let the policy write one.")

    def _response(self, td: TensorDictBase, kind: str) -> Any:
        key: NestedKey = (kind, "response") if self.nested else f"{kind}_response"
        return _data(td.get(key, None))

    def _follow(self, slot: int, answer: Answer, outcome: Outcome) -> dict[str, Any]:
        row = cast(SlotRow, self._slots.rows[slot])
        message = answer.message if outcome.response is None else outcome.response
        row.follow(answer, message, outcome)
        if row.over:
            self._note_end(row.opening)
        entries, reward = self._observed(row), outcome.reward
        for each in self.conversations.rewards:
            entries["rewards"].set(each.name, outcome.extras[reward_key(each.name)])
        entries["reward"] = reward.unsqueeze(-1) if isinstance(reward, torch.Tensor) else torch.tensor([float(reward)])
        flags = (outcome.terminated, outcome.truncated, outcome.terminated or outcome.truncated)
        for name, flag in zip(("terminated", "truncated", "done"), flags, strict=True):
            entries[name] = torch.tensor([flag])
        return entries

    def resume(self, slot: int, messages: list[Message]) -> TensorDictBase:
        """Go on with a conversation that has ended in the last step, by messages that follow its last answer.

        Args:
            slot: of the conversation.
            messages: the model reads them, and answers again.

        Returns:
            What takes the place of the row below ``"next"``, without the reward.

        Raises:
            EnvError: it has not ended, or its reward was one of a whole group.
        """
        row = self._slots.rows[slot]
        if row is None or not row.over:
            raise EnvError(f"slot {slot}: its conversation has not ended. Resume one that has.")
        self.conversations.resume(slot, messages)
        row.resume(messages)
        entries = self._observed(row) | {name: torch.tensor([False]) for name in ("terminated", "truncated", "done")}
        return _td(entries) if self.device is None else _td(entries).to(self.device)

    def resumed(self, slot: int) -> int:
        """How often the conversation of a slot was resumed."""
        row = self._slots.rows[slot]
        return 0 if row is None else row.resumed

    # The object itself ------------------------------------------------------------------------------

    @property
    def origins(self) -> list[Origin | None]:
        """Where the conversations of the slots come from; None: none was begun, or the data is over."""
        return [None if opening is None else opening.draw.origin for opening in self.openings]

    @property
    def openings(self) -> list[Opening | None]:
        """How the conversations of the slots began; None: none was begun, or the data is over."""
        return self._slots.openings

    @property
    def slots(self) -> Slots:
        """The conversations of the slots, and those that nobody got."""
        return self._slots

    @property
    def is_over(self) -> bool:
        """Whether the data is over, and all conversations are."""
        return self._slots.is_over

    def rand_action(self, tensordict: TensorDictBase | None = None) -> TensorDictBase:
        """Write short random answers, for tests of the environment."""
        if tensordict is None:
            tensordict = TensorDict({}, self.batch_size)
        most = 1000 if self.tokenizer is None else len(self.tokenizer)
        kind = "tokens" if self._has_tokens else "text"
        values: list[Any] = [
            torch.randint(most, (int(torch.randint(1, 5, ())),)) if self._has_tokens else "answer"
            for _ in self._slots.rows
        ]
        if self._has_tokens:
            stack = LazyStackedTensorDict(*[TensorDict({"value": value}) for value in values], stack_dim=0)
        else:
            stack = LazyStackedTensorDict(*[TensorDict({"value": NonTensorData(value)}) for value in values])
        key: Any = (kind, "response") if self.nested else f"{kind}_response"
        rows = []
        for row, value in zip(tensordict.unbind(0), stack.unbind(0), strict=True):
            row = row.copy()
            row.set(key, value.get("value"))
            rows.append(row)
        return LazyStackedTensorDict(*rows, stack_dim=0)

    def _set_seed(self, seed: int | None) -> int | None:
        if seed is None:
            return None
        self.conversations.source.set_seed(seed)
        self._slots.abandon()
        self._kept = None if self._kept is None else {}
        return seed

    def _seed_envs(self, seed: int | None, static_seed: bool) -> int | None:
        return self._set_seed(seed)

    # The place in the data ----------------------------------------------------------------------------

    def get_extra_state(self) -> Any:
        """Part of ``state_dict()``: the place in the data, which follows what was delivered."""
        return {"source": self.conversations.source.state_dict()}

    def set_extra_state(self, state: Any) -> None:
        """Go on from a place in the data; conversations in progress are dropped."""
        self.conversations.source.load_state_dict(state["source"])
        self._slots.abandon()

    def save_remote(self) -> tuple[dict[str, Any], list[str]]:
        """The conversations in progress, for :func:`~rollwright.envs.checkpoint.save_env`, and what cannot be saved."""
        try:
            return {"conversations": packed(self._slots.state())}, []
        except Exception as error:
            return {}, [f"{type(self).__name__}: {type(error).__name__}: {error}"]

    def load_remote(self, state: Mapping[str, Any]) -> None:
        """Go on with conversations that :meth:`save_remote` has saved, from the place in the data of that time."""
        self._slots.abandon()
        if state:
            self._slots.load(unpacked(state["conversations"]))

    def delivered(self, tensordict: TensorDictBase) -> None:
        """Note that conversations have reached who uses them; for a loop without a collector, which does that itself.

        Args:
            tensordict: records; those that end a conversation count.
        """
        seed = getattr(self.conversations.source, "seed", 0)
        for row in tensordict.reshape(-1).unbind(0):
            if bool(row.get(("next", "done")).any()):
                self.conversations.source.delivered(origins_in(row, seed)[0])

    def close(self, *, raise_if_closed: bool = True) -> None:
        """Close the environment, and end processes and threads of tools and rewards."""
        super().close(raise_if_closed=raise_if_closed)
        self.conversations.close()
        self._slots.interrupted()

    def _reopen(self) -> None:
        self.is_closed = False


def _data(value: Any) -> Any:
    return value.data if is_non_tensor(value) else value


def _td(entries: Any) -> TensorDict:
    return unchecked_td(entries)
