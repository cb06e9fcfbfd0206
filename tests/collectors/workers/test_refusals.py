"""What cannot be is refused before a worker has changed anything: argument, what was expected, and a remedy."""

from __future__ import annotations

import os
import re
from functools import partial

import pytest
import torch
from tensordict.nn import TensorDictModule
from tests.collectors.workers.envs import gain, makers, tallies, tally
from tests.collectors.workers.frames import check
from torch import nn

from rollwright.envs import GymEnv


@pytest.mark.parametrize(
    ("envs", "options", "text"),
    [
        (makers(make=tallies), {"cat_results": 0, "frames_per_batch": [12, 24]}, r"cat_results=0.*\[4, 8\].*-1"),
        ([tally, partial(GymEnv, "CartPole-v1")], {"cat_results": 0}, "cat_results=0.*worker 1.*'stack'"),
        ([tally, partial(GymEnv, "CartPole-v1")], {"cat_results": -1}, "cat_results=-1.*worker 1.*'stack'"),
    ],
    ids=["steps", "first", "time"],
)
def test_what_cannot_be_concatenated(make, envs, options, text):
    with pytest.raises(ValueError, match=text):
        make("sync", envs, **{"frames_per_batch": 24, **options})


def test_parameters_without_numbers_of_which_each_worker_would_draw_its_own(make):
    policy = TensorDictModule(nn.LazyLinear(1), ["observation"], ["action"])
    with pytest.raises(ValueError, match=r"policy: .*'module.weight', which takes shape at its first call\. Call the"):
        make("sync", [partial(GymEnv, "Pendulum-v1")] * 2, policy, frames_per_batch=20)
    policy(GymEnv("Pendulum-v1").reset())
    assert make("sync", [partial(GymEnv, "Pendulum-v1")] * 2, policy, frames_per_batch=20).next().numel() == 20


class Odd:
    """Adds an entry whose width is that of a process's number."""

    def __call__(self, batch):
        return batch.set("odd", torch.zeros(*batch.shape, 1 + os.getpid() % 7919))


def test_what_turns_out_not_to_fit_is_an_error_and_leaves_no_memory_behind(make):
    collector = make("sync", makers(), gain(), frames_per_batch=20, total_frames=100, cat_results=0, postproc=Odd())
    held = []
    for _ in range(4):
        with pytest.raises(ValueError, match=r"cat_results=0: .* Pass cat_results='stack'"):
            collector.next()
        held.append(collector.stats()["bytes_held"])
    assert collector.stats()["frames"] == 0
    assert held[-1] == held[1]


CALLS = [
    (lambda c: c.load_state_dict(3), TypeError, "state_dict: expected a dictionary, got int: 3. Pass"),
    (lambda c: c.map_fn("x", [3, 4]), TypeError, r"list_of_args: expected .* got \[3, 4\]. Pass"),
    (lambda c: c.map_fn("x", "ab"), TypeError, "list_of_args: expected .* got 'ab'. Pass"),
    (lambda c: c.map_fn("x", list_of_kwargs=[{}, 3]), TypeError, "list_of_kwargs: expected .* dictionary"),
    (lambda c: c.map_fn("x", [()]), ValueError, "list_of_args: .* 2 workers, got 1"),
    (lambda c: c.set_seed(2**70), ValueError, "seed: expected an integer of .* got 1180591620717411303424. Pass"),
    (lambda c: c.set_seed("a"), TypeError, "seed: expected an integer, got str"),
    (lambda c: c.reset(5), IndexError, "index: expected workers of 0 to 1.* got 5. Pass"),
    (lambda c: c.reset([0, -1]), IndexError, r"index: expected workers of 0 to 1.* got \[0, -1\]. Pass"),
    (lambda c: c.reset("a"), TypeError, "index: expected workers of 0 to 1.* got 'a'. Pass"),
    (lambda c: c.reset(True), TypeError, "index: expected workers of 0 to 1.* got True. Pass"),
]


def test_wrong_arguments_of_methods_change_nothing(make):
    collector = make("sync", makers(length=50), gain(), frames_per_batch=20)
    first = collector.next()
    for call, error, text in CALLS:
        with pytest.raises(error) as raised:
            call(collector)
        assert type(raised.value) is error  # and none of a worker's
        assert re.search(text, str(raised.value)), raised.value
    found = check([first, collector.next()])
    assert (found.frames, found.trajectories) == (40, 2)


@pytest.mark.parametrize("kind", ["single", "sync", "async"])
def test_batches_that_are_larger_than_the_memory(make, kind):
    envs = partial(GymEnv, "CartPole-v1") if kind == "single" else [partial(GymEnv, "CartPole-v1")] * 2
    collector = make(kind, envs, frames_per_batch=10**12, total_frames=10**12)
    with pytest.raises(MemoryError, match=r"frames_per_batch: a batch takes \d\d,\d{3}\.\d GB, and this machine has"):
        collector.next()
