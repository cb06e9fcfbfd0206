"""The array form and the tensor form of a TransformedEnv, see :meth:`Transform.on_arrays`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from operator import is_not
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import zeros

from rollwright._keys import NestedKey, leaf_keys, unravel
from rollwright.envs._results import complete_reset, complete_step
from rollwright.envs.arrays import (
    ARRAY_FORMS,
    FLAGS,
    ArrayEnv,
    ArrayTransform,
    Entry,
    Rows,
    UnfitOutcome,
    Values,
    array_form,
    check_flags,
    check_open,
    objects_of,
    raise_named,
    refuse_overrides,
)
from rollwright.envs.base import WrapperArrays
from rollwright.envs.columns import TensorKind
from rollwright.envs.own_tensors import OwnTensors, Tensors
from rollwright.envs.tensordicts_on_arrays import Deviation, OnTensorDicts, RootTensorDicts, as_tensordict
from rollwright.envs.transforms.base import Transform, is_ours
from rollwright.envs.transforms.compose import Compose
from rollwright.envs.transforms.foreign import ForeignTransform, Watch, settings_of
from rollwright.errors import NotNative, RollwrightError

if TYPE_CHECKING:
    from rollwright.envs.transforms.transformed_env import TransformedEnv


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


def parts_of(transform: Transform) -> list[Transform]:
    """A transform, or those of a chain, in order."""
    if type(transform) is Compose:
        return [part for child in transform for part in parts_of(child)]
    return [transform]


def check_parts(env: TransformedEnv, parts: list[Transform]) -> None:
    """Test that the transforms of an environment are those that its form was made of.

    Raises:
        NotNative: they are others.
    """
    now = parts_of(env.transform)
    if len(now) != len(parts) or any(map(is_not, now, parts)):
        raise NotNative("its transforms have changed")


class TransformedTensors(OwnTensors):
    """The tensor form of a :class:`TransformedEnv`.

    Transforms of this library change the tensors. Where others are among them, all are given TensorDicts of these, of
    copies where the base writes again into what it returned.

    Raises:
        NotNative: the base has none, or a transform does more than change what steps and resets return.
    """

    def __init__(self, env: TransformedEnv, known: type[TransformedEnv]) -> None:
        self._parts = parts = parts_of(env.transform)
        if trims := [type(part).__name__ for part in parts if part.has_own("trim_frame")]:
            raise NotNative(f"{trims[0]} changes frames after the step")
        if not env.cache_specs:
            raise NotNative("cache_specs=False")
        if any(not getattr(part, "update_done", True) for part in parts):
            raise NotNative("its flags may be set without 'done'")
        self._base = base = env.base_env._tensor_form()
        self._on_columns = all(part.works_on_columns for part in parts)
        by_mask = base.by_mask and all(
            part.resets_by_mask and not part.has_own("_reset", "transform_reset") for part in parts
        )
        super().__init__(
            env,
            known,
            self._step_tensordict,
            self._reset_tensordict,
            check=self._check_parts,
            check_batch=base.check_batch,
            after_step=partial(self._reset_tensordict, after_step=True),
            by_mask=by_mask,
            is_live=base.is_live and self._on_columns,
            goes_on=base.goes_on,
        )
        self._kind = TensorKind(self.tensordict({}), lambda: env.base_env.ndim)
        self._passed = [*env.base_env.reset_keys, *env.base_env.state_keys, *env.base_env.read_at_reset]
        self._transform: Transform = env.transform
        self._inverts = env.transform.inverts
        self._taken: tuple[Any, Any] | None = None  # what the base was given, and what it returned that does not fit
        self._ends_there = False  # whether the base has ended what ended with the last step

    def _check_parts(self) -> None:
        self._base.check()
        check_parts(cast("TransformedEnv", self._env), self._parts)

    def _as_tensordict(self, values: Tensors) -> TensorDict:
        if self._base.is_live:
            values = {key: value.clone() for key, value in values.items()}
        return self._base.tensordict(values)

    def step(self, td: TensorDict) -> Tensors:
        """Act."""
        if not self._on_columns:
            return super().step(td)
        if self._env.is_closed:
            check_open(self._env, "step")
        try:
            given: Any = self._transform.inv(td) if self._inverts else td
            try:
                out = self._base.step(given)
            except UnfitOutcome as found:
                self._taken = given, found.outcome
                return super().step(td)
            ended = out["done"]
            preset = td.get("next", None)
            if preset is not None:  # recurrent states that the policy wrote: transforms must see them
                out = {**{key: preset.get(key) for key in leaf_keys(preset)}, **out}
            for part in self._parts:
                part._change(self._kind, given, out)
        except Exception as error:
            raise_named(self._env, "step", error)
        self._ends_there = out["done"] is ended
        return out

    def _step_tensordict(self, td: TensorDict) -> TensorDictBase:
        """Act; returns observations, reward and flags in a new TensorDict, without ``"next"``."""
        if self._taken is None:
            given: Any = self._transform.inv(td) if self._inverts else td
            try:
                outcome: Any = self._as_tensordict(self._base.step(given))
            except UnfitOutcome as found:
                outcome = found.outcome
        else:
            (given, outcome), self._taken = self._taken, None
        preset = td.get("next", None)
        if preset is not None:
            outcome.update(preset.exclude(*leaf_keys(outcome)))
        ended = outcome.get("done")
        changed = self._transform.transform_step(given, outcome)
        self._ends_there = changed.get("done", None) is ended
        return changed

    def reset(self, td: TensorDictBase | None, *, after_step: bool = False, **kwargs: Any) -> Tensors:
        """Begin new trajectories."""
        if not self._on_columns:
            return super().reset(td, after_step=after_step, **kwargs)
        check_open(self._env, "reset")
        try:
            fresh = self._base.reset(self._passed_on(td), after_step=after_step and self._ends_there, **kwargs)
        except UnfitOutcome as found:
            self._taken = None, found.outcome
            return super().reset(td)
        try:
            for part in self._parts:
                part._begin(self._kind, {} if td is None else td, fresh)
        except Exception as error:
            raise_named(self._env, "reset", error)
        for key, (shape, dtype) in self.flags.items():
            if key not in fresh:
                fresh[key] = zeros(shape, dtype=dtype, device=self.device)
        return fresh

    def _reset_tensordict(
        self, td: TensorDictBase | None, *, after_step: bool = False, **kwargs: Any
    ) -> TensorDictBase | None:
        """Begin new trajectories; returns observations (and flags, where any is set), without ``"next"``."""
        flags: Tensors = {}
        if self._taken is None:
            td, flags = self._transform.transform_reset_input(td), self._base.no_flags()
            after_step = after_step and self._ends_there
            try:
                fresh: Any = self._base.reset(self._passed_on(td), after_step=after_step, **kwargs)
                fresh = self._as_tensordict({**fresh, **flags})
            except UnfitOutcome as found:
                fresh = found.outcome
        else:
            (_, fresh), self._taken = self._taken, None
        given_flags = {key: fresh.get(key) for key in flags}
        changed = self._transform.transform_reset(fresh.empty() if td is None else td, fresh)
        if changed is not None and not changed.is_locked:  # those that nobody has changed need not be looked at
            unchanged = [key for key, flag in given_flags.items() if changed.get(key, None) is flag]
            changed = changed.exclude(*unchanged)
        return changed

    def _passed_on(self, td: TensorDictBase | None) -> TensorDictBase | None:
        """What the base's reset is given."""
        return None if td is None else td.select(*self._passed, strict=False)


OVERRIDABLE = {"_inv_apply_transform", "_inv_call", "_apply_transform", "_call", "_reset", "_step"}  # on an instance


def _leaves(transform: Transform, objects: list[NestedKey]) -> bool:
    """Whether a transform leaves entries that hold objects as they are."""
    changed = [] if transform.moves else [*transform.in_keys, *transform.out_keys]
    return transform.works_on_columns and not {*changed} & {*objects}


def _has_form(kind: type) -> bool:
    """Whether a class has an array form of its own; what inherits from one of this library may do something else."""
    return "on_arrays" in vars(kind) or (is_ours(kind) and getattr(kind, "on_arrays", None) is not Transform.on_arrays)


class TransformedArrays(WrapperArrays):
    """The array form of a :class:`TransformedEnv`; transforms without a form of their own are called on TensorDicts.

    Raises:
        NotNative: the environment has no array form, or a transform does more than change what steps and resets return.
    """

    def __init__(self, env: TransformedEnv, known: type[TransformedEnv], base: ArrayEnv | None = None) -> None:
        refuse_overrides(env, known)
        if not env.cache_specs:
            raise NotNative("cache_specs=False")
        self._env, self._known = env, known
        base = array_form(env.base_env, objects=True, unfit=True) if base is None else base
        check_flags(env, base.flags, lacks_truncated=len(base.root_flags) < len(FLAGS))
        super().__init__(base)
        self.root_flags = tuple(flag for flag in FLAGS if flag in env.done_keys)
        roots = RootTensorDicts(env.batch_size, env.device, {*env.reward_keys, *env.ends_with_step})
        self._chain = ArrayChain(base, roots, may_contradict=env.sets_own_flags)
        self.entries, self.rewards, self.reads = self._chain.entries, self._chain.rewards, self._chain.reads
        self._preset: Values = {}
        self._passed = {*env.base_env.state_keys, *env.base_env.read_at_reset}  # what its reset is given, beside marks
        self._transforms = parts_of(env.transform)
        foreign = [part for part in self._transforms if isinstance(part, ForeignTransform) and part.is_known]
        self._watches = [Watch(part.torchrl_transform, settings_of) for part in foreign]
        held = objects_of(base.entries)
        for transform in self._transforms:
            self._chain.add(self._part(transform, held))  # with the entries of those before
        self._inverses = self._chain.inverses
        self.on_tensordicts = [*base.on_tensordicts, *self._chain.on_tensordicts]
        self.may_be_unfit = base.may_be_unfit or bool(self._chain.on_tensordicts)
        announced = [{unravel(key) for key in keys} for keys in (env.observation_keys, env.reward_keys)]
        if [self.entries.keys(), self.rewards.keys()] != announced:
            raise NotNative("its specs are not those of its transforms")

    def see_roots(self, forms: Mapping[NestedKey, Entry]) -> None:
        """Note the forms of all that roots hold, but for what a policy writes; see :attr:`may_be_unfit`."""
        self._chain.roots.forms = dict(forms)
        super().see_roots(forms)

    def _part(self, transform: Transform, objects: list[NestedKey]) -> ArrayTransform | OnTensorDicts:
        kind = type(transform)
        if objects and not _leaves(transform, objects):
            raise NotNative(f"entry {objects[0]!r} holds objects, and {kind.__name__} may change it")
        make = kind.on_arrays if _has_form(kind) else ARRAY_FORMS.get(kind)
        is_unknown = isinstance(transform, ForeignTransform) and not transform.is_known
        if make is None or is_unknown or OVERRIDABLE & vars(transform).keys():
            if self._base.flags or self._base.nests:
                raise NotNative(f"{kind.__name__} works on TensorDicts, and the environment has flags below the root")
            return transform.on_tensordicts(self, self._chain.roots)
        return make(transform, self)

    def check(self) -> None:
        """Test that the environment is what this form was made of; to be called once a batch."""
        self._base.check()
        check_parts(self._env, self._transforms)
        for watch in self._watches:
            watch.check()

    def step(self, root: Values, preset: Values) -> Values:
        """Act."""
        if self._env.is_closed:
            check_open(self._env, "step")
        root = self._given(root)
        try:
            out = self._base.step(root, preset)
        except UnfitOutcome as found:
            for key, value in preset.items():
                if found.outcome.get(key, None) is None:
                    found.outcome.set(key, torch.from_numpy(value))
            raise self._finished(root, 0, found.outcome, str(found)) from found
        return self._transformed(root, preset, out)

    def _given(self, root: Values) -> Values:
        """What the base environment is given, and transforms see as the root."""
        if not self._inverses:
            return root
        given = dict(root)
        try:
            for inverse in self._inverses:
                inverse(given)
        except Exception as error:
            raise_named(self._env, "step", error)
        return given

    @contextmanager
    def _named_errors(self, call: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            raise_named(self._env, call, error)

    def stepper(self) -> Callable[[Values], Values]:
        """A function that steps once more from a root, for a transform in :meth:`Transform.on_arrays`."""
        if self._chain.on_tensordicts or self._base.may_be_unfit:
            names = [*self._base.on_tensordicts, *self._chain.on_tensordicts] or [type(self._env.base_env).__name__]
            raise NotNative(f"its steps cannot be repeated: {names[0]} works on TensorDicts")
        before, base = self._chain.steps, self._base

        def step(root: Values) -> Values:
            out = base.step(root, self._preset)
            for key, value in self._preset.items():
                out.setdefault(key, value)
            for part in before:
                part(root, out)
            return out

        return step

    @property
    def resets_ahead(self) -> bool:
        """See :class:`ArrayEnv`; never where a transform reads or steps what has ended."""
        return self._base.resets_ahead

    @resets_ahead.setter
    def resets_ahead(self, value: bool) -> None:
        self._base.resets_ahead = value and not self._chain.reads_env

    def _transformed(self, root: Values, preset: Values, out: Values) -> Values:
        self._preset = preset
        for key, value in preset.items():
            out.setdefault(key, value)
        try:
            self._chain.step(root, out)
        except ChainDeviation as found:
            raise self._finished(root, found.place, found.deviation.changed, str(found)) from None
        except Exception as error:
            raise_named(self._env, "step", error)
        return out

    def _finished(self, root: Values, place: int, outcome: TensorDictBase, reason: str) -> UnfitOutcome:
        """A step that was taken on arrays as far as the transform at ``place``, finished on TensorDicts."""
        given = self._chain.roots.of_step(root)
        with self._named_errors("step"):
            for transform in self._transforms[place:]:
                outcome = transform.transform_step(given, outcome)
        return UnfitOutcome(reason, complete_step(self._env, given, outcome))

    def groups(self, number: int) -> list[ArrayEnv]:
        """The batch in ``number`` parts of consecutive rows, each an array form of its own with all of its methods."""
        return [TransformedArrays(self._env, self._known, base) for base in self._base.groups(number)]

    def send(self, root: Values, preset: Values) -> None:
        """Begin a step; arguments as of :meth:`step`, and read before it returns."""
        if self._env.is_closed:
            check_open(self._env, "step")
        root = self._given(root)
        self._base.send(root, preset)
        self._sent = root, preset

    def receive(self) -> Values:
        """Wait for the step that :meth:`send` has begun; returns what :meth:`step` does."""
        return self._transformed(*self._sent, self._base.receive())

    def reset(self, rows: Rows | None, **kwargs: Any) -> Values:
        """Begin new trajectories in the environments that ``rows``, bool ``[*batch]``, marks; None: in all."""
        return self._reset(rows, None, kwargs)

    def reset_from(self, root: Values, rows: Rows | None, **kwargs: Any) -> Values:
        """The same where what goes on may be read: ``root``, from which the next step would be taken."""
        return self._reset(rows, root, kwargs)

    def _reset(self, rows: Rows | None, root: Values | None, kwargs: dict[str, Any]) -> Values:
        check_open(self._env, "reset")
        base = self._base
        try:
            if root is None or not base.may_be_unfit:
                fresh = base.reset(rows, **kwargs)
            else:
                passed = {key: root[key] for key in root if key in self._passed}
                fresh = base.reset_from(passed, rows, **kwargs)
        except UnfitOutcome as found:
            raise self._finished_reset(rows, root, 0, found.outcome, str(found)) from found
        with self._named_errors("reset"):
            try:
                self._chain.reset(fresh, rows, root)
            except ChainDeviation as found:
                raise self._finished_reset(rows, root, found.place, found.deviation.changed, str(found)) from None
        return fresh

    def _finished_reset(
        self, rows: Rows | None, root: Values | None, place: int, fresh: TensorDictBase, reason: str
    ) -> UnfitOutcome:
        """A reset that was made on arrays as far as the transform at ``place``, finished on TensorDicts."""
        marked = None if root is None else self._chain.roots.of_reset(root, rows)
        given = fresh.empty() if marked is None else marked
        with self._named_errors("reset"):
            for transform in self._transforms[place:]:
                fresh = transform.transform_reset(given, fresh)
        return UnfitOutcome(reason, complete_reset(self._env, marked, fresh))


# Array forms of the user's own --------------------------------------------------------------------

Make = Callable[[Any, ArrayEnv], ArrayTransform]


def register_array_form(kind: type, make: Make | None = None) -> None:
    """Let transforms of a class run on arrays, as :meth:`Transform.on_arrays` does for classes that define it.

    A run on arrays must give the bits of a run on TensorDicts; ``Collector(..., use_buffers=False)`` takes TensorDicts,
    to compare. Subclasses of ``kind`` are not meant. Registrations are those of the process: register where ``kind`` is
    defined, or in ``init_fn`` of workers.

    Args:
        kind: a subclass of :class:`Transform`, or of TorchRL's in environments of TorchRL.
        make: ``(transform, env) -> ArrayTransform``, see :meth:`Transform.on_arrays`. None: the transform does nothing
            but change each of ``in_keys`` by ``_apply_transform``, which is called on tensors that share memory with
            no others.

    Raises:
        TypeError: ``kind`` is no class; ``make`` cannot be called; or it is None and ``kind`` does more.
        ValueError: ``kind`` has an array form already.

    Example:
        >>> class Half(Transform):
        ...     def _apply_transform(self, obs):
        ...         return obs / 2
        >>> register_array_form(Half)
    """
    if not isinstance(kind, type):
        raise TypeError(f"kind: expected a class of transforms, got {kind!r}. Pass the class.")
    if _has_form(kind) or kind in ARRAY_FORMS:
        raise ValueError(f"kind: {kind.__name__} has an array form already. Register each class once.")
    if make is None:
        more = [name for name in _WHOLE if getattr(kind, name, None) is not getattr(Transform, name)]
        if more:
            raise TypeError(
                f"make: expected a function (transform, env) -> ArrayTransform, got None, which is for transforms that "
                f"define _apply_transform alone: {kind.__name__} is no such Transform, by its {more[0]}."
            )
        make = _by_entries
    if not callable(make):
        raise TypeError(f"make: expected a function (transform, env) -> ArrayTransform, got {make!r}.")
    ARRAY_FORMS[kind] = make


_WHOLE = ("_call", "_step", "_reset", "_inv_call", "inv", "transform_step", "transform_reset")


def _by_entries(transform: Transform, env: ArrayEnv) -> ArrayTransform:
    """The array form of a transform that changes each of ``in_keys`` by ``_apply_transform``."""
    return transform.entries_on_arrays(env)
