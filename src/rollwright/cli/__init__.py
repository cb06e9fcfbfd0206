"""The command line: ``rollwright collect``, ``inspect``, ``watch``, ``bench``, ``join`` and others.

Nothing heavy is imported before the arguments are understood, so that ``--help`` is quick.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from rollwright.cli.errors import Failure, brief
from rollwright.cli.parser import build_parser

__all__ = ["main"]

INTERRUPTED = 130  # what shells report for a program that Ctrl-C ended


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: the arguments, without the program's name; None for those of the process.

    Returns:
        The exit status: 0; 1 when something failed; 2 when what was asked cannot be done; 130
        when Ctrl-C ended it (143 for SIGTERM).

    Example:
        >>> main(["--version"])
        rollwright ...
        0
    """
    try:
        arguments = build_parser().parse_args(argv)
    except SystemExit as stop:  # argparse leaves this way, after --help too
        return int(stop.code or 0)
    try:
        command = importlib.import_module(f"rollwright.cli.{arguments.command.replace('-', '.')}")
        status = int(command.run(arguments))
        print(end="", flush=True)  # where the reader of a pipe has left, the error comes here, and not after the end
        return status
    except KeyboardInterrupt:
        print("\nrollwright: interrupted, nothing was saved", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader of a pipe, such as `head`, has left
        importlib.import_module("rollwright.cli.console").drop_stdout()
        return 0
    except Failure as failure:
        if arguments.debug:
            raise
        print(f"rollwright {arguments.command}: {failure}", file=sys.stderr)
        return failure.status
    except Exception as error:
        if arguments.debug:
            raise
        print(f"rollwright {arguments.command}: {brief(error)} (--debug shows where)", file=sys.stderr)
        return 1
