"""ParallelEnv: several environments in other processes, stepped at the same time."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Literal, Self, Unpack, cast

import torch
from tensordict import TensorDictBase

from rollwright._processes.channel import ByValue
from rollwright._processes.start import check_start_method
from rollwright._warnings import warn_user
from rollwright.data.specs import NonTensor
from rollwright.envs.arrays import STEPPED, ArrayEnv
from rollwright.envs.base import EnvBase, register_extension
from rollwright.envs.batched import host
from rollwright.envs.batched.base import IgnoredOptions, IndexedEnvs, check_ignored
from rollwright.envs.batched.host import EnvFacts, Sign
from rollwright.envs.batched.messages import ResetRows, Some, StepRows
from rollwright.envs.batched.parallel_arrays import ParallelArrays
from rollwright.envs.batched.processes import (
    SHORT_CLOSE_S,
    EnvProcesses,
    Sent,
    default_num_processes,
    lay_out_outcomes,
    overwritten,
    send_rows,
)
from rollwright.envs.batched.rows import HostedRows, Missed, end_rows
from rollwright.envs.factories import Factories, FactoryKwargs, factories, placed
from rollwright.envs.recreation import check_failure
from rollwright.envs.serial import SerialEnv
from rollwright.errors import EnvError


class RemoteEnvs(IndexedEnvs):
    """All of :class:`~rollwright.envs.batched.parallel.ParallelEnv` but steps and resets."""

    _not_saved = ("_launch", "openings", "_hosted", "_facts")

    _hosted: HostedRows
    _facts: list[EnvFacts]
    _options: dict[str, Any]  # of the constructor, for copies
    _ended = False

    @property
    def _processes(self) -> EnvProcesses:
        return self._hosted.processes

    @property
    def recreations(self) -> list[int]:
        """How many environments were in each place before."""
        return self._processes.recreations

    @property
    def num_recreated(self) -> int:
        """How many environments were recreated, those inside of them included."""
        return self._processes.num_recreated

    # The environments together ------------------------------------------------------------------

    def _ask(self, function: Callable[..., Any], *args: Any, rows: Iterable[int] | None = None) -> dict[int, Any]:
        """Call a function of :mod:`.host` where the environments are; what it returns, by row."""
        return self._hosted.call(function, *args, rows=rows)

    def call_in_hosts(self, function: Callable[..., object]) -> None:
        """Call a function in each process that hosts environments, with each :class:`Hosted` there."""
        self._ask(function)

    def seed_rows(self, rows: Sequence[int], seed: int | None, static_seed: bool) -> int | None:
        """Seed some environments, each with what follows the last seed of the one before; returns the last."""
        self._hosted.num_seedings += 1
        return self.seed_each(
            rows, seed, static_seed, lambda row, *given: self._ask(host.set_seed, *given, rows=[row])[row]
        )

    def to(self, device: torch.device | str | int | None) -> Self:  # type: ignore[override]
        """Move the environments and the batch; returns the environment."""
        if device is not None:
            self._facts[:] = self._ask(host.move, device).values()
        super().to(device)
        return self

    def close(self, *, raise_if_closed: bool = True) -> None:
        """Close all environments and end their processes, within seconds. A second call raises by default.

        A call that follows an interrupted one ends what is left, and waits no more than a second for environments.

        Warns:
            RuntimeWarning: a process did not end by itself.
        """
        hurries = self.is_closed and not self._ended  # the call before was interrupted
        super().close(raise_if_closed=raise_if_closed and not hurries)
        if self._ended:
            return
        self._hosted.is_closed = True
        raised, forced = self._processes.end(SHORT_CLOSE_S if hurries else None)
        self._ended = True
        if forced:
            warn_user(f"{type(self).__name__}: {'; '.join(forced)}.", RuntimeWarning)
        for one in raised:
            raise one.failure.error(f"{type(self).__name__}[{one.row}]")

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "_hosted" not in self.__dict__ or name.startswith("_") or self.is_closed:
                raise
        return self.look_up(name, range(self.num_workers))

    def look_up(self, name: str, rows: Sequence[int]) -> Any:
        """The values of an attribute of some environments; of a method, a function that calls it in each of them."""
        values = self._ask(host.look_up, name, rows=rows)
        methods = [isinstance(value, Sign) for value in values.values()]
        if all(methods):
            return partial(self._call, name, rows)
        values = self._ask(host.fetch, name, rows=rows) if any(methods) else values
        return [values[row] for row in rows]

    def _call(self, method: str, rows: Sequence[int], /, *args: Any, **kwargs: Any) -> list[Any]:
        answers = self._ask(host.call, method, args, kwargs, rows=rows)
        values = [answers[row] for row in rows]
        return [self if isinstance(value, Sign) else value for value in values]

    # State ------------------------------------------------------------------------------------

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for row, state in self._ask(host.state).items():
            destination.update({f"{prefix}worker{row}.{key}": value for key, value in state.items()})

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        places = [f"{prefix}worker{row}." for row in range(self.num_workers)]
        mine: dict[int, dict[str, Any]] = {row: {} for row in range(self.num_workers)}
        others = {}
        for key, value in state_dict.items():
            row = next((row for row, place in enumerate(places) if key.startswith(place)), None)
            if row is None:
                others[key] = value
            else:
                mine[row][key[len(places[row]) :]] = value
        for row, (missing, unexpected, error) in self._ask(host.load_state, mine).items():
            missing_keys += [places[row] + key for key in missing]
            unexpected_keys += [places[row] + key for key in unexpected] if strict else []
            error_msgs += [f"{places[row]}: {error}"] if error else []
        super()._load_from_state_dict(others, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)

    def save_remote(self) -> tuple[list[dict[str, Any]], list[str]]:
        """All that the environments are, one state each; and what of them could not be saved."""
        saved = self._ask(host.checkpoint)
        waiting = self._hosted.recreation.due(range(self.num_workers))
        unsaved = [
            f"{type(self).__name__} [worker {row}] {line}" for row, (_, lines) in saved.items() for line in lines
        ]
        return [{**state, "waits": row in waiting} for row, (state, _) in saved.items()], unsaved

    def load_remote(self, states: Sequence[dict[str, Any]]) -> None:
        """Let the environments be what :meth:`save_remote` has saved."""
        self._ask(host.load_checkpoint, dict(enumerate(states)))
        self._hosted.recreation.load(row for row, state in enumerate(states) if state.get("waits"))

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies have copies of the environments, in processes of their own."""
        if self.is_closed:
            raise EnvError(f"{self} is closed, and has no environments to copy. Copy it before close().")
        makers = [partial(pickle.loads, data) for data in self._ask(host.pickled).values()]
        state = {name: value for name, value in vars(self).items() if name not in self._not_saved}
        return _again, (type(self), makers, self._options), state

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(num_workers={self.num_workers}, env={self._facts[0].text}, "
            f"batch_size={list(self.batch_size)}, device={self.device})"
        )


def _again(cls: Any, makers: list[Any], options: dict[str, Any]) -> Any:
    return cls(len(makers), makers, **options)


class ParallelEnv(RemoteEnvs):
    """Steps a batch of environments in other processes at the same time, several in each.

    It gives the results of :class:`~rollwright.envs.SerialEnv`: batch size ``[num_workers, *batch]``, partial resets,
    seeds, lazy stacks of environments that differ, attributes and methods of the environments as lists. Numbers and
    flags go through shared memory, with one small message to each process and back for a step. Objects, and entries
    whose shapes vary, are in the message.

    Environments are made in their processes. If they draw from global generators (torch's, NumPy's, Python's), they use
    those of their process. ``set_seed`` seeds torch's generator there with the environments' own seeds.

    Args:
        num_workers: number of environments.
        create_env_fn: makes an environment; or a list with one such function for each. Lambdas work.
        create_env_kwargs: arguments for it, or a list of them.
        num_processes: number of processes that share the environments; None: one for each CPU that may be used.
        device: device of the batch's data; None: that of the environments.
        mp_start_method: how processes start: ``"forkserver"`` (None), ``"spawn"`` or ``"fork"``.
        serial_for_single: make a ``SerialEnv`` if ``num_workers`` is 1.
        num_threads: threads of torch in this process from here on; None: unchanged.
        num_sub_threads: threads of torch in each of the other processes.
        non_blocking: no effect, as ``ignored``.
        env_step_timeout: seconds for a step or a reset; None: an hour. Whatever takes longer counts as failed, after
            twice this time at most.
        on_env_failure: what to do if an environment raises in a step, takes too long, or its process dies.
            ``"raise"``: raise an error that names it. ``"recreate"``: make another one in its place. The frame of the
            failed step repeats the last observation, with a reward of 0 and ``truncated`` and ``done`` set, so the
            trajectory ends. A process that is stuck or dead is replaced; its other environments are new ones, too, and
            their trajectories are truncated. Running statistics are reset. The first failure gives a
            ``RuntimeWarning``; :attr:`recreations` counts all. Four failures without a step in between are raised.
        policy: see :class:`~rollwright.envs.EnvBase`.
        **ignored: options of other libraries without effect, so that programs written for them run; see
            :class:`~rollwright.envs.batched.base.IgnoredOptions`.

    Attributes:
        recreations: a list: how many environments were in each place before.

    Raises:
        TypeError: ``create_env_fn`` is no such function, or does not return an environment.
        ValueError: a list has another length than ``num_workers``, or environments do not fit together.
        EnvError: an environment could not be made, raised, did not return, or its process ended. The cause has the
            traceback of the other process.

    Example:
        >>> from rollwright.envs import GymEnv
        >>> env = ParallelEnv(2, lambda: GymEnv("CartPole-v1"))
        >>> env.set_seed(0)
        1
        >>> env.rollout(5).batch_size
        torch.Size([2, 5])
        >>> env.env_name
        ['CartPole-v1', 'CartPole-v1']
        >>> env.close()
    """

    _launch: Callable[[], EnvProcesses]

    def __new__(cls, num_workers: int, *args: Any, serial_for_single: bool = False, **kwargs: Any) -> Self:
        """A ``SerialEnv`` for a single environment, where that is wanted."""
        if not serial_for_single or num_workers != 1:
            return super().__new__(cls)
        for name in ("num_processes", "env_step_timeout"):
            kwargs.pop(name, None)
        single: Any = SerialEnv(num_workers, *args, **kwargs)
        return cast(Self, single)

    def __init__(
        self,
        num_workers: int,
        create_env_fn: Factories,
        *,
        create_env_kwargs: FactoryKwargs = None,
        num_processes: int | None = None,
        device: torch.device | str | int | None = None,
        mp_start_method: Literal["forkserver", "spawn", "fork"] | None = None,
        serial_for_single: bool = False,
        num_threads: int | None = None,
        num_sub_threads: int = 1,
        non_blocking: bool = False,
        env_step_timeout: float | None = None,
        on_env_failure: Literal["raise", "recreate"] = "raise",
        policy: Callable[..., Any] | None = None,
        **ignored: Unpack[IgnoredOptions],
    ) -> None:
        check_ignored(ignored, type(self).__name__)
        makers = factories(num_workers, create_env_fn, create_env_kwargs)
        _check(num_workers, num_processes, mp_start_method, env_step_timeout)
        recreates = check_failure(on_env_failure)
        for name, threads in (("num_threads", num_threads), ("num_sub_threads", num_sub_threads)):
            if threads is not None and not (isinstance(threads, int) and threads >= 1):
                raise ValueError(f"{name}: expected a number of at least 1, got {threads!r}.")
        self.__dict__["_launch"] = launch = partial(
            EnvProcesses,
            makers,
            num_processes or default_num_processes(num_workers),
            describe=host.describe,
            start_method=mp_start_method,
            timeout_s=env_step_timeout,
            recreates=recreates,
            num_threads=num_sub_threads,
        )
        processes = launch()
        try:
            super().__init__(processes.described, device)
            self._recreates = recreates
            self._take(processes)
        except BaseException:
            processes.end()
            raise
        self._options = {
            "num_processes": processes.num_processes,
            "device": device,
            "mp_start_method": mp_start_method,
            "num_sub_threads": num_sub_threads,
            "env_step_timeout": env_step_timeout,
            "on_env_failure": on_env_failure,
        }
        if num_threads is not None:
            torch.set_num_threads(num_threads)

    def _take(self, processes: EnvProcesses) -> None:
        self._facts: list[EnvFacts] = processes.described
        outcomes = lay_out_outcomes(self, processes, ahead=True)
        self._hosted = HostedRows(type(self).__name__, processes, outcomes, recreates=self._recreates)
        # from here on, attributes are looked up in the environments
        self._ended = False

    def known_parts(self) -> list[EnvFacts]:
        """The environments that are already made."""
        return self._facts

    def _open(self) -> list[EnvFacts]:
        if not self._ended:  # the call of close() was interrupted
            self.close()
        self._take(self._launch())
        return self._facts

    # Stepping ---------------------------------------------------------------------------------

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        marks = tensordict.get(STEPPED, None)
        if marks is not None:
            tensordict = tensordict.exclude(STEPPED)
            # What is not in shared rows comes with each answer, and is not there for those that do not answer.
            whole = self._ragged or any(isinstance(spec, NonTensor) for spec in self.full_observation_spec.values(True))
            marks = None if whole else marks.reshape(self.num_workers, -1).any(-1).tolist()
        return self.step_rows(tensordict, marks)

    def step_rows(self, tensordict: TensorDictBase, marks: Sequence[bool] | None) -> TensorDictBase:
        """Step some environments; None: all."""
        hosted = self._hosted
        hosted.check_free(self, range(self.num_workers))
        sent = send_rows(hosted.processes, tensordict)

        def command(ticket: int, some: Some, mine: Sequence[int]) -> StepRows:
            return StepRows(ticket, some, sent.layout, sent.nests, sent.rest_of(mine))

        gathered, missed = hosted.step(command, sent.layout, marks)
        return self._joined(tensordict, marks, hosted.outcomes.beside(gathered.replies.values()), missed)

    def _joined(
        self, root: TensorDictBase, marks: Sequence[bool] | None, rest: dict[int, TensorDictBase], missed: Missed
    ) -> TensorDictBase:
        """What a step from ``root`` has returned: rows of shared memory, and ``rest``, which has no place there."""
        stepped = [row for row in range(self.num_workers) if marks is None or marks[row]]
        form = None if rest or self._ragged else self._hosted.outcomes.common_form("step", stepped)
        if form is None:
            cut = missed.cut if not self._ragged and not rest else frozenset()
            return self._unlike(root, stepped, rest, Missed(missed.failed | missed.cut - cut, cut))
        out = self._hosted.outcomes.dense(form, self.num_workers)
        for row in missed.failed:
            self._repeat(out, root, row)
        self._end(out, missed)
        return placed(out, self.device)

    def _repeat(self, out: TensorDictBase, root: TensorDictBase, row: int) -> None:
        """Let a row of an outcome, which is none, mean that nothing has changed."""
        for key in self.observation_keys:
            if (last := root.get(key, None)) is not None:
                out.get(key)[row] = last[row].to(out.get(key).device)
        for key in self.reward_keys:
            out.get(key)[row] = 0

    def _end(self, out: TensorDictBase, missed: Missed) -> None:
        if missed.failed:
            end_rows(out, self.done_groups, missed.failed, failed=True)
        if missed.cut:
            end_rows(out, self.done_groups, missed.cut, failed=False)

    def _unlike(
        self, root: TensorDictBase, stepped: Sequence[int], rest: dict[int, TensorDictBase], missed: Missed
    ) -> TensorDictBase:
        """The outcome where rows differ, or hold more than tensors."""
        rows = []
        for row, (facts, last) in enumerate(zip(self._facts, root.unbind(0), strict=True)):
            if row in missed.failed or row not in stepped:
                td = overwritten(facts.full_observation_spec.zero(), last)
                rows.append(td.update(facts.full_reward_spec.zero()).update(facts.full_done_spec.zero()))
            else:
                rows.append(self._hosted.outcomes.row("step", row, rest))
        out = self._stack(rows)
        self._end(out, missed)
        return out

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        self._hosted.drop_steps(range(self.num_workers))
        self.seed_for_reset(kwargs)
        return self.reset_rows(tensordict, [True] * self.num_workers, **kwargs)

    def reset_rows(self, tensordict: TensorDictBase | None, marks: Sequence[bool], **kwargs: Any) -> TensorDictBase:
        """Reset some environments; of these, only what ``"_reset"`` marks."""
        marked = [row for row in range(self.num_workers) if marks[row]]
        sent = None
        if tensordict is not None:
            rows = tensordict.unbind(0)
            marked = [row for row in marked if self._is_marked(rows[row])]
            sent = send_rows(self._processes, tensordict)
        return self._joined_reset(marked, self._begun(marked, sent, ByValue(kwargs) if kwargs else None))

    def _joined_reset(self, marked: Sequence[int], rest: dict[int, TensorDictBase]) -> TensorDictBase:
        form = None if rest or self._ragged else self._hosted.outcomes.common_form("reset", marked)
        if form is not None:
            return placed(self._hosted.outcomes.dense(form, self.num_workers), self.device)
        fresh = [
            self._hosted.outcomes.row("reset", row, rest) if row in set(marked) else None
            for row in range(self.num_workers)
        ]
        return self._stack(self._filled(fresh, self._facts))

    def _begun(self, rows: Sequence[int], sent: Sent | None, kwargs: ByValue | None) -> dict[int, TensorDictBase]:
        """Reset ``rows``; once more where their process was lost."""

        def command(ticket: int, some: Some, mine: Sequence[int]) -> ResetRows:
            if sent is None:
                return ResetRows(ticket, some, None, {}, None, kwargs)
            return ResetRows(ticket, some, sent.layout, sent.nests, sent.rest_of(mine), kwargs)

        rest: dict[int, TensorDictBase] = {}
        for gathered in self._hosted.reset(command, rows, None if sent is None else sent.layout):
            rest.update(self._hosted.outcomes.beside(gathered.replies.values()))
        return rest

    def _array_form(self) -> ArrayEnv:
        return ParallelArrays(self, self._hosted, ParallelEnv)


def _of_workers(maker: Callable[[], EnvBase], num_workers: int) -> EnvBase:
    return ParallelEnv(num_workers, maker)


register_extension("num_workers", _of_workers)


def _check(
    num_workers: int,
    num_processes: int | None,
    mp_start_method: str | None,
    env_step_timeout: float | None,
) -> None:
    """Test the arguments of a :class:`ParallelEnv` that ``SerialEnv`` does not have."""
    is_number = isinstance(num_processes, int) and not isinstance(num_processes, bool)
    if num_processes is not None and not (is_number and 1 <= num_processes <= num_workers):
        raise ValueError(
            f"num_processes: expected a number from 1 to num_workers={num_workers}, got {num_processes!r}. Pass None "
            "for one on each CPU."
        )
    check_start_method("mp_start_method", mp_start_method)
    if env_step_timeout is not None and not env_step_timeout > 0:
        raise ValueError(f"env_step_timeout: expected seconds above 0, or None, got {env_step_timeout!r}.")
