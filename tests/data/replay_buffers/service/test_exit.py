"""A replay service ends with the program that started it, however that ends."""

from __future__ import annotations

import signal
import socket
import time

import pytest
from tests.collectors.workers.processes import gone
from tests.patience import patient

from rollwright.errors import WorkerError

PROGRAM = """
import sys, time
from functools import partial
import torch
from tensordict import TensorDict
from rollwright.data import LazyTensorStorage, ReplayBuffer, SampleToInsertRatio

if __name__ == "__main__":
    state = sys.argv[1]
    limiter = SampleToInsertRatio(1.0, margin=10, min_size=100) if state == "waits" else None
    buffer = ReplayBuffer(
        storage=partial(LazyTensorStorage, 1000), batch_size=4, prefetch=2, limiter=limiter, service_backend="process"
    )
    buffer.extend(TensorDict({"a": torch.arange(10)}, [10]))
    print(buffer.host.pid, flush=True)
    if state == "error":
        raise ValueError("no idea")
    while state in ("waits", "samples"):
        buffer.sample()
"""


@pytest.mark.parametrize(
    ("state", "number"),
    [
        pytest.param("ends", None, marks=pytest.mark.slow),
        pytest.param("error", None, marks=pytest.mark.slow),
        pytest.param("samples", signal.SIGINT, marks=pytest.mark.slow),
        ("waits", signal.SIGINT),
        ("samples", signal.SIGKILL),
        pytest.param("waits", signal.SIGTERM, marks=pytest.mark.slow),
    ],
)
def test_no_service_is_left(programs, tmp_path, state, number):
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    program = programs.start(file, state)
    pid = int(program.stdout.readline())
    began = time.monotonic()
    if number is not None:
        time.sleep(0.1)
        program.send_signal(number)
    _, errors = program.communicate(patient(20.0))
    took = time.monotonic() - began
    assert gone([pid])
    assert took < patient(6.0)
    expected = {"ends": 0, "error": 1}.get(state, -number if number is not None else 0)
    assert program.returncode == expected, errors
    assert ("KeyboardInterrupt" in errors) == (number == signal.SIGINT)


def test_a_port_that_is_taken_is_an_error_that_names_the_argument(serve):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        match = (
            rf"service_backend_options\['address'\]: cannot listen at 127.0.0.1:{port}: Address already in use. Pass"
        )
        with pytest.raises(OSError, match=match):
            serve(service={"address": f"127.0.0.1:{port}"})


def test_a_client_says_so_when_the_service_has_ended(serve):
    buffer = serve()
    client, late = buffer.client(), buffer.client()
    assert len(client) == 0
    buffer.shutdown()
    buffer.shutdown()
    for each in (client, late):
        began = time.monotonic()
        with pytest.raises(
            WorkerError, match=r"the replay service at .* is gone: nothing listens there\. It may have ended"
        ):
            len(each)
        assert time.monotonic() - began < patient(5.0)
        each.shutdown()
        each.shutdown()
        with pytest.raises(RuntimeError, match="was shut down"):
            len(each)
