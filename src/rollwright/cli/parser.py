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

The dataset is a memory-mapped TensorDict [environments, time] with a description in dataset.json.
Load it with rollwright.data.datasets.load_dataset(DIR). Ctrl-C ends the collection after the current step
and keeps what was collected.

With --workers N, N processes collect, each in --num-envs environments of its own. With --sync (the
default), the dataset has a row for each environment, all of one length, and depends on the seed alone.
With --async, no worker waits for another: the dataset is one row of complete episodes, in the order in
which they end. Ctrl-C ends the collection after the current batch.
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
                    It can run any code: name files that you trust.

example:
  rollwright collect CartPole-v1 --frames 20000 --num-envs 8 --seed 0 --output runs/cartpole
  rollwright inspect runs/cartpole --plot cartpole.png
"""

_INSPECT = """\
Show what a dataset or a saved replay buffer holds: entries, episodes, lengths and returns.

--check reads all frames and tests the entries that are there:
  next.done is next.terminated | next.truncated
  a trajectory id ends after a done frame, and is not used again
  "next" holds what the following frame of the trajectory has at its root
  is_init marks the first step of each trajectory, and no other
  step_count begins at 0 and goes up by 1
"""

_CHAT_COLLECT = """\
Collect conversations of a language model about prompts, into a folder.

Each conversation is written as it happens. If the run is interrupted or killed, the same command continues it, and
collects each prompt once. Ctrl-C ends the collection after the next conversation; a second Ctrl-C ends it at once.

rollwright inspect DIR shows the conversations, with the text of the model in colour. Load them with
rollwright.data.llm.Trace.
"""

_CHAT_EXAMPLE = """\
engines:
  transformers      the model runs in this process, or in each worker (the default)
  vllm              vLLM runs it; needs vLLM
  http://HOST:PORT  a server of vLLM (vllm serve) runs it
  MODULE:FACTORY    a function that takes no arguments and returns the policy, such as a TransformersWrapper

example:
  rollwright chat-collect --model models/tiny --data prompts.jsonl --reward rewards:right --output runs/first
  rollwright inspect runs/first
"""

_CHAT_CHECK = """\
Run an environment of conversations against a scripted model, and report what is wrong.

ENV is MODULE:NAME: a class whose constructor takes a row and that has a method reply, or a function that returns a
ChatEnv or an LLMEnv. The scripted model answers as a model can: not at all, at length, with control tokens, with tool
calls. The command checks what the environment returns, that it ends, that conversations do not share data, that it can
be saved and sent to a worker, and how long it takes. The exit status is 1 if something is wrong. Unusual behavior that
you may intend is a note.
"""

_BENCH = """\
Compare the speed of a collector with that of a loop written by hand, for an environment, on this machine.

Both step the same environment with the same small policy (two layers of 64 units) on one thread, and store the same
entries. They take turns. The table shows medians, with quartiles in brackets.
"""


_WATCH = """\
Show a policy in an environment, or the images of a dataset.

With --output, the command writes a video. Without it, the environment opens a window, which needs a display. The policy
does not explore.
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
Run workers for a collector on another machine, until the collector ends.

Make the collector with backend="tcp", backend_options={"launcher": "join", "address": "HOST:PORT"}. Set the environment
variable ROLLWRIGHT_SECRET to the same secret on both machines. Both need the same versions of Python, torch, tensordict
and rollwright, and the packages that your environment and your policy import.
"""


_COMPLETION = """\
Print a script that lets your shell complete commands and options.

bash: add this line to ~/.bashrc
  eval "$(rollwright completion bash)"
zsh: add this line to ~/.zshrc
  eval "$(rollwright completion zsh)"
fish:
  rollwright completion fish > ~/.config/fish/completions/rollwright.fish
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
    parser = _Parser(prog="rollwright", description="Collect experience for reinforcement learning.")
    parser.add_argument("--version", action="version", version=f"rollwright {rollwright.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for add in (
        *(_add_collect, _add_inspect, _add_watch, _add_top, _add_bench, _add_join, _add_chat_collect),
        *(_add_chat_check, _add_completion),
    ):
        add(commands)
    return parser


def _command(commands: Any, name: str, about: str, description: str, epilog: str | None = None) -> Any:
    options = {"description": description, "epilog": epilog, "formatter_class": argparse.RawDescriptionHelpFormatter}
    parser = commands.add_parser(name, help=about, **options)
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


def _add_collect(commands: Any) -> None:
    parser = _command(
        commands, "collect", "collect frames from a gymnasium environment into a dataset", _COLLECT, _POLICIES
    )
    add = parser.add_argument
    add("env_id", metavar="ENV_ID", help="id of the environment, such as CartPole-v1")
    add("--frames", type=_count, default=10_000, metavar="N", help="number of frames to collect (default 10000)")
    add(
        "--frames-per-batch",
        type=_count,
        metavar="N",
        help="frames collected between two writes to disk (default: at most 500 of a process)",
    )
    add("--num-envs", type=_count, default=1, metavar="N", help="environments stepped together (default 1)")
    add("--workers", type=_count, metavar="N", help="collect in N processes (default: in this one)")
    either = parser.add_mutually_exclusive_group()
    either.add_argument(
        "--sync",
        action="store_true",
        default=None,
        help="with workers: all take the same number of steps (the default)",
    )
    either.add_argument(
        "--async", action="store_false", dest="sync", help="with workers: none waits for another; complete episodes"
    )
    add("--policy", default="random", metavar="POLICY", help="random, MODULE:FACTORY or FILE.pt2, see below")
    add("--seed", type=_seed, metavar="S", help="seed of environments and policy (default: random; it is saved)")
    add("--output", type=Path, metavar="DIR", help="folder of the dataset (default: rollwright-data/ENV_ID)")
    add("--format", choices=["tensordict", "minari"], default="tensordict", help="of the dataset (default tensordict)")
    add(
        "--dataset-id",
        metavar="ID",
        help="minari: id of the dataset (default: rollwright/<env>/<policy>-v0)",
    )
    add("--max-frames-per-traj", type=_count, metavar="N", help="truncate trajectories after N frames")
    add("--env-kwargs", type=_json_object, default={}, metavar="JSON", help="arguments for the environment")
    add("--categorical-actions", action="store_true", help="discrete actions as integers, not one-hot")
    add("--device", metavar="DEVICE", help="device of the data and the policy, such as cuda")
    add("--overwrite", action="store_true", help="replace an existing dataset")
    add("--quiet", action="store_true", help="print errors only")
    add("--json", action="store_true", help="print JSON at the end, and nothing else")


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
        "--check", action="store_true", help="test every frame; the exit status is 1 if something is wrong"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="plot returns and lengths")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a web page that shows it, in one file")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--allow-pickle",
        action="store_true",
        help="load pickled objects. They can run any code: use it only if you trust PATH",
    )

    parser.add_argument(
        "--conversations",
        type=_count,
        default=3,
        metavar="N",
        help="number of conversations of a trace to show (default 3)",
    )
    parser.add_argument(
        "--prompt", type=int, metavar="N", help="show the conversations of a trace about prompt N of the data"
    )


def _add_chat_collect(commands: Any) -> None:
    about = "collect conversations of a language model into a folder"
    add = _command(commands, "chat-collect", about, _CHAT_COLLECT, _CHAT_EXAMPLE).add_argument
    add("--model", metavar="DIR", help="folder or name of a model of transformers")
    add("--data", type=Path, required=True, metavar="FILE", help="prompts: a file with one JSON object per line")
    add("--reward", action="append", default=[], metavar="MODULE:FUNCTION", help="a reward function; may be repeated")
    add("--output", type=Path, required=True, metavar="DIR", help="folder of the conversations")
    add("--engine", default="transformers", metavar="ENGINE", help="what runs the model, see below")
    add("--env", metavar="MODULE:CLASS", help="an environment that replies, made from a row")
    add("--tool", action="append", default=[], metavar="MODULE:FUNCTION", help="a tool; may be repeated")
    add("--max-turns", type=_count, metavar="N", help="most answers in a conversation")
    add("--repeats", type=_count, default=1, metavar="N", help="conversations about each prompt (default 1)")
    add("--batch", type=_count, default=8, metavar="N", help="conversations side by side (default 8)")
    add("--workers", type=_count, metavar="N", help="collect in N processes (default: in this one)")
    add("--max-new-tokens", type=_count, default=256, metavar="N", help="most tokens in an answer (default 256)")
    add(
        "--temperature",
        type=float,
        default=1.0,
        metavar="T",
        help="of sampling (default 1.0; 0: always the most probable token)",
    )
    add("--system-prompt", metavar="TEXT", help="content of a system message that comes first")
    add("--text", action="store_true", help="use prompts as they are, without the chat template")
    add("--data-key", metavar="NAME", help="column of the prompt (default: query, prompt, messages or text)")
    add("--seed", type=_seed, metavar="S", help="seed of order and sampling (default: random; it is saved)")
    add(
        "--on-error",
        choices=["drop", "raise"],
        default="drop",
        help="when a tool, a reward or an environment raises: drop the conversation (the default), or end the run",
    )
    add("--quiet", action="store_true", help="print errors only")
    add("--json", action="store_true", help="print JSON at the end, and nothing else")


def _add_chat_check(commands: Any) -> None:
    about = "run an environment of conversations against a scripted model"
    add = _command(commands, "chat-check", about, _CHAT_CHECK).add_argument
    add("env", metavar="ENV", help="MODULE:NAME of the environment")
    add("--data", type=Path, metavar="FILE", help="rows: a file with one JSON object per line (default: one query)")
    add("--answers", type=Path, metavar="FILE", help="answers of the model: a file with one JSON string per line")
    add("--max-turns", type=_count, default=20, metavar="N", help="most answers in a conversation (default 20)")
    add("--json", action="store_true", help="print JSON")


def _add_bench(commands: Any) -> None:
    add = _command(
        commands, "bench", "compare the speed of a collector with a loop written by hand", _BENCH
    ).add_argument
    add("env_id", metavar="ENV_ID", nargs="?", default="CartPole-v1", help="environment (default CartPole-v1)")
    add("--num-envs", type=_count, default=1, metavar="N", help="environments stepped together (default 1)")
    add("--frames", type=_count, default=20_000, metavar="N", help="frames to collect with each (default 20000)")
    add("--env-kwargs", type=_json_object, default={}, metavar="JSON", help="arguments for the environment")
    add("--compile", action="store_true", help="also measure a collector with compile_policy=True")
    add("--json", action="store_true", help="print JSON")


def _add_watch(commands: Any) -> None:
    about = "show a policy or a dataset, in a window or as a video"
    add = _command(commands, "watch", about, _WATCH, _WATCH_EXAMPLE).add_argument
    add("what", metavar="ENV_ID|DATASET", help="id of an environment, a dataset with images, or minari:NAME")
    add("--policy", default="random", metavar="POLICY", help="random, MODULE:FACTORY or FILE.pt2, see collect --help")
    add("--output", type=Path, metavar="FILE", help="an .mp4 or .gif file (default: a window)")
    add("--episodes", type=_count, default=1, metavar="N", help="episodes to show (default 1)")
    add("--max-frames", type=_count, default=1000, metavar="N", help="most frames in an episode (default 1000)")
    add("--fps", type=_count, metavar="N", help="frames per second (default: that of the environment, or 30)")
    add("--seed", type=_seed, metavar="S", help="seed of environment and policy (default: random)")
    add("--env-kwargs", type=_json_object, default={}, metavar="JSON", help="arguments for the environment")
    add("--categorical-actions", action="store_true", help="discrete actions as integers, not one-hot")
    add("--json", action="store_true", help="print JSON")


def _add_completion(commands: Any) -> None:
    add = _command(commands, "completion", "print a script that completes commands", _COMPLETION).add_argument
    add("shell", metavar="SHELL", choices=["bash", "zsh", "fish"], help="bash, zsh or fish")


def _add_top(commands: Any) -> None:
    add = _command(commands, "top", "show what running collectors do", _TOP, _TOP_EXAMPLE).add_argument
    add("pid", metavar="PID", type=_count, nargs="?", help="of the process to show (default: all)")
    add("--json", action="store_true", help="print JSON, once")


def _add_join(commands: Any) -> None:
    add = _command(commands, "join", "run workers for a collector on another machine", _JOIN).add_argument
    add("address", metavar="HOST:PORT", help="where the collector listens")
    add("--secret-file", type=Path, metavar="FILE", help="a file with the secret (default: ROLLWRIGHT_SECRET)")
    add("--name", metavar="NAME", help="name of this machine in messages (default: its host name)")
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
