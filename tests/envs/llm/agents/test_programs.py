"""Programs of agents: functions and commands, what they are given, how they end and fail, and their limits."""

from __future__ import annotations

import asyncio
import os
import re
import sys
import threading
import time

import pytest
from tests.envs.llm.agents.client import Client, Refused
from tests.envs.llm.agents.scripted import collector, records
from tests.patience import patient

from rollwright.envs.llm import AgentEnv, Command
from rollwright.errors import EnvError

pytestmark = pytest.mark.llm
HI = [{"role": "user", "content": "Hi."}]
ASK = """
import json, os, sys, time, urllib.request
row = json.load(sys.stdin)
def ask(text):
    body = json.dumps({"messages": [{"role": "user", "content": text}]}).encode()
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]
"""


def program(text, **options):
    return Command([sys.executable, "-c", ASK + text], **options)


def collect(agent, rows=1, **options):
    made, engine = collector(agent, rows=rows, slots=rows, trajs_per_batch=rows, async_envs=True, **options)
    with made:
        return records(made), engine


def is_alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def assert_ends(*pids, within_s=5.0):
    until = time.monotonic() + patient(within_s)
    while any(map(is_alive, pids)):
        assert time.monotonic() < until, [pid for pid in pids if is_alive(pid)]
        time.sleep(0.01)


def test_a_command_finds_its_address_its_key_and_its_row():
    said = program("answer = ask(row['question'] + os.environ['MORE'])\nask(answer)", env={"MORE": "!"})
    found, _ = collect(said, rows=3)
    for number, turns in found.items():
        prompts = [one["history"].prompt.to_chats()[0]["content"] for one in turns]
        assert prompts == [f"What is {number} + 1?!", turns[0]["history"].response.to_chats()[0]["content"]]


def test_a_command_may_be_made_of_the_row():
    def of(row):
        return [sys.executable, "-c", ASK + f"ask('number {row['number']}')"]

    found, _ = collect(Command(of), rows=2)
    assert [turns[0]["history"].prompt.to_chats()[0]["content"] for turns in found.values()] == ["number 0", "number 1"]


FAILING = {  # what a program does, and what the error says
    "raises": (program("ask('Hi.')\nraise ValueError('no such thing')"), r"ended with status 1: .*no such thing"),
    "is killed": (program("ask('Hi.')\nos.kill(os.getpid(), 9)"), "ended with status -9"),
    "is not there": (Command(["/no/such/program"]), "raised FileNotFoundError: .*no/such/program"),
    "asks nothing": (program(""), "ended without a request to the model: have its client use the base_url"),
    "has no memory": (
        program("ask('Hi.')\nx = bytearray(2**30)", memory_bytes=2**29),
        "ended with status 1: .*MemoryError",
    ),
    "prints much": (
        program("ask('Hi.')\nprint('x' * 10**6)\nsys.exit('the end')", output_bytes=9),
        r"ended with status 1: x?the end\. ",
    ),
}


@pytest.mark.parametrize("name", FAILING)
def test_a_command_that_fails_is_named_with_its_cause(name):
    command, message = FAILING[name]
    begun = time.monotonic()
    with pytest.raises(EnvError, match=re.compile(f"conversation 0 from prompt 0.*{message}", re.DOTALL)):
        collect(command)
    assert time.monotonic() - begun < patient(10)


def returns(value):
    def agent(row, base_url, api_key):
        Client(base_url, api_key).chat(HI)
        if isinstance(value, Exception):
            raise value
        return value

    return agent


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("much", "returned 'much', expected its reward, a finite number, or None"),
        (float("nan"), "returned nan, expected its reward"),
        (KeyError("key"), "raised KeyError: 'key'"),
    ],
)
def test_a_function_that_fails_is_named_with_its_cause(value, message):
    with pytest.raises(EnvError, match=f"conversation 0 from prompt 0.*{message}"):
        collect(returns(value))


def test_coroutine_functions_run_side_by_side():
    together = asyncio.Barrier(3)

    class Agent:
        async def __call__(self, row, base_url, api_key):
            await together.wait()
            await asyncio.to_thread(Client(base_url, api_key).chat, HI)
            return row["number"]

    found, _ = collect(Agent(), rows=3)
    assert [turns[0]["next", "reward"].item() for turns in found.values()] == [0.0, 1.0, 2.0]


HANGING = {  # before its first request, and after an answer: what hangs, and its limit
    "before": (Command(lambda row: ["/bin/sh", "-c", f"sleep 300 & echo $$ $! > {row['path']}; wait"]), 1.0),
    "after": (
        program("""
import subprocess
ask("Hi.")
child = subprocess.Popen(["sleep", "300"])
open(row["path"], "w").write(f"{os.getpid()} {child.pid}")
time.sleep(300)
"""),
        4.0,
    ),
}


@pytest.mark.parametrize("when", HANGING)
def test_a_command_that_hangs_is_an_error_at_its_limit_and_no_process_is_left(when, tmp_path):
    command, limit_s = HANGING[when]
    rows = [{"path": str(tmp_path / "pids")}]
    env = AgentEnv.from_dataloader(rows, command, epochs=1, reply_timeout_s=limit_s)
    made, _ = collector(None, of=env, trajs_per_batch=1)
    begun = time.monotonic()
    with made, pytest.raises(EnvError, match=r"took longer than .* seconds.*give it more time \(reply_timeout_s=\)"):
        made.next()
    assert time.monotonic() - begun < patient(10)
    assert_ends(*map(int, (tmp_path / "pids").read_text().split()))


def test_a_coroutine_that_hangs_is_cancelled_and_a_thread_is_refused():
    seen, done = [], threading.Event()  # what has failed may be tried again

    async def hangs(row, base_url, api_key):
        try:
            await asyncio.sleep(300)
        except asyncio.CancelledError:
            seen.append("cancelled")
            done.set()
            raise

    with pytest.raises(EnvError, match=r"took longer than 0\.2 seconds"):
        collect(hangs, env={"reply_timeout_s": 0.2})
    assert done.wait(patient(5))

    over = threading.Event()

    def waits(row, base_url, api_key):
        assert over.wait(patient(60))
        with pytest.raises((Refused, OSError)) as caught:
            Client(base_url, api_key).chat(HI)
        seen.append(caught.type)
        done.set()

    done.clear()
    with pytest.raises(EnvError, match=r"took longer than 0\.2 seconds"):
        collect(waits, env={"reply_timeout_s": 0.2})
    over.set()
    assert done.wait(patient(20))
    assert seen[0] == "cancelled"
    assert len(seen) > 1


def test_the_end_of_a_program_ends_what_it_has_started(tmp_path):
    path = tmp_path / "pid"
    text = f"""
import subprocess
child = subprocess.Popen(["sleep", "300"], stdout=subprocess.DEVNULL)
open({str(path)!r}, "w").write(str(child.pid))
ask("Hi.")
"""
    found, _ = collect(program(text))
    assert len(found[0]) == 1
    assert_ends(int(path.read_text()))


def test_what_runs_ends_with_the_collector(tmp_path):
    text = f"open(os.path.join({str(tmp_path)!r}, str(os.getpid())), 'w').close()\nwhile True: ask('Hi.')"
    made, _ = collector(program(text), rows=8, slots=4, dialog_turns_per_batch=8, async_envs=True)
    with made:
        made.next()
        pids = [int(path.name) for path in tmp_path.iterdir()]
        assert 1 <= len(pids) <= 4
        assert all(map(is_alive, pids))
    assert_ends(*(int(path.name) for path in tmp_path.iterdir()))


COLLECTS = """
import sys
from tests.envs.llm.agents.scripted import collector
from tests.envs.llm.agents.test_programs import program
text = f"open(os.path.join({sys.argv[1]!r}, str(os.getpid())), 'w').close()\\nask('Hi.')\\ntime.sleep(300)"
made, _ = collector(program(text), rows=8, slots=4, trajs_per_batch=4, async_envs=True)
print("running", flush=True)
made.next()
"""


def test_no_program_is_left_where_the_collector_is_killed(programs, tmp_path):
    process = programs.start("-c", COLLECTS, tmp_path)
    assert process.stdout.readline() == "running\n", process.stderr.read()
    until = time.monotonic() + patient(30)
    while len(os.listdir(tmp_path)) < 4:
        assert time.monotonic() < until
        time.sleep(0.01)
    process.kill()
    process.communicate(patient(30))
    assert_ends(*map(int, os.listdir(tmp_path)))


def no_row(base_url, api_key):
    pass


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"agent": "python agent.py"}, "agent: expected a function of row, base_url and api_key, or Command"),
        ({"agent": no_row}, "agent: the function is called with row=, base_url= and api_key="),
        ({"ignore": "temperature"}, "ignore: expected names of parameters, got 'temperature'"),
        ({"parser": "yaml"}, "parser: expected a ToolParser or one of"),
        ({"max_turns": 0}, "max_turns: expected at least 1"),
        ({"reply_timeout_s": 0}, "timeout_s: expected more than 0"),
    ],
)
def test_wrong_arguments_are_refused_at_construction(arguments, message):
    given = {"agent": returns(None), **arguments}
    with pytest.raises((TypeError, ValueError), match=message):
        AgentEnv.from_dataloader([{"question": "?"}], **given)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"args": "python agent.py"}, "args: expected a list of words"),
        ({"args": []}, "args: expected a list of words"),
        ({"args": ["a"], "memory_bytes": 1}, "memory_bytes: expected at least"),
        ({"args": ["a"], "output_bytes": 0}, "output_bytes: expected at least 1"),
    ],
)
def test_wrong_commands_are_refused_at_construction(arguments, message):
    with pytest.raises((TypeError, ValueError), match=message):
        Command(**arguments)
