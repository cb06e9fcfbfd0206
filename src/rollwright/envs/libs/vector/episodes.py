"""Makes any gymnasium vector environment begin episodes only on request, whatever its autoreset mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv

from rollwright.envs.arrays import Rows, Values
from rollwright.envs.libs.vector.in_turn import InTurn
from rollwright.envs.libs.vector.parts import autoreset_mode, check_parts, in_parts, is_generic
from rollwright.errors import EnvError

__all__ = ["Readers", "VectorEpisodes"]

OUTCOME = ("reward", "done", "terminated", "truncated")


class Readers(NamedTuple):
    """Functions that convert gymnasium's values to arrays of the whole batch, by key.

    Attributes:
        step: from the five values of a step.
        reset: from the two values of a reset.
        final: observations of a single environment, unbatched.
        info: what is read from ``info``.
    """

    step: Callable[[Any], Values]
    reset: Callable[[Any], Values]
    final: Callable[[Any], Values]
    info: Callable[[dict[str, Any]], Values]


class VectorEpisodes:
    """Steps and resets a vector environment so that no transition crosses from an episode to the next.

    - ``DISABLED``: the environment never resets by itself; parts of it are reset by ``reset_mask``.
    - ``NEXT_STEP``: it would spend its next step on the reset. Resetting by ``reset_mask`` before that
      step prevents it, where the environment can (:mod:`~rollwright.envs.libs.vector.parts`); else the constructor
      raises.
    - ``SAME_STEP``: it resets within the step. The true last observation is in ``info["final_obs"]``;
      the first one of the new episode is kept until it is asked for.

    An environment whose episode has ended and that is stepped on without a reset (while others run on)
    stays as it ended: the same data with a reward of zero.

    Args:
        env: the vector environment.

    Attributes:
        seeds_parts: whether a reset of some environments can seed them.

    Raises:
        ValueError: the environment cannot be made to reset only on request.
    """

    def __init__(self, env: VectorEnv[Any, Any, Any]) -> None:
        check_parts(env)
        self.env = env = in_parts(env)
        self.mode = autoreset_mode(env)
        self.masked = self.mode is not AutoresetMode.SAME_STEP or is_generic(env)
        self.seeds_parts = is_generic(env) or isinstance(env, InTurn)
        self._takes_seeds = is_generic(env) or getattr(env.unwrapped, "takes_seeds", False)  # one for each environment
        self.ended: Rows = np.zeros(env.num_envs, np.bool_)
        self._holds = False  # whether any has
        self._last: Values | None = None  # data of the last step, while anything has ended
        self._fresh: Values | None = None  # first observations of new episodes (SAME_STEP)
        self._is_fresh: Rows = np.zeros(env.num_envs, np.bool_)

    def step(self, actions: Any, read: Readers) -> Values:
        """Step all environments; returns the content of ``"next"``, true last observations included."""
        held = self.ended if self._holds else None
        resets_itself = self.mode is AutoresetMode.SAME_STEP
        if held is not None and not resets_itself:
            self.env.reset(options={"reset_mask": held.copy()})
        values = self.env.step(actions)
        out = read.step(values)
        now = out["done"].copy() if held is None else out["done"] & ~held
        ended = bool(np.count_nonzero(now))  # far cheaper than any()
        if resets_itself:
            self._is_fresh = now
            if ended:
                self._fresh = {key: value.copy() for key, value in out.items() if key not in OUTCOME}
                self._put_final(out, values[4], now, read)
        if held is not None and self._last is not None:
            _put(out, self._last, held)
            out["reward"][held] = 0.0
        self.ended = now if held is None else held | now
        self._holds = ended or held is not None
        self._last = {key: value.copy() for key, value in out.items()} if self._holds else None
        return out

    def reset(
        self, rows: Rows | None, read: Readers, *, seed: list[int | None] | None, options: dict[str, Any] | None
    ) -> Values:
        """Begin new episodes.

        Args:
            rows: bool ``[num_envs]``, with a True in it; None for all, also those that were reset.
            read: readers of the values.
            seed: for each environment.
            options: for the environments' reset.

        Raises:
            EnvError: the environment cannot reset in parts and has not done so by itself.
        """
        kwargs: dict[str, Any] = {} if seed is None else {"seed": seed if self._takes_seeds else seed[0]}
        if rows is None:
            rows = np.ones_like(self.ended)
            served = np.zeros_like(rows)
        else:
            served = rows & self._is_fresh & (not kwargs and not options)
        rest = rows & ~served
        count = np.count_nonzero(rest)
        if count == len(rest):
            out = read.reset(self.env.reset(options=options, **kwargs))
        elif not count and self._fresh is not None:
            out = dict(self._fresh)
        elif kwargs and not self.seeds_parts:
            raise EnvError(f"{self.env} cannot be seeded in parts. Reset all of its environments with the seed.")
        elif self.masked:
            out = read.reset(self.env.reset(options={**(options or {}), "reset_mask": rest}, **kwargs))
            if self._fresh is not None:
                _put(out, self._fresh, served)
        else:
            raise EnvError(
                f"{self.env} cannot reset its environments {np.flatnonzero(rest).tolist()} alone: only "
                "those whose episode ended with the last step have been reset. Reset all of them, or "
                "create it with autoreset_mode=AutoresetMode.DISABLED."
            )
        self.ended = self.ended & ~rows
        self._holds = bool(np.count_nonzero(self.ended))
        self._is_fresh = self._is_fresh & ~rows
        return out

    def _put_final(self, out: Values, info: dict[str, Any], rows: Rows, read: Readers) -> None:
        """Write true last observations and infos over those of the new episodes."""
        final = info.get("final_obs") if isinstance(info, dict) else None
        if final is None:
            raise EnvError(
                f"{self.env} announces AutoresetMode.SAME_STEP but put no 'final_obs' into info at the end "
                "of an episode, so its last observation is lost. Create it with "
                "autoreset_mode=AutoresetMode.DISABLED."
            )
        if isinstance(info.get("final_info"), dict):
            _put(out, read.info(info["final_info"]), rows)
        for i in np.flatnonzero(rows).tolist():
            for key, value in read.final(_row(final, i)).items():
                out[key][i] = value


def _put(target: Values, source: Values, rows: Rows) -> None:
    """Write marked rows of ``source`` into ``target``, entry by entry of ``target``."""
    for key, value in source.items():
        entry = target.get(key)
        if isinstance(entry, np.ndarray):
            entry[rows] = value[rows]
        elif entry is not None:  # a stack of objects
            for i in np.flatnonzero(rows).tolist():
                entry[i] = value[i]


def _row(values: Any, i: int) -> Any:
    """Row ``i`` of a batch of observations, whether it is an array, an array of objects or a dictionary."""
    return {key: _row(value, i) for key, value in values.items()} if isinstance(values, dict) else values[i]
