"""Fakes with several actions and rewards: under different names, or of different shapes by agent."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase

from rollwright.data.specs import Bounded, Categorical, Composite, OneHot, TensorSpec, Unbounded, stack
from rollwright.testing._fakes import UnseededEnv, check_action, check_actions, put_first, reset_rows

__all__ = [
    "HeterogeneousCountingEnv",
    "HeterogeneousCountingEnvPolicy",
    "MultiKeyCountingEnv",
    "MultiKeyCountingEnvPolicy",
]


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
