"""``rollwright completion``: a script that lets a shell complete commands and options, made from the parser."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping

from rollwright.cli.parser import build_parser

SHELLS = ("bash", "zsh", "fish")

_BASH = """\
_rollwright() {{
    local cur="${{COMP_WORDS[COMP_CWORD]}}" prev="${{COMP_WORDS[COMP_CWORD-1]}}" command="" word words=""
    for word in "${{COMP_WORDS[@]:1:$((COMP_CWORD-1))}}"; do
        case "$word" in
            {commands}) command="$word"; break ;;
        esac
    done
    case "$command,$prev" in
{cases}
    esac
    COMPREPLY=($(compgen -W "$words" -- "$cur"))
}}
complete -o default -F _rollwright rollwright
"""
_ZSH = "autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit\n"  # zsh runs that of bash


def run(arguments: argparse.Namespace) -> int:
    """Print the script; returns the exit status."""
    commands = _commands(build_parser())
    if arguments.shell == "fish":
        print("\n".join(_fish(commands)))
    else:
        print((_ZSH if arguments.shell == "zsh" else "") + _bash(commands), end="")
    return 0


def _commands(parser: argparse.ArgumentParser) -> Mapping[str, argparse.ArgumentParser]:
    found = next(action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    commands: Mapping[str, argparse.ArgumentParser] = found.choices
    return commands


def _options(command: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    return (action for action in command._actions if action.option_strings)


def _choices(action: argparse.Action) -> str:
    return " ".join(map(str, action.choices or ()))


def _bash(commands: Mapping[str, argparse.ArgumentParser]) -> str:
    cases = [f',*) words="{" ".join(commands)} --help --version" ;;']
    for name, command in commands.items():
        free = []  # options whose value is a file, or anything else: the shell offers files
        for action in _options(command):
            patterns = [f"{name},{option}" for option in action.option_strings]
            if action.choices:
                cases.append(f'{"|".join(patterns)}) words="{_choices(action)}" ;;')
            elif action.nargs != 0:
                free += patterns
        if free:
            cases.append(f"{'|'.join(free)}) ;;")
        values = [_choices(action) for action in command._actions if action.choices and not action.option_strings]
        options = [option for action in _options(command) for option in action.option_strings]
        cases.append(f'{name},*) words="{" ".join([*values, *options])}" ;;')
    return _BASH.format(commands="|".join(commands), cases="\n".join(f"        {case}" for case in cases))


def _fish(commands: Mapping[str, argparse.ArgumentParser]) -> Iterator[str]:
    yield "complete -c rollwright -n __fish_use_subcommand -l help -l version"
    for name, command in commands.items():
        about = (command.description or "").strip().split(". ")[0].split(".\n")[0].replace("\n", " ")
        yield f"complete -c rollwright -f -n __fish_use_subcommand -a {name} -d {_quoted(about)}"
        for action in command._actions:
            line = f"complete -c rollwright -n '__fish_seen_subcommand_from {name}'"
            if action.option_strings:
                names = [option.removeprefix("--") for option in action.option_strings if option.startswith("--")]
                line += "".join(f" -l {name}" for name in names)
                line += "" if action.nargs == 0 else " -r"
            elif not action.choices:
                continue
            line += f" -f -a {_quoted(_choices(action))}" if action.choices else ""
            yield f"{line} -d {_quoted(action.help or '')}"


def _quoted(text: str) -> str:
    text = " ".join(text.split()).replace("\\", "\\\\").replace("'", "\\'")
    return f"'{text}'"
