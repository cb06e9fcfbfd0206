"""EnvBase: what an environment is, and WrapperEnv: one around another."""

from __future__ import annotations

import itertools
from abc import ABCMeta
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from inspect import Signature, signature
from operator import attrgetter
from types import MappingProxyType
from typing import Any, ClassVar, Self, TypeVar, cast

import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase, is_tensor_collection
from torch import nn

from rollwright._keys import NestedKey, key_str, leaf_keys, without
from rollwright._seeding import seed_torch
from rollwright._tensors import as_tensor
from rollwright.data.layout import deciding_groups, end_of_trajectory, mark_truncated
from rollwright.envs._results import (
    LastSeen,
    check_alive,
    complete_reset,
    complete_step,
    merge_reset,
    missing_actions,
    put_back,
    replace_entries,
    reset_masks,
    with_kept,
)
from rollwright.envs._specs import EnvSpecs
from rollwright.envs.arrays import ArrayEnv, Entry, raise_named
from rollwright.envs.own_arrays import OwnArrays
from rollwright.envs.own_tensors import OwnTensors
from rollwright.envs.tensordicts_on_arrays import StepsOnArrays
from rollwright.envs.utils import check_env_specs
from rollwright.errors import EnvError, EnvKeyError, RollwrightError
from rollwright.modules import set_recurrent_mode
from rollwright.modules.signature import Call, speak_tensordict


@contextmanager
def closed_on_error(envs: Sequence[Any]) -> Iterator[None]:
    """Close environments if the block raises.

    Args:
        envs: those that were made; may grow in the block.
    """
    try:
        yield
    except BaseException:
        for env in envs:
            with suppress(Exception):  # the error that is under way matters
                env.close(raise_if_closed=False)
        raise


Policy = Callable[[TensorDictBase], TensorDictBase]


def rand_step(self: EnvBase, tensordict: TensorDictBase | None = None) -> TensorDictBase:
    """Take a random action and step; without data, from where the environment is, the first time from a reset.

    An environment that reads a state in its data, as some transforms do, is reset each time that none are given.
    """
    if tensordict is None and (not self.num_uses or self.state_keys):
        tensordict = self.reset()
    return self.step(self.rand_action(tensordict))


@set_recurrent_mode("sequential")  # the dimension of a batch of environments is not time, whatever the caller set
def rollout(  # noqa: D417 - self
    self: EnvBase,
    max_steps: int,
    policy: Policy | None = None,
    callback: Callable[[EnvBase, TensorDictBase], Any] | None = None,
    *,
    actions: Iterable[Any] | None = None,
    auto_reset: bool = True,
    auto_cast_to_device: bool = False,
    break_when_any_done: bool | None = None,
    break_when_all_done: bool | None = None,
    return_contiguous: bool | None = None,
    tensordict: TensorDictBase | None = None,
    set_truncated: bool = False,
    trust_policy: bool = False,
    storing_device: torch.device | str | int | None = None,
) -> TensorDictBase:
    """Step for up to ``max_steps`` with a policy.

    Args:
        max_steps: the most steps to take.
        policy: called on each TensorDict; random actions when None.
        callback: called as ``callback(env, tensordict)`` after each action was chosen.
        actions: one for each step, in place of a policy; the rollout is no longer than they are.
        auto_reset: reset first. If False, ``tensordict`` holds the start, of which only what is done is reset: what
            :meth:`step_mdp` makes of the last frame of a rollout goes on from it.
        auto_cast_to_device: move data to the policy's device and back at each step.
        break_when_any_done: stop when any environment is done (the default). If False, what is
            done is reset and stepping goes on; the last step is followed by no reset.
        break_when_all_done: stop when every environment is done; those that are done before
            go on without a reset.
        return_contiguous: stack into dense tensors (the default unless specs are dynamic); if
            False, the result is a lazy stack.
        tensordict: where to start (``auto_reset=False``), or data for ``reset``.
        set_truncated: mark the last step as truncated unless it is terminated.
        trust_policy: call the policy as it is. If False, a module whose ``forward`` takes entries by name is
            wrapped, as in a collector.
        storing_device: where frames are kept and returned; default: the environment's.

    Returns:
        ``[*batch, T]``, the last dimension named ``"time"``.
    """
    if max_steps < 1:
        raise ValueError(f"max_steps: expected at least 1, got {max_steps}.")
    if break_when_any_done and break_when_all_done:
        raise ValueError("break_when_any_done and break_when_all_done exclude one another; pass one of them.")
    if not auto_reset and tensordict is None:
        raise ValueError("tensordict: expected the start of the rollout with auto_reset=False, got None. Pass reset().")
    if policy is not None and not callable(policy):
        raise TypeError(
            f"policy: expected a callable that takes a TensorDict, got {type(policy).__name__}. "
            "Pass None for random actions."
        )
    if actions is not None:
        if policy is not None:
            raise ValueError("policy and actions were both given. Pass one of them.")
        given = list(itertools.islice(actions, max_steps))
        if not given:
            raise ValueError("actions: expected at least one, got none.")
        max_steps, policy, trust_policy = len(given), _following(given, self), True
    stop_at_any = not break_when_all_done if break_when_any_done is None else break_when_any_done
    if policy is not None and actions is None and auto_reset:
        self.fit_policy(policy)
    act: Call = self.rand_action if policy is None else policy
    if policy is not None and not trust_policy:
        act = speak_tensordict(policy, self, strict=False)
    if auto_cast_to_device and policy is not None:
        act = _on_device_of(policy, act, self)
    start = None if tensordict is None else tensordict.copy()
    td = self.reset(start) if auto_reset else self.maybe_reset(cast(TensorDictBase, start))
    frames: list[TensorDictBase] = []
    device = None if storing_device is None else torch.device(storing_device)

    def keep(frame: TensorDictBase) -> TensorDictBase:
        copy = frame.clone()
        return copy if device is None else copy.to(device)

    ended: torch.Tensor | bool = False
    for t in range(max_steps):
        chosen = act(td)
        if chosen is not None and chosen is not td:
            td.update(_checked(chosen))
        if callback is not None:
            callback(self, td)
        if stop_at_any or break_when_all_done or t == max_steps - 1:  # what follows the last step is not reset
            td = self.step(td)
            following = self.step_mdp(td)
            self.trim_frame(td, following)
            frames.append(keep(td))  # policies may write into what they see, and into buffers of their own
            ends = end_of_trajectory(td.get("next"), self.done_groups, td.ndim)
            ended = ended | ends if break_when_all_done else ends.any()
            if bool(as_tensor(ended).all()) or t == max_steps - 1:
                break
            td = following
        else:
            frame, td = self.step_and_maybe_reset(td)
            frames.append(keep(frame))
    ndim = frames[0].ndim
    if return_contiguous is False:  # named at once: names that are set later are checked against entries of any shape
        out: TensorDictBase = LazyStackedTensorDict(*frames, stack_dim=ndim, stack_dim_name="time")
    else:
        out = cast(TensorDictBase, LazyStackedTensorDict.maybe_dense_stack(frames, ndim))
        out.names = [*[None] * ndim, "time"]
    if set_truncated:
        mark_truncated(self.done_groups, out[..., -1].get("next"), ndim)
    return out


def _following(actions: Iterable[Any], env: EnvBase) -> Policy:
    """A policy that takes actions which were given, one after the other."""
    left = iter(actions)

    def act(td: TensorDictBase) -> TensorDictBase:
        action = next(left)
        if is_tensor_collection(action):
            return td.update(action)
        return td.set(env.action_key, torch.as_tensor(action, device=env.device))

    return act


def _checked(chosen: Any) -> TensorDictBase:
    if not is_tensor_collection(chosen):
        raise TypeError(
            f"policy: expected it to return a TensorDict (or None), got {type(chosen).__name__}. Write the action into "
            "the TensorDict and return that."
        )
    return cast(TensorDictBase, chosen)


def _on_device_of(policy: Policy, call: Call, env: EnvBase) -> Call:
    parameter = next(policy.parameters(), None) if isinstance(policy, nn.Module) else None
    device = getattr(policy, "device", None) if parameter is None else parameter.device

    def act(td: TensorDictBase) -> TensorDictBase:
        seen = td.to(device)
        chosen = call(seen)
        chosen = seen if chosen is None else chosen
        return chosen.to(env.device) if env.device is not None else chosen

    return call if device is None else act


T = TypeVar("T")
_extensions: dict[str, Callable[[Any, Any], EnvBase]] = {}


def register_extension(name: str, extend: Callable[[Any, Any], EnvBase]) -> None:
    """Register what is built on top of :class:`EnvBase` and offered by it.

    Args:
        name: ``"append_transform"``, ``"policy"`` or ``"num_workers"``.
        extend: from an environment (a function that makes it) and the argument of that name to an environment.
    """
    _extensions[name] = extend


class _EnvMeta(ABCMeta):
    """Calls ``_finalize`` once the constructor of the most derived class has run, and takes ``policy=``."""

    @property
    def __signature__(cls) -> Signature:
        return signature(partial(cls.__init__, None))  # type: ignore[misc]

    def __call__(cls: type[T], *args: Any, **kwargs: Any) -> T:  # so, type checkers read the constructor
        policy = None if _takes(cls, "policy") else kwargs.pop("policy", None)
        locked = not _takes(cls, "spec_locked") and kwargs.pop("spec_locked", False)
        env: Any = ABCMeta.__call__(cls, *args, **kwargs)
        with closed_on_error([env] if env.made_its_parts else []):
            env._finalize()
            env = env if policy is None else _extensions["policy"](env, policy)
            return cast(T, env.set_spec_lock_() if locked else env)


def _takes(cls: type, name: str) -> bool:
    """Whether the class's own constructor has an argument of that name, which is then its own affair.

    Classes of this library that have it name it for help and type checkers alone.
    """
    init = cls.__init__  # type: ignore[misc]
    code = getattr(init, "__code__", None)
    if code is None or init.__module__.startswith("rollwright."):
        return False
    return name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


_NOTHING_SEEN = LastSeen()


class EnvBase(EnvSpecs, metaclass=_EnvMeta):
    """Base class of environments, single or in batches.

    Subclass it: set specs in ``__init__``, and write ``_reset``, ``_step`` and ``_set_seed``. ``_reset`` returns the
    first observations. ``_step`` returns what follows the action, *without* ``"next"`` around it. Both results are
    copied, so you may write into the same memory again. ``done``, ``terminated`` and ``truncated`` are completed from
    one another. Rewards and flags without a trailing dimension of one get it.

    Args:
        device: device of the environment's tensors. None: wherever ``_step`` leaves them.
        batch_size: shape of the batch of environments that this object steps together; ``[]`` for one.
        run_type_checks: also test at every step that values lie in the domains of their specs. (Presence, shape and
            dtype are always tested.) If False, an observation may lack a last dimension of one.
        allow_done_after_reset: accept an environment that is done right after its reset.
        spec_locked: see :meth:`set_spec_lock_`. Every environment's constructor takes it; subclasses need not declare
            it.
        policy: add the transforms that this policy's recurrent modules need. If the environment lacks any, the result
            is a :class:`~rollwright.envs.TransformedEnv` with ``InitTracker`` and the policy's primers. Every
            environment's constructor takes it; subclasses need not declare it.

    Attributes:
        batch_locked: False for an environment that takes its batch size from the data.
        stand_ins: entries that a policy may write in place of an action, by the key of the action.
        made_its_parts: whether the constructor made what :meth:`close` closes: processes, other environments.
        ends_with_step: names of root entries that are not carried to the next step, not even in part.
        read_at_reset: names of entries that a reset reads if they are passed to it.
        resets_by_mask: whether a collector may call ``_reset`` after each step, with a mask that the host has not read.
            Rows that ``"_reset"`` does not mark must then stay as they are. On devices other than the CPU, it always
            does so.
        has_token_rewards: whether a step may return a reward ``[tokens, 1]``, one number for each token of an answer.

    Example:
        >>> from rollwright.data import Categorical, Composite, Unbounded
        >>> class Countdown(EnvBase):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.observation_spec = Composite(left=Unbounded((1,), dtype=torch.int64))
        ...         self.action_spec = Categorical(2, shape=())
        ...     def _reset(self, tensordict=None, **kwargs):
        ...         return TensorDict({"left": torch.tensor([3])})
        ...     def _step(self, tensordict):
        ...         left = tensordict["left"] - tensordict["action"]
        ...         return TensorDict({"left": left, "reward": -1.0, "done": left == 0})
        ...     def _set_seed(self, seed):
        ...         pass
        >>> env = Countdown()
        >>> rollout = env.rollout(10, policy=lambda td: td.set("action", 1))
        >>> rollout["next", "left"].squeeze(-1), rollout["next", "terminated"].squeeze(-1)
        (tensor([2, 1, 0]), tensor([False, False,  True]))
    """

    batch_locked: bool = True
    remedy_when_closed: str = "Make a new environment"  # for messages
    stand_ins: Mapping[NestedKey, NestedKey] = MappingProxyType({})
    ends_with_step: tuple[str, ...] = ()
    read_at_reset: tuple[str, ...] = ()
    has_token_rewards: bool = False
    made_its_parts: bool = False
    returns_copies: bool = False  # True: what _step and _reset return is never written again, and need not be copied
    resets_by_mask: bool = False
    steps_on_arrays: bool = False  # True: whoever passes TensorDicts is served by the array form, where there is one
    casts_outcomes: bool = False  # True: what _step and _reset return in other dtypes than the specs' is cast

    def __init__(
        self,
        *,
        device: torch.device | str | int | None = None,
        batch_size: Sequence[int] | None = None,
        run_type_checks: bool = False,
        allow_done_after_reset: bool = False,
        spec_locked: bool = False,
    ) -> None:
        super().__init__(device=device, batch_size=batch_size, spec_locked=spec_locked)
        self.run_type_checks = run_type_checks
        self.allow_done_after_reset = allow_done_after_reset
        self.is_closed = False

    # What a subclass writes -------------------------------------------------------------------

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        """Begin new trajectories; returns observations (and flags, where any is set), without ``"next"``.

        ``tensordict`` is None for a plain reset. In a partial reset it holds ``"_reset"``; only rows
        that it marks are read from the result.
        """
        raise EnvError(f"{type(self).__name__} has no _reset: define `_reset(self, tensordict=None, **kwargs)`.")

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Act; returns observations, reward and flags in a new TensorDict, without ``"next"``."""
        raise EnvError(f"{type(self).__name__} has no _step: define `_step(self, tensordict)`.")

    def _set_seed(self, seed: int | None) -> int | None:
        """Seed the environment's own randomness; may return the last seed that it used."""
        raise EnvError(f"{type(self).__name__} has no _set_seed: define `_set_seed(self, seed)`.")

    # Stepping ---------------------------------------------------------------------------------

    def reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        """Begin new trajectories, in all environments or in those that ``"_reset"`` marks.

        Args:
            tensordict: None, or data of the environment's batch size. With bool entries ``"_reset"``
                (``[*batch, 1]``, one per group of flags), unmarked rows keep what ``tensordict`` holds, and of
                observations and flags that it lacks what the environment returned last.
            **kwargs: go to ``_reset``.

        Returns:
            ``tensordict`` itself: observations, ``done``, ``terminated`` (``truncated``) are put into it, ``"_reset"``
            is taken out, and whatever else it held stays; tensors that it held are not written. A new TensorDict where
            none was given, where it is locked, or cannot hold the result (rows of different shapes).

        Raises:
            EnvError: the environment raised or returned what its specs do not describe; ``tensordict`` lacks what
                unmarked rows go on with, and the environment was used by others since it returned that.
        """
        if tensordict is not None:
            self._check_batch(tensordict, "reset")
        masks = reset_masks(self, tensordict)
        if self.is_closed and (masks is None or all(bool(mask.all()) for mask in masks.values())):
            self._reopen()
        if tensordict is not None and masks and not any(bool(mask.any()) for mask in masks.values()):
            return put_back(self, tensordict, without(tensordict, *self.reset_keys))
        last = self.__dict__.get("_last_seen", _NOTHING_SEEN)
        given = tensordict if tensordict is None else with_kept(self, tensordict, masks, last)
        self.note_use()
        result = self.reset_outcome(given, **kwargs)
        if tensordict is not None and given is not None:
            result = self.with_reset(given, result)
            result = result if given is tensordict else put_back(self, tensordict, result)
        self.__dict__["_last_seen"] = LastSeen(self.moment(), result)
        return result

    def with_reset(self, tensordict: TensorDictBase, fresh: TensorDictBase) -> TensorDictBase:
        """What :meth:`reset` returns for ``tensordict``, where ``fresh`` is what :meth:`reset_outcome` has returned."""
        masks = reset_masks(self, tensordict)
        merged = merge_reset(self, tensordict, fresh, masks)
        check_alive(self, merged, masks)
        return put_back(self, tensordict, merged)

    def step(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Act in the environment.

        Args:
            tensordict: holds the action (and what the state spec names), batch size as the environment.

        Returns:
            ``tensordict`` itself, with ``"next"`` set: observations, reward, flags. Entries that the
            policy has written below ``"next"`` already (recurrent states) stay.

        Raises:
            EnvError: the environment raised or returned what its specs do not describe.
        """
        self._check_batch(tensordict, "step")
        self.note_use()
        outcome = self.step_outcome(tensordict)
        preset = tensordict.get("next", None)
        if preset is not None:
            outcome.update(preset.exclude(*leaf_keys(outcome)))
        tensordict.set("next", outcome)
        self.__dict__["_last_seen"] = LastSeen(self.moment(), tensordict, outcome)
        return tensordict

    def step_and_maybe_reset(self, tensordict: TensorDictBase) -> tuple[TensorDictBase, TensorDictBase]:
        """Step, then reset where a trajectory ended.

        Returns:
            ``tensordict`` with ``"next"`` set, the true last observation included; and the data from
            which the next step is to be taken, reset where a trajectory ended.
        """
        tensordict = self.step(tensordict)
        following = self._step_mdp(tensordict)
        self.trim_frame(tensordict, following)
        return tensordict, self.maybe_reset(following)

    def trim_frame(self, frame: TensorDictBase, following: TensorDictBase) -> None:
        """Change a frame in place once the data of the next step were taken from it; by default, nothing.

        Args:
            frame: what :meth:`step` returned, before it is recorded. Its flags stay.
            following: what :meth:`step_mdp` made of it.
        """

    def step_mdp(self, tensordict: TensorDictBase) -> TensorDictBase:
        """The data from which the next step is to be taken, given what :meth:`step` returned; nothing is reset.

        Returns:
            What lies below ``"next"`` without rewards, over what the root holds besides; tensors are shared.

        Raises:
            EnvError: there is no ``"next"``.
        """
        if tensordict.get("next", None) is None:
            raise EnvError(f"{self}: step_mdp expected data with 'next', got none. Pass what step() returned.")
        return self._step_mdp(tensordict)

    def maybe_reset(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Reset what ``tensordict`` (of :meth:`step_mdp`) shows as done; returns it, as :meth:`reset` does."""
        flags = [(group.reset, tensordict.get(group.done, None)) for group in deciding_groups(self.done_groups)]
        flags = [(key, flag) for key, flag in flags if flag is not None]
        if not any(bool(flag.any()) for _, flag in flags):
            return tensordict
        marked = without(tensordict)
        for key, flag in flags:
            marked.set(key, flag.clone())
        return put_back(self, tensordict, self.reset(marked))

    def any_done(self, tensordict: TensorDictBase) -> bool:
        """Whether any environment of ``tensordict`` (flags at its root) is done."""
        return bool(end_of_trajectory(tensordict, self.done_groups, tensordict.ndim).any())

    def rand_action(self, tensordict: TensorDictBase | None = None) -> TensorDictBase:
        """Write random actions from the action spec."""
        if tensordict is None:
            tensordict = TensorDict({}, self.batch_size, device=self.device)
        spec = self.full_action_spec
        if self.batch_locked or tensordict.batch_size == spec.shape:
            return tensordict.update(spec.rand())
        return tensordict.update(spec.expand(tensordict.batch_size).rand())

    rand_step, rollout = rand_step, rollout

    def set_seed(self, seed: int | None = None, static_seed: bool = False) -> int | None:
        """Seed the environment and torch's global generator (from which policies sample).

        Takes effect with the next reset where the environment reads seeds there.

        Args:
            seed: for the first environment; further ones of a batch get ``seed + 1``, and so on.
            static_seed: give the same seed to all.

        Returns:
            The seed of the last environment.
        """
        self.reopen()
        if seed is not None:
            seed_torch(seed)
        last = self._seed_envs(seed, static_seed)
        return seed if last is None else last

    def _seed_envs(self, seed: int | None, static_seed: bool) -> int | None:
        return self._set_seed(seed)

    def close(self, *, raise_if_closed: bool = True) -> None:
        """Release what the environment holds. A second call does nothing.

        Args:
            raise_if_closed: whether a second call raises, of environments whose parts end with it: batched ones.
        """
        self.is_closed = True

    def reopen(self) -> None:
        """Open again after :meth:`close`, for a reset that follows; nothing where that cannot be."""
        if self.is_closed:
            self._reopen()

    def _reopen(self) -> None:
        """How a subclass opens again; an environment that does not override it stays closed."""

    def _check_batch(self, tensordict: TensorDictBase, call: str) -> None:
        if not isinstance(tensordict, TensorDictBase):
            raise TypeError(
                f"tensordict: {self}.{call} expected a TensorDict, got {type(tensordict).__name__}. "
                "Pass what reset() or step_mdp() returned."
            )
        if self.batch_locked and tensordict.batch_size != self.batch_size:
            raise EnvError(
                f"{self}: {call} expected data of batch size {list(self.batch_size)}, got "
                f"{list(tensordict.batch_size)}. Pass what reset() or step_mdp() returned."
            )

    def _array_form(self) -> ArrayEnv:
        """The environment on NumPy arrays, see :mod:`rollwright.envs.arrays`; the same state, stepped on arrays."""
        # Methods are looked up with each call: they may be exchanged.
        return OwnArrays(self, EnvBase, lambda td: self._step(td), lambda td, **kwargs: self._reset(td, **kwargs))

    def _tensor_form(self) -> OwnTensors:
        """The environment on the tensors that it returns, where these have a batch; the same state."""
        return OwnTensors(
            self, EnvBase, lambda td: self._step(td), lambda td, **kwargs: self._reset(td, **kwargs), own=True
        )

    # The exchange with _reset and _step, checked ---------------------------------------------------

    @property
    def num_uses(self) -> int:
        """Changes whenever somebody resets or steps the environment, or collects from it."""
        count: int = self.__dict__.get("_num_uses", 0)
        return count

    def moment(self) -> object:
        """Differs once somebody has reset or stepped the environment, or one that it is made of."""
        return self.__dict__.get("_num_uses", 0)

    def note_use(self) -> None:
        """Somebody is going to reset or step the environment: others cannot go on with their trajectories."""
        self.__dict__["_num_uses"] = self.__dict__.get("_num_uses", 0) + 1  # not by the slow way of modules

    def forget_last_seen(self) -> None:
        """Forget what was returned last, which is none of what the next step is taken from."""
        self.__dict__.pop("_last_seen", None)

    @property
    def sets_own_flags(self) -> bool:
        """Whether flags come from a class that is not of this library, and may be set without ``done``."""
        return not type(self).__module__.startswith("rollwright.")

    def step_outcome(self, tensordict: TensorDictBase) -> TensorDictBase:
        """What :meth:`step` puts below ``"next"``: the result of ``_step``, completed and checked."""
        if self.steps_on_arrays and (stepped := self.step_on_arrays(tensordict)) is not None:
            return stepped
        with self._named_errors("step", tensordict):
            outcome = self._step(tensordict)
        return complete_step(self, tensordict, outcome)

    def reset_outcome(self, tensordict: TensorDictBase | None, **kwargs: Any) -> TensorDictBase:
        """The result of ``_reset``, completed and checked; :meth:`reset` merges it with what goes on."""
        with self._named_errors("reset"):
            fresh = self._reset(tensordict, **kwargs)
        return complete_reset(self, tensordict, fresh)

    def step_on_arrays(self, tensordict: TensorDictBase) -> TensorDictBase | None:
        """:meth:`step_outcome`, by the array form; None: there is none for this step, and nothing was stepped."""
        return self.remember("steps on arrays", lambda: StepsOnArrays(self))(tensordict)

    @contextmanager
    def _named_errors(self, call: str, acting_on: TensorDictBase | None = None) -> Iterator[None]:
        if self.is_closed:
            raise EnvError(f"{self}: {call} after close(). {self.remedy_when_closed}.")
        try:
            yield
        except Exception as error:
            if isinstance(error, RollwrightError) or acting_on is None:
                raise_named(self, call, error)
            if missing := missing_actions(self, acting_on):
                raise EnvKeyError(
                    f"{self}: step got no {key_str(missing)}. It got {key_str(leaf_keys(acting_on))}. "
                    "Let the policy write every action."
                ) from error
            raise_named(self, call, error)

    def _step_mdp(self, tensordict: TensorDictBase) -> TensorDictBase:
        """The root of the next step: ``"next"`` without rewards, over what the root holds besides."""
        outcome = tensordict.get("next")
        root = without(tensordict, "next", *self.reward_keys, *self.ends_with_step)
        return replace_entries(root, without(outcome, *self.reward_keys))

    # The object itself ------------------------------------------------------------------------

    def fit_policy(self, policy: Any) -> bool:
        """Take from a policy what the environment lacks, before the two meet; by default, nothing.

        :meth:`rollout` and collectors call it.

        Args:
            policy: that is going to act.

        Returns:
            Whether specs have changed.
        """
        return False

    check_env_specs = check_env_specs

    def append_transform(self, transform: Any) -> EnvBase:
        """A :class:`~rollwright.envs.TransformedEnv` of this environment with ``transform``."""
        return _extensions["append_transform"](self, transform)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Same as :meth:`step`."""
        return self.step(tensordict)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(batch_size={list(self.batch_size)}, device={self.device})"


def _of_base_env(name: str) -> Any:
    """A property that is the base environment's."""
    return property(attrgetter(f"base_env.{name}"), doc=f"See :attr:`EnvBase.{name}`; the base environment's.")


class WrapperEnv(EnvBase):
    """An environment around another one; attributes that it does not have itself are those of ``base_env``.

    Args:
        base_env: the environment.
    """

    base_env: EnvBase
    _of_base: ClassVar[tuple[str, ...]] = ("run_type_checks", "allow_done_after_reset")  # are set there

    def __init__(self, base_env: EnvBase) -> None:
        super().__init__()
        self.base_env = base_env

    def _finalize(self) -> None:
        """Specs come from the base environment, when they are first asked for."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._of_base:
            if "base_env" in self.__dict__:  # not yet while EnvBase sets its defaults
                setattr(self.base_env, name, value)
            return
        super().__setattr__(name, value)
        if name == "base_env":
            # Also a plain attribute: modules are looked up in a slow way, and each step does so often.
            self.__dict__[name] = value
            self._cache.clear()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            base_env = self.__dict__.get("base_env")
            # Where a property of this class raised, the base environment's value would be a wrong one.
            if base_env is None or name.startswith("__") or hasattr(type(self), name):
                raise
        return getattr(base_env, name)

    stand_ins: Mapping[NestedKey, NestedKey] = _of_base_env("stand_ins")
    ends_with_step: tuple[str, ...] = _of_base_env("ends_with_step")
    read_at_reset: tuple[str, ...] = _of_base_env("read_at_reset")
    has_token_rewards: bool = _of_base_env("has_token_rewards")
    batch_locked: bool = _of_base_env("batch_locked")
    run_type_checks: bool = _of_base_env("run_type_checks")
    allow_done_after_reset: bool = _of_base_env("allow_done_after_reset")

    @property
    def batch_size(self) -> torch.Size:
        """Shape of the batch of environments."""
        return self.base_env.batch_size

    @batch_size.setter
    def batch_size(self, value: Sequence[int]) -> None:
        raise AttributeError(f"batch_size: that of a {type(self).__name__} is its base environment's. Set it there.")

    @property
    def device(self) -> torch.device | None:
        """Where the environment's tensors live, or None."""
        return self.base_env.device

    @device.setter
    def device(self, value: torch.device | str | None) -> None:
        self.to(value)

    def moment(self) -> object:
        """Differs once somebody has reset or stepped the environment, or one that it is made of."""
        return self.num_uses, self.base_env.moment()

    def set_spec_lock_(self, mode: bool = True) -> Self:
        """Lock the specs against changes in place, or unlock them; those of the base environment too."""
        self.base_env.set_spec_lock_(mode)
        return super().set_spec_lock_(mode)

    def fit_policy(self, policy: Any) -> bool:
        """Take from a policy what the environment lacks, before the two meet; by default, nothing."""
        return self.base_env.fit_policy(policy)


class WrapperArrays(ArrayEnv):
    """The array form of an environment around another one.

    Args:
        base: the array form of that one.
    """

    def __init__(self, base: ArrayEnv) -> None:
        self._base = base
        self.batch, self.entries, self.rewards, self.reads = base.batch, base.entries, base.rewards, base.reads
        self.flags, self.nests, self.held_back = base.flags, base.nests, base.held_back
        self.root_flags, self.done_follows, self.may_be_unfit = base.root_flags, base.done_follows, base.may_be_unfit

    def see_roots(self, forms: Mapping[NestedKey, Entry]) -> None:
        """Note the forms of all that roots hold, but for what a policy writes; see :attr:`may_be_unfit`."""
        self._base.see_roots(forms)

    @property
    def resets_ahead(self) -> bool:
        """Whoever sets it promises to reset, right after each step and without arguments, at least those that ended."""
        return self._base.resets_ahead

    @resets_ahead.setter
    def resets_ahead(self, value: bool) -> None:
        self._base.resets_ahead = value
