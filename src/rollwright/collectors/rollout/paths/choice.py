"""Chooses the execution path: arrays where environment and policy allow it, else TensorDicts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar, cast

import numpy as np
import torch

from rollwright._keys import NestedKey, as_tuple, key_str, unravel
from rollwright._memory import MemoryPool
from rollwright._warnings import warn_user
from rollwright.collectors.core import Actor, Path
from rollwright.collectors.options import CollectorOptions
from rollwright.collectors.rollout.environment import conversations_of
from rollwright.collectors.rollout.paths import stages
from rollwright.collectors.rollout.paths.actors import (
    EnvActions,
    FlatActor,
    TensorActor,
    TensorDictActor,
    UndecidedActor,
    as_array,
    as_tensor,
)
from rollwright.collectors.rollout.paths.arrays import ArrayPath
from rollwright.collectors.rollout.paths.conversations.pool import is_pool_of_conversations, turns_of_pool
from rollwright.collectors.rollout.paths.conversations.turns import turns_of_engine
from rollwright.collectors.rollout.paths.groups import GroupedPath
from rollwright.collectors.rollout.paths.parts import PathParts
from rollwright.collectors.rollout.paths.plain import PlainPath
from rollwright.collectors.rollout.paths.pool import PoolPath
from rollwright.collectors.rollout.paths.tensors import TensorPath
from rollwright.collectors.rollout.policy import accelerate
from rollwright.data.llm.records import RecordLayout
from rollwright.data.specs import NonTensor
from rollwright.envs.arrays import ArrayEnv, Entry, array_form, objects_of, works_on_tensordicts
from rollwright.envs.base import EnvBase
from rollwright.envs.batched.async_pool import AsyncEnvPool
from rollwright.envs.libs.torchrl import TorchRLWrapper
from rollwright.envs.llm.core import Conversations
from rollwright.envs.llm.transforms import TurnHook
from rollwright.envs.own_tensors import OwnTensors
from rollwright.envs.recreation import RecreatedEnv
from rollwright.envs.transforms import TransformedEnv
from rollwright.errors import NotNative
from rollwright.modules import RandomPolicy
from rollwright.modules.functions import FunctionPolicy
from rollwright.modules.llm.engine import Engine
from rollwright.modules.llm.replay import ReplayEngine
from rollwright.modules.signature import Call
from rollwright.policies import ArrayPolicy, array_policy
from rollwright.policies.base import TensorPolicy
from rollwright.policies.program import RandomActions

T = TypeVar("T")

_NO_END = (
    "tokenizer: neither it nor the model's configuration has a token that ends an answer, so that each answer goes on "
    "for max_new_tokens. Set tokenizer.eos_token to the one that the chat template writes, or pass "
    "generate_kwargs={'stop_token_ids': [...]}."
)
# Options that the path of conversations does not know: TensorDicts are passed between environment and policy then.
_PLAIN_TURNS = ("init_random_frames", "compact_obs", "return_same_td", "set_truncated")


def choose_path(parts: PathParts, *, strict: bool = False) -> Path:
    """The fastest path that gives the bits of the plain one; ``path.how`` records what was chosen, and why.

    Args:
        parts: of the path.
        strict: refuse ``env_groups`` where there cannot be any, instead of a warning.
    """
    if (turns := turn_path(parts)) is not None:
        return turns
    if parts.options.leave_out:
        raise ValueError(
            f"leave_out: expected an environment and a policy that pass turns ({parts.env} and an engine), got some "
            "that pass TensorDicts, whose entries are not made apart. Pass postproc=, a function that leaves them out."
        )
    if goes_by_itself(parts.env, parts.options):
        call, fresh = accelerate(parts.acting.call, parts.options)
        pool = cast(AsyncEnvPool, parts.env)
        make = turns_of_pool if pool.ndim > 1 else PoolPath
        return make(parts, pool, call, fresh_outputs=fresh)
    against: dict[str, str] = {}
    if _device(parts.env).type != "cpu":
        path: Path | None = _tried(against, "env", lambda: _tensor_path(parts))
    elif isinstance(parts.env, TransformedEnv):  # transforms are cheapest on arrays
        path = _array_path(parts, against, strict=strict) or _tried({}, "env", lambda: _tensor_path(parts))
    else:
        path = _tried({}, "env", lambda: _tensor_path(parts)) or _array_path(parts, against, strict=strict)
    return plain_path(parts, against, strict=strict) if path is None else path


def _array_path(parts: PathParts, against: dict[str, str], *, strict: bool) -> ArrayPath | None:
    """The path on arrays; None: there is none, and ``against`` says why."""
    arrays = _tried(against, "env", lambda: arrays_of(parts))
    random = None if arrays is None else _tried(against, "env", lambda: _random(parts, arrays))
    if arrays is None or random is None:
        return None
    entries = _roots(arrays)
    flat = _tried(against, "policy", lambda: _flat(parts, arrays, parts.acting.call))
    actor: Actor | None
    if flat is not None:
        actor = FlatActor(flat, entries)
    else:
        why = against["policy"]
        actor = _tried(against, "env", lambda: _on_tensordicts(parts, entries, arrays.nests, why))
        if actor is not None:
            actor = _undecided(parts, actor, lambda: FlatActor(_flat(parts, arrays, parts.acting.call), entries))
    if actor is None:
        return None
    random_actor = FlatActor(random, entries)
    how = {"env": "native: NumPy arrays", "policy": actor.how}
    if arrays.on_tensordicts:
        how["env"] += f"; {works_on_tensordicts(arrays.on_tensordicts)}"
    if arrays.held_back:
        how["env"] += f"; {arrays.held_back}"
    number = parts.options.env_groups
    if number > 1 and flat is not None:
        groups = _tried(against, "env", lambda: _groups(parts, arrays))
        acting = None if groups is None else _tried(against, "policy", lambda: _acting(parts, groups, flat, actor))
        if groups is not None and acting is not None:
            how["env"] += f", in {number} groups that take turns"
            return GroupedPath(parts, arrays, random_actor, groups=groups, policies=acting, how=how)
    _note_one_group(parts, against, strict)
    return ArrayPath(parts, arrays, actor, random_actor, how=how)


def dialogue_parts(env: EnvBase, policy: Any, options: CollectorOptions) -> tuple[Conversations, Engine] | None:
    """Conversations and engine, where environment, policy and options are fit for turns of an engine; else None.

    Raises:
        ValueError: ``async_envs=True``, and they do not; or the policy writes several answers to a prompt.
    """
    found, engine = conversations_of(env), getattr(policy, "engine", None)
    samples = getattr(policy, "num_samples", None)
    if found is not None and isinstance(samples, int):
        raise ValueError(
            f"num_samples: the policy writes {samples} answers to each prompt, and a conversation goes on from one. "
            f"Leave it out, and pass repeats={samples} to the environment: as many conversations for each prompt."
        )
    fits = not any(getattr(options, name) for name in _PLAIN_TURNS)
    fits = fits and options.track_traj_ids and options.reset_when_done and options.extend_buffer
    fits = fits and not getattr(policy, "pad_output", False) and getattr(policy, "num_samples", None) is None
    if fits and found is not None and isinstance(engine, Engine):
        return found[0], engine
    if options.trace is not None or isinstance(engine, ReplayEngine):
        name = "trace" if options.trace is not None else "replay"
        raise ValueError(
            f"{name}: expected conversations (LLMEnv, ChatEnv), with no transforms but StepCounter(), RewardSum() and "
            "PolicyVersion(), and a policy with an engine (TransformersWrapper) that neither pads nor draws several "
            f"samples, got {env} and {type(policy).__name__}. Leave {name} out."
        )
    if options.max_policy_lag is not None:
        raise ValueError(
            f"max_policy_lag={options.max_policy_lag}: expected conversations (LLMEnv, ChatEnv) and a policy with an "
            f"engine (TransformersWrapper), which says the version of each token, got {env} and "
            f"{type(policy).__name__}. Leave it out, or pass num_collectors=."
        )
    if options.on_error != "raise" or options.max_retries:
        raise ValueError(
            f"on_error={options.on_error!r}, max_retries={options.max_retries}: expected conversations (LLMEnv, "
            "ChatEnv) and a policy with an engine (TransformersWrapper), each of which can fail by itself, got "
            f"{env} and {type(policy).__name__}: TensorDicts of all are passed together. Leave both out."
        )
    if options.async_envs and not goes_by_itself(env, options):
        raise ValueError(
            "async_envs=True: expected conversations (LLMEnv, ChatEnv), with no transforms but StepCounter(), "
            "RewardSum() and PolicyVersion(), and a policy with an engine (TransformersWrapper) that neither pads nor "
            "draws several samples; or an AsyncEnvPool without transforms, of environments of batch size [], or "
            "of LLMEnv or ChatEnv with batch_size=1. Got "
            f"{env} and {type(policy).__name__}. Leave async_envs out."
        )
    return None


def goes_by_itself(env: EnvBase, options: CollectorOptions) -> bool:
    """Whether frames of a pool are collected in the order in which its environments are ready."""
    if not isinstance(env, AsyncEnvPool) or options.async_envs is False:
        return False
    if env.ndim != 1 and not is_pool_of_conversations(env):
        return False
    return options.track_traj_ids and options.reset_when_done and options.extend_buffer


def turn_path(parts: PathParts) -> Path | None:
    """The path of conversations, where environment, policy and options have what it takes; else None."""
    policy = parts.acting.policy
    found = dialogue_parts(parts.env, policy, parts.options)
    if found is None:
        return None
    conversations, engine = found
    if isinstance(engine, ReplayEngine) and engine.tokenizer is None:
        engine.tokenizer = getattr(parts.env, "tokenizer", None)
    _check_tokenizers(getattr(parts.env, "tokenizer", None), engine.tokenizer, conversations.template)
    layout = _layout(parts.env, policy, parts.options.leave_out)
    path = turns_of_engine(parts, conversations, engine, hooks=lambda: _hooks(parts.env), layout=layout)
    if conversations.template is not None and not engine.end_ids:
        warn_user(_NO_END, UserWarning)
    return path


def _check_tokenizers(of_env: Any, of_policy: Any, template: Mapping[str, Any] | None) -> None:
    """Refuse two tokenizers that write prompts in two ways: that of the policy does it.

    Raises:
        ValueError: their vocabularies or chat templates differ.
    """
    if of_env is of_policy or not all(hasattr(each, "get_vocab") for each in (of_env, of_policy)):
        return
    differs = ""
    if of_env.get_vocab() != of_policy.get_vocab():
        differs = f"vocabularies, of {len(of_env.get_vocab())} and {len(of_policy.get_vocab())} tokens"
    elif template is not None and "chat_template" not in template and of_env.chat_template != of_policy.chat_template:
        differs = "chat templates"
    if differs:
        raise ValueError(
            f"tokenizer: those of environment and policy have different {differs}. Pass the tokenizer of the policy's "
            "model to both."
        )


def _hooks(env: EnvBase) -> list[TurnHook]:
    found = conversations_of(env)
    if found is None:
        raise NotNative("a transform works on TensorDicts")
    return found[1]


def _layout(env: EnvBase, policy: Any, leave_out: Sequence[NestedKey]) -> RecordLayout:
    """Of records: as the environment has its prompts, unless the policy is to write others."""
    found = getattr(env, "layout", None)
    layout = found if isinstance(found, RecordLayout) else RecordLayout(nested=False)
    wanted = getattr(policy, "record_layout", None)
    if wanted is not None:
        nested = wanted == "nested"
        layout = replace(layout, nested=nested, history=layout.history and nested)
    return replace(layout, log_probs=bool(getattr(policy, "return_log_probs", True)), leave_out=tuple(leave_out))


def _roots(arrays: ArrayEnv) -> dict[NestedKey, Entry]:
    """What a current TensorDict holds before the policy has acted."""
    flag = Entry((*arrays.batch, 1), np.dtype(np.bool_), True)
    return {**arrays.carried, **dict.fromkeys(cast("tuple[NestedKey, ...]", arrays.root_flags), flag)}


def _groups(parts: PathParts, arrays: ArrayEnv) -> list[ArrayEnv]:
    """Parts of a batch that hold what the whole does, in fewer rows."""
    if not parts.options.reset_when_done:
        raise NotNative("reset_when_done=False")
    try:
        groups = arrays.groups(parts.options.env_groups)
    except ValueError as error:  # of a transform that is bound to the size of the batch
        raise NotNative(str(error)) from error
    for group in groups:
        for key, entry in group.entries.items():
            if (whole := arrays.entries[key]).shape[1:] != entry.shape[1:]:
                raise NotNative(
                    f"{key!r} of shape {list(whole.shape)} would be {list(entry.shape)} in a group of {group.batch[0]}"
                )
    return groups


def _acting(parts: PathParts, groups: list[ArrayEnv], flat: ArrayPolicy, whole: Actor) -> list[Actor]:
    """A policy for each group; random actions are drawn for all of them at once."""
    if isinstance(flat, RandomActions):
        return [whole] * len(groups)
    return [FlatActor(_flat(parts, group, parts.acting.call), _roots(group)) for group in groups]


def _note_one_group(parts: PathParts, against: dict[str, str], strict: bool) -> None:
    """Say why there are no groups of environments, where the user has asked for some.

    Raises:
        ValueError: ``strict`` was passed.
    """
    number = parts.options.env_groups
    if number == 1:
        return
    why = "; ".join(f"{'policy' if part == 'policy' else 'environment'}: {reason}" for part, reason in against.items())
    if strict:
        raise ValueError(
            f"env_groups: {number} groups cannot take turns ({why}). Use a ParallelEnv of at least {number} "
            "environments on arrays, and a policy that runs on arrays, or leave env_groups out."
        )
    warn_user(f"env_groups: environments are stepped in one group from now on ({why}).", RuntimeWarning)


def plain_path(parts: PathParts, against: dict[str, str], *, strict: bool = False) -> PlainPath:
    """The path that takes any environment and any policy.

    Args:
        parts: of the path.
        against: why environment and policy do not run on arrays, as far as known.
        strict: see :func:`choose_path`.
    """
    _note_one_group(parts, against, strict)
    _check_layout(parts)
    flat = None if "policy" in against else _tried(against, "policy", lambda: _on_tensors(parts))
    how = {part: f"plain: {reason}" for part, reason in against.items()}
    how.setdefault("env", "plain, because the policy is")
    if flat is not None:
        how["policy"] = f"native: {flat.how}"
        return PlainPath(parts, parts.acting.call, fresh_outputs=True, flat=flat, how=how)
    call, fresh = accelerate(parts.acting.call, parts.options)
    return PlainPath(parts, call, fresh_outputs=fresh, how=how)


def _on_tensors(parts: PathParts) -> TensorPolicy:
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


def _check_layout(parts: PathParts) -> None:
    """Test that a policy writes answers where an environment of conversations reads them.

    Raises:
        ValueError: it has a layout of its own.
    """
    wanted, layout = getattr(parts.acting.policy, "record_layout", None), getattr(parts.env, "layout", None)
    if wanted is None or not isinstance(layout, RecordLayout) or layout.nested == (wanted == "nested"):
        return
    name = "nested" if layout.nested else "flat"
    raise ValueError(
        f"record_layout={wanted!r}: {parts.env} reads answers under {name} keys where TensorDicts are passed between "
        f"it and the policy. Leave record_layout out; or take out transforms other than StepCounter(), RewardSum() and "
        "PolicyVersion(), so that turns are passed, whose records have any layout."
    )


def _undecided(parts: PathParts, actor: Actor, flat: Callable[[], Actor]) -> Actor:
    """A policy on TensorDicts; a function whose first call shows that it does not need them, as ``flat`` from there."""
    call = parts.acting.call
    if type(call) is not FunctionPolicy or call.takes is not None:
        return actor

    def decided() -> Actor | None:
        return None if call.takes is None else _tried({}, "policy", flat) or actor

    return UndecidedActor(actor, decided)


def _on_tensordicts(
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


def _tried(against: dict[str, str], part: str, make: Callable[[], T]) -> T | None:
    try:
        return make()
    except NotNative as reason:
        against.setdefault(part, str(reason))
        return None


def arrays_of(parts: PathParts) -> ArrayEnv:
    """The array form of the environment.

    Raises:
        NotNative: it has none, or an option rules it out.
    """
    options = parts.options
    if not options.reset_when_done and options.compact_obs:
        raise NotNative("compact_obs=True with reset_when_done=False")
    if options.use_buffers is False:
        raise NotNative("use_buffers=False")
    arrays = array_form(parts.env, objects=True, unfit=True)
    if held := objects_of(arrays.entries):
        # Rows have no objects: they are in lists beside them, in batches that this process delivers itself.
        rows_only = ("use_buffers", "compact_obs", "return_same_td")
        if names := [name for name in rows_only if getattr(options, name)]:
            raise NotNative(f"entry {held[0]!r} holds objects, with {names[0]}=True")
        if type(parts.memory) is not MemoryPool:
            raise NotNative(f"entry {held[0]!r} holds objects, which the memory of this batch cannot")
    return arrays


def _device(env: EnvBase) -> torch.device:
    return torch.device("cpu") if env.device is None else env.device


def _tensor_path(parts: PathParts) -> TensorPath:
    """The path on tensors.

    Raises:
        NotNative: the environment has no tensor form, or an option rules it out.
    """
    options, devices, device = parts.options, parts.devices, _device(parts.env)
    ruled_out = {
        "conversations": parts.conversations is not None,
        "use_buffers=False": options.use_buffers is False,
        "compact_obs=True": options.compact_obs,
        "env_groups": options.env_groups > 1,
        f"a policy on {devices.policy}, and an environment on {device}": devices.policy not in (None, device),
    }
    if reasons := [name for name, there in ruled_out.items() if there]:
        raise NotNative(reasons[0])
    env = parts.env._tensor_form()
    if not options.reset_when_done and not env.goes_on:
        raise NotNative("reset_when_done=False")
    how = {"env": "native: tensors"}
    actor, random = _actor_on_cpu(parts, env) if device.type == "cpu" else _actor_elsewhere(parts, env)
    return TensorPath(parts, env, actor, random, how={**how, "policy": actor.how})


def _actor_on_cpu(parts: PathParts, env: OwnTensors) -> tuple[Actor, Actor]:
    """What acts, and what acts at random."""
    options, there = parts.options, {*env.entries, *env.flags, *env.root_flags}

    def on_tensors(policy: Any) -> Actor:
        return TensorActor(_flat_of(parts, policy, there, tuple(env.batch), there))

    def acts() -> Actor:
        if options.cudagraph_policy:
            raise NotNative("cudagraph_policy")
        return on_tensors(parts.acting.call)

    against: dict[str, str] = {}
    actor = _tried(against, "policy", acts)
    if actor is None:
        if options.cudagraph_policy or (options.compile_policy and options.compile_policy is not True):
            raise NotNative("torch compiles the policy as a whole")
        call, why, reads_ids = parts.acting.call, against["policy"], options.track_traj_ids and not env.by_mask
        entries = dict.fromkeys(there)
        whole = _called_whole(parts, call, entries, _nests(env), why, as_tensor, reads_ids=reads_ids)
        actor = _undecided(parts, whole, acts)
    drawn = _random_policy(parts)
    return actor, TensorActor(drawn) if isinstance(drawn, ArrayPolicy) else on_tensors(drawn)


def _actor_elsewhere(parts: PathParts, env: OwnTensors) -> tuple[Actor, Actor]:
    """The same where a device other than the CPU computes: the policy is called, compiled and captured as a whole."""
    random, options = TensorActor(EnvActions(parts.env)), parts.options
    there, why = {*env.entries, *env.flags, *env.root_flags}, "torch compiles it as a whole"
    if not (options.compile_policy or options.cudagraph_policy):
        against: dict[str, str] = {}
        taken_apart = _tried(
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


def _flat(parts: PathParts, arrays: ArrayEnv, policy: Any) -> ArrayPolicy:
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
    clash = [key for key in written if key in there or not _lands(key, there)]
    if clash:
        raise NotNative(f"it writes {key_str(clash)}, beside what the environment has")
    return flat


def _lands(key: NestedKey, available: set[NestedKey]) -> bool:
    """Whether an entry below ``"next"`` is one that the environment's root has as well; others lie at the root."""
    path = as_tuple(key)
    return path[0] != "next" or unravel(path[1:]) in available


def _random(parts: PathParts, arrays: ArrayEnv) -> ArrayPolicy:
    """Random actions, as the environment would draw them."""
    drawn = _random_policy(parts)
    return drawn if isinstance(drawn, ArrayPolicy) else _flat(parts, arrays, drawn)


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
