"""ToolCalls: makes the calls of an answer, side by side."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from rollwright.envs.llm.jobs import Finished, Jobs, ThreadLane
from rollwright.envs.llm.rewards import place
from rollwright.envs.llm.talk import Step, Talk
from rollwright.envs.llm.tools.toolset import Toolset, call_of
from rollwright.errors import EnvError

_MOST_CALLS = 16  # side by side, for each conversation


class ToolCalls:
    """Makes the calls of answers.

    Args:
        toolset: the tools; None: there are none, and nothing is called.
        jobs: runs them.
        num_slots: conversations side by side.
        goes_on: called when all results of an answer are there.
    """

    def __init__(
        self, toolset: Toolset | None, jobs: Jobs, num_slots: int, goes_on: Callable[[int, Talk], None]
    ) -> None:
        self._toolset, self._jobs, self._goes_on = cast(Toolset, toolset), jobs, goes_on
        self._lane = ThreadLane(_MOST_CALLS * num_slots)

    def make(self, slot: int, talk: Talk) -> None:
        """Make the calls of the last answer.

        Raises:
            EnvError: one cannot be made, and ``on_error="raise"``.
        """
        for number, call in enumerate(talk.calls):
            problem = self._toolset.problem(call)
            if problem is None:
                talk.make_call(number)
            else:
                self._failed(talk, number, problem)
        self._next(slot, talk)

    def _next(self, slot: int, talk: Talk) -> None:
        """Begin the calls that can be; when all results are there, the model goes on."""
        for number in talk.calls_to_begin(self._toolset.tools):
            call = talk.calls[number]
            tool = self._toolset.tools[call.name]
            function = call_of(talk.session(tool).function)
            step = Step("tool", slot, talk, number)
            self._jobs.start(step, self._lane, function, (dict(call.arguments),), limit_s=tool.timeout_s)
        if talk.take_results():
            self._goes_on(slot, talk)

    def _failed(self, talk: Talk, number: int, reason: str) -> None:
        if self._toolset.on_error == "raise":
            raise EnvError(
                f"{place(talk.origin)}, turn {talk.turn}: the tool {talk.calls[number].name!r} failed: {reason}. "
                "Correct the tool, or pass Toolset(..., on_error='message') to let the model read that."
            )
        talk.tool_result(number, self._toolset.content(f"Error: {reason}"))

    def ended(self, step: Step, talk: Talk, end: Finished) -> None:
        """A tool has returned, or raised."""
        talk.spent("tool", end.seconds)
        error: BaseException | None = end.error
        if error is None:
            try:
                talk.tool_result(step.number, self._toolset.content(end.value))
            except Exception as raised:  # of an object's text
                error = raised
        if isinstance(error, TimeoutError) and "took longer than" in str(error):
            self._failed(talk, step.number, str(error))
        elif error is not None:
            self._failed(talk, step.number, f"{type(error).__name__}: {error}")
        self._next(step.slot, talk)

    def close(self) -> None:
        """End its threads."""
        self._lane.close()
