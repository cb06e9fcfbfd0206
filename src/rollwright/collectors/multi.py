"""MultiCollector: experience from several processes at a time."""

from __future__ import annotations

import inspect
import pickle
import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Integral
from typing import Any

import torch
from torch import nn

from rollwright._processes.channel import ByValue
from rollwright.collectors import weights as weight_forms
from rollwright.collectors._multi_core import MultiCore
from rollwright.collectors._paths import resolve
from rollwright.collectors.base import PostHook, PreHook
from rollwright.collectors.options import CollectorOptions
from rollwright.collectors.workers.observing import merged_stats
from rollwright.collectors.workers.options import WorkerOptions
from rollwright.collectors.workers.words import Word
from rollwright.errors import WorkerError

__all__ = ["MultiAsyncCollector", "MultiCollector", "MultiSyncCollector"]

_LAG_S = 60.0


class MultiCollector(MultiCore):
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

    _signatures: dict[tuple[int, str], Any]

    def __new__(cls, *args: Any, **kwargs: Any) -> MultiCollector:
        """Choose the class by ``sync``."""
        if cls is MultiCollector:
            cls = MultiSyncCollector if kwargs.get("sync") is True else MultiAsyncCollector
        return super().__new__(cls)

    def __init__(self, create_env_fn: Any, policy: Any = None, **options: Any) -> None:
        self._signatures = {}
        super().__init__(create_env_fn, policy, **options)

    # Weights ----------------------------------------------------------------------------------

    def _update_weights(
        self, given: Any, *, weights_dict: Mapping[str, Any] | None, model_id: str | None, worker_ids: Any
    ) -> int:
        """Publish an update; the weights are copied here.

        A worker takes them between two steps: it acts with one version or with the next, never with a mixture. With
        ``max_policy_lag`` and ``policy_lag="wait"``, waits for workers whose rollout would be too stale.
        """
        self._check_open()
        self._raise_of_runner()
        updates = weight_forms.parse_update_for_workers(
            given,
            weights_dict=weights_dict,
            model_id=model_id,
            worker_ids=worker_ids,
            num_workers=self.num_workers,
            devices=self._devices(),
            fallback=self._policy if isinstance(self._policy, nn.Module) else None,
            signature=self._signature,
            state_of=lambda name, weights: self._publisher.scheme(name).state_of(weights, name),
        )
        return self._publish(updates)

    def _version_now(self) -> int:
        return self._version

    def _received(self) -> None:
        self._update_weights(None, weights_dict=None, model_id=None, worker_ids=None)

    def _publish(self, updates: Sequence[Any]) -> int:
        meant = {
            i for update in updates for i in (range(self.num_workers) if update.workers is None else update.workers)
        }
        with self._publishing, self._none_too_stale(meant):
            version = self._version + 1
            self._publisher.publish(updates, version)
            self._version = version
            for index in meant:
                self._group.workers[index].words.whole[Word.PUBLISHED] = version
        return version

    @contextmanager
    def _none_too_stale(self, meant: set[int]) -> Iterator[None]:
        """Publish to some workers when no rollout that another thread waits for will be staler than it may be."""
        limit, schedule = self.own_options.max_policy_lag, self._schedule
        if limit is None or self.own_options.policy_lag != "wait":
            yield
            return

        def fresh() -> bool:
            oldest = self._group.oldest_versions() + schedule.oldest_versions()
            late = [first for worker, first in oldest if worker in meant and self._version + 1 - first > limit]
            return not late or not schedule.is_awaited()

        schedule.held += 1
        try:
            self._group.wait(fresh, _LAG_S, lambda: f"rollouts to end that are max_policy_lag={limit} versions old")
            yield
        finally:
            schedule.held -= 1
            self._group.wake()

    def _signature(self, worker: int, model_id: str) -> Any:
        """What a model takes, in a worker; asked once."""
        key = (worker, model_id)
        while key not in self._signatures:
            try:
                self._signatures[key] = self._group.call("describe_model", [((model_id,), {})], workers=[worker])[0]
            except WorkerError as error:  # the worker may have been killed meanwhile: ask the one in its place
                if error.remote_type or not self._group.is_replaced(worker):
                    raise
        return self._signatures[key]

    def _devices(self) -> list[Any]:
        told = [worker.ready for worker in self._group.workers]
        return [None if ready is None else torch.device(ready.policy_device or "cpu") for ready in told]

    def get_model(self, model_id: str) -> Any:
        """The model that an id names, as far as it is known in this process: the policy that was passed.

        Raises:
            ValueError: it is another, which the workers have.
        """
        if model_id == "policy" and self._policy is not None:
            return self._policy
        try:
            return resolve(self._policy, model_id)
        except AttributeError as error:
            raise ValueError(f"model_id: {model_id!r} is not known in this process, only in its workers.") from error

    @property
    def policy_version(self) -> int:
        """Number of updates of the weights so far."""
        return self._version

    def get_policy_version(self) -> int:
        """Same as :attr:`policy_version`."""
        return self._version

    def increment_version(self) -> int:
        """Count an update of the weights; returns the new version."""
        return self._publish([weight_forms.Update(None, {})])

    # State ------------------------------------------------------------------------------------

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed the environments and the global generators of all workers, and begin anew with the next batch.

        Args:
            seed: of the first environment of the first worker; further ones get ``seed + 1`` and so on.
            static_seed: give all environments the same seed.

        Returns:
            The seed of the last environment.
        """
        if not isinstance(seed, Integral) or isinstance(seed, bool):
            raise TypeError(f"seed: expected an integer, got {type(seed).__name__}: {seed!r}.")
        last = int(seed)
        for index in range(self.num_workers):
            [last] = self._call_between("set_seed", [((int(seed), static_seed), {})], workers=[index])
            seed = seed if static_seed else last + 1
        self._forget()
        return last

    def _forget(self) -> None:
        """Drop what was collected before the workers were told something, and not delivered."""
        self._schedule.forget({worker.index: worker.num_told for worker in self._group.workers})

    def reset(self, index: Any = None, **kwargs: Any) -> None:
        """Begin new trajectories in all workers.

        Args:
            index: of workers, one or a list; None for all.
            **kwargs: go to the environments' ``reset``.
        """
        chosen = None if index is None else list(index) if isinstance(index, list | tuple) else [index]
        strangers = [i for i in chosen or () if i not in range(self.num_workers)]
        if strangers:
            raise IndexError(f"reset: index: expected workers of 0 to {self.num_workers - 1}, got {strangers}.")
        count = self.num_workers if chosen is None else len(chosen)
        self._call_between("reset", [((), kwargs)] * count, workers=chosen)

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
            KeyError: it is the state of something else.
        """
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
        for worker, name in zip(self._group.workers, names, strict=True):  # also for one that takes its place
            worker.words.whole[Word.PUBLISHED] = self._version
            weights = state_dict[name].get("policy_state_dict")
            if weights is not None:
                self._publisher.publish([weight_forms.Update([worker.index], {"policy": dict(weights)})], self._version)

    def _call_between(self, path: str, args: Sequence[Any], workers: Sequence[int] | None = None) -> list[Any]:
        """Call something in workers, not in the middle of a rollout."""
        self._check_open()
        self._raise_of_runner()
        stored = self.options.replay_buffer is not None
        return self._group.call(path, args, workers=workers, between_batches=True, cut=stored)

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

        Args:
            method_name: or a path, such as ``"env.step_count"``.
            list_of_args: positional arguments for each worker.
            list_of_kwargs: named ones.
        """
        for name, given in (("list_of_args", list_of_args), ("list_of_kwargs", list_of_kwargs)):
            if given is not None and len(given) != self.num_workers:
                raise ValueError(f"{name}: expected an entry for each of {self.num_workers} workers, got {len(given)}.")
        args = [()] * self.num_workers if list_of_args is None else list_of_args
        kwargs = [{}] * self.num_workers if list_of_kwargs is None else list_of_kwargs
        return self._call_between(method_name, [(tuple(a), dict(k)) for a, k in zip(args, kwargs, strict=True)])

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
        return self._group.call(attr, [None] * self.num_workers)

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
        self._call_between("set_hook", [((name, hook), {})] * self.num_workers)
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
            self._call_between("disable_profile", [((), {})] * self.num_workers)

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


_own = [p for p in inspect.signature(MultiCollector.__init__).parameters.values() if p.name != "self"]
MultiCollector.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    [*_own[:2], *WorkerOptions.parameters(), *CollectorOptions.parameters()]
)
