"""Fake environments with nested entries, several agents or keys, and flags in several places."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase

from rollwright._keys import NestedKey
from rollwright.data.specs import Binary, Bounded, Categorical, Composite, OneHot, TensorSpec, Unbounded, stack
from rollwright.testing._fakes import CountingEnv, UnseededEnv, check_action, check_actions, reset_rows


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


class MultiKeyCountingEnv(UnseededEnv):
    """Three counters, each with its own action, reward and flags; for environments of several keys.

    ============  =======================================  ==========================  ================
    place         action                                   reward                      observation
    ============  =======================================  ==========================  ================
    root          ``action``, one-hot of 2                 ``reward``                  ``[10, 10, 3]``
    ``nested_1``  ``action``, 0 or 1, for each of 3        ``gift``                    ``[3, 3]``
    ``nested_2``  ``azione``, 0 to 100, for each of 2      ``reward``                  ``[2, 2]``
    ============  =======================================  ==========================  ================

    A reward is its action; an observation is filled with its count; the root's flags decide.
    """

    count: torch.Tensor
    count_nested_1: torch.Tensor
    count_nested_2: torch.Tensor
    nested_dim_1 = 3
    nested_dim_2 = 2

    def __init__(self, max_steps: int = 5, start_val: int = 0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.max_steps, self.start_val = max_steps, start_val
        for name, size in (("count", ()), ("count_nested_1", (3,)), ("count_nested_2", (2,))):
            shape = (*self.batch_size, *size, 1)
            self.register_buffer(name, torch.full(shape, start_val, dtype=torch.int32, device=self.device))
        flag = Categorical(2, shape=(1,), dtype=torch.bool)
        self.full_observation_spec = self._places(
            {"observation": Unbounded((10, 10, 3))},
            {"observation": Bounded(0.0, 200.0, (3, 3))},
            {"observation": Unbounded((2, 2))},
        )
        self.full_action_spec = self._places(
            {"action": OneHot(2)},
            {"action": Categorical(2, shape=(3,))},
            {"azione": Bounded(0.0, 100.0, (2, 1))},
        )
        self.full_reward_spec = self._places(
            {"reward": Unbounded((1,))}, {"gift": Unbounded((3, 1))}, {"reward": Unbounded((2, 1))}
        )
        self.full_done_spec = self._places({"done": flag}, {"done": flag.expand(3, 1)}, {"done": flag.expand(2, 1)})

    def _places(
        self, root: dict[str, TensorSpec], first: dict[str, TensorSpec], second: dict[str, TensorSpec]
    ) -> Composite:
        nests: dict[str, TensorSpec] = {
            "nested_1": Composite(first, shape=(3,)),
            "nested_2": Composite(second, shape=(2,)),
        }
        return Composite({**root, **nests}).expand(self.batch_size)

    def _counts(self) -> list[tuple[tuple[str, ...], torch.Tensor]]:
        return [((), self.count), (("nested_1",), self.count_nested_1), (("nested_2",), self.count_nested_2)]

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        rows = reset_rows(self, tensordict)
        for _, count in self._counts():
            marked = rows.reshape(*self.batch_size, *[1] * (count.ndim - self.ndim))
            count.copy_(torch.where(marked, self.start_val, count))
        return self._observe()

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        check_actions(self, tensordict)
        actions = (
            tensordict["action"].long().argmax(-1, keepdim=True),
            tensordict["nested_1", "action"].unsqueeze(-1),
            tensordict["nested_2", "azione"],
        )
        for (_, count), action in zip(self._counts(), actions, strict=True):
            count += action.bool()
        outcome = self._observe()
        rewards = zip(("reward", ("nested_1", "gift"), ("nested_2", "reward")), actions, strict=True)
        return outcome.update({key: action.float() for key, action in rewards})

    def _observe(self) -> TensorDictBase:
        seen: TensorDictBase = self.full_observation_spec.zero()
        for place, count in self._counts():
            shape = seen.get((*place, "observation")).shape
            seen.set((*place, "observation"), put_first(count.squeeze(-1), shape).float().contiguous())
            seen.set((*place, "done"), count > self.max_steps)
        return seen


class MultiKeyCountingEnvPolicy(TensorDictModuleBase):
    """Acts in :class:`MultiKeyCountingEnv`: on one place at random, on all, or on none."""

    def __init__(self, full_action_spec: Composite, count: bool = True, deterministic: bool = False) -> None:
        super().__init__()
        if not count and not deterministic:
            raise ValueError("deterministic: a policy that does not count has nothing random. Pass deterministic=True.")
        self.full_action_spec = full_action_spec
        self.count = count
        self.deterministic = deterministic
        self.in_keys = []
        self.out_keys: list[Any] = ["action", ("nested_1", "action"), ("nested_2", "azione")]

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write all three actions."""
        actions = self.full_action_spec.zero()
        chosen = -1 if self.deterministic else int(torch.randint(0, 3, ()))
        if self.count:
            if chosen in (-1, 0):
                actions["nested_1", "action"] += 1
            if chosen in (-1, 1):
                actions["nested_2", "azione"] += 1
            if chosen in (-1, 2):
                actions["action"][..., 1] = 1
        return tensordict.update(actions)


class HeterogeneousCountingEnv(UnseededEnv):
    """Three agents whose observations and actions differ in shape, lazily stacked under ``"lazy"``.

    Every entry of an agent that is not empty is filled with the environment's one count, and so is
    ``state`` ``[64, 64, 3]``. The count rises where an agent's action has a nonzero first element.
    """

    count: torch.Tensor
    n_nested_dim = 3

    def __init__(self, max_steps: int = 5, start_val: int = 0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.max_steps, self.start_val = max_steps, start_val
        count = torch.full((*self.batch_size, 1), start_val, dtype=torch.int32, device=self.device)
        self.register_buffer("count", count)
        agents, batch = range(self.n_nested_dim), self.batch_size
        observed = stack([self.get_agent_obs_spec(i) for i in agents])
        acted = stack([self.get_agent_action_spec(i) for i in agents])
        self.full_observation_spec = Composite(lazy=observed, state=Unbounded((64, 64, 3))).expand(batch)
        self.full_action_spec = Composite(lazy=acted).expand(batch)
        earned = Composite(reward=Unbounded((self.n_nested_dim, 1)), shape=(self.n_nested_dim,))
        self.full_reward_spec = Composite(lazy=earned).expand(batch)
        flag = Categorical(2, shape=(self.n_nested_dim, 1), dtype=torch.bool)
        self.full_done_spec = Composite(lazy=Composite(done=flag, shape=(self.n_nested_dim,))).expand(batch)

    def get_agent_obs_spec(self, i: int) -> Composite:
        """What agent ``i`` observes; an entry that only others have is empty."""
        return Composite(
            camera=Bounded(0.0, 200.0, (7, 7, 3)),
            lidar=Bounded(0.0, 5.0, ((8, 8, 0)[i],)),
            vector=Unbounded(((3, 2, 2)[i],)),
            tensor_0=Unbounded(((1, 0, 0)[i],)),
            tensor_1=Bounded(0.0, 3.0, ((0, 0), (1, 2), (0, 0))[i]),
            tensor_2=Unbounded(((0, 0, 0), (0, 0, 0), (1, 2, 3))[i]),
        )

    def get_agent_action_spec(self, i: int) -> Composite:
        """How agent ``i`` acts."""
        return Composite(action=Bounded(-1.0, 1.0, ((3, 2, 2)[i],)))

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        self.count.copy_(torch.where(reset_rows(self, tensordict), self.start_val, self.count))
        return self._observe()

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        moved = torch.zeros_like(self.count, dtype=torch.bool)
        for i in range(self.n_nested_dim):
            action, spec = tensordict["lazy"][..., i]["action"], self.get_agent_action_spec(i)["action"]
            check_action(self, ("lazy", "action"), action, tensordict.batch_size + spec.shape)
            moved |= action[..., :1] != 0
        self.count += moved
        return self._observe().update(self.full_reward_spec.zero())

    def _observe(self) -> TensorDictBase:
        filled = [
            TensorDict(
                {
                    key: put_first(self.count.squeeze(-1), self.batch_size + spec.shape).float().contiguous()
                    for key, spec in self.get_agent_obs_spec(i).leaves().items()
                },
                self.batch_size,
                device=self.device,
            ).set("done", self.count > self.max_steps)
            for i in range(self.n_nested_dim)
        ]
        state = put_first(self.count.squeeze(-1), torch.Size([*self.batch_size, 64, 64, 3])).float().contiguous()
        lazy = LazyStackedTensorDict.lazy_stack(filled, self.ndim)
        return TensorDict({"lazy": lazy, "state": state}, self.batch_size, device=self.device)


class HeterogeneousCountingEnvPolicy(TensorDictModuleBase):
    """Acts with ones (or zeros) for all agents of :class:`HeterogeneousCountingEnv`."""

    def __init__(self, full_action_spec: Composite, count: bool = True) -> None:
        super().__init__()
        self.full_action_spec = full_action_spec
        self.count = count
        self.in_keys = []
        self.out_keys: list[Any] = [("lazy", "action")]

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the actions."""
        actions = self.full_action_spec.one() if self.count else self.full_action_spec.zero()
        return tensordict.update(actions)


def put_first(value: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """``value`` with dimensions of one added at its end, expanded to ``shape``."""
    return value.reshape(value.shape + (1,) * (len(shape) - value.ndim)).expand(shape)
