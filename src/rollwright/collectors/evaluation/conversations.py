"""Evaluations of language models: whole conversations, from the beginning of the data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from tensordict import LazyStackedTensorDict

from rollwright.collectors.collector import Collector
from rollwright.collectors.evaluation.episodes import EpisodeResults, EpisodeRunner, FrozenBuffers, Stopped
from rollwright.collectors.llm import LLMCollector
from rollwright.collectors.rollout.environment import inner_conversations
from rollwright.collectors.rollout.policy import never_copied_in
from rollwright.weight_update.forms import State

_TAKEN = ("policy_factory", "trust_policy", "pre_collect_hook", "post_collect_hook")  # of LLMCollector, too
_OF_ALL = ("create_env_kwargs", "exploration_type")  # done with before, or of no effect on engines


class ConversationRunner(EpisodeRunner):
    """Runs evaluations in an environment of conversations: each begins with the first prompt of the data.

    Conversations are counted in the order of the data, so that the short ones are not preferred.
    """

    _collector: LLMCollector

    def _made_collector(self, env: Any, policy: Any, options: dict[str, Any]) -> Collector:
        self._num_envs = 1  # turns are taken one by one
        self._seed_of_data = getattr(getattr(inner_conversations(env), "source", None), "seed", 0)
        for name, value in options.items():
            if name not in (*_TAKEN, *_OF_ALL) and value is not None:
                named = "max_steps" if name == "max_frames_per_traj" else name
                remedy = "Pass max_turns= to the environment" if named == "max_steps" else "Leave it out"
                raise ValueError(f"{named}: expected None where conversations are evaluated, got {value!r}. {remedy}.")
        if policy is not None and never_copied_in(policy):
            raise TypeError(
                f"policy: {type(policy).__name__} has an engine, whose answers the collector that trains may wait for. "
                "Pass policy_factory=, which makes another one for evaluations (it may be around the same model), "
                "and policy=model for its weights."
            )
        taken = {name: options[name] for name in _TAKEN if name in options}
        return LLMCollector(env, policy, trajs_per_batch=1, delivery_order="data", interruptor=self, **taken)

    def _load(self, weights: Mapping[str, State]) -> None:
        if weights:
            self._collector.update_policy_weights_(weights_dict=dict(weights))
        self._buffers = FrozenBuffers(self._collector.get_model("policy"))

    def _seed(self) -> None:
        self._collector.set_seed(self._seed_of_data if self._settings.seed is None else self._settings.seed)

    def _episodes(self) -> tuple[EpisodeResults, Any]:
        wanted = self._settings.num_episodes
        found: list[Any] = []
        while wanted is None or len(found) < wanted:
            batch: Any = self._collector.next()
            if self._progress.stopped or self._gone():
                raise Stopped
            if batch is None or (wanted is None and int(batch["epoch"][0]) > 0):
                break
            found.append(batch)
        if not found or (wanted is not None and len(found) < wanted):
            raise ValueError(
                f"num_trajectories={wanted}: the data has ended after {len(found)} conversations. Pass "
                "num_trajectories=None for all of them once, or epochs=None to the environment."
            )
        results = EpisodeResults(len(found), 1)
        for batch in found:
            rewards = np.array([[float(row["next", "reward"].sum()) for row in batch.unbind(0)]])
            results.take(rewards, np.arange(len(batch))[None] == len(batch) - 1)
        return results, LazyStackedTensorDict(*(row for batch in found for row in batch.unbind(0)), stack_dim=0)
