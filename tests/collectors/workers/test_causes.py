"""The reported cause of a failure is the true one, also where the user's code raises what a lost process raises."""

from __future__ import annotations

import pytest
from tests.collectors.workers.envs import gain, makers

from rollwright.collectors import Evaluator
from rollwright.envs import SerialEnv
from rollwright.errors import EnvError, WorkerError


def truncated(*_):
    raise EOFError("the file ends too soon")


def late(*_):
    raise TimeoutError("the server did not answer")


@pytest.mark.parametrize("what", ["create_env_fn", "policy_factory", "init_fn"])
def test_an_end_of_file_while_a_worker_starts_is_told_as_such(make, what, caplog):
    envs = [makers(1)[0], truncated] if what == "create_env_fn" else makers()
    policy = None if what == "policy_factory" else gain()
    options = {} if what == "create_env_fn" else {what: truncated}
    with pytest.raises(WorkerError, match=r"worker [01].*EOFError: the file ends too soon") as caught:
        make("sync", envs, policy, frames_per_batch=20, **options)
    assert "in truncated" in str(caught.value.__cause__)
    assert caplog.messages == []  # nothing is wrong with the other one


@pytest.mark.parametrize(("call", "kind"), [(truncated, EOFError), (late, TimeoutError)])
def test_a_call_that_raises_what_a_lost_process_raises_leaves_the_worker_at_work(make, call, kind):
    collector = make("sync", makers(), gain(), frames_per_batch=20, pre_collect_hook=call)
    with pytest.raises(kind, match=rf"worker 0: {kind.__name__}: the "):
        collector.map_fn("pre_collect_hook")
    assert len(collector.map_fn("env.rand_action")) == 2
    with pytest.raises(kind, match=rf"worker [01]: {kind.__name__}: the "):  # of the rollout
        collector.next()


def test_an_end_of_file_while_the_process_of_an_evaluator_starts_is_told_as_such():
    with pytest.raises(WorkerError, match="Evaluator's process: EOFError: the file ends too soon"):
        Evaluator(makers(1)[0], gain(), backend="process", init_fn=truncated)


class Odd(Exception):
    def __str__(self):
        return self.detail  # which was never set


def odd(*_):
    raise Odd("no licence")


def test_an_error_without_a_message_is_told_by_its_class(make):
    with pytest.raises(WorkerError, match="Odd: <no message: its __str__ raised AttributeError>"):
        make("sync", [makers(1)[0], odd], gain(), frames_per_batch=20)
    with pytest.raises(EnvError, match="raised Odd: <no message: its __str__ raised AttributeError>"):
        SerialEnv(1, odd)
