"""``rollwright completion``: bash completes what the parser takes."""

from __future__ import annotations

import subprocess

import pytest

from rollwright.cli.completion import SHELLS, _commands
from rollwright.cli.parser import build_parser

COMPLETE = """
COMP_WORDS=({words} "{last}"); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
_rollwright
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.fixture
def complete(run):
    def of(words, last):
        script = run("completion", "bash").out + COMPLETE.format(words=words, last=last)
        done = subprocess.run(["bash", "-u", "-c", script], capture_output=True, text=True, timeout=20, check=True)
        assert not done.stderr
        return [word for word in done.stdout.split("\n") if word]

    return of


def test_commands_are_completed(complete):
    assert complete("rollwright", "") == [*_commands(build_parser()), "--help", "--version"]
    assert complete("rollwright", "ch") == ["chat-collect", "chat-check"]


@pytest.mark.parametrize(
    ("words", "last", "expected"),
    [
        ("rollwright collect CartPole-v1", "--num", ["--num-envs"]),
        ("rollwright collect CartPole-v1 --format", "", ["tensordict", "minari"]),
        ("rollwright collect CartPole-v1 --output", "", []),  # the shell completes files
        ("rollwright collect CartPole-v1 --overwrite", "--q", ["--quiet"]),
        ("rollwright chat-collect --on-error", "d", ["drop"]),
        ("rollwright completion", "z", ["zsh"]),
    ],
)
def test_options_and_their_values_are_completed(complete, words, last, expected):
    assert complete(words, last) == expected


def test_every_option_is_in_every_script(run):
    for shell in SHELLS:
        text = run("completion", shell).out
        for name, command in _commands(build_parser()).items():
            for option in (option for action in command._actions for option in action.option_strings):
                shown = f"from {name}' -l {option[2:]}" if shell == "fish" and option.startswith("--") else option
                assert shown in text or option in ("-h", "--help"), (shell, name, option)


def test_zsh_runs_the_script_of_bash(run):
    bash, zsh = run("completion", "bash").out, run("completion", "zsh").out
    assert zsh.endswith(bash)
    assert "bashcompinit" in zsh


def test_an_unknown_shell_is_refused(run):
    assert "Did you mean 'fish'" in run("completion", "fsh").err
