"""Evaluator: whole episodes, unbiased, with weights and statistics that hold still, beside training."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule
from tests.policy_ways import one_way
from torch import nn

from rollwright.collectors.evaluation.episodes import EpisodeResults
from rollwright.collectors.evaluation.evaluator import Evaluator
from rollwright.data import Categorical, Composite, Unbounded
from rollwright.envs import (
    Compose,
    EnvBase,
    ExplorationType,
    GymEnv,
    SerialEnv,
    StepCounter,
    Transform,
    TransformedEnv,
    VecNorm,
    VecNormV2,
)
from rollwright.envs.batched.async_pool import AsyncEnvPool
from rollwright.envs.batched.parallel import ParallelEnv

BACKENDS = ["thread", "process"]
backends = pytest.mark.parametrize("backend", BACKENDS)


class Episodes(EnvBase):
    """Episodes of given lengths, one after another; the reward is the action."""

    def __init__(self, lengths: tuple[int, ...] = (3,)) -> None:
        super().__init__()
        self.lengths, self.episode, self.count = lengths, -1, 0
        self.observation_spec = Composite(observation=Unbounded((1,)))
        self.action_spec = Unbounded((1,))
        self.reward_spec = Unbounded((1,))
        self.done_spec = Categorical(2, shape=(1,), dtype=torch.bool)

    def _set_seed(self, seed: int | None) -> None:
        self.episode = -1

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        self.episode, self.count = self.episode + 1, 0
        return TensorDict({"observation": torch.ones(1)})

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        self.count += 1
        done = torch.tensor([self.count >= self.lengths[self.episode % len(self.lengths)]])
        return TensorDict({"observation": torch.ones(1), "reward": tensordict["action"].clone(), "done": done})


def scaled(weight: float = 1.0) -> TensorDictModule:
    """A policy whose action is its only weight."""
    net = nn.Linear(1, 1, bias=False)
    nn.init.constant_(net.weight, weight)
    return TensorDictModule(net, in_keys=["observation"], out_keys=["action"])


def pendulum() -> EnvBase:
    return GymEnv("Pendulum-v1")


def pendulum_policy() -> TensorDictModule:
    torch.manual_seed(0)
    return TensorDictModule(nn.Linear(3, 1), in_keys=["observation"], out_keys=["action"])


@pytest.fixture
def make() -> Iterator[Callable[..., Evaluator]]:
    made: list[Evaluator] = []

    def maker(*args: Any, **kwargs: Any) -> Evaluator:
        made.append(Evaluator(*args, **kwargs))
        return made[-1]

    yield maker
    for evaluator in made:
        evaluator.shutdown(timeout=5.0, raise_on_error=False)


# Which episodes --------------------------------------------------------------------------------


@backends
def test_results(make: Any, backend: str) -> None:
    result = make(lambda: Episodes((2, 4)), scaled(0.5), num_trajectories=3, backend=backend).evaluate(step=7)
    assert result["eval/lengths"] == [2, 4, 2]
    assert result["eval/returns"] == [1.0, 2.0, 1.0]
    assert (result["eval/num_episodes"], result["eval/frames"], result["eval/step"]) == (3, 8, 7)
    assert result["eval/reward"] == pytest.approx(4 / 3)
    assert result["eval/reward_std"] == pytest.approx(np.std([1.0, 2.0, 1.0], ddof=1))
    assert (result["eval/reward_min"], result["eval/reward_max"]) == (1.0, 2.0)
    assert (result["eval/episode_length_min"], result["eval/episode_length_max"]) == (2, 4)
    assert result["eval/policy_version"] == 1
    assert result["eval/seconds"] > 0
    assert json.loads(json.dumps(result)) == result


def test_short_episodes_are_not_preferred(make: Any) -> None:
    # One environment has episodes of 40 steps, the other of 2: by order of ending, all would be short ones.
    env = SerialEnv(2, [lambda: Episodes((40,)), lambda: Episodes((2,))])
    result = make(env, scaled(), num_trajectories=5).evaluate()
    assert result["eval/lengths"] == [40, 2, 40, 2, 40]


def test_fewer_episodes_than_environments(make: Any) -> None:
    env = SerialEnv(4, [lambda n=n: Episodes((n,)) for n in (5, 4, 3, 2)])
    assert make(env, scaled(), num_trajectories=2).evaluate()["eval/lengths"] == [5, 4]


@pytest.mark.parametrize("frames", [1, 7, 100])
def test_size_of_batches_changes_nothing(make: Any, frames: int) -> None:
    evaluator = make(pendulum, pendulum_policy(), num_trajectories=2, max_steps=30, seed=3, frames_per_batch=frames)
    expected = make(pendulum, pendulum_policy(), num_trajectories=2, max_steps=30, seed=3).evaluate()
    result = evaluator.evaluate()
    assert result["eval/returns"] == pytest.approx(expected["eval/returns"], rel=1e-12)
    assert result["eval/lengths"] == [30, 30]


def test_same_as_rollouts(make: Any) -> None:
    env, policy = pendulum(), pendulum_policy()
    env.set_seed(5)
    returns = [env.rollout(25, policy)["next", "reward"].double().sum().item() for _ in range(3)]
    result = make(pendulum, policy, num_trajectories=3, max_steps=25, seed=5).evaluate()
    assert result["eval/returns"] == pytest.approx(returns)


@pytest.mark.parametrize("batch", [SerialEnv, ParallelEnv])
def test_environments_that_count_their_steps(make: Any, batch: Any) -> None:
    def counting(limit: int) -> EnvBase:
        return TransformedEnv(Episodes((9,)), StepCounter(limit))

    inside = make(
        lambda: batch(2, [lambda: counting(3), lambda: counting(9)]), scaled(), num_trajectories=4, max_steps=5
    )
    assert inside.evaluate()["eval/lengths"] == [3, 5, 3, 5]  # the shorter limit counts
    assert make(counting(20), scaled(), num_trajectories=2, max_steps=4).evaluate()["eval/lengths"] == [4, 4]


def test_every_evaluation_begins_with_a_reset(make: Any) -> None:
    evaluator = make(lambda: Episodes((10,)), scaled(), num_trajectories=1, frames_per_batch=4)
    assert [evaluator.evaluate()["eval/lengths"] for _ in range(3)] == [[10]] * 3


def test_results_count_over_batches() -> None:
    results = EpisodeResults(2, 1)
    for t in range(6):
        assert not results.complete
        results.take(np.full((1, 1), t, np.float32), np.array([[t in (1, 5)]]))
    assert (results.complete, results.returns, results.lengths) == (True, [1.0, 14.0], [2, 4])


# Weights ---------------------------------------------------------------------------------------


@backends
def test_weights_are_copied_when_asked_for(make: Any, backend: str) -> None:
    policy, results = scaled(1.0), []
    told, go = threading.Event(), threading.Event()

    def on_result(result: dict[str, Any]) -> None:
        results.append(result["eval/returns"])
        told.set()
        assert go.wait(20.0)

    evaluator = make(
        lambda: Episodes((5,)), policy, num_trajectories=1, backend=backend, on_result=on_result, busy_policy="queue"
    )
    evaluator.trigger_eval()
    assert told.wait(20.0)
    nn.init.constant_(policy.module.weight, 2.0)
    evaluator.trigger_eval()  # has to wait
    nn.init.constant_(policy.module.weight, 100.0)  # training goes on
    go.set()
    evaluator.wait()
    assert results == [[5.0], [10.0]]
    assert evaluator.evaluate(scaled(3.0))["eval/returns"] == [15.0]
    assert evaluator.evaluate()["eval/returns"] == [500.0]


@backends
@pytest.mark.parametrize("form", ["module", "state_dict", "tensordict", "dict"])
def test_forms_of_weights(make: Any, backend: str, form: str) -> None:
    new = scaled(3.0)
    weights: Any = {
        "module": new,
        "state_dict": new.state_dict(),
        "tensordict": TensorDict.from_module(new).data,
        "dict": {"module": {"weight": torch.full((1, 1), 3.0)}},
    }[form]
    evaluator = make(lambda: Episodes((2,)), policy_factory=scaled, num_trajectories=1, backend=backend)
    assert evaluator.evaluate()["eval/policy_version"] == 0
    result = evaluator.evaluate(weights)
    assert (result["eval/returns"], result["eval/policy_version"]) == ([6.0], 1)
    assert evaluator.evaluate()["eval/returns"] == [6.0]  # the last that were given


@backends
@pytest.mark.parametrize("way", ["bound method", "closure", "hidden submodule"])
def test_modules_that_the_policy_reads(make: Any, backend: str, way: str) -> None:
    policy, learned = one_way(way, 1.0)
    evaluator = make(Episodes, policy, num_trajectories=1, backend=backend)
    assert evaluator.evaluate()["eval/returns"] == [3.0]
    weights = Evaluator.extract_weights(policy)
    with torch.no_grad():
        learned.value.fill_(2.0)
    assert evaluator.evaluate()["eval/returns"] == [6.0]
    assert evaluator.evaluate(policy)["eval/returns"] == [6.0]
    assert evaluator.evaluate(weights)["eval/returns"] == [3.0]


def test_weights_extracted_earlier(make: Any) -> None:
    policy = scaled(3.0)
    weights = Evaluator.extract_weights(policy)
    assert type(weights) is TensorDict
    assert weights.device == torch.device("cpu")
    nn.init.constant_(policy.module.weight, 100.0)
    evaluator = make(lambda: Episodes((2,)), policy_factory=scaled, num_trajectories=1)
    assert evaluator.evaluate(weights)["eval/returns"] == [6.0]


def test_policy_beside_a_factory_serves_for_weights(make: Any) -> None:
    evaluator = make(lambda: Episodes((2,)), scaled(4.0), policy_factory=scaled, num_trajectories=1)
    assert evaluator.evaluate()["eval/returns"] == [8.0]


@backends
def test_versions(make: Any, backend: str) -> None:
    evaluator = make(lambda: Episodes((2,)), scaled(), num_trajectories=1, backend=backend)
    results = [evaluator.evaluate(), evaluator.evaluate(policy_version=41), evaluator.evaluate()]
    assert [result["eval/policy_version"] for result in results] == [1, 41, 3]
    assert [result["eval/step"] for result in results] == [1, 2, 3]
    state = evaluator.state_dict()
    other = make(lambda: Episodes((2,)), scaled(), num_trajectories=1)
    other.load_state_dict(state)
    assert (other.evaluate()["eval/step"], other.evaluate()["eval/policy_version"]) == (4, 5)


@backends
def test_wrong_weights_change_nothing(make: Any, backend: str) -> None:
    evaluator = make(lambda: Episodes((2,)), scaled(2.0), num_trajectories=1, backend=backend)
    with pytest.raises(ValueError, match="names differ"):
        evaluator.evaluate({"other": torch.ones(1)})
    with pytest.raises(ValueError, match="model_id"):
        evaluator.evaluate(weights_dict={"critic": scaled()})
    with pytest.raises(TypeError, match="weights for policy"):
        evaluator.evaluate(3)
    with pytest.raises(ValueError, match="Pass the policy's weights once"):
        evaluator.evaluate(scaled(), weights_dict={"policy": scaled()})
    assert evaluator.evaluate()["eval/returns"] == [4.0]


# Statistics ------------------------------------------------------------------------------------


def normed() -> TransformedEnv:
    return TransformedEnv(pendulum(), VecNorm(in_keys=["observation", "reward"], decay=0.9))


def averaged() -> TransformedEnv:
    return TransformedEnv(pendulum(), VecNormV2(in_keys=["observation", "reward"], decay=0.9))


@backends
@pytest.mark.parametrize("create", [normed, averaged])
def test_statistics_come_from_training_and_do_not_move(make: Any, create: Any, backend: str) -> None:
    policy = pendulum_policy()
    training = create()
    training.set_seed(0)
    training.rollout(50)
    norm = training.transform
    plain = TransformedEnv(pendulum(), norm.frozen_copy())
    plain.set_seed(1)
    expected = [plain.rollout(20, policy)["next", "reward"].double().sum().item() for _ in range(2)]
    evaluator = make(create, policy, num_trajectories=2, max_steps=20, seed=1, backend=backend)
    given = {"env.transform[0]": norm}
    results = [evaluator.evaluate(weights_dict=given), evaluator.evaluate()]
    for result in results:
        assert result["eval/returns"] == pytest.approx(expected)


@pytest.mark.parametrize("create", [normed, averaged])
def test_missing_statistics_are_an_error(make: Any, create: Any) -> None:
    evaluator = make(create, pendulum_policy(), num_trajectories=1, max_steps=5)
    with pytest.raises(
        RuntimeError, match=r"no statistics of 'observation'.*weights_dict=\{'env\.transform\[0\]': that"
    ):
        evaluator.evaluate()


class Normed(TransformedEnv):
    """A normalised environment that tells its means."""

    def __init__(self) -> None:
        super().__init__(pendulum(), VecNorm(in_keys=["observation", "reward"], decay=0.9))

    def means(self) -> torch.Tensor:
        return self.transform.loc["observation"]


def fed() -> TransformedEnv:
    env = Normed()
    env.set_seed(0)
    env.rollout(10)
    return env


BATCHES = [
    lambda make: SerialEnv(2, make),
    lambda make: ParallelEnv(2, make, num_processes=1),
    lambda make: AsyncEnvPool([make] * 2, backend="multiprocessing"),
]


@pytest.mark.parametrize("batch", BATCHES)
def test_statistics_inside_batches_do_not_move(make: Any, batch: Any) -> None:
    env = batch(fed)
    means = [stats.clone() for stats in env.means()]
    make(env, pendulum_policy(), num_trajectories=2, max_steps=10).evaluate()
    assert all(torch.equal(one, other) for one, other in zip(means, env.means(), strict=True))
    with pytest.raises(RuntimeError, match="no statistics of 'observation'"):
        make(batch(normed), pendulum_policy(), num_trajectories=1, max_steps=5).evaluate()


class Restless(nn.Module):
    """Statistics in a buffer, in a buffer that is replaced, and in extra state, moved in eval mode too."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))
        self.register_buffer("replaced", torch.zeros(1))
        self.extra = 0.0
        self.weight = nn.Parameter(torch.ones(1))

    def get_extra_state(self) -> Any:
        return {"extra": self.extra}

    def set_extra_state(self, state: Any) -> None:
        self.extra = state["extra"]

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        action = self.seen + self.replaced + self.extra + 0 * self.weight
        self.seen += 1
        self.replaced = self.replaced + 1
        self.extra += 1
        return action


@backends
def test_statistics_of_a_policy_do_not_move(make: Any, backend: str) -> None:
    policy = TensorDictModule(Restless(), in_keys=["observation"], out_keys=["action"])
    evaluator = make(lambda: Episodes((5,)), policy, num_trajectories=2, backend=backend)
    assert evaluator.evaluate()["eval/returns"] == [0.0, 0.0]
    policy.module.seen += 2
    policy.module.extra = 3.0
    assert evaluator.evaluate()["eval/returns"] == [25.0, 25.0]
    assert (policy.module.seen.item(), policy.module.extra) == (2.0, 3.0)


def test_policy_acts_in_eval_mode_and_yours_stays_as_it_is(make: Any) -> None:
    net = nn.Sequential(nn.Dropout(0.5), nn.Linear(1, 1, bias=False))
    nn.init.constant_(net[1].weight, 1.0)
    policy = TensorDictModule(net, in_keys=["observation"], out_keys=["action"])
    assert make(lambda: Episodes((9,)), policy, num_trajectories=3).evaluate()["eval/returns"] == [9.0] * 3
    assert net.training


# Seeds -----------------------------------------------------------------------------------------


@backends
def test_same_seed_same_result(make: Any, backend: str) -> None:
    one, two = (
        make(
            lambda: SerialEnv(2, pendulum), pendulum_policy(), num_trajectories=3, max_steps=20, seed=s, backend=backend
        )
        for s in (1, 2)
    )
    first, again, other = one.evaluate(), one.evaluate(), two.evaluate()
    assert first["eval/returns"] == again["eval/returns"] != other["eval/returns"]


def test_process_equals_thread(make: Any) -> None:
    results = [
        make(pendulum, pendulum_policy(), num_trajectories=2, max_steps=20, seed=4, backend=backend).evaluate()
        for backend in BACKENDS
    ]
    assert results[0]["eval/returns"] == results[1]["eval/returns"]


def test_process_draws_by_itself(make: Any) -> None:
    evaluator = make(
        pendulum, num_trajectories=2, max_steps=20, seed=4, backend="process", exploration_type=ExplorationType.RANDOM
    )
    assert evaluator.evaluate()["eval/returns"] == evaluator.evaluate()["eval/returns"]


@pytest.mark.parametrize("backend", ["thread", "process", None])
def test_training_keeps_its_stream(make: Any, backend: str | None) -> None:
    policy = pendulum_policy()
    evaluator = backend and make(pendulum, policy, num_trajectories=2, max_steps=20, seed=4, backend=backend)
    torch.manual_seed(8)
    draws = []
    for _ in range(30):
        if evaluator:
            evaluator.trigger_eval()
        draws.append(torch.rand(1).item())
    torch.manual_seed(8)
    assert draws == torch.rand(30).tolist()


# Beside training ---------------------------------------------------------------------------------


class Gate:
    """A policy that waits at its first call, until it is let go."""

    def __init__(self) -> None:
        self.reached, self.go = threading.Event(), threading.Event()

    def __call__(self, td: TensorDictBase) -> TensorDictBase:
        self.reached.set()
        assert self.go.wait(20.0)
        return td.set("action", torch.ones(1))

    def __deepcopy__(self, memo: Any) -> Gate:
        return self


def test_busy_skip(make: Any) -> None:
    gate = Gate()
    evaluator = make(lambda: Episodes((2,)), gate, num_trajectories=1)
    assert evaluator.poll() is None
    assert evaluator.trigger_eval(step=1) is True
    assert gate.reached.wait(10.0)
    assert evaluator.pending
    assert evaluator.trigger_eval(step=2) is False
    assert evaluator.poll(timeout=0.05) is None
    with pytest.raises(TimeoutError, match=r"waited 0\.05 s for the evaluation that runs"):
        evaluator.wait(timeout=0.05)
    stats = evaluator.stats()
    assert json.loads(json.dumps(stats)) == stats
    assert (stats["pending"], stats["skipped"], stats["waiting_for"]) == (True, 1, "a step of its environment")
    gate.go.set()
    assert evaluator.wait()["eval/step"] == 1
    assert evaluator.wait() is None
    assert not evaluator.pending


def test_busy_error(make: Any) -> None:
    gate = Gate()
    evaluator = make(lambda: Episodes((2,)), gate, num_trajectories=1, busy_policy="error")
    evaluator.trigger_eval()
    with pytest.raises(RuntimeError, match="another evaluation runs"):
        evaluator.trigger_eval()
    gate.go.set()
    assert evaluator.poll(timeout=10.0)["eval/step"] == 1


def test_busy_queue_keeps_the_newest(make: Any) -> None:
    gate, steps = Gate(), []
    evaluator = make(
        lambda: Episodes((2,)),
        gate,
        num_trajectories=1,
        busy_policy="queue",
        on_result=lambda result: steps.append(result["eval/step"]),
    )
    evaluator.trigger_eval(step=1)
    assert gate.reached.wait(10.0)
    assert all(evaluator.trigger_eval(step=step) for step in (2, 3, 4))
    gate.go.set()
    assert evaluator.wait()["eval/step"] == 4
    assert steps == [1, 4]
    assert evaluator.stats()["replaced"] == 2


def test_evaluate_lets_the_one_before_end(make: Any) -> None:
    evaluator = make(lambda: Episodes((50,)), scaled(), num_trajectories=5)
    evaluator.trigger_eval(step=1)
    assert evaluator.evaluate(step=2)["eval/step"] == 2
    assert evaluator.poll()["eval/step"] == 1


def test_threads_that_evaluate_at_once_take_turns(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluator, results, meeting = make(lambda: Episodes((1,)), scaled(), num_trajectories=1), [], threading.Barrier(2)
    wait_until = evaluator._queue.wait_until

    def together(condition: Any, what: str, timeout_s: float | None) -> None:
        wait_until(condition, what, timeout_s)
        if what == "the evaluation that runs":
            with contextlib.suppress(threading.BrokenBarrierError):  # the other one is not let in
                meeting.wait(0.3)

    monkeypatch.setattr(evaluator._queue, "wait_until", together)
    threads = [threading.Thread(target=lambda: results.append(evaluator.evaluate())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert len(results) == 2


@backends
def test_on_result_is_called_in_a_thread_of_this_process(make: Any, backend: str) -> None:
    seen: list[Any] = []
    evaluator = make(
        lambda: Episodes((2,)),
        scaled(),
        num_trajectories=1,
        backend=backend,
        on_result=lambda result: seen.append((result["eval/step"], threading.current_thread().name, os.getpid())),
    )
    evaluator.trigger_eval(step=3)
    evaluator.wait()
    assert seen == [(3, "rollwright-evaluator", os.getpid())]


def test_errors_of_on_result_reach_the_caller(make: Any) -> None:
    def on_result(result: Any) -> None:
        raise KeyError(result["eval/step"])

    evaluator = make(lambda: Episodes((2,)), scaled(), num_trajectories=1, on_result=on_result)
    with pytest.raises(KeyError, match="5"):
        evaluator.evaluate(step=5)
    evaluator.trigger_eval(step=6)
    with pytest.raises(KeyError, match="6"):
        evaluator.wait()
    assert evaluator.poll()["eval/step"] == 6  # the evaluation itself went well


def test_waiting_inside_on_result_is_an_error(make: Any) -> None:
    evaluator = make(lambda: Episodes((2,)), scaled(), num_trajectories=1, on_result=lambda _: evaluator.evaluate())
    with pytest.raises(RuntimeError, match="would wait for itself"):
        evaluator.evaluate()


# Keywords of other packages ------------------------------------------------------------------------------------------


class Recorder(Transform):
    """Gathers steps, and writes how many into a file when it is dumped."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path, self.gathered = path, 0

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        self.gathered += 1
        return next_tensordict

    def _reset(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase) -> TensorDictBase:
        return tensordict_reset

    def dump(self, **kwargs: Any) -> None:
        with open(self.path, "a") as file:
            print(self.gathered, file=file)
        self.gathered = 0


@pytest.mark.parametrize("dump_video", [True, False])
@backends
def test_keywords_of_other_packages(backend: str, dump_video: bool, tmp_path: Any) -> None:
    path = tmp_path / "dumped"
    path.touch()
    keys: dict[str, Any] = {"reward_keys": ("next", "reward"), "done_keys": ("next", "done")}
    evaluator = Evaluator(
        env=lambda: TransformedEnv(Episodes(), Compose(Recorder(str(path)), StepCounter())),
        policy=scaled(2.0),
        num_trajectories=2,
        frames_per_batch=1,
        backend=backend,
        dump_video=dump_video,
        **keys,
    )
    with evaluator:
        assert [evaluator.evaluate(step=step)["eval/returns"] for step in (1, 2)] == [[6.0, 6.0]] * 2
    assert path.read_text().split() == (["6", "6"] if dump_video else [])


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({}, TypeError, "create_env_fn: expected it, or env, got none"),
        ({"env": Episodes, "create_env_fn": Episodes}, TypeError, "create_env_fn: expected it, or env, got both"),
        (
            {"env": Episodes, "done_keys": ("agents", "done")},
            ValueError,
            r"done_keys: expected \('next', 'done'\), where",
        ),
        ({"env": Episodes, "reward_keys": "gain"}, ValueError, "reward_key: expected one of 'reward', .* got 'gain'"),
        (
            {"env": Episodes, "reward_keys": ("next", "reward"), "reward_key": "reward"},
            TypeError,
            "reward_key: expected it, or reward_keys, got both",
        ),
    ],
)
def test_keywords_of_other_packages_that_are_wrong(given: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Evaluator(policy=scaled(), **given)
