"""GroupedPath: groups of environments that are stepped in turn, so that the policy acts while others step."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, cast

import numpy as np
from tensordict import TensorDictBase

from rollwright._keys import NestedKey
from rollwright.collectors.core import Actor, UnfitOutputs
from rollwright.collectors.rollout.paths.arrays import ArrayPath, no_tensors, reset_rows
from rollwright.collectors.rollout.paths.parts import PathParts
from rollwright.collectors.rollout.paths.recording import Form, difference, unfit
from rollwright.data.specs.discrete import choices
from rollwright.envs.arrays import ArrayEnv, Values
from rollwright.errors import EnvError, NotNative, PolicyError


class Group:
    """A range of a batch's environments, and who acts in them.

    Args:
        arrays: the environments.
        policy: acts in them.
        start: the first row.

    Attributes:
        rows: where they are in the batch.
        first: index of its first environment in the flattened batch.
        no_flags: the flags of a root.
        root: what the next step is taken from, or the one in progress was.
        out: what came of the last step.
        preset: what the policy wrote below ``"next"``.
        acts: the form of what it writes.
        time: of the current step; None: there is none.
    """

    def __init__(self, arrays: ArrayEnv, policy: Actor, start: int) -> None:
        self.arrays, self.policy = arrays, policy
        self.rows = slice(start, start + arrays.batch[0])
        self.first = start * int(np.prod(arrays.batch[1:], dtype=np.int64))
        self.no_flags: Values = {}
        self.root: Values = {}
        self.out: Values = {}
        self.preset: Values = {}
        self.acts: dict[NestedKey, Form] = {}
        self.time: int | None = None

    def part(self, values: Values) -> Values:
        """Its rows of values of the whole batch."""
        return {key: value[self.rows] for key, value in values.items()}


class GroupedPath(ArrayPath):
    """Steps groups of environments in turn.

    For each group in order: receive the step before, act, send. The environments of all other groups work meanwhile,
    across the times of a batch: at the end of each :meth:`act` all groups are at the same time, and none is ahead. So
    a rollout can end after any step, and one version of the weights acts in all of it. What a step leaves is written
    when the group has its next action; :meth:`finish` and :meth:`frame` wait for all. Between two batches nothing is
    in progress, and everything is as for :class:`ArrayPath`.

    Args:
        parts: what it is made of.
        arrays: the environment's array form.
        random: acts at random, in all environments at once.
        groups: parts of the array form, in order.
        policies: one for each, on arrays of its size; or the same for all, which acts in the whole batch at once.
        how: why this path was taken.
    """

    def __init__(
        self,
        parts: PathParts,
        arrays: ArrayEnv,
        random: Actor,
        *,
        groups: Sequence[ArrayEnv],
        policies: Sequence[Actor],
        how: Mapping[str, str],
    ) -> None:
        super().__init__(parts, arrays, policies[0], random, how=how)
        self._groups: list[Group] = []
        start = 0
        for arrays, policy in zip(groups, policies, strict=True):
            arrays.resets_ahead = True
            group = Group(arrays, policy, start)
            group.no_flags = group.part(self._no_flags)
            self._groups.append(group)
            start = group.rows.stop
        self._at_once = {self._random, *([policies[0]] if policies[0] is policies[-1] else [])}
        self._seconds = parts.timer.seconds
        self._waited = 0.0

    def compile(self, arguments: Mapping[str, Any]) -> None:
        """Make the policy cheaper, and warm it up on the current TensorDict."""
        if self._policy in self._at_once:
            return
        root = cast(Values, self._root)
        compiled = [group.policy.compiled(arguments, group.part(root)) for group in self._groups]
        for group, policy in zip(self._groups, compiled, strict=True):
            group.policy = policy
        self._policy = compiled[0]
        self.how["policy"] = self._policy.how

    def reset(self, **kwargs: Any) -> None:
        """Reset all environments; trajectory ids are to be set next."""
        self._abandon()
        super().reset(**kwargs)

    def _abandon(self) -> None:
        """Wait for steps that a rollout which failed has left in progress."""
        for group in self._groups:
            if group.time is not None:
                group.time = None
                with suppress(EnvError):  # the rollout has ended with an error already
                    group.arrays.receive()

    # A rollout ----------------------------------------------------------------------------------------

    def begin(self, *, random: bool) -> None:
        """Open a batch, with random actions or with the policy's."""
        self._abandon()
        for group in self._groups:
            group.root = group.part(cast(Values, self._root))
        super().begin(random=random)

    def _start(self, actor: Actor) -> None:
        if actor in self._at_once:
            actor.start(self._steps)
            return
        for group in self._groups:  # random numbers one step at a time: the groups take theirs in turn
            group.policy.start(1)

    def _first(self, actor: Actor) -> Values:
        outputs = self._outputs(self._groups[0])
        if actor.varies and (against := unfit(outputs, self._roots)):
            raise UnfitOutputs(against)
        return outputs

    def _outputs(self, group: Group) -> Values:
        """What is to be done in a group; random actions are drawn for all at once, as without groups."""
        if self._acting not in self._at_once:
            return group.policy(group.root, self._ids[group.rows])
        if group.first == 0:
            self._drawn = self._acting(group.root, self._ids)
        return group.part(self._drawn)

    def act(self, t: int) -> None:
        """See :meth:`Path.act`; environments begin their steps."""
        if self._tracks_version:
            version = self._version() if self._version_of_batch is None else self._version_of_batch
        wrote = self._waited = 0.0
        begun = [group.time for group in self._groups]
        if self._acting in self._at_once and self._masks_change():  # all are to be known before all act
            for group in self._groups:
                self._receive(group)
        for group, before in zip(self._groups, begun, strict=True):
            self._receive(group)
            try:
                outputs, self._ahead = self._outputs(group) if self._ahead is None else self._ahead, None
            except NotNative as reason:
                raise no_tensors(reason) from reason
            if t == 0 and group.first == 0:
                self._open_for(group, outputs)
            elif group.policy.varies and (other := difference(outputs, group.acts)):
                raise _refusal(other)
            group.root.update(outputs)
            group.preset = {key: group.root[full] for full, key in self._presets}
            acted = time.perf_counter()
            group.arrays.send(group.root, group.preset)
            group.time = t
            sent = time.perf_counter()
            self._waited += sent - acted
            if before is not None:
                self._write_outcome(group, before, group.out)
            self._write_root(group, t)
            wrote += time.perf_counter() - sent
        if self._tracks_version:
            self._version_row[t] = version
        self._account("policy", wrote)

    def _masks_change(self) -> bool:
        """Whether environments set masks for actions."""
        return any(leaf.mask is not None for leaf in choices(self._env.full_action_spec).values())

    def _open_for(self, group: Group, outputs: Values) -> None:
        """Lay out the batch by what the policy wrote for the first group."""
        if group.policy.varies and (against := unfit(outputs, self._roots)):
            raise _refusal(against)
        spread = np.arange(self._batch[0]) % group.arrays.batch[0]
        self._open({key: value[spread] for key, value in outputs.items()})
        for each in self._groups:
            count = each.arrays.batch[0]
            each.acts = {key: ((count, *shape[1:]), dtype) for key, (shape, dtype) in self._acts.items()}

    def _receive(self, group: Group) -> None:
        """Wait for the current step, if there is one; what ended is reset."""
        if group.time is None:
            return
        begun = time.perf_counter()
        t, group.time = group.time, None
        group.out = out = group.arrays.receive()
        for key, value in group.preset.items():
            out.setdefault(key, value)
        group.root = {**group.root, **out}
        ended = out["done"]
        if np.count_nonzero(ended):
            group.root = reset_rows(group.arrays, group.root, group.no_flags, ended)
            if self._tracks_ids:
                self._ids = self._ids.copy()
                self._ids[group.rows][ended] = self._pool.take(int(np.count_nonzero(ended)))
            if self._keeper is not None:
                self._keep(t, ended, out, group.first)
        self._waited += time.perf_counter() - begun

    def _write_root(self, group: Group, t: int) -> None:
        for key, row in self._root_rows:
            row[t, group.rows] = group.root[key]
        if self._tracks_ids:
            self._ids_row[t, group.rows] = self._ids[group.rows]

    def _write_outcome(self, group: Group, t: int, out: Values) -> None:
        for key, row in self._out_rows:
            row[t, group.rows] = out[key]

    def _settle(self, stage: str | None = None) -> None:
        """Wait until nothing is in progress, and write it; in ``stage``, if this is noted as one."""
        wrote = self._waited = 0.0
        for group in self._groups:
            if (t := group.time) is not None:
                self._receive(group)
                received = time.perf_counter()
                self._write_outcome(group, t, group.out)
                wrote += time.perf_counter() - received
        self._account(stage, wrote)

    def _account(self, stage: str | None, wrote: float) -> None:
        """Note what was spent on waiting and writing, and take it out of the stage that it will be noted in."""
        if stage is not None:
            self._seconds[stage] -= self._waited + wrote
        self._seconds["env"] += self._waited
        self._seconds["write"] += wrote

    def step(self, t: int) -> None:
        """See :meth:`Path.step`; environments are waited for when they are to act again, or at the end."""
        if t == self._steps - 1:
            self._settle("env")

    def record(self, t: int) -> None:
        """See :meth:`Path.record`; :meth:`act` does it."""

    def frame(self, t: int) -> TensorDictBase:
        """The frame ``[*env]`` of time ``t``, which was recorded last, as the batch will hold it."""
        self._settle("write")
        return super().frame(t)

    def finish(self, steps: int) -> TensorDictBase:
        """Close the batch after ``steps`` steps; times that were not taken are zero, their ids -1."""
        self._settle()
        self._root = self._joined([group.root for group in self._groups])
        self._out = {} if self._keeper is None else self._joined([group.out for group in self._groups])
        return super().finish(steps)

    def _joined(self, parts: list[Values]) -> Values:
        return {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}


def _refusal(reason: str) -> PolicyError:
    return PolicyError(
        f"policy: {reason}, and environments of other groups have begun their steps. Let it write the same entries at "
        "each call, in the same shapes and dtypes, or leave env_groups out."
    )
