"""A batch of zeros with the form of those that a rollout collects; nothing is stepped for it."""

from __future__ import annotations

import torch
from tensordict import TensorDictBase

from rollwright._keys import as_tuple, key_str
from rollwright.collectors.options import CollectorOptions
from rollwright.collectors.rollout.paths import stages
from rollwright.collectors.rollout.paths.stages import IDS, VERSION
from rollwright.collectors.rollout.policy_trial import Trial
from rollwright.data.layout import mark_truncated
from rollwright.envs.base import EnvBase


def blank_batch(
    env: EnvBase,
    trial: Trial,
    options: CollectorOptions,
    *,
    steps: int,
    version: int | str,
    device: torch.device | None,
) -> TensorDictBase:
    """Frames of zeros with the entries of a batch, as far as specs and one call of the policy tell them.

    Boundaries of compact batches, which storages do not hold, are left out.

    Args:
        env: of the rollout.
        trial: calls the policy.
        options: of the collector.
        steps: T.
        version: of the policy, where batches hold it.
        device: of the batch.

    Returns:
        ``[*env, T]``, the last dimension named ``"time"``; true is only what ``set_truncated`` marks at the end.

    Raises:
        ValueError: frames vary in shape.
    """
    frame = _blank_frame(env, trial, options, version)
    frame = frame if device is None else frame.to(device)
    time = env.ndim
    batch = frame.unsqueeze(time).expand(*env.batch_size, steps).clone()
    batch.names = [*[None] * time, "time"]
    if options.set_truncated:
        mark_truncated(env.done_groups, batch[..., -1].get("next"), time)
    return batch


def _blank_frame(env: EnvBase, trial: Trial, options: CollectorOptions, version: int | str) -> TensorDictBase:
    specs = (env.full_observation_spec, env.full_state_spec, env.full_action_spec, env.full_reward_spec)
    if varying := [key for spec in specs for key in spec.leaves() if -1 in spec[key].shape]:
        raise ValueError(
            f"fake_tensordict: the shape of {key_str(varying)} varies from frame to frame, and no batch has the "
            "form of all. Take the first batch of the collector as an example instead."
        )
    frame = env.fake_tensordict()
    outputs = trial.outputs(frame.exclude("next", *env.action_keys))
    if outputs is not None:
        frame = frame.exclude(*env.action_keys).update(outputs)
    if options.compact_obs:
        frame = frame.exclude(*(("next", *as_tuple(key)) for key in stages.next_keys(env)))
    if options.track_policy_version:
        tag = stages.version_tag(version, env.batch_size)
        frame.set(VERSION, tag).set(("next", VERSION), tag)
    if options.track_traj_ids:
        frame.set(IDS, torch.zeros(env.batch_size, dtype=torch.int64, device="cpu"))
    return frame
