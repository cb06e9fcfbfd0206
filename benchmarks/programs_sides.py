"""The programs, with the names that TorchRL and rollwright share: the library is an argument.

What a library does not have is looked up when it is needed, and raises `NotThere`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import gymnasium
import torch
from tensordict.nn import NormalParamExtractor, ProbabilisticTensorDictModule, TensorDictModule, TensorDictSequential
from torch import distributions, nn

from benchmarks.programs_cases import Program, make_network
from benchmarks.programs_point import make_point

SEED = 0


class NotThere(Exception):
    """A library lacks a name; the message says which."""


class Library:
    """Looks names up in a package.

    Args:
        package: ``"rollwright"`` or ``"torchrl"``.

    Attributes:
        notes: what was used in place of names that are not there.
    """

    def __init__(self, package: str) -> None:
        self.package = package
        self.notes: list[str] = []

    def find(self, module: str, name: str) -> Any:
        """``name`` of ``module`` below the package.

        Raises:
            NotThere: it has none.
        """
        value = getattr(importlib.import_module(f"{self.package}.{module}"), name, None)
        if value is None:
            raise NotThere(f"not there: {self.package}.{module}.{name}")
        return value

    def transform(self, name: str, *args: Any, **options: Any) -> Any:
        return self.find("envs", name)(*args, **options)


def make_env(library: Library, program: Program) -> Any:
    """The environment with the program's transforms around it.

    Raises:
        NotThere: the library lacks one of their names.
    """
    make_one = _maker(library, program)
    env = make_one() if program.num_envs == 1 else library.find("envs", "SerialEnv")(program.num_envs, make_one)
    parts = _transforms(library, program)
    return library.transform("TransformedEnv", env, library.transform("Compose", *parts)) if parts else env


def _maker(library: Library, program: Program) -> Callable[[], Any]:
    """What makes one environment; names that are lacking are found out here, before an environment calls it."""
    gym_env, wrapper = library.find("envs", "GymEnv"), library.find("envs", "GymWrapper")
    if program.stack == "dictionary":
        import minigrid  # noqa: F401 - registers its environments

        def make_dictionary() -> Any:
            env = gymnasium.make(program.env_id, disable_env_checker=True)
            env = gymnasium.wrappers.FilterObservation(env, ["image", "direction"])
            return wrapper(env, categorical_action_encoding=True)

        return make_dictionary
    if program.stack == "environment":
        return lambda: make_point(library)
    if program.stack != "atari":
        return lambda: gym_env(program.env_id, categorical_action_encoding=True)
    import ale_py

    gymnasium.register_envs(ale_py)
    noops, lives = library.find("envs", "NoopResetEnv"), library.find("envs", "EndOfLifeTransform")
    around, compose = library.find("envs", "TransformedEnv"), library.find("envs", "Compose")

    def make_atari() -> Any:
        env = gym_env(program.env_id, categorical_action_encoding=True)
        return around(env, compose(noops(noops=30, random=True), lives()))

    return make_atari


def _transforms(library: Library, program: Program) -> list[Any]:
    make = library.transform
    if program.stack == "cast":
        return [make("DoubleToFloat", in_keys=["observation"])]
    if program.stack == "own":
        return [make("DoubleToFloat", in_keys=["observation"]), _clipping(library)]
    if program.stack == "mujoco":
        return [
            make("VecNorm", in_keys=["observation"], decay=0.99999, eps=1e-2),
            make("RewardSum"),
            make("StepCounter"),
            make("DoubleToFloat", in_keys=["observation"]),
        ]
    if program.stack == "atari":
        return [
            make("ToTensorImage", in_keys=["pixels"]),
            make("GrayScale", in_keys=["pixels"]),
            make("Resize", 84, 84, in_keys=["pixels"]),
            make("CatFrames", N=4, dim=-3, in_keys=["pixels"]),
            make("RewardSum"),
            make("SignTransform", in_keys=["reward"]),
        ]
    if program.network == "gru":
        return [make("InitTracker")]
    return []


def _clipping(library: Library) -> Any:
    """A transform that the library does not know."""
    base: Any = library.find("envs", "Transform")

    class Clipping(base):  # type: ignore[misc]
        def _apply_transform(self, obs: torch.Tensor) -> torch.Tensor:
            return obs.clamp(-5, 5)

        def _reset(self, tensordict: Any, tensordict_reset: Any) -> Any:
            return self._call(tensordict_reset)

    return Clipping(in_keys=["observation"], out_keys=["observation"])


def make_policy(library: Library, program: Program) -> Any:
    """A policy of tensordict's modules, with the library's distribution and recurrent module."""
    net, keys = make_network(program), ["logits"]
    if program.distribution != "categorical":
        net, keys = nn.Sequential(*net, NormalParamExtractor()), ["loc", "scale"]
    parts: list[Any] = [TensorDictModule(net, in_keys=program.in_keys, out_keys=keys)]
    if program.network == "gru":
        torch.manual_seed(0)
        gru = library.find("modules", "GRUModule")(program.sizes[0], 64, in_key="observation", out_key="features")
        parts = [gru, TensorDictModule(net, in_keys=["features"], out_keys=keys)]
    sampler = ProbabilisticTensorDictModule(
        in_keys=keys,
        out_keys=["action"],
        distribution_class=_distribution(library, program),
        default_interaction_type=_random(),
        return_log_prob=True,
    )
    return TensorDictSequential(*parts, sampler)


def _random() -> Any:
    from tensordict.nn import InteractionType

    return InteractionType.RANDOM


def _distribution(library: Library, program: Program) -> Callable[..., Any]:
    if program.distribution == "tanh_normal":
        try:
            found: Callable[..., Any] = library.find("modules", "TanhNormal")
        except NotThere as error:
            library.notes.append(f"{error}; torch's TransformedDistribution instead")
            return _transformed
        return found
    return {"categorical": distributions.Categorical, "independent": _independent}[program.distribution]


def _transformed(loc: torch.Tensor, scale: torch.Tensor) -> distributions.Distribution:
    transform = distributions.TanhTransform(cache_size=1)
    return distributions.TransformedDistribution(_independent(loc, scale), [transform])


def _independent(loc: torch.Tensor, scale: torch.Tensor) -> distributions.Independent:
    return distributions.Independent(distributions.Normal(loc, scale), 1)


def make_program(
    library: Library, program: Program, collector: Any = None, **options: Any
) -> tuple[Callable[[], int], Any]:
    """The program: a function that collects a batch and returns its number of frames, and its collector.

    Args:
        library: whose environments, transforms, policies and buffer.
        program: what it does.
        collector: the class; None is the library's own.
        **options: of the collector.
    """
    env, policy = make_env(library, program), make_policy(library, program)
    if program.network == "gru" and library.package == "torchrl":
        env.append_transform(policy[0].make_tensordict_primer())
    made = (collector or library.find("collectors", "Collector"))(
        env, policy, frames_per_batch=program.frames_per_batch, total_frames=-1, **options
    )
    made.set_seed(SEED)
    batches = iter(made)
    if not program.samples:
        return lambda: next(batches).numel(), made
    storage = library.find("data", "LazyTensorStorage")(100_000)
    buffer = library.find("data", "TensorDictReplayBuffer")(storage=storage, batch_size=256)

    def collect() -> int:
        batch = next(batches)
        buffer.extend(batch.reshape(-1))
        for _ in range(program.samples):
            buffer.sample()
        return batch.numel()

    return collect, made
