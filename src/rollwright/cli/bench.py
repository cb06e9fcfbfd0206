"""``rollwright bench``: a collector beside a loop written by hand, on the user's machine."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import gymnasium
import torch
from gymnasium import spaces
from rich import box
from rich.console import Console as RichConsole
from rich.table import Table
from tensordict.nn import NormalParamExtractor, ProbabilisticTensorDictModule, TensorDictModule, TensorDictSequential
from torch import Tensor, distributions, nn

from rollwright._progress import count
from rollwright.cli.console import Console
from rollwright.cli.errors import Failure, plain
from rollwright.cli.measuring import (
    SingleLoop,
    VectorLoop,
    alternate,
    categorical,
    gaussian,
    make_vector,
    rate,
    ratios,
    summary,
)
from rollwright.collectors import Collector
from rollwright.envs import GymEnv
from rollwright.errors import RollwrightError

_ROUNDS = 10
_MOST_FRAMES_PER_BATCH = 2_000
_WIDTH = 64  # of the policy's layers

Side = Callable[[], int]  # collects a batch, returns its number of frames


def run(arguments: argparse.Namespace) -> int:
    """Measure as the arguments specify, and print the table; returns the exit status."""
    console = Console(quiet=arguments.json)
    steps, frames = _sizes(arguments.frames, arguments.num_envs)
    with console.warnings_as_lines(), _one_thread(), ExitStack() as stack:
        env, first_space, action_space = _spaces(arguments)
        stack.callback(env.close, raise_if_closed=False)
        net = _network(first_space, action_space)
        collectors = {"collector": _collector(env, net, action_space, steps, compiled=False)}
        if arguments.compile:
            console.line("compiling the policy")
            other, *_ = _spaces(arguments)
            stack.callback(other.close, raise_if_closed=False)
            collectors["collector, compiled"] = _collector(other, net, action_space, steps, compiled=True)
        hand, close = _hand(arguments, net, action_space, steps)
        stack.callback(close)
        sides = {"by hand": hand, **{name: _batches(collector) for name, collector in collectors.items()}}
        console.line(
            f"{arguments.env_id}, {count(arguments.num_envs, 'environment')}: {_ROUNDS} rounds of at least "
            f"{count(frames, 'frame')} each, one thread"
        )
        for side in sides.values():
            side()  # what happens once, happens here
        rates = alternate({name: _rate(side, frames) for name, side in sides.items()}, _ROUNDS)
        paths = {name: collector.stats()["paths"] for name, collector in collectors.items()}
        if arguments.json:
            print(json.dumps(_report(arguments, rates, paths), indent=2))
        else:
            _print(rates, paths)
    return 0


def _sizes(frames: int, num_envs: int) -> tuple[int, int]:
    """Steps of a batch, and the least frames of a round.

    >>> _sizes(20_000, 1), _sizes(20_000, 64), _sizes(10, 64)
    ((2000, 2000), (31, 2000), (1, 1))
    """
    per_round = math.ceil(frames / _ROUNDS)
    return max(1, min(per_round, _MOST_FRAMES_PER_BATCH) // num_envs), per_round


def _rate(side: Side, frames: int) -> Callable[[], float]:
    return lambda: rate(side, frames=frames)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Small networks are fastest on one thread, and comparisons steadier."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# What is measured -------------------------------------------------------------------------------------


def _spaces(arguments: argparse.Namespace) -> tuple[GymEnv, spaces.Box, spaces.Discrete | spaces.Box]:
    """The collector's environment, and the spaces of a single one, which this command can handle."""
    options: dict[str, Any] = {"num_envs": arguments.num_envs} if arguments.num_envs > 1 else {}
    try:
        env = GymEnv(arguments.env_id, categorical_action_encoding=True, **options, **arguments.env_kwargs)
    except (RollwrightError, TypeError, ValueError) as error:
        raise Failure(plain(error)) from error
    vector = isinstance(env.unwrapped, gymnasium.vector.VectorEnv)
    seen = env.single_observation_space if vector else env.observation_space
    done = env.single_action_space if vector else env.action_space
    if not isinstance(seen, spaces.Box):
        env.close()
        raise Failure(f"{arguments.env_id} has {seen} as its observations, and bench knows Box spaces only.")
    known = (isinstance(done, spaces.Discrete) and done.start == 0) or (isinstance(done, spaces.Box) and done.shape)
    if not known:
        env.close()
        raise Failure(f"{arguments.env_id} has {done} as its actions, and bench knows Discrete (from 0) and Box only.")
    return env, seen, done


class _Flat(nn.Module):
    """An observation of any shape and dtype as a row of float32."""

    def __init__(self, ndim: int) -> None:
        super().__init__()
        self.ndim = ndim

    def forward(self, observation: Tensor) -> Tensor:
        return observation.flatten(-self.ndim).float() if self.ndim else observation.unsqueeze(-1).float()


def _network(seen: spaces.Box, done: spaces.Discrete | spaces.Box) -> nn.Sequential:
    size = math.prod(seen.shape)
    outputs = int(done.n) if isinstance(done, spaces.Discrete) else 2 * math.prod(done.shape)
    layers = [nn.Linear(size, _WIDTH), nn.Tanh(), nn.Linear(_WIDTH, _WIDTH), nn.Tanh(), nn.Linear(_WIDTH, outputs)]
    plain_row = len(seen.shape) == 1 and str(seen.dtype) == "float32"
    return nn.Sequential(*layers) if plain_row else nn.Sequential(_Flat(len(seen.shape)), *layers)


def _policy(net: nn.Sequential, done: spaces.Discrete | spaces.Box) -> TensorDictSequential:
    discrete = isinstance(done, spaces.Discrete)
    parameters: Any = ["logits"] if discrete else ["loc", "scale"]  # tensordict types keys as str or tuples
    body = net if discrete else nn.Sequential(*net, NormalParamExtractor())
    return TensorDictSequential(
        TensorDictModule(body, in_keys=["observation"], out_keys=parameters),
        ProbabilisticTensorDictModule(
            in_keys=parameters,
            out_keys=["action"],
            distribution_class=distributions.Categorical if discrete else distributions.Normal,
            return_log_prob=True,
        ),
    )


def _collector(
    env: GymEnv, net: nn.Sequential, done: spaces.Discrete | spaces.Box, steps: int, *, compiled: bool
) -> Collector:
    return Collector(
        env, _policy(net, done), frames_per_batch=steps * env.numel(), total_frames=-1, compile_policy=compiled
    )


def _batches(collector: Collector) -> Side:
    iterator = iter(collector)
    return lambda: next(iterator).numel()


def _hand(
    arguments: argparse.Namespace, net: nn.Sequential, done: spaces.Discrete | spaces.Box, steps: int
) -> tuple[Side, Callable[[], None]]:
    """The loop by hand, and what closes its environment."""
    act = categorical if isinstance(done, spaces.Discrete) else gaussian
    env: Any
    loop: SingleLoop | VectorLoop
    if arguments.num_envs == 1:
        env = gymnasium.make(arguments.env_id, disable_env_checker=True, **arguments.env_kwargs)
        loop = SingleLoop(env, env.reset()[0], net, act, steps)
    else:
        env = make_vector(arguments.env_id, arguments.num_envs, **arguments.env_kwargs)
        loop = VectorLoop(env, env.reset()[0], net, act, steps)

    def collect() -> int:
        loop.collect()
        return loop.frames

    return collect, env.close


# The report -------------------------------------------------------------------------------------------


def _report(
    arguments: argparse.Namespace, rates: Mapping[str, list[float]], paths: Mapping[str, Mapping[str, str]]
) -> dict[str, Any]:
    """Medians and quartiles, as JSON knows them."""
    sides = {
        name: {
            "frames_per_second": summary(values)._asdict(),
            "times_by_hand": summary(ratios(values, rates["by hand"]))._asdict(),
            "paths": dict(paths.get(name, {})),
        }
        for name, values in rates.items()
    }
    return {"env": arguments.env_id, "num_envs": arguments.num_envs, "rounds": _ROUNDS, "sides": sides}


def _print(rates: Mapping[str, list[float]], paths: Mapping[str, Mapping[str, str]]) -> None:
    table = Table(box=box.SIMPLE)
    table.add_column("", no_wrap=True)
    for header in ("frames/s", "", "x by hand", ""):
        table.add_column(header, justify="right", no_wrap=True)
    for name, values in rates.items():
        speed, ratio = summary(values), ratios(values, rates["by hand"])
        table.add_row(
            name,
            f"{speed.median:,.0f}",
            f"({speed.low:,.0f}-{speed.high:,.0f})",
            f"{ratio.median:.2f}",
            f"({ratio.low:.2f}-{ratio.high:.2f})",
        )
    console = RichConsole(file=sys.stdout, highlight=False, markup=False, emoji=False)
    console.print(table)
    for name, chosen in paths.items():
        for part, path in chosen.items():
            console.print(f"{name}: {part}: {path}", soft_wrap=True)
