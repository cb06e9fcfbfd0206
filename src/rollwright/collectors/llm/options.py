"""The options of LLMCollector: declared, checked and documented here, under the names that users know."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from os import PathLike
from pathlib import Path
from typing import Annotated, Any, Literal

from tensordict import TensorDictBase

from rollwright._keys import NestedKey
from rollwright._options import PER_WORKER, Check, check_fields, names_of, refuse_unknown, whole
from rollwright.collectors.delivery.stored import QueueWriter
from rollwright.collectors.options import Buffer, Interrupts
from rollwright.data.llm.records import checked_left_out
from rollwright.data.llm.sequence import InSequences
from rollwright.modules.llm.engine import CacheMode, UpdateMode
from rollwright.weight_update import WeightSyncScheme, WeightUpdaterBase
from rollwright.weight_update.schemes import as_schemes, check_schemes
from rollwright.weight_update.updaters import check_updater


def _at_least_one(name: str, value: object) -> object:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 1:
        raise ValueError(f"{name}: expected a number of at least 1, got {value!r}.")
    return value


def _tracker(name: str, value: object) -> object:
    if not isinstance(value, bool) and not callable(getattr(value, "increment_version", None)):
        raise TypeError(
            f"{name}: expected True, False or a PolicyVersion, got {type(value).__name__}: {value!r}. Pass for example "
            "PolicyVersion(version_type='uuid')."
        )
    return value


@dataclass(frozen=True, kw_only=True)
class LLMOptions:
    """The options of a collector of conversations, besides its environment and its policy.

    Attributes:
        policy_factory: called once, without arguments, where the policy is needed; instead of a policy. With
            ``num_collectors``, in each worker.
        dialog_turns_per_batch: turns in a batch, over all environments. Required, unless complete conversations are
            delivered; then it says how often the collector looks (None: after each turn). Rounded up to a multiple of
            the number of environments, with a warning, unless ``async_envs``.
        total_dialog_turns: turns to take in all; -1 for no end. Rounded up to whole batches, with a warning.
        yield_completed_trajectories: deliver one complete conversation at a time, ``[turns]``. False, the default,
            unless ``yield_only_last_steps`` is True: turns are delivered, whether or not their conversation goes on.
        yield_only_last_steps: deliver the last turn of each conversation alone, ``[1]``.
        trajs_per_batch: deliver this many complete conversations at a time, one after another; see ``delivery_order``.
        groups_per_batch: deliver this many complete groups at a time, one after another. A group is all conversations
            that begin with one prompt (the repeats of the dataset), in order of their repeats.
        keep_group: called with each complete group, ``[turns]``; True: it is delivered. False: it is not, and another
            group is collected in its place; its prompt counts as done. A text says why, for
            ``stats()["groups_filtered"]``. See :func:`~rollwright.data.llm.rewards_differ`.
        max_oversampling: groups that may be collected for a batch, for each of ``groups_per_batch``; where more would
            be needed, it is an error. With workers, of each.
        deliver: ``"turns"``: a record for each. ``"sequences"``: training sequences of complete conversations ``[n]``,
            in which each token is once, as :func:`~rollwright.data.llm.training_sequences` reads them: one for each
            conversation, unless its earlier turns were written anew. Batches, buffers and queues get these in place of
            turns.
        leave_out: entries that records are not to have, such as ``"text"`` or ``("log_probs", "full")``.
        async_envs: take turns in the order in which they end, ``[N]``: conversations whose environment is ready
            generate while others step, and another one begins as soon as one has ended. False: one turn of each
            environment in turn, ``[*env, T]``. None: True if complete conversations are delivered, or for an
            :class:`~rollwright.envs.AsyncEnvPool`.
        delivery_order: ``"completion"``: complete conversations and groups are delivered in the order in which they
            were complete. ``"data"``: in the order of the data; those that are complete earlier wait. With workers, of
            each worker's part.
        flatten_data: deliver ``[N]`` in place of ``[*env, T]``, environment after environment. None: True with
            ``replay_buffer`` or ``queue``. False with a ``replay_buffer``: an element of it is what one environment
            took in a batch, ``[T]``, in place of a single turn; its trajectory ids are -1 where the data was over.
        reset_at_each_iter: begin every batch with new conversations. Those in progress are dropped, and counted in
            ``stats()["conversations_dropped"]``; one in which nothing was generated yet stays.
        on_error: what becomes of a conversation that fails: its prompt is too long, the engine fails in it, or a tool,
            a reward or its environment raises. ``"raise"``: the error is raised, once; all others stay as they are. It
            rests in the next batch, and is tried again after that (at once, where nothing else is left). ``"drop"``:
            what is left of it is not delivered, and its group is complete without it. ``"mask"``: it ends with a record
            whose ``finish_reason`` is ``"error"``, with nothing to train on; :func:`group_advantages` leaves it out.
            ``stats()["conversations_failed"]`` counts them, by class of what was raised. ``"drop"`` and ``"mask"``
            take environments and policies whose messages and tokens pass without TensorDicts.
        max_retries: how often what has failed is tried again before that: a request to the engine; or the conversation
            from before its last answer, if it can be saved there, else from its beginning, if nothing of it was
            delivered. A prompt that the engine refuses is not asked again.
        max_failures: conversations that may fail, with none that ends well between them; then the collector raises the
            last error, whatever ``on_error`` says.
        postproc: applied to each batch; its result is delivered.
        replay_buffer: where turns go; the collector then yields None for each batch.
        queue: an object with ``put``: gets each turn as an item of its own, and the collector yields None for each
            batch. Where it is full, the collector waits.
        weight_updater: an updater of one's own, or a function that makes it.
        weight_sync_schemes: how weights travel, by model.
        weight_recv_schemes: schemes to receive weights through, by model; see ``register_scheme_receiver()``.
        weight_update_mode: when the engine loads new weights. ``"in_flight"``: between two tokens. ``"wait"``: no new
            response begins, those in progress end, then it loads. ``"between_turns"``: the same, while the collector
            goes on. ``"resubmit"``: at once, and responses in progress begin again; what they had is counted in
            ``stats()["tokens_discarded"]``.
        weight_update_cache: what new weights read of the tokens before, in flight: ``"keep"``: what the old ones wrote;
            ``"rebuild"``: it is computed again.
        track_policy_version: count updates of the weights. Each record says by which version its tokens were sampled.
            A :class:`~rollwright.envs.llm.PolicyVersion` counts in integers or in UUIDs. If False,
            ``get_policy_version()`` returns None.
        trace: folder that conversations are written into as they happen, turn by turn: also those that fail, or are
            dropped. What was written survives a kill; see :class:`~rollwright.data.llm.Trace`. A run that goes on from
            a saved state goes on in its folder.
        replay: folder of such a trace: answers are those of the recorded run, with its log-probabilities and versions,
            and the model is not run. The policy may be left out where the environment has a tokenizer.
        verbose: log a line for each batch.
        create_env_kwargs: keyword arguments for the environment's constructor.
        trust_policy: call the policy as it is, without wrapping. None: True for TensorDict modules only.
        interruptor: an :class:`~rollwright.collectors.Interruptor` that can end a batch between two turns.
        pre_collect_hook: called without arguments before each batch is collected.
        post_collect_hook: called with each batch just before it is delivered.
        worker_idx: index of this collector among its siblings.
        progress: show a progress bar with turns, turns per second and mean return on stderr; where that is no
            terminal, print a line every few seconds.

    Example:
        >>> LLMOptions(yield_only_last_steps=True, yield_completed_trajectories=False)
        Traceback (most recent call last):
        ...
        ValueError: yield_only_last_steps=True delivers complete conversations, and yield_completed_trajectories=False \
asks for turns of any. Drop one of the two.
    """

    policy_factory: Annotated[Callable[[], Any] | None, PER_WORKER] = None
    dialog_turns_per_batch: Annotated[int | None, whole(1, floats=True), PER_WORKER] = None
    total_dialog_turns: Annotated[int | None, whole(floats=True)] = -1
    yield_completed_trajectories: bool | None = None
    yield_only_last_steps: bool | None = None
    trajs_per_batch: Annotated[int | None, whole(1)] = None
    groups_per_batch: Annotated[int | None, whole(1)] = None
    keep_group: Callable[[TensorDictBase], bool | str | None] | None = None
    max_oversampling: Annotated[float, Check(_at_least_one)] = 10.0
    deliver: Literal["turns", "sequences"] = "turns"
    leave_out: Annotated[Sequence[NestedKey], Check(checked_left_out)] = ()
    async_envs: bool | None = None
    delivery_order: Literal["completion", "data"] = "completion"
    flatten_data: bool | None = None
    reset_at_each_iter: bool = False
    on_error: Literal["raise", "drop", "mask"] = "raise"
    max_retries: Annotated[int, whole(0)] = 0
    max_failures: Annotated[int, whole(1)] = 32
    postproc: Callable[[TensorDictBase], TensorDictBase] | None = None
    replay_buffer: Buffer | None = None
    queue: Any = None
    weight_updater: Annotated[WeightUpdaterBase | Callable[[], WeightUpdaterBase] | None, Check(check_updater)] = None
    weight_sync_schemes: Annotated[Mapping[str, WeightSyncScheme] | None, Check(as_schemes)] = None
    weight_recv_schemes: Annotated[Mapping[str, WeightSyncScheme] | None, Check(check_schemes)] = None
    weight_update_mode: UpdateMode = "in_flight"
    weight_update_cache: CacheMode = "keep"
    track_policy_version: Annotated[Any, Check(_tracker)] = False
    trace: str | PathLike[str] | None = None
    replay: str | PathLike[str] | None = None
    verbose: bool = False
    create_env_kwargs: Annotated[Mapping[str, Any] | None, PER_WORKER] = None
    trust_policy: bool | None = None
    interruptor: Interrupts | None = None
    pre_collect_hook: Callable[[], None] | None = None
    post_collect_hook: Callable[[TensorDictBase], None] | None = None
    worker_idx: Annotated[int | None, whole(0)] = None
    progress: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.dialog_turns_per_batch, list | tuple):  # of workers: each is checked by its own
            check_fields(self)
        total = self.total_dialog_turns
        if total is not None and (total == 0 or total < -1):
            raise ValueError(
                f"total_dialog_turns: expected at least 1, or -1 for a collector without an end, got {total}."
            )
        self._check_completed()
        if self.deliver == "sequences":
            self._check_sequences()
        if self.queue is not None and self.replay_buffer is not None:
            raise ValueError("queue and replay_buffer both say where turns go. Drop one of the two.")
        if self.queue is not None and self.flatten_data is False:
            raise ValueError(
                "flatten_data=False: a queue gets each turn as an item of its own. Leave flatten_data out, or pass a "
                "replay_buffer, which gets the turns of each environment as one element."
            )
        object.__setattr__(self, "yield_only_last_steps", bool(self.yield_only_last_steps))
        object.__setattr__(self, "yield_completed_trajectories", self.delivers_whole)

    def _check_completed(self) -> None:
        if self.keep_group is not None and self.groups_per_batch is None:
            raise ValueError(
                "keep_group: expected groups_per_batch=, the number of groups to deliver at a time, got None. Pass it."
            )
        if self.delivery_order == "data" and not self.delivers_whole:
            raise ValueError(
                "delivery_order='data': expected complete conversations, got turns, which are delivered as they come. "
                "Pass trajs_per_batch= or groups_per_batch= with it, or drop it."
            )
        if self.yield_completed_trajectories is False:
            against = {
                "yield_only_last_steps=True": self.yield_only_last_steps,
                f"trajs_per_batch={self.trajs_per_batch}": self.trajs_per_batch is not None,
                f"groups_per_batch={self.groups_per_batch}": self.groups_per_batch is not None,
            }
            for name, given in against.items():
                if given:
                    raise ValueError(
                        f"{name} delivers complete conversations, and yield_completed_trajectories=False asks for "
                        "turns of any. Drop one of the two."
                    )
        if self.trajs_per_batch is not None and self.groups_per_batch is not None:
            raise ValueError(
                f"trajs_per_batch={self.trajs_per_batch} and groups_per_batch={self.groups_per_batch} both say how "
                "many conversations are delivered at a time. Drop one of the two."
            )
        if self.dialog_turns_per_batch is None and not self.delivers_whole:
            raise ValueError(
                "dialog_turns_per_batch: expected a number of turns, got None. Pass it, or deliver complete "
                "conversations: yield_completed_trajectories=True, trajs_per_batch=n or groups_per_batch=n."
            )

    def _check_sequences(self) -> None:
        if not self.delivers_whole:
            raise ValueError(
                "deliver='sequences': expected complete conversations, got turns of any "
                f"(dialog_turns_per_batch={self.dialog_turns_per_batch}). Pass trajs_per_batch=n, groups_per_batch=n "
                "or yield_completed_trajectories=True, too."
            )
        if self.yield_only_last_steps or self.flatten_data is False:
            name = "yield_only_last_steps=True" if self.yield_only_last_steps else "flatten_data=False"
            raise ValueError(
                f"{name} delivers turns, and deliver='sequences' whole conversations, each as one. Drop one of the two."
            )

    @property
    def delivers_whole(self) -> bool:
        """Whether complete conversations are delivered."""
        one = self.yield_completed_trajectories or self.yield_only_last_steps
        return bool(one) or self.trajs_per_batch is not None or self.groups_per_batch is not None

    @classmethod
    def parse(cls, options: Mapping[str, Any], owner: str | type) -> LLMOptions:
        """Options from keyword arguments.

        Raises:
            TypeError: for an unknown name, with the most similar ones first.
        """
        refuse_unknown(options, names_of(cls), owner)
        return cls(**options)

    def shaping(self, postproc: Callable[[TensorDictBase], TensorDictBase] | None) -> Any:
        """What a batch of turns goes through before it is delivered; None: nothing."""
        return InSequences(postproc) if self.deliver == "sequences" else postproc

    def translated(self) -> dict[str, Any]:
        """These options as those of :class:`~rollwright.collectors.options.ConversationOptions`."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        for name in ("verbose", "replay", "yield_completed_trajectories", "deliver"):
            del found[name]
        found["postproc"] = self.shaping(self.postproc)
        found["frames_per_batch"] = found.pop("dialog_turns_per_batch")
        found["total_frames"] = -1 if self.total_dialog_turns is None else self.total_dialog_turns
        del found["total_dialog_turns"]
        found["trace"] = None if self.trace is None else str(Path(self.trace).absolute())
        found["only_last_steps"] = bool(found.pop("yield_only_last_steps"))
        found["track_policy_version"] = self.track_policy_version is not False
        given = found.pop("queue")
        if given is not None:
            found["replay_buffer"] = QueueWriter(given)
        stored = found["replay_buffer"] is not None
        found["flatten_data"] = stored if self.flatten_data is None else self.flatten_data
        if self.delivers_whole and self.groups_per_batch is None:
            found["trajs_per_batch"] = self.trajs_per_batch or 1
        if self.delivers_whole and not stored:
            found["traj_format"] = "cat"
        return found


def check_lag(lag: int, options: LLMOptions) -> None:
    """Refuse a bound on the age of tokens that one process cannot keep.

    Raises:
        ValueError: turns are delivered as they come, or versions are UUIDs.
    """
    if not options.delivers_whole:
        raise ValueError(
            f"max_policy_lag={lag}: expected complete conversations, got turns: one whose turns were delivered goes "
            "on, however old it is. Pass groups_per_batch= or trajs_per_batch=, or leave it out."
        )
    if isinstance(getattr(options.track_policy_version, "version", 0), str):
        raise ValueError(
            f"max_policy_lag={lag}: expected versions that are counted, got a PolicyVersion of UUIDs. Pass "
            "track_policy_version=True or PolicyVersion('int')."
        )
