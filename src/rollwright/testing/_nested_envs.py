"""Fake environments with nested entries, several agents, and flags in several places."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from rollwright._keys import NestedKey
from rollwright.data.specs import Binary, Categorical, Composite, TensorSpec, Unbounded
from rollwright.testing._counting_envs import CountingEnv
from rollwright.testing._fakes import UnseededEnv, check_actions, reset_rows

__all__ = ["MockNestedResetEnv", "MultiAgentCountingEnv", "NestedCountingEnv"]


class NestedCountingEnv(CountingEnv):
    """:class:`CountingEnv` with entries below ``"data"``, of batch size ``[*batch, nested_dim]``.

    Args:
        nest_obs_action: observation as ``("data", "states")``, action as ``("data", "action")``; the
            largest of the ``nested_dim`` actions is the increment.
        nest_done: flags below ``"data"``.
        nest_reward: reward as ``("data", "reward")``.
        nested_dim: size of the nest.
        has_root_done: flags at the root beside nested ones.
    """

    def __init__(
        self,
        max_steps: int = 5,
        start_val: int = 0,
        nest_obs_action: bool = True,
        nest_done: bool = True,
        nest_reward: bool = True,
        nested_dim: int = 3,
        has_root_done: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(max_steps=max_steps, start_val=start_val, **kwargs)
        self.nested_dim = nested_dim
        self.has_root_done = has_root_done
        self.nested_obs_action = nest_obs_action
        self.nested_done = nest_done
        self.nested_reward = nest_reward
        shape = (*self.batch_size, nested_dim, 1)
        if nest_obs_action:
            self.full_observation_spec = self._below_data(states=Unbounded(shape, dtype=torch.int32))
            self.full_action_spec = self._below_data(action=Binary(1, shape=shape))
        if nest_reward:
            self.full_reward_spec = self._below_data(reward=Unbounded(shape))
        if nest_done:
            flags = self._below_data(done=Categorical(2, shape=shape, dtype=torch.bool))
            if has_root_done:
                flags["done"] = Categorical(2, shape=(*self.batch_size, 1), dtype=torch.bool)
            self.full_done_spec = flags

    def _below_data(self, **leaves: TensorSpec) -> Composite:
        return Composite(data=Composite(leaves, shape=(*self.batch_size, self.nested_dim)), shape=self.batch_size)

    def _increment(self, tensordict: TensorDictBase) -> torch.Tensor:
        action = super()._increment(tensordict)
        return action.amax(-2) if self.nested_obs_action else action

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        return self._nest(super()._reset(tensordict, **kwargs))

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        return self._nest(super()._step(tensordict))

    def _nest(self, flat: TensorDictBase) -> TensorDictBase:
        """Move what the specs say lies in the nest there."""
        moves: list[tuple[str, str, bool]] = [
            ("observation", "states", self.nested_obs_action),
            ("reward", "reward", self.nested_reward),
            ("done", "done", self.nested_done),
            ("terminated", "terminated", self.nested_done),
        ]
        below = TensorDict({}, (*self.batch_size, self.nested_dim), device=self.device)
        for old, new, is_nested in moves:
            value = flat.get(old, None)
            if is_nested and value is not None:
                below.set(new, value.unsqueeze(-2).repeat_interleave(self.nested_dim, -2))
                if not (self.has_root_done and old in ("done", "terminated")):
                    flat.pop(old)
        return flat if below.is_empty() else flat.set("data", below)


class MultiAgentCountingEnv(UnseededEnv):
    """Agents with random observations, all done after ``max_steps``; for keys three levels deep.

    Each agent has ``observation`` ``[*batch, 3, 4]``, ``action``, ``reward`` and flags at
    ``(group, agent, ...)``; the environment's own flag at the root is called ``env_done_key``.

    Args:
        n_agents: agents are called ``"agent_0"``, ``"agent_1"``...
        group_map: agents by group; default: all in the group ``"agents"``.
        env_done_key: name of the flag at the root.
    """

    count: torch.Tensor

    def __init__(
        self,
        n_agents: int,
        group_map: Mapping[str, Sequence[str]] | None = None,
        max_steps: int = 5,
        start_val: int = 0,
        env_done_key: str = "env_done",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.max_steps, self.start_val = max_steps, start_val
        self.env_done_key = env_done_key
        self.n_agents = n_agents
        self.agent_names = [f"agent_{index}" for index in range(n_agents)]
        self.group_map = {"agents": self.agent_names} if group_map is None else dict(group_map)
        placed = sorted(agent for agents in self.group_map.values() for agent in agents)
        if placed != sorted(self.agent_names):
            raise ValueError(
                f"group_map: expected each of {self.agent_names} once, got {placed}. List every agent once."
            )
        batch = self.batch_size
        flag = Categorical(2, shape=(*batch, 1), dtype=torch.bool)
        self.observation_spec = self._each_agent("observation", Unbounded((*batch, 3, 4)))
        self.action_spec = self._each_agent("action", Binary(1, shape=(*batch, 1)))
        self.reward_spec = self._each_agent("reward", Unbounded((*batch, 1)))
        flags = self._each_agent("done", flag)
        flags[env_done_key] = flag
        self.done_spec = flags
        self.register_buffer("count", torch.zeros((*batch, 1), dtype=torch.int32, device=self.device))

    def _places(self) -> list[tuple[str, str]]:
        return [(group, agent) for group, agents in self.group_map.items() for agent in agents]

    def _each_agent(self, name: str, spec: TensorSpec) -> Composite:
        batch = self.batch_size
        groups = {
            group: Composite({agent: Composite({name: spec.clone()}, shape=batch) for agent in agents}, shape=batch)
            for group, agents in self.group_map.items()
        }
        return Composite(groups, shape=batch)

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        self.count.copy_(torch.where(reset_rows(self, tensordict), self.start_val, self.count))
        return self._observe()

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        check_actions(self, tensordict)
        self.count += 1
        outcome = self._observe()
        for place in self._places():
            outcome.set((*place, "reward"), torch.zeros(self.count.shape, device=self.device))
        return outcome

    def _observe(self) -> TensorDict:
        done = self.count > self.max_steps
        fields: dict[NestedKey, torch.Tensor] = {self.env_done_key: done}
        for place in self._places():
            fields[*place, "observation"] = torch.rand((*self.batch_size, 3, 4), device=self.device)
            fields[*place, "done"] = done.clone()
        return TensorDict(fields, self.batch_size, device=self.device)


class MockNestedResetEnv(UnseededEnv):
    """Two agents' flags of which one is set early, and the root's on demand; for which flag decides.

    Nothing is observed and nothing earned. With ``done_at_root`` the root ends after ``num_steps``
    and ``agent_1`` with every step; without, ``agent_1`` ends after ``num_steps``.
    """

    def __init__(self, num_steps: int, done_at_root: bool) -> None:
        super().__init__(device="cpu")
        self._num_steps = num_steps
        self._counter = 0
        self.done_at_root = done_at_root
        flag = Binary(1, dtype=torch.bool)
        flags = Composite(agent_1=Composite(done=flag), agent_2=Composite(done=flag.clone()))
        if done_at_root:
            flags["done"] = flag.clone()
        self.full_done_spec = flags
        self.full_reward_spec = Composite()

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        if bool(reset_rows(self, tensordict).any()):
            self._counter = 0
        return self._flags(root=False, first=False)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        self._counter += 1
        ended = self._counter >= self._num_steps
        return self._flags(root=ended, first=self.done_at_root or ended)

    def _flags(self, *, root: bool, first: bool) -> TensorDict:
        fields: dict[str, Any] = {
            "agent_1": {"done": torch.tensor([first])},
            "agent_2": {"done": torch.tensor([False])},
        }
        if self.done_at_root:
            fields["done"] = torch.tensor([root])
        return TensorDict(fields)
