"""A process that hosts environments: it steps and resets them on request, and answers other calls.

The other side is :class:`~rollwright.envs.batched.processes.EnvProcesses`.
"""

from __future__ import annotations

import contextlib
import math
import pickle
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, cast

import cloudpickle  # type: ignore[import-untyped]
import numpy as np
import torch
from tensordict import TensorDictBase

from rollwright._keys import NestedKey, as_tuple
from rollwright._memory import Segment
from rollwright._processes.channel import ByValue, Channel
from rollwright._seeding import seed_torch
from rollwright.data.specs import Composite
from rollwright.data.specs.discrete import DiscreteSpec, choices
from rollwright.envs.arrays import FLAGS, ArrayEnv, Entry, UnfitOutcome, array_form
from rollwright.envs.base import EnvBase, closed_on_error
from rollwright.envs.batched.base import ArrayFacts, check_presets
from rollwright.envs.batched.messages import (
    AHEAD,
    CallFunction,
    Close,
    OutcomeStructure,
    Recreated,
    Reply,
    ResetArrays,
    ResetRows,
    RowFailure,
    SetLayout,
    SharedRows,
    Some,
    StepArrays,
    StepRows,
    as_raised,
    dense_leaves,
    row_of,
)
from rollwright.envs.factories import check_apart, made, own_kwargs, placed
from rollwright.envs.recreation import RecreatedEnv, RecreationPolicy

DONE_ROWS = "finished"  # int64 [rows]: the ticket of the last command that was finished in the row


class Hosted:
    """An environment in the process that hosts it.

    Args:
        row: its index in the batch.
        maker: makes it.
        recreation: what was handed on by those before it, if it is not the first.
        recreated: takes a note whenever it has raised and was recreated; None: what it raises goes to the caller.

    Attributes:
        row: as above.
        env: the environment; one that is recreated is a :class:`RecreatedEnv`.
    """

    def __init__(
        self,
        row: int,
        maker: Callable[[], EnvBase],
        recreation: RecreationPolicy | None,
        recreated: list[Recreated] | None,
    ) -> None:
        self.row = row
        self._arrays: ArrayEnv | None = None
        self._spec: Composite | None = None
        self._choices: dict[NestedKey, DiscreteSpec] = {}
        self._sets_masks = False
        self.env = made(row, maker)
        if recreated is not None:

            def note(text: str) -> None:
                recreated.append(Recreated(row, text))

            with closed_on_error([self.env]):
                if not isinstance(self.env, RecreatedEnv):  # a copy of a batch has them
                    self.env = RecreatedEnv(self.env, maker, row, note)
                self.env.continue_from(recreation, note)

    @property
    def inner(self) -> EnvBase:
        """The environment as it was made."""
        return self.env.base_env if isinstance(self.env, RecreatedEnv) else self.env

    def array_form(self, *, rebuild: bool = False) -> ArrayEnv:
        """The environment on arrays.

        Raises:
            NotNative: it has no such form.
        """
        if self._arrays is None or rebuild:
            self._arrays = array_form(self.env, unfit=True)
        return self._arrays

    def masks(self) -> dict[NestedKey, Any]:
        """The masks of actions, by key, bool arrays; none before the environment has set one."""
        spec = self.env.full_action_spec
        if spec is not self._spec:
            self._spec, self._choices = spec, choices(spec)
        masks = {key: leaf.mask for key, leaf in self._choices.items()}
        self._sets_masks = self._sets_masks or any(mask is not None for mask in masks.values())
        if not self._sets_masks:
            return {}
        return {key: None if mask is None else mask.numpy(force=True) for key, mask in masks.items()}


class _Host:
    """Environments of a host process, and the handlers of its commands."""

    def __init__(self, channel: Channel, segment: Segment, envs: dict[int, Hosted], recreated: list[Recreated]) -> None:
        self._channel = channel
        self._segment = segment
        self._envs = envs
        self._recreated = recreated
        self._layouts: dict[int, SharedRows] = {}
        self._structures: dict[tuple[str, int], OutcomeStructure] = {}
        self._raised: list[RowFailure] = []
        self._changed: dict[tuple[str, int], OutcomeStructure] = {}  # what the next answer reports of structures
        self._left: dict[int, TensorDictBase] = {}  # what has no place in shared rows
        self._unfit: dict[int, str] = {}
        self._out: SharedRows
        self._finished: Any = None

    def carry_out(self, command: Any) -> None:
        """Do what is asked, and answer."""
        self._raised, self._changed, self._left, self._unfit = [], {}, {}, {}
        self._recreated.clear()
        if isinstance(command, SetLayout):
            self._set_layout(command)
            return
        if isinstance(command, StepArrays):
            reply = self._step_arrays(command)
        elif isinstance(command, ResetArrays):
            reply = self._reset_arrays(command)
        elif isinstance(command, (StepRows, ResetRows)):
            reply = self._rows(command)
        else:
            reply = self._do(command)
        seeds = (
            isinstance(command, CallFunction) or getattr(command, "kwargs", None) is not None
        )  # or moves, or freezes
        changed = command.rows if seeds else tuple({one.row for one in self._recreated})
        recreation_policies = _recreation_policies(self._hosted(changed))
        reply = reply._replace(
            raised=tuple(self._raised),
            recreated=tuple(self._recreated),
            recreation_policies=recreation_policies,
            structures=self._changed or None,
            rest=ByValue(self._left) if self._left else None,
            unfit=self._unfit or None,
            masks=self._masks(command.rows) or None,
        )
        self._channel.send(reply, timeout_s=math.inf)  # the other side may be busy for long

    def _masks(self, rows: Some) -> dict[tuple[int, NestedKey], Any]:
        """The masks that environments have set for actions."""
        found = ((hosted.row, hosted.masks()) for hosted in self._hosted(rows))
        return {(row, key): mask for row, masks in found for key, mask in masks.items()}

    def _set_layout(self, command: SetLayout) -> None:
        if command.forget:
            self._layouts.clear()
        rows = SharedRows(self._segment, command.layout)
        if command.number:
            self._layouts[command.number] = rows
        else:
            self._out = rows
            self._finished = rows.arrays[DONE_ROWS]

    def _hosted(self, rows: Some) -> Iterator[Hosted]:
        return iter(self._envs.values()) if rows is None else (self._envs[row] for row in rows)

    def _attempt(self, hosted: Hosted, work: Callable[[Hosted], None]) -> None:
        """CallFunction the work for one environment. What it raises goes into the answer."""
        try:
            work(hosted)
        except Exception as error:
            self._raised.append(as_raised(hosted.row, error))

    # Arrays -------------------------------------------------------------------------------------

    def _step_arrays(self, command: StepArrays) -> Reply:
        given = self._layouts[command.layout].arrays.items()
        roots = [(key, rows) for key, rows in given if as_tuple(key)[0] != "next"]
        presets = [(_below_next(key), rows) for key, rows in given if as_tuple(key)[0] == "next"]

        def step(hosted: Hosted) -> None:
            row, form = hosted.row, hosted.array_form()
            seen = given if form.may_be_unfit else roots
            root: Any = {key: rows[row, ...].copy() for key, rows in seen}  # an environment may keep it
            preset: Any = {key: rows[row, ...].copy() for key, rows in presets}
            try:
                outcome = form.step(root, preset)
                if form.may_be_unfit:
                    check_presets(form, outcome, {key: rows[row, ...] for key, rows in presets})
            except UnfitOutcome as found:
                self._put_unfit("step", row, found)
                self._finished[row] = command.ticket
                return
            self._write(hosted, outcome)
            self._finished[row] = command.ticket
            if command.ahead and np.any(outcome["done"]):
                ended[row] = np.asarray(outcome["done"])

        def reset(hosted: Hosted) -> None:
            self._write(hosted, hosted.array_form().reset(ended.pop(hosted.row, None)), ahead=True)

        ended: dict[int, Any] = {}
        for hosted in self._hosted(command.rows):
            self._attempt(hosted, step)
            if ended:
                self._attempt(hosted, reset)
        return Reply(command.ticket)

    def _reset_arrays(self, command: ResetArrays) -> Reply:
        kwargs = command.kwargs.value if command.kwargs is not None else {}
        whole = np.asarray(True) if command.partial else None

        given = {} if command.layout is None else self._layouts[command.layout].arrays

        def reset(hosted: Hosted) -> None:
            row, form = hosted.row, hosted.array_form()
            mask, own = command.masks.get(row, whole), own_kwargs(kwargs, row)
            try:
                if command.reads_root:
                    root: Any = {key: rows[row, ...].copy() for key, rows in given.items()}
                    fresh = form.reset_from(root, mask, **own)
                else:
                    fresh = form.reset(mask, **own)
            except UnfitOutcome as found:
                self._put_unfit("reset", row, found)
            else:
                self._write(hosted, fresh)
            self._finished[row] = command.ticket

        for hosted in self._hosted(command.rows):
            self._attempt(hosted, reset)
        return Reply(command.ticket)

    def _write(self, hosted: Hosted, outcome: Mapping[NestedKey, Any], *, ahead: bool = False) -> None:
        form, out = hosted.array_form(), self._out.arrays
        for key, value in outcome.items():
            entry = form.entries.get(key) or form.rewards.get(key)
            if entry is None and (key not in FLAGS or key not in out):
                continue
            rows = out[(AHEAD, *as_tuple(key)) if ahead else key]
            if entry is None or entry.column:
                rows = rows[..., 0]
            rows[hosted.row] = value

    def _put_unfit(self, call: str, row: int, found: UnfitOutcome) -> None:
        self._unfit[row] = str(found)
        self._note(call, row, self._put(row, found.outcome))

    def _note(self, call: str, row: int, structure: OutcomeStructure) -> None:
        """Report what an outcome consists of, where it is not what was reported before."""
        if self._structures.get((call, row)) != structure:
            self._changed[call, row] = self._structures[call, row] = structure

    # TensorDicts --------------------------------------------------------------------------------

    def _rows(self, command: StepRows | ResetRows) -> Reply:
        given = None if command.layout is None else self._layouts[command.layout].tensors
        rest = command.rest.value if command.rest is not None else {}
        resets = isinstance(command, ResetRows)
        kwargs = command.kwargs.value if isinstance(command, ResetRows) and command.kwargs is not None else {}

        def work(hosted: Hosted) -> None:
            row, env = hosted.row, hosted.env
            td = None if given is None else row_of(given, row, command.nests, env.batch_size, rest.get(row))
            td = None if td is None else placed(td, env.device)
            outcome = (
                env.reset_outcome(td, **own_kwargs(kwargs, row))
                if resets
                else env.step_outcome(cast(TensorDictBase, td))
            )
            self._note("reset" if resets else "step", row, self._put(row, outcome))
            self._finished[row] = command.ticket

        for hosted in self._hosted(command.rows):
            self._attempt(hosted, work)
        return Reply(command.ticket)

    def _put(self, row: int, outcome: TensorDictBase) -> OutcomeStructure:
        """Write an outcome into its row, and keep what has no place there for the answer."""
        leaves, nests, complete = dense_leaves(outcome)
        out, keys = self._out.tensors, []
        for key, value in leaves.items():
            rows = out.get(key)
            if rows is not None and rows.shape[1:] == value.shape and rows.dtype == value.dtype:
                rows[row].copy_(value.detach())
                keys.append(key)
        if not complete or len(keys) < len(leaves):
            self._left[row] = outcome.detach().exclude(*keys)
        return OutcomeStructure(tuple(keys), nests)

    # Anything else ------------------------------------------------------------------------------

    def _do(self, command: CallFunction) -> Reply:
        args = command.args.value if command.args is not None else ()
        values = {}
        for hosted in self._hosted(command.rows):
            try:
                values[hosted.row] = command.function(hosted, *args)
                cloudpickle.dumps(values[hosted.row], 5)
            except Exception as error:
                values.pop(hosted.row, None)
                self._raised.append(as_raised(hosted.row, error))
        return Reply(command.ticket, values=cloudpickle.dumps(values, 5))

    def close(self) -> list[RowFailure]:
        """Close all environments; what they raised."""
        raised = []
        for hosted in self._envs.values():
            try:
                hosted.env.close(raise_if_closed=False)
            except Exception as error:  # the others are to be closed all the same
                raised.append(as_raised(hosted.row, error))
        return raised


def serve_envs(
    channel: Channel,
    segment: Segment,
    makers: dict[int, Callable[[], EnvBase]],
    recreation_policies: dict[int, RecreationPolicy],
    describe: Callable[[Hosted], Any],
    torch_seed: int,
    recreates: bool,
) -> None:
    """Make environments, and serve them until asked to close; runs in a :class:`~rollwright._processes.child.Child`.

    The first message is a :class:`Reply` with ticket 0: ``describe(hosted)`` by row; or what a factory
    raised, and then it is the last one.

    Args:
        channel: commands in, replies out.
        segment: memory shared with the other side.
        makers: by row.
        recreation_policies: by row: what was handed on by those before.
        describe: what the other side wants to know of an environment.
        torch_seed: for torch's global generator here; those of NumPy and Python are seeded by the system.
        recreates: recreate environments that raise.
    """
    seed_torch(torch_seed)
    np.random.seed()
    random.seed()
    envs: dict[int, Hosted] = {}
    recreated: list[Recreated] = []
    try:
        raised = []
        for row, maker in makers.items():
            try:
                envs[row] = Hosted(row, maker, recreation_policies.get(row), recreated if recreates else None)
                check_apart({at: hosted.inner for at, hosted in envs.items()})
            except Exception as error:
                raised.append(as_raised(row, error))
                break
        described = {} if raised else {row: describe(hosted) for row, hosted in envs.items()}
        first = Reply(
            0,
            tuple(raised),
            recreation_policies=_recreation_policies(envs.values()),
            values=cloudpickle.dumps(described, 5),
        )
        channel.send(first, timeout_s=math.inf)
        if raised:
            return
        host = _Host(channel, segment, envs, recreated)
        while True:
            if not channel.poll(3600.0):
                continue
            command = channel.recv(10.0)
            if isinstance(command, Close):
                channel.send(Reply(command.ticket, tuple(host.close())), timeout_s=1.0)
                envs.clear()
                return
            host.carry_out(command)
    finally:
        for hosted in envs.values():  # the other side is gone, and has sent no Close
            with contextlib.suppress(Exception):
                hosted.env.close(raise_if_closed=False)


def _recreation_policies(envs: Iterable[Hosted]) -> dict[int, RecreationPolicy] | None:
    """By row: what environments hand on, where they are recreated."""
    return {hosted.row: hosted.env.recreation for hosted in envs if isinstance(hosted.env, RecreatedEnv)} or None


def _below_next(key: NestedKey) -> NestedKey:
    below = as_tuple(key)[1:]
    return below[0] if len(below) == 1 else below


METHOD = "a method"  # stands for what can be called, which stays where it is
ITSELF = "the environment itself"


class Sign(NamedTuple):
    """Stands for an object that is not sent."""

    what: str


class EnvFacts(NamedTuple):
    """Facts from which a batch is constructed; named as in :class:`~rollwright.envs.EnvBase`."""

    batch_size: torch.Size
    device: torch.device | None
    allow_done_after_reset: bool
    full_observation_spec: Composite
    full_state_spec: Composite
    full_action_spec: Composite
    full_reward_spec: Composite
    full_done_spec: Composite
    text: str

    def full_spec(self, name: str) -> Composite:
        """``full_<name>_spec``."""
        return cast(Composite, getattr(self, f"full_{name}_spec"))


def describe(hosted: Hosted) -> EnvFacts:
    """What is to be known of an environment."""
    return EnvFacts._make([*(getattr(hosted.env, name) for name in EnvFacts._fields[:-1]), repr(hosted.inner)])


def array_facts(hosted: Hosted) -> ArrayFacts:
    """Make the array form; raises ``NotNative`` where there is none."""
    return ArrayFacts.of(hosted.array_form(rebuild=True))


def check_arrays(hosted: Hosted) -> None:
    """Test that the environment is what this form was made of; to be called once a batch."""
    hosted.array_form().check()


def see_roots(hosted: Hosted, forms: Mapping[NestedKey, Entry]) -> None:
    """Note the forms of all that roots hold, but for what a policy writes; see :attr:`may_be_unfit`."""
    hosted.array_form().see_roots(forms)


def set_seed(hosted: Hosted, seed: int | None, static_seed: bool) -> int | None:
    """Seed the environment and torch's global generator (from which policies sample)."""
    return hosted.env.set_seed(seed, static_seed)


def move(hosted: Hosted, device: Any) -> EnvFacts:
    """Move an environment to a device."""
    hosted.env.to(device)
    return describe(hosted)


# Attributes -----------------------------------------------------------------------------------------


def look_up(hosted: Hosted, name: str) -> Any:
    """The value of an attribute; a :class:`Sign` for a method."""
    value = getattr(hosted.inner, name)
    return Sign(METHOD) if callable(value) else value


def fetch(hosted: Hosted, name: str) -> Any:
    """The value of an attribute, whatever it is."""
    return getattr(hosted.inner, name)


def call(hosted: Hosted, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a method; a :class:`Sign` where it returns the environment."""
    value = getattr(hosted.inner, name)(*args, **kwargs)
    return Sign(ITSELF) if value is hosted.inner else value


def pickled(hosted: Hosted) -> bytes:
    """The environment."""
    data: bytes = cloudpickle.dumps(hosted.env, 5)
    return data


# State ----------------------------------------------------------------------------------------------


def state(hosted: Hosted) -> dict[str, Any]:
    """What ``state_dict()`` returns."""
    return dict(hosted.inner.state_dict())


def load_state(hosted: Hosted, states: Mapping[int, Mapping[str, Any]]) -> tuple[list[str], list[str], str]:
    """Load a ``state_dict()``: missing keys, unexpected keys, and what went wrong."""
    try:
        missing, unexpected = hosted.inner.load_state_dict(dict(states[hosted.row]), strict=False)
    except RuntimeError as error:
        return [], [], str(error)
    return list(missing), list(unexpected), ""


def checkpoint(hosted: Hosted) -> tuple[dict[str, Any], list[str]]:
    """All that the environment is, and the global generators of its process; and what could not be saved."""
    from rollwright.envs.checkpoint import save_env

    saved, unsaved = save_env(hosted.env)
    others = pickle.dumps((np.random.get_state(), random.getstate()))
    streams = {"torch": torch.get_rng_state(), "others": torch.frombuffer(bytearray(others), dtype=torch.uint8)}
    return {**saved, "streams": streams}, unsaved


def load_checkpoint(hosted: Hosted, states: Mapping[int, Mapping[str, Any]]) -> None:
    """Go on from what :func:`checkpoint` returned."""
    from rollwright.envs.checkpoint import load_env

    saved = dict(states[hosted.row])
    streams = saved.pop("streams")
    load_env(hosted.env, saved)
    torch.set_rng_state(streams["torch"].cpu())
    numbers, others = pickle.loads(streams["others"].cpu().numpy().tobytes())
    np.random.set_state(numbers)
    random.setstate(others)
