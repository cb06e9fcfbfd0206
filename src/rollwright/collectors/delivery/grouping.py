"""GroupAssembler: puts conversations together, and those that begin with one prompt to groups."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, cast

from rollwright._keys import NestedKey
from rollwright.collectors.delivery.assembler import Trajectory, TrajectoryAssembler
from rollwright.collectors.rollout.paths.conversations.pool import is_pool_of_conversations
from rollwright.data.llm.turns import Origin
from rollwright.envs.base import EnvBase
from rollwright.envs.batched.async_pool import AsyncEnvPool
from rollwright.envs.llm.core import PromptSource

_ORIGIN: tuple[NestedKey, ...] = ("prompt_index", "epoch", "repeat", "group_id")


def group_sizes(env: EnvBase) -> Callable[[Origin], int]:
    """How many conversations the group has that a conversation from somewhere belongs to.

    Raises:
        ValueError: the environment has no conversations.
    """
    source = getattr(getattr(env, "conversations", None), "source", None)
    if isinstance(source, PromptSource):
        return source.group_size
    if isinstance(env, AsyncEnvPool) and is_pool_of_conversations(env):
        sizes: list[int] = env.repeats
        return lambda origin: sizes[origin.group % len(sizes)]
    raise ValueError(
        f"groups_per_batch: expected an environment whose conversations begin with prompts of a dataset, such as "
        f"LLMEnv or ChatEnv, got {env}. Pass trajs_per_batch=, which takes any environment."
    )


class GroupAssembler(TrajectoryAssembler):
    """A :class:`~rollwright.collectors.delivery.assembler.TrajectoryAssembler` whose trajectories come in groups.

    What is complete is counted, and popped, in groups: all conversations that begin with one prompt, in order of their
    repeats. A group is complete when its last conversation has ended.

    Args:
        num_envs: rows of a batch.
        size: how many conversations the group has that a conversation from somewhere belongs to.
    """

    def __init__(self, num_envs: int, size: Callable[[Origin], int]) -> None:
        self._size = size
        super().__init__(num_envs)

    def _clear(self) -> None:
        super()._clear()
        self._open_groups: dict[int, list[tuple[int, Trajectory]]] = {}
        self._groups: deque[list[Trajectory]] = deque()

    @property
    def num_complete(self) -> int:
        """Groups that are complete and wait to be delivered."""
        return len(self._groups)

    @property
    def num_conversations_held(self) -> int:
        """Conversations that are complete and wait for others of their group, or to be delivered."""
        return len(self._all_complete())

    def _completed(self, found: Trajectory) -> None:
        origin = origin_of(found)
        group = self._open_groups.setdefault(origin.group, [])
        group.append((origin.repeat, found))
        if len(group) >= self._size(origin):
            group.sort(key=lambda each: each[0])
            self._groups.append([trajectory for _, trajectory in self._open_groups.pop(origin.group)])

    def _all_complete(self) -> list[Trajectory]:
        waiting = [trajectory for group in list(self._open_groups.values()) for _, trajectory in group]
        return [trajectory for group in self._groups.copy() for trajectory in group] + waiting

    def pop(self, n: int) -> list[Trajectory]:
        """The conversations of the ``n`` groups that were complete first, group after group."""
        return [trajectory for _ in range(n) for trajectory in self._groups.popleft()]

    def put_back(self, popped: Sequence[Trajectory]) -> None:
        """See :meth:`TrajectoryAssembler.put_back`."""
        groups: dict[int, list[Trajectory]] = {}
        for found in popped:
            groups.setdefault(origin_of(found).group, []).append(found)
        self._groups.extendleft(reversed(groups.values()))


def origin_of(found: Trajectory) -> Origin:
    """Where a conversation comes from, as its first frame says; the seed is not among that."""
    piece = found.pieces[0]
    first = piece.frames.rows(piece.start, piece.start + 1)
    index, epoch, repeat, group = (int(cast(Any, first.get(key)).reshape(-1)[0]) for key in _ORIGIN)
    return Origin(index, epoch, repeat, group, 0)
