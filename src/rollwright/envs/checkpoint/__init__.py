"""The inner state of environments, saved and restored."""

from rollwright.envs.checkpoint.state import EnvCheckpoint, load_env, save_env

__all__ = ["EnvCheckpoint", "load_env", "save_env"]
