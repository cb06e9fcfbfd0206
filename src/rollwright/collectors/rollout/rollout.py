"""Rollout: one environment, one policy, the memory of a batch, and the loop that fills it."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from tensordict import TensorDictBase

from rollwright._keys import NestedKey, is_private, key_str, leaf_keys
from rollwright._memory import MemoryPool
from rollwright._warnings import warn_user
from rollwright.collectors.core import (
    DataCursor,
    Hooks,
    Path,
    RolloutObserver,
    Stage,
    TrajectoryIds,
    UnfitOutputs,
    checked_seed,
    resolve,
)
from rollwright.collectors.options import CollectorOptions
from rollwright.collectors.reports.observers import named_range
from rollwright.collectors.rollout.paths import stages
from rollwright.collectors.rollout.paths.choice import choose_path, dialogue_parts, goes_by_itself, plain_path
from rollwright.collectors.rollout.paths.conversations.rows import followed
from rollwright.collectors.rollout.paths.parts import PathParts, Taken
from rollwright.collectors.rollout.paths.plain import PlainPath
from rollwright.collectors.rollout.policy import ActingPolicy, Devices, Syncs, module_device
from rollwright.collectors.rollout.policy_trial import Trial, blank_batch, check_inputs, entries_of, explained
from rollwright.collectors.rollout.state import RolloutState
from rollwright.collectors.rollout.stats import EpisodeStats, FrameCounts, StageTimer
from rollwright.data.compact import BoundaryKeeper
from rollwright.data.layout import end_of_trajectory, mark_truncated
from rollwright.data.layout.boundaries import summed_reward
from rollwright.envs.arrays import UnfitOutcome
from rollwright.envs.base import EnvBase
from rollwright.envs.priming import provide_for_policy, taking_indices
from rollwright.envs.recreation import num_recreations
from rollwright.envs.utils import set_exploration_type
from rollwright.errors import EnvError, NoSilentEnd, NotNative
from rollwright.modules import set_recurrent_mode


class Rollout:
    """Steps an environment with a policy, one batch at a time.

    Args:
        env: the environment.
        policy: of the user, or what the policy factory made.
        given: by the user, beside a policy factory; None: no policy.
        options: of the collector.
        hooks: called before each rollout; what follows a batch is for the delivery.
        ids: hands out trajectory ids.
        memory: provides the memory of batches.
        observer: learns of the stages of a rollout, and decides whether a batch is kept.
        owner: name of the collector's class, for messages.

    Attributes:
        env: the environment.
        acting: the policy.
        num_rows: of a batch: environments, or 1 where frames come in the order in which they end.
        closed: whether rollouts are refused.
        frames: stepped in all, in batches that count.
        frames_taken: stepped in the last rollout.
        interrupted: asked after each step whether the batch ends there; None: it does not.
        stepping: held while steps are taken.
        timer: seconds by stage.
        episodes: those that ended.
    """

    def __init__(
        self,
        env: EnvBase,
        policy: Any,
        options: CollectorOptions,
        *,
        given: Any,
        hooks: Hooks,
        ids: TrajectoryIds,
        memory: MemoryPool,
        observer: RolloutObserver | None = None,
        interrupted: Callable[[], bool] | None = None,
        owner: str = "Collector",
    ) -> None:
        self.options, self.hooks, self.ids, self.memory, self.owner = options, hooks, ids, memory, owner
        if options.auto_register_policy_transforms:
            env = provide_for_policy(env, policy)
        env.fit_policy(policy)
        self.env = env
        self.acting = ActingPolicy(policy, given, options, env)
        self.devices = Devices.resolve(options, env.device, module_device(self.policy))
        self.syncs = Syncs.of(self.devices, skip=options.no_cuda_sync)
        if options.auto_register_policy_transforms:
            self.env = env = taking_indices(env, self._trial().indices())
        self._warn_of_private_entries()
        self.num_rows = self._rows()
        self.counts = FrameCounts.of(options, self.num_rows)
        self.timer, self.episodes = StageTimer(), EpisodeStats()
        self.observer = RolloutObserver() if observer is None else observer
        self.interrupted = interrupted
        self.stepping = threading.RLock()
        self._env_uses: int | None = None  # after the last rollout; None: the environment was changed here since
        self._has_warned_of_use = False
        self.closed = False
        self.frames = self.frames_taken = self._steps_taken = 0
        self._counted = 0  # of the last rollout, in frames
        self._episodes_before: EpisodeStats | None = None
        self._write: Callable[[TensorDictBase], None] | None = None
        self._counting = False  # whether the current rollout will be delivered
        self._begun = False  # whether the last rollout came as far as its first step
        self._went_back = False  # since the last look ahead
        self._stepped = False  # whether a frame was taken in this object's life
        self._unused_ids: torch.Tensor | None = None  # of trajectories that have not taken a step
        self._reset_envs = torch.ones(self.num_rows, dtype=torch.bool, device="cpu").numpy()  # since the last batch
        self._outputs: tuple[TensorDictBase | None] | None = None  # of the policy, once it was tried
        self._check_finite = stages.finite_check(env)
        cursor, conversations = followed(env, ids, delivers_whole=options.delivers_whole)
        self._parts = PathParts(
            env=env,
            acting=self.acting,
            options=options,
            devices=self.devices,
            syncs=self.syncs,
            steps=self.counts.steps,
            ids=ids,
            memory=memory,
            timer=self.timer,
            cursor=cursor,
            conversations=conversations,
            hand_over=self._hand_over,
        )
        self._use(choose_path(self._parts, strict=True))
        self._to_compile = bool(options.compile_policy)  # at the first batch, which has the first observations
        self._check_inputs(entries_of(env, options))
        if self._path.calls_policy:
            self._trial().give_shape()

    def _warn_of_private_entries(self) -> None:
        hidden = [key for key in (*self.env.observation_keys, *self.env.reward_keys) if is_private(key)]
        if hidden:
            warn_user(
                f"{self.owner}: the environment announces {key_str(hidden)}, and batches hold no entries whose names "
                "begin with '_'. Rename them to have them there.",
                UserWarning,
            )

    def _use(self, path: Path) -> None:
        """Take ``path`` from now on: the short list of callables that a rollout runs through."""
        self._path = path
        self._act = named_range("rollwright.policy", path.act)
        self._step = named_range("rollwright.env", path.step)
        follows = type(path).follow is not Path.follow
        self._follow = named_range("rollwright.reset", path.follow) if follows else None
        self._record = named_range("rollwright.write", path.record if self._write is None else self._record_and_write)

    def _record_and_write(self, t: int) -> None:
        self._path.record(t)
        if self._counting and self._write is not None:
            self._write(self._path.frame(t))

    def write_frames_to(self, write: Callable[[TensorDictBase], None]) -> None:
        """Call ``write`` with each frame ``[*env]`` of batches that count, once it was recorded."""
        self._write = write
        self._use(self._path)

    # What it is -------------------------------------------------------------------------------

    @property
    def policy(self) -> Any:
        """The object that acts."""
        return self.acting.policy

    @property
    def current(self) -> TensorDictBase | None:
        """What the next step is taken from, ``[*env]``; None: a reset comes first."""
        return self._path.current

    @property
    def path(self) -> Path:
        """How steps are taken."""
        return self._path

    @property
    def cursor(self) -> DataCursor:
        """The place in data that ends, and what is in progress there."""
        return self._path.cursor

    @property
    def steps_taken(self) -> int:
        """Of each environment, in the last rollout."""
        return self._steps_taken

    @property
    def completed(self) -> bool:
        """Whether ``total_frames`` were stepped, or the environment's data is over."""
        return self.frames >= self.counts.total or self._path.cursor.is_over

    @property
    def how(self) -> dict[str, str]:
        """What runs the environment and the policy, and why."""
        how = dict(self._path.how)
        if self._to_compile and how["policy"].startswith("native"):
            how["policy"] += ", to be compiled at the first batch"
        return how

    def get_model(self, model_id: str, root: Any) -> Any:
        """The model that an id names: ``"policy"``, a path from ``root``, or a part of the policy (``"actor"``).

        Raises:
            ValueError: there is no such model.
        """
        if model_id == "policy":
            return self.acting.target
        try:
            return resolve(root, model_id)
        except AttributeError as of_root:
            try:
                return resolve(self.policy, model_id)
            except AttributeError as of_policy:
                error = of_root if hasattr(root, re.split(r"[.\[]", model_id)[0]) else of_policy
                raise ValueError(
                    f"model_id: expected 'policy', a part of it, or a path from the collector such as 'env.transform', "
                    f"got {model_id!r}. {error}"
                ) from error

    def stats(self) -> dict[str, Any]:
        """Counts, times and episodes, for ``stats()`` of a collector."""
        devices = vars(self.devices)
        return {
            "frames": self.frames,
            "total_frames": None if self.counts.batches is None else self.counts.total,
            "completed": self.completed,
            "frames_per_batch": self.counts.frames,
            "frames_per_second": self.timer.rate(),
            "seconds": {"total": self.timer.elapsed, **self.timer.seconds},
            **self.episodes.summary(),
            "policy_version": self.acting.version,
            "env_recreations": num_recreations(self.env),
            "devices": {name: None if device is None else str(device) for name, device in devices.items()},
            "bytes_held": self.memory.num_bytes,
            **self._path.stats(),
        }

    def check_open(self) -> None:
        """Refuse to collect after :meth:`close`."""
        if self.closed:
            raise RuntimeError(f"{self.owner} was shut down. Make a new one to collect more.")

    def close(self) -> None:
        """Close the environment."""
        self._path.close()
        self.env.close(raise_if_closed=False)
        self.acting.close()

    # Batches ----------------------------------------------------------------------------------

    def collect(self) -> TensorDictBase:
        """Collect a batch that is to be delivered: its frames and its time count.

        Returns:
            ``[*env, T]``.
        """
        self._begun = False
        self.check_open()
        while True:
            self._counting = True
            self._counted = 0
            self._episodes_before = self.episodes.copy()
            try:
                with self.timer.running(), NoSilentEnd("a rollout: the environment or pre_collect_hook"):
                    batch = self.run()
                    self._counted = self.frames_taken
                    self.frames += self._counted
                    self.timer.frames += self._counted
            finally:
                self._counting = False
            if self.observer.accepts(self.frames_taken):
                return batch
            self._go_back(keeps=False)

    def expect(self) -> None:
        """Say that a rollout is to come: until it has begun, there is nothing to go back from."""
        self._begun = False

    @contextmanager
    def or_go_back(self, taken: Sequence[Any]) -> Iterator[None]:
        """Where the ``with`` block raises, nobody gets its steps: the trajectories in progress end there.

        Conversations go on from where the batch began.

        Args:
            taken: where the block has put what was made of its steps, somebody gets them all the same.
        """
        self._begun = False
        try:
            yield
        except BaseException:
            if not taken:
                self.go_back_if_begun()
            raise

    def _go_back(self, *, keeps: bool = True) -> None:
        if not self._path.cursor.go_back(keeps=keeps):
            self._path.current = None
        self._went_back = True

    def look_ahead(self) -> None:
        """After an error, begin what comes next, so that :attr:`completed` says whether there is any."""
        if self._went_back:
            self._went_back = False
            self._path.cursor.look_ahead()

    def go_back_if_begun(self) -> bool:
        """Nobody gets the last batch, if its rollout came as far as its first step; returns whether it did.

        Its frames and episodes do not count.
        """
        if self._begun:
            self._go_back()
            self.frames -= self._counted
            self.timer.frames -= self._counted
            self._counted = 0
            if self._episodes_before is not None:
                self.episodes, self._episodes_before = self._episodes_before, None
        return self._begun

    def start_over(self) -> None:
        """Begin the next batch with a reset of all environments and new trajectory ids."""
        self._path.current = None
        self._went_back = True

    def run(self) -> TensorDictBase:
        """Collect one batch, which counts as neither delivered nor post-processed.

        Returns:
            ``[*env, T]``.

        Raises:
            RuntimeError: the collector was shut down.
        """
        self.check_open()
        clock, seconds = time.perf_counter, self.timer.seconds
        self._begun = False
        if self.hooks.pre_collect_hook is not None:
            self.hooks.pre_collect_hook()
        self._begun = True
        with (
            self.stepping,
            torch.no_grad(),
            set_exploration_type(self.options.exploration_type),
            set_recurrent_mode("sequential"),
        ):
            try:
                self._begin()
                for t in range(self.counts.steps):
                    begun = clock()
                    self._act(t)  # the policy reads observations and writes actions
                    acted = clock()
                    self._step(t)  # the environment steps
                    stepped = clock()
                    self._record(t)  # the frame goes into the batch's memory
                    recorded = clock()
                    if self._follow is not None:
                        self._follow(t)  # what ended is reset, unless the step has done it
                    seconds["policy"] += acted - begun
                    seconds["env"] += stepped - acted + clock() - recorded
                    seconds["write"] += recorded - stepped
                    if self._path.cursor.batch_is_over or (self.interrupted is not None and self.interrupted()):
                        break
                return self._finish(t + 1)
            except BaseException as error:
                of_policy = explained(error, self._trial(), self._path)
                self._go_back()  # a step may have been taken in part
                if of_policy is None:
                    raise
                raise of_policy from error
            finally:
                self._env_uses = self.env.num_uses

    def _begin(self) -> None:
        """Open a batch."""
        self.observer.enter(Stage.RESET)
        if self._env_uses not in (None, self.env.num_uses) and self._path.started:
            self._leave_trajectories()
        self.env.note_use()
        resets = self.options.reset_at_each_iter and self._unused_ids is None and not self._path.goes_on
        if not self._path.started or resets:
            self.start_trajectories()
        if not self._stepped and self._path.current is not None:  # a reset may lack what the specs of states name
            self._check_inputs(leaf_keys(self._path.current))
        random = self.frames < self.counts.random_frames
        try:
            self._open(random)
        except UnfitOutputs as reason:
            self._go_plain(random, reason)
        except NotNative:
            self.choose_path_again()
            try:
                self._open(random)
            except NotNative as reason:
                self._go_plain(random, reason)
        self._unused_ids = None
        self._stepped = True
        self.observer.enter(Stage.STEPS)

    def _leave_trajectories(self) -> None:
        """Begin new trajectories: somebody else has used the environment, and those in progress are gone."""
        if not self._has_warned_of_use:
            self._has_warned_of_use = True
            self.observer.warn(
                f"{self.owner}: somebody else has reset or stepped {self.env} since the last batch. Trajectories in "
                "progress were left there, and new ones begin. Evaluate in an environment of its own."
            )
        self.start_trajectories()

    def _open(self, random: bool) -> None:
        self.episodes.begin(self.frames // self.num_rows)
        if self._to_compile:
            self._compile_policy()
        if random:
            self._path.conform(self._outputs_of_policy())
        self._path.begin(random=random)

    def _finish(self, steps: int) -> TensorDictBase:
        """Close the batch of ``steps`` steps: what was asked of its end, and what is counted."""
        self.observer.enter(Stage.FINISH)
        batch = self._path.finish(steps)
        self.syncs.storage()
        self._check_finite(batch, self._path.finite_keys)
        if (ended := self._path.ended()) is not None:
            self.episodes.add(ended)
        else:
            self._count_episodes(batch if steps == self.counts.steps else batch[..., :steps])
        if self.options.set_truncated:
            cut = mark_truncated(self.env.done_groups, batch[..., steps - 1].get("next"), self.env.ndim)
            if self.options.track_traj_ids:
                self._path.replace_ids(cut)
        taken = self._path.frames_taken
        self.frames_taken = steps * self.num_rows if taken is None else taken
        self._steps_taken = steps if taken is None else batch.batch_size[-1]
        return batch

    def blank(self) -> TensorDictBase:
        """A batch of zeros like those of :meth:`run`, with the entries that one call of the policy shows."""
        self.check_open()
        with torch.no_grad(), set_exploration_type(self.options.exploration_type), set_recurrent_mode("sequential"):
            return blank_batch(
                self.env,
                self._trial(),
                self.options,
                steps=self.counts.steps,
                version=self.acting.stamp,
                device=self.devices.storing,
            )

    def ends_in(self, batch: TensorDictBase) -> torch.Tensor:
        """Where trajectories end in a batch, bool ``[*env, T]``."""
        return end_of_trajectory(batch.get("next"), self.env.done_groups, batch.ndim)

    def _count_episodes(self, taken: TensorDictBase) -> None:
        ended = self.ends_in(taken)
        if not self.options.reset_when_done:  # frames go on after the end, and the episode is over once
            ended = ended & ~end_of_trajectory(taken, self.env.done_groups, taken.ndim)
        keys = self.env.reward_keys
        reward = None
        if len(keys) == 1 and self.env.has_token_rewards:
            reward = summed_reward(taken.get("next"), keys[0], 1)
        elif len(keys) == 1:
            reward = taken.get("next").get(keys[0])
        self.episodes.update_from(taken, reward, ended, self._reset_envs)
        self._reset_envs[:] = False

    # Paths ------------------------------------------------------------------------------------

    def _check_inputs(self, available: Iterable[NestedKey]) -> None:
        if self._path.calls_policy and not self.options.trust_policy:
            check_inputs(self.policy, available, self.env)

    def _compile_policy(self) -> None:
        wanted, self._to_compile = self.options.compile_policy, False
        self.observer.enter(Stage.COMPILE)
        try:
            with self.timer.aside():
                self._path.compile(wanted if isinstance(wanted, Mapping) else {})
        except NotNative as reason:
            self.observer.warn(f"compile_policy: the policy runs uncompiled. {reason}")
        self.observer.enter(Stage.RESET)

    def _outputs_of_policy(self) -> TensorDictBase | None:
        """What the policy writes; it is called for that once, on real observations."""
        if self._outputs is None:
            self._outputs = (self._trial().outputs(cast(TensorDictBase, self._path.current)),)
        return self._outputs[0]

    def _trial(self) -> Trial:
        return Trial(self.acting.call, self.policy, self.env, self.devices, self.syncs.policy)

    def act_with_copy(self) -> bool:
        """Act with a copy of the policy, whose weights nobody else writes, unless it is one already.

        Returns:
            Whether modules act that could not be copied.
        """
        before = self.policy
        shared = self.acting.act_with_copy(self.options, self.env)
        if self.policy is not before:
            self.choose_path_again()
        return shared

    def _rows(self) -> int:
        """Rows of a batch: 1 where frames are taken in the order in which environments are ready."""
        in_turns = dialogue_parts(self.env, self.acting.policy, self.options) is not None
        streams = self.options.in_stream if in_turns else goes_by_itself(self.env, self.options)
        return 1 if streams else self.env.numel()

    def choose_path_again(self) -> None:
        """Environment or policy are no longer what the path was chosen for.

        Raises:
            EnvError: conversations are taken as they end, and TensorDicts of all would now be passed together.
        """
        if self._rows() != self.num_rows:
            raise EnvError(
                f"{self.env}: conversations are taken in the order in which they end, and it was changed so that "
                "TensorDicts of all have to be passed together. Make the collector after the change, or with "
                "async_envs=False."
            )
        self._outputs = None
        self._go_on(choose_path(self._parts))
        self._to_compile = bool(self.options.compile_policy)

    def _go_plain(self, random: bool, reason: Exception) -> None:
        self._go_on(plain_path(self._parts, {"policy": str(reason)}))
        self._to_compile = False
        self._open(random)

    def _go_on(self, path: Path) -> None:
        """Go on from here on another path."""
        current = self._path.current
        self._use(path)
        try:
            path.current = current
        except NotNative as reason:  # it was made before a transform came that carries something
            self._use(plain_path(self._parts, {"env": str(reason)}))
            self._path.current = current

    def _hand_over(
        self,
        frames: list[TensorDictBase],
        current: TensorDictBase,
        keeper: BoundaryKeeper | None,
        against: Mapping[str, str],
        random: bool,
        taken: Taken | None,
    ) -> None:
        """Take the plain path in the middle of a batch."""
        path = plain_path(self._parts, dict(against))
        if random:
            path.conform(self._outputs_of_policy())
        path.take_over(frames, current, keeper, taken, random=random)
        self._use(path)

    def _go_plain_at_reset(self, found: UnfitOutcome) -> PlainPath:
        """Take the plain path after a reset that has returned what arrays do not hold."""
        current = self._path.current
        path = plain_path(self._parts, {"env": str(found)})
        self._use(path)
        path.current = current
        return path

    def _check_path(self) -> None:
        try:
            self._path.check()
        except NotNative:
            self.choose_path_again()

    # Trajectories -----------------------------------------------------------------------------

    def start_trajectories(self, **kwargs: Any) -> None:
        """Reset the environment and begin new trajectories."""
        if self.env.is_closed:
            self.env.reopen()
        self._check_path()
        known = getattr(self.env, "returns_tensors", None)
        with torch.no_grad():
            try:
                self._path.reset(**kwargs)
            except UnfitOutcome as found:
                self._go_plain_at_reset(found).take_reset(None, found.outcome)
        if getattr(self.env, "returns_tensors", None) != known:  # the first reset has shown it
            self.choose_path_again()
        self._env_uses = None
        self._reset_envs[:] = True
        if self._unused_ids is None:  # ids of trajectories that never took a step are used again
            self._unused_ids = torch.from_numpy(self.ids.take(self.env.numel())).reshape(self.env.batch_size)
        if self.options.track_traj_ids:
            self._path.set_ids(self._unused_ids)

    def reset(self, index: Any = None, **kwargs: Any) -> None:
        """Begin new trajectories, in all environments or in some of a batch.

        Args:
            index: anything that indexes the environment's batch; None for all.
            **kwargs: go to the environment's ``reset``.
        """
        if index is not None and not self.env.ndim:
            raise RuntimeError(f"reset: index={index!r} was given, and {self.env} is not a batch. Call reset().")
        if index is None:
            self.start_trajectories(**kwargs)
            return
        if not self._path.started:
            self.start_trajectories()
        marked = torch.zeros(self.env.batch_size, dtype=torch.bool, device="cpu")
        try:
            marked[index] = True
        except (IndexError, TypeError) as error:
            batch = list(self.env.batch_size)
            raise IndexError(
                f"reset: index={index!r} does not index the environment's batch {batch}: {error}."
            ) from error
        self._check_path()
        with torch.no_grad():
            try:
                self._path.reset_some(marked, **kwargs)
            except UnfitOutcome as found:
                self._go_plain_at_reset(found).take_reset(marked, found.outcome)
        self._env_uses = None
        if self.num_rows == marked.numel():  # else frames come in the order in which they end
            self._reset_envs |= marked.flatten().numpy()
        if self.options.track_traj_ids and self._unused_ids is None:
            self._path.replace_ids(marked)

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed environments and torch's global generator, and reset all with the next batch.

        Args:
            seed: of the first environment; further ones get ``seed + 1`` and so on.
            static_seed: give all environments the same seed.

        Returns:
            The seed of the last environment.
        """
        seed = checked_seed(seed)
        self._path.forget()
        last = self.env.set_seed(seed, static_seed=static_seed)
        return seed if last is None else last

    # State ------------------------------------------------------------------------------------

    def state(self) -> RolloutState:
        """What the next step depends on beside environment, policy and generators."""
        unused = self._unused_ids
        return RolloutState(self._path.current, self._reset_envs.copy(), None if unused is None else unused.clone())

    @property
    def stepped(self) -> bool:
        """Whether a frame was taken in this object's life."""
        return self._stepped

    def forget_trajectories(self) -> None:
        """Drop the trajectories in progress, and ids that were not used."""
        self._path.forget()
        self._unused_ids = self._env_uses = None

    def go_on_from(self, saved: RolloutState, *, ids_are_free: bool) -> None:
        """Go on with the trajectories of a saved state.

        Args:
            saved: of :meth:`state`.
            ids_are_free: whether their ids have no other use; if not, they get new ones.
        """
        self._reset_envs[:] = saved.reset_envs
        unused, current = saved.unused_ids, saved.current
        if current is None:
            self._unused_ids = unused.clone() if unused is not None and ids_are_free else None
            return
        if not self.devices.current_has_no_device and self.env.device is not None:
            current = current.to(self.env.device)
        ids = current.get(stages.IDS, None)
        ids = None if ids is None else ids.cpu()
        tracks = self.options.track_traj_ids
        unasked = [*([] if tracks else ["collector"]), *([] if self.options.track_policy_version else [stages.VERSION])]
        self._path.current = current.exclude(*unasked)
        if ids is None or not ids_are_free:
            ids = torch.from_numpy(self.ids.take(self.env.numel())).reshape(self.env.batch_size)
        if tracks:
            self._path.set_ids(ids)
        self._unused_ids = None if unused is None else ids
