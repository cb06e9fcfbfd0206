"""PlainPath: TensorDict in, TensorDict out, for any environment and any policy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from numpy.typing import NDArray
from tensordict import LazyStackedTensorDict, TensorDictBase

from rollwright._keys import NestedKey, as_tuple, is_private, leaf_keys, unravel
from rollwright.collectors.core import Path
from rollwright.collectors.rollout.paths import stages
from rollwright.collectors.rollout.paths.actors import OnEntries
from rollwright.collectors.rollout.paths.conversations.rows import ConversationRows, acted_on_others, blanked
from rollwright.collectors.rollout.paths.parts import PathParts, Taken
from rollwright.collectors.rollout.paths.recording import Recorder
from rollwright.collectors.rollout.paths.stages import IDS, action_forms
from rollwright.collectors.rollout.state import replace_ended
from rollwright.data.compact import BoundaryKeeper
from rollwright.data.layout import end_of_trajectory
from rollwright.modules.signature import Call
from rollwright.policies.base import TensorPolicy


class PlainPath(Path):
    """Steps an environment and a policy that speak TensorDict.

    Args:
        parts: what it is made of.
        call: calls the policy.
        fresh_outputs: whether its outputs are new tensors at each call.
        how: why this path was taken.
        flat: the policy as calls on tensors, to be used where the entries that it reads are tensors.
    """

    def __init__(
        self,
        parts: PathParts,
        call: Call,
        *,
        fresh_outputs: bool,
        how: Mapping[str, str],
        flat: TensorPolicy | None = None,
    ) -> None:
        self.how, self._flat, self._steps = dict(how), flat, parts.steps
        call = call if flat is None else OnEntries(flat, call)
        env, options, devices = parts.env, parts.options, parts.devices
        self._env, self._ids, self._device = env, parts.ids, devices.storing
        self._has_no_device = devices.current_has_no_device
        self._replaces_ids = options.track_traj_ids and options.reset_when_done
        self._current: TensorDictBase | None = None
        self._rows, self._has_ids = parts.conversations, options.track_traj_ids
        if self._rows is not None:
            self.cursor, self._rows.path = self._rows.cursor, self
            self._rows.cursor.follow(self._rows)
        self._renews = options.reset_at_each_iter
        self._without: dict[int, list[int]] = {}  # by time: rows that the data had no conversation for

        check = stages.action_check(env)
        act = stages.build_act(
            call,
            stages.mover(devices.policy if devices.cast_to_policy else None, parts.syncs.policy),
            check,
            fresh_outputs=fresh_outputs,
            stale=stages.stale_actions(env, parts.acting.policy),
        )
        random = stages.build_act(self.at_random, lambda td: td, check, fresh_outputs=True)
        step = stages.build_step(
            env,
            stages.mover(devices.env if devices.cast_to_env else None, parts.syncs.env),
            reset_when_done=options.reset_when_done,
            current_has_no_device=self._has_no_device,
        )
        self._tags = options.track_policy_version
        if self._tags:
            act, random = (stages.tag_act(stage, parts.stamp) for stage in (act, random))
            step = stages.tag_step(step)
        self._policy, self._random, self._step = act, random, step
        self._acting = act
        self._forms: dict[NestedKey, torch.Tensor] = {}  # of random actions, where they are not those of the specs
        self._outputs: TensorDictBase | None = None  # of the policy, zero
        self._blanks: TensorDictBase | None = None  # those that a frame of random actions lacks
        repeated = stages.next_keys(env) if options.compact_obs else []
        self._keeper = BoundaryKeeper(repeated, env.batch_size, devices.storing) if options.compact_obs else None
        self._recorder = Recorder(
            parts.steps,
            devices.storing,
            dropped={unravel(("next", *as_tuple(key))) for key in repeated},
            use_blocks=True if options.return_same_td else options.use_buffers,
            reuse=options.return_same_td,
            pool=parts.memory,
            ragged=stages.ragged_keys(env),
        )

    def take_over(
        self,
        frames: list[TensorDictBase],
        current: TensorDictBase,
        keeper: BoundaryKeeper | None,
        taken: Taken | None = None,
        *,
        random: bool = False,
    ) -> None:
        """Go on with a batch that another path began.

        Args:
            frames: of the batch so far.
            current: with the actions of the current step.
            keeper: of the batch so far.
            taken: the current step, where it was taken already: it is to be recorded next, or was recorded.
            random: whether the batch is one of random actions.
        """
        self._recorder.take_over(frames, current)
        self._current, self._keeper = current, keeper
        self._start(random)
        self._blanks = None if self._blanks is None else _without(self._blanks, current)
        if taken is None:
            return
        if taken.outcome is not None:
            self._frame, self._current = self._after(current, taken, taken.outcome)
        elif taken.marked is not None and taken.fresh is not None:
            self.take_reset(taken.marked, taken.fresh)

    def _after(
        self, current: TensorDictBase, taken: Taken, outcome: TensorDictBase
    ) -> tuple[TensorDictBase, TensorDictBase]:
        """Frame and current TensorDict after a step that was taken."""

        def step(current: TensorDictBase) -> tuple[TensorDictBase, TensorDictBase]:
            frame = current.set("next", outcome)
            following = self._env.step_mdp(frame)
            self._env.trim_frame(frame, following)
            if taken.marked is None or taken.fresh is None:
                following = self._env.maybe_reset(following)
            else:
                following = self._with_reset(following, taken.marked, taken.fresh)
            return frame, self._prepared(following)

        return stages.tag_step(step)(current) if self._tags else step(current)

    # The current TensorDict ----------------------------------------------------------------------

    @property
    def started(self) -> bool:
        """Whether there is a current TensorDict."""
        return self._current is not None

    @property
    def current(self) -> TensorDictBase | None:
        """What the next step is taken from, ``[*env]``; None: nothing, a reset comes first."""
        return self._current

    @current.setter
    def current(self, current: TensorDictBase | None) -> None:
        if current is None and self._rows is not None:
            self._rows.cursor.start_over()
        self._current = current

    def forget(self) -> None:
        """Drop the current TensorDict for good: what it came from has changed."""
        self._current = None
        if self._rows is not None:
            self._rows.cursor.forget()

    def reset(self, **kwargs: Any) -> None:
        """Reset all environments; trajectory ids are to be set next."""
        self._current = self._prepared(self._env.reset(**kwargs))

    def reset_some(self, marked: torch.Tensor, **kwargs: Any) -> None:
        """Reset where ``marked``, bool ``[*env]``, says; the other environments go on."""
        current = self._marked(cast(TensorDictBase, self._current), marked)
        self._current = self._prepared(self._env.reset(current, **kwargs))

    def take_reset(self, marked: torch.Tensor | None, fresh: TensorDictBase) -> None:
        """Take in a reset that another path has made.

        Args:
            marked: what was reset, bool ``[*env]``; None: all.
            fresh: what that returned, as :meth:`EnvBase.reset_outcome` does.
        """
        if marked is not None:
            fresh = self._with_reset(cast(TensorDictBase, self._current), marked, fresh)
        self._current = self._prepared(fresh)

    def _with_reset(self, current: TensorDictBase, marked: torch.Tensor, fresh: TensorDictBase) -> TensorDictBase:
        return self._env.with_reset(self._marked(current, marked), fresh)

    def _marked(self, current: TensorDictBase, marked: torch.Tensor) -> TensorDictBase:
        """``current`` with marks for a reset."""
        for group in self._env.done_groups:
            flags = current.get(group.done)
            mask = marked.reshape(marked.shape + (1,) * (flags.ndim - marked.ndim)).expand(flags.shape)
            current.set(group.reset, mask.to(flags.device).clone())
        return current

    def _prepared(self, current: TensorDictBase) -> TensorDictBase:
        return current.clear_device_() if self._has_no_device else current

    def set_ids(self, ids: torch.Tensor) -> None:
        """Give each environment the id, int64 ``[*env]``, of the trajectory that it is in."""
        cast(TensorDictBase, self._current).set(IDS, ids)

    def replace_ids(self, ended: torch.Tensor) -> None:
        """Give fresh ids where ``ended``, bool ``[*env]``, says."""
        current = cast(TensorDictBase, self._current)
        ids = current.get(IDS)
        fresh = replace_ended(ids, ended, self._ids)
        if fresh is not ids:
            current.set("collector", current.get("collector").copy().set("traj_ids", fresh))

    # A rollout ----------------------------------------------------------------------------------------

    def conform(self, outputs: TensorDictBase | None) -> None:
        """Give batches of random actions the entries that the policy writes, zero where no action is."""
        self._forms, self._outputs = action_forms(self._env, outputs), outputs

    def at_random(self, td: TensorDictBase) -> TensorDictBase:
        """Write random actions, in the dtype and shape that the policy writes."""
        acted = self._env.rand_action(td)
        for key, like in self._forms.items():
            acted.set(key, acted.get(key).to(like.dtype).reshape(like.shape))
        return acted

    def begin(self, *, random: bool) -> None:
        """Open a batch, with random actions or with the policy's."""
        self._start(random)
        self._without = {}
        if self._rows is not None:
            self._rows.begin(cast(TensorDictBase, self._current))
        if self._keeper is not None:
            self._keeper.begin()

    def _start(self, random: bool) -> None:
        if self._flat is not None:
            self._flat.start(self._steps)
            self.finite_keys = [] if random else [key for key in self._flat.finite_keys if not is_private(key)]
        self._acting = self._random if random else self._policy
        self._blanks = self._outputs if random else None

    def act(self, t: int) -> None:
        """The policy reads observations and writes actions."""
        current = cast(TensorDictBase, self._current)
        if self._rows is not None and (without := self._rows.before_step()):
            self._without[t] = without
            self._current = acted_on_others(self._acting, current, without)
        else:
            self._current = self._acting(current)

    def step(self, t: int) -> None:
        """The environment steps; what ended is reset."""
        self._frame, self._current = self._step(cast(TensorDictBase, self._current))

    def record(self, t: int) -> None:
        """The frame goes into the batch's memory."""
        if self._blanks is not None:
            if t == 0:
                self._blanks = _without(self._blanks, self._frame)
            self._frame.update(self._blanks)
        self._recorder.write(t, self._frame)
        self._ended = end_of_trajectory(self._frame.get("next"), self._env.done_groups, self._env.ndim)
        if self._rows is not None:
            self._ended[self._without.get(t, [])] = False
            self._rows.after_step(self._ended, self._frame.get(IDS) if self._has_ids else None)
        if self._replaces_ids:
            self.replace_ids(self._ended if self._rows is None else self._rows.following(self._ended))
        if self._keeper is not None:
            self._keeper.keep(t, self._frame.get("next"), self._ended)

    def frame(self, t: int) -> TensorDictBase:
        """The frame ``[*env]`` of time ``t``, which was recorded last, as the batch will hold it."""
        return self._recorder.frame(t)

    def finish(self, steps: int) -> TensorDictBase:
        """Close the batch after ``steps`` steps; times that were not taken are zero, their ids -1."""
        batch = self._recorder.finish(steps)
        if self._keeper is not None:
            self._keeper.keep(steps - 1, self._frame.get("next"), ~self._ended)  # no root repeats them in this batch
            batch = self._keeper.finish(batch)
        return batch if self._rows is None else self._finish_turns(batch, steps, self._rows)

    def _finish_turns(self, batch: TensorDictBase, steps: int, rows: ConversationRows) -> TensorDictBase:
        """Close a batch of turns: without the times that were not taken, and flat without blank rows."""
        rows.finish(renew=self._renews)
        without = self._without
        self.frames_taken = steps * self._env.numel() - sum(map(len, without.values()))
        if steps < batch.batch_size[-1]:
            batch = batch[..., :steps]
        if not without:
            return batch
        times = [blanked(frame, without.get(t, [])) for t, frame in enumerate(batch.unbind(-1))]
        return LazyStackedTensorDict(*times, stack_dim=batch.ndim - 1, stack_dim_name="time")

    # State --------------------------------------------------------------------------------------------

    def row_ids(self) -> NDArray[Any] | None:
        """See :meth:`Path.row_ids`."""
        ids = super().row_ids()
        return ids if ids is None or self._rows is None else self._rows.row_ids(ids)

    def stats(self) -> dict[str, Any]:
        """What it adds to ``stats()`` of a collector."""
        return {} if self._rows is None else {**self._rows.cursor.stats(), "turns_ahead": 0}


def _without(outputs: TensorDictBase, frame: TensorDictBase) -> TensorDictBase | None:
    """The outputs that a frame lacks; None: there are none."""
    lacking = [key for key in leaf_keys(outputs) if frame.get(key, None) is None]
    return outputs.select(*lacking) if lacking else None
