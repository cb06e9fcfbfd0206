"""Keyword arguments of environments that ``GymEnv`` and ``EnvPoolEnv`` pass on, for type checkers.

Those of common environments are listed, so that a misspelt argument is an error. Pass what another environment takes
in a ``dict[str, Any]``: ``GymEnv("Mine-v0", **settings)``, or make it yourself: ``GymWrapper(gymnasium.make(...))``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict


class GymKeywords(TypedDict, total=False):
    """What ``gymnasium.make`` and the environments of gymnasium, ALE and gymnasium-robotics take."""

    max_episode_steps: int | None
    order_enforce: bool
    render_mode: str | None
    # Classic control and Box2D
    sutton_barto_reward: bool
    g: float
    goal_velocity: float
    continuous: bool
    gravity: float
    enable_wind: bool
    wind_power: float
    turbulence_power: float
    hardcore: bool
    lap_complete_percent: float
    domain_randomize: bool
    verbose: bool
    # Toy text
    desc: Sequence[str] | None
    map_name: str | None
    is_slippery: bool
    success_rate: float
    reward_schedule: tuple[float, float, float]
    natural: bool
    sab: bool
    is_rainy: bool
    rainy_probability: float
    fickle_passenger: bool
    fickle_probability: float
    # MuJoCo and robotics
    xml_file: str
    default_camera_config: Mapping[str, Any]
    width: int
    height: int
    camera_id: int | None
    camera_name: str | None
    forward_reward_weight: float
    ctrl_cost_weight: float
    contact_cost_weight: float
    contact_cost_range: tuple[float, float]
    contact_force_range: tuple[float, float]
    healthy_reward: float
    healthy_z_range: tuple[float, float]
    healthy_angle_range: tuple[float, float]
    healthy_state_range: tuple[float, float]
    terminate_when_unhealthy: bool
    reset_noise_scale: float
    exclude_current_positions_from_observation: bool
    include_cfrc_ext_in_observation: bool
    reward_type: Literal["sparse", "dense"]
    maze_map: Sequence[Sequence[int | str]]
    continuing_task: bool
    # Atari
    frameskip: int | tuple[int, int]
    repeat_action_probability: float
    full_action_space: bool
    obs_type: Literal["rgb", "grayscale", "ram"]
    mode: int | None
    difficulty: int | None
    max_num_frames_per_episode: int | None
    sound_obs: bool
    continuous_action_threshold: float


class EnvPoolKeywords(TypedDict, total=False):
    """What ``envpool.make`` and its environments take."""

    num_threads: int
    thread_affinity_offset: int
    max_episode_steps: int
    reward_threshold: float
    base_path: str
    img_height: int
    img_width: int
    stack_num: int
    gray_scale: bool
    frame_skip: int
    noop_max: int
    zero_discount_on_life_loss: bool
    episodic_life: bool
    reward_clip: bool
    use_inter_area_resize: bool
    use_fire_reset: bool
    full_action_space: bool
    repeat_action_probability: float
    post_constraint: bool
    ctrl_cost_weight: float
    forward_reward_weight: float
    healthy_reward: float
    terminate_when_unhealthy: bool
    exclude_current_positions_from_observation: bool
    reset_noise_scale: float
