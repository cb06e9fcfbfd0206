"""Contracts of the parts of a collector, without any implementation; seeds, states and paths that its methods take.

A *rollout* (:class:`~rollwright.collectors.rollout.rollout.Rollout`) takes steps on a :class:`Path` and fills one batch
at a time. A :class:`~rollwright.collectors.delivery.base.RolloutDelivery` makes of batches what a collector yields or
writes. A worker has both, and a :class:`RolloutObserver` that follows them. :class:`TrajectoryIds` and an observer are
passed to a rollout.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum, auto
from numbers import Integral
from typing import Any, Literal, Protocol, get_args

import torch
from numpy.typing import NDArray
from tensordict import TensorDictBase

from rollwright._keys import NestedKey
from rollwright._warnings import warn_user
from rollwright.data.llm.turns import Version
from rollwright.envs.arrays import Values
from rollwright.errors import NotNative


def never() -> bool:
    """A condition that does not hold."""
    return False


class TrajectoryIds(Protocol):
    """Hands out trajectory ids, each once, in rising order."""

    def take(self, n: int) -> NDArray[Any]:
        """``n`` new ids, int64 ``[n]``."""

    def state_dict(self) -> dict[str, int]:
        """``traj_id``: all ids that were handed out are less."""

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Go on above the saved ids, and never below those that were handed out already."""


class Stage(Enum):
    """Stages of a rollout."""

    RESET = auto()  # environments, if they have to be
    COMPILE = auto()  # the policy
    STEPS = auto()
    FINISH = auto()  # the batch


class RolloutObserver:
    """Follows a rollout; this one keeps every batch."""

    def enter(self, stage: Stage) -> None:
        """A stage begins."""

    def accepts(self, frames: int) -> bool:
        """A batch of ``frames`` frames was taken; if it is refused, it is dropped and another one is taken."""
        return True

    def warn(self, text: str) -> None:
        """Something that the user should know, in the middle of a rollout."""
        warn_user(text, UserWarning)

    def publishes(self, cursor: DataCursor, ids: Iterable[int] | None = None) -> None:
        """Trajectories are about to be published in a replay buffer.

        Args:
            cursor: of the path that took them.
            ids: of them; None: all that ended in the last batch.
        """


class Actor(ABC):
    """A policy on arrays: chooses actions from those of the current TensorDict.

    Attributes:
        how: what runs, for ``stats()`` and ``repr``.
        finite_keys: of its outputs, those to be tested once a batch.
        frozen: whether the weights of a rollout's start act in all of it.
        varies: whether its outputs may be of other keys, shapes or dtypes in the middle of a batch.
    """

    how: str
    varies: bool = True
    frozen: bool = False
    finite_keys: list[NestedKey]

    @abstractmethod
    def start(self, steps: int) -> None:
        """Prepare a rollout.

        Raises:
            NotNative: the policy is no longer what it was.
        """

    @abstractmethod
    def __call__(self, root: Values, ids: NDArray[Any]) -> Values:
        """What the policy writes: arrays by key, ``[*batch, ...]``.

        Args:
            root: the current TensorDict, in row form.
            ids: of trajectories, int64 ``[*batch]``.
        """

    @abstractmethod
    def compiled(self, arguments: Mapping[str, Any], root: Values) -> Actor:
        """A cheaper actor that does the same.

        Raises:
            NotNative: there is none.
        """


class UnfitOutputs(NotNative):
    """Outputs of a policy do not fit in rows: it takes the plain path, whatever else has changed."""


class NothingLeft(Exception):
    """A rollout has found nothing to take: all that was left of the data has failed, and was dropped."""

    def __init__(self) -> None:
        super().__init__("all conversations that were left have failed, and were dropped (on_error='drop').")


class DataCursor:
    """The place of a rollout in data that ends, such as prompts; this one is of environments that have no such data.

    Attributes:
        is_over: whether there is nothing more to give.
        batch_is_over: whether the batch ends with the step that was taken last.
        offers_again: whether complete trajectories whose delivery failed are offered again; if not, they are dropped.
    """

    is_over: bool = False
    batch_is_over: bool = False
    offers_again: bool = False

    @property
    def versions(self) -> Mapping[Any, int]:
        """Of the weights when conversations were begun that were not delivered, by where they come from."""
        return {}

    def keep_place(self) -> None:
        """:meth:`place` is asked for at any time from now on, and what is in progress is kept for it."""

    def look_ahead(self) -> None:
        """Begin what the next rollout begins with, so that :attr:`is_over` says whether there is any."""

    def delivered(self, ids: Iterable[int] | None = None) -> None:
        """Trajectories have reached the consumer, whole.

        Args:
            ids: of them; None: all that ended in the last batch.
        """

    def filtered(self, ids: Iterable[int], reason: str) -> None:
        """A complete group of trajectories will not be delivered, and why: on purpose."""

    def dropped(self) -> None:
        """Trajectories that ended and were not delivered never will be: on purpose."""

    def load_undelivered(self, held: Iterable[tuple[int, TensorDictBase]]) -> None:
        """Go on with trajectories that are held, and that the state has without their ids.

        Args:
            held: ids of the trajectories that are held now, and their first frames.
        """

    def divided(self, states: Sequence[Mapping[str, Any]], count: int) -> list[dict[str, Any]]:
        """Saved states for another number of workers.

        Args:
            states: of :meth:`state_dict`, of all workers.
            count: of those that go on.

        Raises:
            ValueError: they cannot be divided anew.
        """
        raise ValueError("what is in progress belongs to the environment of one worker.")

    def place(self, ids: Iterable[int] | None = ()) -> dict[str, Any] | None:
        """What :meth:`load_state_dict` of another process needs to go on behind what was delivered.

        Args:
            ids: of trajectories that count as delivered, too; None: all that ended in the last batch.

        Returns:
            None: where it goes on depends on nothing that was delivered.
        """
        return None

    def go_back(self, *, keeps: bool = True) -> bool:
        """Nobody gets the last batch, or the one in progress: go on from where it began.

        May be called again.

        Args:
            keeps: whether steps that were taken may be kept for the next batch; if not, they are taken again.

        Returns:
            False: it cannot, and the path begins again.
        """
        return False

    def state_dict(self) -> tuple[dict[str, Any], list[str]] | None:
        """What is in progress, and what of it cannot be saved; None: environment and current TensorDict are all."""
        return None

    def check_state(self, state_dict: Mapping[str, Any]) -> None:
        """Raise what :meth:`load_state_dict` would raise of a state of another make; nothing is changed."""

    def load_state_dict(self, state_dict: Mapping[str, Any], *, ids_are_free: bool) -> None:
        """Go on from a saved state.

        Args:
            state_dict: of :meth:`state_dict`, or of :meth:`place`.
            ids_are_free: whether trajectory ids in it have no other use; if not, they are replaced.
        """
        raise NotImplementedError


class Path(ABC):
    """Takes the steps of a rollout: act, step, record. One path works on TensorDicts, others on arrays.

    It holds what the next step is taken from, the *current TensorDict*: observations, flags, whatever else the
    environment and the policy carry along, and trajectory ids.

    Attributes:
        how: what runs the environment and the policy, and why; for ``stats()`` and ``repr``.
        finite_keys: entries that are NaN where the policy's numbers are, to be tested once a batch.
        calls_policy: whether the policy reads TensorDicts here; if not, its engine does the work.
        cursor: its place in data that ends.
        frames_taken: in the last batch, where its last dimension is not the number of steps; None: it is.
    """

    how: dict[str, str]
    finite_keys: Sequence[NestedKey] = ()
    frames_taken: int | None = None
    calls_policy: bool = True
    cursor: DataCursor = DataCursor()

    def compile(self, arguments: Mapping[str, Any]) -> None:  # noqa: B027 - most paths have nothing to prepare
        """Make the policy cheaper, and warm it up on the current TensorDict.

        Raises:
            NotNative: it cannot be compiled, and runs as before.
        """

    def check(self) -> None:  # noqa: B027 - most paths take any environment
        """Test that the environment is what the path was chosen for.

        Raises:
            NotNative: it is not.
        """

    @property
    def goes_on(self) -> bool:
        """Whether the next batch begins with what an error has left of the last one."""
        return False

    # The current TensorDict ----------------------------------------------------------------------

    @property
    @abstractmethod
    def started(self) -> bool:
        """Whether there is a current TensorDict."""

    @property
    @abstractmethod
    def current(self) -> TensorDictBase | None:
        """What the next step is taken from, ``[*env]``; None: nothing, a reset comes first."""

    @current.setter
    @abstractmethod
    def current(self, current: TensorDictBase | None) -> None: ...

    @abstractmethod
    def reset(self, **kwargs: Any) -> None:
        """Reset all environments; trajectory ids are to be set next."""

    @abstractmethod
    def reset_some(self, marked: torch.Tensor, **kwargs: Any) -> None:
        """Reset where ``marked``, bool ``[*env]``, says; the other environments go on."""

    @abstractmethod
    def set_ids(self, ids: torch.Tensor) -> None:
        """Give each environment the id, int64 ``[*env]``, of the trajectory that it is in."""

    @abstractmethod
    def replace_ids(self, ended: torch.Tensor) -> None:
        """Give fresh ids where ``ended``, bool ``[*env]``, says."""

    # A rollout ------------------------------------------------------------------------------------

    @abstractmethod
    def conform(self, outputs: TensorDictBase | None) -> None:
        """Give batches of random actions the entries that the policy writes, zero where no action is.

        Args:
            outputs: entries ``[*env]``, of :meth:`~rollwright.collectors.rollout.policy_trial.Trial.outputs`.

        Raises:
            UnfitOutputs: they cannot lie in rows.
        """

    @abstractmethod
    def begin(self, *, random: bool) -> None:
        """Open a batch, with random actions or with the policy's."""

    @abstractmethod
    def act(self, t: int) -> None:
        """The policy reads observations and writes actions."""

    @abstractmethod
    def step(self, t: int) -> None:
        """The environment steps; what ended is reset."""

    @abstractmethod
    def record(self, t: int) -> None:
        """The frame goes into the batch's memory."""

    def follow(self, t: int) -> None:  # noqa: B027 - most paths reset with the step
        """After step ``t`` was recorded: reset what ended, where :meth:`step` has not done it."""

    @abstractmethod
    def frame(self, t: int) -> TensorDictBase:
        """The frame ``[*env]`` of time ``t``, which was recorded last, as the batch will hold it."""

    @abstractmethod
    def finish(self, steps: int) -> TensorDictBase:
        """Close the batch after ``steps`` steps; times that were not taken are zero, their ids -1."""

    # What some paths keep beside that -------------------------------------------------------------

    def forget(self) -> None:
        """Drop the current TensorDict for good: what it came from has changed."""
        self.current = None

    def ended(self) -> Sequence[tuple[float, int]] | None:
        """Returns and lengths of the trajectories that ended in the last batch; None: the batch shows them."""
        return None

    def row_ids(self) -> NDArray[Any] | None:
        """Ids of the trajectories that the rows of the next batch go on with, int64 ``[rows]``; None: they are reset.

        -1: the row begins with another trajectory.

        Those of the current TensorDict, where a path does not say otherwise.
        """
        current = self.current
        ids = None if current is None else current.get(("collector", "traj_ids"), None)
        return None if ids is None else ids.reshape(-1).cpu().numpy()

    def stats(self) -> dict[str, Any]:
        """What it adds to ``stats()`` of a collector."""
        return {}

    def close(self) -> None:  # noqa: B027
        """End what is in progress."""


#: What ``stats()`` takes as ``workers``.
WorkerStats = bool | Literal["aggregate", "per_worker", "both"]

_LEAST, _MOST = -(2**63), 2**64 - 1  # that torch takes


def checked_seed(seed: Any) -> int:
    """A seed as an integer.

    Raises:
        TypeError: it is none.
        ValueError: torch cannot be seeded with it.
    """
    if not isinstance(seed, Integral) or isinstance(seed, bool):
        raise TypeError(f"seed: expected an integer, got {type(seed).__name__}: {seed!r}. Pass for example 0.")
    if not _LEAST <= int(seed) <= _MOST:
        raise ValueError(f"seed: expected an integer of -2**63 to 2**64 - 1, got {seed}. Pass a smaller one.")
    return int(seed)


def checked_state(state_dict: Any) -> Mapping[str, Any]:
    """A collector's state.

    Raises:
        TypeError: it is no dictionary.
    """
    if not isinstance(state_dict, Mapping):
        raise TypeError(
            f"state_dict: expected a dictionary, got {type(state_dict).__name__}: {state_dict!r}. Pass what "
            "state_dict() of a collector returned."
        )
    return state_dict


def check_worker_stats(workers: Any) -> None:
    """Test the argument ``workers`` of ``stats()``.

    Raises:
        ValueError: it is none of what is taken.
    """
    if not isinstance(workers, bool) and workers not in get_args(get_args(WorkerStats)[1]):
        raise ValueError(
            f"stats: expected workers=True, False, 'aggregate', 'per_worker' or 'both', got {workers!r}. Pass True, "
            "the default, for a list with an entry for each worker."
        )


_PART = re.compile(r"""\.?(?P<name>[A-Za-z_]\w*)|\[(?P<index>-?\d+)\]|\[(?P<quote>['"])(?P<key>.*?)(?P=quote)\]""")


def resolve(root: Any, path: str) -> Any:
    """The object that ``path`` leads to from ``root``.

    Raises:
        ValueError: the path cannot be read.
        AttributeError: a part of it does not exist; the message names the part.

    Example:
        >>> from types import SimpleNamespace as Box
        >>> resolve(Box(a=[Box(b={"k": 3})]), "a[0].b['k']")
        3
    """
    position, found = 0, root
    while position < len(path):
        part = _PART.match(path, position)
        if part is None or (position == 0 and part.group(0).startswith(".")):
            raise ValueError(
                f"path: expected names, [numbers] and ['keys'] joined by dots, got {path!r}, which cannot be read "
                f"from position {position}."
            )
        try:
            if part["name"] is not None:
                found = getattr(found, part["name"])
            else:
                found = found[int(part["index"]) if part["index"] is not None else part["key"]]
        except (AttributeError, IndexError, KeyError, TypeError) as error:
            raise AttributeError(
                f"path: {path!r} stops at {path[: part.end()]!r}: {type(found).__name__} has no {part.group(0)!r}."
            ) from error
        position = part.end()
    return found


class Reachable:
    """An object whose parts can be read and called by path, and that counts updates of its weights."""

    _weights: Any

    @property
    def policy_version(self) -> int:
        """Number of updates of the weights so far."""
        return int(self._weights.version)

    def get_policy_version(self) -> Version | None:
        """Same as :attr:`policy_version`."""
        return self.policy_version

    def cascade_execute(self, attr_path: str, *args: Any, **kwargs: Any) -> Any:
        """Call what a path leads to, such as ``"env.transform[0].set_extra_state"``.

        Raises:
            AttributeError: the path does not exist.
            TypeError: what it leads to cannot be called.
        """
        found = resolve(self, attr_path)
        if not callable(found):
            raise TypeError(f"attr_path: {attr_path!r} leads to {type(found).__name__}, which cannot be called.")
        return found(*args, **kwargs)

    def get_distant_attr(self, attr: str) -> Any:
        """What a path leads to, such as ``"env.batch_size"``."""
        return resolve(self, attr)

    def getattr_env(self, attr: str) -> Any:
        """An attribute of the environment; of workers, a list of theirs."""
        return self.get_distant_attr(f"env.{attr}")

    def getattr_policy(self, attr: str) -> Any:
        """An attribute of the policy; of workers, a list of theirs."""
        return self.get_distant_attr(f"policy.{attr}")

    def map_fn(
        self,
        method_name: str,
        list_of_args: Sequence[Sequence[Any]] | None = None,
        list_of_kwargs: Sequence[Mapping[str, Any]] | None = None,
    ) -> Any:
        """Call a method of the collector, once for each set of arguments.

        Returns:
            The value of the call; a list of values where several sets of arguments are given.
        """
        count = max(len(list_of_args or ()), len(list_of_kwargs or ()), 1)
        all_args = list_of_args if list_of_args is not None else [()] * count
        all_kwargs = list_of_kwargs if list_of_kwargs is not None else [{}] * count
        if len(all_args) != len(all_kwargs):
            raise ValueError(
                f"list_of_args has {len(all_args)} entries, list_of_kwargs {len(all_kwargs)}. Give one of each a call."
            )
        call = resolve(self, method_name)
        values = [call(*args, **kwargs) for args, kwargs in zip(all_args, all_kwargs, strict=True)]
        return values[0] if len(values) == 1 else values


PreHook = Callable[[], None]
PostHook = Callable[[TensorDictBase], None]


class Hooks:
    """Two callables, each may be None.

    Attributes:
        pre_collect_hook: called without arguments before each rollout.
        post_collect_hook: called with each batch just before it is delivered.
    """

    def __init__(self, pre: PreHook | None, post: PostHook | None) -> None:
        self.pre_collect_hook, self.post_collect_hook = pre, post

    def set(self, name: str, hook: Any) -> None:
        """Set one of them.

        Raises:
            TypeError: it cannot be called.
        """
        if hook is not None and not callable(hook):
            raise TypeError(f"{name}: expected a callable or None, got {type(hook).__name__}: {hook!r}.")
        setattr(self, name, hook)
