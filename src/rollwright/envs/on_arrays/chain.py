"""ArrayChain: the array forms of transforms that follow an environment, one after the other."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from rollwright.envs.arrays import FLAGS, ArrayEnv, ArrayTransform, Rows, Values
from rollwright.envs.on_arrays.tensordicts import Deviation, OnTensorDicts, RootTensorDicts, as_tensordict
from rollwright.errors import RollwrightError

Step = Callable[[Values, Values], None]
Reset = Callable[[Values, "Rows | None", "Values | None"], None]


class ChainDeviation(RollwrightError):
    """A transform of a chain returned something else than its specs announce.

    Attributes:
        place: of the first transform that was not called.
        deviation: what it returned, and why that does not fit.
    """

    def __init__(self, place: int, deviation: Deviation) -> None:
        super().__init__(str(deviation))
        self.place, self.deviation = place, deviation


class ArrayChain:
    """Steps and resets of transforms on arrays; those that work on TensorDicts are called on TensorDicts.

    Args:
        base: the environment that the transforms follow.
        roots: makes what they read of the root, as TensorDicts.
        may_contradict: whether flags that a transform sets without ``done`` end a trajectory.

    Attributes:
        entries: after the transforms added so far.
        rewards: likewise.
        reads: what the environment and they read of the root.
        parts: array forms, in order.
        on_tensordicts: names of the transforms that are called on TensorDicts.
    """

    def __init__(self, base: ArrayEnv, roots: RootTensorDicts, *, may_contradict: bool) -> None:
        self.entries, self.rewards, self.reads = dict(base.entries), dict(base.rewards), list(base.reads)
        self.parts: list[ArrayTransform | OnTensorDicts] = []
        self.on_tensordicts: list[str] = []
        self.roots, self._may_contradict, self._follows = roots, may_contradict, base.done_follows
        self._batch = base.batch
        self._steps: list[Step] = []
        self._resets: list[Reset] = []

    def add(self, part: ArrayTransform | OnTensorDicts) -> None:
        """Add the array form of the next transform."""
        self.parts.append(part)
        self._steps.append(part.step)
        if isinstance(part, OnTensorDicts):
            self.on_tensordicts.append(part.name)
            self._resets.append(part.reset)
        else:
            self._resets.append(_reset_of(part))
        for key in part.drops:
            self.entries.pop(key, None)
            self.rewards.pop(key, None)
        self.entries.update(part.entries)
        self.rewards.update(part.rewards)
        self.reads[:] = [key for key in self.reads if key not in part.made]
        self.reads += [key for key in part.reads if key not in self.reads]

    @property
    def steps(self) -> list[Step]:
        """The steps of the transforms added so far."""
        return list(self._steps)

    @property
    def inverses(self) -> list[Callable[[Values], None]]:
        """Functions of what the environment is given, in the order in which they are called."""
        return [part.inverse for part in reversed(self.parts) if part.inverse is not None]

    @property
    def reads_env(self) -> bool:
        """Whether a transform reads or steps the environment itself."""
        return any(part.reads_env for part in self.parts)

    def step(self, root: Values, out: Values) -> None:
        """Change the outcome of a step in place.

        Raises:
            ChainDeviation: a transform does something else than announced.
        """
        for i, step in enumerate(self._steps):
            try:
                step(root, out)
            except Deviation as found:
                raise ChainDeviation(i + 1, found) from None
        if self.on_tensordicts:
            self._settle(out)

    def _settle(self, out: Values) -> None:
        """Let ``done`` follow from the other flags, where transforms on TensorDicts may have set these alone."""
        causes, done = out["terminated"] | out["truncated"], out["done"]
        if not self._follows:
            out["done"] = done | causes if self._may_contradict else done
            return
        if (done == causes) if not self._batch else not np.count_nonzero(done != causes):
            return
        if self._may_contradict and not np.count_nonzero(done & ~causes):
            out["done"] = causes
            return
        roots = self.roots
        forms, hidden = {**roots.forms, **self.entries, **self.rewards}, {*FLAGS} - roots.forms.keys()
        td = as_tensordict(out, forms, roots.batch_size, roots.device, left_out=hidden)
        reason = f"{', '.join(self.on_tensordicts)}: 'done' is not 'terminated' or 'truncated'"
        raise ChainDeviation(len(self.parts), Deviation(reason, td))

    def reset(self, fresh: Values, rows: Rows | None, root: Values | None) -> None:
        """Change what a reset returned in place; arguments of :meth:`OnTensorDicts.reset`.

        Raises:
            ChainDeviation: a transform does something else than announced.
        """
        for i, reset in enumerate(self._resets):
            try:
                reset(fresh, rows, root)
            except Deviation as found:
                raise ChainDeviation(i + 1, found) from None


def _reset_of(part: ArrayTransform) -> Reset:
    reset, restart = part.reset, part.restart
    if restart is None:
        return lambda fresh, rows, root: reset(fresh)
    return lambda fresh, rows, root: restart(fresh, rows)
