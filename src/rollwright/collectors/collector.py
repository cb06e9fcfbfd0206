"""Collector: delivers batches of experience, collected in this process."""

from __future__ import annotations

import inspect
import warnings
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

from tensordict import TensorDictBase, is_tensor_collection

from rollwright._keys import is_private
from rollwright.collectors import _resume
from rollwright.collectors import weights as weight_forms
from rollwright.collectors._core import RolloutCore
from rollwright.collectors._paths import resolve
from rollwright.collectors.options import CollectorOptions
from rollwright.collectors.profiling import RolloutProfiler
from rollwright.data.layout import split_trajectories

__all__ = ["Collector"]


class Collector(RolloutCore):
    """Collects experience in this process.

    Args:
        create_env_fn: an environment, or a callable that makes one.
        policy: a callable on TensorDicts, a ``TensorDictModule``, an ``nn.Module`` whose ``forward`` takes entries of
            the environment by name, or None for random actions.
        **options: those of :class:`~rollwright.collectors.CollectorOptions`.

    Yields:
        TensorDicts ``[*env, T]``, ``T = ceil(frames_per_batch / number of environments)``, the last dimension named
        ``"time"``. The root holds what the policy saw and did; ``"next"`` holds what came of it, with the true last
        observation where a trajectory ended. ``("collector", "traj_ids")`` int64 ``[*env, T]`` tells trajectories
        apart; a trajectory may go on in the next batch. Each batch has memory of its own (unless ``return_same_td``).

    Raises:
        ValueError, TypeError: an option is wrong, or two of them contradict one another.
        EnvError, PolicyError: the environment or the policy broke its contract; the message says how.

    Example:
        >>> from rollwright.envs import GymEnv
        >>> with Collector(lambda: GymEnv("CartPole-v1"), frames_per_batch=64, total_frames=128) as collector:
        ...     for batch in collector:
        ...         print(batch.shape, batch.names, batch["next", "reward"].shape)
        torch.Size([64]) ['time'] torch.Size([64, 1])
        torch.Size([64]) ['time'] torch.Size([64, 1])
    """

    _profiler: RolloutProfiler | None = None
    _has_warned_of_unsaved = False

    # Delivery ---------------------------------------------------------------------------------

    def iterator(self) -> Iterator[TensorDictBase]:
        """Yield batches until ``total_frames`` are delivered, from wherever the collector stands."""
        while not self.completed:
            yield self._deliver()

    @property
    def completed(self) -> bool:
        """Whether ``total_frames`` were stepped."""
        return self._frames >= self.total_frames

    def _deliver(self) -> TensorDictBase:
        self._check_open()
        self._started = True
        self._start_profiler()
        with self._timer.running():
            batch = self.rollout()
            self._frames += self._taken  # what was stepped, whatever becomes of it
            self._timer.frames += self._taken
        try:
            with self._timer.running():
                batch = self._shape(batch)
            self._iter += 1
            if self._post_collect_hook is not None:
                self._post_collect_hook(batch)
        except BaseException:
            self._path.carrier = None  # nobody gets these steps: no trajectory goes on across the hole
            raise
        if self._profiler is not None:
            self._profiler.step()
        return batch

    def _shape(self, batch: TensorDictBase) -> TensorDictBase:
        """Split, post-process, and drop private entries."""
        if self.options.split_trajs:
            batch = self._split(batch)
        if self.options.postproc is not None:
            batch = self.options.postproc(batch)
            if not is_tensor_collection(batch):
                raise TypeError(
                    f"postproc: expected it to return a TensorDict, got {type(batch).__name__}. Let it return one."
                )
            private = [key for key in batch.keys(True) if is_private(key)]
            batch = batch.exclude(*private) if private else batch
        return batch

    def _split(self, batch: TensorDictBase) -> TensorDictBase:
        return split_trajectories(batch, prefix="collector")

    def __len__(self) -> int:
        if self._counts.batches is None:
            raise RuntimeError(
                "This collector has no end (total_frames=-1), hence no length. Pass total_frames= to set one."
            )
        return self._counts.batches

    # State ------------------------------------------------------------------------------------

    def state_dict(self) -> OrderedDict[str, Any]:
        """What it takes to go on from here, bit for bit, in this process or another; for use between batches.

        ``torch.load(..., weights_only=True)`` reads it. Saving changes nothing in the run.

        Returns:
            ``policy_state_dict`` (where the policy is a module) and ``env_state_dict``, both of them live and no
            copies, as everywhere in torch; ``frames``, ``iter``, ``policy_version``, ``traj_pool`` (the next
            trajectory id) and ``episodes`` (statistics); ``env_checkpoint`` (all that the environment is, its
            random generators included), ``trajectories`` (what the next step is taken from; None where the
            environment cannot be saved) and ``first_reset`` (for :meth:`set_seed` before the first batch);
            ``streams`` (the global generators of torch, NumPy and Python); ``unsaved``: a line for each thing that
            could not be saved.

        Warns:
            UserWarning: something could not be saved; once for each collector.

        Example:
            >>> from rollwright.envs import GymEnv
            >>> first, second = (Collector(lambda: GymEnv("CartPole-v1"), frames_per_batch=32) for _ in range(2))
            >>> _ = first.next()
            >>> state = first.state_dict()
            >>> expected = first.next()
            >>> second.load_state_dict(state)
            >>> bool((second.next() == expected).all())
            True
        """
        state = _resume.save(self)
        if state["unsaved"] and not self._has_warned_of_unsaved:
            self._has_warned_of_unsaved = True
            anew = "begins its environment anew, with new trajectory ids"
            loses = anew if state["trajectories"] is None else "goes on without it"
            warnings.warn(
                f"state_dict: not all can be saved, and a collector that loads this state {loses}. "
                f"{'; '.join(state['unsaved'])}.",
                UserWarning,
                stacklevel=2,
            )
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], **kwargs: Any) -> None:
        """Go on from a saved state.

        The next batch of a collector that was made with the same arguments and has stepped nothing is, to the bit,
        the one that the saved collector delivered next. A collector that has stepped gives new ids to the
        trajectories that it goes on with, for it may have used theirs. Trajectories begin anew where the
        environment was not saved (``unsaved`` names it) or was of another make.

        .. warning:: The state of an environment is pickled, and loading it can run any code. Load only what you trust.

        Args:
            state_dict: of :meth:`state_dict`.
            **kwargs: go to ``load_state_dict`` of policy and environment (``strict=False``).

        Raises:
            KeyError: it is the state of something else.
            EnvError: a class of the environment is not there under its name.

        Warns:
            UserWarning: the environment is of another make than the one that was saved.
        """
        _resume.load(self, state_dict, **kwargs)

    # Weights ----------------------------------------------------------------------------------

    def update_policy_weights_(
        self,
        policy_or_weights: Any = None,
        /,
        *,
        weights: Any = None,
        policy: Any = None,
        weights_dict: Mapping[str, Any] | None = None,
        model_id: str | None = None,
        worker_ids: Any = None,
    ) -> int:
        """See :meth:`BaseCollector.update_policy_weights_`; the next batch acts with the new weights."""
        update = weight_forms.parse_update(
            weight_forms.pick_weights(policy_or_weights, weights, policy),
            weights_dict=weights_dict,
            model_id=model_id,
            worker_ids=worker_ids,
            own={self._worker_idx or 0, self.policy_device},
            fallback=self._policy_source,
        )
        ready = [weight_forms.prepare(self.get_model(name), new, name) for name, new in update.items()]
        for apply in ready:
            apply()
        return self.increment_version()

    def receive_weights(self, policy_or_weights: Any = None, /, *, weights: Any = None, policy: Any = None) -> None:
        """Same as :meth:`update_policy_weights_`, for the receiving end; returns nothing."""
        self.update_policy_weights_(weight_forms.pick_weights(policy_or_weights, weights, policy))

    def get_model(self, model_id: str) -> Any:
        """The model that an id names: ``"policy"``, a path from the collector, or a part of the policy (``"actor"``).

        Raises:
            ValueError: there is no such model.
        """
        if model_id == "policy":
            return self.policy
        try:
            return resolve(self, model_id)
        except AttributeError:
            try:
                return resolve(self.policy, model_id)
            except AttributeError as error:
                raise ValueError(
                    f"model_id: expected 'policy', a part of it, or a path from the collector such as 'env.transform', "
                    f"got {model_id!r}. {error}"
                ) from error

    @property
    def policy_version(self) -> int:
        """Number of updates of the weights so far."""
        return self._policy_version

    def get_policy_version(self) -> int:
        """Same as :attr:`policy_version`."""
        return self._policy_version

    def increment_version(self) -> int:
        """Count an update of the weights; returns the new version."""
        self._policy_version += 1
        return self._policy_version

    # Observation ------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Counts, rates and episodes; ``json.dumps`` takes it.

        Returns:
            ``frames``, ``batches`` (delivered), ``total_frames``, ``total_batches`` (None without an end),
            ``completed``, ``frames_per_batch``, ``frames_per_second``, ``seconds`` by stage, ``episodes``,
            ``mean_return`` and ``mean_length`` (over the last 100), ``last_return``, ``policy_version``, ``devices``,
            ``paths`` (what runs environment and policy, and why), ``bytes_held``, ``waiting_for``.
        """
        elapsed = self._timer.total
        return {
            "frames": self._frames,
            "batches": self._iter,
            "total_frames": None if self._counts.batches is None else self.total_frames,
            "total_batches": self._counts.batches,
            "completed": self.completed,
            "frames_per_batch": self.frames_per_batch,
            "frames_per_second": self._timer.frames / elapsed if elapsed else None,
            "seconds": {"total": elapsed, **self._timer.seconds},
            **self._episodes.summary(),
            "policy_version": self._policy_version,
            "devices": {name: None if device is None else str(device) for name, device in vars(self.devices).items()},
            "paths": dict(self._path.how),
            "bytes_held": self._memory.num_bytes,
            "waiting_for": None,
        }

    def getattr_env(self, attr: str) -> Any:
        """An attribute of the environment."""
        return resolve(self.env, attr)

    def getattr_policy(self, attr: str) -> Any:
        """An attribute of the policy."""
        return resolve(self.policy, attr)

    def _start_profiler(self) -> None:
        config = self._profile_config
        if config is not None and self._profiler is None:
            self._profiler = RolloutProfiler(config, self._worker_idx or 0)
        if self._profiler is not None:
            self._profiler.start()

    def disable_profile(self) -> None:
        """Trace no (further) rollouts; what was recorded is written."""
        super().disable_profile()
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler = None

    def shutdown(self, timeout: float | None = None, close_env: bool = True, raise_on_error: bool = True) -> None:
        """Close the environment and write what a profiler has recorded. May be called again.

        Args:
            timeout: no effect in one process.
            close_env: close the environment too.
            raise_on_error: if False, an error of the environment's ``close`` is dropped.
        """
        if self.closed:
            return
        self.closed = True
        try:
            self.disable_profile()
            if close_env:
                self.env.close(raise_if_closed=False)
        except Exception:
            if raise_on_error:
                raise

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(\n    env={self.env},\n    policy={self.policy},\n"
            f"    frames_per_batch={self.frames_per_batch}, total_frames={self.total_frames},\n"
            f"    devices={self.devices},\n    paths={self._path.how},\n)"
        )


_first, *_rest = inspect.signature(Collector.__init__).parameters.values()
Collector.__signature__ = inspect.Signature([*_rest[:2], *CollectorOptions.parameters()])  # type: ignore[attr-defined]
