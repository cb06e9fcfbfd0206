"""Groups of agents whose data are stacked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any


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
