"""The arguments of all commands. Imports nothing heavy."""

from __future__ import annotations

import argparse
import difflib
import json
import re
from pathlib import Path
from typing import Any, NoReturn

import rollwright

_COLLECT = """\
Collect frames from a gymnasium environment into a dataset.

The dataset is a memory-mapped TensorDict [environments, time] with a description in dataset.json;
rollwright.data.datasets.load_dataset(DIR) reads it. Ctrl-C ends the collection after the current step
and keeps what was collected.

With --workers N, N processes collect, each in --num-envs environments of its own. With --sync (the
default), the dataset has a row for each environment, all of one length, and depends on the seed alone.
With --async, no worker waits for another: the dataset is one row of complete episodes, in the order in
which they ended. Ctrl-C ends the collection after the current batch.
"""

_POLICIES = """\
policies:
  random            actions drawn from the action space
  MODULE:FACTORY    a function that takes no arguments and returns the policy: a TensorDict module, a
                    torch.nn.Module whose forward() takes entries of the environment by name, or any
                    function of a TensorDict. MODULE is found from the current folder.
  FILE.pt2          a program saved by torch.export.save. Its inputs are named after entries of the
                    environment ("observation"); its outputs are "action", "output1", "output2", ...
                    It is called with the batch of environments in front: export it with a dynamic
                    first dimension. Discrete actions are one-hot unless --categorical-actions.
                    It is run as a program is, and may run any code: name files that you trust.

example:
  rollwright collect CartPole-v1 --frames 20000 --num-envs 8 --seed 0 --output runs/cartpole
  rollwright inspect runs/cartpole --plot cartpole.png
"""

_INSPECT = """\
Show what a dataset or a saved replay buffer holds: entries, episodes, lengths and returns.

--check reads all frames and tests, as far as the entries are there:
  next.done is next.terminated | next.truncated
  a trajectory id ends after a done frame, and is used nowhere else
  what is below next is what the frame that follows in the trajectory has at its root
  is_init marks first steps and no others; step_count begins at 0 and leaves out no number
"""

_CHAT_COLLECT = """\
Collect conversations of a language model about prompts, into a folder.

Each conversation is written as it happens, and what was written survives a kill: the same command goes on where it was,
and collects each prompt once. Ctrl-C ends the collection after the next conversation; a second one ends it at once.

rollwright inspect DIR shows the conversations, with what the model wrote in colour; rollwright.data.llm.Trace reads
them.
"""

_CHAT_EXAMPLE = """\
engines:
  transformers      the model runs in this process, or in each worker (the default)
  vllm              vLLM runs it; needs vLLM
  http://HOST:PORT  a server of vLLM (vllm serve) runs it
  MODULE:FACTORY    a function without arguments that returns the policy, such as a TransformersWrapper

example:
  rollwright chat-collect --model models/tiny --data prompts.jsonl --reward rewards:right --output runs/first
  rollwright inspect runs/first
"""

_CHAT_CHECK = """\
Run an environment of conversations against a scripted model, and say what is wrong.

ENV is MODULE:NAME: a class that is made from a row and has a method reply, or a function that makes a ChatEnv or an
LLMEnv. It is run with answers that a model could write: none at all, long ones, control tokens, tool calls. Checked are
what it returns, that it ends, that two conversations do not share anything, that it can be saved and sent to a worker,
and how long it takes. The status is 1 where something is wrong; what is unusual and may be meant is a note.
"""

_BENCH = """\
Measure a collector beside a loop written by hand, on this machine, for an environment.

Both step the same environment with the same small policy (two layers of 64; categorical or normal actions) on one
thread, and store the same entries. They take turns, and the table has medians; what is in brackets are quartiles.
"""


_WATCH = """\
Show an environment with a policy, or the images of a dataset.

With --output, a video is written. Without it, the environment draws into a window, where there is a display. Policies
act without exploring.
"""

_WATCH_EXAMPLE = """\
example:
  rollwright watch CartPole-v1 --policy my_policies:make_policy --output cartpole.gif
  rollwright watch runs/pong --output pong.mp4
"""

_TOP = """\
Show the collectors that run on this machine: where their time goes, which worker is the slowest, what you can do, what
is queued, how old the weights are, how full the buffer is.

A collector reports itself once a second where its program was started with ROLLWRIGHT_TOP=1 in its environment, or
where it was made with progress=True. You see your own collectors only. The view ends when they have ended; Ctrl-C ends
it before. Without a terminal, it is printed once.
"""

_TOP_EXAMPLE = """\
example:
  ROLLWRIGHT_TOP=1 python train.py &
  rollwright top
"""

_JOIN = """\
Run workers of a collector that is elsewhere, until it ends.

The collector was made with backend="tcp", backend_options={"launcher": "join", "address": "HOST:PORT"}. Both sides know
a secret: the environment variable ROLLWRIGHT_SECRET. They need the same versions of Python, torch, tensordict and
rollwright, and this machine what the environment and the policy import.
"""


class _Parser(argparse.ArgumentParser):
    """Names the most similar command or option where one is misspelt."""

    def error(self, message: str) -> NoReturn:
        """Print the usage and the message, and exit."""
        wrong = re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message)
        if wrong is not None:
            near = difflib.get_close_matches(wrong[1], re.findall(r"[\w-]+", wrong[2]), 1)
            message += f". Did you mean {near[0]!r}?" if near else ""
        super().error(message)


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line.

    Example:
        >>> build_parser().parse_args(["collect", "CartPole-v1", "--frames", "2e4"]).frames
        20000
    """
    parser = _Parser(prog="rollwright", description="Collects experience for reinforcement learning.")
    parser.add_argument("--version", action="version", version=f"rollwright {rollwright.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for add in (
        _add_collect,
        _add_inspect,
        _add_watch,
        _add_top,
        _add_bench,
        _add_join,
        _add_chat_collect,
        _add_chat_check,
    ):
        add(commands)
    return parser


def _command(commands: Any, name: str, about: str, description: str, epilog: str | None = None) -> Any:
    options = {"description": description, "epilog": epilog, "formatter_class": argparse.RawDescriptionHelpFormatter}
    parser = commands.add_parser(name, help=about, **options)
    parser.add_argument("--debug", action="store_true", help="show the whole traceback of an error")
    return parser


def _add_collect(commands: Any) -> None:
    parser = _command(
        commands, "collect", "collect frames from a gymnasium environment into a dataset", _COLLECT, _POLICIES
    )
    add = parser.add_argument
    add("env_id", metavar="ENV_ID", help="id of the environment, such as CartPole-v1")
    add("--frames", type=_count, default=10_000, metavar="N", help="frames to collect in all (default 10000)")
    add(
        "--frames-per-batch",
        type=_count,
        metavar="N",
        help="frames collected between two writes to disk (default: at most 500 of a process)",
    )
    add("--num-envs", type=_count, default=1, metavar="N", help="environments stepped together (default 1)")
    add("--workers", type=_count, metavar="N", help="collect in N processes (default: in this one)")
    either = parser.add_mutually_exclusive_group()
    either.add_argument("--sync", action="store_true", default=None, help="workers: in step (the default)")
    either.add_argument("--async", action="store_false", dest="sync", help="workers: each by itself, whole episodes")
    add("--policy", default="random", metavar="POLICY", help="random, MODULE:FACTORY or FILE.pt2, see below")
    add("--seed", type=_seed, metavar="S", help="of environments and policy (default: drawn, and written down)")
    add("--output", type=Path, metavar="DIR", help="folder of the dataset (default: rollwright-data/ENV_ID)")
    add("--format", choices=["tensordict", "minari"], default="tensordict", help="(default tensordict)")
    add(
        "--dataset-id",
        metavar="ID",
        help="minari: id of the dataset (default: rollwright/<env>/<policy>-v0)",
    )
    add("--max-frames-per-traj", type=_count, metavar="N", help="truncate trajectories after N frames")
    add("--env-kwargs", type=_json_object, default={}, metavar="JSON", help="arguments for the environment")
    add("--categorical-actions", action="store_true", help="discrete actions as integers, not one-hot")
    add("--device", metavar="DEVICE", help="where environment data and policy live, such as cuda")
    add("--overwrite", action="store_true", help="replace a dataset that is there")
    add("--quiet", action="store_true", help="print errors only")


def _add_inspect(commands: Any) -> None:
    parser = _command(commands, "inspect", "show what a dataset holds", _INSPECT)
    parser.add_argument(
        "path",
        type=Path,
        metavar="PATH",
        help="a dataset, a folder written by TensorDict.memmap, a TensorDict written by torch.save, or a trace of "
        "conversations",
    )
    parser.add_argument(
        "--check", action="store_true", help="test every frame; the status is 1 where something is wrong"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw returns and lengths into a picture")
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="write a page that shows it, which needs nothing else"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--allow-pickle", action="store_true", help="load pickled objects, which can run any code: if you trust PATH"
    )

    parser.add_argument(
        "--conversations", type=_count, default=3, metavar="N", help="of a trace: how many to show (default 3)"
    )
    parser.add_argument("--prompt", type=int, metavar="N", help="of a trace: show those from this prompt of the data")


def _add_chat_collect(commands: Any) -> None:
    about = "collect conversations of a language model into a folder"
    add = _command(commands, "chat-collect", about, _CHAT_COLLECT, _CHAT_EXAMPLE).add_argument
    add("--model", metavar="DIR", help="folder or name of a model of transformers")
    add("--data", type=Path, required=True, metavar="FILE", help="prompts: a file with a JSON object a line")
    add("--reward", action="append", default=[], metavar="MODULE:FUNCTION", help="a reward function; may be repeated")
    add("--output", type=Path, required=True, metavar="DIR", help="folder of the conversations")
    add("--engine", default="transformers", metavar="ENGINE", help="what runs the model, see below")
    add("--env", metavar="MODULE:CLASS", help="an environment that replies; it is made from a row")
    add("--tool", action="append", default=[], metavar="MODULE:FUNCTION", help="a tool; may be repeated")
    add("--max-turns", type=_count, metavar="N", help="answers in a conversation at most")
    add("--repeats", type=_count, default=1, metavar="N", help="conversations about each prompt (default 1)")
    add("--batch", type=_count, default=8, metavar="N", help="conversations side by side (default 8)")
    add("--workers", type=_count, metavar="N", help="collect in N processes (default: in this one)")
    add("--max-new-tokens", type=_count, default=256, metavar="N", help="tokens of an answer at most (default 256)")
    add("--temperature", type=float, default=1.0, metavar="T", help="of sampling (default 1.0; 0: the most probable)")
    add("--system-prompt", metavar="TEXT", help="content of a first message")
    add("--text", action="store_true", help="prompts are read as they are, without the chat template")
    add("--data-key", metavar="NAME", help="column of the prompt (default: query, prompt, messages or text)")
    add("--seed", type=_seed, metavar="S", help="of order and samples (default: drawn, and written down)")
    add(
        "--on-error",
        choices=["drop", "raise"],
        default="drop",
        help="a tool, a reward or an environment raises: leave the conversation out (the default), or end the run",
    )
    add("--quiet", action="store_true", help="print errors only")


def _add_chat_check(commands: Any) -> None:
    about = "run an environment of conversations against a scripted model"
    add = _command(commands, "chat-check", about, _CHAT_CHECK).add_argument
    add("env", metavar="ENV", help="MODULE:NAME of the environment")
    add("--data", type=Path, metavar="FILE", help="rows: a file with a JSON object a line (default: one row, a query)")
    add("--answers", type=Path, metavar="FILE", help="a file with an answer of the model a line, as JSON strings")
    add("--max-turns", type=_count, default=20, metavar="N", help="answers in a conversation at most (default 20)")
    add("--json", action="store_true", help="print JSON")


def _add_bench(commands: Any) -> None:
    add = _command(commands, "bench", "measure a collector beside a loop written by hand", _BENCH).add_argument
    add("env_id", metavar="ENV_ID", nargs="?", default="CartPole-v1", help="environment (default CartPole-v1)")
    add("--num-envs", type=_count, default=1, metavar="N", help="environments stepped together (default 1)")
    add("--frames", type=_count, default=20_000, metavar="N", help="frames of each way (default 20000)")
    add("--env-kwargs", type=_json_object, default={}, metavar="JSON", help="arguments for the environment")
    add("--compile", action="store_true", help="measure a collector with compile_policy=True, too")
    add("--json", action="store_true", help="print JSON")


def _add_watch(commands: Any) -> None:
    about = "show an environment or a dataset, in a window or as a video"
    add = _command(commands, "watch", about, _WATCH, _WATCH_EXAMPLE).add_argument
    add("what", metavar="ENV_ID|DATASET", help="id of an environment, a dataset with images, or minari:NAME")
    add("--policy", default="random", metavar="POLICY", help="random, MODULE:FACTORY or FILE.pt2, see collect --help")
    add(
        "--output", type=Path, metavar="FILE", help="an .mp4 or .gif file (default: a window, where there is a display)"
    )
    add("--episodes", type=_count, default=1, metavar="N", help="episodes to show (default 1)")
    add("--max-frames", type=_count, default=1000, metavar="N", help="frames of an episode at most (default 1000)")
    add("--fps", type=_count, metavar="N", help="frames per second (default: what the environment says, or 30)")
    add("--seed", type=_seed, metavar="S", help="of environment and policy (default: drawn)")
    add("--env-kwargs", type=_json_object, default={}, metavar="JSON", help="arguments for the environment")
    add("--categorical-actions", action="store_true", help="discrete actions as integers, not one-hot")


def _add_top(commands: Any) -> None:
    add = _command(commands, "top", "show what running collectors do", _TOP, _TOP_EXAMPLE).add_argument
    add("pid", metavar="PID", type=_count, nargs="?", help="of the process to show (default: all)")
    add("--json", action="store_true", help="print JSON, once")


def _add_join(commands: Any) -> None:
    add = _command(commands, "join", "run workers of a collector on another machine", _JOIN).add_argument
    add("address", metavar="HOST:PORT", help="where the collector listens")
    add("--secret-file", type=Path, metavar="FILE", help="a file with the secret (default: ROLLWRIGHT_SECRET)")
    add("--name", metavar="NAME", help="of this machine in messages (default: its host name)")
    add("--timeout", type=_count, default=60, metavar="S", help="seconds to wait for the collector (default 60)")


def _count(text: str) -> int:
    """A whole number of at least 1; 2e4 and 20_000 pass."""
    try:
        value = float(text)
        number = int(value)
    except (ValueError, OverflowError):
        value, number = 0.5, 0
    if number != value or number < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return number


def _seed(text: str) -> int:
    if not text.isdecimal() or int(text) >= 2**32:
        raise argparse.ArgumentTypeError(f"expected a whole number from 0 to 4294967295, got {text!r}")
    return int(text)


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"expected a JSON object such as '{{\"g\": 9.81}}', got {text!r}: {error}"
        ) from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"expected a JSON object such as '{{\"g\": 9.81}}', got {text!r}")
    return value
