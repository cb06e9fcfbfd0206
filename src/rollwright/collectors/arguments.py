"""Arguments of collectors' methods: checks of seeds and states, and paths to nested attributes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any, Literal, get_args

from rollwright.data.llm.turns import Version

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
