"""Transform: a change to what an environment returns, or to what it is given."""

from __future__ import annotations

import copy
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import nn

from rollwright._keys import NestedKey, as_keys, as_tuple, key_str, unravel
from rollwright.data.layout import DoneGroup, deciding_groups, done_groups
from rollwright.data.specs import Composite, TensorSpec
from rollwright.data.specs.conversion import numpy_dtype
from rollwright.envs._results import mask_like
from rollwright.envs.arrays import ArrayEnv, ArrayTransform, Entry, Rows, Values
from rollwright.envs.columns import ArrayKind, Columns, TensorKind, by_entries, by_specs, on_array, row_form
from rollwright.envs.tensordicts_on_arrays import ByEntry, OnTensorDicts, RootTensorDicts
from rollwright.errors import NotNative

if TYPE_CHECKING:
    from rollwright.envs.transforms.transformed_env import TransformedEnv

T = TypeVar("T")
KeySeq = NestedKey | Sequence[NestedKey] | None


class Transform(nn.Module):
    """Changes the data of an environment; put it on with :class:`TransformedEnv`.

    What is to change decides what to override:

    - each of some entries, alike: ``_apply_transform`` (and ``_inv_apply_transform`` for actions);
    - the outcome of a step as a whole: ``_call``;
    - the outcome of a step, by what the step began from: ``_step``;
    - what a reset returns: ``_reset``. By default it applies ``_apply_transform`` to the ``in_keys`` that
      are there; a transform that overrides ``_call`` and is to act at resets too calls it from ``_reset``.

    What a step or a reset begins from (``tensordict``) is for reading: what is written there may be lost.

    The specs change with the data: override ``transform_observation_spec`` and its like.

    What must survive a step (a count, a sum) belongs in the data: ``_step`` reads it from the root and
    writes it below ``"next"``, so that a row that is reset starts over by itself and a saved run resumes.

    Args:
        in_keys: entries to read from what the environment returns.
        out_keys: entries to write, one for each of ``in_keys``; default: the same.
        in_keys_inv: entries that the environment wants, made from ``out_keys_inv``.
        out_keys_inv: entries that the policy writes; default: the same.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> class Half(Transform):
        ...     def _apply_transform(self, obs):
        ...         return obs / 2
        >>> Half(in_keys=["x"], out_keys=["half"])(TensorDict({"x": torch.ones(3)}))["half"]
        tensor([0.5000, 0.5000, 0.5000])
    """

    def __init__(
        self,
        in_keys: KeySeq = None,
        out_keys: KeySeq = None,
        in_keys_inv: KeySeq = None,
        out_keys_inv: KeySeq = None,
    ) -> None:
        super().__init__()
        self.in_keys = as_keys(in_keys)
        self.out_keys = list(self.in_keys) if out_keys is None else as_keys(out_keys)
        self.in_keys_inv = as_keys(in_keys_inv)
        self.out_keys_inv = list(self.in_keys_inv) if out_keys_inv is None else as_keys(out_keys_inv)
        self._release()

    # What a subclass overrides ----------------------------------------------------------------

    def _apply_transform(self, obs: torch.Tensor) -> torch.Tensor:
        """The new value of one entry."""
        raise RuntimeError(
            f"{type(self).__name__} has in_keys but says not what to do with them: define "
            "_apply_transform(self, obs), or _call(self, next_tensordict)."
        )

    def transform_step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        """What a step returned, changed; see :meth:`_step`, which a subclass overrides."""
        return self._step(tensordict, next_tensordict)

    def transform_reset(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase) -> TensorDictBase:
        """What a reset returned, changed; see :meth:`_reset`, which a subclass overrides."""
        return self._reset(tensordict, tensordict_reset)

    def transform_reset_input(self, tensordict: TensorDictBase | None) -> TensorDictBase | None:
        """What a reset is given, changed; see :meth:`_reset_env_preprocess`, which a subclass overrides."""
        return self._reset_env_preprocess(tensordict)

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        """Change what a step returned (the content of ``"next"``)."""
        self._change(self._kind_of(next_tensordict), {}, next_tensordict)
        return next_tensordict

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        """Change ``next_tensordict``, what the step that began at ``tensordict`` returned."""
        if not self._reads_root:
            return self._call(next_tensordict)
        self._change(self._kind_of(next_tensordict), tensordict, next_tensordict)
        return next_tensordict

    def _reset(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase) -> TensorDictBase:
        """Change what a reset returned.

        Args:
            tensordict: what was passed to the reset, empty if nothing was; ``"_reset"`` marks the rows
                that are reset; all are where there is none.
            tensordict_reset: the first data of those rows; what it holds in others is dropped later.
        """
        if not _overrides(self, "_call") or _overrides(self, "_begin"):
            self._begin(self._kind_of(tensordict_reset), tensordict, tensordict_reset)
        return tensordict_reset

    # In place of these, the transforms of this library have a function of a step and one of a reset on columns:
    # tensors, those of a TensorDict included, or NumPy arrays in row form.

    _reads_root = False  # whether a step reads what it begins from
    moves = False  # whether it gives entries other names, and changes no values
    resets_by_mask = True  # whether a reset of no rows changes nothing, and nothing is read to find that out

    def _change(self, kind: Any, root: Columns, out: Columns) -> None:
        """Change what a step returned, in place.

        Args:
            kind: makes columns: a :class:`TensorKind` or an :class:`ArrayKind`.
            root: what the step began from.
            out: what it returned.
        """
        self._apply_to(out, may_lack=False)

    def _begin(self, kind: Any, given: Columns, fresh: Columns) -> None:
        """Change what a reset returned, in place.

        Args:
            kind: see :meth:`_change`.
            given: what was passed to the reset, its marks included.
            fresh: what it returned.
        """
        self._apply_to(fresh, may_lack=True)

    def _kind_of(self, td: TensorDictBase) -> TensorKind:
        return TensorKind(td, self._batch_ndim)

    def _batch_ndim(self) -> int:
        return self._remember("ndim", lambda: 0 if self.parent is None else self.parent.ndim)

    @property
    def works_on_columns(self) -> bool:
        """Whether it is of this library, and has functions of columns alone."""
        return is_ours(type(self)) and not self.has_own("_call", *_OF_STEPS, "_reset", "transform_reset", *_OF_RESETS)

    def has_own(self, *methods: str) -> bool:
        """Whether its class, or the object, overrides one of some methods."""
        return any(name in vars(self) or _overrides(self, name) for name in methods)

    def _reset_env_preprocess(self, tensordict: TensorDictBase | None) -> TensorDictBase | None:
        """What the environment's reset is given, for what was passed to the reset (None: nothing was)."""
        return tensordict

    def trim_frame(self, frame: TensorDictBase, following: TensorDictBase) -> None:
        """Change a frame once the data of the next step were taken from it, see :meth:`EnvBase.trim_frame`."""

    def complete_fake(self, fake: TensorDictBase) -> TensorDictBase:
        """What :meth:`EnvBase.fake_tensordict` gives, where frames have other entries than the specs say."""
        return fake

    def _inv_apply_transform(self, state: torch.Tensor) -> torch.Tensor:
        """The value that the environment wants, from the one that the policy wrote."""
        return state

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Change what the environment is given; ``tensordict`` is a shallow copy."""
        for in_key, out_key in self._pairs_inv():
            tensordict.set(in_key, self._inv_apply_transform(self._read(tensordict, out_key)))
        return tensordict

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Change data outside of an environment: applies ``_apply_transform`` to the root's entries."""
        self._apply_to(tensordict, may_lack=False)
        return tensordict

    def inv(self, tensordict: TensorDictBase) -> TensorDictBase:
        """What the environment is given for ``tensordict``, which is left as it is."""
        return self._inv_call(tensordict.clone(recurse=False))

    def on_arrays(self, env: ArrayEnv) -> ArrayTransform:
        """What the transform does where an environment is stepped on arrays; bit for bit what it does on TensorDicts.

        It makes a transform of your own fast there: without it, ``_call`` and its like are called on TensorDicts of the
        arrays, as they always are on the tensors of an environment that is one tensor. A subclass of a transform with
        such a form works on TensorDicts until it defines one of its own.

        Args:
            env: the environment that it follows, with the transforms before it. ``env.entries`` holds observations and
                what a transform has added; rewards are in ``env.rewards``.

        Returns:
            Functions on dictionaries of arrays, of the shapes that :class:`~rollwright.envs.arrays.Entry` says.

        Raises:
            NotNative: it works on TensorDicts only (the default), or does so with these keys or settings.

        Example:
            >>> import numpy as np
            >>> class Clip(Transform):
            ...     def _apply_transform(self, obs):
            ...         return obs.clamp(-1, 1)
            ...     def on_arrays(self, env):
            ...         pairs = self._pairs()
            ...         if any(key not in env.entries for key, _ in pairs):
            ...             raise NotNative("Clip works on observations")
            ...         def change(values):
            ...             for key, out_key in pairs:
            ...                 values[out_key] = np.clip(values[key], -1, 1)
            ...         entries = {out_key: env.entries[key] for key, out_key in pairs}
            ...         return ArrayTransform(entries, [], lambda root, out: change(out), change)
        """
        raise NotNative(f"{type(self).__name__} works on TensorDicts")

    def on_tensordicts(self, env: ArrayEnv, roots: RootTensorDicts) -> OnTensorDicts:
        """The transform as it is, called on TensorDicts where an environment is stepped on arrays.

        Args:
            env: the environment that it follows, with the transforms before it.
            roots: makes what it reads of the root.

        Raises:
            NotNative: it changes what a reset is given; or what a step is given, by another method than ``_inv_call``
                or in other entries than actions.
        """
        name, parent = type(self).__name__, self.parent
        own = vars(self).keys()
        if parent is None:
            raise NotNative(f"{name} is on no environment")
        if self.has_own("trim_frame"):
            raise NotNative(f"{name} changes frames once the data of the next step were taken from them")
        if self.has_own(*_OF_RESETS):
            raise NotNative(f"{name} changes what a reset is given")
        if own & {"_inv_call", "_inv_apply_transform", "inv"}:
            raise NotNative(f"{name} changes what a step is given, by a method of this object alone")
        spec = self.transform_output_spec(parent.output_spec.clone())
        reads_root = self._reads_root or self.has_own(*_OF_STEPS)
        inverse = self._inverse_on_tensordicts(env, roots) if self.inverts else None
        is_whole = self.has_own("_call", "_apply_to", "_read", "_change", *_OF_STEPS)
        by_entry = None if is_whole else ByEntry(self._pairs(), lambda obs: self._apply_transform(obs))
        return OnTensorDicts(
            self, name, env, parent.done_keys, spec, roots, reads_root=reads_root, by_entry=by_entry, inverse=inverse
        )

    def _inverse_on_tensordicts(self, env: ArrayEnv, roots: RootTensorDicts) -> ArrayTransform:
        """What the transform changes on the way in, by a call of its own ``_inv_call`` where it has one."""
        if not _overrides(self, "_inv_call") or _overrides(self, "inv") or self.parent is None:
            return self.with_inverse(env, _UNCHANGED)
        taken = self.transform_input_spec(self.parent.input_spec.clone())["full_action_spec"]
        made = frozenset(self.parent.action_keys) - {unravel(key) for key in taken.leaves()}
        return _UNCHANGED.replace(inverse=lambda given: roots.change(given, self._inv_call), made=made)

    def entries_on_arrays(self, env: ArrayEnv) -> ArrayTransform:
        """The array form of a transform that changes each of ``in_keys`` by ``_apply_transform``, and nothing else.

        Its specs say which shapes and dtypes that gives.

        Raises:
            NotNative: an entry is neither an observation nor a reward, or the transform changes other than actions
                on the way in.
        """
        parent = self.parent
        if parent is None:
            raise NotNative(f"{type(self).__name__} is on no environment")
        observations = self.transform_observation_spec(parent.full_observation_spec.clone())
        rewards = self.transform_reward_spec(parent.full_reward_spec.clone())
        name = type(self).__name__
        change = by_specs(name, self._apply_transform, observations, rewards, len(env.batch))
        form = by_entries(name, env, self._pairs(), change)
        return self.with_inverse(env, form)

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """The spec of all observations after this transform."""
        return observation_spec

    def transform_reward_spec(self, reward_spec: Composite) -> Composite:
        """The spec of all rewards after this transform."""
        return reward_spec

    def transform_done_spec(self, done_spec: Composite) -> Composite:
        """The spec of all flags after this transform."""
        return done_spec

    def transform_action_spec(self, action_spec: Composite) -> Composite:
        """The spec of all actions, as the policy sees them."""
        return action_spec

    def transform_state_spec(self, state_spec: Composite) -> Composite:
        """The spec of what a step reads beside the action."""
        return state_spec

    def transform_output_spec(self, output_spec: Composite) -> Composite:
        """``full_observation_spec``, ``full_reward_spec`` and ``full_done_spec`` after this transform."""
        return self._transform_each(output_spec, ("observation", "reward", "done"))

    def transform_input_spec(self, input_spec: Composite) -> Composite:
        """``full_action_spec`` and ``full_state_spec`` after this transform."""
        return self._transform_each(input_spec, ("action", "state"))

    def _transform_each(self, spec: Composite, names: tuple[str, ...]) -> Composite:
        spec = spec.clone()
        for name in names:
            change = getattr(self, f"transform_{name}_spec")
            spec[f"full_{name}_spec"] = change(spec[f"full_{name}_spec"])
        return spec

    def close(self) -> None:
        """Release what the transform holds; called when its environment is closed."""

    def dump(self, **kwargs: Any) -> None:
        """Write out what the transform has gathered, such as a video; for a transform of your own to override."""

    # Help for subclasses ----------------------------------------------------------------------

    def _apply_to(self, columns: Columns, *, may_lack: bool) -> None:
        for in_key, out_key in self._pairs():
            if not (may_lack and columns.get(in_key, None) is None):
                columns[out_key] = self._apply_transform(self._read(columns, in_key))

    def _on_rows(
        self, env: ArrayEnv, forms: Sequence[Entry] = (), *, restarts: bool = False, **announced: Any
    ) -> ArrayTransform:
        """The array form of a transform whose functions take columns that are arrays.

        Args:
            env: the environment that it follows.
            forms: of the entries that it reads as tensors.
            restarts: whether :meth:`_begin` reads which rows are reset.
            **announced: attributes of :class:`ArrayTransform`.
        """
        kind, (group, *_) = ArrayKind(env.batch, forms), self._groups

        def restart(fresh: Values, rows: Rows | None) -> None:
            self._begin(kind, {} if rows is None else {group.reset: kind.flags(rows)}, fresh)

        form = ArrayTransform({}, [], partial(self._change, kind), partial(self._begin, kind, {}))
        return form.replace(restart=restart if restarts else None, **announced)

    def _pairs(self) -> list[tuple[NestedKey, NestedKey]]:
        """``(in_key, out_key)`` for what the environment returns."""
        return self._zipped("in_keys", "out_keys")

    def _pairs_inv(self) -> list[tuple[NestedKey, NestedKey]]:
        """``(in_key_inv, out_key_inv)`` for what the environment is given."""
        return self._zipped("in_keys_inv", "out_keys_inv")

    def _zipped(self, ins_name: str, outs_name: str) -> list[tuple[NestedKey, NestedKey]]:
        ins, outs = getattr(self, ins_name), getattr(self, outs_name)
        if len(ins) != len(outs):
            raise ValueError(
                f"{type(self).__name__}: expected one of {outs_name} for each of {ins_name}, got {len(outs)} "
                f"({outs}) for {len(ins)} ({ins}). Pass lists of equal length."
            )
        return list(zip(ins, outs, strict=True))

    def _read(self, tensordict: Columns, key: NestedKey) -> Any:
        value = tensordict.get(key, None)
        if value is None:
            names = tensordict if isinstance(tensordict, dict) else tensordict.keys(True, True)
            raise KeyError(
                f"{type(self).__name__}: no entry {key!r}; there are {key_str(names)}. "
                "Correct the transform's keys, or the order of transforms."
            )
        return value

    def _carried(self, root: Columns, key: NestedKey) -> Any:
        """An entry that an earlier reset wrote, and that each step carries on."""
        value = root.get(key, None)
        if value is None:
            raise KeyError(
                f"{type(self).__name__}: the data to step from has no {key!r}, which a reset writes. Begin "
                "from env.reset(), and go on with what step_mdp() or step_and_maybe_reset() return."
            )
        return value

    @property
    def inverts(self) -> bool:
        """Whether the transform changes what the environment is given."""
        return bool(self.in_keys_inv) or _overrides(self, "_inv_call") or _overrides(self, "inv")

    @property
    def _groups(self) -> list[DoneGroup]:
        """The groups of flags that decide when a row is reset: the root's, else all."""
        return self._remember("groups", lambda: deciding_groups(self._all_groups))

    @property
    def _all_groups(self) -> list[DoneGroup]:
        parent = self.parent
        return done_groups(["done", "terminated", "truncated"]) if parent is None else parent.done_groups

    def _fresh(self, kind: Any, given: Columns, key: NestedKey, value: torch.Tensor) -> torch.Tensor | None:
        """Which elements of ``value``, at ``key``, are reset: bool that broadcasts to it; None: all."""
        marks = {group.prefix: given.get(group.reset, None) for group in self._groups}
        masks = {prefix: mask for prefix, mask in marks.items() if mask is not None}
        return mask_like(masks, as_tuple(key)[:-1], value, len(kind.batch)) if masks else None

    def _needs_all_rows(self, env: ArrayEnv) -> None:
        """Test, in ``on_arrays`` of a transform that keeps something for each row, that ``env`` has all of them.

        Raises:
            NotNative: it is a group of them.
        """
        parent = self.parent
        if parent is None or tuple(parent.batch_size) != env.batch:
            raise NotNative(f"{type(self).__name__} keeps the rows of all environments together")

    def with_inverse(self, env: ArrayEnv, form: ArrayTransform) -> ArrayTransform:
        """``form``, for ``on_arrays``, with what :meth:`_inv_apply_transform` does to actions.

        Raises:
            NotNative: it changes other entries, or ``_inv_call`` is overridden.
        """
        pairs = self._pairs_inv()
        if not self.inverts:
            return form
        if _overrides(self, "_inv_call") or _overrides(self, "inv") or any(key in env.entries for key, _ in pairs):
            raise NotNative(f"{type(self).__name__} changes what the environment is given beside actions")
        convert = on_array(self._inv_apply_transform) if _overrides(self, "_inv_apply_transform") else _as_it_is
        return self._with_converted(form, convert)

    def _with_converted(self, form: ArrayTransform, convert: Callable[[Any], Any]) -> ArrayTransform:
        """``form`` with a conversion of the actions that the policy wrote."""
        pairs = self._pairs_inv()

        def inverse(given: Values) -> None:
            for in_key, out_key in pairs:
                given[in_key] = convert(self._read(given, out_key))

        made = frozenset(in_key for in_key, _ in pairs)
        return form.replace(inverse=inverse, made=made, reads=[*form.reads, *(out_key for _, out_key in pairs)])

    def _remember(self, name: str, find: Callable[[], T]) -> T:
        """``find()``, called once until the environment or the transforms before this one change."""
        memo = self.__dict__["_memo"]
        if name not in memo:
            memo[name] = find()
        return cast(T, memo[name])

    # The environment around -------------------------------------------------------------------

    def _release(self) -> None:
        self.__dict__.update(_containers=(), _parent=None, _memo={})

    def set_container(self, container: nn.Module) -> None:
        """Let the transform know which :class:`Compose` or :class:`TransformedEnv` holds it.

        Raises:
            RuntimeError: it is in an environment.
        """
        if self.holder is not container:
            self.check_free()
        self._release()
        self.add_container(container)

    def add_container(self, container: nn.Module) -> None:
        """Let ``container`` hold the transform too; what holds it now has it again once ``container`` is gone."""
        self.empty_cache()
        self.__dict__["_containers"] += (weakref.ref(container),)

    def check_free(self) -> None:
        """Test that the transform is in no environment; a chain that is in none does not count.

        Raises:
            RuntimeError: it is in one.
        """
        env = self.container
        if env is not None:
            raise RuntimeError(
                f"transform: this {type(self).__name__} already belongs to another {type(env).__name__}. "
                "It can follow only one; pass transform.clone()."
            )

    def reset_parent(self) -> None:
        """Take the transform out of what holds it, so that another environment can have it."""
        self._release()

    @property
    def holder(self) -> nn.Module | None:
        """What holds the transform: a :class:`Compose` or a :class:`TransformedEnv`; None if it is free."""
        holders = (reference() for reference in reversed(self.__dict__["_containers"]))
        return next((holder for holder in holders if holder is not None), None)

    @property
    def container(self) -> TransformedEnv | None:
        """The environment that has this transform, if any."""
        holder = self.holder
        return holder.container if isinstance(holder, Transform) else cast("TransformedEnv | None", holder)

    @property
    def parent(self) -> TransformedEnv | None:
        """The environment as this transform meets it: with the transforms before it, if there is any."""
        parent = self.__dict__["_parent"]
        if parent is None and (env := self.container) is not None:
            parent = env.with_only(self.transforms_before())
            self.set_parent(parent)
        return cast("TransformedEnv | None", parent)

    def transforms_before(self) -> list[Transform]:
        """The transforms that act before this one."""
        holder = self.holder
        if not isinstance(holder, Transform):
            return []
        before = holder.transforms_before()
        for transform in cast(Iterable[Transform], holder):  # a Compose: no other transform holds some
            if transform is self:
                break
            before.append(transform)
        return before

    def set_parent(self, parent: TransformedEnv | None) -> None:
        """Take ``parent`` for :attr:`parent`, where that is known already."""
        self.__dict__["_parent"] = parent

    def empty_cache(self) -> None:
        """Forget what was derived from the environment's specs."""
        self.__dict__.update(_parent=None, _memo={})

    def clone(self) -> Self:
        """A copy without an environment. Parameters and buffers are shared with the original."""
        other = copy.copy(self)
        for name in ("_parameters", "_buffers", "_modules"):
            other.__dict__[name] = dict(self.__dict__[name])
        other._release()
        return other

    def __getstate__(self) -> dict[str, Any]:
        # The environment is not part of the transform; it takes its transforms back when it is loaded.
        return self.__dict__ | {"_containers": (), "_parent": None, "_memo": {}}

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # Buffers that are made with the first data take the shape that was saved.
        for name, buffer in self._buffers.items():
            saved = state_dict.get(prefix + name)
            if saved is not None and (buffer is None or buffer.shape != saved.shape):
                device = None if buffer is None else buffer.device
                self._buffers[name] = torch.empty_like(saved, device=device)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(keys={self.in_keys})"


class EntryTransform(Transform):
    """Changes each of some entries alike, and their specs with them: a base for transforms that have in_keys."""

    @abstractmethod
    def _change_spec(self, spec: TensorSpec) -> TensorSpec:
        """The spec of an entry as the policy sees it."""

    def _change_spec_inv(self, spec: TensorSpec) -> TensorSpec:
        """The spec of what the environment is given, as the policy sees it."""
        return self._change_spec(spec)

    _restarts = False  # whether it keeps something for each row: what it does to arrays then takes the rows of a reset

    def on_arrays(self, env: ArrayEnv) -> ArrayTransform:
        """See :meth:`Transform.on_arrays`.

        Raises:
            NotNative: the transform changes flags, or what the environment is given beside actions.
        """

        def change(index: int, out_key: NestedKey, entry: Entry, of_reward: bool) -> tuple[Entry, Callable[..., Any]]:
            return self._change_array(index, entry, env.batch)

        form = by_entries(type(self).__name__, env, self._pairs(), change, restarts=self._restarts)
        return self.with_inverse(env, form)

    def _change_array(self, index: int, entry: Entry, batch: tuple[int, ...]) -> tuple[Entry, Callable[..., Any]]:
        """What becomes of an entry on arrays, and the function of its values in row form.

        Args:
            index: place among ``in_keys``.
            entry: its form.
            batch: of the environment.

        Raises:
            NotNative: it cannot be changed, or would be no column any more.
        """
        name, kind = type(self).__name__, ArrayKind(batch, [entry])
        try:
            example = self._apply_transform(torch.from_numpy(np.zeros(entry.shape, entry.dtype)))
            found = Entry(tuple(example.shape), np.dtype(numpy_dtype(example.dtype)), entry.column)
        except (RuntimeError, TypeError, ValueError) as error:
            raise NotNative(f"{name}: {error}") from error
        if entry.column and found.shape != entry.shape:
            raise NotNative(f"{name} changes shape {entry.shape} to {found.shape}")

        def on_tensor(value: Any) -> Any:
            array = self._apply_transform(kind.tensor(0, value)).numpy()
            return row_form(array) if entry.column else array

        return found, self._array_function(entry) or on_tensor

    def _array_function(self, entry: Entry) -> Callable[[Any], Any] | None:
        """``_apply_transform``, where it takes arrays of an entry in row form, and has torch's bits."""
        return None

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Observations after the change."""
        return map_spec(observation_spec, self._pairs(), self._change_spec)

    def transform_reward_spec(self, reward_spec: Composite) -> Composite:
        """Rewards after the change."""
        return map_spec(reward_spec, self._pairs(), self._change_spec)

    def transform_action_spec(self, action_spec: Composite) -> Composite:
        """Actions as the policy sees them."""
        return map_spec(action_spec, self._pairs_inv(), self._change_spec_inv, move=True)

    def transform_state_spec(self, state_spec: Composite) -> Composite:
        """States as the policy sees them."""
        return map_spec(state_spec, self._pairs_inv(), self._change_spec_inv, move=True)


def _nothing(*_: Any) -> None:
    """No change."""


_UNCHANGED = ArrayTransform({}, [], _nothing, _nothing)
_OF_STEPS, _OF_RESETS = ("_step", "transform_step"), ("_reset_env_preprocess", "transform_reset_input")


def is_ours(kind: type) -> bool:
    """Whether a class is of this library: its functions of columns are those of its methods on TensorDicts."""
    return kind.__module__.startswith("rollwright.")


def _overrides(transform: Transform, method: str) -> bool:
    return getattr(type(transform), method) is not getattr(Transform, method)


def _as_it_is(value: Any) -> Any:
    """The value."""
    return value


def map_spec(
    spec: T,
    pairs: Iterable[tuple[NestedKey, NestedKey]],
    change: Callable[[TensorSpec], TensorSpec],
    *,
    move: bool = False,
) -> T:
    """A Composite whose leaf ``out_key`` is ``change`` of its leaf ``in_key``, for each such leaf it has.

    Args:
        spec: left as it is; a leaf is the spec of one entry, and ``change`` of it is returned.
        pairs: ``(in_key, out_key)``.
        change: from a leaf to a new leaf.
        move: drop ``in_key`` where it differs.
    """
    if not isinstance(spec, Composite):
        return cast(T, change(cast(TensorSpec, spec)))
    changed = spec.clone()
    for in_key, out_key in pairs:
        if in_key in spec:
            changed.set(out_key, change(spec[in_key]))
            if move and in_key != out_key:
                del changed[in_key]
    return changed


def kept(td: Columns, reset_key: NestedKey, key: NestedKey, fresh: torch.Tensor) -> torch.Tensor:
    """``fresh`` where ``reset_key`` marks, else what ``td`` holds at ``key`` (if it holds both)."""
    mask, old = td.get(reset_key, None), td.get(key, None)
    if mask is None or old is None:
        return fresh
    return torch.where(mask.reshape(mask.shape + (1,) * (fresh.ndim - mask.ndim)), fresh, old)
