"""The base class of SerialEnv and ParallelEnv."""

from __future__ import annotations

import operator
import weakref
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Self, cast

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase
from torch import Tensor

from rollwright._keys import NestedKey
from rollwright._seeding import seed_torch
from rollwright.data.specs import Composite, StackedComposite
from rollwright.data.specs.discrete import choices
from rollwright.envs._checks import complete_reset, complete_step
from rollwright.envs.base import EnvBase
from rollwright.envs.each import EACH, renamed
from rollwright.envs.factories import (
    SPECS,
    common_batch_size,
    common_device,
    is_ragged,
    placed,
    stacked_specs,
)
from rollwright.errors import EnvError, RollwrightError


class BatchedEnv(EnvBase):
    """A batch of environments, ``[num_workers, *batch]``.

    After :meth:`close`, the first reset of all environments (or :meth:`set_seed`) makes new ones.

    Args:
        parts: the environments, or what is known of them: ``batch_size``, ``device``, ``allow_done_after_reset`` and
            the five ``full_*_spec``.
        device: where the batch's data is put; None: where the environments have theirs.

    Attributes:
        num_workers: number of environments.
        openings: how often environments were made: once, and with each reset after :meth:`close`.
    """

    returns_copies = True  # stacking copies
    made_its_parts = True
    remedy_when_closed = "Reset it first: that makes its environments again"

    def __init__(self, parts: Sequence[Any], device: torch.device | str | int | None) -> None:
        batch = common_batch_size([part.batch_size for part in parts])
        super().__init__(
            device=common_device([part.device for part in parts]) if device is None else device,
            batch_size=(len(parts), *batch),
            allow_done_after_reset=any(part.allow_done_after_reset for part in parts),
        )
        self.num_workers = len(parts)
        listed = {name: [getattr(part, f"full_{name}_spec") for part in parts] for name in SPECS}
        for name, spec in stacked_specs(listed, self.device).items():
            setattr(self, f"full_{name}_spec", spec)
        self.openings = 1  # how often environments were made
        self._moved_to: torch.device | None = None
        self._ragged = any(is_ragged(getattr(self, f"full_{name}_spec")) for name in SPECS)

    def _finalize(self) -> None:
        super()._finalize()
        self._follow_masks()

    def _follow_masks(self) -> None:
        """Let actions have the masks that their environments set."""
        spec = self.full_action_spec
        if isinstance(spec, StackedComposite):
            for row, own in enumerate(spec.specs):
                for key, leaf in choices(own).items():
                    leaf.follow_mask(_Masks(self, key, row))
        else:
            for key, leaf in choices(spec).items():
                leaf.follow_mask(_Masks(self, key))

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._follow_masks()

    def close(self, *, raise_if_closed: bool = True) -> None:
        """Close all environments. A second call raises unless ``raise_if_closed=False``.

        Raises:
            EnvError: they are closed.
        """
        if self.is_closed and raise_if_closed:
            raise EnvError(f"{self} is already closed. Pass raise_if_closed=False to allow this.")
        super().close()

    # Closed, and opened again ---------------------------------------------------------------------

    @abstractmethod
    def _open(self) -> Sequence[Any]:
        """Make environments in the place of those that were closed; returns what the constructor calls parts.

        Raises:
            EnvError: that cannot be.
        """

    @abstractmethod
    def known_parts(self) -> Sequence[Any]:
        """The parts that were there before."""

    def _reopen(self) -> None:
        """See :class:`EnvBase`.

        Raises:
            EnvError: other environments were made than before, or those that were closed once more.
        """
        before = list(self.known_parts())
        parts = self._open()
        self.is_closed = False
        self.openings += 1
        for i, (new, old) in enumerate(zip(parts, before, strict=True)):
            if new is old or _entries(new) != _entries(old):
                self.close()
                how = "the one that was closed" if new is old else f"one of other specs, {getattr(new, 'text', new)},"
                raise EnvError(
                    f"{type(self).__name__}[{i}]: a reset after close() makes new environments, and create_env_fn has "
                    f"returned {how}. Let it make one like it at each call, or make a new {type(self).__name__}."
                )
        if self._moved_to is not None:
            self.to(self._moved_to)

    def call_in_hosts(self, function: Callable[..., object]) -> None:
        """Call a function in each process that hosts environments, with each :class:`Hosted` there.

        Environments of this process are among the modules of the batch, and are left out.
        """

    def to(self, device: torch.device | str | int | None) -> Self:  # type: ignore[override]
        """Move the environments and the batch; returns the environment."""
        super().to(device)
        self._follow_masks()
        self._moved_to = self.device if device is not None else self._moved_to
        return self

    # Resets and seeds ---------------------------------------------------------------------------

    def seed_for_reset(self, kwargs: dict[str, Any]) -> None:
        """Take a seed out of the arguments of a reset, and seed each environment with its own, as ``set_seed``.

        Raises:
            EnvError: ``list_of_kwargs`` has another length than there are environments.
        """
        each = kwargs.get(EACH)
        if each is not None and len(each) != self.num_workers:
            raise EnvError(
                f"{EACH}: expected one dictionary for each of the {self.num_workers} environments, got {len(each)}. "
                "Pass an empty one where there is nothing to say."
            )
        seed = kwargs.pop("seed", None)
        if seed is not None:
            self._seed_envs(seed, False)

    def _is_marked(self, row: TensorDictBase | None) -> bool:
        """Whether a worker has anything to reset: without any mask, or with one that is not all False."""
        masks = [] if row is None else [row.get(key, None) for key in self.reset_keys]
        masks = [mask for mask in masks if mask is not None]
        return not masks or any(bool(mask.any()) for mask in masks)

    def _filled(self, fresh: Sequence[TensorDictBase | None], parts: Sequence[Any]) -> list[TensorDictBase]:
        """Something of the right form for workers that were not reset; it is not read."""
        if self._ragged:
            return [
                part.full_observation_spec.zero().update(part.full_done_spec.zero()) if row is None else row
                for part, row in zip(parts, fresh, strict=True)
            ]
        example = next(row for row in fresh if row is not None)
        return [example if row is None else row for row in fresh]

    def _stack(self, rows: Sequence[TensorDictBase]) -> TensorDictBase:
        rows = [placed(row, self.device) for row in rows]
        if self._ragged:
            return cast(TensorDictBase, LazyStackedTensorDict.lazy_stack(rows, 0))
        return cast(TensorDictBase, torch.stack(rows, 0))  # type: ignore[arg-type]

    def joined(self, call: str, rows: Sequence[TensorDictBase], *, whole: bool = False) -> TensorDictBase:
        """What ``step_outcome`` or ``reset_outcome`` returns, where ``rows`` are what the environments' have returned.

        Args:
            call: ``"step"`` or ``"reset"``.
            rows: of all environments; those that were not reset hold anything.
            whole: whether nothing was given to the reset.
        """
        with self._named_errors(call):
            outcome = self._stack(rows)
        if call == "step":
            return complete_step(self, outcome.empty(), outcome)
        return complete_reset(self, None if whole else outcome.empty(), outcome)

    def named_error(self, worker: int, error: RollwrightError) -> RollwrightError:
        """What the environment of a worker raised, with the worker's place in front."""
        return renamed(f"{type(self).__name__}[{worker}]", error)

    def set_seed(self, seed: int | None = None, static_seed: bool = False) -> int | None:
        """Seed all environments: the first of each worker follows the last of the worker before.

        Returns:
            The seed of the last environment.
        """
        last = super().set_seed(seed, static_seed)
        if seed is not None:
            seed_torch(seed)  # the environments have left theirs
        return last

    def start(self) -> None:
        """No effect: the environments are there from the beginning, and are recreated by a reset after close()."""


class _Masks:
    """The masks that the environments of a batch have set for an action, stacked; None: none has.

    Args:
        env: the batch.
        key: of the action.
        row: of the environment whose mask is meant; None: all.
    """

    def __init__(self, env: BatchedEnv, key: NestedKey, row: int | None = None) -> None:
        self._row = row
        self._env, self._key = weakref.ref(env), key  # who drops the batch ends its processes
        self._specs: list[Composite] = []
        self._leaves: list[Any] = []

    def __call__(self) -> Tensor | None:
        env = self._env()
        if env is None:
            return None
        parts = env.known_parts()
        specs = [part.full_spec("action") for part in (parts if self._row is None else [parts[self._row]])]
        if not (len(specs) == len(self._specs) and all(map(operator.is_, specs, self._specs))):
            self._specs, self._leaves = specs, [spec[self._key] for spec in specs]
        masks = [leaf.mask for leaf in self._leaves]
        found: Tensor | None = next((mask for mask in masks if mask is not None), None)
        if found is None:
            return None
        everything = torch.ones_like(found)
        device = found.device if env.device is None else env.device
        rows = [(everything if mask is None else mask).to(device) for mask in masks]
        return torch.stack(rows, 0) if self._row is None else rows[0]


def _entries(part: Any) -> dict[Any, Any]:
    """Shapes and dtypes of all that an environment reads and returns."""
    specs = [(name, getattr(part, f"full_{name}_spec")) for name in SPECS]
    return {(name, key): (leaf.shape, leaf.dtype) for name, spec in specs for key, leaf in spec.leaves().items()}
