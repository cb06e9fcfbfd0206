from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from rollwright.cli.errors import Failure
from rollwright.cli.policies import load_policy
from rollwright.data.datasets import load_dataset
from rollwright.envs import GymEnv


class Greedy(nn.Module):
    """Logits of CartPole's two actions, and the better one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.linear(observation)
        return nn.functional.one_hot(logits.argmax(-1), 2), logits


class Index(Greedy):
    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return self.linear(observation).argmax(-1)


class Misnamed(Greedy):
    def forward(self, state: torch.Tensor) -> torch.Tensor:
        return self.linear(state)


class Nested(Greedy):
    def forward(self, entries: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.linear(entries["observation"])


class Dictionary(Greedy):
    def forward(self, observation: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"action": self.linear(observation)}


BATCH = torch.export.Dim("batch")
DYNAMIC = {"observation": {0: BATCH}}


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saved programs, by the names that the tests use."""
    folder = tmp_path_factory.mktemp("programs")
    torch.manual_seed(0)
    greedy = Greedy()
    many, one = torch.zeros(2, 4), torch.zeros(4)
    exported = {
        "dynamic": torch.export.export(greedy, (many,), dynamic_shapes=DYNAMIC),
        "keyword": torch.export.export(greedy, (), {"observation": many}, dynamic_shapes=DYNAMIC),
        "static": torch.export.export(greedy, (torch.zeros(1, 4),)),
        "single": torch.export.export(greedy, (one,)),
        "index": torch.export.export(Index(), (many,), dynamic_shapes=DYNAMIC),
        "double": torch.export.export(Greedy().double(), (many.double(),), dynamic_shapes=DYNAMIC),
        "misnamed": torch.export.export(Misnamed(), (many,)),
        "nested": torch.export.export(Nested(), ({"observation": many},)),
        "dictionary": torch.export.export(Dictionary(), (one,)),
    }
    for name, program in exported.items():
        torch.export.save(program, folder / f"{name}.pt2")
    torch.save(greedy.state_dict(), folder / "greedy.pt")
    return folder


# Programs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "num_envs"), [("dynamic", 1), ("dynamic", 3), ("keyword", 3), ("static", 1), ("single", 1)]
)
def test_program_acts_as_its_module(run, tmp_path, programs, name, num_envs):
    out = tmp_path / "out"
    result = run(
        *("collect", "CartPole-v1", "--frames", 60, "--num-envs", num_envs, "--output", out),
        *("--policy", programs / f"{name}.pt2"),
    )
    assert result.status == 0, result.err
    frames = load_dataset(out)
    torch.manual_seed(0)
    actions, logits = Greedy()(frames["observation"])
    assert torch.equal(frames["action"], actions)
    torch.testing.assert_close(frames["output1"], logits)


@pytest.mark.parametrize("more", [[], ["--categorical-actions"]])
def test_program_of_integers(run, tmp_path, programs, more):
    arguments = ["collect", "CartPole-v1", "--frames", 30, "--num-envs", 2, "--policy", programs / "index.pt2"]
    assert run(*arguments, "--output", tmp_path / "out", *more).status == 0
    frames = load_dataset(tmp_path / "out")
    assert frames["action"].shape == (2, 15)
    torch.manual_seed(0)
    _, index = Greedy(), Index()  # as the programs were made
    assert torch.equal(frames["action"], index(frames["observation"]))


@pytest.mark.parametrize(
    ("name", "num_envs", "message"),
    [
        ("static", 3, "takes 'observation' of shape [1, 4], and 3 environments give [3, 4]. Export it with a first"),
        ("single", 3, "takes 'observation' of shape [4], and 3 environments give [3, 4]"),
        ("double", 1, "as torch.float64, and the environment gives torch.float32"),
        ("misnamed", 1, "has the inputs (state), and the environment the entries (observation)"),
        ("nested", 1, "nested inputs"),
        ("missing", 1, "there is no file"),
    ],
)
def test_programs_that_do_not_fit(run, tmp_path, programs, name, num_envs, message):
    result = run(
        *("collect", "CartPole-v1", "--num-envs", num_envs, "--output", tmp_path / "out"),
        *("--policy", programs / f"{name}.pt2"),
    )
    assert result.status == 2
    assert message in result.err
    assert len(result.err.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_program_of_another_environment(programs):
    with pytest.raises(Failure, match=r"takes 'observation' of shape \[any, 4\].* give \[1, 3\]. It was exported for"):
        load_policy(str(programs / "dynamic.pt2"), GymEnv("Pendulum-v1"))


def test_program_that_returns_a_dictionary(run, tmp_path, programs):
    policy = programs / "dictionary.pt2"
    result = run("collect", "CartPole-v1", "--policy", policy, "--output", tmp_path / "out")
    assert result.status == 1
    assert "returned a dict as output 0" in result.err


@pytest.mark.parametrize("name", ["greedy.pt", "text.pt2"])
def test_files_that_are_no_programs(run, tmp_path, programs, name):
    (programs / "text.pt2").write_text("hello")
    result = run("collect", "CartPole-v1", "--policy", programs / name, "--output", tmp_path / "out")
    assert result.status == 2
    assert "is no program saved by torch.export.save" in result.err
    assert len(result.err.splitlines()) == 1


# Factories -----------------------------------------------------------------------------------------


def test_factory_returns_a_module_with_named_inputs(run, tmp_path, module):
    name = module(
        """
import torch
class Left(torch.nn.Module):
    def forward(self, observation):
        left = torch.tensor([1, 0]).expand(*observation.shape[:-1], 2)
        return left, observation.sum(-1)
class group:
    @staticmethod
    def make():
        return Left()
"""
    )
    for factory in ("Left", "group.make"):
        out = tmp_path / factory
        result = run(
            "collect", "CartPole-v1", "--frames", 40, "--num-envs", 2, "--output", out, "--policy", f"{name}:{factory}"
        )
        assert result.status == 0, result.err
        frames = load_dataset(out)
        assert frames["action"][..., 0].all()
        torch.testing.assert_close(frames["output1"], frames["observation"].sum(-1))


BROKEN = {
    "no module": ("nowhere_to_be_found:make", "there is no module 'nowhere_to_be_found'"),
    "no package": ("nowhere.to.be.found:make", "there is no module 'nowhere'"),
    "no attribute": ("{}:missing", "has no 'missing'. It has: make_none, make_number, make_class, needs, fails"),
    "no colon": ("{}", "expected random, MODULE:FACTORY"),
    "nothing behind the colon": ("{}:", "expected random, MODULE:FACTORY"),
    "nothing before the colon": (":make", "expected random, MODULE:FACTORY"),
    "not callable": ("{}:number", "is of type int, expected a function that returns the policy"),
    "a module instead of a factory": ("{}:module", "is of type Linear, expected a function"),
    "needs arguments": ("{}:needs", "missing 1 required positional argument: 'size'"),
    "raises": ("{}:fails", "() raised ValueError: no weights here. It is called without arguments"),
    "returns None": ("{}:make_none", "() returned None, expected a policy"),
    "returns a number": ("{}:make_number", "() returned an object of type int, expected a policy"),
    "returns a class": ("{}:make_class", "() returned <class 'dict'>, expected a policy"),
}


@pytest.mark.parametrize(("policy", "message"), BROKEN.values(), ids=BROKEN.keys())
def test_broken_factories(run, tmp_path, module, policy, message):
    name = module(
        """
import torch as _torch
number, module = 3, _torch.nn.Linear(4, 2)
def make_none(): return None
def make_number(): return 3
def make_class(): return dict
def needs(size): return size
def fails(): raise ValueError("no weights\\nhere")
"""
    )
    result = run("collect", "CartPole-v1", "--policy", policy.format(name), "--output", tmp_path / "out")
    assert result.status == 2
    assert message in result.err
    assert len(result.err.splitlines()) == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import not_installed_anywhere", "failed: ModuleNotFoundError: No module named 'not_installed_anywhere'"),
        ("def make(:", "failed: SyntaxError"),
        ("1 / 0", "failed: ZeroDivisionError: division by zero"),
    ],
)
def test_modules_that_do_not_import(run, tmp_path, module, text, message):
    name = module(text)
    result = run("collect", "CartPole-v1", "--policy", f"{name}:make", "--output", tmp_path / "out")
    assert result.status == 2
    assert f"importing '{name}'" in result.err
    assert message in result.err


def test_policy_that_does_not_fit_the_environment(run, tmp_path, module):
    name = module(
        """
import torch
class Wrong(torch.nn.Module):
    def forward(self, pixels, speed): return pixels
"""
    )
    result = run("collect", "CartPole-v1", "--policy", f"{name}:Wrong", "--output", tmp_path / "out")
    assert result.status == 2
    assert "Wrong.forward takes (pixels, speed)" in result.err
    assert not (tmp_path / "out").exists()
