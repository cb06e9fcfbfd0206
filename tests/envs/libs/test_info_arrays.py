"""Readers of ``info`` on arrays: the bits of the plain path."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
import torch
from tests.envs.libs.test_pettingzoo_arrays import assert_equal
from tests.variants import in_turn

from rollwright.collectors import Collector
from rollwright.data import Composite, NonTensor, Unbounded
from rollwright.envs import (
    GymEnv,
    GymWrapper,
    RewardSum,
    SerialEnv,
    StepCounter,
    TransformedEnv,
    default_info_dict_reader,
)
from rollwright.envs.libs.gym import BaseInfoDictReader
from rollwright.errors import EnvError


class Told(gymnasium.Env):
    """Tells how far it has come in ``info``: numbers, arrays, text; some of it only now and then."""

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(3)

    def _told(self):
        info = {
            "n": self.n,
            "far": np.float64(self.n / 7),
            "at": np.full(3, self.n, np.float32),
            "deep": {"m": -self.n},
        }
        if self.n % 2:
            info["now"] = 0.5
        return self.observation_space.sample(), info

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self.n = 0
        return self._told()

    def step(self, action):
        self.n += 1
        observation, info = self._told()
        return observation, float(action), self.n >= 5 + int(action), False, info


SPECS = {
    "n": Unbounded((), dtype=torch.int64),
    "far": Unbounded(()),
    "at": Unbounded((3,)),
    ("deep", "m"): Unbounded((1,)),
}


class Doubled(BaseInfoDictReader):
    """A reader of a user's own; writes another entry with the steps from ``first`` on, or changes one."""

    def __init__(self, first=None, change=None):
        self.first, self.change, self.calls = first, change, 0

    @property
    def info_spec(self):
        return Composite(twice=Unbounded((1,)))

    def __call__(self, info_dict, tensordict):
        self.calls += 1
        tensordict["twice"] = torch.tensor([info_dict["n"] * 2.0])
        if self.first is not None and self.calls >= self.first:
            self.change(tensordict)
        return tensordict


def told(*readers):
    env = GymWrapper(Told())
    for reader in readers or [default_info_dict_reader(spec=SPECS)]:
        env.set_info_dict_reader(reader)
    return env


def vector(mode):
    env = gymnasium.vector.SyncVectorEnv([Told] * 3, autoreset_mode=mode)
    keys = {key: spec for key, spec in SPECS.items() if key != ("deep", "m")}
    return GymWrapper(env).set_info_dict_reader(default_info_dict_reader(spec=keys))


MODES = gymnasium.vector.AutoresetMode
ENVS = {
    "specs": told,
    "floats": lambda: told(default_info_dict_reader(["now", "far"])),
    "found": lambda: told(default_info_dict_reader()),
    "two": lambda: told(default_info_dict_reader(["now"]), Doubled()),
    "transforms": lambda: TransformedEnv(TransformedEnv(told(), StepCounter(4)), RewardSum()),
    "serial": lambda: SerialEnv(3, told),
    "serial of transforms": lambda: SerialEnv(2, lambda: TransformedEnv(told(Doubled()), StepCounter())),
    "vector": lambda: vector(MODES.SAME_STEP),
    "vector that waits": lambda: vector(MODES.DISABLED),
    "by name": lambda: GymEnv("Hopper-v5").auto_register_info_dict(),
}


def batches(env, **options):
    collector = Collector(env, None, frames_per_batch=36, total_frames=108, **options)
    try:
        collector.set_seed(1)
        return [batch.clone() for batch in collector], collector.stats()["paths"]["env"]
    finally:
        collector.shutdown()


def assert_paths_agree(make, **options):
    ours, path = batches(make(), **options)
    theirs, plain = batches(make(), **options, use_buffers=False)
    assert plain.startswith("plain")
    for one, other in zip(ours, theirs, strict=True):
        assert_equal(one, other)
    return ours, path


OPTIONS = [{}, {"compact_obs": True}, {"max_frames_per_traj": 3}]


@pytest.mark.parametrize(("name", "options"), in_turn([name for name in ENVS if "transforms" not in name], OPTIONS))
def test_what_readers_read_is_that_of_the_plain_path(name, options):
    ours, path = assert_paths_agree(ENVS[name], **options)
    assert path == "native: NumPy arrays"
    assert {"twice", "now", "n", "x_position"} & {*ours[0].keys()}


@pytest.mark.parametrize("name", [name for name in ENVS if "transforms" in name])
def test_transforms_around_them_are_those_of_the_plain_path(name):
    _, path = assert_paths_agree(ENVS[name])
    assert path == "native: NumPy arrays"


def test_what_was_read_is_what_the_environment_told():
    batch = batches(told(default_info_dict_reader(spec=SPECS)))[0][0]
    n = batch["next", "n"].float()
    assert torch.equal(batch["next", "far"], (n.double() / 7).float())
    assert torch.equal(batch["next", "at"], n.unsqueeze(-1).expand(-1, 3))
    assert torch.equal(batch["next", "deep", "m"].squeeze(-1), -n)
    assert batch["n"][0] == 0


CHANGES = {
    "another entry": lambda td: td.set("more", torch.ones(1)),
    "a dtype": lambda td: td.set("twice", td["twice"].double()),
    "a shape": lambda td: td.set("twice", td["twice"].expand(2)),
    "an observation": lambda td: td.set("observation", td["observation"].double()),
    "a reward": lambda td: td.set("reward", torch.ones(1)) if "reward" in td else td,
    "text": lambda td: td.set("text", "far"),
    "an end": lambda td: td.set("done", torch.ones(1, dtype=torch.bool)),
}


@pytest.mark.parametrize(("change", "first"), in_turn(CHANGES, [1, 2, 5, 7]))
@pytest.mark.parametrize("wrap", [lambda make: make(), lambda make: SerialEnv(2, make)], ids=["one", "serial"])
def test_readers_that_write_more_end_as_the_plain_path(wrap, change, first):
    def outcome(**options):
        env = wrap(lambda: told(Doubled(first, CHANGES[change])))
        try:
            return batches(env, **options)[0]
        except EnvError as error:
            return str(error)

    ours, theirs = outcome(), outcome(use_buffers=False)
    assert isinstance(ours, str) == isinstance(theirs, str)
    if isinstance(ours, str):
        assert ours == theirs
        return
    for one, other in zip(ours, theirs, strict=True):
        assert_equal(one, other)


def test_a_reader_that_does_not_say_what_it_reads_is_plain():
    _, path = assert_paths_agree(lambda: told(lambda info, td: td.set("n", torch.tensor(info["n"]))))
    assert path == "plain: a reader of info has no info_spec, which says what it reads"


def test_text_of_info_is_plain():
    env = told(default_info_dict_reader(["name"], spec=[NonTensor(())]))
    _, path = batches(env)
    assert path == "plain: it has entries that hold objects, and readers of info"


def test_a_reader_that_is_added_between_batches_is_seen():
    env = GymWrapper(Told())
    collector = Collector(env, None, frames_per_batch=4, total_frames=8)
    iterator = iter(collector)
    next(iterator)
    env.info_dict_reader.append(lambda info, td: td.set("n", torch.tensor(info["n"])))
    assert next(iterator)["next", "n"].tolist()[0] == 5
    collector.shutdown()


def test_errors_of_readers_are_those_of_the_plain_path():
    found = []
    for use_buffers in (None, False):
        env = told(default_info_dict_reader(["at"]))
        with pytest.raises(EnvError, match="info entry 'at': expected numbers of shape") as caught:
            batches(env, use_buffers=use_buffers)
        found.append(str(caught.value))
    assert found[0] == found[1]
