"""Chooses the execution path: arrays where environment and policy allow it, else TensorDicts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from rollwright._keys import NestedKey
from rollwright._memory import MemoryPool
from rollwright._warnings import warn_user
from rollwright.collectors.core import Actor, Path
from rollwright.collectors.options import CollectorOptions
from rollwright.collectors.rollout.environment import conversations_of
from rollwright.collectors.rollout.paths.actors import (
    FlatActor,
    actor_elsewhere,
    actor_on_cpu,
    device_of,
    flat_policy,
    policy_on_tensordicts,
    policy_on_tensors,
    random_policy,
    roots_of,
    tried,
    undecided,
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
from rollwright.envs.arrays import ArrayEnv, array_form, objects_of, works_on_tensordicts
from rollwright.envs.base import EnvBase
from rollwright.envs.batched.async_pool import AsyncEnvPool
from rollwright.envs.llm.core import Conversations
from rollwright.envs.llm.transforms import TurnHook
from rollwright.envs.transforms import TransformedEnv
from rollwright.errors import NotNative
from rollwright.modules.llm.engine import Engine
from rollwright.modules.llm.replay import ReplayEngine
from rollwright.policies import ArrayPolicy
from rollwright.policies.program import RandomActions

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
    if device_of(parts.env).type != "cpu":
        path: Path | None = tried(against, "env", lambda: _tensor_path(parts))
    elif isinstance(parts.env, TransformedEnv):  # transforms are cheapest on arrays
        path = _array_path(parts, against, strict=strict) or tried({}, "env", lambda: _tensor_path(parts))
    else:
        path = tried({}, "env", lambda: _tensor_path(parts)) or _array_path(parts, against, strict=strict)
    return plain_path(parts, against, strict=strict) if path is None else path


def _array_path(parts: PathParts, against: dict[str, str], *, strict: bool) -> ArrayPath | None:
    """The path on arrays; None: there is none, and ``against`` says why."""
    arrays = tried(against, "env", lambda: arrays_of(parts))
    random = None if arrays is None else tried(against, "env", lambda: random_policy(parts, arrays))
    if arrays is None or random is None:
        return None
    entries = roots_of(arrays)
    flat = tried(against, "policy", lambda: flat_policy(parts, arrays, parts.acting.call))
    actor: Actor | None
    if flat is not None:
        actor = FlatActor(flat, entries)
    else:
        why = against["policy"]
        actor = tried(against, "env", lambda: policy_on_tensordicts(parts, entries, arrays.nests, why))
        if actor is not None:
            actor = undecided(parts, actor, lambda: FlatActor(flat_policy(parts, arrays, parts.acting.call), entries))
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
        groups = tried(against, "env", lambda: _groups(parts, arrays))
        acting = None if groups is None else tried(against, "policy", lambda: _acting(parts, groups, flat, actor))
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
    return [FlatActor(flat_policy(parts, group, parts.acting.call), roots_of(group)) for group in groups]


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
    flat = None if "policy" in against else tried(against, "policy", lambda: policy_on_tensors(parts))
    how = {part: f"plain: {reason}" for part, reason in against.items()}
    how.setdefault("env", "plain, because the policy is")
    if flat is not None:
        how["policy"] = f"native: {flat.how}"
        return PlainPath(parts, parts.acting.call, fresh_outputs=True, flat=flat, how=how)
    call, fresh = accelerate(parts.acting.call, parts.options)
    return PlainPath(parts, call, fresh_outputs=fresh, how=how)


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


def _tensor_path(parts: PathParts) -> TensorPath:
    """The path on tensors.

    Raises:
        NotNative: the environment has no tensor form, or an option rules it out.
    """
    options, devices, device = parts.options, parts.devices, device_of(parts.env)
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
    actor, random = actor_on_cpu(parts, env) if device.type == "cpu" else actor_elsewhere(parts, env)
    return TensorPath(parts, env, actor, random, how={**how, "policy": actor.how})
