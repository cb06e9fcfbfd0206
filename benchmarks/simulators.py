"""What does collecting cost beside simulators that step thousands of environments: VMAS, Brax, gymnax?

Sides: the simulator alone (random actions made before, what has ended is reset, nothing is kept); a loop by hand, as
those of CleanRL and rsl_rl: the simulator, a policy, and rows of a batch on the device (for Brax and gymnax with the
simulator's own resets, which lose last observations); our collector; and TorchRL's, where it is installed. Frames per
second of processor time on a CPU, of wall time on a GPU with all of its work waited for, the sides in turn; medians.

    python benchmarks/simulators.py vmas brax gymnax --num-envs 64 1024 --device cpu
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from tensordict.nn import TensorDictModule
from torch import Tensor, nn

LIMIT, BRAX, VMAS, GYMNAX = 100, "inverted_pendulum", "balance", "Pendulum-v1"


class Simulator(NamedTuple):
    """A simulator as a loop by hand has it.

    Attributes:
        reset: gives observations.
        step: takes actions; gives observations, rewards, terminated, truncated; what has ended is reset.
        size: of an action.
    """

    reset: Callable[[], Tensor]
    step: Callable[[Tensor], tuple[Tensor, ...]]
    size: tuple[int, ...]


def vmas_alone(num: int, device: str) -> Simulator:
    import vmas

    env = vmas.make_env(VMAS, num, max_steps=LIMIT, device=device, terminated_truncated=True, seed=0)

    def step(action: Tensor) -> tuple[Tensor, ...]:
        seen, rewards, terminated, truncated, _ = env.step(list(action.unbind(1)))
        ended = (terminated | truncated).cpu().numpy()
        if ended.all():
            seen = env.reset()
        elif ended.any():
            for i in ended.nonzero()[0].tolist():
                env.reset_at(i, return_observations=False)
            seen = env.get_from_scenario(get_observations=True, get_rewards=False, get_infos=False, get_dones=False)[0]
        return torch.stack(seen, 1), torch.stack(rewards, 1), terminated, truncated

    return Simulator(lambda: torch.stack(env.reset(), 1), step, (num, env.n_agents, 2))


def jax_alone(kind: str, num: int, device: str) -> Simulator:
    import jax

    on = jax.devices("cpu" if device == "cpu" else "gpu")[0]
    key, state = jax.device_put(jax.random.PRNGKey(0), on), None
    if kind == "brax":
        from brax import envs

        env: Any = envs.training.wrap(envs.get_environment(BRAX, backend="spring"), episode_length=LIMIT)
        begin, act = jax.jit(env.reset), jax.jit(env.step)
        size = env.action_size
    else:
        import gymnax

        env, params = gymnax.make(GYMNAX)
        params = params.replace(max_steps_in_episode=LIMIT)
        begin = jax.jit(jax.vmap(lambda one: env.reset(one, params)))
        act = jax.jit(jax.vmap(lambda one, now, action: env.step(one, now, action, params)))
        size = 1
    tensor = torch.from_dlpack

    def reset() -> Tensor:
        nonlocal key, state
        key, own = jax.random.split(key)
        found = begin(jax.random.split(own, num))
        seen, state = (found.obs, found) if kind == "brax" else found
        return tensor(seen)

    def step(action: Tensor) -> tuple[Tensor, ...]:
        nonlocal key, state
        given = jax.dlpack.from_dlpack(action.detach())
        if kind == "brax":
            state = act(state, given)
            truncated = tensor(state.info["truncation"]) > 0
            return tensor(state.obs), tensor(state.reward), (tensor(state.done) > 0) & ~truncated, truncated
        key, own = jax.random.split(key)
        seen, state, reward, terminated, truncated, _ = act(jax.random.split(own, num), state, given)
        return tuple(map(tensor, (seen, reward, terminated, truncated)))

    return Simulator(reset, step, (num, size))


def alone(kind: str, num: int, device: str) -> Simulator:
    return vmas_alone(num, device) if kind == "vmas" else jax_alone(kind, num, device)


def network(seen: int, actions: int, device: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(seen, 64), nn.Tanh(), nn.Linear(64, actions), nn.Tanh()).to(device)


def simulate(kind: str, num: int, steps: int, device: str) -> Iterator[None]:
    env = alone(kind, num, device)
    env.reset()
    actions = torch.rand(env.size, device=device) * 2 - 1
    while True:
        for _ in range(steps):
            env.step(actions)
        yield


def by_hand(kind: str, num: int, steps: int, device: str) -> Iterator[None]:
    env = alone(kind, num, device)
    seen = env.reset()
    net = network(seen.shape[-1], env.size[-1], device)
    rows: list[Tensor] = []
    while True:
        for t in range(steps):
            with torch.no_grad():
                action = net(seen)
            after, reward, terminated, truncated = env.step(action)
            found = (seen, action, reward, terminated, truncated, terminated | truncated)
            rows = rows or [torch.empty((steps, *one.shape), dtype=one.dtype, device=device) for one in found]
            for row, value in zip(rows, found, strict=True):
                row[t] = value
            seen = after
        yield


def ours(kind: str, num: int, steps: int, device: str, together: bool = False) -> Iterator[None]:
    from rollwright.collectors import Collector
    from rollwright.envs import BraxEnv, GymnaxWrapper, VmasEnv

    env: Any
    if kind == "vmas":
        env = VmasEnv(VMAS, num, max_steps=LIMIT, device=device, seed=0, reset_together=together)
    elif kind == "brax":
        env = BraxEnv(BRAX, num, episode_length=LIMIT, device=device, backend="spring")
    else:
        import gymnax

        made, params = gymnax.make(GYMNAX)
        env = GymnaxWrapper(made, params.replace(max_steps_in_episode=LIMIT), num_envs=num, device=device)
    yield from collected(Collector, env, kind, num * steps, device)


def torchrl(kind: str, num: int, steps: int, device: str) -> Iterator[None]:
    from torchrl.collectors import Collector
    from torchrl.envs import BraxEnv, VmasEnv

    env: Any
    if kind == "vmas":
        env = VmasEnv(VMAS, num_envs=num, max_steps=LIMIT, device=device, seed=0)
    else:
        env = BraxEnv(BRAX, batch_size=[num], device=device, backend="spring")
    yield from collected(Collector, env, kind, num * steps, device)


def collected(collector: Any, env: Any, kind: str, frames: int, device: str) -> Iterator[None]:
    seen = ("agents", "observation") if kind == "vmas" else "observation"
    action = ("agents", "action") if kind == "vmas" else "action"
    net = network(env.observation_spec[seen].shape[-1], env.full_action_spec[action].shape[-1], device)
    policy = TensorDictModule(net, [seen], [action])
    for _ in collector(env, policy, frames_per_batch=frames, total_frames=-1):
        yield


SIDES = {"simulator": simulate, "by hand": by_hand, "ours": ours, "torchrl": torchrl}
SIDES["together"] = partial(ours, together=True)  # of VMAS: what has ended is reset at once


def measure(kind: str, num: int, steps: int, rounds: int, device: str, names: list[str]) -> dict[str, float]:
    """Median frames a second of each side."""
    clock = time.process_time if device == "cpu" else time.perf_counter
    sides = {name: SIDES[name](kind, num, steps, device) for name in names}
    times: dict[str, list[float]] = {name: [] for name in names}
    for i in range(rounds + 1):
        for name, side in sides.items():
            begun = clock()
            next(side)
            if device != "cpu":
                torch.cuda.synchronize()
            if i:  # the first compiles
                times[name].append(clock() - begun)
    return {name: num * steps / statistics.median(found) for name, found in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("kinds", nargs="+", choices=["vmas", "brax", "gymnax"])
    parser.add_argument("--num-envs", type=int, nargs="+", default=[64, 1024])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--sides", nargs="+", default=["simulator", "by hand", "ours"], choices=SIDES)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for kind in given.kinds:
        for num in given.num_envs:
            rates = measure(kind, num, given.steps, given.rounds, given.device, given.sides)
            shown = "  ".join(f"{name} {rate:>11,.0f}" for name, rate in rates.items())
            print(f"{kind:6} {num:>6}  {shown}  frames/s", flush=True)


if __name__ == "__main__":
    main()
