"""Evaluator: evaluation rollouts in a thread or a process, beside training; its arguments, checked."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, Unpack

from tensordict import TensorDictBase
from torch import nn

from rollwright._keys import NestedKey, as_tuple, unravel
from rollwright._memory import Segment
from rollwright._options import check_fields, refuse_unknown, whole, with_options
from rollwright._processes.start import check_start_method
from rollwright._warnings import warn_user
from rollwright.collectors.core import checked_state
from rollwright.collectors.evaluation.backends import (
    Backend,
    Evaluation,
    EvaluationQueue,
    ProcessStart,
    ThreadBackend,
    process_backend,
)
from rollwright.collectors.evaluation.episodes import (
    EvaluationProgress,
    EvaluationRequest,
    Settings,
    copy_of,
    with_item,
)
from rollwright.collectors.options import CollectorOptions
from rollwright.collectors.rollout.policy import copied_policy, never_copied_in
from rollwright.envs.base import EnvBase
from rollwright.envs.factories import EnvFunction, GymnasiumEnv
from rollwright.envs.foreign import is_env
from rollwright.envs.utils import ExplorationType
from rollwright.weight_update.forms import tensordict_of

if TYPE_CHECKING:
    from rollwright.collectors.keywords import EvaluatorKeywords

EVALUATOR_OPTIONS = (  # of CollectorOptions: those that leave an evaluation what it is
    "auto_register_policy_transforms",
    "create_env_kwargs",
    "device",
    "env_device",
    "frames_per_batch",
    "no_cuda_sync",
    "policy_device",
    "post_collect_hook",
    "pre_collect_hook",
    "storing_device",
    "trust_policy",
    "use_buffers",
)


@dataclass(frozen=True)
class CheckedArguments:
    """Arguments of an Evaluator, checked by their types.

    Raises:
        ValueError, TypeError: one is wrong.
    """

    num_trajectories: Annotated[int | None, whole(1)]
    seed: Annotated[int | None, whole()]
    backend: Literal["thread", "process", "ray"]
    busy_policy: Literal["skip", "error", "queue"]
    on_result: Callable[..., Any] | None
    metrics_fn: Callable[..., Any] | None
    env_step_timeout: Any

    def __post_init__(self) -> None:
        check_fields(self)
        given = self.env_step_timeout
        if isinstance(given, bool) or not isinstance(given, int | float) or given <= 0:
            raise ValueError(f"env_step_timeout: expected seconds above 0, got {given!r}.")


def one_of(name: str, given: Any, other: str, alias: Any) -> Any:
    """An argument that has two names.

    Raises:
        TypeError: it was given by both, or by none.
    """
    if (given is None) == (alias is None):
        raise TypeError(
            f"{name}: expected it, or {other}, got {'none' if given is None else 'both'}. Pass one of them."
        )
    return alias if given is None else given


def reward_key_of(reward_key: NestedKey | None, reward_keys: Any, done_keys: Any) -> NestedKey | None:
    """The key below ``"next"`` of the reward that counts; None: of the only one.

    Raises:
        ValueError, TypeError: keys of other packages are not what an evaluation can go by.
    """
    if done_keys is not None and as_tuple(done_keys) not in (("done",), ("next", "done")):
        raise ValueError(
            "done_keys: expected ('next', 'done'), where the environment says that an episode ends, got "
            f"{done_keys!r}. Leave it out."
        )
    if reward_keys is None:
        return reward_key
    path = as_tuple(reward_keys)
    return unravel(one_of("reward_key", reward_key, "reward_keys", path[1:] if path[0] == "next" else path))


def own_policy(policy: Any, factory: Any, backend: str) -> tuple[Any, nn.Module | None, nn.Module | None]:
    """What acts, where its weights are read when none are given, and the module in it that takes them."""
    if factory is not None:
        if policy is not None and not isinstance(policy, nn.Module):
            raise TypeError(
                f"policy: beside policy_factory it serves for weights only; expected an nn.Module, got "
                f"{type(policy).__name__}. Leave one of them out."
            )
        return None, policy, None
    if policy is None:
        return None, None, None
    if backend != "thread" and (found := never_copied_in(policy)):
        raise TypeError(
            f"policy: it holds {type(found[0]).__name__}, which is never copied, and so cannot be sent to another "
            "process. Pass policy_factory=, a function that makes it there, or backend='thread'."
        )
    copied = copied_policy(policy)
    if copied.shares_modules:
        if backend != "thread":
            raise TypeError(
                "policy: got a function around a module, or something with modules in it that cannot be copied; in "
                "another process it would never see new weights. Pass an nn.Module, a TensorDictModule, or "
                "policy_factory."
            )
        warn_user(
            "Evaluator: the policy is a function around a module, or uses one that cannot be copied with it; it acts "
            "with weights that training may change in the middle of an evaluation. Pass an nn.Module or a "
            "TensorDictModule.",
            UserWarning,
        )
    return copied.policy, copied.source, copied.target


def weights_of(policy: nn.Module) -> TensorDictBase:
    """A copy of a module's parameters and buffers, on the CPU, to be passed as ``weights`` later.

    Extra state (``get_extra_state``) is not in it; the module itself brings that along.

    Args:
        policy: the module.
    """
    return tensordict_of(policy).data.to("cpu").clone()


_START_S = 120.0
_SHUTDOWN_S = 10.0


@with_options(CollectorOptions, only=EVALUATOR_OPTIONS)
class Evaluator:
    """Runs whole episodes with a policy, while training continues.

    An evaluation runs ``num_trajectories`` complete episodes, each from a reset. In a batch of ``e`` environments, each
    contributes its first ``num_trajectories / e`` episodes. (The episodes that end first would be the short ones.) The
    policy acts in eval mode, with a copy of the weights that is made when you call for the evaluation.

    An evaluation changes no running statistics. Transforms with ``freeze()`` are frozen; buffers and extra state of the
    policy are put back after each step. To evaluate with the statistics of training, pass ``weights_dict``, such as
    ``{"policy": policy, "env.transform[0]": train_env.transform[0]}``.

    One evaluation runs at a time. Its errors are raised once: by :meth:`evaluate`, or by the next call of any method.
    The next evaluation starts from a reset. If the process has ended, or was silent for ``env_step_timeout`` and was
    killed, every further call raises that.

    In an environment of conversations (``LLMEnv``, ``ChatEnv``), an episode is a conversation. Each evaluation begins
    with the first prompt, and takes the conversations in the order of the data. The engine, which ``policy_factory``
    makes, samples as it is told to: ``exploration_type`` has no effect.

    ``frames_per_batch`` is the number of frames between two checks whether an evaluation is complete.

    Args:
        create_env_fn: makes an environment. With ``backend="thread"``, it may be an environment, which then belongs to
            the evaluator.
        env: another name for ``create_env_fn``.
        policy: as for :class:`~rollwright.collectors.Collector`. If you pass no weights to :meth:`evaluate` and
            :meth:`trigger_eval`, its current weights are evaluated.
        policy_factory: called once where evaluations run, without arguments, or with the environment if it takes one.
            ``policy`` is then used for its weights only.
        num_trajectories: episodes in an evaluation; None: of conversations, all that the data begins, once.
        max_steps: truncate episodes after this many steps; None: only the environment's own limit.
        backend: where evaluations run. ``"thread"``: in a thread of this process, which shares torch's generators with
            training. ``"process"``: in a process, from the fork server. ``"ray"``: in an actor of a Ray cluster.
        backend_options: with ``backend="ray"``: ``remote_configs`` (one dictionary, such as ``{"num_gpus": 1}``),
            ``ray_init_config`` and others of :class:`~rollwright.collectors.workers.remote.ray.Options`.
        seed: seed of every evaluation, so that all begin with the same episodes. None: the environment continues with
            its own randomness.
        exploration_type: how probabilistic modules choose actions.
        busy_policy: what :meth:`trigger_eval` does while an evaluation runs. ``"skip"`` returns False. ``"error"``
            raises. ``"queue"`` runs this one next, in place of one that already waits.
        on_result: called with each result, in the evaluator's thread in this process; protect what it shares. If it
            raises, the next call raises. It must not wait for evaluations. Numbers have ``item()`` like tensors; that
            of a list returns the mean.
        metrics_fn: adds numbers of your own to each result: it returns a dictionary. It is called where evaluations
            run, with the frames of all episodes, ``[episodes, longest]``, padded, with ``("collector", "mask")``, in
            the order of ``"eval/returns"``; of conversations, with their records, ``[turns]``, one after another, as
            :func:`~rollwright.data.llm.pass_at_k` takes them. All frames are held until then.
        reward_key: the reward to sum; None: the only one. Rewards of several agents are added up.
        reward_keys: the same as TorchRL writes it, ``("next", "reward")``.
        done_keys: as in TorchRL, ``("next", "done")``, where episodes end.
        dump_video: call ``dump()`` of the environment's transforms, such as a video recorder, after each evaluation.
        log_prefix: prefix of the names in a result.
        env_step_timeout: seconds for a step, a reset, or ``on_result``.
        start_method: how the process starts: ``"forkserver"`` (None), ``"spawn"`` or ``"fork"``.
        init_fn: called first in the process.
        num_threads: threads of torch in the process.
        **options: some of :class:`~rollwright.collectors.CollectorOptions`.

    Raises:
        ValueError, TypeError: an argument is wrong, or the policy cannot be copied.
        EnvError, PolicyError, WorkerError: the environment or the policy could not be made.
        TimeoutError: it took longer than two minutes.

    Example:
        >>> from tensordict.nn import TensorDictModule
        >>> from rollwright.envs import GymEnv
        >>> from torch import nn
        >>> policy = TensorDictModule(nn.Linear(3, 1), in_keys=["observation"], out_keys=["action"])
        >>> make_env = lambda: GymEnv("Pendulum-v1")
        >>> with Evaluator(make_env, policy, num_trajectories=3, max_steps=20, seed=0) as evaluator:
        ...     first = evaluator.evaluate(step=1)
        ...     evaluator.trigger_eval(step=2)  # returns at once
        ...     second = evaluator.wait()
        True
        >>> first["eval/num_episodes"], second["eval/step"], first["eval/returns"] == second["eval/returns"]
        (3, 2, True)
    """

    def __init__(
        self,
        create_env_fn: str | EnvBase | GymnasiumEnv | EnvFunction | None = None,
        policy: Callable[..., Any] | None = None,
        *,
        env: str | EnvBase | GymnasiumEnv | EnvFunction | None = None,
        policy_factory: Callable[..., Any] | None = None,
        num_trajectories: int | None = 10,
        max_steps: int | None = None,
        backend: Literal["thread", "process", "ray"] = "thread",
        backend_options: Mapping[str, Any] | None = None,
        seed: int | None = None,
        exploration_type: ExplorationType = ExplorationType.DETERMINISTIC,
        busy_policy: Literal["skip", "error", "queue"] = "skip",
        on_result: Callable[[dict[str, Any]], Any] | None = None,
        metrics_fn: Callable[[TensorDictBase], Mapping[str, Any]] | None = None,
        reward_key: NestedKey | None = None,
        reward_keys: NestedKey | None = None,
        done_keys: NestedKey | None = None,
        dump_video: bool = True,
        log_prefix: str = "eval",
        env_step_timeout: float = 60.0,
        start_method: str | None = None,
        init_fn: Callable[[], None] | None = None,
        num_threads: int = 1,
        **options: Unpack[EvaluatorKeywords],
    ) -> None:
        self._closed = self._ended = True  # until construction succeeds
        create_env_fn = one_of("create_env_fn", create_env_fn, "env", env)
        reward_key = reward_key_of(reward_key, reward_keys, done_keys)
        refuse_unknown(options, list(EVALUATOR_OPTIONS), Evaluator)
        CheckedArguments(num_trajectories, seed, backend, busy_policy, on_result, metrics_fn, env_step_timeout)
        check_start_method("start_method", start_method)
        if backend == "ray" and start_method is not None:
            raise ValueError(
                f"start_method={start_method!r} is for processes of this machine, and backend='ray' starts an actor. "
                "Drop it."
            )
        if backend != "ray" and backend_options:
            raise ValueError(
                f"backend_options: backend={backend!r} has none, got {sorted(map(str, backend_options))}. Drop them, "
                "or pass backend='ray'."
            )
        if backend != "thread" and is_env(create_env_fn):
            raise TypeError(
                f"create_env_fn: backend={backend!r} makes the environment there, got an environment. Pass a callable."
            )
        self._backend, self._seed, self._busy_policy = backend, seed, busy_policy
        self._prefix, self._step_timeout_s = log_prefix, float(env_step_timeout)
        named = {"exploration_type": exploration_type, "max_frames_per_traj": max_steps, **options}
        parsed = CollectorOptions.parse({**named, "policy_factory": policy_factory}, type(self).__name__)
        if backend != "ray":  # whose actor looks for devices where it is
            parsed.check_devices()
        acting, self._source, target = own_policy(policy, policy_factory, backend)
        named["policy_factory"] = policy_factory
        wanted = (num_trajectories, seed, reward_key, metrics_fn, dump_video)
        settings = Settings(create_env_fn, acting, target, *wanted, named)
        self._version = self._asked = self._skipped = self._replaced = 0
        start_s = max(_START_S, self._step_timeout_s)
        start = ProcessStart(init_fn, start_method, num_threads, start_s)
        make, progress = _backend(backend, settings, start, self._step_timeout_s, backend_options)
        self._queue = EvaluationQueue(
            make,
            progress,
            None if on_result is None else partial(_call_with, on_result, log_prefix),
            exploration_type=exploration_type,
            step_timeout_s=self._step_timeout_s,
        )
        try:
            self._queue.open(start_s)
        except BaseException:
            self._queue.stop(0.0 if backend == "thread" else _SHUTDOWN_S)
            raise
        # Nobody can ask for results of an evaluator that is gone.
        weakref.finalize(self, self._queue.stop, 0.0).atexit = False
        self._closed = self._ended = False

    # Evaluations ------------------------------------------------------------------------------

    def evaluate(
        self,
        weights: Any = None,
        step: int | None = None,
        *,
        weights_dict: Mapping[str, Any] | None = None,
        policy_version: int | None = None,
        timeout: float | None = None,
    ) -> dict[str, Any]:
        """Evaluate, and wait for it; one that runs already comes to its end first.

        Args:
            weights: for the policy: a module, its ``state_dict``, a TensorDict; None: those of ``policy`` now, or
                where there are none to read, the last that were given.
            step: that of training, for the result; None: the number of evaluations that were asked for.
            weights_dict: weights by model, such as ``"policy"`` and ``"env.transform[0]"``.
            policy_version: for the result: what training calls these weights (``update_policy_weights_()`` returns
                it). None: the number of weights that evaluations were given.
            timeout: seconds to wait; None: as long as steps are taken.

        Returns:
            A dictionary that ``json.dumps`` takes, its names beginning with ``log_prefix``: ``"eval/reward"`` (mean
            return; also ``_std``, ``_min``, ``_max``), ``"eval/episode_length"`` (same), ``"eval/num_episodes"``,
            ``"eval/returns"`` and ``"eval/lengths"`` (lists: the first episode of each environment, then the second),
            ``"eval/frames"`` (of these episodes), ``"eval/frames_stepped"``, ``"eval/seconds"``, ``"eval/fps"``,
            ``"eval/policy_version"``, ``"eval/step"``.

        Raises:
            TimeoutError: it takes longer, or a step does.
            RuntimeError: the evaluator was shut down.
            ValueError, TypeError: weights do not fit.
            Exception: what environment, policy or ``on_result`` raised.
        """
        self._check("evaluate")
        self._check_outside("evaluate")
        request = self._request(weights, step, weights_dict, policy_version)
        queue = self._queue
        evaluation = Evaluation(request, awaited=True)
        with queue.condition:  # no request of another thread comes between
            queue.wait_until(lambda: not queue.busy or queue.finished, "the evaluation that runs", timeout)
            queue.put(evaluation)
        queue.wait_until(lambda: evaluation.done or queue.finished, f"the evaluation of step {request.step}", timeout)
        if evaluation.error is not None:
            raise evaluation.error
        if evaluation.result is None:
            queue.raise_error()
            raise RuntimeError("evaluate: the evaluator was shut down before the evaluation was complete.")
        return _named(self._prefix, evaluation.result)

    def trigger_eval(
        self,
        weights: Any = None,
        step: int | None = None,
        *,
        weights_dict: Mapping[str, Any] | None = None,
        policy_version: int | None = None,
    ) -> bool:
        """Ask for an evaluation, and return when the weights are copied; see :meth:`evaluate`.

        Returns:
            Whether it will take place; False if another one runs and ``busy_policy="skip"``.

        Raises:
            RuntimeError: another one runs, and ``busy_policy="error"``; or the evaluator was shut down.
            TimeoutError: the evaluation that runs has been silent for longer than ``env_step_timeout``.
            Exception: what went wrong in an earlier one.
        """
        self._check("trigger_eval")
        queue = self._queue
        if queue.busy and self._busy_policy != "queue":
            if self._busy_policy == "error":
                raise RuntimeError(
                    "trigger_eval: another evaluation runs. Call wait() first, look at pending, or pass "
                    "busy_policy='skip' or 'queue'."
                )
            self._skipped += 1
            return False
        evaluation = Evaluation(self._request(weights, step, weights_dict, policy_version), awaited=False)
        was_idle = not queue.busy
        self._replaced += queue.put(evaluation)
        if was_idle and self._seed is not None and self._backend == "thread" and not queue.inside:
            # Environments seed torch's generator too; it is put back before the caller draws from it again.
            queue.wait_until(lambda: evaluation.begun or evaluation.done or queue.finished, "a reset", None)
        return True

    def poll(self, timeout: float = 0.0) -> dict[str, Any] | None:
        """The newest result of :meth:`trigger_eval` that was not returned yet; None: there is none within ``timeout``.

        Raises:
            TimeoutError: the evaluation that runs has been silent for longer than ``env_step_timeout``.
            Exception: what went wrong in one.
        """
        self._check("poll")
        queue = self._queue
        if timeout > 0 and queue.unread is None and queue.busy and not queue.inside:
            try:
                queue.wait_until(lambda: queue.unread is not None or not queue.busy, "a result", timeout)
            except TimeoutError:
                queue.check_lively()
                return None
            queue.raise_error()
        result = queue.read()
        return None if result is None else _named(self._prefix, result)

    def wait(self, timeout: float | None = None) -> dict[str, Any] | None:
        """Wait until no evaluation runs any more; the newest result that was not returned yet, or None.

        Args:
            timeout: seconds; None: as long as steps are taken.

        Raises:
            TimeoutError: it takes longer, or a step does.
            Exception: what went wrong in one.
        """
        self._check("wait")
        self._check_outside("wait")
        queue = self._queue
        queue.wait_until(lambda: not queue.busy or queue.finished, "the evaluation that runs", timeout)
        queue.raise_error()
        result = queue.read()
        return None if result is None else _named(self._prefix, result)

    @property
    def pending(self) -> bool:
        """Whether an evaluation runs, or is to."""
        return self._queue.busy

    def _request(
        self, weights: Any, step: int | None, by_model: Mapping[str, Any] | None, version: int | None
    ) -> EvaluationRequest:
        given = {} if by_model is None else dict(by_model)
        if weights is not None:
            if "policy" in given:
                raise ValueError("weights: got it beside weights_dict['policy']. Pass the policy's weights once.")
            given["policy"] = weights
        elif "policy" not in given and self._source is not None:
            given["policy"] = self._source
        taken = {name: copy_of(new, name) for name, new in given.items()}
        self._asked += 1
        self._version += bool(taken)
        return EvaluationRequest(
            self._asked if step is None else step, self._version if version is None else version, taken
        )

    def _check(self, what: str) -> None:
        if self._closed:
            raise RuntimeError(f"{what}: this Evaluator was shut down. Make a new one.")
        if not self._queue.inside:
            self._queue.raise_error()
            self._queue.check_lively()

    def _check_outside(self, what: str) -> None:
        if self._queue.inside:
            raise RuntimeError(f"{what}: called from on_result, it would wait for itself. Call trigger_eval() there.")

    extract_weights = staticmethod(weights_of)

    # Observation ------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """What it does; ``json.dumps`` takes it.

        Returns:
            ``backend``, ``evaluations`` (complete), ``asked``, ``skipped`` and ``replaced`` (that were asked for in
            vain, see ``busy_policy``), ``pending``, ``frames`` (of the evaluation that runs), ``policy_version``
            (of the last weights taken), ``alive``, ``pid`` of the process, ``waiting_for``.
        """
        queue = self._queue
        running = queue.current is not None
        return {
            "backend": self._backend,
            "evaluations": queue.evaluations,
            "asked": self._asked,
            "skipped": self._skipped,
            "replaced": self._replaced,
            "pending": queue.busy,
            "frames": queue.progress.frames if running else 0,
            "policy_version": self._version,
            "alive": not queue.finished and queue.backend is not None and queue.backend.ended() is None,
            "pid": None if queue.backend is None else queue.backend.pid,
            "waiting_for": queue.doing() if running else None,
        }

    def state_dict(self) -> dict[str, int]:
        """The counters that results show: ``asked`` and ``policy_version``."""
        return {"asked": self._asked, "policy_version": self._version}

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        """Count on from a saved state.

        Raises:
            KeyError, TypeError: it is the state of something else; nothing was loaded.
        """
        missing = [name for name in ("asked", "policy_version") if name not in checked_state(state_dict)]
        if missing:
            raise KeyError(
                f"state_dict: expected {missing} among its entries, got {sorted(map(str, state_dict))}. Pass what "
                "state_dict() of an Evaluator returned."
            )
        self._asked, self._version = int(state_dict["asked"]), int(state_dict["policy_version"])

    def __repr__(self) -> str:
        return f"{type(self).__name__}(backend={self._backend!r}, stats={self.stats()})"

    # The end ----------------------------------------------------------------------------------

    def shutdown(self, timeout: float | None = None, raise_on_error: bool = True) -> None:
        """End the evaluation that runs after its step, drop it, and close the environment.

        May be called again: a call that was interrupted, by Ctrl-C for instance, is carried on by the next one.

        Args:
            timeout: seconds that it may take; None: 10. A process that takes longer is killed, with a warning. A
                thread that is stuck in a step is left behind; it does not keep the interpreter from exiting.
            raise_on_error: if False, errors of earlier evaluations, and that of a thread left behind, are dropped.

        Raises:
            TimeoutError: the thread is left behind; the message names what it does.
            Exception: what went wrong in an earlier evaluation, if no call has raised it yet.
        """
        if self._ended:
            return
        self._closed = True
        limit = _SHUTDOWN_S if timeout is None else timeout
        queue = self._queue
        ended = queue.stop(limit)
        self._ended = True  # not before: an interrupt may have come in the middle
        if queue.end != "ended":
            warn_user(
                f"shutdown: the Evaluator's process (pid {queue.backend and queue.backend.pid}) did not end within "
                f"{limit:g} s and was {queue.end}, while it was busy with {queue.doing()}.",
                UserWarning,
            )
        if not raise_on_error or queue.inside:
            return
        queue.raise_error()
        if not ended:
            raise TimeoutError(
                f"shutdown: waited {limit:g} s for {queue.doing()} to end. The Evaluator's thread is left behind, and "
                "ends when that returns. Look there for what it waits for."
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown(raise_on_error=error is None)


def _backend(
    backend: str,
    settings: Settings,
    start: ProcessStart,
    step_timeout_s: float,
    options: Mapping[str, Any] | None,
) -> tuple[Callable[[], Backend], EvaluationProgress]:
    """What makes the place where evaluations run, and what is shared with it."""
    memory = Segment()
    memory.grow(EvaluationProgress.num_bytes)
    progress = EvaluationProgress(memory)
    if backend == "thread":
        return partial(ThreadBackend, settings, progress), progress
    if backend == "ray":
        from rollwright.collectors.evaluation.ray import ray_backend

        return ray_backend(settings, progress, start, step_timeout_s, options), progress
    return partial(process_backend, settings, progress, memory, start, step_timeout_s), progress


def _named(prefix: str, result: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{prefix}/{name}" if prefix else name: value for name, value in result.items()}


def _call_with(on_result: Callable[[dict[str, Any]], Any], prefix: str, result: dict[str, Any]) -> None:
    on_result(with_item(_named(prefix, result)))
