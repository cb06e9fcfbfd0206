"""MultiCollector: experience from several processes at a time."""

from __future__ import annotations

import pickle
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any, Self, Unpack

from rollwright._options import with_options
from rollwright._processes.channel import ByValue
from rollwright.collectors.arguments import checked_seed, checked_state
from rollwright.collectors.base import PostHook, PreHook
from rollwright.collectors.factory import register_backend
from rollwright.collectors.options import CollectorOptions
from rollwright.collectors.weights import updates as weight_forms
from rollwright.collectors.weights.workers import WorkersWeights
from rollwright.collectors.workers.counters import Word
from rollwright.collectors.workers.options import WorkerOptions
from rollwright.collectors.workers.stats import merged_stats

if TYPE_CHECKING:
    from rollwright.collectors.keywords import MultiKeywords
    from rollwright.collectors.rollout.environment import EnvMakers

__all__ = ["MultiAsyncCollector", "MultiCollector", "MultiSyncCollector"]


_SAMPLES = {"list_of_args": "(3,)", "list_of_kwargs": "{'key': 3}"}


@with_options(WorkerOptions, CollectorOptions)
class MultiCollector(WorkersWeights):
    """Collects experience in several processes, each with an environment and a policy of its own.

    ``MultiCollector(..., sync=True)`` is a :class:`MultiSyncCollector`, ``MultiCollector(..., sync=False)``, the
    default, a :class:`MultiAsyncCollector`.

    Args:
        create_env_fn: makes an environment, in a worker; or a list of such functions, one for each worker.
        policy: as of :class:`Collector`; each worker acts with a copy, see :meth:`update_policy_weights_`.
        **options: those of :class:`~rollwright.collectors.workers.options.WorkerOptions` and of
            :class:`~rollwright.collectors.CollectorOptions`. ``frames_per_batch``, ``policy_factory``, devices and
            ``create_env_kwargs`` may be lists, one for each worker.

    Raises:
        ValueError, TypeError: an option is wrong, or two of them contradict one another.
        WorkerError: a worker could not make its environment or its policy. It is an instance of the original error's
            class too.

    Example:
        >>> from rollwright.envs import GymEnv
        >>> make_env = lambda: GymEnv("CartPole-v1")
        >>> with MultiCollector([make_env] * 2, frames_per_batch=64, total_frames=128, sync=True) as collector:
        ...     for batch in collector:
        ...         print(batch.shape, batch.names)
        torch.Size([2, 32]) [None, 'time']
        torch.Size([2, 32]) [None, 'time']
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Choose the class by ``sync``."""
        kinds = {True: MultiSyncCollector, False: MultiAsyncCollector}
        kind: Any = kinds[kwargs.get("sync") is True] if cls is MultiCollector else cls
        made: Self = super().__new__(kind)
        return made

    def __init__(
        self,
        create_env_fn: EnvMakers,
        policy: Callable[..., Any] | None = None,
        **options: Unpack[MultiKeywords],
    ) -> None:
        super().__init__(create_env_fn, policy, **options)

    interruptor: None = None
    """Of one process; what interrupts workers is :attr:`preemptive_threshold`."""

    @property
    def preemptive_threshold(self) -> float:
        """Share of the workers that a synchronous batch waits for; 1.0: all."""
        given = self.own_options.preemptive_threshold
        return 1.0 if given is None else float(given)

    # State ------------------------------------------------------------------------------------

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed the environments and the global generators of all workers, and begin anew with the next batch.

        Args:
            seed: of the first environment of the first worker; further ones get ``seed + 1`` and so on.
            static_seed: give all environments the same seed.

        Returns:
            The seed of the last environment.
        """
        seed = last = checked_seed(seed)
        for index in range(self.num_workers):
            [last] = self._call_between("set_seed", [((seed, static_seed), {})], workers=[index])
            seed = seed if static_seed else last + 1
        self._forget()
        return last

    def _forget(self) -> None:
        """Drop what was collected before the workers were told something, and not delivered."""
        self._schedule.forget({worker.index: worker.num_told for worker in self._group.workers})

    def reset(self, index: Any = None, **kwargs: Any) -> None:
        """Begin new trajectories in all workers; complete ones that are held (``trajs_per_batch``) are dropped.

        Args:
            index: of workers, one or a list; None for all.
            **kwargs: go to the environments' ``reset``.

        Raises:
            TypeError, IndexError: there is no such worker.
        """
        chosen = None if index is None else list(index) if isinstance(index, list | tuple) else [index]
        expected = f"reset: index: expected workers of 0 to {self.num_workers - 1}, one or a list"
        if any(not isinstance(i, Integral) or isinstance(i, bool) for i in chosen or ()):
            raise TypeError(f"{expected}, got {index!r}. Pass None for all.")
        if any(i not in range(self.num_workers) for i in chosen or ()):
            raise IndexError(f"{expected}, got {index!r}. Pass None for all.")
        workers = None if chosen is None else sorted({int(i) for i in chosen})
        count = self.num_workers if workers is None else len(workers)
        self._call_between("reset", [((), kwargs)] * count, workers=workers)
        if workers is None and self.options.trajs_per_batch is not None:
            self._forget()

    def state_dict(self) -> OrderedDict[str, Any]:
        """See :meth:`Collector.state_dict`: that of each worker is at ``"worker0"``, ``"worker1"``...

        ``frames``, ``iter``, ``policy_version`` and ``traj_pool`` (the next trajectory id) are those of all.
        """
        states = self._call_between("state_dict", [((), {})] * self.num_workers)
        state: OrderedDict[str, Any] = OrderedDict((f"worker{i}", saved) for i, saved in enumerate(states))
        schedule = self._schedule.state_dict({worker.index: worker.num_told for worker in self._group.workers})
        state["frames"], state["iter"] = schedule["frames"], self._schedule.batches
        state["policy_version"] = self._version
        state["traj_pool"] = {"traj_id": max(int(saved["traj_pool"]["traj_id"]) for saved in states)}
        state["undelivered"] = schedule
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], **kwargs: Any) -> None:
        """Go on from a saved state, of a collector with as many workers.

        Raises:
            KeyError, TypeError: it is the state of something else, or none.
        """
        checked_state(state_dict)
        names = [f"worker{i}" for i in range(self.num_workers)]
        missing = [name for name in (*names, "frames") if name not in state_dict]
        if missing or f"worker{self.num_workers}" in state_dict:
            raise KeyError(
                f"state_dict: expected the states of {self.num_workers} workers, got {sorted(map(str, state_dict))}."
            )
        self._call_between("load_saved_state", [((state_dict[name],), kwargs) for name in names])
        self._forget()
        nothing = {"frames": state_dict["frames"], "waiting": [], "trajectories": []}
        self._schedule.load_state_dict(state_dict.get("undelivered", nothing))
        self._schedule.batches = int(state_dict.get("iter", 0))
        self._version = int(state_dict.get("policy_version", 0))
        for worker, name in zip(self._group.workers, names, strict=True):
            saved = state_dict[name]
            worker.words.whole[Word.PUBLISHED] = version = int(saved.get("policy_version", self._version))
            weights = saved.get("policy_state_dict")
            models = {} if weights is None else {"policy": dict(weights)}
            self._publisher.publish([weight_forms.Update([worker.index], models)], version)  # for its successors, too

    def _call_between(
        self, path: str, args: Sequence[Any], workers: Sequence[int] | None = None, *, again: bool = True
    ) -> list[Any]:
        """Call something in workers, not in the middle of a rollout; ``again``: if one dies of it, in the next one."""
        self._check_open()
        self._raise_of_runner()
        stored = self.options.replay_buffer is not None
        return self._group.call(path, args, workers=workers, between_batches=True, cut=stored, again=again)

    def _call_any_time(self, path: str, args: Sequence[Any], workers: Sequence[int] | None = None) -> list[Any]:
        """Call something in workers between two rollouts; inside a pause of this thread, where they rest."""
        if not self._pauses_here:
            return self._call_between(path, args, workers, again=False)
        self._check_open()
        self._raise_of_runner()
        return self._group.call(path, args, workers=workers)

    # Observation ------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Counts, rates and episodes of all workers; ``json.dumps`` takes it. At any time, from any thread.

        Returns:
            What :meth:`Collector.stats` has, summed up, and ``workers`` (for each: ``index``, ``alive``, ``pid``,
            ``state``, ``frames``, ``batches``, ``episodes``, ``seconds`` by stage, ``policy_version``, ``restarts``,
            ``waiting_for``), ``workers_alive``, ``restarts``, ``policy_lag`` (published less acting versions, the
            most), ``frames_stale`` (thrown away, see ``max_policy_lag``), ``threads``, ``leases`` (blocks of shared
            memory that the consumer holds, and batches that were copied because it holds many), ``messages``.
        """
        return merged_stats(self)

    def map_fn(
        self,
        method_name: str,
        list_of_args: Sequence[Sequence[Any]] | None = None,
        list_of_kwargs: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[Any]:
        """Call a method of each worker's collector, between two rollouts; in order of workers, what it returned.

        Inside :meth:`pause` it is called where the workers rest, which may be in the middle of a rollout.

        Args:
            method_name: or a path, such as ``"env.step_count"``.
            list_of_args: positional arguments for each worker.
            list_of_kwargs: named ones.

        Raises:
            WorkerError: it raised, or a worker ended before it had answered, even if another takes its place: it may
                have done what was called.
            TimeoutError: a worker has not answered for a minute. One that takes two for a call has failed.
        """
        for name, given in (("list_of_args", list_of_args), ("list_of_kwargs", list_of_kwargs)):
            kinds: Any = (list, tuple) if name == "list_of_args" else Mapping
            if given is not None and not (isinstance(given, Sequence) and all(isinstance(one, kinds) for one in given)):
                raise TypeError(
                    f"{name}: expected a list with a {'tuple' if name == 'list_of_args' else 'dictionary'} for each of "
                    f"{self.num_workers} workers, got {given!r}. Pass for example [{_SAMPLES[name]}] * "
                    f"{self.num_workers}."
                )
            if given is not None and len(given) != self.num_workers:
                raise ValueError(f"{name}: expected an entry for each of {self.num_workers} workers, got {len(given)}.")
        args = [()] * self.num_workers if list_of_args is None else list_of_args
        kwargs = [{}] * self.num_workers if list_of_kwargs is None else list_of_kwargs
        calls = [(tuple(a), dict(k)) for a, k in zip(args, kwargs, strict=True)]
        return self._call_any_time(method_name, calls)

    def cascade_execute(self, attr_path: str, *args: Any, **kwargs: Any) -> Any:
        """Call what a path leads to, from this collector or, where it has no such part, from each worker's.

        Returns:
            The value; of workers, a list.
        """
        if hasattr(self, re.split(r"[.\[]", attr_path, maxsplit=1)[0]):
            return super().cascade_execute(attr_path, *args, **kwargs)
        return self.map_fn(attr_path, [args] * self.num_workers, [kwargs] * self.num_workers)

    def get_distant_attr(self, attr: str) -> list[Any]:
        """What a path from each worker's collector leads to, in order of workers; read between two steps."""
        self._check_open()
        return self._group.call(attr, [None] * self.num_workers, again=True)

    def getattr_env(self, attr: str) -> list[Any]:
        """An attribute of each worker's environment."""
        return self.get_distant_attr(f"env.{attr}")

    def getattr_policy(self, attr: str) -> list[Any]:
        """An attribute of each worker's policy."""
        return self.get_distant_attr(f"policy.{attr}")

    @property
    def pre_collect_hook(self) -> PreHook | None:
        """Called without arguments before each rollout, in the workers."""
        return self._pre_collect_hook

    @pre_collect_hook.setter
    def pre_collect_hook(self, hook: PreHook | None) -> None:
        self._set_hook("pre_collect_hook", hook)

    @property
    def post_collect_hook(self) -> PostHook | None:
        """Called with each worker's batch, in the worker."""
        return self._post_collect_hook

    @post_collect_hook.setter
    def post_collect_hook(self, hook: PostHook | None) -> None:
        self._set_hook("post_collect_hook", hook)

    def _set_hook(self, name: str, hook: Any) -> None:
        changed = self.options.override(**{name: hook})  # checks it
        try:
            pickle.dumps(ByValue(hook))
        except Exception as error:  # a hook may refuse in any way it likes
            raise TypeError(f"{name}: cannot be sent to a worker process: {type(error).__name__}: {error}.") from error
        self._call_any_time("set_hook", [((name, hook), {})] * self.num_workers)
        self._schedule.forgive()
        self.options = changed
        self._group.change_options(**{name: hook})
        setattr(self, f"_{name}", hook)

    def enable_profile(self, **options: Any) -> None:
        """Trace the first rollouts of some workers; see :class:`~rollwright.collectors.ProfileConfig`."""
        super().enable_profile(**options)
        config = self._profile_config
        chosen = [] if config is None else sorted(set(config.workers))
        strangers = [worker for worker in chosen if worker not in range(self.num_workers)]
        if strangers:
            self._profile_config = None
            raise ValueError(f"workers: expected some of 0 to {self.num_workers - 1}, got {strangers}.")
        self._call_between("profile", [((config,), {})] * len(chosen), workers=chosen)

    def disable_profile(self) -> None:
        """Trace no (further) rollouts; what was recorded is written."""
        super().disable_profile()
        if not self.closed:
            self._call_any_time("disable_profile", [((), {})] * self.num_workers)

    def __repr__(self) -> str:
        ready = self._group.workers[0].ready
        return (
            f"{type(self).__name__}(\n    num_workers={self.num_workers},\n"
            f"    worker0: {'' if ready is None else ready.description},\n"
            f"    frames_per_batch={self.frames_per_batch}, total_frames={self.total_frames},\n)"
        )


class MultiSyncCollector(MultiCollector):
    """A :class:`MultiCollector` whose batches are of all workers: one rollout of each, ``[W, *env, T]``.

    All rollouts of a batch begin with the same version of the weights. Two runs with the same seed are equal to the
    bit.
    """

    _sync = True


class MultiAsyncCollector(MultiCollector):
    """A :class:`MultiCollector` whose batches are of one worker each, ``[*env, T]``, first come, first served.

    Workers go on while the consumer has a batch; each is at most two rollouts ahead.
    """

    _sync = False


register_backend("process", "multiprocessing", make=MultiCollector)
