"""The inner state of environments, saved and restored."""

from rollwright.envs.checkpoint.state import EnvCheckpoint, load_env, save_env, unchanged_if_it_raises

__all__ = ["EnvCheckpoint", "load_env", "save_env", "unchanged_if_it_raises"]
