"""Reward functions: their arguments, what they must return, and where they run."""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from rollwright.data.llm.turns import Origin
from rollwright.envs.llm.jobs import Lane, ProcessLane, ThreadLane
from rollwright.errors import EnvError


@dataclass(frozen=True, slots=True)
class Sample:
    """A conversation that ended, as a reward function sees it.

    Attributes:
        origin: where it comes from.
        row: of its prompt in the dataset.
        prompt: messages, a text or tokens: what the model read first.
        completion: messages or a text: all that followed.
        completion_ids: tokens of all answers.
    """

    origin: Origin
    row: Mapping[str, Any]
    prompt: Any
    completion: Any
    completion_ids: list[int]


@dataclass(frozen=True)
class Reward:
    """A reward function and how it is called.

    ``function(prompts, completions, **columns)`` returns a list with a number for each conversation, or None where it
    has nothing to say. ``prompts`` and ``completions`` are lists of messages in history mode, else lists of strings (or
    of tokens). ``columns`` are those of the dataset, each a list, and ``completion_ids``, the tokens of the answers; a
    function without ``**kwargs`` gets those that it names. It may be a coroutine function.

    A reward belongs to the last turn of a conversation. Records have the sum of all, with their weights, and the number
    that each function returned, by its name.

    Args:
        function: see above.
        weight: factor of its values in the sum.
        per: ``"conversation"``: called for those that have ended since the last call, together; it waits for no other.
            ``"group"``: called once for all repeats of a prompt, when the last of them ends; after a load, for those
            that were not delivered before.
        processes: 0: in a thread of this process, where no two plain functions run at the same time. Else in that
            many processes; the function is pickled, and a process that is over the limit is killed.
        timeout_s: seconds that a call may take.
        name: in records and messages; None: the function's.

    A call for several conversations that fails is made again for each alone, so that an error is that of one of them.

    Raises:
        TypeError: ``function`` cannot be called, or not by keyword.
        ValueError: another argument is out of range.

    Example:
        >>> def length(completions, **kwargs):
        ...     return [-float(len(completion)) for completion in completions]
        >>> Reward(length, weight=0.1, timeout_s=5.0).name
        'length'
    """

    function: Callable[..., Any]
    weight: float = 1.0
    per: Literal["conversation", "group"] = "conversation"
    processes: int = 0
    timeout_s: float = 60.0
    name: str = ""

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise TypeError(f"function: expected a reward function, got {type(self.function).__name__}.")
        if self.per not in ("conversation", "group"):
            raise ValueError(f"per: expected 'conversation' or 'group', got {self.per!r}.")
        if self.processes < 0 or self.timeout_s <= 0:
            raise ValueError(
                f"processes and timeout_s: expected at least 0 and more than 0, got {self.processes} and "
                f"{self.timeout_s}."
            )
        if self.processes and inspect.iscoroutinefunction(_target(self.function)):
            raise ValueError(
                f"processes: {self.function} is a coroutine function, which runs in this process. Pass processes=0."
            )
        if not self.name:
            object.__setattr__(self, "name", named(self.function))
        self._check_parameters()

    def _check_parameters(self) -> None:
        try:
            parameters = inspect.signature(self.function).parameters
        except (TypeError, ValueError):
            raise TypeError(
                f"function: {self.name!r} does not say which parameters it has. Wrap it: def reward(completions, "
                "**columns)."
            ) from None
        unnamed = [name for name, each in parameters.items() if each.kind is each.POSITIONAL_ONLY]
        if unnamed:
            raise TypeError(
                f"function: the parameters {unnamed} of {self.name!r} are positional, and it is called by keyword. "
                "Write them as plain ones: def reward(completions, **columns)."
            )

    def calls(self, waiting: int, running: int) -> int:
        """How many calls to begin, among which the conversations that wait are divided.

        Args:
            waiting: conversations.
            running: calls in progress.
        """
        if inspect.iscoroutinefunction(_target(self.function)):
            return 1
        return min(waiting, max(self.processes, 1) - running)

    def lane(self, shared: ThreadLane) -> Lane:
        """Where it runs; ``shared`` is that of all plain and coroutine functions."""
        if not self.processes:
            return shared
        return ProcessLane(partial(_call, self.function), self.processes, f"the reward function {self.name!r}")

    def call(self) -> Callable[..., Any]:
        """What runs there: takes :meth:`arguments`."""
        return _acall(self.function) if inspect.iscoroutinefunction(_target(self.function)) else self._plain

    def _plain(self, arguments: dict[str, Any]) -> Any:
        return self.function(**arguments)

    def arguments(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """The keyword arguments of a call.

        Raises:
            EnvError: the function has a parameter that is no column of the row.
        """
        columns = {str(name): [sample.row[name] for sample in samples] for name in samples[0].row}
        given = columns | {
            "prompts": [sample.prompt for sample in samples],
            "completions": [sample.completion for sample in samples],
            "completion_ids": [sample.completion_ids for sample in samples],
        }
        parameters = inspect.signature(self.function).parameters
        plain = [each for each in parameters.values() if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
        missing = [each.name for each in plain if each.default is each.empty and each.name not in given]
        if missing:
            raise self.failed(
                samples,
                f"has the parameters {missing}, which are no columns of its row: it is given {sorted(given)}",
                "Correct the name, or the dataset",
            )
        if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
            return given
        return {each.name: given[each.name] for each in plain if each.name in given}

    def values(self, returned: Any, samples: Sequence[Sample]) -> list[float | None]:
        """The numbers that a call returned, by sample, without its weight; None: it has nothing to say.

        Raises:
            EnvError: too few or too many, or something that is no finite number.
        """
        if hasattr(returned, "tolist"):
            returned = returned.tolist()
        if not isinstance(returned, (list, tuple)):
            raise self.failed(samples, f"returned a {type(returned).__name__}, expected a list of numbers")
        if len(returned) != len(samples):
            raise self.failed(
                samples,
                f"returned {len(returned)} numbers for {len(samples)} completions",
                "Return a list with one number for each of completions",
            )
        values: list[float | None] = []
        for value, sample in zip(returned, samples, strict=True):
            if value is None:
                values.append(None)
                continue
            try:
                number = _number(value)
            except (TypeError, ValueError, OverflowError):
                raise self.failed([sample], f"returned {_shown(value)}, expected a number or None") from None
            if not math.isfinite(number):
                raise self.failed(
                    [sample],
                    f"returned {'NaN' if math.isnan(number) else number}",
                    "Return a finite number, or None where it has nothing to say",
                )
            values.append(number)
        return values

    def failed(self, samples: Sequence[Sample], what: str, remedy: str = "Correct the function") -> EnvError:
        """The error about a call."""
        where = place(samples[0].origin) if len(samples) == 1 else f"the group of {place(samples[0].origin)}"
        return EnvError(f"{where}: the reward function {self.name!r} {what}. {remedy}.")

    def raised(self, samples: Sequence[Sample], error: BaseException) -> EnvError:
        """The error about a call that raised."""
        if isinstance(error, TimeoutError) and "took longer than" in str(error):
            return self.failed(samples, str(error), "Make it faster, or give Reward(..., timeout_s=) more")
        return self.failed(samples, f"raised {type(error).__name__}: {error}")


def as_rewards(rewards: Any) -> tuple[Reward, ...]:
    """Reward functions as :class:`Reward`, each with a name of its own; None: there are none.

    Raises:
        TypeError: something else was given.
    """
    if rewards is None:
        return ()
    if isinstance(rewards, Reward) or callable(rewards):
        rewards = (rewards,)
    if not isinstance(rewards, (list, tuple)):
        raise TypeError(f"rewards: expected functions or Reward(...), got {type(rewards).__name__}. Pass a list.")
    found: dict[str, Reward] = {}
    for given in rewards:
        reward = given if isinstance(given, Reward) else Reward(given)
        names = (f"{reward.name}_{number}" for number in itertools.count(2))
        name = reward.name if reward.name not in found else next(name for name in names if name not in found)
        found[name] = reward if name == reward.name else replace(reward, name=name)
    return tuple(found.values())


def place(origin: Origin) -> str:
    """A conversation's name, for messages."""
    return f"conversation {origin.repeat} from prompt {origin.index} (epoch {origin.epoch}, group {origin.group})"


def named(function: Any) -> str:
    """The name of a function, for messages."""
    while isinstance(function, partial):
        function = function.func
    return str(getattr(function, "__name__", type(function).__name__))


def _number(value: Any) -> float:
    if isinstance(value, (str, bytes)):  # which float() would read
        raise TypeError
    return float(value)


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except Exception:
        return f"a {type(value).__name__}"
    return text if len(text) < 80 else text[:77] + "..."


def _target(function: Any) -> Any:
    while isinstance(function, partial):
        function = function.func
    if inspect.isfunction(function) or inspect.ismethod(function):
        return function
    return getattr(function, "__call__", function)  # noqa: B004


def _acall(function: Callable[..., Any]) -> Callable[..., Any]:
    async def call(arguments: dict[str, Any]) -> Any:
        return await function(**arguments)

    return call


def _call(function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    return function(**arguments)
