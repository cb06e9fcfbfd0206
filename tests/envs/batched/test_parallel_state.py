"""What of ParallelEnv is saved, restored and copied."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from tests.variants import in_turn

from rollwright.data import Composite, OneHot, Unbounded
from rollwright.envs import EnvBase, GymEnv, SerialEnv, TransformedEnv
from rollwright.envs.batched.parallel import ParallelEnv
from rollwright.envs.checkpoint import load_env, save_env
from rollwright.envs.transforms import Compose, StepCounter, VecNorm
from rollwright.errors import EnvError


class Noisy(EnvBase):
    """Draws from torch's global generator, which is that of its process; counts its steps in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.observation_spec = Composite(noise=Unbounded((2,)))
        self.action_spec = OneHot(2)
        self.register_buffer("total", torch.zeros(()))

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        return TensorDict({"noise": torch.randn(2)})

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        self.total += 1
        return TensorDict({"noise": torch.randn(2), "reward": 1.0, "done": False})

    def _set_seed(self, seed: int | None) -> None:
        pass


def cartpole() -> EnvBase:
    return GymEnv("CartPole-v1")


def bookkept() -> EnvBase:
    return TransformedEnv(cartpole(), Compose(StepCounter(), VecNorm(in_keys=["observation"], decay=0.9)))


Make = Callable[..., Any]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[Any] = []

    def build(create: Callable[[], EnvBase], **kwargs: Any) -> Any:
        made.append(ParallelEnv(3, create, **{"num_processes": 2, **kwargs}))
        return made[-1]

    yield build
    for env in made:
        env.close(raise_if_closed=False)


def go_on(env: EnvBase, td: TensorDictBase) -> TensorDictBase:
    torch.manual_seed(2)
    return env.rollout(20, auto_reset=False, tensordict=td.clone(), break_when_any_done=False)


@pytest.mark.parametrize(("create", "outside"), in_turn([cartpole, bookkept, Noisy], [False, True]))
def test_checkpoint_restores_to_the_bit(make: Make, create: Callable[[], EnvBase], outside: bool) -> None:
    def batch() -> Any:
        env = make(create)
        return TransformedEnv(env, StepCounter(step_count_key="steps")) if outside else env

    env, other = batch(), batch()
    env.set_seed(3)
    td = env.rollout(15, break_when_any_done=False)[:, -1]
    td = env.maybe_reset(env._step_mdp(td))
    saved = save_env(env)
    assert saved.unsaved == []
    expected = go_on(env, td)
    other.rollout(4)
    load_env(other, pickle.loads(pickle.dumps(saved.state)))
    assert (go_on(other, td) == expected).all()


def test_checkpoint_names_what_it_lacks(make: Make) -> None:
    def create() -> EnvBase:
        env = cartpole()
        env.handle = open("/dev/null")  # noqa: SIM115
        return env

    unsaved = save_env(make(create)).unsaved
    assert len(unsaved) == 3
    assert unsaved[1].startswith("ParallelEnv [worker 1] GymEnv(CartPole-v1): cannot be pickled")


def test_state_dict_is_that_of_serial_env(make: Make) -> None:
    for create in (Noisy, bookkept):
        env, serial = make(create), SerialEnv(3, create)
        for one in (env, serial):
            one.set_seed(0)
            one.rollout(5)
        states = [TransformedEnv(one, StepCounter()).state_dict() for one in (env, serial)]
        assert list(states[0]) == list(states[1])
        if create is bookkept:
            assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])
        other = make(create)
        other.load_state_dict(serial.state_dict())
        assert all(torch.equal(value, serial.state_dict()[key]) for key, value in other.state_dict().items())


def test_state_dict_that_does_not_fit(make: Make) -> None:
    env = make(Noisy)
    state = env.state_dict()
    assert list(state) == ["worker0.total", "worker1.total", "worker2.total"]
    del state["worker1.total"]
    state["worker2.more"] = torch.zeros(())
    with pytest.raises(RuntimeError, match=r"(?s)Missing.*worker1\.total.*|Unexpected.*worker2\.more"):
        env.load_state_dict(state)
    found = env.load_state_dict(state, strict=False)
    assert found.missing_keys == ["worker1.total"]
    with pytest.raises(RuntimeError, match=r"(?s)worker0\..*size mismatch"):
        env.load_state_dict({**env.state_dict(), "worker0.total": torch.zeros(3)})


@pytest.mark.parametrize("twin_of", [copy.deepcopy, lambda env: pickle.loads(pickle.dumps(env))])
def test_copies_go_their_own_way(make: Make, twin_of: Any) -> None:
    env = TransformedEnv(make(bookkept), StepCounter(step_count_key="steps"))
    env.set_seed(0)
    td = env.rand_action(env.reset())
    twin = twin_of(env)
    assert set(twin.base_env._processes.pids()).isdisjoint(env.base_env._processes.pids())
    expected = go_on(env, td)
    assert (go_on(twin, td) == expected).all()
    twin.close()
    env.close()
    with pytest.raises(EnvError, match="is closed, and has no environments to copy"):
        twin_of(env)
