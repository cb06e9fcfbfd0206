"""AgentSession: the requests of one program as a conversation; AgentHost makes one for each row."""

from __future__ import annotations

import math
import queue
import threading
from collections.abc import Callable, Mapping
from typing import Any

from rollwright.data.llm.turns import FinishReason, Message
from rollwright.envs.llm.agents.endpoint import Call, Endpoint
from rollwright.envs.llm.agents.programs import AgentError, Command, CommandRun, FunctionRun, Keeper, Program
from rollwright.envs.llm.agents.protocol import Choice, sent
from rollwright.envs.llm.core import Answer, NextTurn
from rollwright.envs.llm.jobs import Finished, Job, ThreadLane
from rollwright.envs.llm.replies import Reply
from rollwright.envs.llm.tools.core import ParsedAnswer, ToolParser
from rollwright.envs.llm.tools.toolset import parse_answer
from rollwright.errors import EnvError

_MANY = 1 << 20  # threads: as many as there are conversations
_NEXT_CHOICE = 1_000_003  # between the seeds of several answers to one request


class AgentHost:
    """Makes the environment of a conversation from its row: a program, and what hands its requests to the model.

    Sent to another process, it has a server of its own there.

    Args:
        agent: a function of ``row``, ``base_url`` and ``api_key``, or a :class:`Command`.
        parser: finds calls of tools in an answer.
        reasoning: marks of reasoning, in which nothing is a call.
        ignored: parameters of requests that have no effect.

    Attributes:
        tokenizer: for the log-probs of an answer; None: tokens are numbers there.
    """

    tokenizer: Any = None

    def __init__(
        self,
        agent: Callable[..., Any] | Command,
        *,
        parser: ToolParser,
        reasoning: tuple[str, str] | None = None,
        ignored: tuple[str, ...] = (),
    ) -> None:
        self.agent, self.ignored = agent, ignored
        self._parser, self._reasoning = parser, reasoning
        self._begin()

    def _begin(self) -> None:
        self._endpoint: Endpoint | None = None
        self._lane, self._keeper, self._lock = ThreadLane(_MANY), Keeper(), threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        made_in_begin = {"_endpoint", "_lane", "_keeper", "_lock"}
        return {name: value for name, value in self.__dict__.items() if name not in made_in_begin}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()

    def __call__(self, row: Mapping[str, Any]) -> AgentSession:
        """The environment of a conversation; its program starts when it is asked for its first messages."""
        with self._lock:
            if self._endpoint is None:
                self._endpoint = Endpoint()
            return AgentSession(self, row, self._endpoint)

    def program(self, row: Mapping[str, Any], address: str, key: str) -> Program:
        """A program for a conversation."""
        if isinstance(self.agent, Command):
            return CommandRun(self.agent, row, address, key, self._keeper)
        return FunctionRun(self.agent, row, address, key)

    def start(self, program: Program, ended: Any) -> Callable[[], None]:
        """Run a program.

        Args:
            program: to run.
            ended: its ``put`` gets the job and its end.

        Returns:
            Ends the program.
        """
        job = Job("agent", program.function, (), math.inf)
        self._lane.begin(job, ended)

        def stop() -> None:
            program.stop()
            job.given_up = True
            self._lane.give_up(job)

        return stop

    def parse(self, text: str, prompt: str) -> ParsedAnswer:
        """Take an answer apart."""
        return parse_answer(text, prompt, self._parser, self._reasoning)

    def close(self) -> None:
        """End server and threads; programs have ended with their conversations. May be called again."""
        with self._lock:
            endpoint, self._endpoint = self._endpoint, None
        if endpoint is not None:
            endpoint.close()
        self._lane.close()
        self._keeper.close()


class AgentSession:
    """The environment of one conversation, see ``Dialogue(opens=True)``: a program writes all messages but the answers.

    Requests are answered one after another, in the order in which they came. Messages that begin with those of an
    earlier request and its answer go on with the tokens of that sequence, the longest one that there is; all others
    begin a sequence.

    Args:
        host: of the program.
        row: of the data.
        endpoint: hands its requests here.
    """

    def __init__(self, host: AgentHost, row: Mapping[str, Any], endpoint: Endpoint) -> None:
        self._host, self._endpoint, self.ignored = host, endpoint, host.ignored
        self._events: queue.SimpleQueue[Call | None] = queue.SimpleQueue()  # None: look at what has ended
        self._end: Finished | None = None
        self._closed = False
        self._stop: Callable[[], None] | None = None
        self._lock, self._reward = threading.Lock(), 0.0
        self._sequences: list[tuple[Mapping[str, Any], list[Message]]] = []  # as the program knows them
        self._asked: tuple[Call, int] | None = None  # that is answered now, and its sequence
        self._answers = 0
        self._number, address, key = endpoint.open(self)
        self._program = host.program(row, address, key)

    # From the server and the program ------------------------------------------------------------------

    def receive(self, call: Call) -> None:
        """Take a request; answers go to :meth:`Call.take`."""
        for _ in range(call.request.n):
            self._events.put(call)

    def add_reward(self, reward: float) -> None:
        """See :meth:`Conversation.add_reward`: it is part of the reward of the last answer."""
        with self._lock:
            self._reward += reward

    def put(self, item: tuple[Job, Finished]) -> None:
        """The program has ended."""
        self._end = item[1]
        self._events.put(None)

    # From the conversation ----------------------------------------------------------------------------

    def respond(self, answer: Answer | None) -> Reply:
        """Hand an answer to the program, and wait for its next request, or for its end.

        Args:
            answer: to its last request; None: the program begins.

        Raises:
            AgentError: the program failed.
        """
        response = None
        if answer is None:
            self._stop = self._host.start(self._program, self)
            if self._closed:
                self._stop()
        else:
            response = self._answer(answer)
        while not self._closed:
            call = self._events.get()
            if self._end is not None:
                return Reply([], self._taken(self._end), True, response=response)
            if call is not None:
                messages, following = self._ask(call)
                return Reply(messages, self._taken(), False, following, response)
        raise AgentError("its conversation was closed")

    def _ask(self, call: Call) -> tuple[list[Message], NextTurn]:
        """What the model reads next, and in which sequence."""
        request = call.request
        messages = list(request.messages)
        fits = [
            (len(known), number)
            for number, (template, known) in enumerate(self._sequences)
            if template == request.template and len(known) < len(messages) and messages[: len(known)] == known
        ]
        size, number = max(fits, default=(0, len(self._sequences)))
        if size:
            self._sequences[number][1].extend(messages[size:])
        else:
            self._sequences.append((request.template, messages))
        self._asked = call, number
        seed = request.seed if request.seed is None else request.seed + _NEXT_CHOICE * len(call.choices)
        return messages[size:], NextTurn(number, request.template, request.sampling, seed)

    def _answer(self, answer: Answer) -> Message | None:
        """Send an answer; returns its message where it calls tools."""
        assert self._asked is not None
        (call, number), self._asked = self._asked, None
        text = answer.text
        for stop in call.request.sampling.get("stop", ()):
            text = text.partition(stop)[0]
        message: dict[str, Any] = {"role": "assistant", "content": text}
        parsed = self._host.parse(text, answer.prompt) if call.request.calls else ParsedAnswer(text)
        made = [(place, found) for place, found in enumerate(parsed.calls) if found.error is None]
        if made:
            message["content"] = parsed.content
            message["tool_calls"] = [
                {
                    "id": f"call_{self._answers}_{place}",
                    "type": "function",
                    "function": {"name": found.name, "arguments": dict(found.arguments)},
                }
                for place, found in made
            ]
        self._answers += 1
        self._sequences[number][1].append(message)
        stopped = "length" if answer.finish_reason is not FinishReason.STOP else "stop"
        reason = "tool_calls" if made else stopped
        log_probs = self._log_probs(answer) if call.request.log_probs else None
        call.take(Choice(sent(message), reason, answer.num_prompt, len(answer.tokens), log_probs))
        return message if made else None

    def _log_probs(self, answer: Answer) -> list[dict[str, Any]]:
        tokenizer, values = self._host.tokenizer, answer.log_probs
        found = []
        for place, token in enumerate(answer.tokens.tolist()):
            text = f"token_id:{token}" if tokenizer is None else tokenizer.decode([token])
            value = 0.0 if values is None else float(values[place])
            found.append({"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []})
        return found

    def _taken(self, end: Finished | None = None) -> float:
        """The reward since the last answer; of the program's end, too.

        Raises:
            AgentError: it failed.
        """
        with self._lock:
            reward, self._reward = self._reward, 0.0
        if end is None:
            return reward
        if isinstance(end.error, AgentError):
            raise end.error
        if end.error is not None:
            raise AgentError(f"raised {type(end.error).__name__}: {end.error}") from end.error
        if not self._sequences:
            raise AgentError(
                "ended without a request to the model: have its client use the base_url and the api_key that it has"
            )
        value = 0.0 if end.value is None else end.value
        if isinstance(value, (str, bytes)) or not hasattr(value, "__float__") or not math.isfinite(float(value)):
            raise AgentError(f"returned {repr(value)[:80]}, expected its reward, a finite number, or None")
        return reward + float(value)

    def state_dict(self) -> dict[str, Any]:
        """See :class:`Environment`.

        Raises:
            EnvError: always.
        """
        raise EnvError("a program cannot be saved midway: it runs again")

    def close(self) -> None:
        """The conversation is over: end the program, and refuse its requests."""
        self._closed = True
        self._endpoint.end(self._number)
        if self._stop is not None:
            self._stop()
        self._events.put(None)
