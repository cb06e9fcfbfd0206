"""``rollwright watch``: shows an environment, or the images of a dataset, in a window or as a video."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase

from rollwright._keys import as_tuple, key_str, leaf_keys
from rollwright._progress import count
from rollwright._video import check_video_path, save_video
from rollwright.cli.console import Console
from rollwright.cli.errors import Failure, brief, plain
from rollwright.cli.policies import load_policy
from rollwright.cli.reading.opening import image_key, images_of, open_frames
from rollwright.collectors import Collector
from rollwright.data.datasets import summarize
from rollwright.data.datasets.formats import PREFIX
from rollwright.data.layout import TRAJ_IDS
from rollwright.envs import ExplorationType, GymEnv, TransformedEnv
from rollwright.envs.transforms import VideoRecorder
from rollwright.errors import MissingExtraError, RollwrightError


def run(arguments: argparse.Namespace) -> int:
    """Show what the arguments name; returns the exit status."""
    console = Console(quiet=arguments.json)
    try:
        if arguments.output is not None:
            check_video_path("--output", arguments.output)
        with console.warnings_as_lines():
            is_dataset = arguments.what.startswith(PREFIX) or Path(arguments.what).exists()
            if not is_dataset:
                most = f"{count(arguments.episodes, 'episode')} of {count(arguments.max_frames, 'frame')} at most"
                console.line(f"running {arguments.what}: {most}")
            frames = _of_dataset(arguments) if is_dataset else _of_env(arguments)
    except Failure:
        raise
    except (MissingExtraError, ValueError) as error:
        raise Failure(plain(error)) from error
    ended = summarize(frames).ended
    returns = np.empty(0) if ended is None else ended.returns
    if arguments.json:
        output = None if arguments.output is None else str(arguments.output)
        mean = float(np.mean(returns)) if len(returns) else None
        found = {"output": output, "frames": frames.numel(), "episodes": len(returns), "mean_return": mean}
        print(json.dumps(found, indent=2))
        return 0
    result = f", mean return {np.mean(returns):,.4g}" if len(returns) else ""
    shown = f"{count(frames.numel(), 'frame')}, {count(len(returns), 'complete episode')}{result}"
    console.line(shown if arguments.output is None else f"wrote {arguments.output}: {shown}")
    return 0


# An environment --------------------------------------------------------------------------------------


def _of_env(arguments: argparse.Namespace) -> TensorDictBase:
    env = _make_env(arguments)
    policy = load_policy(arguments.policy, env)
    if arguments.output is not None:
        env = TransformedEnv(env, VideoRecorder(arguments.output, "run", skip=1, fps=arguments.fps or _fps_of(env)))
    with Collector(
        env,
        policy,
        frames_per_batch=1,  # so that it ends with the last episode
        trajs_per_batch=arguments.episodes,
        traj_format="cat",
        max_frames_per_traj=arguments.max_frames,
        exploration_type=ExplorationType.DETERMINISTIC,
    ) as collector:
        if arguments.seed is not None:
            collector.set_seed(arguments.seed)
        frames = collector.next()
    assert frames is not None
    return frames


def _make_env(arguments: argparse.Namespace) -> Any:
    kwargs: Mapping[str, Any] = arguments.env_kwargs
    options: dict[str, Any] = {"categorical_action_encoding": arguments.categorical_actions}
    if arguments.output is None:
        if not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
            raise Failure("there is no display for a window (DISPLAY is not set). Pass --output run.gif or run.mp4.")
        options["render_mode"] = "human"
    try:
        env = GymEnv(arguments.what, **options, **kwargs)
        if arguments.output is None or "pixels" in {as_tuple(key)[0] for key in env.observation_keys}:
            return env
        env.close()
        return GymEnv(arguments.what, from_pixels=True, pixels_only=False, **options, **kwargs)
    except (RollwrightError, TypeError, ValueError) as error:
        raise Failure(plain(error)) from error
    except Exception as error:  # of gymnasium: it cannot draw, or a package is missing
        raise Failure(f"{arguments.what} cannot be drawn: {brief(error)}") from error


def _fps_of(env: GymEnv) -> int:
    return int(env.gym_env.metadata.get("render_fps") or 30)


# A dataset -------------------------------------------------------------------------------------------


def _of_dataset(arguments: argparse.Namespace) -> TensorDictBase:
    if arguments.output is None:
        raise Failure("--output: a dataset is shown as a video. Pass --output run.gif or run.mp4.")
    frames = open_frames(Path(arguments.what)).in_order()
    if frames is None or not frames.ndim:
        raise Failure(f"{arguments.what!r} holds no frames.")
    images = image_key(frames)
    if images is None:
        raise Failure(
            f"{arguments.what!r} holds no images; its entries are {key_str(leaf_keys(frames))}. Collect with "
            '--env-kwargs \'{"from_pixels": true, "pixels_only": false}\'.'
        )
    row = frames[(0,) * (frames.ndim - 1)][: _steps(frames, arguments.episodes, arguments.max_frames)]
    save_video(arguments.output, images_of(row, images), arguments.fps or 30)
    return row


def _steps(frames: TensorDictBase, episodes: int, most: int) -> int:
    """Frames of the first episodes of the first environment."""
    ids = frames.get(TRAJ_IDS, None)
    if ids is None:
        return most
    row = ids.reshape(-1, frames.batch_size[-1])[0]
    begins = (torch.nonzero(row[1:] != row[:-1]).reshape(-1) + 1).tolist()
    return min(most, begins[episodes - 1]) if len(begins) >= episodes else most
