"""Brax and gymnax: their data are those of a loop over JAX, over the same memory, and nothing is read in a step."""

from __future__ import annotations

import os
import warnings

import pytest
import torch
from tensordict.nn import TensorDictModule
from torch import nn

jax = pytest.importorskip("jax")
with warnings.catch_warnings():  # of what it imports
    warnings.simplefilter("ignore")
    brax = pytest.importorskip("brax.envs")
gymnax = pytest.importorskip("gymnax")

from rollwright.collectors import Collector  # noqa: E402
from rollwright.envs import BraxEnv, BraxWrapper, GymnaxEnv, GymnaxWrapper, check_env_specs  # noqa: E402
from rollwright.errors import EnvError  # noqa: E402

NUM, STEPS, LIMIT = 5, 10, 7


class Ball(brax.Env):
    """Rolls, and terminates far away; what it draws in a step comes from its state."""

    observation_size, action_size, backend = 3, 3, "none"

    def reset(self, rng):
        rng, own = jax.random.split(rng)
        at = jax.random.uniform(own, (3,), minval=-0.5, maxval=0.5)
        zero = jax.numpy.zeros(())
        return brax.State(None, at, zero, zero, {}, {"rng": rng, "at": at})

    def step(self, state, action):
        rng, own = jax.random.split(state.info["rng"])
        at = 0.9 * state.info["at"] + 0.3 * action + 0.1 * jax.random.uniform(own, (3,))
        done = (jax.numpy.abs(at[0]) > 0.9).astype(float)
        return state.replace(obs=at, reward=at.sum(), done=done, info={**state.info, "rng": rng, "at": at})


def network(width, out):
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(width, out), nn.Tanh())


def ball(fresh=False):
    return BraxWrapper(Ball(), NUM, episode_length=LIMIT, fresh_resets=fresh)


def pole(fresh=True):
    env, params = gymnax.make("Pendulum-v1")
    return GymnaxWrapper(env, params.replace(max_steps_in_episode=LIMIT), num_envs=NUM, fresh_resets=fresh)


def fresh_ball():
    return ball(True)


def cached_pole():
    return pole(False)


ENVS = {"brax": ball, "brax, fresh": fresh_ball, "gymnax": pole, "gymnax, cached": cached_pole}
names = pytest.mark.parametrize("name", ENVS)


def made(name, *, workers=None, env=None, **options):
    policy = TensorDictModule(network(3, 3 if "brax" in name else 1), ["observation"], ["action"])
    more = {} if workers is None else {"num_collectors": workers, "sync": True}
    options = {"frames_per_batch": NUM * STEPS, "total_frames": 4 * NUM * STEPS, **more, **options}
    make = ENVS[name] if env is None else (lambda: env)
    collector = Collector(make if workers else make(), policy, **options)
    collector.set_seed(3)
    return collector


def by_hand(name, batches):
    """Frames of a loop over the environment of JAX alone, one row after another."""
    if "brax" in name:
        reset, step = jax.jit(Ball().reset), jax.jit(Ball().step)

        def begin(key):
            state = reset(key)
            return state.obs, (state, 0)

        def act(key, state, action):
            state, steps = step(state[0], action), state[1] + 1
            ended = bool(state.done)
            return state.obs, (state, steps), state.reward, ended, steps >= LIMIT and not ended

    else:
        env, params = gymnax.make("Pendulum-v1")
        params = params.replace(max_steps_in_episode=LIMIT)

        begin, step = (jax.jit(lambda *args, call=call: call(*args, params)) for call in (env.reset_env, env.step_env))

        def act(key, state, action):
            seen, state, reward, terminated, _ = step(key, state, action)
            return seen, state, reward, bool(terminated), bool(env.is_truncated(state, params))

    is_fresh = name in ("brax, fresh", "gymnax")
    net, rows = network(3, 3 if "brax" in name else 1), []
    key, *keys = jax.random.split(jax.random.PRNGKey(3), NUM + 1)
    first = now = [begin(one) for one in keys]
    for _ in range(batches * STEPS):
        seen = torch.stack([torch.from_dlpack(one) for one, _ in now])
        with torch.no_grad():
            action = net(seen)
        key, *keys = jax.random.split(key, NUM + 1)
        acted = [
            act(k, state, jax.numpy.asarray(a)) for k, (_, state), a in zip(keys, now, action.numpy(), strict=True)
        ]
        after = torch.stack([torch.from_dlpack(one[0]) for one in acted])
        reward = torch.tensor([float(one[2]) for one in acted])
        terminated, truncated = (torch.tensor([one[i] for one in acted]) for i in (3, 4))
        row = {"observation": seen, "action": action, ("next", "observation"): after, ("next", "reward"): reward}
        flags = {"terminated": terminated, "truncated": truncated, "done": terminated | truncated}
        row |= {("next", flag): value for flag, value in flags.items()}
        rows.append({entry: value.reshape(NUM, -1) for entry, value in row.items()})
        now = [(seen, state) for seen, state, *_ in acted]
        if not flags["done"].any():
            continue
        begun = first
        if is_fresh:
            key, *keys = jax.random.split(key, NUM + 1)
            begun = [begin(one) for one in keys]
        for i in flags["done"].nonzero().flatten().tolist():
            seen, state = begun[i]
            if name == "brax":
                rng = now[i][1][0].info["rng"]
                state = (state[0].replace(info={**state[0].info, "rng": rng}), 0)
            now[i] = (seen, state)
    return {entry: torch.stack([row[entry] for row in rows], 1) for entry in rows[0]}


def assert_as_by_hand(name, batches):
    data = torch.cat([batch.reshape(NUM, STEPS) for batch in batches], 1)
    for key, value in by_hand(name, len(batches)).items():
        torch.testing.assert_close(data[key], value, rtol=1e-5, atol=1e-5)  # compiled, it adds in another order
    assert data["next", "truncated"].any()
    assert data["next", "terminated"].any() or "gymnax" in name
    done, ids = data["next", "done"].squeeze(-1), data["collector", "traj_ids"]
    assert torch.equal(ids[:, 1:] != ids[:, :-1], done[:, :-1])


def assert_equal(batch, other):
    for key in other.keys(True, True):
        assert torch.equal(batch[key], other[key]), key


@names
def test_frames_are_those_of_a_loop_by_hand(name):
    with made(name) as collector:
        batches = [batch.clone() for batch in collector]
        assert collector.stats()["paths"]["env"] == "native: tensors"
    assert_as_by_hand(name, batches)
    with made(name, use_buffers=False) as collector:
        for ours, theirs in zip(batches, collector, strict=True):
            assert_equal(ours, theirs)


@names
def test_a_collector_goes_on_from_its_state(name):
    with made(name) as collector:
        batches = [collector.next().clone() for _ in range(2)]
        state = collector.state_dict()
        rest = [collector.next().clone() for _ in range(2)]
    with made(name) as collector:
        collector.load_state_dict(state)
        for batch in rest:
            again = collector.next()
            assert_equal(again, batch)
            batches.append(again.clone())
    assert_as_by_hand(name, batches)


@pytest.mark.parametrize("name", ["brax", "gymnax"])
def test_a_worker_delivers_what_one_process_does(name):
    with made(name, workers=1) as collector:
        assert_as_by_hand(name, [batch.clone() for batch in collector])


@names
def test_the_host_reads_nothing_in_a_step(name, monkeypatch):
    with made(name) as collector, torch.no_grad():
        rollout = collector._rollout
        rollout._begin()
        path = rollout.path

        def step(t):
            for part in (path.act, path.step, path.record, path.follow):
                part(t)

        def refuse(*args, **kwargs):
            raise AssertionError("the host reads a tensor")

        for t in range(2):
            step(t)
        for read in ("item", "numpy", "tolist", "__bool__", "__int__", "__float__", "cpu", "__array__"):
            monkeypatch.setattr(torch.Tensor, read, refuse)
        with jax.transfer_guard("disallow"):
            for t in range(2, STEPS):
                step(t)
        monkeypatch.undo()
        assert path.finish(STEPS)["next", "done"].any()


def test_tensors_are_the_memory_of_jax():
    env = ball()
    td = env.reset()
    td = env._step(td.set("action", torch.zeros(NUM, 3)))
    assert td["observation"].data_ptr() == env._now[0].unsafe_buffer_pointer()
    action = torch.zeros(NUM, 3)
    assert env._as_array(action).unsafe_buffer_pointer() == action.data_ptr()


def test_first_states_are_not_those_that_a_user_writes_into():
    env = ball()
    env.set_seed(1)
    td = env.reset()
    first = td["observation"].clone()
    td["observation"].zero_()
    td["_reset"] = torch.ones(NUM, 1, dtype=torch.bool)
    assert torch.equal(env.reset(td)["observation"], first)


def test_seeds_are_keys():
    env = ball()
    env.set_seed(1)
    one = env.reset()
    again = env.reset(seed=1)
    assert_equal(one, again)
    keys = jax.random.split(jax.random.PRNGKey(1), NUM + 1)[1:]
    assert torch.equal(one["observation"], torch.from_dlpack(jax.jit(jax.vmap(Ball().reset))(keys).obs))
    assert not torch.equal(env.reset()["observation"], one["observation"])


WRAPPED = {
    "get_environment": lambda: BraxEnv("fast", NUM, episode_length=LIMIT),
    "create": lambda: BraxWrapper(brax.create("fast", episode_length=LIMIT, batch_size=NUM)),
    "wrap": lambda: BraxWrapper(brax.training.wrap(brax.get_environment("fast"), episode_length=LIMIT), NUM),
}


@pytest.mark.parametrize("way", WRAPPED)
def test_wrappers_for_batches_are_taken_off(way):
    env = WRAPPED[way]()
    check_env_specs(env)
    assert (env.episode_length, env.batch_size) == (LIMIT, (NUM,))
    td = env.rollout(2 * LIMIT, break_when_any_done=False)
    ends = td["next", "truncated"][0].squeeze(-1).nonzero().flatten().tolist()
    assert ends == [LIMIT - 1, 2 * LIMIT - 1]
    assert not torch.equal(td["next", "observation"][:, LIMIT - 1], td["observation"][:, LIMIT])


def test_a_collector_takes_what_brax_creates():
    env = brax.create("fast", episode_length=LIMIT, batch_size=NUM)
    with Collector(env, None, frames_per_batch=NUM * STEPS, total_frames=NUM * STEPS) as collector:
        (batch,) = collector
        assert collector.stats()["paths"]["env"] == "native: tensors"
    assert batch["action"].shape == (NUM, STEPS, env.action_size)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of mujoco, which is newer than Brax
def test_a_mujoco_model_is_stepped():
    env = BraxEnv("inverted_pendulum", 2, episode_length=3, backend="spring")
    td = env.rollout(4, break_when_any_done=False)
    assert td["next", "reward"].shape == (2, 4, 1)
    assert td["next", "truncated"][:, 2].all()


@pytest.mark.parametrize("name", ["CartPole-v1", "Breakout-MinAtar", "FourRooms-misc", "Reacher-misc"])
@pytest.mark.parametrize("numbers", [True, False])
def test_spaces_of_gymnax(name, numbers):
    env = GymnaxEnv(name, NUM, categorical_action_encoding=numbers)
    check_env_specs(env)
    env.set_seed(0)
    with Collector(env, None, frames_per_batch=NUM * 3, total_frames=NUM * 3) as collector:
        (batch,) = collector
    assert batch["observation"].shape[:2] == (NUM, 3)


def test_what_cannot_be_taken():
    with pytest.raises(TypeError, match=r"env: expected an environment of Brax, got builtins\.dict"):
        BraxWrapper({}, 2)
    with pytest.raises(ValueError, match="num_envs: expected a number of environments, got None"):
        BraxWrapper(Ball())
    with pytest.raises(ValueError, match="num_envs: expected a number of environments of at least 1, got 0"):
        BraxWrapper(Ball(), 0)
    with pytest.raises(EnvError, match=r"BraxEnv\('nothing'\): Brax raised KeyError"):
        BraxEnv("nothing", 2)
    with pytest.raises(EnvError, match=r"GymnaxEnv\('nothing'\): gymnax raised ValueError: nothing is not"):
        GymnaxEnv("nothing", 2)
    with pytest.raises(TypeError, match=r"Say how many: GymnaxWrapper\(env, params, num_envs=1024\)"):
        Collector(gymnax.make("CartPole-v1")[0], None, frames_per_batch=2)
    if "CUDA_VISIBLE_DEVICES" not in os.environ:
        with pytest.raises(EnvError, match=r"device: expected one that JAX has .*, got cuda:3"):
            BraxWrapper(Ball(), 2, device="cuda:3")
    with pytest.raises(EnvError, match="takes seed alone"):
        ball().reset(options={})
    assert "ant" in BraxEnv.available_envs
    assert "CartPole-v1" in GymnaxEnv.available_envs
