"""RayEvalWorker: rollouts with a policy, in an actor of a Ray cluster, one at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Self

import numpy as np
import torch

from rollwright._keys import NestedKey, as_tuple
from rollwright._processes.channel import ByValue, dumps
from rollwright._processes.network.ray import ObjectActor, RaySession, check_cluster, check_remote_config
from rollwright._processes.network.sources import with_sources
from rollwright._tensors import as_tensor
from rollwright.collectors.evaluation.arguments import copy_of
from rollwright.collectors.evaluation.results import prepare_weights
from rollwright.data.layout import end_of_trajectory
from rollwright.envs.utils import ExplorationType, set_exploration_type
from rollwright.weight_update.policy_weights import weights_of

_TARGET = "rollwright.collectors.clusters.ray_evaluation:RolloutRunner"
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
            actor = made.remote(_sent(init_fn), _TARGET, _sent((env_maker, policy_maker)))
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
