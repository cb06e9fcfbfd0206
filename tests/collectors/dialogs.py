"""A conversation of made-up words: an environment and a policy of text, ragged tensors and tensorclass entries.

Turn ``n`` of episode ``e`` of row ``r`` shows the text ``"e<e> r<r> t<n>"`` and ``n + 1 + r`` tokens; the answer is the
text in capitals and twice the tokens. So every entry says which frame it is of, and no two have one length for long.
"""

from __future__ import annotations

import torch
from tensordict import LazyStackedTensorDict, TensorClass, TensorDict, is_non_tensor

from rollwright.data import Composite, NonTensor, Unbounded
from rollwright.envs import EnvBase


class Words(TensorClass):
    """A message: who says what, in how many letters."""

    content: str
    role: str
    letters: torch.Tensor

    @classmethod
    def of(cls, text, role):
        return cls(content=text, role=role, letters=torch.tensor(len(text)), batch_size=[])


def rows_of(td):
    """What ``[*batch]`` consists of, in order."""
    return [row for part in td.unbind(0) for row in rows_of(part)] if td.ndim else [td]


def nested(rows, size):
    """The stack ``[*size]`` of some rows, in order."""
    if not size:
        return rows[0]
    part = len(rows) // size[0]
    parts = [nested(rows[i * part : (i + 1) * part], size[1:]) for i in range(size[0])]
    return LazyStackedTensorDict.lazy_stack(parts, 0)


class Dialog(EnvBase):
    """See the module.

    Args:
        batch_size: of the environment: ``[]`` or ``[b]``.
        turns: row ``r`` has an episode of ``turns + r`` steps.
        messages: whether an entry ``message`` is a tensorclass.
        first_row: number of the first row.
        dense: tokens are always three, and rows are stacked densely.
    """

    def __init__(self, batch_size=(), turns=2, messages=False, first_row=0, dense=False):
        super().__init__(batch_size=batch_size)
        self.turns, self.messages, self.first_row, self.dense = turns, messages, first_row, dense
        self.turn = [0] * self.numel()
        self.episode = [-1] * self.numel()
        batch = self.batch_size
        self.observation_spec = Composite(
            text=NonTensor(batch, example_data=""),
            tokens=Unbounded((*batch, 3 if dense else -1), dtype=torch.int64),
            prompt=Composite(mask=Unbounded((*batch, 3 if dense else -1), dtype=torch.bool), shape=batch),
            shape=batch,
        )
        self.action_spec = Composite(
            answer=NonTensor(batch, example_data=""),
            answer_tokens=Unbounded((*batch, 6 if dense else -1), dtype=torch.int64),
            shape=batch,
        )
        self.reward_spec = Unbounded((*batch, 1))
        self.seen = []  # of answers, as they came

    def _set_seed(self, seed):
        pass

    def _row(self, r):
        number = self.first_row + r
        text = f"e{self.episode[r]} r{number} t{self.turn[r]}"
        length = 3 if self.dense else self.turn[r] + 1 + number
        row = TensorDict({"tokens": torch.arange(length) + 100 * self.episode[r]})
        row.set("text", text)
        row.set("prompt", TensorDict({"mask": torch.arange(length) % 2 == 0}))
        if self.messages:
            row.set("message", Words.of(text, "user"))
        return row

    def _stacked(self, rows):
        if self.dense and self.batch_size:
            return torch.stack(rows).reshape(self.batch_size)
        return nested(rows, self.batch_size)

    def _reset(self, tensordict=None, **kwargs):
        masks = [True] * self.numel()
        if tensordict is not None and tensordict.get("_reset", None) is not None:
            masks = tensordict.get("_reset").reshape(-1).tolist()
        for r, marked in enumerate(masks):
            if marked:
                self.turn[r], self.episode[r] = 0, self.episode[r] + 1
        return self._stacked([self._row(r) for r in range(self.numel())])

    def _step(self, tensordict):
        rows = []
        for r, row in enumerate(rows_of(tensordict)):
            shown = self._row(r)
            answer = row["answer"]
            assert answer == shown["text"].upper(), (answer, shown["text"])
            assert torch.equal(row.get("answer_tokens"), shown["tokens"].repeat(2))
            self.seen.append(answer)
            self.turn[r] += 1
            outcome = self._row(r)
            done = self.turn[r] >= self.turns + self.first_row + r
            outcome.set("reward", torch.tensor([float(self.turn[r])]))
            outcome.set("done", torch.tensor([done]))
            rows.append(outcome)
        return self._stacked(rows)


class Answers:
    """Answers as :class:`Dialog` expects.

    Args:
        form: ``"in place"``: updates what it reads; ``"rows"``: writes into the rows of the stack; ``"new"``: returns
            another TensorDict with the outputs alone.
        messages: write a tensorclass ``reply``, too.
    """

    def __init__(self, form="in place", messages=False):
        self.form, self.messages = form, messages

    def _one(self, row, into):
        text = row["text"]
        into.set("answer", text.upper())
        tokens = row.get("tokens")
        into.set("answer_tokens", tokens.repeat(2))
        into.set("policy", TensorDict({"log_probs": -tokens.repeat(2).float()}))
        if self.messages:
            into.set("reply", Words.of(text.upper(), "assistant"))
        return into

    def __call__(self, td):
        if not td.batch_size:
            return self._one(td, TensorDict({}) if self.form == "new" else td)
        if self.form == "new":
            return nested([self._one(row, TensorDict({})) for row in rows_of(td)], td.batch_size)
        if self.form == "rows":
            for row in rows_of(td):
                self._one(row, row)
            return td
        return td.update(nested([self._one(row, TensorDict({})) for row in rows_of(td)], td.batch_size))


def frames_of(batch):
    """All frames as dictionaries, of rows in order."""
    return [_plain(row) for row in rows_of(batch)]


def _plain(td):
    out = {}
    for key, value in td.items():
        if isinstance(value, Words):
            out[key] = ("Words", value.content, value.role, int(value.letters))
        elif is_non_tensor(value):
            out[key] = value.data
        elif isinstance(value, torch.Tensor):
            out[key] = value.tolist()
        else:
            out[key] = _plain(value) if not isinstance(value, (str, int)) else value
    return out
