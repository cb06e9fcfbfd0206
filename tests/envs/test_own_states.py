"""Users' environments whose state lies in the data, or whose entries are nested, on arrays: the plain path's bits."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from tensordict import TensorDict
from tests.envs.test_own_arrays import acting, assert_paths_agree, stacked

from rollwright.data import Bounded, Categorical, Composite, Unbounded
from rollwright.envs import CatTensors, DoubleToFloat, EnvBase, RewardSum, SerialEnv, TransformedEnv
from rollwright.envs.arrays import array_form
from rollwright.errors import NotNative


class Carried(EnvBase):
    """Keeps nothing: where it is, and constants of the trajectory, are in the data that it is given."""

    def __init__(self, batch=(), dtype=torch.float32):
        super().__init__(batch_size=batch)
        self.dtype_of_state = dtype
        constants = Composite(gain=Unbounded(batch, dtype=dtype), step=Unbounded((*batch, 1), dtype=dtype), shape=batch)
        self.observation_spec = Composite(
            at=Unbounded((*batch, 1), dtype=dtype),
            speed=Unbounded((*batch, 1), dtype=dtype),
            params=Composite(constants=constants, age=Unbounded((*batch, 1), dtype=torch.int64), shape=batch),
            shape=batch,
        )
        self.state_spec = self.observation_spec.clone()
        self.action_spec = Bounded(-1.0, 1.0, (*batch, 2))
        self.reward_spec = Unbounded((*batch, 1), dtype=dtype)
        self.done_spec = Categorical(2, shape=(*batch, 1), dtype=torch.bool)

    def _params(self, age):
        gain = torch.rand(self.batch_size, dtype=self.dtype_of_state)
        constants = TensorDict({"gain": gain, "step": torch.full_like(age, 1, dtype=gain.dtype) / 8}, self.batch_size)
        return TensorDict({"constants": constants, "age": age}, self.batch_size)

    def _reset(self, tensordict=None, **kwargs):
        shape, dtype = (*self.batch_size, 1), self.dtype_of_state
        fresh = TensorDict(
            {
                "at": torch.rand(shape, dtype=dtype),
                "speed": torch.zeros(shape, dtype=dtype),
                "params": self._params(torch.zeros(shape, dtype=torch.int64)),
            },
            self.batch_size,
        )
        if tensordict is None or "_reset" not in tensordict or tensordict.get("at", None) is None:
            return fresh
        return torch.where(tensordict["_reset"].reshape(self.batch_size), fresh, tensordict.select(*fresh.keys()))

    def _step(self, tensordict):
        constants = tensordict["params", "constants"]
        push = tensordict["action"].sum(-1, keepdim=True).to(self.dtype_of_state) * constants["gain"].unsqueeze(-1)
        speed = tensordict["speed"] + push
        at, age = tensordict["at"] + speed * constants["step"], tensordict["params", "age"] + 1
        ended = (at.abs() > 1) | (torch.rand(at.shape) < 0.1)
        params = TensorDict({"constants": constants, "age": age}, self.batch_size)
        found = {"at": at, "speed": speed, "params": params, "reward": -at.square(), "done": ended}
        return TensorDict(found, self.batch_size)

    def _set_seed(self, seed):
        pass


def joined(env):
    return TransformedEnv(env, CatTensors(["at", "speed"], "observation", del_keys=False))


def cast(env):
    return joined(TransformedEnv(env, DoubleToFloat()))


ENVS = {
    "one": lambda: joined(Carried()),
    "batch": lambda: joined(Carried((3,))),
    "two dimensions": lambda: joined(Carried((2, 2))),
    "more transforms": lambda: TransformedEnv(joined(Carried((3,))), RewardSum()),
    "serial": lambda: joined(SerialEnv(3, Carried)),
    "serial of transforms": lambda: SerialEnv(3, lambda: joined(Carried())),
    "serial of batches": lambda: joined(SerialEnv(2, partial(Carried, (2,)))),
}
OPTIONS = [
    {},
    {"compact_obs": True},
    {"init_random_frames": 72},
    {"max_frames_per_traj": 3},
    {"reset_at_each_iter": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("name", ENVS)
def test_states_in_the_data_are_those_of_the_plain_path(name, options):
    ours, path = assert_paths_agree(ENVS[name], acting(), **options)
    assert path == "native: NumPy arrays"
    ends = torch.cat([batch["next", "done"].flatten() for batch in ours])
    assert ends.sum() > 5
    assert (torch.cat([batch["params", "age"].flatten() for batch in ours]) == 0).sum() > 5


@pytest.mark.parametrize(("batch", "path"), [((), "plain: DoubleToFloat changes what"), ((3,), "native: tensors")])
def test_states_that_a_transform_changes_are_not_on_arrays(batch, path):
    _, taken = assert_paths_agree(lambda: cast(Carried(batch, torch.float64)), acting())
    assert taken.startswith(path)


@pytest.mark.parametrize("name", ["one", "batch", "serial"])
def test_random_actions_step_them_too(name):
    _, path = assert_paths_agree(ENVS[name], None)
    assert path == "native: NumPy arrays"


class Changes(Carried):
    """Returns the nested entries in another form from a step on."""

    def __init__(self, change, first, batch=()):
        super().__init__(batch)
        self.change, self.first, self.calls = change, first, 0

    def _step(self, tensordict):
        out = super()._step(tensordict)
        self.calls += 1
        if self.calls >= self.first:
            self.change(out)
        return out


CHANGES = {
    "one more": lambda out: out.set(("params", "more"), torch.ones(1)),
    "a nest more": lambda out: out.set("info", TensorDict({"n": torch.ones(1)})),
}


@pytest.mark.parametrize("first", [1, 4])
@pytest.mark.parametrize("wrap", [joined, lambda env: stacked(joined(env))], ids=["joined", "stacked"])
@pytest.mark.parametrize("change", CHANGES)
def test_nested_entries_that_no_spec_announces_are_collected_on_tensordicts(change, wrap, first):
    ours, path = assert_paths_agree(lambda: wrap(Changes(CHANGES[change], first)), acting())
    assert path.startswith("plain: its step returns")
    assert ours[-1]["next"].get(("params", "more") if change == "one more" else ("info", "n")).numel() == 36


@pytest.mark.parametrize("first", [1, 4])
def test_members_go_on_together(first):
    ours, path = assert_paths_agree(
        lambda: joined(SerialEnv(3, [partial(Changes, CHANGES["one more"], first)] * 3)), acting()
    )
    assert path.startswith("plain: its step returns")
    assert ours[-1]["next", "params", "more"].shape == (3, 12, 1)


class Agents(EnvBase):
    """Actions, observations and rewards of agents, below a name."""

    def __init__(self, agents=()):
        super().__init__(batch_size=(2,))
        shape = (2, *agents)
        inner = partial(Composite, shape=shape)
        self.observation_spec = Composite(agents=inner(seen=Unbounded((2, 3, 2))), shape=(2,))
        self.action_spec = Composite(agents=inner(action=Bounded(-1.0, 1.0, (2, 3, 2))), shape=(2,))
        self.reward_spec = Composite(agents=inner(reward=Unbounded((2, 3, 1))), shape=(2,))
        self.done_spec = Categorical(2, shape=(2, 1), dtype=torch.bool)
        self.agents = agents

    def _reset(self, tensordict=None, **kwargs):
        nest = TensorDict({"seen": torch.rand(2, 3, 2)}, (2, *self.agents))
        return TensorDict({"agents": nest}, [2])

    def _step(self, tensordict):
        action = tensordict["agents", "action"]
        nest = TensorDict({"seen": action * 2, "reward": action.sum(-1, keepdim=True)}, (2, *self.agents))
        return TensorDict({"agents": nest, "done": torch.rand(2, 1) < 0.2}, [2])

    def _set_seed(self, seed):
        pass


@pytest.mark.parametrize("wrap", [lambda env: env, lambda env: TransformedEnv(env, RewardSum())], ids=["bare", "sums"])
def test_actions_and_rewards_may_be_nested(wrap):
    ours, path = assert_paths_agree(lambda: wrap(Agents()), None)
    assert path.startswith("native")
    assert torch.equal(ours[0]["next", "agents", "seen"], ours[0]["agents", "action"] * 2)


def test_nests_of_a_batch_size_of_their_own_keep_it():
    ours, path = assert_paths_agree(lambda: Agents((3,)), None)
    assert path == "native: tensors"
    assert ours[0]["agents"].batch_size == (2, 18, 3)


def test_states_that_are_no_observations_are_plain():
    env = Carried()
    env.state_spec = Composite(k=Unbounded((1,)))
    with pytest.raises(NotNative, match="states that are no observations"):
        array_form(env, unfit=True)
