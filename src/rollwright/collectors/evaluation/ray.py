"""Evaluation in actors of a Ray cluster: backend "ray" of an Evaluator, and RayEvalWorker."""

from __future__ import annotations

import contextlib
import secrets
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, Self

import numpy as np
import torch

from rollwright._keys import NestedKey, as_tuple
from rollwright._options import names_of, refuse_unknown
from rollwright._processes.channel import ByValue, ChannelClosed, dumps
from rollwright._processes.connection import NOTHING, ExceptionInfo
from rollwright._processes.network.channel import MessageForged, NetworkChannel
from rollwright._processes.network.handshake import Listener, connect_to, parse_address
from rollwright._processes.network.ray import ObjectActor, RaySession, check_cluster, check_remote_config, configs_of
from rollwright._processes.network.sources import with_sources
from rollwright._tensors import as_tensor
from rollwright.collectors.evaluation.backends import Backend, ProcessBackend, ProcessStart, serve
from rollwright.collectors.evaluation.episodes import EvaluationProgress, Settings, Stopped, copy_of, prepare_weights
from rollwright.collectors.workers.remote.ray import Options, RayLauncher
from rollwright.data.layout import end_of_trajectory
from rollwright.envs.utils import ExplorationType, set_exploration_type
from rollwright.errors import WorkerError
from rollwright.weight_update.policy_weights import weights_of

_NAME = "Evaluator's Ray actor"
_TARGET = "rollwright.collectors.evaluation.ray:serve_evaluations"
_NAP_S, _BEAT_S, _JOIN_S = 0.2, 0.5, 20.0


class _Beat(NamedTuple):
    """Frames of the current evaluation, whenever there are more."""

    frames: int


def ray_backend(
    settings: Settings,
    progress: EvaluationProgress,
    start: ProcessStart,
    step_timeout_s: float,
    given: Mapping[str, Any] | None,
) -> Callable[[], Backend]:
    """What starts the actor.

    Raises:
        MissingExtraError: Ray is not installed.
        TypeError, ValueError: an option is wrong, or no node has what the actor asks for.
        ConnectionError: no cluster answers.
    """
    if given is not None and not isinstance(given, Mapping):
        raise TypeError(f"backend_options: expected a dictionary, got {type(given).__name__}: {given!r}.")
    known = [name for name in names_of(Options) if name != "num_workers_per_collector"]
    refuse_unknown(map(str, given or {}), known, "backend_options of Evaluator(backend='ray')")
    options = Options(**(given or {}))
    if isinstance(options.remote_configs, list | tuple):
        raise TypeError("backend_options: remote_configs: expected a dictionary, for the only actor, got a list.")
    configs = configs_of(options.remote_configs, [start.num_threads])
    session = RaySession(options.ray_init_config, num_cpus=float(configs[0]["num_cpus"]), purpose="backend='ray'")
    try:
        launcher = RayLauncher(session, configs, _TARGET, niceness=options.niceness)
        check_cluster(session, configs, grows=options.autoscales)
        address = parse_address("address", options.address or f"{session.node_ip}:0")
    except BaseException:
        session.close()
        raise
    return partial(RayBackend, settings, progress, launcher, address, start, step_timeout_s)


class RayBackend(ProcessBackend):
    """In an actor, which joins this process over a socket.

    Args:
        settings: what and how.
        progress: of this process; what the actor reports is entered there.
        launcher: starts the actor; closed with this.
        address: where it joins.
        start: how its process starts.
        step_timeout_s: without a step for longer, it counts as stuck.

    Raises:
        WorkerError: environment, policy or ``init_fn`` raised; or the actor ended.
        TimeoutError: it takes too long.
    """

    def __init__(
        self,
        settings: Settings,
        progress: EvaluationProgress,
        launcher: RayLauncher,
        address: tuple[str, int],
        start: ProcessStart,
        step_timeout_s: float,
    ) -> None:
        self._launcher = launcher
        secret, joined = secrets.token_hex(32).encode(), list[NetworkChannel]()
        listener = Listener(address, secret, lambda greeting, about: joined.append(greeting.accept()))
        self._host = launcher.launch(0, listener.address, secret)
        try:
            _await(joined, listener, self._host, progress, start.timeout_s)
            joined[0].give_up_after(30.0)
            actor = _Actor(joined[0], self._host, progress)
            actor.post((ByValue(None, pickled=with_sources(dumps((settings, start.init_fn)))), start.num_threads))
            super().__init__(actor, _NAME, progress, start_timeout_s=start.timeout_s, step_timeout_s=step_timeout_s)
        except BaseException:
            for line in joined:
                line.close()
            self._end()
            raise
        finally:
            listener.close()

    def _end(self) -> None:
        self._host.end(0.0)
        self._launcher.close()

    def close(self, until: Callable[[], float]) -> str:
        """Hang up, and make the actor end that does not by then; end the session."""
        how = super().close(until)
        self._end()
        return how


def _await(
    joined: list[NetworkChannel], listener: Listener, host: Any, progress: EvaluationProgress, timeout_s: float
) -> None:
    """Wait for the actor to connect and to prove what it must."""
    until = time.monotonic() + timeout_s
    while not joined:
        if progress.stopped:
            raise Stopped
        if (how := host.how_it_ended()) is not None:
            raise WorkerError(f"{_NAME} {how}.")
        if time.monotonic() > until:
            raise TimeoutError(
                f"waited {timeout_s:g} s for {_NAME} to join. See whether the cluster has room for it, and whether "
                "its nodes reach this machine (backend_options={'address': ...})."
            )
        _wait(listener.fileno(), _NAP_S)
        listener.read()


def _wait(fd: int, timeout_s: float) -> None:
    poll = select.poll()
    if fd >= 0:
        poll.register(fd, select.POLLIN)
    poll.poll(timeout_s * 1e3)


class _EvaluationChannel:
    """Messages over a line, sent and received as by a :class:`~rollwright._processes.channel.Channel`."""

    def __init__(self, line: NetworkChannel) -> None:
        self._line, self._arrived = line, deque[Any]()
        self.post, self.close = line.post, line.close

    def take(self) -> Any:
        """The next message that has arrived; :data:`NOTHING` if there is none."""
        try:
            self._line.read(lambda message, sizes: [], lambda message, pieces: self._arrived.append(message))
        except ChannelClosed:
            if not self._arrived:
                raise
        return self._arrived.popleft() if self._arrived else NOTHING

    def poll(self, timeout_s: float = 0.0) -> bool:
        """Wait until something has arrived, or the other side has hung up; whether it has."""
        if timeout_s and not self._arrived:
            _wait(self._line.fileno(), timeout_s)
        try:
            message = self.take()
        except ChannelClosed:
            return True
        if message is not NOTHING:
            self._arrived.appendleft(message)
        return bool(self._arrived)

    def recv(self, timeout_s: float) -> Any:
        """The next message, which :meth:`poll` has announced."""
        return self.take()

    def send(self, message: Any) -> None:
        """Send a message, and wait until it is on its way."""
        self.post(message)
        while self._line.behind and not self.poll(_NAP_S):
            pass


class _Actor(_EvaluationChannel):
    """The connection to the actor; see :class:`~rollwright._processes.connection.Connection`.

    Args:
        line: to it.
        host: what Ray says of it.
        progress: of this process; what the actor shows is entered there.
    """

    name, host, pid, behind = "rollwright-evaluator", "a Ray actor", None, False

    def __init__(self, line: NetworkChannel, host: Any, progress: EvaluationProgress) -> None:
        super().__init__(line)
        self._host, self._progress = host, progress
        self._forged: str | None = None

    def filenos(self) -> tuple[int, ...]:
        """The line."""
        return (self._line.fileno(),)

    def take(self) -> Any:
        """The next message, once what the actor shows of its progress is entered."""
        try:
            while isinstance(message := super().take(), _Beat):
                self._progress.beat(message.frames - self._progress.frames)
        except MessageForged as error:
            self._forged = f"cannot be trusted: {error}"
            self.kill()
            raise ChannelClosed(self._forged) from error
        return message

    def flush(self) -> None:
        """The line sends the rest when it is read."""

    def clock(self) -> float:
        """Of this machine."""
        return time.monotonic()

    def stopped_s(self) -> float:
        """Not known."""
        return 0.0

    def wait(self, timeout_s: float) -> bool:
        """Wait until the actor has ended; whether it has."""
        until = time.monotonic() + timeout_s
        while self._host.how_it_ended() is None and time.monotonic() < until:
            time.sleep(0.01)
        return self._host.how_it_ended() is not None

    def kill(self) -> None:
        """End it at once."""
        self._host.kill()

    terminate = kill

    def how_it_ended(self) -> str:
        """A phrase for messages."""
        return self._forged or self._host.how_it_ended() or "has hung up"


# In the actor ---------------------------------------------------------------------------------------


def serve_evaluations(address: tuple[str, int], secret: bytes, group: int) -> None:
    """What the actor's process runs: evaluations, until the other side hangs up."""
    line = connect_to(address, secret, {"group": group}, _JOIN_S)
    channel, progress = _EvaluationChannel(line), EvaluationProgress()
    threading.Thread(target=_beat, args=(line, progress), name="rollwright-beat", daemon=True).start()
    try:
        progress.begin()
        while not channel.poll(_NAP_S):
            pass
        content, num_threads = channel.recv(_NAP_S)
        settings, init_fn = content.value
        torch.set_num_threads(num_threads)
        serve(channel, settings, progress, init_fn)
    except ChannelClosed:
        return
    except Exception as error:
        with contextlib.suppress(ChannelClosed):
            channel.send(ExceptionInfo.of(error))
    finally:
        line.close()


def _beat(line: NetworkChannel, progress: EvaluationProgress) -> None:
    """Report frames while there are more; silence means that there are none."""
    shown = 0
    while True:
        time.sleep(_BEAT_S)
        beaten_at = progress.beaten_at
        if beaten_at != shown:
            shown = beaten_at
            try:
                line.post(_Beat(progress.frames))
            except ChannelClosed:
                return


_RUNNER = "rollwright.collectors.evaluation.ray:RolloutRunner"
_REWARD = ("next", "reward")


class RayEvalWorker:
    """Runs a rollout in an actor of Ray whenever it is given weights; :class:`Evaluator` does more, and reports more.

    Args:
        init_fn: called first in the actor, before torch is imported there; or None.
        env_maker: makes the environment, there.
        policy_maker: takes the environment, and makes the policy.
        num_gpus: that Ray reserves for the actor.
        reward_keys: the reward in the data of a rollout.
        name: of the actor in the cluster: it goes on when this program ends, and others reach it by
            :meth:`from_name`; None: it ends with this object.
        **remote_kwargs: what else Ray reserves: ``num_cpus``, ``memory``, ``runtime_env``.

    Raises:
        MissingExtraError: Ray is not installed.
        TypeError, ValueError: an argument is wrong, or no node has what the actor asks for.

    Example:
        >>> worker = RayEvalWorker(None, make_env, make_policy, num_gpus=0)  # doctest: +SKIP
        >>> worker.submit(policy, max_steps=1000)  # doctest: +SKIP
        >>> worker.poll(timeout=60.0)["reward"]  # doctest: +SKIP
        312.0
    """

    def __init__(
        self,
        init_fn: Callable[[], None] | None,
        env_maker: Callable[[], Any],
        policy_maker: Callable[[Any], Any],
        *,
        num_gpus: float = 1,
        reward_keys: NestedKey = _REWARD,
        name: str | None = None,
        **remote_kwargs: Any,
    ) -> None:
        for argument, value in (("env_maker", env_maker), ("policy_maker", policy_maker), ("init_fn", init_fn)):
            if not callable(value) and not (value is None and argument == "init_fn"):
                raise TypeError(f"{argument}: expected a callable, got {type(value).__name__}: {value!r}.")
        config = {"num_gpus": num_gpus, **remote_kwargs}
        check_remote_config("remote_kwargs", config)
        session = RaySession(num_cpus=float(config.get("num_cpus") or 1), purpose="RayEvalWorker")
        try:
            check_cluster(session, [config], grows=None)
            named = {} if name is None else {"name": name, "lifetime": "detached"}
            made = session.ray.remote(ObjectActor).options(**config, **named)
            actor = made.remote(_sent(init_fn), _RUNNER, _sent((env_maker, policy_maker)))
        except BaseException:
            session.close()
            raise
        self._attach(session, actor, reward_keys)

    def _attach(self, session: RaySession, actor: Any, reward_keys: NestedKey) -> None:
        self._session: RaySession | None = session
        self._actor: Any = actor
        self._ray, self._reward_keys, self._pending = session.ray, reward_keys, None

    @classmethod
    def from_name(cls, name: str, *, reward_keys: NestedKey = _REWARD) -> Self:
        """Connect to an actor that was started with a name, in this cluster.

        Args:
            name: of the actor.
            reward_keys: the reward in the data of a rollout.

        Raises:
            ValueError: there is none of that name.
        """
        session = RaySession(purpose="RayEvalWorker")
        try:
            actor = session.ray.get_actor(name)
        except BaseException:
            session.close()
            raise
        self = cls.__new__(cls)
        self._attach(session, actor, reward_keys)
        return self

    def submit(
        self, weights: Any, max_steps: int, *, deterministic: bool = True, break_when_any_done: bool = True
    ) -> None:
        """Have a rollout taken; the result of one that was not polled yet is dropped.

        Args:
            weights: of the policy: a module, a ``state_dict`` or a TensorDict.
            max_steps: the most steps to take.
            deterministic: act without exploration.
            break_when_any_done: end it when any environment is done; if False, those are reset.

        Raises:
            RuntimeError: it was shut down.
            TypeError: weights of an unknown form.
        """
        if self._actor is None:
            raise RuntimeError("submit: this RayEvalWorker was shut down. Make a new one.")
        state = {name: _in_numpy(value) for name, value in copy_of(weights, "policy").items()}
        args = (state, max_steps, self._reward_keys, deterministic, break_when_any_done)
        self._pending = self._actor.call.remote("run", *args)

    def poll(self, timeout: float = 0) -> dict[str, Any] | None:
        """The result of the last rollout, once; None: it is not complete within ``timeout`` seconds, or none was asked.

        Returns:
            ``"reward"``: the sum of the rewards, in the mean of the environments (with ``break_when_any_done=False``:
            for each episode that has ended); ``"frames"``: ``uint8
            [T, H, W, 3]`` if the environment renders (``render_mode="rgb_array"``), or None.

        Raises:
            Exception: environment, policy or weights raised it there; or the actor has ended.
        """
        if self._pending is None:
            return None
        ready, _ = self._ray.wait([self._pending], timeout=timeout)
        if not ready:
            return None
        pending, self._pending = self._pending, None
        result: dict[str, Any] = self._ray.get(pending)
        return result

    def shutdown(self) -> None:
        """End the actor. May be called again."""
        actor, self._actor, self._pending = self._actor, None, None
        if actor is not None and self._ray.is_initialized():
            closing = actor.call.remote("close")
            self._ray.wait([closing], timeout=5.0)
            self._ray.kill(actor)
        if self._session is not None:
            self._session.close()
            self._session = None


class RolloutRunner:
    """What the actor has: an environment and a policy.

    Args:
        env_maker: makes the environment.
        policy_maker: makes the policy, from the environment.
    """

    def __init__(self, env_maker: Callable[[], Any], policy_maker: Callable[[Any], Any]) -> None:
        self._env = env_maker()
        self._policy = policy_maker(self._env)

    @torch.no_grad()
    def run(
        self,
        weights: Mapping[str, Any],
        max_steps: int,
        reward_key: NestedKey,
        deterministic: bool,
        break_when_any_done: bool,
    ) -> dict[str, Any]:
        """See :meth:`RayEvalWorker.submit` and :meth:`RayEvalWorker.poll`."""
        module = weights_of(self._policy)
        if module is not None:
            state = {name: as_tensor(value) if _is_array(value) else value for name, value in weights.items()}
            prepare_weights(self._policy, state, "policy")()
            module.eval()
        frames: list[Any] = []
        renders = getattr(self._env, "render_mode", None) == "rgb_array" and hasattr(self._env, "render")
        kind = ExplorationType.DETERMINISTIC if deterministic else ExplorationType.RANDOM
        with set_exploration_type(kind):
            data = self._env.rollout(
                max_steps,
                self._policy,
                callback=(lambda env, _: frames.append(env.render())) if renders else None,
                break_when_any_done=break_when_any_done,
            )
        rewards = data.get(as_tuple(reward_key)).double()
        total = rewards.reshape(*data.shape, -1).sum(-1).sum(-1)
        if not break_when_any_done:  # of whole episodes, if there are any
            ended = end_of_trajectory(data.get("next"), self._env.done_groups, data.ndim).sum(-1)
            total = total / ended.clamp(min=1)
        return {"reward": float(total.mean()), "frames": torch.from_numpy(np.stack(frames)) if frames else None}

    def close(self) -> None:
        """Close the environment."""
        self._env.close()


def _sent(value: Any) -> ByValue:
    """To be unpickled where modules of this program may lack."""
    return ByValue(None, pickled=with_sources(dumps(value)))


def _in_numpy(value: Any) -> Any:
    return value.numpy() if isinstance(value, torch.Tensor) and value.dtype is not torch.bfloat16 else value


def _is_array(value: Any) -> bool:
    return hasattr(value, "__array__") and not isinstance(value, torch.Tensor)
