"""PettingZooEnv and PettingZooWrapper: environments of several agents."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Mapping
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import Space, spaces
from tensordict import TensorDict, TensorDictBase

from rollwright._foreign import class_path, is_pettingzoo_env, kind_in
from rollwright._keys import as_tuple, place
from rollwright.data.specs import Categorical, Composite, Unbounded
from rollwright.data.specs.gymspaces import numpy_dtype
from rollwright.envs.base import EnvBase
from rollwright.envs.libs.codecs import ActionWriter, ObservationReader, leaves_of, spec_of
from rollwright.envs.libs.pettingzoo.groups import groups_of
from rollwright.errors import EnvError, require

__all__ = ["PettingZooEnv", "PettingZooWrapper"]

_FLAGS = ("done", "terminated", "truncated")
_FAMILIES = ("pettingzoo.butterfly", "pettingzoo.classic", "pettingzoo.sisl", "pettingzoo.atari", "mpe2")


class _Outcome(NamedTuple):
    """What a step or a reset gave, by agent; a flag that is missing is False."""

    observations: Mapping[str, Any]
    rewards: Mapping[str, Any]
    terminated: Mapping[str, Any]
    truncated: Mapping[str, Any]
    infos: Mapping[str, Any]


class _Group:
    """Agents whose data are stacked; all have the same spaces."""

    def __init__(self, name: str, agents: list[str], env: Any, categorical: bool, infos: Mapping[str, Any]) -> None:
        seen, acts = env.observation_space(agents[0]), env.action_space(agents[0])
        for agent in agents[1:]:
            if env.observation_space(agent) != seen or env.action_space(agent) != acts:
                raise EnvError(
                    f"group_map: agents {agents[0]!r} and {agent!r} of group {name!r} have different spaces and cannot "
                    "be stacked. Put them into groups of their own, or pad them with a wrapper of SuperSuit."
                )
        self.name, self.agents = name, agents
        in_seen = isinstance(seen, spaces.Dict) and "action_mask" in seen.spaces
        self.masked = in_seen or any("action_mask" in infos.get(agent, {}) for agent in agents)
        if in_seen:
            seen = spaces.Dict(OrderedDict((key, one) for key, one in seen.spaces.items() if key != "action_mask"))
        leaves = leaves_of(_named(seen), "observation", categorical)
        written = leaves_of(acts, "action", categorical)
        number = len(agents)
        self.read, self.write = ObservationReader(leaves, ()), ActionWriter(acts, written, ())
        self.observation_spec = spec_of(leaves, (number,))
        self.action_spec = spec_of(written, (number,))
        self.zeros = {
            leaf.key: np.zeros((number, *leaf.spec.shape), numpy_dtype(leaf.spec.dtype or torch.float32))
            for leaf in leaves
        }
        if self.masked:
            self.choices = int(acts.n)
            self.observation_spec["action_mask"] = Categorical(2, shape=(number, self.choices), dtype=torch.bool)


def _named(space: Space[Any]) -> Space[Any]:
    return spaces.Dict({"observation": space})


class PettingZooWrapper(EnvBase):
    """An environment of PettingZoo that exists already, parallel or turn-taking (AEC).

    The data of the agents of a group are stacked: ``(group, "observation")`` ``[agents, ...]``, ``(group, "action")``,
    ``(group, "reward")`` float32 ``[agents, 1]``, and ``done``, ``terminated``, ``truncated`` bool ``[agents, 1]``.
    The flags at the root end the trajectory of all. Where an environment says which actions are allowed, in an
    observation or in ``info``, ``(group, "action_mask")`` bool ``[agents, n]`` has it, and random actions keep to it.

    With ``use_mask``, ``(group, "mask")`` bool ``[agents]`` is True for agents that act next: those that are alive;
    in a turn-taking environment, the one whose turn it is. Agents that left have observations and rewards of zero, and
    stay done. In a turn-taking environment the action of the agent whose turn it is counts, and the others are ignored.

    Args:
        env: the environment.
        return_state: add what ``env.state()`` returns as ``"state"``.
        group_map: names of groups with lists of agents, or a ``MarlGroupMapType``. None: agents of a parallel
            environment called ``name_0``, ``name_1`` form the group ``name``; each other agent is a group.
        use_mask: add ``"mask"``; required in turn-taking environments and where agents leave.
        categorical_actions: discrete actions as integers instead of one-hot.
        seed: same as calling ``set_seed(seed)`` first, but leaves torch's generator alone.
        done_on_any: whether the trajectory ends with the first agent that is done, or with the last. None: with the
            first in parallel environments, with the last in turn-taking ones.
        device: where tensors are put; None leaves them on CPU without naming a device.

    Raises:
        TypeError: ``env`` is no environment of PettingZoo.
        ValueError: ``group_map`` does not fit its agents; a turn-taking environment without ``use_mask``.
        EnvError: agents of a group have different spaces.

    Example:
        >>> from pettingzoo.classic import tictactoe_v3  # doctest: +SKIP
        >>> env = PettingZooWrapper(tictactoe_v3.env(), use_mask=True)  # doctest: +SKIP
        >>> env.rollout(3)["player_1", "action_mask"].shape  # doctest: +SKIP
        torch.Size([3, 1, 9])
    """

    returns_copies = True

    def __init__(
        self,
        env: Any,
        *,
        return_state: bool = False,
        group_map: Any = None,
        use_mask: bool = False,
        categorical_actions: bool = True,
        seed: int | None = None,
        done_on_any: bool | None = None,
        device: torch.device | str | int | None = None,
    ) -> None:
        if not is_pettingzoo_env(env):
            raise TypeError(
                f"env: expected an environment of PettingZoo, got {class_path(env)}. Pass env() or parallel_env() of "
                "one of its modules, or call PettingZooEnv(task, parallel=...)."
            )
        super().__init__(device=device)
        self.parallel = "ParallelEnv" in kind_in("pettingzoo", env)
        if not self.parallel and not use_mask:
            raise ValueError(
                "use_mask: expected True, got False: in a turn-taking environment only one agent acts in a step, and "
                "the mask says which. Pass use_mask=True, or its parallel_env()."
            )
        self.pettingzoo_env = env
        self.use_mask, self.return_state = use_mask, return_state
        self.done_on_any = self.parallel if done_on_any is None else bool(done_on_any)
        self.group_map = groups_of(group_map, env.possible_agents, self.parallel)
        self._seed = seed
        infos = self._restart(seed).infos
        groups = [_Group(name, agents, env, categorical_actions, infos) for name, agents in self.group_map.items()]
        self._groups = groups
        self._past: dict[str, tuple[bool, bool]] = {}
        self._set_specs()

    def _set_specs(self) -> None:
        flags = {name: Categorical(2, shape=(1,), dtype=torch.bool) for name in _FLAGS}
        seen, acts, rewards, done = Composite(), Composite(), Composite(), Composite(flags)
        for group in self._groups:
            n = len(group.agents)
            if self.use_mask:
                group.observation_spec["mask"] = Categorical(2, shape=(n,), dtype=torch.bool)
            seen[group.name], acts[group.name] = group.observation_spec, group.action_spec
            rewards[group.name] = Composite({"reward": Unbounded((n, 1))}, shape=(n,))
            flags = {name: Categorical(2, shape=(n, 1), dtype=torch.bool) for name in _FLAGS}
            done[group.name] = Composite(flags, shape=(n,))
        if self.return_state:
            state = np.asarray(self.pettingzoo_env.state())
            seen["state"] = Unbounded(state.shape, dtype=torch.from_numpy(state).dtype)
        device = self.device
        self.observation_spec = seen if device is None else seen.to(device)
        self.action_spec = acts if device is None else acts.to(device)
        self.reward_spec = rewards if device is None else rewards.to(device)
        self.done_spec = done if device is None else done.to(device)

    # Stepping ---------------------------------------------------------------------------------

    def _restart(self, seed: int | None, **kwargs: Any) -> _Outcome:
        env = self.pettingzoo_env
        if self.parallel:
            observations, infos = env.reset(seed=seed, **kwargs)
            return _Outcome(observations, {}, {}, {}, infos)
        env.reset(seed=seed, **kwargs)
        return _Outcome({agent: env.observe(agent) for agent in env.agents}, {}, {}, {}, dict(env.infos))

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        seed = kwargs.pop("seed", self._seed)
        self._seed, self._past = None, {}
        return self._data(self._restart(seed, **kwargs), False)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        return self._data(self._act_all(tensordict) if self.parallel else self._act_one(tensordict), True)

    def _action(self, tensordict: TensorDictBase, group: _Group, agent: str) -> Any:
        row = tensordict.get(group.name)[group.agents.index(agent)]
        return group.write(row)

    def _act_all(self, tensordict: TensorDictBase) -> _Outcome:
        alive = set(self.pettingzoo_env.agents)
        actions = {
            agent: self._action(tensordict, group, agent)
            for group in self._groups
            for agent in group.agents
            if agent in alive
        }
        return _Outcome(*self.pettingzoo_env.step(actions))

    def _act_one(self, tensordict: TensorDictBase) -> _Outcome:
        env = self.pettingzoo_env
        agent = env.agent_selection
        group = next(group for group in self._groups if agent in group.agents)
        env.step(self._action(tensordict, group, agent))
        out = _Outcome(
            {name: env.observe(name) for name in env.agents},
            dict(env.rewards),
            dict(env.terminations),
            dict(env.truncations),
            dict(env.infos),
        )
        observations = dict(out.observations)
        while env.agents and _is_over(env, env.agent_selection):
            env.step(None)  # an agent that is done leaves with its turn
            observations.update({name: env.observe(name) for name in env.agents})
        return out._replace(observations=observations)

    # Data -------------------------------------------------------------------------------------

    def _data(self, out: _Outcome, stepped: bool) -> TensorDict:
        env = self.pettingzoo_env
        acting = set(env.agents) if self.parallel else ({env.agent_selection} if env.agents else set())
        data: dict[str, Any] = {}
        for group in self._groups:
            data[group.name] = self._group_data(group, out, acting, stepped)
        flags = np.array([self._past.get(agent, (False, False)) for agent in env.possible_agents])
        over = flags.any(-1)
        done = over.any() if self.done_on_any else over.all()
        terminated = flags[:, 0].any() if self.done_on_any else flags[:, 0].all()
        truncated = flags[:, 1].any() if self.done_on_any else done and not terminated
        for name, flag in zip(_FLAGS, (done, terminated, truncated), strict=True):
            data[name] = torch.tensor([bool(flag)])
        if self.return_state:
            data["state"] = torch.from_numpy(np.array(env.state()))
        return TensorDict(data, batch_size=[], device=self.device)

    def _group_data(self, group: _Group, out: _Outcome, acting: set[str], stepped: bool) -> TensorDict:
        n = len(group.agents)
        arrays = {key: zeros.copy() for key, zeros in group.zeros.items()}
        rewards, flags = np.zeros((n, 1), np.float32), np.zeros((n, 2), np.bool_)
        allowed = np.ones((n, group.choices), np.bool_) if group.masked else None
        for row, agent in enumerate(group.agents):
            if agent in out.observations:
                raw = out.observations[agent]
                if allowed is not None and agent in acting:
                    allowed[row] = _allowed(raw, out.infos.get(agent, {}), allowed[row])
                for key, value in group.read({"observation": raw}).items():
                    arrays[key][row] = value
            elif not self.use_mask:
                raise EnvError(f"{self}: agent {agent!r} has left. Pass use_mask=True, so that data can show it.")
            rewards[row] = out.rewards.get(agent, 0.0)
            before = self._past.get(agent, (not stepped and agent not in out.observations, False))
            now = (bool(out.terminated.get(agent, before[0])), bool(out.truncated.get(agent, before[1])))
            if stepped and now == (False, False) and agent not in out.observations:
                now = (True, False)  # left without a word
            self._past[agent] = now
            flags[row] = now
        nested: dict[str, Any] = {}
        for key, array in arrays.items():
            place(nested, as_tuple(key), torch.from_numpy(array))
        if allowed is not None:
            nested["action_mask"] = torch.from_numpy(allowed)
            action = self.full_action_spec[group.name, "action"]
            action.update_mask(nested["action_mask"].clone())
        if self.use_mask:
            nested["mask"] = torch.tensor([agent in acting for agent in group.agents])
        if stepped:
            nested["reward"] = torch.from_numpy(rewards)
        nested["done"] = torch.from_numpy(flags.any(-1, keepdims=True))
        nested["terminated"], nested["truncated"] = torch.from_numpy(flags[:, :1]), torch.from_numpy(flags[:, 1:])
        return TensorDict(nested, batch_size=[n])

    # The object itself ------------------------------------------------------------------------

    def _set_seed(self, seed: int | None) -> int | None:
        self._seed = seed
        return seed

    def close(self, *, raise_if_closed: bool = True) -> None:
        """Close the environment of PettingZoo. A second call raises unless ``raise_if_closed=False``."""
        was_closed = self.is_closed
        super().close(raise_if_closed=raise_if_closed)
        if not was_closed:
            self.pettingzoo_env.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.__dict__.get('pettingzoo_env')}, groups={self.__dict__.get('group_map')})"


class PettingZooEnv(PettingZooWrapper):
    """An environment of PettingZoo by its name; see :class:`PettingZooWrapper` for the other options.

    Args:
        task: name of its module, such as ``"pistonball_v6"`` or ``"butterfly/pistonball_v6"``.
        parallel: whether to make the parallel form, in which all agents act in each step.
        env_kwargs: go to the environment. What is not an option here goes there, too.

    Raises:
        MissingExtraError: PettingZoo is not installed.
        EnvError: there is no such environment, or it cannot be made; the message has the reason.
    """

    def __init__(
        self,
        task: str,
        parallel: bool = True,
        return_state: bool = False,
        group_map: Any = None,
        use_mask: bool = False,
        categorical_actions: bool = True,
        seed: int | None = None,
        done_on_any: bool | None = None,
        *,
        device: torch.device | str | int | None = None,
        **kwargs: Any,
    ) -> None:
        self_env = _make(task, parallel, kwargs)
        super().__init__(
            self_env,
            return_state=return_state,
            group_map=group_map,
            use_mask=use_mask,
            categorical_actions=categorical_actions,
            seed=seed,
            done_on_any=done_on_any,
            device=device,
        )
        self.task_name = task


def _make(task: str, parallel: bool, kwargs: dict[str, Any]) -> Any:
    require("pettingzoo", extra="pettingzoo", purpose="PettingZooEnv")
    family, _, name = task.rpartition("/")
    tried = []
    for package in _FAMILIES:
        if family and package.rpartition(".")[2].removesuffix("2") != family.removesuffix("2"):
            continue
        try:
            # PettingZoo 1.27 warns of these modules; earlier versions have nothing else.
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                module = import_module(f"{package}.{name}")
                return module.parallel_env(**kwargs) if parallel else module.env(**kwargs)
        except ModuleNotFoundError as error:
            tried.append(f"{package}: {error}")
        except Exception as error:
            raise EnvError(f"PettingZooEnv({task!r}): PettingZoo raised {type(error).__name__}: {error}") from error
    raise EnvError(
        f"task: found no environment {task!r} in PettingZoo ({'; '.join(tried)}). Check the name and its version, and "
        "install what it needs."
    )


def _is_over(env: Any, agent: str) -> bool:
    return bool(env.terminations[agent] or env.truncations[agent])


def _allowed(raw: Any, info: Mapping[str, Any], default: Any) -> Any:
    if isinstance(raw, Mapping) and "action_mask" in raw:
        return np.asarray(raw["action_mask"], np.bool_)
    return np.asarray(info.get("action_mask", default), np.bool_)
