"""The array form of an environment, stepped beside the environment itself."""

from __future__ import annotations

import copy

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from rollwright import Collector
from rollwright.data import Categorical, Composite, Unbounded
from rollwright.envs import EnvBase, GymEnv, GymWrapper, SerialEnv, TransformedEnv, default_info_dict_reader
from rollwright.envs.arrays import FLAGS, ArrayTransform, array_form
from rollwright.envs.libs.vector import InTurn
from rollwright.envs.transforms import (
    Compose,
    DoubleToFloat,
    InitTracker,
    ObservationNorm,
    RewardScaling,
    RewardSum,
    StepCounter,
    TensorDictPrimer,
    Transform,
)
from rollwright.envs.transforms.base import map_spec
from rollwright.errors import EnvError, NotNative

BOX = spaces.Box(-1.0, 1.0, (2,), np.float32)


class Walk(gymnasium.Env):
    """Observations of any space, drawn by the seed, in one buffer where that is an array."""

    def __init__(self, seen=BOX, act=None):
        self.observation_space = copy.deepcopy(seen)  # a space has random numbers of its own
        self.action_space = act or spaces.Discrete(3)

    def _seen(self):
        value = self.observation_space.sample()
        if isinstance(value, np.ndarray):
            if not hasattr(self, "buffer"):
                self.buffer = value.copy()
            self.buffer[...] = value
            return self.buffer
        return value

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self.left = int(self.np_random.integers(1, 5))
        return self._seen(), {}

    def step(self, action):
        self.left -= 1
        ended = self.left <= 0
        cut = ended and self.np_random.random() < 0.5
        return self._seen(), float(np.sum(action)) / 3, ended and not cut, cut, {}


def walk(**spaces_):
    return GymWrapper(Walk(**spaces_), categorical_action_encoding=True)


def vector(mode=AutoresetMode.NEXT_STEP, n=3, **spaces_):
    return GymWrapper(SyncVectorEnv([lambda: Walk(**spaces_)] * n, autoreset_mode=mode))


def books(env):
    primer = TensorDictPrimer(h=Unbounded((2,)), r=Unbounded(()), random=True)
    return TransformedEnv(env, Compose(InitTracker(), StepCounter(max_steps=3), RewardSum(), primer))


DOUBLE = spaces.Box(-1.0, 1.0, (2,), np.float64)


def scaled(env):
    """Affine maps one after another: of observations into another entry, of rewards, of what others have added."""
    return TransformedEnv(
        env,
        Compose(
            StepCounter(4),
            ObservationNorm(0.3, 1.7, ["observation"]),
            ObservationNorm(torch.tensor([0.1, 0.2]), torch.tensor([3.0, 7.0]), ["observation"], ["norm"], **INVERSE),
            ObservationNorm(0.5, 0.1, ["step_count"], ["share"]),
            RewardScaling(0.1, 1 / 3),
            RewardSum(),
            RewardScaling(torch.tensor([0.2]), torch.tensor([0.7]), ["episode_reward"], ["scaled_sum"], **INVERSE),
        ),
    )


INVERSE = {"standard_normal": True}


def floats(env, *keys):
    return TransformedEnv(env, Compose(DoubleToFloat(*keys), ObservationNorm(1 / 3, 0.7, ["observation"])))


def doubles(env):
    loc, scale = torch.tensor([1 / 3], dtype=torch.float64), torch.tensor(0.7, dtype=torch.float64)
    norm = ObservationNorm(loc, scale, ["observation"])
    return TransformedEnv(env, Compose(norm, RewardScaling(loc, scale), RewardSum(), DoubleToFloat(["reward"])))


class Twice(Transform):
    """A user's transform that has an array form."""

    def __init__(self, key, out_key):
        super().__init__([key], [out_key])

    def _apply_transform(self, obs):
        return obs * 2

    def transform_observation_spec(self, observation_spec):
        return map_spec(observation_spec, self._pairs(), lambda leaf: Unbounded(leaf.shape, dtype=leaf.dtype))

    def on_arrays(self, env):
        ((key, out_key),) = self._pairs()

        def add(values):
            values[out_key] = self._apply_transform(values[key])

        return ArrayTransform({out_key: env.entries[key]}, [], lambda root, out: add(out), add)


ENVS = {
    "single": walk,
    "single of a dict": lambda: walk(seen=spaces.Dict(a=BOX, b=spaces.Dict(c=spaces.Discrete(3)))),
    "single of a tuple": lambda: walk(seen=spaces.Tuple([spaces.Discrete(3, start=2), BOX])),
    "float64": lambda: walk(seen=spaces.Box(-1, 1, (), np.float64), act=spaces.Box(-1, 1, (), np.float64)),
    "many choices": lambda: walk(act=spaces.MultiDiscrete([2, 3])),
    "vector": vector,
    "same step": lambda: vector(AutoresetMode.SAME_STEP),
    "disabled": lambda: vector(AutoresetMode.DISABLED, seen=spaces.Dict(a=BOX, b=spaces.Discrete(2))),
    "books": lambda: books(walk()),
    "books of a vector": lambda: books(vector(AutoresetMode.SAME_STEP)),
    "a user's transforms": lambda: TransformedEnv(
        walk(), Compose(Twice("observation", "two"), StepCounter(), Twice("two", "four"), Twice("step_count", "even"))
    ),
    "scaled": lambda: scaled(walk()),
    "scaled vector": lambda: scaled(vector()),
    "scaled serial": lambda: scaled(SerialEnv(3, walk)),
    "serial of scaled": lambda: SerialEnv(3, lambda: scaled(walk())),
    "floats": lambda: floats(walk(seen=DOUBLE)),
    "floats of some": lambda: floats(walk(seen=DOUBLE), ["observation"], ["cast"]),
    "floats of a vector": lambda: floats(vector(seen=DOUBLE)),
    "doubles": lambda: doubles(walk()),
    "doubles as actions": lambda: floats(walk(act=DOUBLE, seen=DOUBLE)),
    "scaled actions": lambda: TransformedEnv(
        walk(act=BOX), ObservationNorm(0.0, 2.0, ["observation"], in_keys_inv=["action"])
    ),
    "doubles of a vector": lambda: doubles(vector(seen=DOUBLE)),
    "serial": lambda: SerialEnv(3, walk),
    "serial of vectors": lambda: SerialEnv(2, vector),
    "serial of books": lambda: SerialEnv(2, lambda: books(walk())),
    "books of serial": lambda: books(SerialEnv(3, walk)),
    "serial of serial": lambda: SerialEnv(2, lambda: SerialEnv(2, lambda: books(vector()))),
}


def as_tensor(value, entry):
    return torch.from_numpy(np.array(value, entry.dtype).reshape(entry.shape))


def assert_holds(values, td, entries):
    """Arrays in row form hold what a TensorDict holds."""
    for key, entry in entries.items():
        value, other = np.asarray(values[key]), td.get(key)
        assert value.dtype == entry.dtype, key
        assert (value.shape == entry.shape[:-1]) if entry.column else (value.shape == entry.shape), key
        assert tuple(other.shape) == entry.shape, key
        assert torch.equal(as_tensor(value, entry), other), key
    for flag in FLAGS:
        if flag in values:
            assert np.array_equal(values[flag], td.get(flag).squeeze(-1).numpy()), flag


@pytest.mark.parametrize("name", ENVS)
def test_steps_and_resets_are_those_of_the_environment(name):
    plain, env = ENVS[name](), ENVS[name]()
    arrays = array_form(env)
    assert arrays.batch == tuple(env.batch_size)
    results = []
    for one in (plain, env):
        one.set_seed(4)
        torch.manual_seed(4)
        results.append(plain.reset() if one is plain else arrays.reset(None))
        state = torch.get_rng_state()
    td, root = results
    assert_holds(root, td, arrays.entries)
    kept, ends, rng = [], 0, torch.Generator().manual_seed(0)
    for _ in range(40):
        state = torch.get_rng_state()
        torch.manual_seed(int(torch.randint(1000, (), generator=rng)))
        td = plain.rand_action(td)
        actions = {key: td.get(key).numpy().copy() for key in plain.action_keys}
        torch.set_rng_state(state)
        stepped, td = plain.step_and_maybe_reset(td)
        torch.set_rng_state(state)
        read = {key: root[key] for key in arrays.reads if key not in actions}
        out = arrays.step({**read, **actions}, {})
        assert_holds(out, stepped["next"], {**arrays.entries, **arrays.rewards})
        kept.append((out, stepped["next"].clone()))
        root, ended = out, np.asarray(out["done"])
        if ended.any():
            ends += int(ended.sum())
            fresh = arrays.reset(None if ended.ndim == 0 else ended)
            root = {k: np.where(_rows(ended, v), v, out[k]) if ended.ndim else v for k, v in fresh.items()}
        assert_holds(root, td, arrays.entries)
    assert ends > 5
    for out, outcome in kept:  # arrays that were handed out are never written again
        assert_holds(out, outcome, {**arrays.entries, **arrays.rewards})
    for one in (plain, env):
        one.close()


def _rows(ended, value):
    return ended.reshape(ended.shape + (1,) * (np.ndim(value) - ended.ndim))


def test_preset_entries_reach_primers():
    env = SerialEnv(2, lambda: books(walk()))
    arrays = array_form(env)
    env.set_seed(0)
    root = {**arrays.reset(None), "action": np.array([0, 1])}
    h, r = np.ones((2, 2), np.float32), np.array([3.0, 4.0], np.float32)
    out = arrays.step(root, {"h": h, "r": r})
    assert np.array_equal(out["h"], h)
    assert np.array_equal(out["r"], r)


def test_partial_reset_touches_no_other_environment():
    env = SerialEnv(3, walk)
    arrays = array_form(env)
    env.set_seed(0)
    arrays.reset(None)
    before = [worker._env.left for worker in env._envs]
    arrays.reset(np.array([False, True, False]))
    after = [worker._env.left for worker in env._envs]
    assert (before[0], before[2]) == (after[0], after[2])


# What has no array form, or has it no longer -----------------------------------------------------------------------


class Speaks(EnvBase):
    def __init__(self):
        super().__init__()
        self.observation_spec = Composite(x=Unbounded((1,)))
        self.action_spec = Categorical(2, shape=())


class Elsewhere(GymEnv):
    def _step(self, tensordict):
        return super()._step(tensordict)


def patched(env, name):
    setattr(env, name, lambda *args, **kwargs: None)
    return env


class Slower(StepCounter):
    """Counts in another way, and has no array form of its own."""

    def _step(self, tensordict, next_tensordict):
        return next_tensordict.set("step_count", tensordict["step_count"] + tensordict["step_count"] % 2)


class Louder(RewardScaling):
    """Scales in another way, and has no array form of its own."""

    def _apply_transform(self, obs):
        return super()._apply_transform(obs).abs()


def odd_transform():
    return patched(StepCounter(), "_step")


REFUSED = {
    "it may return what its specs do not announce": Speaks,
    "Elsewhere overrides _step": lambda: Elsewhere("CartPole-v1"),
    "GymWrapper overrides step": lambda: patched(walk(), "step"),
    "run_type_checks": lambda: GymEnv("CartPole-v1", run_type_checks=True),
    "may return what its specs do not announce": lambda: walk().set_info_dict_reader(default_info_dict_reader(["x"])),
    "holds objects": lambda: walk(seen=spaces.Dict(a=BOX, b=spaces.Text(3))),
    "works on TensorDicts": lambda: TransformedEnv(walk(), odd_transform()),
    "Slower works on TensorDicts": lambda: TransformedEnv(walk(), Slower()),
    "cache_specs": lambda: TransformedEnv(walk(), StepCounter(), cache_specs=False),
    "reset_keys": lambda: TransformedEnv(walk(), RewardSum(["reward"], reset_keys=["_reset"])),
    "a reset_key": lambda: TransformedEnv(walk(), TensorDictPrimer(h=Unbounded(()), reset_key="_reset")),
    "another flag": lambda: TransformedEnv(walk(), StepCounter(3, update_done=False)),
    "its flags are": lambda: TransformedEnv(walk(), StepCounter(3, truncated_key="cut")),
    "ObservationNorm changes what the environment is given beside actions": lambda: TransformedEnv(
        walk(), Compose(StepCounter(), ObservationNorm(0.0, 2.0, ["observation"], in_keys_inv=["step_count"]))
    ),
    r"changes shape \(1,\) to \(3,\)": lambda: TransformedEnv(walk(), RewardScaling(torch.zeros(3), 2.0)),
    "Louder works on TensorDicts": lambda: TransformedEnv(walk(), Louder(0.0, 2.0)),
    "differ in their entries": lambda: SerialEnv(2, [walk, lambda: TransformedEnv(walk(), InitTracker())]),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_environments_without_an_array_form_say_why(reason):
    with pytest.raises(NotNative, match=reason):
        array_form(REFUSED[reason]())


class Fractions(Twice):
    """Halves numbers, and announces on arrays that they stay what they are."""

    def _apply_transform(self, obs):
        return obs / 2

    def transform_observation_spec(self, observation_spec):
        return map_spec(observation_spec, self._pairs(), lambda leaf: Unbounded(leaf.shape, dtype=torch.float32))

    def on_arrays(self, env):
        return super().on_arrays(env)


def test_an_array_form_that_differs_from_the_specs_is_not_taken():
    env = TransformedEnv(walk(), Compose(StepCounter(), Fractions("step_count", "half")))
    with pytest.raises(NotNative, match=r"has 'half' as int64 \[1\], its spec as float32 \[1\]"):
        array_form(env)
    with Collector(env, frames_per_batch=4) as collector:
        assert collector.next()["half"].dtype == torch.float32
        assert "'half' as int64" in collector.stats()["paths"]["env"]


class Careless(Fractions):
    def transform_observation_spec(self, observation_spec):
        return map_spec(observation_spec, self._pairs(), lambda leaf: leaf)

    def on_arrays(self, env):
        return super().on_arrays(env)


def test_values_of_an_array_form_that_would_be_cut_off_are_an_error():
    env = TransformedEnv(walk(), Compose(StepCounter(), Careless("step_count", "half")))
    with (
        Collector(env, frames_per_batch=4) as collector,
        pytest.raises(EnvError, match=r"'half' as int64, and its val"),
    ):
        collector.next()


def test_specs_that_were_changed_have_no_array_form():
    env = walk()
    env.reward_spec = Unbounded((1,), dtype=torch.float64)
    with pytest.raises(NotNative, match="specs are not those of its spaces"):
        array_form(env)


CHANGES = {
    "readers of info": lambda env: env.base_env.set_info_dict_reader(default_info_dict_reader(["x"])),
    "specs have changed": lambda env: setattr(env.base_env, "reward_spec", Unbounded((1,))),
    "transforms have changed": lambda env: env.append_transform(StepCounter(step_count_key="n")),
    "transforms have change": lambda env: setattr(env, "transform", Compose()),
}


@pytest.mark.parametrize("place", ["alone", "serial", "transformed"])
@pytest.mark.parametrize("reason", CHANGES)
def test_change_of_the_environment_is_told(place, reason):
    inner = TransformedEnv(walk(), Compose(InitTracker()))
    env = {
        "alone": lambda: inner,
        "serial": lambda: SerialEnv(1, lambda: inner),
        "transformed": lambda: TransformedEnv(inner, RewardSum(), auto_unwrap=False),
    }[place]()
    arrays = array_form(env)
    arrays.check()
    CHANGES[reason](inner)
    with pytest.raises(NotNative, match=reason):
        arrays.check()


@pytest.mark.parametrize("name", ["single", "books", "serial"])
def test_closed_environment_raises_as_on_the_plain_path(name):
    env = ENVS[name]()
    arrays = array_form(env)
    root = arrays.reset(None)
    td = env.rand_action(env.reset())
    env.close()
    with pytest.raises(EnvError) as plain:
        env.step(td)
    with pytest.raises(EnvError) as native:
        arrays.step({**root, "action": td["action"].numpy()}, {})
    assert str(native.value) == str(plain.value)
    with pytest.raises(EnvError, match="reset after close"):
        arrays.reset(None)


# Environments in turn ------------------------------------------------------------------------------------------------


def in_turn(**spaces_):
    return InTurn(SyncVectorEnv([lambda: Walk(**spaces_)] * 3))


def test_in_turn_steps_as_the_vector_environment():
    theirs, ours = SyncVectorEnv([Walk] * 3, autoreset_mode=AutoresetMode.DISABLED), in_turn()
    for _ in range(3):
        pair = [env.reset(seed=[1, 2, 3]) for env in (theirs, ours)]
        assert np.array_equal(pair[0][0], pair[1][0])
        pair = [env.step(np.array([0, 1, 2])) for env in (theirs, ours)]
        for one, other in zip(pair[0][:4], pair[1][:4], strict=True):
            assert np.array_equal(one, other)
            assert one.dtype == other.dtype


@pytest.mark.parametrize("seen", [BOX, spaces.Discrete(5), spaces.Dict(a=BOX, b=spaces.Discrete(2))], ids=str)
def test_in_turn_resets_what_is_marked(seen):
    env = in_turn(seen=seen)
    env.reset(seed=[1, 2, 3])
    before = [part.left for part in env.vector.envs]
    env.vector.envs[1].left = -7
    env.reset(options={"reset_mask": np.array([False, True, False])})
    after = [part.left for part in env.vector.envs]
    assert (after[0], after[2]) == (before[0], before[2])
    assert after[1] > 0


def test_in_turn_passes_further_options_on():
    class Told(Walk):
        def reset(self, *, seed=None, options=None):
            self.told = options
            return super().reset(seed=seed)

    env = InTurn(SyncVectorEnv([Told] * 2))
    env.reset(options={"reset_mask": np.array([True, False]), "level": 3})
    assert env.vector.envs[0].told == {"level": 3}
    env.reset(options={"reset_mask": np.array([True, True])})
    assert env.vector.envs[1].told is None


def test_observation_of_another_shape_is_refused():
    env = in_turn()
    env.reset(seed=0)
    env.vector.envs[1]._seen = lambda: np.zeros(5, np.float32)
    with pytest.raises(ValueError, match=r"shape \(5,\), .* \(2,\)"):
        env.step(np.zeros(3, np.int64))
