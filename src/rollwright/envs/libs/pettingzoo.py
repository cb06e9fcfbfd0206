"""PettingZooEnv and PettingZooWrapper: environments of several agents, whose data are stacked in groups."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from enum import Enum
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import Space, spaces
from numpy.typing import NDArray
from tensordict import TensorDictBase

from rollwright._foreign import class_path, is_pettingzoo_env, kind_in
from rollwright._keys import NestedKey, as_tuple, unravel
from rollwright.data.specs import Categorical, Composite, Unbounded
from rollwright.data.specs.conversion import leaves_of, numpy_dtype
from rollwright.envs.arrays import FLAGS, Entry, Rows, Values
from rollwright.envs.libs.codecs import ActionWriter, ObservationReader, in_numpy_dtype, spec_of
from rollwright.envs.libs.library import LibraryEnv
from rollwright.errors import EnvError, require

__all__ = ["PettingZooEnv", "PettingZooWrapper"]


class MarlGroupMapType(Enum):
    """Groupings of agents that are often used."""

    ALL_IN_ONE_GROUP = 1
    ONE_GROUP_PER_AGENT = 2

    def get_group_map(self, agents: Sequence[str]) -> dict[str, list[str]]:
        """Names of groups with those of their agents."""
        if self is MarlGroupMapType.ALL_IN_ONE_GROUP:
            return {"agents": list(agents)}
        return {agent: [agent] for agent in agents}


def groups_of(given: Any, agents: Sequence[str], parallel: bool) -> dict[str, list[str]]:
    """The groups that ``group_map`` asks for.

    By default, agents of a parallel environment that are called ``name_0``, ``name_1`` form the group ``name``, and
    each agent of a turn-taking environment is a group.

    Raises:
        TypeError: ``given`` is neither a dictionary nor a grouping.
        ValueError: an agent is in no group, or in several; a group has an unknown agent.
    """
    if given is None and not parallel:
        given = MarlGroupMapType.ONE_GROUP_PER_AGENT
    if given is None:
        found: dict[str, list[str]] = {}
        for agent in agents:
            name, _, number = agent.rpartition("_")
            found.setdefault(name if name and number.isdigit() else agent, []).append(agent)
        return found
    if hasattr(given, "get_group_map"):
        return dict(given.get_group_map(list(agents)))
    if not isinstance(given, Mapping):
        raise TypeError(
            f"group_map: expected a dictionary from groups to lists of agents, or a MarlGroupMapType, got {given!r}."
        )
    groups = {name: list(members) for name, members in given.items()}
    listed = [agent for members in groups.values() for agent in members]
    if sorted(listed) != sorted(agents) or not all(groups.values()):
        raise ValueError(
            f"group_map: expected each of the agents {', '.join(agents)} in one group, got {groups}. "
            "Name every agent once."
        )
    return groups


class Outcome(NamedTuple):
    """What a step or a reset gave, by agent; a flag that is missing is as it was."""

    observations: Mapping[str, Any]
    rewards: Mapping[str, Any]
    terminated: Mapping[str, Any]
    truncated: Mapping[str, Any]
    infos: Mapping[str, Any]
    acting: Collection[str]  # agents that act next


class AgentGroup:
    """Agents whose data are stacked; all have the same spaces.

    Args:
        name: of the group.
        agents: its agents.
        env: the environment of PettingZoo.
        categorical: discrete actions as integers instead of one-hot.
        infos: what the first reset said of each agent.
        use_mask: whether data say which agents act next.

    Attributes:
        masked: whether the environment says which actions are allowed.

    Raises:
        EnvError: they have different spaces.
    """

    def __init__(
        self, name: str, agents: list[str], env: Any, categorical: bool, infos: Mapping[str, Any], use_mask: bool
    ) -> None:
        seen, acts = env.observation_space(agents[0]), env.action_space(agents[0])
        for agent in agents[1:]:
            if env.observation_space(agent) != seen or env.action_space(agent) != acts:
                raise EnvError(
                    f"group_map: agents {agents[0]!r} and {agent!r} of group {name!r} have different spaces and cannot "
                    "be stacked. Put them into groups of their own, or pad them with a wrapper of SuperSuit."
                )
        self.name, self.agents, self.use_mask = name, agents, use_mask
        in_seen = isinstance(seen, spaces.Dict) and "action_mask" in seen.spaces
        self.masked = in_seen or any("action_mask" in infos.get(agent, {}) for agent in agents)
        if in_seen:
            seen = spaces.Dict(OrderedDict((key, one) for key, one in seen.spaces.items() if key != "action_mask"))
        leaves = leaves_of(_named(seen), "observation", categorical)
        written = leaves_of(acts, "action", categorical)
        number = len(agents)
        self._read, self._write = ObservationReader(leaves, ()), ActionWriter(acts, written, ())
        self.observation_spec = spec_of(leaves, (number,))
        self.action_spec = spec_of(written, (number,))
        self._zeros = [
            (
                leaf.key,
                self.key(leaf.key),
                np.zeros((number, *leaf.spec.shape), numpy_dtype(leaf.spec.dtype or torch.float32)),
            )
            for leaf in leaves
        ]
        self.action_keys = [(leaf.key, self.key(leaf.key)) for leaf in written]
        self._flags = [self.key(flag) for flag in FLAGS]
        if self.masked:
            self.choices = int(acts.n)
            self.observation_spec["action_mask"] = Categorical(
                2, shape=(number, self.choices), dtype=torch.bool, device="cpu"
            )
        if use_mask:
            self.observation_spec["mask"] = Categorical(2, shape=(number,), dtype=torch.bool, device="cpu")

    def key(self, name: NestedKey) -> NestedKey:
        """The key of an entry of the group."""
        return unravel((self.name, *as_tuple(name)))

    # Actions ----------------------------------------------------------------------------------

    def actions(self, given: TensorDictBase | Values) -> Values:
        """The actions of all agents of the group, as arrays by their key inside it.

        Raises:
            KeyError: one is missing.
        """
        found: Values = {}
        for key, full in self.action_keys:
            value = given.get(full, None)
            if value is None:
                raise KeyError(full)
            found[key] = in_numpy_dtype(value.detach().cpu()).numpy() if isinstance(value, torch.Tensor) else value
        return found

    def action(self, actions: Values, row: int) -> Any:
        """The action of an agent, as the environment takes it.

        Raises:
            SpecError: it lies outside of its space.
        """
        return self._write({key: value[row, ...] for key, value in actions.items()})

    # Data -------------------------------------------------------------------------------------

    def read(self, out: Outcome, past: dict[str, tuple[bool, bool]], values: Values, *, stepped: bool) -> list[str]:
        """Put the data of the group into ``values``, and the flags of its agents into ``past``.

        Args:
            out: what a step or a reset gave.
            past: by agent, whether it was terminated and truncated so far.
            values: arrays by key.
            stepped: whether it was a step.

        Returns:
            Agents that have left.
        """
        n, left, acting = len(self.agents), [], out.acting
        arrays: Values = {key: zeros.copy() for key, _, zeros in self._zeros}
        rewards, flags = np.zeros((n, 1), np.float32), np.zeros((3, n, 1), np.bool_)
        allowed = np.ones((n, self.choices), np.bool_) if self.masked else None
        for row, agent in enumerate(self.agents):
            is_there = agent in out.observations
            if is_there:
                raw = out.observations[agent]
                if allowed is not None and agent in acting:
                    allowed[row] = _allowed(raw, out.infos.get(agent, {}), allowed[row])
                self._read.write({"observation": raw}, arrays, row)
            else:
                left.append(agent)
            if stepped:
                rewards[row] = out.rewards.get(agent, 0.0)
            terminated, truncated = past.get(agent, (not stepped and not is_there, False))
            terminated = bool(out.terminated.get(agent, terminated))
            truncated = bool(out.truncated.get(agent, truncated))
            if stepped and not is_there and not (terminated or truncated):
                terminated = True  # left without a word
            past[agent] = terminated, truncated
            if terminated or truncated:
                flags[:, row, 0] = True, terminated, truncated
        for key, full, _ in self._zeros:
            values[full] = arrays[key]
        if allowed is not None:
            values[self.name, "action_mask"] = allowed
        if self.use_mask:
            values[self.name, "mask"] = np.array([agent in acting for agent in self.agents])
        if stepped:
            values[self.name, "reward"] = rewards
        values.update(zip(self._flags, flags, strict=True))
        return left


def _named(space: Space[Any]) -> Space[Any]:
    return spaces.Dict({"observation": space})


def _allowed(raw: Any, info: Mapping[str, Any], default: NDArray[np.bool_]) -> NDArray[np.bool_]:
    if isinstance(raw, Mapping) and "action_mask" in raw:
        return np.asarray(raw["action_mask"], np.bool_)
    return np.asarray(info.get("action_mask", default), np.bool_)


_FAMILIES = ("pettingzoo.butterfly", "pettingzoo.classic", "pettingzoo.sisl", "pettingzoo.atari", "mpe2")


class PettingZooWrapper(LibraryEnv):
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

    inner_name = "pettingzoo_env"

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
        self._groups = [
            AgentGroup(name, agents, env, categorical_actions, infos, use_mask)
            for name, agents in self.group_map.items()
        ]
        self._place_of = {agent: (group, row) for group in self._groups for row, agent in enumerate(group.agents)}
        self._agents = list(env.possible_agents)
        self._past: dict[str, tuple[bool, bool]] = {}
        self._set_specs()

    def _set_specs(self) -> None:
        flags = {name: Categorical(2, shape=(1,), dtype=torch.bool, device="cpu") for name in FLAGS}
        self.space_rewards, self.nests = {}, {}
        seen, acts, rewards, done = Composite(), Composite(), Composite(), Composite(flags)
        for group in self._groups:
            n = len(group.agents)
            seen[group.name], acts[group.name] = group.observation_spec, group.action_spec
            if group.masked:
                acts[group.name, "action"].mask = torch.ones(n, group.choices, dtype=torch.bool, device="cpu")
            form = Entry((n, 1), np.dtype(np.float32), False)
            self.space_rewards[group.name, "reward"], self.nests[group.name] = form, (n,)
            rewards[group.name] = Composite({"reward": Unbounded((n, 1), device="cpu")}, shape=(n,))
            flags = {name: Categorical(2, shape=(n, 1), dtype=torch.bool, device="cpu") for name in FLAGS}
            done[group.name] = Composite(flags, shape=(n,))
        if self.return_state:
            state = np.asarray(self.pettingzoo_env.state())
            seen["state"] = Unbounded(state.shape, dtype=torch.from_numpy(state).dtype, device="cpu")
        self.space_keys = list(seen.leaves())
        device = self.device
        self.observation_spec = seen if device is None else seen.to(device)
        self.action_spec = acts if device is None else acts.to(device)
        self.reward_spec = rewards if device is None else rewards.to(device)
        self.done_spec = done if device is None else done.to(device)

    # Stepping ---------------------------------------------------------------------------------

    def _restart(self, seed: int | None, **kwargs: Any) -> Outcome:
        env = self.pettingzoo_env
        if self.parallel:
            observations, infos = env.reset(seed=seed, **kwargs)
            return Outcome(observations, {}, {}, {}, infos, env.agents)
        env.reset(seed=seed, **kwargs)
        seen = {agent: env.observe(agent) for agent in env.agents}
        return Outcome(seen, {}, {}, {}, dict(env.infos), [env.agent_selection] if seen else [])

    def reset_values(self, rows: Rows | None = None, **kwargs: Any) -> Values:
        """Begin a new trajectory; what the first step is taken from, flags of agents included, as arrays."""
        seed = kwargs.pop("seed", self._seed)
        self._seed, self._past = None, {}
        return self._data(self._restart(seed, **kwargs), False)

    def step_values(self, given: TensorDictBase | Values) -> Values:
        """Act, by the actions among ``given``; the content of ``"next"`` as arrays."""
        return self._data(self._act_all(given) if self.parallel else self._act_one(given), True)

    def _act_all(self, given: TensorDictBase | Values) -> Outcome:
        alive, actions = self.pettingzoo_env.agents, {}
        for group in self._groups:
            written = group.actions(given)
            for row, agent in enumerate(group.agents):
                if agent in alive:
                    actions[agent] = group.action(written, row)
        seen, rewards, terminated, truncated, infos = self.pettingzoo_env.step(actions)
        return Outcome(seen, rewards, terminated, truncated, infos, self.pettingzoo_env.agents)

    def _act_one(self, given: TensorDictBase | Values) -> Outcome:
        env = self.pettingzoo_env
        group, row = self._place_of[env.agent_selection]
        env.step(group.action(group.actions(given), row))
        # An attribute is looked up in wrapper after wrapper: each once.
        observe, agents, next_to_act = env.observe, env.agents, env.agent_selection
        terminated, truncated = env.terminations, env.truncations
        seen = {name: observe(name) for name in agents}
        out = Outcome(seen, dict(env.rewards), dict(terminated), dict(truncated), dict(env.infos), [next_to_act])
        if not (terminated[next_to_act] or truncated[next_to_act]):
            return out
        while env.agents and _is_over(env, env.agent_selection):
            env.step(None)  # an agent that is done leaves with its turn
            seen.update({name: env.observe(name) for name in env.agents})
        return out._replace(acting=[env.agent_selection] if env.agents else [])

    # Data -------------------------------------------------------------------------------------

    def _data(self, out: Outcome, stepped: bool) -> Values:
        past = self._past
        values: Values = {}
        for group in self._groups:
            left = group.read(out, past, values, stepped=stepped)
            if left and not self.use_mask:
                raise EnvError(f"{self}: agent {left[0]!r} has left. Pass use_mask=True, so that data can show it.")
            if group.masked:
                self._allow(group.name, values[group.name, "action_mask"])
        flags = [past.get(agent, (False, False)) for agent in self._agents]
        if self.done_on_any:
            terminated, truncated = (any(flag) for flag in zip(*flags, strict=True))
            done = terminated or truncated
        else:
            done, terminated = all(map(any, flags)), all(flag for flag, _ in flags)
            truncated = done and not terminated
        values["done"], values["terminated"], values["truncated"] = done, terminated, truncated
        if self.return_state:
            values["state"] = np.array(self.pettingzoo_env.state())
        return values

    def _allow(self, group: str, allowed: NDArray[np.bool_]) -> None:
        """Let the spec of a group's action have the mask of now."""
        spec: Any = self.remember(("action", group), lambda: self.full_action_spec[group, "action"])
        mask = torch.from_numpy(allowed.copy())
        if allowed.any(-1).all():
            spec.mask = mask
        else:
            spec.update_mask(mask)  # which says what is wrong

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
                made = getattr(module, "parallel_env" if parallel else "env", None)
                if made is None:
                    other = "parallel=False, use_mask=True: its agents take turns" if parallel else "parallel=True"
                    raise EnvError(
                        f"parallel: {task!r} has no {'parallel_env' if parallel else 'env'}(), got {parallel}. Pass "
                        f"{other}."
                    )
                return made(**kwargs)
        except ModuleNotFoundError as error:
            tried.append(f"{package}: {error}")
        except EnvError:
            raise
        except Exception as error:
            raise EnvError(f"PettingZooEnv({task!r}): PettingZoo raised {type(error).__name__}: {error}") from error
    raise EnvError(
        f"task: found no environment {task!r} in PettingZoo ({'; '.join(tried)}). Check the name and its version, and "
        "install what it needs."
    )


def _is_over(env: Any, agent: str) -> bool:
    return bool(env.terminations[agent] or env.truncations[agent])
