"""AgentGroup: agents of a PettingZoo environment whose data are stacked."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import Space, spaces
from numpy.typing import NDArray
from tensordict import TensorDictBase

from rollwright._keys import NestedKey, as_tuple, unravel
from rollwright.data.specs import Categorical
from rollwright.data.specs.gymspaces import numpy_dtype
from rollwright.envs.arrays import FLAGS, Values
from rollwright.envs.libs.codecs import ActionWriter, ObservationReader, in_numpy_dtype, leaves_of, spec_of
from rollwright.errors import EnvError


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
