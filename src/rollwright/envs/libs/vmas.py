"""VmasEnv and VmasWrapper: batches of environments of several agents, simulated on one device by VMAS."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FunctionType, MethodType, ModuleType
from typing import Any, cast

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from rollwright._foreign import class_path, is_vmas_env
from rollwright.data.entries import unchecked_td
from rollwright.data.specs import (
    Bounded,
    Categorical,
    Composite,
    MultiCategorical,
    MultiOneHot,
    OneHot,
    TensorSpec,
    Unbounded,
)
from rollwright.data.specs.discrete import DiscreteSpec
from rollwright.envs.base import EnvBase
from rollwright.envs.libs.building import Available
from rollwright.envs.libs.pettingzoo import groups_of
from rollwright.envs.own_tensors import OwnTensors
from rollwright.errors import EnvError, require


class VmasWrapper(EnvBase):
    """An environment of VMAS that exists already: ``num_envs`` of them, batch size ``[num_envs]``.

    The data of the agents of a group are stacked: ``(group, "observation")`` ``[num_envs, agents, ...]``,
    ``(group, "action")``, ``(group, "reward")`` float32 ``[num_envs, agents, 1]``, and what the scenario says besides
    below ``(group, "info")``. The flags are those of all agents together. ``terminated`` is what the scenario says, and
    ``truncated`` that ``max_steps`` are over, whatever ``terminated_truncated`` of VMAS is.

    What has ended is reset by ``reset_at``, one environment after another, and by ``reset`` where all have ended at
    once, which is far cheaper. With ``reset_together``, it is always ``reset``, and those that go on are put back: the
    choice for many environments that end each at its own time. Which have ended is the one thing that the host reads in
    a step; VMAS itself reads whether actions are in range (not with ``python -O``).

    VMAS draws from one generator for all of its environments; here, each goes on with its own.

    Args:
        env: what ``vmas.make_env(...)`` returns.
        categorical_actions: discrete actions as integers instead of one-hot.
        group_map: names of groups with lists of agents, or a ``MarlGroupMapType``. None: agents called ``name_0``,
            ``name_1`` form the group ``name``; if any agent is called otherwise, or only ``agent`` would remain, all
            form ``"agents"``. Where the agents of such a group have different spaces, each is a group.
        reset_together: see above. It draws other random numbers than ``reset_at``, and puts back what is a tensor
            ``[num_envs, ...]`` in the scenario, the world, and what these hold; nothing else may differ between
            environments.

    Raises:
        TypeError: ``env`` is no environment of VMAS.
        ValueError: ``group_map`` does not fit its agents.
        EnvError: agents of a group have different spaces.

    Example:
        >>> import vmas  # doctest: +SKIP
        >>> env = VmasWrapper(vmas.make_env("balance", num_envs=64, max_steps=100))  # doctest: +SKIP
        >>> env.rollout(3)["agents", "observation"].shape  # doctest: +SKIP
        torch.Size([64, 3, 3, 16])
    """

    returns_copies = True
    resets_by_mask = True
    _not_saved = ("_last",)

    def __init__(
        self, env: Any, *, categorical_actions: bool = True, group_map: Any = None, reset_together: bool = False
    ) -> None:
        if not is_vmas_env(env):
            raise TypeError(
                f"env: expected an environment of VMAS, got {class_path(env)}. Pass what vmas.make_env(...) returns "
                "without wrapper=, or call VmasEnv(scenario, num_envs)."
            )
        super().__init__(device=env.device, batch_size=[env.num_envs])
        self.vmas_env = env
        self.categorical_actions, self.reset_together = categorical_actions, reset_together
        self._generators = list(env.vmas_random_state)  # VMAS's own: of torch, of NumPy, of Python
        names = [agent.name for agent in env.agents]
        with self._own():
            seen, infos = env.get_from_scenario(
                get_observations=True, get_rewards=False, get_infos=True, get_dones=False
            )
        spaces = {
            name: (str(env.get_agent_action_space(agent)), _shapes(seen[i]), _shapes(infos[i]))
            for i, (name, agent) in enumerate(zip(names, env.agents, strict=True))
        }
        self.group_map = self._grouped(group_map, spaces)
        self._rows = {group: [names.index(agent) for agent in agents] for group, agents in self.group_map.items()}
        self._set_specs(seen, infos)
        if reset_together:
            self._check_put_back()

    def _grouped(self, given: Any, spaces: Mapping[str, Any]) -> dict[str, list[str]]:
        agents = list(spaces)
        found = groups_of(_by_name(agents) if given is None else given, agents, parallel=True)
        groups = {}
        for group, members in found.items():
            if all(spaces[agent] == spaces[members[0]] for agent in members):
                groups[group] = members
            elif given is None:
                groups.update({agent: [agent] for agent in members})
            else:
                raise EnvError(
                    f"group_map: expected agents of the same spaces in group {group!r}, got "
                    f"{ {agent: spaces[agent] for agent in members} }. Put them into different groups."
                )
        return groups

    def _check_put_back(self) -> None:
        """Test that a reset of all environments can be undone.

        Raises:
            ValueError: something else differs after it.
        """
        drawn, rows = self._generators, torch.ones(self.batch_size, dtype=torch.bool, device=self.device)
        first = self._observations()
        for _ in range(8):  # a choice between few may be the same by chance
            with self._own() as env, _put_back(env, rows):
                env.reset(return_observations=False)
            drawn_now, self._generators = self._generators, drawn  # noise is that of before
            now, self._generators = self._observations(), drawn_now
            if not bool((first == now).all()):
                raise ValueError(
                    f"reset_together: expected a scenario whose state are tensors [num_envs, ...], got "
                    f"{class_path(self.vmas_env.scenario)}, in which a reset changes something for all environments. "
                    "Leave it out."
                )
        self._generators = drawn

    def _observations(self) -> TensorDict:
        with self._own() as env:
            seen, infos = env.get_from_scenario(True, False, True, False)
        return self._observed(seen, infos).select(*((group, "observation") for group in self._rows))

    def _set_specs(self, seen: Sequence[Any], infos: Sequence[Any]) -> None:
        num, device = self.batch_size[0], self.device
        flag = Categorical(2, shape=(num, 1), dtype=torch.bool, device=device)
        observed, acts, rewards = (Composite(shape=(num,), device=device) for _ in range(3))
        self._choices: dict[str, DiscreteSpec] = {}
        for group, rows in self._rows.items():
            batch = (num, len(rows))
            entries: dict[str, Any] = {"observation": _stacked([seen[i] for i in rows])}
            if infos[rows[0]]:
                entries["info"] = _stacked([infos[i] for i in rows], torch.float32)
            observed[group] = _spec_like(entries, batch)
            action = self._action_spec([self.vmas_env.agents[i] for i in rows])
            if isinstance(action, DiscreteSpec):
                self._choices[group] = action
            acts[group] = Composite(action=action, shape=batch, device=device)
            reward = Unbounded((*batch, 1), device=device, dtype=torch.float32)
            rewards[group] = Composite(reward=reward, shape=batch, device=device)
        self._has_info = {group: "info" in observed[group] for group in self._rows}
        self.observation_spec, self.action_spec, self.reward_spec = observed, acts, rewards
        self.done_spec = Composite(done=flag, terminated=flag, truncated=flag, shape=(num,), device=device)

    def _action_spec(self, agents: Sequence[Any]) -> TensorSpec:
        spaces = [self.vmas_env.get_agent_action_space(agent) for agent in agents]
        space, shape, device = spaces[0], (self.batch_size[0], len(agents)), self.device
        if hasattr(space, "low"):
            low, high = (torch.from_numpy(np.stack([getattr(one, name) for one in spaces])) for name in ("low", "high"))
            return Bounded(low.to(device), high.to(device), shape=(*shape, *space.shape), device=device)
        if hasattr(space, "nvec"):
            nvec = space.nvec.tolist()
            if self.categorical_actions:
                return MultiCategorical(nvec, shape=(*shape, len(nvec)), device=device)
            return MultiOneHot(nvec, shape=(*shape, sum(nvec)), device=device)
        number = int(space.n)
        if self.categorical_actions:
            return Categorical(number, shape=shape, device=device)
        return OneHot(number, shape=(*shape, number), device=device)

    # Stepping ---------------------------------------------------------------------------------

    @contextmanager
    def _own(self) -> Iterator[Any]:
        """VMAS with the generators of this environment, to tell the causes of an end apart, and to return lists."""
        env = self.vmas_env
        shared, told = env.vmas_random_state, (env.terminated_truncated, env.dict_spaces)
        before, shared[:] = list(shared), self._generators
        env.terminated_truncated, env.dict_spaces = True, False
        try:
            yield env
        finally:
            self._generators, shared[:] = list(shared), before
            env.terminated_truncated, env.dict_spaces = told

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        actions: list[Any] = [None] * len(self.vmas_env.agents)
        for group, rows in self._rows.items():
            action = tensordict.get((group, "action"))
            if group in self._choices:
                action = self._choices[group].to_categorical(action)
                action = action if action.ndim > 2 else action.unsqueeze(-1)
            for i, one in zip(rows, action.unbind(1), strict=True):
                actions[i] = one
        with self._own() as env:
            seen, rewards, terminated, truncated, infos = env.step(actions)
        self._last = self._observed(seen, infos)  # what a reset of nothing returns
        outcome: TensorDict = self._last.copy()
        for group, rows in self._rows.items():
            outcome[group, "reward"] = _stacked([rewards[i].reshape(-1) for i in rows], torch.float32)
        terminated, truncated = terminated.unsqueeze(-1), truncated.unsqueeze(-1)
        flags = {"done": terminated | truncated, "terminated": terminated, "truncated": truncated}
        return outcome.update(flags)

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        marks = None if tensordict is None else tensordict.get("_reset", None)
        ended = None if marks is None else marks.cpu().numpy().reshape(-1)
        if ended is not None and not ended.any():
            return self._last
        with self._own() as env:
            if ended is None or ended.all():
                env.reset(return_observations=False, **kwargs)
            elif self.reset_together:
                with _put_back(env, ~cast(Tensor, marks).reshape(-1)):
                    env.reset(return_observations=False, **kwargs)
            else:
                for i in np.flatnonzero(ended).tolist():
                    env.reset_at(i, return_observations=False, **kwargs)
            values = env.get_from_scenario(get_observations=True, get_rewards=False, get_infos=True, get_dones=False)
        return self._observed(*values)

    def _set_seed(self, seed: int | None) -> int | None:
        if seed is not None:
            with self._own() as env:
                env.seed(seed)
        return seed

    def _observed(self, seen: Sequence[Any], infos: Sequence[Any]) -> TensorDict:
        data: dict[str, Any] = {}
        for group, rows in self._rows.items():
            entries = {"observation": _stacked([seen[i] for i in rows])}
            if self._has_info[group]:
                entries["info"] = _stacked([infos[i] for i in rows], torch.float32)
            data[group] = unchecked_td(entries, torch.Size((*self.batch_size, len(rows))), device=self.device)
        return unchecked_td(data, self.batch_size, device=self.device)

    def _tensor_form(self) -> OwnTensors:
        return OwnTensors(self, VmasWrapper, lambda td: self._step(td), lambda td, **kwargs: self._reset(td, **kwargs))

    # The object itself ------------------------------------------------------------------------

    def to(self, device: torch.device | str | int | None) -> VmasWrapper:  # type: ignore[override]
        """Move the simulator, specs and future data to a device; returns the environment."""
        if device is not None:
            self.vmas_env.to(torch.device(device))
        return super().to(device)

    def __repr__(self) -> str:
        groups = {group: len(agents) for group, agents in getattr(self, "group_map", {}).items()}
        return f"{type(self).__name__}(agents={groups}, batch_size={list(self.batch_size)}, device={self.device})"


class VmasEnv(VmasWrapper):
    """Environments of VMAS by the name of their scenario.

    Args:
        scenario: its name, such as ``"balance"``, or a ``vmas.BaseScenario``.
        num_envs: how many are simulated together: the batch size is ``[num_envs]``.
        continuous_actions: whether actions are forces, or choices.
        max_steps: after which a trajectory is truncated; None: never.
        categorical_actions: see :class:`VmasWrapper`.
        seed: of the environment; None: it goes on with the generator that VMAS has.
        group_map: see :class:`VmasWrapper`.
        reset_together: likewise.
        device: where it is simulated.
        scenario_kwargs: arguments of the scenario.
        **kwargs: go to ``vmas.make_env``, and on to the scenario.

    Raises:
        MissingExtraError: VMAS is not installed.
        EnvError: VMAS cannot make it; its message is repeated.

    Example:
        >>> VmasEnv("balance", num_envs=64, max_steps=100, n_agents=4).group_map  # doctest: +SKIP
        {'agents': ['agent_0', 'agent_1', 'agent_2', 'agent_3']}
    """

    def __init__(
        self,
        scenario: Any,
        num_envs: int,
        *,
        continuous_actions: bool = True,
        max_steps: int | None = None,
        categorical_actions: bool = True,
        seed: int | None = None,
        group_map: Any = None,
        reset_together: bool = False,
        device: torch.device | str | int | None = None,
        scenario_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        vmas = require("vmas", extra="vmas", purpose="VmasEnv")
        if not isinstance(num_envs, int) or isinstance(num_envs, bool) or num_envs < 1:
            raise ValueError(f"num_envs: expected a number of environments of at least 1, got {num_envs!r}.")
        try:
            env = vmas.make_env(
                scenario,
                num_envs,
                device=torch.get_default_device() if device is None else torch.device(device),
                continuous_actions=continuous_actions,
                max_steps=max_steps,
                seed=seed,
                **{**(scenario_kwargs or {}), **kwargs},
            )
        except Exception as error:
            raise EnvError(f"VmasEnv({scenario!r}): VMAS raised {type(error).__name__}: {error}") from error
        super().__init__(
            env, categorical_actions=categorical_actions, group_map=group_map, reset_together=reset_together
        )

    available_envs = Available(lambda: _scenarios(), "Names of the scenarios that VMAS has.")


def _scenarios() -> list[str]:
    vmas = require("vmas", extra="vmas", purpose="VmasEnv.available_envs")
    return sorted([*vmas.scenarios, *vmas.mpe_scenarios, *vmas.debug_scenarios])


def _by_name(agents: Sequence[str]) -> dict[str, list[str]]:
    """Groups of agents by how their names begin, where all end with a number; else all of them."""
    groups: dict[str, list[str]] = {}
    for agent in agents:
        name, _, number = agent.rpartition("_")
        if not name or not number.isdigit():
            return {"agents": list(agents)}
        groups.setdefault(name, []).append(agent)
    return {"agents": groups["agent"]} if list(groups) == ["agent"] else groups


def _held(env: Any) -> list[tuple[Any, Any]]:
    """Where a simulator holds tensors of all of its environments: a dictionary or list, and the place in it."""
    found, todo, known = [], [vars(env)], set()
    while todo:
        inside: Any = todo.pop()
        for name, value in list(inside.items() if isinstance(inside, dict) else enumerate(inside)):
            if isinstance(value, Tensor):
                if value.ndim and len(value) == env.num_envs and not isinstance(inside, tuple):
                    found.append((inside, name))
            elif not isinstance(value, (type, FunctionType, MethodType, ModuleType)):
                parts = value if isinstance(value, (dict, list, tuple)) else getattr(value, "__dict__", None)
                if parts is not None and id(parts) not in known:
                    known.add(id(parts))
                    todo.append(parts)
    return found


@contextmanager
def _put_back(env: Any, rows: Tensor) -> Iterator[None]:
    """Leave some environments as they are, whatever the block does to all."""
    before = [(inside, name, inside[name].clone()) for inside, name in _held(env)]
    yield
    for inside, name, kept in before:
        now = inside[name]
        if isinstance(now, Tensor) and now.shape == kept.shape:
            merged = torch.where(rows.reshape(-1, *[1] * (now.ndim - 1)), kept, now)
            inside[name] = merged if 0 in now.stride() else now.copy_(merged)  # in place, for others may hold it


def _shapes(values: Any) -> Any:
    if isinstance(values, dict):
        return {name: _shapes(value) for name, value in values.items()}
    return list(values.shape[1:])


def _stacked(values: Sequence[Any], dtype: torch.dtype | None = None) -> Any:
    """Tensors of agents ``[num_envs, ...]``, or dictionaries of them, as one ``[num_envs, agents, ...]``."""
    if isinstance(values[0], dict):
        return {name: _stacked([value[name] for value in values], dtype) for name in values[0]}
    stacked: Tensor = torch.stack(list(values), 1)
    stacked = stacked if stacked.ndim > 2 else stacked.unsqueeze(-1)
    return stacked if dtype is None else stacked.to(dtype)


def _spec_like(values: Any, batch: Sequence[int]) -> Any:
    if not isinstance(values, dict):
        return Unbounded(values.shape, device=values.device, dtype=values.dtype)
    return Composite({name: _spec_like(value, batch) for name, value in values.items()}, shape=batch)
