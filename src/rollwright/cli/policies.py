"""Resolves ``--policy`` to a policy: random, a factory in a module, or a saved program."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any, cast

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import nn
from torch.utils._pytree import tree_unflatten

from rollwright._keys import key_str
from rollwright._progress import count
from rollwright.cli.errors import Failure, brief
from rollwright.envs.base import EnvBase


def load_policy(text: str, env: EnvBase) -> Any:
    """The policy that ``--policy`` names.

    Args:
        text: ``random``, ``module:factory`` or the path of a ``.pt2`` file.
        env: what the policy is for.

    Returns:
        What a collector takes as its policy; None for random actions.

    Raises:
        Failure: there is no such policy; the message names the wrong part.
    """
    if text == "random":
        return None
    if text.endswith((".pt2", ".pt", ".pth")):
        return ExportedPolicy(_load_program(Path(text)), env, text)
    return _from_factory(text)


# A factory -------------------------------------------------------------------------------------------


def _from_factory(text: str) -> Any:
    module_name, colon, attribute = text.partition(":")
    if not colon or not module_name or not attribute:
        raise Failure(
            f"--policy: expected random, MODULE:FACTORY (such as my_policies:make_policy) or FILE.pt2, got {text!r}."
        )
    factory = _attribute(_import(module_name, text, "--policy"), module_name, attribute, "--policy")
    if not _is_factory(factory):
        raise Failure(
            f"--policy: {text} is of type {type(factory).__name__}, expected a function that returns the policy. Write "
            f"`def make(): return {attribute}` and name that."
        )
    try:
        policy = factory()
    except Exception as error:
        raise Failure(
            f"--policy: {text}() raised {brief(error)}. It is called without arguments and returns the policy "
            "(--debug shows where)."
        ) from error
    if policy is None or isinstance(policy, type) or not callable(policy):
        shown = policy is None or isinstance(policy, type)
        got = repr(policy) if shown else f"an object of type {type(policy).__name__}"
        raise Failure(
            f"--policy: {text}() returned {got}, expected a policy: a TensorDict module, an nn.Module, or a function "
            "of a TensorDict."
        )
    return policy


def load_object(text: str, option: str, example: str) -> Any:
    """What ``MODULE:NAME`` names; the module is found from the current folder.

    Args:
        text: of the command line.
        option: it was given for.
        example: for messages.

    Raises:
        Failure: there is no such module, or no such name in it.
    """
    module_name, colon, attribute = text.partition(":")
    if not colon or not module_name or not attribute:
        raise Failure(f"{option}: expected MODULE:NAME (such as {example}), got {text!r}.")
    return _attribute(_import(module_name, text, option), module_name, attribute, option)


def _import(name: str, text: str, option: str) -> Any:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does; the console script leaves it out
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise Failure(
                f"{option}: there is no module {error.name!r} (looked in {os.getcwd()} and among installed packages). "
                f"Check the name in {text!r}, without .py."
            ) from error
        raise Failure(f"{option}: importing {name!r} failed: {brief(error)} (--debug shows where).") from error
    except Exception as error:
        raise Failure(f"{option}: importing {name!r} failed: {brief(error)} (--debug shows where).") from error


def _is_factory(found: Any) -> bool:
    return callable(found) and not isinstance(found, nn.Module)


def _attribute(module: Any, module_name: str, path: str, option: str) -> Any:
    found = module
    for part in path.split("."):
        if not hasattr(found, part):
            public = [name for name, value in vars(module).items() if _is_factory(value) and not name.startswith("_")]
            raise Failure(
                f"{option}: module {module_name!r} has no {path!r}. It has: {', '.join(public) or 'no functions'}."
            )
        found = getattr(found, part)
    return found


# A saved program -------------------------------------------------------------------------------------


def _load_program(path: Path) -> torch.export.ExportedProgram:
    if not path.is_file():
        raise Failure(f"--policy: there is no file {str(path)!r}. Write one with torch.export.save(program, path).")
    try:
        return torch.export.load(path)
    except Exception as error:
        raise Failure(
            f"--policy: {str(path)!r} is no program saved by torch.export.save: {brief(error)}. Export the module: "
            "torch.export.save(torch.export.export(module, (example,)), path)."
        ) from error


class ExportedPolicy(TensorDictModuleBase):
    """A program of ``torch.export`` as a policy.

    Its inputs are read from the entries of the same names, its outputs become ``action``, ``output1``,
    ``output2``… The program sees the batch of environments in front; where there is a single environment
    without a batch and the program expects one dimension more, it sees a batch of one.

    Args:
        program: what ``torch.export.load`` returned.
        env: the environment to act in.
        name: what to call the program in messages.

    Raises:
        Failure: inputs are no entries of the environment, or their shapes or dtypes do not fit.
    """

    def __init__(self, program: torch.export.ExportedProgram, env: EnvBase, name: str) -> None:
        super().__init__()
        self._name = name
        if len(env.action_keys) != 1:
            raise Failure(
                f"--policy: {name} writes one action, and the environment takes {key_str(env.action_keys)}. Use "
                "MODULE:FACTORY with a TensorDict module."
            )
        self.num_args, names = _inputs(program, name)
        self.in_keys = cast(Any, names)  # tensordict types keys as str or tuples of one
        self.out_keys = cast(Any, [env.action_key])
        entries = {str(key): env.observation_spec[key] for key in env.observation_keys if isinstance(key, str)}
        unknown = [key for key in names if key not in entries]
        if unknown or not names:
            raise Failure(
                f"--policy: {name} has the inputs ({', '.join(names)}), and the environment the entries "
                f"({', '.join(sorted(entries))}). Name the arguments of forward() after entries, and export again."
            )
        expected = _input_values(program)
        missing = {len(value.shape) - entries[key].ndim for key, value in zip(names, expected, strict=True)}
        self.adds_batch = missing == {1} and env.ndim == 0
        for key, value in zip(names, expected, strict=True):
            self._check(key, value, entries[key], env)
        self.program = program.module()

    def _check(self, key: str, expected: Any, spec: Any, env: EnvBase) -> None:
        shape = [1, *spec.shape] if self.adds_batch else list(spec.shape)
        wanted = [size if isinstance(size, int) else "any" for size in expected.shape]
        if not _fits(wanted, shape):
            one = list(spec.shape[env.ndim :])
            takes_one = len(wanted) >= len(one) and _fits(wanted[len(wanted) - len(one) :], one)
            remedy = (
                "Export it with a first dimension that is dynamic: torch.export.export(module, (torch.zeros(2, ...),), "
                f"dynamic_shapes={{{key!r}: {{0: torch.export.Dim('batch')}}}})."
                if takes_one
                else "It was exported for another environment."
            )
            raise Failure(
                f"--policy: {self._name} takes {key!r} of shape {_shape(wanted)}, and "
                f"{count(env.numel(), 'environment')} give {_shape(shape)}. {remedy}"
            )
        if expected.dtype != spec.dtype:
            raise Failure(
                f"--policy: {self._name} takes {key!r} as {expected.dtype}, and the environment gives {spec.dtype}. "
                "Export it with an example of that dtype, and cast inside forward()."
            )

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Run the program; returns ``tensordict`` with its outputs."""
        inputs = [tensordict.get(key) for key in self.in_keys]
        if self.adds_batch:
            inputs = [value.unsqueeze(0) for value in inputs]
        outputs = self.program(
            *inputs[: self.num_args],
            **dict(zip(self.in_keys[self.num_args :], inputs[self.num_args :], strict=True)),
        )
        outputs = outputs if isinstance(outputs, (tuple, list)) else (outputs,)
        for i, value in enumerate(outputs):
            if not isinstance(value, torch.Tensor):
                raise Failure(
                    f"--policy: {self._name} returned a {type(value).__name__} as output {i}, expected tensors.",
                    status=1,
                )
            tensordict.set(f"output{i}" if i else self.out_keys[0], value.squeeze(0) if self.adds_batch else value)
        return tensordict


def _inputs(program: torch.export.ExportedProgram, name: str) -> tuple[int, list[str]]:
    """How many inputs go by position, and the names of all."""
    signature = program.module_call_graph[0].signature
    placeholders = [str(placeholder) for placeholder in program.graph_signature.user_inputs]
    if signature is None:
        raise Failure(f"--policy: {name} does not say what its inputs are. Export it again.")
    args, kwargs = tree_unflatten(placeholders, signature.in_spec)
    if not all(isinstance(value, str) for value in (*args, *kwargs.values())):
        raise Failure(
            f"--policy: {name} takes nested inputs, and a policy gets one tensor for each entry. Export a module "
            "whose forward() has an argument for each."
        )
    names = getattr(signature, "forward_arg_names", None) or placeholders
    return len(args), [*names[: len(args)], *map(str, kwargs)]


def _input_values(program: torch.export.ExportedProgram) -> list[Any]:
    """The example of each input, with symbols for sizes that are dynamic."""
    wanted = set(program.graph_signature.user_inputs)
    return [node.meta["val"] for node in program.graph.nodes if node.op == "placeholder" and node.name in wanted]


def _fits(wanted: list[Any], shape: list[int]) -> bool:
    return len(wanted) == len(shape) and all(w in ("any", s) for w, s in zip(wanted, shape, strict=True))


def _shape(sizes: list[Any]) -> str:
    return f"[{', '.join(map(str, sizes))}]"
