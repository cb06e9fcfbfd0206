"""Actors: policies on arrays, on tensors and on TensorDicts; and which of them a policy becomes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict, TensorDictBase

from rollwright._keys import NestedKey, as_tuple, key_str, place, unravel
from rollwright._memory import in_numpy
from rollwright.collectors.core import Actor
from rollwright.collectors.rollout.paths import stages
from rollwright.collectors.rollout.paths.parts import PathParts
from rollwright.collectors.rollout.paths.stages import IDS, VERSION, entries_or_rows
from rollwright.collectors.rollout.policy import accelerate
from rollwright.data.entries import unchecked_td
from rollwright.data.specs import NonTensor
from rollwright.envs.arrays import ArrayEnv, Entry, Values, objects_of
from rollwright.envs.base import EnvBase
from rollwright.envs.libs.torchrl import TorchRLWrapper
from rollwright.envs.own_tensors import OwnTensors
from rollwright.envs.recreation import RecreatedEnv
from rollwright.envs.transforms import TransformedEnv
from rollwright.errors import NotNative
from rollwright.modules import RandomPolicy
from rollwright.modules.functions import FunctionPolicy
from rollwright.modules.signature import Call
from rollwright.policies import ArrayPolicy, array_policy, compile_policy
from rollwright.policies.base import TensorPolicy


class PolicyActor(Actor):
    """A policy that is taken apart into calls.

    Args:
        policy: the policy.
    """

    def __init__(self, policy: ArrayPolicy) -> None:
        self._policy, self._kept = policy, policy.kept
        self.finite_keys, self.frozen = policy.finite_keys, policy.frozen

    def start(self, steps: int) -> None:
        """Prepare a rollout."""
        self._policy.start(steps)
        self.varies = self._policy.varies

    @property
    def how(self) -> str:  # type: ignore[override]
        """See :class:`Actor`; a first call may show it."""
        return f"native: {self._policy.how}"

    def _with_kept(self, root: Values, as_entry: Callable[[Any], Any] = lambda value: value) -> Values:
        """The root, with the states that the policy begins with where it has none yet."""
        if not self._kept or all(key in root for key in self._kept):
            return root
        return {**{key: as_entry(value.copy()) for key, value in self._kept.items()}, **root}


class FlatActor(PolicyActor):
    """A policy on arrays.

    Args:
        policy: the policy.
        entries: what the current TensorDict holds.
    """

    def __init__(self, policy: ArrayPolicy, entries: Mapping[NestedKey, Entry]) -> None:
        super().__init__(policy)
        self._entries, self._keys = entries, policy.out_keys
        columns = {key: entry for key, entry in entries.items() if entry.column}
        self._in_rows = [(key, columns.get(key)) for key in policy.in_keys]

    def __call__(self, root: Values, ids: NDArray[Any]) -> Values:
        """What the policy writes: arrays by key, ``[*batch, ...]``."""
        if self._kept:
            root = self._with_kept(root)
        inputs = [root[key] if column is None else full(root[key], column) for key, column in self._in_rows]
        outputs = self._policy(*inputs)
        if len(outputs) != len(self._keys):  # those of a module by signature are complete after its first call
            self._keys = self._policy.out_keys
        return dict(zip(self._keys, outputs, strict=True))

    def compiled(self, arguments: Mapping[str, Any], root: Values) -> Actor:
        """A cheaper actor that does the same."""
        root = self._with_kept(root)
        example = {key: root[key] if column is None else full(root[key], column) for key, column in self._in_rows}
        return FlatActor(compile_policy(self._policy, arguments=arguments, example=example), self._entries)


class TensorActor(PolicyActor):
    """A policy on tensors.

    Args:
        policy: the policy; one on arrays is given those over the tensors' memory, on the CPU.
    """

    def __init__(self, policy: ArrayPolicy) -> None:
        super().__init__(policy)
        self._call = policy.tensors if isinstance(policy, TensorPolicy) else self._over_arrays

    def _over_arrays(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        return [torch.from_numpy(value) for value in self._policy(*[value.numpy() for value in inputs])]

    def __call__(self, root: Values, ids: NDArray[Any]) -> Values:
        """What the policy writes: arrays by key, ``[*batch, ...]``."""
        outputs = self._call(*self._inputs(root))
        return dict(zip(self._policy.out_keys, outputs, strict=True))

    def _inputs(self, root: Values) -> list[torch.Tensor]:
        if self._kept:
            root = self._with_kept(root, torch.from_numpy)
        return [root[key] for key in self._policy.in_keys]

    def compiled(self, arguments: Mapping[str, Any], root: Values) -> Actor:
        """A cheaper actor that does the same."""
        if any(not value.is_cpu for value in root.values()):
            raise NotNative("its entries are on another device.")
        example = {key: value.numpy() for key, value in zip(self._policy.in_keys, self._inputs(root), strict=True)}
        return TensorActor(compile_policy(self._policy, arguments=arguments, example=example))


class EnvActions(TensorPolicy):
    """Random actions, drawn by an environment's own ``rand_action``, which reads nothing of the root.

    Args:
        env: the environment.
    """

    how = "drawn by the environment"
    varies = False

    def __init__(self, env: EnvBase) -> None:
        self.in_keys: list[NestedKey] = []
        self.out_keys = list(env.action_keys)
        self.finite_keys: list[NestedKey] = []
        self._env, self._batch = env, env.batch_size

    def start(self, steps: int) -> None:
        """Prepare a rollout of ``steps`` calls."""

    def __call__(self, *inputs: NDArray[Any]) -> Sequence[NDArray[Any]]:
        """The outputs for one step, in memory of their own."""
        return [value.numpy() for value in self.tensors()]

    def tensors(self, *inputs: torch.Tensor) -> Sequence[torch.Tensor]:
        """As a call, on tensors of the policy's device."""
        drawn = self._env.rand_action(TensorDict({}, batch_size=self._batch, device=self._env.device))
        return [drawn.get(key) for key in self.out_keys]


class CastActor(Actor):
    """An actor, some of whose outputs are converted.

    Args:
        actor: acts.

    Attributes:
        forms: shape and dtype of the outputs to convert.
    """

    def __init__(self, actor: Actor) -> None:
        self._actor = actor
        self.how, self.finite_keys = actor.how, actor.finite_keys
        self.varies, self.frozen = actor.varies, actor.frozen
        self.forms: dict[NestedKey, tuple[tuple[int, ...], Any]] = {}

    def start(self, steps: int) -> None:
        """Prepare a rollout."""
        self._actor.start(steps)

    def __call__(self, root: Values, ids: NDArray[Any]) -> Values:
        """What the policy writes: arrays by key, ``[*batch, ...]``."""
        outputs = self._actor(root, ids)
        for key, (shape, dtype) in self.forms.items():
            value = outputs[key]
            outputs[key] = (value.to(dtype) if isinstance(value, torch.Tensor) else value.astype(dtype)).reshape(shape)
        return outputs

    def compiled(self, arguments: Mapping[str, Any], root: Values) -> Actor:
        """A cheaper actor that does the same."""
        raise NotNative("Random actions are not compiled.")


class TensorDictActor(Actor):
    """A policy on TensorDicts, given the current TensorDict as one.

    Args:
        act: of :func:`~rollwright.collectors.rollout.paths.stages.build_act`.
        entries: what the current TensorDict holds: forms of arrays, or keys of tensors.
        rewards: what a step leaves beside them, which no policy sees.
        stale: what the policy wrote in the step before and does not see: it must not repeat it in silence.
        batch: the environment's batch size.
        nests: see :class:`~rollwright.envs.arrays.ArrayEnv`.
        device: of the current TensorDict.
        reads_ids: whether it is to be given the trajectory ids, which roots of arrays do not have.
        why: why the policy is not taken apart.
        read: makes an output of a tensor that it writes.
        compiles: whether it is still to be compiled where that is wanted.
    """

    def __init__(
        self,
        act: stages.Stage,
        entries: Mapping[NestedKey, Any],
        *,
        rewards: Collection[NestedKey],
        stale: Collection[NestedKey],
        batch: tuple[int, ...],
        nests: Mapping[str, tuple[int, ...]],
        device: torch.device | None,
        reads_ids: bool,
        why: str,
        read: Callable[[Any], Any],
        compiles: bool,
    ) -> None:
        self._read, self._compiles = read, compiles
        self._act, self._entries, self._batch = act, entries, torch.Size(batch)
        self._device, self._reads_ids = device, reads_ids
        self._nests = [(name, torch.Size([*batch, *size])) for name, size in nests.items()]
        self.how, self.finite_keys = f"plain, called on a TensorDict: {why}", []
        self._why = why
        self._left_out = {*rewards, *stale}

    def start(self, steps: int) -> None:
        """Prepare a rollout."""

    def __call__(self, root: Values, ids: NDArray[Any]) -> Values:
        """What the policy writes: arrays by key, ``[*batch, ...]``."""
        nested: dict[str, Any] = {}
        given: dict[NestedKey, torch.Tensor] = {}
        entries, left_out = self._entries, self._left_out
        for key, value in root.items():
            if key in entries:
                given[key] = tensor = (
                    value if type(value) is torch.Tensor else torch.from_numpy(full(value, entries[key]))
                )
            elif key in left_out or as_tuple(key)[0] == "next":
                continue
            else:  # what it wrote, until it writes it again
                tensor = value if type(value) is torch.Tensor else torch.from_numpy(value)
            if type(key) is str:
                nested[key] = tensor
            else:
                place(nested, key, tensor)
        if self._reads_ids:
            place(nested, IDS, torch.from_numpy(np.array(ids)))
        for name, size in self._nests:
            nested[name] = unchecked_td(nested[name], size, device=self._device)
        # All that is in it has been in a TensorDict of this batch size, or comes from the environment.
        current = self._act(unchecked_td(nested, self._batch, device=self._device))
        return {
            key: self._read(value)
            for key, value in entries_or_rows(current)
            if given.get(key) is not value and key not in (IDS, VERSION)
        }

    def compiled(self, arguments: Mapping[str, Any], root: Values) -> Actor:
        """A cheaper actor that does the same."""
        if not self._compiles:
            return self
        raise NotNative(self._why[:1].upper() + self._why[1:] + ".")


class UndecidedActor(Actor):
    """A policy whose first call shows what it takes: on TensorDicts until then, on arrays from then on if it can be.

    Args:
        actor: on TensorDicts.
        decided: the actor to go on with; None: the first call has not been.
    """

    def __init__(self, actor: Actor, decided: Callable[[], Actor | None]) -> None:
        self._actor, self._decided, self._steps = actor, decided, 0
        self._is_decided = False
        self.varies, self.frozen = actor.varies, actor.frozen

    @property
    def how(self) -> str:  # type: ignore[override]
        """That of the actor of now."""
        return self._actor.how

    @property
    def finite_keys(self) -> list[NestedKey]:  # type: ignore[override]
        """Those of the actor of now."""
        return self._actor.finite_keys

    def start(self, steps: int) -> None:
        """Prepare a rollout."""
        self._steps = steps
        self._actor.start(steps)

    def __call__(self, root: Values, ids: NDArray[Any]) -> Values:
        """What the policy writes: arrays by key, ``[*batch, ...]``."""
        if self._is_decided:
            return self._actor(root, ids)
        outputs = self._actor(root, ids)
        if (actor := self._decided()) is not None:
            self._is_decided = True
            if actor is not self._actor:
                actor.start(self._steps)
                self._actor = actor
        return outputs

    def compiled(self, arguments: Mapping[str, Any], root: Values) -> Actor:
        """A cheaper actor that does the same."""
        return self._actor.compiled(arguments, root)


def full(value: Any, entry: Entry) -> NDArray[Any]:
    """A value in row form as an array of the tensor's shape."""
    return np.array(value, entry.dtype).reshape(entry.shape) if entry.column else value


def as_array(value: Any) -> Any:
    """The array over a tensor's memory; what NumPy does not know, and a list of ragged rows, stay as they are."""
    return value.detach().numpy() if type(value) is torch.Tensor and in_numpy(value.dtype) else value


def as_tensor(value: Any) -> Any:
    """A tensor without its gradient; what is none stays as it is."""
    return value.detach() if type(value) is torch.Tensor and value.requires_grad else value


class OnEntries:
    """A policy on tensors, called on TensorDicts: it reads and writes entries, and no module is called.

    Where that does not give what the modules give, they are called, from that step on.

    Args:
        flat: the policy.
        plain: the same on TensorDicts.
    """

    def __init__(self, flat: TensorPolicy, plain: Call) -> None:
        self._flat, self._plain, self._fits, self._is_proven = flat, plain, True, False

    def __call__(self, td: TensorDictBase) -> TensorDictBase | None:
        """Write the outputs; they have memory of their own."""
        flat = self._flat
        if not self._fits or type(td) is not TensorDict:
            return self._plain(td)
        inputs = [td.get(key, None) for key in flat.in_keys]
        if not all(type(value) is torch.Tensor for value in inputs):
            return self._plain(td)
        numbers = None if self._is_proven else torch.get_rng_state()
        try:
            outputs = flat.tensors(*inputs)
        except NotNative:
            self._fits = False
            if numbers is not None:
                torch.set_rng_state(numbers)
            return self._plain(td)
        self._is_proven = True
        for key, value in zip(flat.out_keys, outputs, strict=True):
            td.set(key, value)
        return td


def tried(against: dict[str, str], part: str, make: Callable[[], T]) -> T | None:
    """What ``make`` returns; None: it does not run on arrays, and ``against`` says why, by part."""
    try:
        return make()
    except NotNative as reason:
        against.setdefault(part, str(reason))
        return None


def roots_of(arrays: ArrayEnv) -> dict[NestedKey, Entry]:
    """What a current TensorDict holds before the policy has acted."""
    flag = Entry((*arrays.batch, 1), np.dtype(np.bool_), True)
    return {**arrays.carried, **dict.fromkeys(cast("tuple[NestedKey, ...]", arrays.root_flags), flag)}


def policy_on_tensors(parts: PathParts) -> TensorPolicy:
    """The policy as calls on the tensors of the current TensorDict.

    Raises:
        NotNative: it is to be called on TensorDicts.
    """
    options, env = parts.options, parts.env
    if options.use_buffers is False:
        raise NotNative("use_buffers=False")
    if options.compile_policy or options.cudagraph_policy:
        raise NotNative("torch compiles it as a whole, because the environment is plain")
    if parts.conversations is not None or any(
        device is not None and device.type != "cpu" for device in (parts.devices.policy, env.device)
    ):
        raise NotNative("the environment is plain")
    specs = [env.full_observation_spec, env.full_state_spec, env.full_done_spec]
    available = {
        unravel(key)
        for spec in specs
        for key in spec.leaves()
        if not isinstance(spec[key], NonTensor) and -1 not in spec[key].shape
    }
    flat = _flat_of(parts, parts.acting.call, available, tuple(env.batch_size), available)
    if not isinstance(flat, TensorPolicy) or flat.kept:
        raise NotNative("the environment is plain")
    return flat


def undecided(parts: PathParts, actor: Actor, flat: Callable[[], Actor]) -> Actor:
    """A policy on TensorDicts; a function whose first call shows that it does not need them, as ``flat`` from there."""
    call = parts.acting.call
    if type(call) is not FunctionPolicy or call.takes is not None:
        return actor

    def decided() -> Actor | None:
        return None if call.takes is None else tried({}, "policy", flat) or actor

    return UndecidedActor(actor, decided)


def policy_on_tensordicts(
    parts: PathParts, entries: Mapping[NestedKey, Any], nests: Mapping[str, tuple[int, ...]], why: str
) -> Actor:
    """The policy as it is, on TensorDicts made of arrays."""
    options = parts.options
    if options.cudagraph_policy or (options.compile_policy and options.compile_policy is not True):
        raise NotNative("torch compiles the policy as a whole")
    if any(device is not None and device.type != "cpu" for device in (parts.devices.policy, parts.devices.storing)):
        raise NotNative("policy and batches are not on the CPU")
    if any(entry.dtype == np.object_ for entry in entries.values()):
        raise NotNative(f"an entry holds objects, and the policy is given a TensorDict ({why})")
    return _called_whole(parts, parts.acting.call, entries, nests, why, as_array, reads_ids=options.track_traj_ids)


def _called_whole(
    parts: PathParts,
    call: Call,
    entries: Mapping[NestedKey, Any],
    nests: Mapping[str, tuple[int, ...]],
    why: str,
    read: Callable[[Any], Any],
    *,
    fresh: bool = True,
    reads_ids: bool = False,
    compiles: bool = True,
) -> Actor:
    """The policy as it is, on TensorDicts.

    Args:
        parts: of the path.
        call: calls the policy.
        entries: what the current TensorDict holds.
        nests: see :class:`TensorDictActor`.
        why: likewise.
        read: likewise.
        fresh: whether its outputs are new tensors at each call.
        reads_ids: see :class:`TensorDictActor`.
        compiles: likewise.
    """
    env = parts.env
    act = stages.build_act(call, lambda td: td, stages.action_check(env), fresh_outputs=fresh)
    if parts.options.track_policy_version:
        act = stages.tag_act(act, parts.version)
    return TensorDictActor(
        act,
        entries,
        rewards=env.reward_keys,
        stale=stages.stale_actions(env, parts.acting.policy),
        batch=tuple(env.batch_size),
        nests=nests,
        device=parts.current_device,
        reads_ids=reads_ids,
        why=why,
        read=read,
        compiles=compiles,
    )


def device_of(env: EnvBase) -> torch.device:
    """Of an environment's data."""
    return torch.device("cpu") if env.device is None else env.device


def actor_on_cpu(parts: PathParts, env: OwnTensors) -> tuple[Actor, Actor]:
    """What acts, and what acts at random."""
    options, there = parts.options, {*env.entries, *env.flags, *env.root_flags}

    def on_tensors(policy: Any) -> Actor:
        return TensorActor(_flat_of(parts, policy, there, tuple(env.batch), there))

    def acts() -> Actor:
        if options.cudagraph_policy:
            raise NotNative("cudagraph_policy")
        return on_tensors(parts.acting.call)

    against: dict[str, str] = {}
    actor = tried(against, "policy", acts)
    if actor is None:
        if options.cudagraph_policy or (options.compile_policy and options.compile_policy is not True):
            raise NotNative("torch compiles the policy as a whole")
        call, why, reads_ids = parts.acting.call, against["policy"], options.track_traj_ids and not env.by_mask
        entries = dict.fromkeys(there)
        whole = _called_whole(parts, call, entries, _nests(env), why, as_tensor, reads_ids=reads_ids)
        actor = undecided(parts, whole, acts)
    drawn = _random_policy(parts)
    return actor, TensorActor(drawn) if isinstance(drawn, ArrayPolicy) else on_tensors(drawn)


def actor_elsewhere(parts: PathParts, env: OwnTensors) -> tuple[Actor, Actor]:
    """The same where a device other than the CPU computes: the policy is called, compiled and captured as a whole."""
    random, options = TensorActor(EnvActions(parts.env)), parts.options
    there, why = {*env.entries, *env.flags, *env.root_flags}, "torch compiles it as a whole"
    if not (options.compile_policy or options.cudagraph_policy):
        against: dict[str, str] = {}
        taken_apart = tried(
            against, "policy", lambda: _flat_of(parts, parts.acting.call, there, tuple(env.batch), there, env.device)
        )
        if isinstance(taken_apart, TensorPolicy) and not taken_apart.kept:
            return TensorActor(taken_apart), random
        why = against.get("policy", "it keeps states of its own")
    call, fresh = accelerate(parts.acting.call, options)
    whole = _called_whole(parts, call, dict.fromkeys(there), _nests(env), why, as_tensor, fresh=fresh, compiles=False)
    return whole, random


def _nests(env: OwnTensors) -> dict[str, tuple[int, ...]]:
    return {name: tuple(size[len(env.batch) :]) for name, size in env.nests.items()}


def flat_policy(parts: PathParts, arrays: ArrayEnv, policy: Any) -> ArrayPolicy:
    """The policy on arrays of an environment.

    Raises:
        NotNative: it has no such form, or writes what the environment has.
    """
    if parts.options.cudagraph_policy:
        raise NotNative("cudagraph_policy")
    there = {*arrays.carried, *arrays.root_flags}
    return _flat_of(parts, policy, there.difference(objects_of(arrays.entries)), arrays.batch, there)


def _flat_of(
    parts: PathParts,
    policy: Any,
    available: set[NestedKey],
    batch: tuple[int, ...],
    there: set[NestedKey],
    device: torch.device | None = None,
) -> ArrayPolicy:
    """The policy on arrays, where it writes the actions, and nothing that is ``there`` before."""
    kind = parts.options.exploration_type
    flat = array_policy(policy, exploration_type=kind, batch_shape=batch, available=available, device=device)
    written = {unravel(key) for key in flat.out_keys}
    missing = [key for key in parts.env.action_keys if key not in written]
    if missing:
        raise NotNative(f"it writes no {key_str(missing)}")
    clash = [key for key in written if key in there or (type(key) is tuple and not _lands(key, there))]
    if clash:
        raise NotNative(f"it writes {key_str(clash)}, beside what the environment has")
    return flat


def _lands(path: tuple[str, ...], available: set[NestedKey]) -> bool:
    """Whether an entry below ``"next"`` is one that the environment's root has as well; others lie at the root."""
    return path[0] != "next" or unravel(path[1:]) in available


def random_policy(parts: PathParts, arrays: ArrayEnv) -> ArrayPolicy:
    """Random actions, as the environment would draw them."""
    drawn = _random_policy(parts)
    return drawn if isinstance(drawn, ArrayPolicy) else flat_policy(parts, arrays, drawn)


def _random_policy(parts: PathParts) -> ArrayPolicy | RandomPolicy:
    """What draws actions as the environment would.

    Raises:
        NotNative: the environment has a way of its own.
    """
    env: EnvBase = parts.env
    passing = (TransformedEnv.rand_action, RecreatedEnv.rand_action)
    while isinstance(env, TransformedEnv | RecreatedEnv) and type(env).rand_action in passing:
        env = env.base_env
    if type(env).rand_action is TorchRLWrapper.rand_action and env.full_action_spec == parts.env.full_action_spec:
        return EnvActions(parts.env)
    if type(env).rand_action is not EnvBase.rand_action:
        raise NotNative(f"{type(env).__name__} overrides rand_action")
    return RandomPolicy(parts.env.full_action_spec)


T = TypeVar("T")
