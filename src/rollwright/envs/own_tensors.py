"""The tensor form of an environment whose batch is in its tensors: nothing is copied, and nothing read by the host."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import is_not
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from rollwright._keys import NestedKey, key_str, place, unravel
from rollwright.data.entries import unchecked_td
from rollwright.data.layout import DoneGroup
from rollwright.data.specs import Composite, NonTensor, StackedComposite, TensorSpec
from rollwright.envs._results import check_alive, complete_reset, complete_step, done_after_reset
from rollwright.envs.arrays import check_open, raise_named
from rollwright.envs.own_arrays import refuse_more, specs_of, unfit_outcome
from rollwright.errors import NotNative

if TYPE_CHECKING:
    from rollwright.envs.base import EnvBase


Method = Callable[..., Any]
Tensors = dict[NestedKey, Tensor]


class TensorForm(NamedTuple):
    """Shape and dtype of the tensors of an entry, the batch in front."""

    shape: torch.Size
    dtype: torch.dtype


class OwnTensors:
    """An environment with a batch size of its own, on the tensors that it returns.

    Its ``_step`` and ``_reset`` are called with the TensorDict that they get elsewhere. What they return is used as it
    is: whoever steps it copies an entry before the next step or reset, which may write into the same memory. What the
    specs do not say is mended or refused by the tests of :meth:`EnvBase.step`.

    Args:
        env: the environment.
        known: the class that steps such environments.
        step: the environment's ``_step``.
        reset: the environment's ``_reset``.
        check: tests that what the two call is as it was; raises :class:`NotNative`.
        check_batch: tests, at the end of a batch, what nobody has read in its steps.
        after_step: called in place of ``reset`` where the ends of the step before are marked; None: ``reset`` is.
        is_live: see below; None: unless the class sets ``returns_copies``.
        goes_on: see below.
        own: see :func:`refuse_more`.
        by_mask: see below; None: where the class says so, and on a device other than the CPU.

    Raises:
        NotNative: it is a single environment, it does more than to step and to reset, or its data are not tensors of
            fixed shapes.

    Attributes:
        batch: its batch size.
        device: of all entries.
        td_device: of TensorDicts; None: they name none.
        entries: what a reset returns and a step returns below ``"next"``, but for rewards and flags.
        rewards: what a step returns besides.
        root_flags: flags of the root that the environment has; these decide.
        flags: flags below the root, which a reset returns, too.
        nests: batch sizes of nested TensorDicts that have a longer one than the root, by key.
        by_mask: whether it is to be reset after each step, where its mask says, so that nobody reads the mask.
        is_live: whether what it returns may be written again by the next step or reset.
        goes_on: whether it may be stepped on after an end.
    """

    def __init__(
        self,
        env: EnvBase,
        known: type[EnvBase],
        step: Method,
        reset: Method,
        *,
        check: Callable[[], None] = lambda: None,
        check_batch: Callable[[], None] = lambda: None,
        after_step: Method | None = None,
        by_mask: bool | None = None,
        is_live: bool | None = None,
        goes_on: bool = True,
        own: bool = False,
    ) -> None:
        if not env.ndim:
            raise NotNative("it is a single environment")
        refuse_more(env, known, own=own)
        self._env, self._known, self._step, self._begin, self._more = env, known, step, reset, check
        self._own = own
        self._check_batch, self._after_step = check_batch, after_step or reset
        self.batch = env.batch_size
        self.td_device = env.device
        self.device = torch.device("cpu") if env.device is None else env.device
        groups = self._known_groups()
        self._specs = specs_of(env)
        self.entries = self._forms(env.full_observation_spec)
        self.rewards = self._forms(env.full_reward_spec)
        root, *below = groups
        self.root_flags = [str(flag) for flag in root.keys]
        done = self._forms(env.full_done_spec)
        self.flags = {key: done[key] for group in below for key in group.keys}
        self._groups = [(group, done[group.done].shape) for group in groups]
        self._keys = [(group, group.keys) for group in groups]
        self.nests: dict[str, torch.Size] = {
            key: size for spec in self._specs for key, size in _nests(spec, self.batch)
        }
        self._off = torch.zeros((*self.batch, 1), dtype=torch.bool, device=self.device)
        self._dead: Tensor | None = None
        self._follows, self.goes_on = env.sets_own_flags, goes_on
        self.is_live = not env.returns_copies if is_live is None else is_live
        self.by_mask = (env.resets_by_mask or self.device.type != "cpu") if by_mask is None else by_mask

    def _known_groups(self) -> list[DoneGroup]:
        env = self._env
        groups = env.done_groups
        if not groups or groups[0].prefix or groups[0].done != "done" or groups[0].terminated != "terminated":
            raise NotNative(f"its flags are {key_str(env.done_keys)}")
        if any(env.full_done_spec[key].shape != (*env.batch_size, 1) for key in groups[0].keys):
            raise NotNative("its flags have another shape than [*batch_size, 1]")
        if env.run_type_checks or env.allow_done_after_reset:
            raise NotNative("run_type_checks=True" if env.run_type_checks else "allow_done_after_reset=True")
        return list(groups)

    def _forms(self, spec: Composite) -> dict[NestedKey, TensorForm]:
        found = {}
        for key in spec.leaves():
            leaf = spec[key]
            if isinstance(leaf, NonTensor) or leaf.dtype is None:
                raise NotNative(f"entry {key!r} holds objects")
            if -1 in leaf.shape:
                raise NotNative(f"entry {key!r} varies in shape")
            if leaf.device is not None and leaf.device != self.device:
                raise NotNative(f"entry {key!r} is on {leaf.device}, and the environment on {self.device}")
            found[unravel(key)] = TensorForm(leaf.shape, leaf.dtype)
        return found

    def check(self) -> None:
        """Test that the environment is what this form was made of; to be called once a batch.

        Raises:
            NotNative: it has changed since.
        """
        self._more()
        if any(map(is_not, specs_of(self._env), self._specs)):
            raise NotNative("its specs have changed")
        refuse_more(self._env, self._known, own=self._own)

    # Steps ------------------------------------------------------------------------------------

    def tensordict(self, values: Mapping[NestedKey, Any]) -> TensorDict:
        """Entries as a TensorDict of the environment's batch size and device, over the same memory."""
        nested: dict[str, Any] = {}
        is_flat = True
        for key, value in values.items():
            if type(key) is str:
                nested[key] = value
            else:
                place(nested, key, value)
                is_flat = False
        td = unchecked_td(nested, self.batch, device=self.td_device, nested=not is_flat)
        if is_flat:
            return td
        for key, size in self.nests.items():
            if (nest := td.get(key, None)) is not None:
                nest.batch_size = size
        return td

    def step(self, td: TensorDict) -> Tensors:
        """Act.

        Args:
            td: the current TensorDict, with what the policy wrote.

        Returns:
            The content of ``"next"``, true last observations included.

        Raises:
            UnfitOutcome: it has entries that the specs do not announce.
        """
        env = self._env
        if env.is_closed:
            check_open(env, "step")
        try:
            outcome = self._step(td)
        except Exception as error:
            raise_named(env, "step", error)
        out = self._read(outcome) if outcome is not td else None
        if out is None:
            completed = complete_step(env, td, outcome)
            out = self._read(completed, follows=False)
            if out is None:
                raise unfit_outcome(self, "step", completed)
        return out

    def reset(self, td: TensorDictBase | None, *, after_step: bool = False, **kwargs: Any) -> Tensors:
        """Begin new trajectories.

        Args:
            td: the current TensorDict and ``"_reset"``, bool ``[*batch, 1]``, which marks them; None: all.
            after_step: whether those are marked that the last step, which was taken just now, has ended.
            **kwargs: go to ``_reset``.

        Returns:
            :attr:`entries` and :attr:`flags`; they mean nothing in rows that are not marked.

        Raises:
            UnfitOutcome: see :meth:`step`.
        """
        env = self._env
        check_open(env, "reset")
        try:
            fresh = (self._after_step if after_step else self._begin)(td, **kwargs)
        except Exception as error:
            raise_named(env, "reset", error)
        marked = None if td is None else td.get("_reset")
        out = self._read_reset(fresh, marked)
        if out is None:
            completed = complete_reset(env, td, fresh)
            if marked is not None:
                check_alive(env, completed, {(): marked})
            out = self._read_reset(completed, marked)
            if out is None:
                raise unfit_outcome(self, "reset", completed)
        return out

    def no_flags(self) -> Tensors:
        """Flags of the root that are not set, in memory of their own."""
        return {flag: self._off.clone() for flag in self.root_flags}

    def check_batch(self) -> None:
        """Test what nobody has read in the steps of a batch: that nothing was done right after a reset.

        Raises:
            EnvError: something was.
        """
        self._check_batch()
        dead, self._dead = self._dead, None
        if dead is not None and bool(dead.any()):
            raise done_after_reset(self._env, "done")

    # What it returns ----------------------------------------------------------------------------

    def _read(self, outcome: Any, *, follows: bool = True) -> Tensors | None:
        """What a step returned, where that is what the specs say, no more and no less; else None.

        Args:
            outcome: what it returned.
            follows: whether ``done`` is still to be set where one of its causes is.
        """
        items = self._items(outcome)
        out: Tensors = {}
        if items is None or not self._take(items, self.entries, out) or not self._take(items, self.rewards, out):
            return None
        missing = len(out) - len(items)
        for group, form in self._groups:
            given = self._flags(items, group, form, out, follows)
            if not given:
                return None
            missing += given
        return None if missing else out

    def _read_reset(self, fresh: Any, marked: Tensor | None) -> Tensors | None:
        """What a reset returned, where that is what the specs say, and no flag is set; else None."""
        items = self._items(fresh)
        out: Tensors = {}
        if items is None or not self._take(items, self.entries, out):
            return None
        found = len(out)
        for group, keys in self._keys:
            for key in keys:
                flag = items.get(key)
                if flag is not None:
                    found += 1
                    if type(flag) is not Tensor or flag.dtype is not torch.bool or not self._stays(flag, group, marked):
                        return None
        for key, form in self.flags.items():
            out[key] = torch.zeros(form.shape, dtype=form.dtype, device=self.device)
        return out if found == len(items) else None

    def _stays(self, flag: Tensor, group: DoneGroup, marked: Tensor | None) -> bool:
        """Whether a flag that a reset returned is that of an environment which goes on, as far as that may be read."""
        if not self.by_mask:
            return not bool(flag.any())
        if group.prefix:
            return False
        set_now = flag.reshape(self._off.shape) if marked is None else flag.reshape(self._off.shape) & marked
        self._dead = set_now if self._dead is None else self._dead | set_now
        return True

    def _items(self, outcome: Any) -> dict[NestedKey, Any] | None:
        """Entries of what a step or a reset returned; None: it is no TensorDict of the right batch sizes."""
        if type(outcome) is not TensorDict or outcome.batch_size != self.batch:
            return None
        items: dict[NestedKey, Any] = {}
        walked: list[tuple[tuple[str, ...], TensorDict]] = [((), outcome)]
        for path, td in walked:  # which grows
            for name, value in td.items():
                if type(value) is Tensor or not isinstance(value, TensorDictBase):
                    items[(*path, name) if path else name] = value
                    continue
                size = td.batch_size if path else self.nests.get(name, self.batch)
                if type(value) is not TensorDict or value.batch_size != size:
                    return None
                walked.append(((*path, name), value))
        return items

    def _take(self, items: Mapping[NestedKey, Any], forms: Mapping[NestedKey, TensorForm], out: Tensors) -> bool:
        """Write into ``out`` what ``forms`` announce; returns whether it is there, in that form."""
        device = self.device
        is_reward = forms is self.rewards
        for key, (shape, dtype) in forms.items():
            value = items.get(key)
            if type(value) is not Tensor or value.dtype is not dtype or value.device != device:
                return False
            if value.shape != shape:
                if not is_reward or value.numel() != shape.numel():
                    return False
                value = value.reshape(shape)
            out[key] = value.detach() if value.requires_grad else value
        return True

    def _flags(
        self, items: Mapping[NestedKey, Any], group: DoneGroup, shape: torch.Size, out: Tensors, follows: bool
    ) -> int:
        """Write all flags of a group; those that are missing follow, see :func:`~rollwright.data.layout.complete_done`.

        Returns:
            How many are there; 0: none, or they have another form.
        """
        done: Any = items.get(group.done)
        terminated: Any = items.get(group.terminated)
        truncated: Any = None if group.truncated is None else items.get(group.truncated)
        given = 0
        for value in (done, terminated, truncated):
            if value is not None:
                if type(value) is not Tensor or value.dtype is not torch.bool or value.device != self.device:
                    return 0
                if value.shape != shape:
                    reshaped = {key: _of_shape(items.get(key), shape) for key in group.keys}
                    return self._flags(reshaped, group, shape, out, follows)
                given += 1
        if not given:
            return 0
        is_whole = given == 2 + (group.truncated is not None)
        if is_whole and not self._follows:  # completed before, by a base environment
            out.update((key, items[key]) for key in group.keys)
            return given
        if not is_whole:
            off = self._off if not group.prefix else torch.zeros(shape, dtype=torch.bool, device=self.device)
            if terminated is None:
                terminated = off if done is None else done if truncated is None else done & ~truncated
            if truncated is None and group.truncated is not None:
                truncated = off if done is None else done & ~terminated
        causes = terminated if truncated is None else terminated | truncated
        if not (is_whole and follows) and done is not None and not self.by_mask and bool((causes & ~done).any()):
            return 0  # such causes stay in the root
        out[group.done] = causes if done is None else done | causes
        out[group.terminated] = terminated
        if group.truncated is not None:
            out[group.truncated] = truncated
        return given


def _of_shape(value: Any, shape: torch.Size) -> Any:
    """A flag that lacks dimensions of one, or has one too many; what is of another size is none."""
    if not isinstance(value, Tensor):
        return value
    return value.reshape(shape) if value.numel() == shape.numel() else 0


def _nests(spec: Composite, batch: torch.Size) -> Sequence[tuple[str, torch.Size]]:
    """Nested Composites with a longer batch size than ``batch``.

    Raises:
        NotNative: parts of one differ.
    """
    found = []
    for key in spec.keys(True):
        nest: TensorSpec = spec[key]
        if isinstance(nest, StackedComposite):
            raise NotNative(f"entry {key!r} differs between environments")
        if isinstance(nest, Composite) and nest.shape != batch:
            if not isinstance(key, str):
                if nest.shape == spec[unravel(key[:-1])].shape:
                    continue  # follows the nest around it
                raise NotNative(f"entry {key!r} has a batch size of its own")
            found.append((key, nest.shape))
    return found
