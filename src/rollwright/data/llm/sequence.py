"""Conversations as training sequences, advantages within groups, and importance weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args

import torch
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict, TensorDictBase
from torch import Tensor

from rollwright._keys import NestedKey
from rollwright.data.llm.ragged import flat_records
from rollwright.data.llm.records import RecordLayout, record
from rollwright.data.llm.turns import FinishReason, Turn

Batch = TypeVar("Batch", bound=TensorDictBase)
Correction = Literal["truncate", "mask", "none"]
Level = Literal["token", "sequence"]

_LAYOUT = RecordLayout(text=False)
_KEYS = {  # of what a sequence is made: nested, flat
    "tokens": (("tokens", "full"), "tokens"),
    "response": (("tokens", "response"), "tokens_response"),
    "log_probs": (("log_probs", "response"), "log_probs"),
    "versions": (("tokens", "policy_version"), "tokens_policy_version"),
    "mask": (("masks", "all_assistant_mask"), "assistant_mask"),
}
_NAMES: tuple[NestedKey, ...] = (
    "sequence",
    "group_id",
    "repeat",
    "prompt_index",
    "epoch",
    ("collector", "traj_ids"),
)


@dataclass(frozen=True)
class InSequences:
    """Makes the training sequences of a batch of whole conversations, ``[sequences]``; then another function follows.

    Attributes:
        then: called with the sequences; its result is that of the whole. None: nothing follows.
    """

    then: Callable[[TensorDictBase], TensorDictBase] | None = None

    def __call__(self, batch: TensorDictBase) -> TensorDictBase:
        """The sequences of a batch, lazily stacked."""
        found = training_sequences(batch)
        stacked: Any = LazyStackedTensorDict(*found, stack_dim=0) if found else batch[:0]
        return stacked if self.then is None else self.then(stacked)


def training_sequences(source: Any) -> list[TensorDict]:
    """Read conversations as sequences of tokens, in which each sampled token is once.

    Turns of one conversation whose tokens extend each other are one sequence: those of one ``sequence``. There are
    several where the template wrote earlier turns in another way, or a program edited its history.

    Args:
        source: records, nested or flat, of whole conversations: a batch, a sample of a buffer, or a list of them; or
            :class:`Turn` objects. Conversations are told apart by ``("collector", "traj_ids")``, else by group, prompt,
            epoch and repeat. Padding is left out.

    Returns:
        A TensorDict of batch size ``[]`` for each sequence, in the order in which the conversations begin:

        - ``tokens``: int64 ``[tokens]``, a view of those of its last turn;
        - ``assistant_mask``: bool, True on sampled tokens: its sum is the number of tokens that were sampled, but for
          conversations that failed, which have none;
        - ``log_probs``: float32, 0 on other tokens (where the records have them);
        - ``policy_version``: int64, -1 on other tokens; of UUIDs a list of strings, empty on other tokens;
        - ``turn``: int64, which turn sampled a token, -1 on other tokens;
        - ``advantage``: float32, 0 on other tokens (where the records have it);
        - ``reward``: float32 ``[1]``, the sum over its turns;
        - ``sequence``, ``group_id``, ``repeat``, ``prompt_index``, ``epoch`` and ``("collector", "traj_ids")`` of the
          records.

    Raises:
        ValueError: a conversation lacks a turn, or the tokens of a turn do not extend those before it.

    Example:
        >>> import torch
        >>> from rollwright.data.llm import FinishReason, Origin, Turn
        >>> origin, tokens = Origin(index=0, epoch=0, repeat=0, group=0, seed=0), torch.arange(6)
        >>> message, zero, stop = {"role": "assistant", "content": ""}, torch.zeros(1), FinishReason.STOP
        >>> turns = [
        ...     Turn(origin, i, 0, [], message, "", "", tokens[:n], n - 1, zero, "raw", zero, 0, stop)
        ...     for i, n in enumerate([3, 6])
        ... ]
        >>> training_sequences(turns)[0]["assistant_mask"]
        tensor([False, False,  True, False, False,  True])
    """
    conversations: dict[Any, list[TensorDictBase]] = {}
    for one in _records(source):
        if _is_turn(one):
            conversations.setdefault(_conversation(one), []).append(one)
    found: list[TensorDict] = []
    for name, turns in conversations.items():
        turns.sort(key=lambda one: int(one["turn"]))
        numbers = [int(one["turn"]) for one in turns]
        if numbers != list(range(len(numbers))):
            raise ValueError(
                f"source must hold whole conversations; of {_named(name)} it holds the turns {numbers}; sample whole "
                "trajectories"
            )
        sequences: dict[int, list[TensorDictBase]] = {}
        for one in turns:
            sequences.setdefault(int(one["sequence"]), []).append(one)
        found += [_united(each, name) for each in sequences.values()]
    return found


def group_advantages(
    batch: Batch,
    *,
    reward_key: NestedKey = ("next", "reward"),
    group_key: NestedKey = "group_id",
    advantage_key: NestedKey = "advantage",
    trajectory_return: Literal["sum", "mean", "max"] | None = None,
    baseline: Literal["mean", "leave_one_out", "none"] = "mean",
    scale: bool | None = None,
) -> Batch:
    """Write the advantage of each record within its group: reward minus a baseline.

    With r the rewards of all records of a group (of each token, where rewards are)::

        mean:          (r - mean(r)) / max(std(r), 1e-6)
        leave_one_out: r - mean(r of the others)
        none:          r

    with the standard deviation of a sample (n - 1). Groups must be in the batch whole. The mean is that of GRPO
    (arXiv:2402.03300, section 4.1.2), and of TorchRL's ``MCAdvantage``; leave-one-out is that of RLOO
    (arXiv:2402.14740, section 2.3).

    Args:
        batch: records of whole groups, of any batch size.
        reward_key: ``[1]`` or ``[response, 1]``.
        group_key: of the group's id.
        advantage_key: is written: float32 ``[1, 1]``, or ``[response, 1]`` where rewards are of tokens.
        trajectory_return: normalise a return of each conversation instead, which all of its turns get: the ``"sum"``,
            ``"mean"`` or ``"max"`` of its rewards.
        baseline: what is taken off.
        scale: divide by the standard deviation; None: with the baseline ``"mean"``.

    Returns:
        The same batch. The advantage is 0 in padding, in a group of one reward, and in conversations that failed
        (``finish_reason`` is ``"error"``), which are left out of mean and deviation.

    Raises:
        ValueError: ``trajectory_return`` or ``baseline`` is none of these.
        KeyError: records have no reward or no group at these keys.
    """
    if trajectory_return not in (None, "sum", "mean", "max"):
        raise ValueError(f"trajectory_return must be None, 'sum', 'mean' or 'max'; got {trajectory_return!r}")
    if baseline not in ("mean", "leave_one_out", "none"):
        raise ValueError(f"baseline must be 'mean', 'leave_one_out' or 'none'; got {baseline!r}")
    scale = baseline == "mean" if scale is None else scale
    rows = flat_records(batch)
    for name, key in (("reward_key", reward_key), ("group_key", group_key)):
        if rows and rows[0].get(key, None) is None:
            raise KeyError(
                f"{name}: a record has no entry {key!r}; it has {sorted(map(str, rows[0].keys(True, True)))}"
            )
    taken = [_is_turn(one) for one in rows]
    if failed := {_conversation(one) for one, is_turn in zip(rows, taken, strict=True) if is_turn and _failed(one)}:
        taken = [is_turn and _conversation(one) not in failed for one, is_turn in zip(rows, taken, strict=True)]
    rewards = [_column(one[reward_key]) for one in rows]
    returns = rewards if trajectory_return is None else _returns(rows, rewards, taken, trajectory_return)
    members: dict[int, list[int]] = {}
    for place, one in enumerate(rows):
        if taken[place]:
            members.setdefault(int(one[group_key]), []).append(place)
    advantages = [torch.zeros_like(reward) for reward in rewards]
    for places in members.values():
        if trajectory_return is None:
            values = torch.cat([returns[place] for place in places])
        else:
            first = {_conversation(rows[place]): place for place in reversed(places)}
            values = torch.cat([returns[place] for place in first.values()])
        deviation = values.std().clamp_min(1e-6) if scale and values.numel() > 1 else values.new_ones(())
        for place in places:
            own = returns[place]
            centred = own - _baseline(values, own, baseline)
            advantages[place] = (centred / deviation).expand_as(rewards[place])
    _write(batch, rows, advantage_key, advantages)
    return batch


def rewards_differ(group: TensorDictBase, *, reward_key: NestedKey = ("next", "reward")) -> bool | str:
    """Whether the conversations of a group have different returns, so that there is something to learn from it.

    For ``keep_group=`` of a collector. Conversations that failed do not count.

    Args:
        group: its records.
        reward_key: ``[1]`` or ``[response, 1]``.

    Returns:
        True; or ``"equal rewards"``, the reason why it is not kept.
    """
    return len({total for _, total in _totals(group, reward_key)}) > 1 or "equal rewards"


def pass_at_k(
    batch: TensorDictBase,
    k: int | Sequence[int] = 1,
    *,
    at_least: float = 1.0,
    reward_key: NestedKey = ("next", "reward"),
) -> dict[str, float]:
    """The probability that one of k answers to a prompt is right, estimated without bias, as a mean over prompts.

    Of the n conversations that begin with a prompt, c are right: the sum of their rewards is ``at_least`` or more. Then
    (Chen et al. 2021, "Evaluating Large Language Models Trained on Code", arXiv:2107.03374, equation 1)::

        pass@k = mean over prompts of 1 - binomial(n - c, k) / binomial(n, k)

    For ``metrics_fn=`` of an :class:`~rollwright.collectors.Evaluator`. Conversations that failed do not count.

    Args:
        batch: records of whole conversations.
        k: one number, or several.
        at_least: sum of rewards of a right one.
        reward_key: ``[1]`` or ``[response, 1]``.

    Returns:
        ``"pass@k"`` by name, for each k.

    Raises:
        ValueError: a prompt has less than k conversations, or there is none.

    Example:
        >>> from functools import partial
        >>> metrics_fn = partial(pass_at_k, k=(1, 4), at_least=0.5)
    """
    wanted = [k] if isinstance(k, int) else list(k)
    right: dict[int, list[bool]] = {}
    for first, total in _totals(batch, reward_key):
        right.setdefault(int(first["prompt_index"]), []).append(total >= at_least)
    fewest = min(right, key=lambda prompt: len(right[prompt]), default=None)
    for number in wanted:
        if number < 1 or fewest is None or number > len(right[fewest]):
            found = "no conversation" if fewest is None else f"{len(right[fewest])} of prompt {fewest}"
            raise ValueError(
                f"k: expected from 1 to the number of conversations of each prompt, got {number}, and {found}. Pass "
                f"repeats={number} or more to the environment, or a smaller k."
            )
    return {
        f"pass@{number}": sum(
            1 - math.comb(answers.count(False), number) / math.comb(len(answers), number) for answers in right.values()
        )
        / len(right)
        for number in wanted
    }


def _totals(batch: TensorDictBase, reward_key: NestedKey) -> list[tuple[TensorDictBase, float]]:
    """A record and the sum of rewards of each conversation that has not failed."""
    rows = [one for one in flat_records(batch) if _is_turn(one)]
    failed = {_conversation(one) for one in rows if _failed(one)}
    first: dict[tuple[int, ...], TensorDictBase] = {}
    totals: dict[tuple[int, ...], float] = {}
    for one in rows:
        if (name := _conversation(one)) not in failed:
            first.setdefault(name, one)
            totals[name] = totals.get(name, 0.0) + float(one[reward_key].sum())
    return [(first[name], total) for name, total in totals.items()]


def importance_weights(
    log_probs: Tensor,
    sampled: Tensor,
    *,
    mask: Tensor | None = None,
    correction: Correction = "truncate",
    level: Level = "token",
    low: float = 0.5,
    high: float = 2.0,
) -> Tensor:
    """Weights of sampled tokens in a loss of the learner; without gradients.

    With pi the learner's and mu the distribution that was sampled from (older weights, another engine, or both)::

        w = pi(token) / mu(token)
        truncate: min(w, high)
        mask:     w where low <= w <= high, else 0

    Truncation is that of V-trace (arXiv:1802.01561, section 4.1), masking that of IcePop (arXiv:2510.18855). The loss
    of a policy gradient is ``-(weights * advantage * log_probs)[mask].mean()``.

    Args:
        log_probs: of the learner, float ``[*batch, tokens]``.
        sampled: of a record, of the same shape.
        mask: bool, of the same shape: which tokens were sampled; the others weigh 0. None: all.
        correction: ``"none"``: w as it is.
        level: ``"sequence"``: w is the product over the sampled tokens of a row, and the same for each of them.
        low: bound of the mask.
        high: bound of both.

    Returns:
        float32 ``[*batch, tokens]``.

    Raises:
        ValueError: shapes differ, the bounds are no bounds, or an option is unknown.

    Example:
        >>> new, old = torch.tensor([[0.1, 0.6, 0.9]]).log(), torch.tensor([[0.4, 0.5, 0.3]]).log()
        >>> importance_weights(new, old)
        tensor([[0.2500, 1.2000, 2.0000]])
        >>> importance_weights(new, old, correction="mask")
        tensor([[0.0000, 1.2000, 0.0000]])
    """
    for name, value, known in (("correction", correction, Correction), ("level", level, Level)):
        if value not in get_args(known):
            raise ValueError(f"{name} must be {' or '.join(map(repr, get_args(known)))}; got {value!r}")
    if log_probs.shape != sampled.shape or (mask is not None and mask.shape != sampled.shape):
        shapes = [tuple(each.shape) for each in (log_probs, sampled, mask) if each is not None]
        raise ValueError(f"log_probs, sampled and mask must be of one shape, [*batch, tokens]; got {shapes}")
    if not 0 <= low <= 1 <= high:
        raise ValueError(f"low and high must be bounds around 1, 0 <= low <= 1 <= high; got {low} and {high}")
    ratios = log_probs.detach().float() - sampled.float()
    if mask is not None:
        ratios = ratios.masked_fill(~mask.bool(), 0.0)
    if level == "sequence":
        ratios = ratios.sum(-1, keepdim=True).expand_as(ratios)
    weights = ratios.exp()
    if correction == "truncate":
        weights = weights.clamp(max=high)
    elif correction == "mask":
        weights = weights.masked_fill((weights < low) | (weights > high), 0.0)
    return weights if mask is None else weights.masked_fill(~mask.bool(), 0.0)


def _baseline(values: Tensor, own: Tensor, kind: str) -> Any:
    """What is taken off the rewards ``own`` of a record, of those of its group."""
    if kind == "none":
        return 0.0
    if kind == "mean":
        return values.mean()
    others = values.numel() - own.numel()
    return (values.sum() - own.sum()) / others if others else own


def _records(source: Any) -> list[TensorDictBase]:
    if isinstance(source, Turn):
        return [record(source, _LAYOUT)]
    if isinstance(source, Iterable) and not isinstance(source, TensorDictBase):
        return [one for part in source for one in _records(part)]
    return flat_records(source)


def _is_turn(one: TensorDictBase) -> bool:
    """Whether a record is no padding."""
    mask = one.get(("collector", "mask"), None)
    return (mask is None or bool(mask)) and len(_read(one, "tokens")) > 0


def _failed(one: TensorDictBase) -> bool:
    reason = one.get("finish_reason", None)
    return isinstance(reason, NonTensorData) and str(reason.data) == FinishReason.ERROR


def _conversation(one: TensorDictBase) -> tuple[int, ...]:
    """What tells conversations apart."""
    traj_id = one.get(("collector", "traj_ids"), None)
    if traj_id is not None:
        return (int(traj_id),)
    return tuple(int(one[key]) for key in ("group_id", "prompt_index", "epoch", "repeat"))


def _named(name: tuple[int, ...]) -> str:
    if len(name) == 1:
        return f"conversation {name[0]}"
    return f"the conversation of group {name[0]}, prompt {name[1]}, epoch {name[2]}, repeat {name[3]}"


def _read(one: TensorDictBase, name: str) -> Any:
    nested, flat = _KEYS[name]
    key = nested if isinstance(one.get("tokens"), TensorDictBase) else flat
    value = one.get(key, None)
    if isinstance(value, NonTensorStack):
        return value.tolist()
    return value.data if isinstance(value, NonTensorData) else value


def _united(turns: Sequence[TensorDictBase], name: tuple[int, ...]) -> TensorDict:
    tokens: Tensor = _read(turns[-1], "tokens")
    size = tokens.shape[0]
    mask = torch.zeros(size, dtype=torch.bool)
    number = torch.full((size,), -1)
    versions: Any = torch.full((size,), -1)
    log_probs, advantage = torch.zeros(size), torch.zeros(size)
    before = 0
    reward = torch.zeros(1)
    for one in turns:
        whole, response = _read(one, "tokens"), _read(one, "response")
        start, stop = len(whole) - len(response), len(whole)
        if start < before or stop > size or not torch.equal(whole, tokens[:stop]):
            raise ValueError(
                f"the tokens of turn {int(one['turn'])} of {_named(name)} must extend those before them, and do not; "
                "tokens were written over, or 'sequence' was"
            )
        before = stop
        trained = _read(one, "mask")
        mask[start:stop] = True if trained is None else trained[start:stop]
        number[start:stop] = int(one["turn"])
        reward += one["next", "reward"].sum()
        if (values := _read(one, "log_probs")) is not None:
            log_probs[start:stop] = values
        if (values := one.get("advantage", None)) is not None:
            advantage[start:stop] = values.flatten()
        versions = _place(versions, start, stop, _read(one, "versions"))
    first = turns[0]
    result = TensorDict({"tokens": tokens, "assistant_mask": mask, "turn": number, "reward": reward})
    result["policy_version"] = versions if isinstance(versions, Tensor) else NonTensorData(versions)
    if _read(first, "log_probs") is not None:
        result["log_probs"] = log_probs
    if first.get("advantage", None) is not None:
        result["advantage"] = advantage
    for key in _NAMES:
        if (value := first.get(key, None)) is not None:
            result[key] = value
    return result


def _place(versions: Any, start: int, stop: int, values: Any) -> Any:
    """Versions of a sequence with those of a turn in their place."""
    if isinstance(values, Tensor):
        versions[start:stop] = values
        return versions
    texts = [""] * len(versions) if isinstance(versions, Tensor) else versions
    texts[start:stop] = values
    return texts


def _column(reward: Tensor) -> Tensor:
    """A reward as float32 ``[tokens or 1, 1]``."""
    return reward.to(torch.float32).reshape(-1, 1)


def _returns(
    rows: Sequence[TensorDictBase], rewards: Sequence[Tensor], taken: Sequence[bool], how: str
) -> list[Tensor]:
    """The return of each record's conversation, ``[1, 1]``."""
    of: dict[tuple[int, ...], list[Tensor]] = {}
    for one, reward, is_turn in zip(rows, rewards, taken, strict=True):
        if is_turn:
            of.setdefault(_conversation(one), []).append(reward)
    value = {name: getattr(torch.cat(parts), how)().reshape(1, 1) for name, parts in of.items()}
    zero = torch.zeros(1, 1)
    return [value[_conversation(one)] if is_turn else zero for one, is_turn in zip(rows, taken, strict=True)]


def _write(batch: Any, rows: Sequence[TensorDictBase], key: NestedKey, values: Sequence[Tensor]) -> None:
    if _is_lazy(batch):
        for one, value in zip(rows, values, strict=True):
            one.set(key, value.clone())
    else:
        batch.set(key, torch.stack(list(values)).view(*batch.batch_size, *values[0].shape))


def _is_lazy(node: Any) -> bool:
    """Whether the records of a batch are TensorDicts of their own."""
    if isinstance(node, LazyStackedTensorDict):
        return all(map(_is_lazy, node.tensordicts))
    return all(map(_is_lazy, node)) if isinstance(node, list | tuple) else not node.batch_dims
