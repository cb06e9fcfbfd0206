"""The options of collectors: declared, checked and documented here, once, for all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal, Protocol

import torch
from tensordict import TensorDictBase

from rollwright._keys import NestedKey
from rollwright._options import PER_WORKER, Check, check_fields, names_of, refuse_unknown, whole
from rollwright._warnings import warn_user
from rollwright.data.replay_buffers import SliceSampler
from rollwright.data.specs.shapes import known_device, usable_device
from rollwright.envs.recreation import check_failure
from rollwright.envs.utils import ExplorationType
from rollwright.modules.llm.engine import CacheMode, UpdateMode
from rollwright.weight_update import WeightSyncScheme, WeightUpdaterBase
from rollwright.weight_update.schemes import as_schemes, check_schemes
from rollwright.weight_update.updaters import check_updater

Device = torch.device | str | int
DEVICES = ("device", "policy_device", "env_device", "storing_device")
"""Options that name devices."""


class Buffer(Protocol):
    """A replay buffer that a collector writes to, of this library or of another."""

    @property
    def extend(self) -> Callable[..., Any]:
        """Store a batch."""

    @property
    def add(self) -> Callable[..., Any]:
        """Store a frame."""

    @property
    def sample(self) -> Callable[..., Any]:
        """Draw a batch."""


class Interrupts(Protocol):
    """An object that can end a rollout, such as an :class:`~rollwright.collectors.Interruptor`."""

    def collection_stopped(self) -> bool:
        """Whether the current rollout is to end after its step."""


def _dictionary(name: str, value: object) -> object:
    if not isinstance(value, Mapping):
        raise TypeError(f"{name}: expected a dictionary, got {type(value).__name__}.")
    return value


def _flag_or_arguments(name: str, value: object) -> object:
    if not isinstance(value, bool | Mapping):
        raise TypeError(f"{name}: expected True, False or a dictionary of arguments, got {value!r}.")
    return value


def _exploration(name: str, value: object) -> object:
    if not isinstance(value, ExplorationType):
        raise TypeError(f"{name}: expected a member of ExplorationType, got {value!r}. Import it from rollwright.envs.")
    return value


def _failure(name: str, value: object) -> object:
    check_failure(value)
    return value


@dataclass(frozen=True, kw_only=True)
class CollectorOptions:
    """The options of a collector, besides its environment and its policy.

    An instance is complete and can be sent to another process.

    Attributes:
        frames_per_batch: frames in a batch, of all environments together. Rounded up to a multiple of the number of
            environments, with a warning.
        total_frames: number of frames to deliver; -1: no end. Rounded up to whole batches, with a warning.
        policy_factory: makes the policy where it is needed, in place of ``policy``; called once, without arguments.
        device: default of the three devices below. Workers on other machines look for these devices there.
        policy_device: where the policy runs. A policy with parameters on another device is copied there, and
            ``update_policy_weights_()`` updates the copy. None: the policy stays where it is.
        env_device: device of the environment's data. None: the environment's own device.
        storing_device: device of the delivered batches. None: the environment's device if the policy has the same,
            else no common device.
        create_env_kwargs: keyword arguments for the environment's constructor.
        max_frames_per_traj: truncate trajectories after this many frames of one environment. A ``StepCounter`` is
            appended to the environment. None, 0 or less: no limit.
        init_random_frames: take random actions for this many frames, before the policy acts. Rounded up to whole
            batches, with a warning. Their batches have all entries that the policy writes, zero where nothing was
            computed, and actions in the policy's dtype and shape (objects are those of one call). To find out, the
            collector calls the policy once on the first observations. That changes no random number and nothing in a
            module; a function, or an object that is no module, keeps what that call changes. None, 0 or less: none.
        reset_at_each_iter: begin every batch with a reset of all environments and new trajectory ids.
        reset_when_done: reset environments whose trajectory ended. If False, stepping continues after the end, under
            the same trajectory id.
        exploration_type: how probabilistic modules choose actions.
        postproc: called with each batch; what it returns is delivered.
        split_trajs: deliver ``[trajectories, T]``, padded, with a mask; see
            :func:`~rollwright.collectors.utils.split_trajectories`.
        track_traj_ids: write ``("collector", "traj_ids")``.
        track_policy_version: write ``"policy_version"``, int64 ``[*env, T]``, at the root and below ``"next"``: the
            version of the weights that acted.
        return_same_td: deliver the same TensorDict each time, overwritten.
        interruptor: an :class:`~rollwright.collectors.Interruptor` that can end a rollout between two steps.
        set_truncated: mark the last frame of each batch as truncated and done, unless it is terminated. The next
            batch begins new trajectory ids.
        env_groups: step the environments of a batch in this many groups: while one group steps, the policy acts for
            the next. This needs a ``ParallelEnv`` of environments on arrays, and a policy on arrays. The policy is
            called once for each group. A group is a range of the batch's first dimension; group sizes differ by at
            most one. Anything that rules groups out is an error at construction. If it comes later (a hook on the
            policy, another transform), a warning says so, and the collector steps one group from then on.
        on_env_failure: what to do if the environment raises in a step or a reset. ``"raise"``: raise an error.
            ``"recreate"``: call ``create_env_fn``, which must be a function, to make another one, with its
            transforms. The frame of the failed step repeats the last observation, with a reward of 0 and
            ``truncated`` and ``done`` set. Running statistics are reset, and the seed is derived from the old one. The
            first failure gives a ``RuntimeWarning``; ``stats()["env_recreations"]`` counts all. Four failures without a
            step in between are raised. A batch of environments is recreated as a whole; use the option of this name
            of ``SerialEnv`` and ``ParallelEnv`` to recreate single environments. An environment that never returns
            from a step cannot be recreated in its own process: use ``env_step_timeout`` of a ``ParallelEnv``, or
            ``on_worker_failure="restart"``.
        use_buffers: write frames into memory that is allocated for the batch, and refuse frames whose shapes vary;
            frames with objects are stacked at the end. False: stack all frames. None: True, unless shapes vary.
        compact_obs: do not store observations below ``"next"`` that the root of the next frame repeats. The others
            are kept separately; :func:`~rollwright.collectors.utils.restore_next` puts all back. Objects, and tensors
            whose shape varies, stay.
        trust_policy: call the policy as it is, without wrapping it. None: True for TensorDict modules only.
        compile_policy: compile the policy at the first batch. Known layers and distributions become a NumPy program,
            others go through ``torch.compile``. A dictionary has arguments of ``torch.compile``, and selects it.
        cudagraph_policy: run the policy as a CUDA graph; a dictionary has arguments of ``CudaGraphModule``.
        auto_register_policy_transforms: append to the environment what the policy needs and the environment lacks:
            ``InitTracker`` and the primers of recurrent modules, and a ``CategoricalAction`` for a module that writes
            the index of a one-hot action.
        no_cuda_sync: skip the synchronization after copies between devices.
        pre_collect_hook: called without arguments before each rollout.
        post_collect_hook: called with each batch just before it is delivered.
        worker_idx: index of this collector among several.
        trajs_per_batch: deliver exactly this many complete trajectories at a time, in the order in which they ended.
            Unfinished trajectories are held until they end. With ``replay_buffer``, each is written when it is
            complete. ``frames_per_batch`` is then the number of frames between two checks. ``total_frames`` counts
            frames that were stepped: trajectories that are incomplete at the end, or fewer than this, are not delivered
            (``stats()`` counts them). Trajectories that ``max_frames_per_traj`` or ``set_truncated`` cut are complete.
        traj_format: layout of a batch of complete trajectories. ``"padded"``: ``[trajectories, T]``, with a mask.
            ``"cat"``: one after the other, ``[sum of lengths]``.
        trajs_per_write: with ``replay_buffer``, write up to this many complete trajectories at a time, if there are
            several; default: 1.
        replay_buffer: buffer to write frames to; the collector then yields None for each rollout. Frames are written
            flat into a storage of one dimension, and in their shape into one of more dimensions.
        weight_sync_schemes: how weights are transferred, by model.
        weight_recv_schemes: schemes that this collector receives weights from, by model; see
            ``register_scheme_receiver()``.
        weight_updater: your own updater, or a function that makes it.
        extend_buffer: write whole rollouts, after ``postproc``. If False, every step is written at once, and
            ``postproc`` is not called.
        progress: show a progress bar on stderr with frames, frames per second and mean return. If stderr is no
            terminal, print a line every few seconds. ``rollwright top`` shows the collector, too.

    Example:
        >>> CollectorOptions(frames_per_batch=0)
        Traceback (most recent call last):
        ...
        ValueError: frames_per_batch: expected an integer of at least 1, got 0.
    """

    frames_per_batch: Annotated[int, whole(1, floats=True), PER_WORKER] = 200
    total_frames: Annotated[int, whole(floats=True)] = -1
    policy_factory: Annotated[Callable[[], Any] | None, PER_WORKER] = None
    device: Annotated[Device | None, Check(known_device), PER_WORKER] = None
    policy_device: Annotated[Device | None, Check(known_device), PER_WORKER] = None
    env_device: Annotated[Device | None, Check(known_device), PER_WORKER] = None
    storing_device: Annotated[Device | None, Check(known_device), PER_WORKER] = None
    create_env_kwargs: Annotated[Mapping[str, Any] | None, Check(_dictionary), PER_WORKER] = None
    max_frames_per_traj: Annotated[int | None, whole(floats=True)] = None
    init_random_frames: Annotated[int | None, whole(floats=True)] = None
    reset_at_each_iter: bool = False
    reset_when_done: bool = True
    exploration_type: Annotated[ExplorationType, Check(_exploration)] = ExplorationType.RANDOM
    postproc: Callable[[TensorDictBase], TensorDictBase] | None = None
    split_trajs: bool | None = None
    track_traj_ids: bool = True
    track_policy_version: bool = False
    return_same_td: bool = False
    interruptor: Interrupts | None = None
    set_truncated: bool = False
    env_groups: Annotated[int, whole(1, floats=True)] = 1
    on_env_failure: Annotated[Literal["raise", "recreate"], Check(_failure)] = "raise"
    use_buffers: bool | None = None
    compact_obs: bool = False
    trust_policy: bool | None = None
    compile_policy: Annotated[bool | Mapping[str, Any] | None, Check(_flag_or_arguments)] = None
    cudagraph_policy: Annotated[bool | Mapping[str, Any] | None, Check(_flag_or_arguments)] = None
    auto_register_policy_transforms: bool = True
    no_cuda_sync: bool = False
    pre_collect_hook: Callable[[], None] | None = None
    post_collect_hook: Callable[[TensorDictBase], None] | None = None
    worker_idx: Annotated[int | None, whole(0, floats=True)] = None
    trajs_per_batch: Annotated[int | None, whole(1, floats=True)] = None
    traj_format: Literal["padded", "cat"] = "padded"
    trajs_per_write: Annotated[int | None, whole(1, floats=True)] = None
    replay_buffer: Buffer | None = None
    weight_sync_schemes: Annotated[Mapping[str, WeightSyncScheme] | None, Check(as_schemes)] = None
    weight_recv_schemes: Annotated[Mapping[str, WeightSyncScheme] | None, Check(check_schemes)] = None
    weight_updater: Annotated[WeightUpdaterBase | Callable[[], WeightUpdaterBase] | None, Check(check_updater)] = None
    extend_buffer: bool = True
    progress: bool = False

    # Of collectors of conversations, see ConversationOptions; here, what any other collector does.
    async_envs: ClassVar[bool | None] = False
    groups_per_batch: ClassVar[int | None] = None
    only_last_steps: ClassVar[bool] = False
    leave_out: ClassVar[Sequence[NestedKey]] = ()
    flatten_data: ClassVar[bool] = False
    num_shards: ClassVar[int] = 1
    trace: ClassVar[str | None] = None
    keep_group: ClassVar[Any] = None
    max_oversampling: ClassVar[float] = 10.0
    max_policy_lag: ClassVar[int | None] = None
    policy_lag: ClassVar[Literal["wait", "drop"]] = "wait"
    delivery_order: ClassVar[Literal["completion", "data"]] = "completion"
    on_error: ClassVar[Literal["raise", "drop", "mask"]] = "raise"
    max_retries: ClassVar[int] = 0
    max_failures: ClassVar[int] = 32

    def __post_init__(self) -> None:
        if self.total_frames is None:
            object.__setattr__(self, "total_frames", -1)
        check_fields(self)
        if self.total_frames == 0 or self.total_frames < -1:
            raise ValueError(
                f"total_frames: expected at least 1, or -1 for a collector without an end, got {self.total_frames}."
            )
        self._check_pairs()

    def check_devices(self) -> None:
        """Test that this machine, on which the collector runs, has the devices that the options name.

        Raises:
            ValueError: it has not.
        """
        for name in DEVICES:
            if (device := getattr(self, name)) is not None:
                usable_device(name, device)
        if self.cudagraph_policy and not torch.cuda.is_available():
            raise ValueError("cudagraph_policy needs a CUDA device, and there is none. Leave it out.")

    def _check_pairs(self) -> None:
        if self.interruptor is not None and not hasattr(self.interruptor, "collection_stopped"):
            raise TypeError(
                f"interruptor: expected an object with collection_stopped(), got {type(self.interruptor).__name__}. "
                "Pass rollwright.collectors.Interruptor()."
            )
        if not self.track_traj_ids:
            for name in ("split_trajs", "interruptor"):
                if getattr(self, name):
                    raise ValueError(
                        f"{name} needs trajectory ids, and track_traj_ids is False. Drop one of the two options."
                    )
        if self.return_same_td and self.use_buffers is False:
            raise ValueError(
                "return_same_td overwrites a batch's memory, and use_buffers=False allocates none. Drop one of the two."
            )
        if self.on_env_failure == "recreate":
            if not self.reset_when_done:
                raise ValueError(
                    "on_env_failure='recreate' ends a trajectory where its environment is recreated, and "
                    "reset_when_done=False goes on after the end under the same id. Drop one of the two."
                )
            if self.env_groups > 1:
                raise ValueError(
                    f"on_env_failure='recreate' makes a batch of environments anew as a whole, and env_groups="
                    f"{self.env_groups} steps its parts in turn. Pass on_env_failure to ParallelEnv instead."
                )
        check_delivery(self)

    @classmethod
    def parse(cls, options: Mapping[str, Any], owner: str | type) -> CollectorOptions:
        """Options from keyword arguments.

        Raises:
            TypeError: for an unknown name, with the most similar ones first.
        """
        refuse_unknown(options, names_of(cls), owner)
        return cls(**options)

    def override(self, **changes: Any) -> CollectorOptions:
        """A copy with some options changed."""
        return replace(self, **changes)

    @property
    def delivers_whole(self) -> bool:
        """Whether complete trajectories are delivered."""
        return self.trajs_per_batch is not None or self.groups_per_batch is not None

    @property
    def most_in_progress(self) -> int | None:
        """Groups (or conversations, where those are delivered) that may be begun and not delivered; None: any."""
        return None

    @property
    def in_stream(self) -> bool:
        """Whether turns of conversations are taken in the order in which they end."""
        return self.delivers_whole if self.async_envs is None else self.async_envs

    @property
    def stores_rows(self) -> bool:
        """Whether an element of a replay buffer is the part of a batch that one environment took."""
        return False


@dataclass(frozen=True, kw_only=True)
class ConversationOptions(CollectorOptions):
    """The options of a collector of conversations, as its rollout and its delivery read them; a frame is a turn.

    Users know them by other names: see :class:`~rollwright.collectors.llm.options.LLMOptions`.

    Attributes:
        frames_per_batch: None: one turn of each environment.
        async_envs: take turns in the order in which they end, ``[N]``; False: one of each environment in turn,
            ``[*env, T]``. None: True for a pool whose environments go by themselves, and where complete conversations
            are delivered.
        groups_per_batch: deliver this many complete groups at a time: all conversations that begin with one prompt.
        only_last_steps: deliver the last frame of each trajectory alone.
        flatten_data: deliver ``[N]`` in place of ``[*env, T]``.
        weight_update_mode: when an engine loads new weights; see :meth:`Engine.update_weights`.
        weight_update_cache: what becomes of its cache.
        leave_out: entries that records do not have.
        num_shards: collectors that share the groups of the data; ``worker_idx`` says which part is this one's.
        trace: folder that conversations are written into.
        keep_group: decides which complete groups are delivered.
        max_oversampling: groups that are taken for each that is delivered, at most.
        max_policy_lag: versions that the oldest token may be behind at delivery, in one process; None: any number.
        policy_lag: how that is kept.
        delivery_order: of complete conversations and groups.
        on_error: what becomes of a conversation that fails.
        max_retries: how often it is tried again before.
        max_failures: that may follow one another, before the run stops.
    """

    frames_per_batch: Annotated[int | None, whole(1, floats=True), PER_WORKER] = None  # type: ignore[assignment]
    async_envs: bool | None = None  # type: ignore[misc]
    groups_per_batch: Annotated[int | None, whole(1)] = None  # type: ignore[misc]
    only_last_steps: bool = False  # type: ignore[misc]
    flatten_data: bool = False  # type: ignore[misc]
    weight_update_mode: UpdateMode = "in_flight"
    weight_update_cache: CacheMode = "keep"
    leave_out: Sequence[NestedKey] = ()  # type: ignore[misc]
    num_shards: Annotated[int, whole(1)] = 1  # type: ignore[misc]
    trace: str | None = None  # type: ignore[misc]
    keep_group: Callable[[TensorDictBase], bool | str | None] | None = None  # type: ignore[misc]
    max_oversampling: float = 10.0  # type: ignore[misc]
    max_policy_lag: Annotated[int | None, whole(0)] = None  # type: ignore[misc]
    policy_lag: Literal["wait", "drop"] = "wait"  # type: ignore[misc]
    delivery_order: Literal["completion", "data"] = "completion"  # type: ignore[misc]
    on_error: Literal["raise", "drop", "mask"] = "raise"  # type: ignore[misc]
    max_retries: Annotated[int, whole(0)] = 0  # type: ignore[misc]
    max_failures: Annotated[int, whole(1)] = 32  # type: ignore[misc]

    @property
    def most_in_progress(self) -> int | None:
        """Groups (or conversations, where those are delivered) that may be begun and not delivered; None: any."""
        if self.max_policy_lag is None:
            return None
        return (self.max_policy_lag + 1) * (self.groups_per_batch or self.trajs_per_batch or 1)

    @property
    def stores_rows(self) -> bool:
        """Whether an element of a replay buffer is the part of a batch that one environment took."""
        return self.replay_buffer is not None and not self.flatten_data and not self.delivers_whole


_METHODS = ("extend", "add", "sample")
_AGAINST_TRAJS = {
    "split_trajs": "it pads the pieces of trajectories that one rollout holds. Drop split_trajs",
    "compact_obs": "what it leaves out is kept once a rollout, and a trajectory spans several. Drop compact_obs",
    "return_same_td": "it overwrites frames that are held until their trajectory ends. Drop return_same_td",
}
_AGAINST_BUFFERS = {
    "compact_obs": "what it leaves out of the frames is kept in a table beside each batch, which a buffer has no rows "
    "for. Drop compact_obs",
    "split_trajs": "padding would be stored as if it were frames. Drop split_trajs, and sample slices, or pass "
    "trajs_per_batch",
    "return_same_td": "with a buffer, nothing is returned. Drop return_same_td",
}


def check_delivery(options: CollectorOptions) -> None:
    """Test the options on trajectories and buffers.

    Raises:
        ValueError: options contradict one another, or a value is none of those known.
        TypeError: ``replay_buffer`` is none.
    """
    if options.trajs_per_batch is not None and options.groups_per_batch is not None:
        raise ValueError(
            f"trajs_per_batch={options.trajs_per_batch} and groups_per_batch={options.groups_per_batch} both say how "
            "many complete conversations are delivered at a time. Drop one of the two."
        )
    if options.delivers_whole:
        _check_trajectories(options)
    elif options.traj_format != "padded":
        raise ValueError(
            f"traj_format={options.traj_format!r} says how complete trajectories are delivered, and trajs_per_batch is "
            "None. Pass trajs_per_batch=, or drop traj_format."
        )
    if options.trajs_per_write is not None and not (options.delivers_whole and options.replay_buffer is not None):
        raise ValueError(
            f"trajs_per_write={options.trajs_per_write} says how many complete trajectories are written at a time. "
            "Pass trajs_per_batch= and replay_buffer= with it, or drop it."
        )
    if options.replay_buffer is not None:
        _check_buffer(options)
    elif not options.extend_buffer:
        raise ValueError("extend_buffer=False says how a buffer is written, and replay_buffer is None. Pass one.")


def _check_trajectories(options: CollectorOptions) -> None:
    _refuse("trajs_per_batch" if options.groups_per_batch is None else "groups_per_batch", options, _AGAINST_TRAJS)
    if not options.track_traj_ids:
        raise ValueError(
            "trajs_per_batch needs trajectory ids, and track_traj_ids is False. Drop one of the two options."
        )
    if not options.reset_when_done:
        raise ValueError(
            "trajs_per_batch delivers trajectories that ended, and reset_when_done=False goes on after the end under "
            "the same id. Drop one of the two options."
        )


def _check_buffer(options: CollectorOptions) -> None:
    buffer = options.replay_buffer
    missing = [name for name in _METHODS if not callable(getattr(buffer, name, None))]
    if missing or isinstance(buffer, type):
        lacks = "is a class" if isinstance(buffer, type) else f"has no {'(), '.join(missing)}()"
        raise TypeError(
            f"replay_buffer: expected a replay buffer, with extend(), add() and sample(), got {buffer!r}, which "
            f"{lacks}. Pass a rollwright.data.ReplayBuffer."
        )
    _refuse("replay_buffer", options, _AGAINST_BUFFERS)
    buffer_of(options)
    if options.delivers_whole:
        if storage_ndim(buffer) > 1:
            raise ValueError(
                "trajs_per_batch writes trajectories of any length one after another, and the storage of replay_buffer "
                f"has ndim={storage_ndim(buffer)}, hence rows of one length. Make the storage with ndim=1, the default."
            )
        if options.traj_format == "cat" and options.groups_per_batch is None:
            raise ValueError("traj_format has no effect with replay_buffer: trajectories are written flat. Drop it.")
    if not options.extend_buffer:
        if options.trajs_per_batch is not None:
            raise ValueError(
                "extend_buffer=False writes every step when it was taken, and trajs_per_batch holds it until its "
                "trajectory ends. Drop one of the two options."
            )
        if options.set_truncated:
            raise ValueError(
                "set_truncated marks the last frame of a rollout, which extend_buffer=False has written by then. Drop "
                "one of the two options."
            )


def _refuse(option: str, options: CollectorOptions, reasons: dict[str, str]) -> None:
    for name, reason in reasons.items():
        if getattr(options, name):
            raise ValueError(f"{option} and {name} contradict one another: {reason}.")


def storage_ndim(buffer: Any) -> int:
    """Number of dimensions of the storage of a buffer (of an ensemble: the most of its members); 1 if unknown."""
    members = getattr(buffer, "members", [buffer])
    return max(int(getattr(getattr(member, "storage", None), "ndim", 1)) for member in members)


def is_service(buffer: Any) -> bool:
    """Whether a buffer is in a process of its own, which writers on any machine reach."""
    return hasattr(buffer, "as_writer")


def write_count_of(buffer: Any) -> int | None:
    """Elements written to a buffer so far; None: it does not count, or is in a service that is gone."""
    ask = getattr(buffer, "num_given", lambda: getattr(buffer, "write_count", None))
    found: int | None = _unless_gone(buffer, ask)
    return found


def _unless_gone(buffer: Any, ask: Callable[[], Any]) -> Any:
    """An answer of a buffer; None: it is in a service that is gone."""
    try:
        return ask()
    except (RuntimeError, OSError):  # of a service: other buffers do not raise
        if is_service(buffer):
            return None
        raise


def stats_of_buffer(buffer: Any) -> dict[str, Any]:
    """What ``stats()`` of a collector has about its buffer."""
    fill = {"buffer": _unless_gone(buffer, buffer.stats)} if hasattr(buffer, "stats") else {}  # others' have none
    return {"write_count": write_count_of(buffer), **fill}


def draws_slices(buffer: Any) -> bool:
    """Whether the sampler of a buffer draws stretches of trajectories."""
    found = getattr(buffer, "draws_slices", None)
    return isinstance(getattr(buffer, "sampler", None), SliceSampler) if found is None else bool(found)


def ledger_of(buffer: Any) -> Any:
    """Where the writers of a buffer (of an ensemble: of all members) take trajectory ids; None if it has no such."""
    ledger = getattr(getattr(getattr(buffer, "members", [buffer])[0], "storage", None), "ledger", None)
    return ledger if hasattr(ledger, "take_ids") else None


def buffer_of(options: CollectorOptions) -> Any:
    """Where a collector writes: its replay buffer, or the member of an ensemble that is its own.

    Raises:
        ValueError: nothing names the member.
    """
    buffer: Any = options.replay_buffer
    worker = options.worker_idx
    members = getattr(buffer, "members", None)
    if members is None or buffer.routing_key is not None or buffer.routing_dim is not None:
        return buffer
    if worker is None or worker >= len(members):
        raise ValueError(
            f"replay_buffer: worker i writes to member i of an ensemble, which has {len(members)}, and this collector "
            f"has worker_idx={worker}. Pass worker_idx= of 0 to {len(members) - 1}, or the member itself."
        )
    return members[worker]


def add_filler(buffer: Any, raise_error: Callable[[], None]) -> None:
    """Let who only watches a buffer learn what has ended a collector's work in the background; see :class:`Fillers`."""
    for member in getattr(buffer, "members", (buffer,)):
        fillers = getattr(member, "fillers", None)
        if fillers is not None:
            fillers.add(raise_error)


def warn_of_splits(owner: str) -> None:
    """Warn of what ``split_trajs=True`` does."""
    warn_user(
        f"{owner}: split_trajs=True pads trajectories, and cuts them where batches end. Take batches as they are "
        "(the default), which tell trajectories apart by ('collector', 'traj_ids'), or pass trajs_per_batch= for whole "
        "ones.",
        UserWarning,
    )


def warn_of_options(owner: str, options: CollectorOptions) -> None:
    """Warn of options that do something else than a user may expect."""
    if options.split_trajs:
        warn_of_splits(owner)
    if options.postproc is not None and not options.extend_buffer:
        warn_user(
            f"{owner}: postproc works on whole rollouts, and with extend_buffer=False is not called. Give the replay "
            "buffer a transform instead, or pass extend_buffer=True.",
            UserWarning,
        )
