"""What a policy needs of an environment besides observations: initial states, the mark of first steps, and indices.

A policy declares it by its submodules: those with a method ``make_tensordict_primer()`` carry states, and read the mark
of first steps at their ``init_key`` (``"is_init"`` unless they have one); those with ``action_space="categorical"``, or
with a categorical distribution, write an action as an index. Whether others do, a call shows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from tensordict.nn import TensorDictModuleWrapper, TensorDictSequential
from torch import distributions, nn

from rollwright._keys import NestedKey, as_tuple, key_str, unravel
from rollwright._warnings import warn_user
from rollwright.data.layout import IS_INIT, deciding_groups
from rollwright.data.specs import OneHot, TensorSpec
from rollwright.envs.base import EnvBase, register_extension
from rollwright.envs.transforms import CategoricalAction, Compose, InitTracker, Transform, TransformedEnv
from rollwright.envs.transforms.primer import TensorDictPrimer, as_primer
from rollwright.errors import EnvKeyError

Specs = dict[NestedKey, TensorSpec]


def provide_for_policy(env: EnvBase, policy: Any) -> EnvBase:
    """An environment that provides what ``policy`` carries along: ``env`` itself where nothing is missing.

    What counts is what ``full_observation_spec`` and ``full_state_spec`` announce, so that transforms inside the
    environments of a batch are seen, and a second call adds nothing.

    Args:
        env: is not changed.
        policy: a module, or any object; only modules (and objects with ``make_tensordict_primer``) can need anything.

    Raises:
        TypeError: the policy cannot be called.
        ValueError: the environment has an entry of that name and of another shape, or two modules keep their states
            under one name.
        EnvKeyError: a mark of first steps cannot be given where the policy reads it.
    """
    if not callable(policy):
        raise TypeError(
            f"policy: expected a callable on TensorDicts, a TensorDictModule or an nn.Module, got "
            f"{type(policy).__name__}: {policy!r}."
        )
    modules = _with_states(policy)
    known = _entries(env) if modules else {}
    added: list[Transform] = [InitTracker(name) for name in _missing_marks(env, modules, known)]
    owners: dict[NestedKey, Any] = {}
    for module in modules:
        primer = _primer_of(module)
        if primer is None:
            continue
        wanted = {unravel(key): primer.primers[key] for key in primer.primers.keys(True, True)}
        _check_alone(policy, module, wanted, owners)
        present = {key: known[key] for key in wanted if key in known}
        for key, spec in present.items():
            _check_same(env, module, key, wanted[key], spec)
        if len(present) == len(wanted):
            continue
        if present:
            raise ValueError(
                f"policy: {type(module).__name__} carries {key_str(wanted)}, and {env} provides only "
                f"{key_str(present)}. Let its primer give all of them, or none."
            )
        added.append(primer)
        known.update({key: primer.placed(key, env.batch_size) for key in wanted})
    added += [CategoricalAction(key) for key in _written_as_indices(env, policy)]
    return _with(env, added)


def taking_indices(env: EnvBase, keys: Iterable[NestedKey]) -> EnvBase:
    """An environment that takes indices for some of its one-hot actions: ``env`` itself where there are none."""
    return _with(env, [CategoricalAction(key) for key in keys])


def _with(env: EnvBase, added: Sequence[Transform]) -> EnvBase:
    if not added:
        return env
    caches = not isinstance(env, TransformedEnv) or env.cache_specs
    return TransformedEnv(env, Compose(*added), cache_specs=caches)


def _with_states(policy: Any) -> list[Any]:
    """The submodules that carry states; the policy itself may be one, and no module."""
    parts = policy.modules() if isinstance(policy, nn.Module) else [policy]
    return [part for part in parts if callable(getattr(part, "make_tensordict_primer", None))]


def may_write_indices(env: EnvBase, policy: Any) -> list[NestedKey]:
    """One-hot actions of the environment of which a module does not say whether it writes indices."""
    return [key for key, writer in _writers_of_one_hot(env, policy) if not _says_what_it_writes(writer)]


def _written_as_indices(env: EnvBase, policy: Any) -> list[NestedKey]:
    """One-hot actions of the environment that the policy says it writes as indices."""
    return [key for key, writer in _writers_of_one_hot(env, policy) if _picks_index(writer)]


def _writers_of_one_hot(env: EnvBase, policy: Any) -> list[tuple[NestedKey, nn.Module | None]]:
    if not isinstance(policy, nn.Module):
        return []
    specs = env.full_action_spec.leaves()
    one_hot = [key for key in env.action_keys if isinstance(specs[key], OneHot)]
    return [(key, _last_writer(policy, key)) for key in one_hot]


def _says_what_it_writes(part: Any) -> bool:
    return any(getattr(part, name, None) is not None for name in ("distribution_class", "action_space"))


def _last_writer(policy: nn.Module, key: NestedKey) -> nn.Module | None:
    """The last of the modules in sequence that writes an entry, other than to explore; None: it cannot be told."""
    if isinstance(policy, TensorDictSequential):
        return next((_last_writer(part, key) for part in reversed(list(policy.module)) if _writes(part, key)), None)
    if isinstance(policy, TensorDictModuleWrapper):
        return _last_writer(policy.td_module, key)
    return policy if _writes(policy, key) else None


def _writes(part: Any, key: NestedKey) -> bool:
    """Whether a module writes an entry, other than to explore."""
    explores = any(base.__name__ == "EGreedyModule" for base in type(part).__mro__)
    return not explores and key in [unravel(each) for each in getattr(part, "out_keys", ())]


def _picks_index(part: Any) -> bool:
    """Whether a module says that it writes indices."""
    kind = getattr(part, "distribution_class", None)
    kind = kind.func if isinstance(kind, partial) else kind
    if isinstance(kind, type) and issubclass(kind, distributions.Categorical):
        return "OneHot" not in kind.__name__
    return getattr(part, "action_space", None) == "categorical"


def _primer_of(module: Any) -> TensorDictPrimer | None:
    """What a part of the policy wants from the environment; None where it cannot say that."""
    try:
        primer = module.make_tensordict_primer()
    except RuntimeError as error:
        warn_user(
            f"policy: {type(module).__name__} makes no primer, so the environment provides none of its entries "
            f"({error}). Give the module what it asks for, or append a TensorDictPrimer to the environment.",
        )
        return None
    return as_primer(primer)


def _entries(env: EnvBase) -> Specs:
    specs = (env.full_state_spec, env.full_observation_spec)
    return {unravel(key): spec[key] for spec in specs for key in spec.leaves()}


def _missing_marks(env: EnvBase, modules: list[Any], known: Specs) -> list[str]:
    """Names of marks of first steps that are to be added; a tracker puts one beside each group of flags."""
    names: list[str] = []
    for module in modules:
        key = unravel(getattr(module, "init_key", IS_INIT))
        *prefix, name = as_tuple(key)
        if key in known or name in names:
            continue
        places = [group.prefix for group in deciding_groups(env.done_groups)]
        if tuple(prefix) not in places:
            raise EnvKeyError(
                f"policy: {type(module).__name__} reads the mark of first steps at {key!r}, and {env} can have one "
                f"only beside its flags: {key_str([(*place, name) for place in places])}. Change the last of in_keys."
            )
        names.append(name)
    return names


def _check_alone(policy: Any, module: Any, wanted: Specs, owners: dict[NestedKey, Any]) -> None:
    """Test that no other module of the policy writes the same states: the next ones would be those of the last."""
    for key in wanted:
        other = owners.setdefault(key, module)
        if other is not module and module not in list(other.modules()):  # a module may speak for one inside of it
            raise ValueError(
                f"policy: {_named(policy, other)} and {_named(policy, module)} keep their states under one key, "
                f"{key!r}, and would overwrite one another's. Give them different ones with in_keys= and out_keys=."
            )


def _named(policy: Any, module: Any) -> str:
    path = next(path for path, part in policy.named_modules() if part is module)
    return f"{type(module).__name__} ({path})"


def _check_same(env: EnvBase, module: Any, key: NestedKey, wanted: TensorSpec, present: TensorSpec) -> None:
    """Test that an entry that is there already has the shape of the module's."""
    if -1 in present.shape or tuple(present.shape) in (tuple(wanted.shape), (*env.batch_size, *wanted.shape)):
        return
    raise ValueError(
        f"policy: {type(module).__name__} carries {key!r} of shape {list(wanted.shape)}, and {env} has an entry of "
        f"that name of shape {list(present.shape)}. Give the module another key, or take that primer out."
    )


register_extension("policy", provide_for_policy)
