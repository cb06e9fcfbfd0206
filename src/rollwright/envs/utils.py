"""Helpers around environments: exploration types, step_mdp, check_env_specs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase
from tensordict.nn import InteractionType as ExplorationType
from tensordict.nn import set_interaction_type as set_exploration_type
from tensordict.nn.probabilistic import interaction_type as exploration_type

from rollwright._foreign import class_path, is_torchrl_env
from rollwright._keys import NestedKey, as_keys, as_tuple, key_str, leaf_keys, unravel, without
from rollwright.data.layout import done_groups
from rollwright.data.specs import make_composite_from_td
from rollwright.envs._results import check_entries
from rollwright.errors import EnvError, EnvKeyError

if TYPE_CHECKING:
    from rollwright.envs.base import EnvBase

__all__ = [
    "ExplorationType",
    "check_env_specs",
    "exploration_type",
    "make_composite_from_td",
    "set_exploration_type",
    "step_mdp",
]


def step_mdp(
    tensordict: TensorDictBase,
    next_tensordict: TensorDictBase | None = None,
    keep_other: bool = True,
    exclude_reward: bool = True,
    exclude_done: bool = False,
    exclude_action: bool = True,
    reward_keys: NestedKey | Sequence[NestedKey] = "reward",
    done_keys: NestedKey | Sequence[NestedKey] = "done",
    action_keys: NestedKey | Sequence[NestedKey] = "action",
) -> TensorDictBase:
    """The data of time t+1 from that of time t: what lies below ``"next"`` moves to the root.

    Args:
        tensordict: a step with ``"next"``, any batch size.
        next_tensordict: written in place and returned, where given.
        keep_other: keep root entries that ``"next"`` does not have.
        exclude_reward: leave rewards out.
        exclude_done: leave ``done`` out, with the ``terminated`` and ``truncated`` beside it.
        exclude_action: leave actions out.
        reward_keys: names of rewards.
        done_keys: names of ``done`` flags.
        action_keys: names of actions.

    Returns:
        A new TensorDict (or ``next_tensordict``) of the same batch size; tensors are shared.

    Raises:
        KeyError: ``tensordict`` has no ``"next"``.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> td = TensorDict({"x": torch.zeros(()), "action": torch.ones(()),
        ...     "next": {"x": torch.ones(()), "reward": torch.ones(()), "done": torch.tensor(False)}})
        >>> sorted(step_mdp(td).keys()), step_mdp(td)["x"]
        (['done', 'x'], tensor(1.))
    """
    outcome = tensordict.get("next", None)
    if outcome is None:
        raise KeyError(
            f"tensordict: expected an entry 'next', got {key_str(tensordict.keys())}. Pass what env.step() returned."
        )
    dropped: list[NestedKey] = []
    if exclude_reward:
        dropped += as_keys(reward_keys)
    if exclude_done:
        dropped += [key for group in done_groups(as_keys(done_keys)) for key in (group.done, group.terminated)]
        dropped += [unravel((*group.prefix, "truncated")) for group in done_groups(as_keys(done_keys))]
    actions = as_keys(action_keys)
    if exclude_action:
        dropped += actions
    kept = tensordict if keep_other else tensordict.select(*actions, strict=False)
    root = without(kept, "next", *dropped)
    root.update(without(outcome, *dropped))
    _drop_empty(root)
    return root if next_tensordict is None else next_tensordict.update(root)


def _drop_empty(td: TensorDictBase) -> None:
    """Take out nests that an exclusion has left empty."""
    if isinstance(td, LazyStackedTensorDict):
        return
    for key, value in list(td.items()):
        if isinstance(value, TensorDict):
            _drop_empty(value)
            if not value.keys():
                td.del_(key)


def check_env_specs(
    env: EnvBase,
    return_contiguous: bool | None = None,
    check_dtype: bool = True,
    seed: int | None = None,
    tensordict: TensorDictBase | None = None,
    break_when_any_done: bool | Literal["both"] | None = None,
) -> None:
    """Step an environment a few times with random actions and compare what it does with its specs.

    Args:
        env: the environment; it is reset and stepped. One of TorchRL is checked by TorchRL, with these arguments.
        return_contiguous: as in :meth:`EnvBase.rollout`; None decides by the specs.
        check_dtype: also compare dtypes.
        seed: seeds the environment first, where given.
        tensordict: where to start; None: at a reset.
        break_when_any_done: stop at the first end of a trajectory. False (None): reset there. ``"both"``: one
            after the other.

    Raises:
        TypeError: it is no environment with specs.
        EnvKeyError: an announced entry is missing, or one that is not announced appears (entries whose
            names begin with "_" are free).
        EnvError: an entry has another shape, dtype or device, or a value lies outside its spec.
    """
    if is_torchrl_env(env):
        _check_by_torchrl(env, return_contiguous, check_dtype, seed, tensordict, break_when_any_done)
        return
    if not callable(getattr(env, "full_spec", None)):
        raise TypeError(
            f"env: expected an EnvBase, got {class_path(env)}: {env!r}. Wrap environments of gymnasium in GymWrapper, "
            "of PettingZoo in PettingZooWrapper, of dm_control in DMControlWrapper."
        )
    if seed is not None:
        env.set_seed(seed)
    for stops in (True, False) if break_when_any_done == "both" else (bool(break_when_any_done),):
        real = env.rollout(
            3,
            auto_reset=tensordict is None,
            tensordict=tensordict,
            return_contiguous=return_contiguous,
            break_when_any_done=stops,
        )
        _check_rollout(env, real, check_dtype=check_dtype)


def _check_by_torchrl(env: Any, return_contiguous: bool | None, *others: Any) -> None:
    names = ("check_dtype", "seed", "tensordict", "break_when_any_done")
    given = dict(zip(names, others, strict=True))
    if return_contiguous is not None:
        given["return_contiguous"] = return_contiguous
    env.check_env_specs(**given)


def _check_rollout(env: EnvBase, real: TensorDictBase, *, check_dtype: bool) -> None:
    fake = env.fake_tensordict()
    announced = set(leaf_keys(fake))
    found = {key for key in leaf_keys(real) if not as_tuple(key)[-1].startswith("_")}
    found -= {unravel(("next", *as_tuple(key))) for key in env.state_keys} - announced  # states may be returned
    if announced != found:
        raise EnvKeyError(
            f"{env}: a rollout and the specs have different entries. Only in the specs: "
            f"{key_str(announced - found) or 'none'}. Only in the rollout: "
            f"{key_str(found - announced) or 'none'}. Announce what is returned, and no more."
        )
    if env.device is not None and real.device != env.device:
        raise EnvError(
            f"{env}: a rollout is on {real.device}; the environment's device is {env.device}. Move it there."
        )
    for step in real.unbind(-1):
        for name in ("observation", "state", "action", "done"):
            check_entries(env, step, name, "a rollout", dtypes=check_dtype, domains=True)
        for name in ("observation", "reward", "done"):
            check_entries(env, step.get("next"), name, "a rollout, at 'next',", dtypes=check_dtype, domains=True)
