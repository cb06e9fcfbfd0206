"""Batches of many workers: shapes, names, counts, and options that are given by worker."""

from __future__ import annotations

import os
import warnings
from functools import partial

import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict
from tests.collectors.workers.envs import EPISODE, IDENT, IDS, gain, makers, pixels, tallies, tally
from tests.collectors.workers.frames import check, flat, per_worker
from tests.variants import in_turn, one_quick

from rollwright.collectors import BaseCollector, Collector
from rollwright.envs import GymEnv
from rollwright.modules import RandomPolicy
from rollwright.testing.mocking_classes import CountingEnvWithString, EnvWithDynamicSpec

KINDS = ["sync", "async"]


# Shapes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "single", "batched"),
    [("stack", (2, 12), (2, 3, 4)), (0, (24,), (6, 4)), (-1, (24,), (3, 8)), (None, (2, 12), (2, 3, 4))],
)
def test_synchronous_batches(make, how, single, batched):
    options = {} if how is None else {"cat_results": how}
    for envs, shape in ((makers(), single), (makers(make=tallies), batched)):
        collector = make("sync", envs, gain(), frames_per_batch=24, total_frames=96, **options)
        assert len(collector) == 4
        batches = list(collector)
        assert [batch.shape for batch in batches] == [shape] * 4
        for batch in batches:
            assert batch.names[-1] == "time"
            assert batch["observation"].shape == (*shape, 5)
            assert batch["next", "reward"].shape == (*shape, 1)
            assert batch[IDS].shape == shape
            assert batch[IDS].dtype == torch.int64
            assert batch.device in (None, torch.device("cpu"))
        assert check(batches).frames == 96


@pytest.mark.parametrize("how", ["stack", 0, -1])
def test_workers_come_in_order(make, how):
    collector = make("sync", makers(3, make=tallies), gain(), frames_per_batch=36, cat_results=how)
    idents = collector.next()["observation"][..., IDENT]
    expected = torch.tensor([[0, 1, 2], [10, 11, 12], [20, 21, 22]]).double().unsqueeze(-1).expand(3, 3, 4)
    if how == 0:
        expected = expected.reshape(9, 4)
    elif how == -1:
        expected = torch.cat(list(expected), -1)
    assert torch.equal(idents, expected)


@pytest.mark.parametrize(("envs", "shape"), [(makers(), (20,)), (makers(make=tallies), (3, 7))], ids=["one", "three"])
def test_asynchronous_batches_are_those_of_one_worker(make, envs, shape):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # 20 frames by 3 environments are 21
        collector = make("async", envs, gain(), frames_per_batch=20, total_frames=84)
    batches = list(collector)
    assert {tuple(batch.shape) for batch in batches} == {shape}
    for batch in batches:
        assert batch.names[-1] == "time"
        workers = batch["observation"][..., IDENT] // (1 if len(shape) == 1 else 10)
        assert len(workers.unique()) == 1
    assert check(batches).frames == len(batches) * batches[0].numel()


def test_one_worker_is_a_stack_of_one(make):
    assert make("sync", makers(1), gain(), frames_per_batch=10).next().shape == (1, 10)
    assert make("async", makers(1), gain(), frames_per_batch=10).next().shape == (10,)


def _renamed(batch):
    batch.names = ["frames"]
    return batch


def _with_empty(batch):
    batch["nest", "empty"] = TensorDict({}, batch.batch_size)
    return batch.set("twice", batch["observation"] * 2)


@pytest.mark.parametrize(
    ("kind", "options", "envs", "names"),
    [
        ("sync", {}, makers(), [None, "frames"]),
        ("sync", {"cat_results": 0}, makers(), ["frames"]),
        ("sync", {}, [EnvWithDynamicSpec] * 2, [None, "frames"]),
        ("async", {}, makers(), ["frames"]),
        ("async", {}, [EnvWithDynamicSpec] * 2, ["frames"]),
    ],
)
def test_dimensions_have_the_names_that_postproc_gives_them(make, kind, options, envs, names):
    collector = make(kind, envs, None, frames_per_batch=24, total_frames=24, postproc=_renamed, **options)
    assert next(iter(collector)).names == names


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{}, {"trajs_per_batch": 2}])
def test_empty_entries_are_delivered(make, kind, options):
    collector = make(kind, makers(), gain(), frames_per_batch=24, total_frames=96, postproc=_with_empty, **options)
    batch = next(iter(collector))
    assert batch["nest", "empty"].batch_size == batch.batch_size
    assert "twice" in batch


def test_uneven_frames_are_stacked_lazily(make):
    options = {"frames_per_batch": [10, 20], "total_frames": 60}
    batches = list(make("sync", makers(), gain(), **options))
    assert len(batches) == 2
    assert isinstance(batches[0], LazyStackedTensorDict)
    assert [[row.shape[0] for row in batch.unbind(0)] for batch in batches] == [[10, 20]] * 2
    assert check(batches).frames == 60
    for how in (0, -1):
        batch = make("sync", makers(), gain(), cat_results=how, **options).next()
        assert batch.shape == (30,)
        assert batch["observation"][:, IDENT].tolist() == [0.0] * 10 + [1.0] * 20


def test_uneven_frames_of_asynchronous_workers(make):
    batches = list(make("async", makers(), gain(), frames_per_batch=[10, 20], total_frames=120))
    for batch in batches:
        assert batch.shape == (10 if batch["observation"][0, IDENT] == 0 else 20,)
    assert check(batches).frames >= 120


@pytest.mark.parametrize("kind", KINDS)
def test_split_trajectories(make, kind):
    with pytest.warns(UserWarning, match="split_trajs"):
        collector = make(kind, makers(), gain(), frames_per_batch=40, split_trajs=True)
    batch = collector.next()
    mask = batch["collector", "mask"]
    assert mask.shape == batch.shape
    assert int(mask.sum()) == 40
    for row, valid in zip(batch[IDS], mask, strict=True):
        assert len(row[valid].unique()) == 1
    assert len(batch[IDS][:, 0].unique()) == len(batch)


@pytest.mark.parametrize(("layout", "kind"), in_turn(["padded", "cat"], KINDS))
def test_whole_trajectories(make, kind, layout):
    collector = make(
        kind, makers(), gain(), frames_per_batch=20, total_frames=400, trajs_per_batch=3, traj_format=layout
    )
    batches = list(collector)
    assert len(batches) > 3
    frames = []
    for batch in batches:
        if layout == "padded":
            mask = batch["collector", "mask"]
            assert batch.shape == mask.shape
            assert len(batch) == 3
            frames.append(batch.exclude(("collector", "mask"))[mask])
        else:
            assert batch.ndim == 1
            frames.append(batch)
        assert len(frames[-1][IDS].unique()) == 3
    check(frames, whole=True)


@pytest.mark.parametrize("kind", ["front", "sync"])
def test_reset_drops_whole_trajectories_that_are_held(make, kind):
    envs = partial(tally, length=5) if kind == "front" else makers(length=5)
    collector = make(kind, envs, gain(), frames_per_batch=40, trajs_per_batch=2, traj_format="cat")
    assert int(collector.next()["observation"][:, EPISODE].max()) < 4
    collector.reset()
    assert int(collector.next()["observation"][:, EPISODE].min()) >= (8 if kind == "front" else 4)


def test_without_ids(make):
    batch = make("sync", makers(), gain(), frames_per_batch=10, track_traj_ids=False).next()
    assert "collector" not in batch


def test_pixels(make):
    images = make("sync", [pixels, pixels], frames_per_batch=20).next()["observation"]
    assert images.dtype == torch.uint8
    assert images.shape == (2, 10, 64, 64, 3)
    assert bool((images == images[..., :1, :1, :1]).all())


@pytest.mark.parametrize("kind", one_quick(KINDS, "async"))
def test_objects_and_growing_shapes(make, kind):
    batch = make(kind, [CountingEnvWithString] * 2, frames_per_batch=8).next()
    strings = batch["string"] if kind == "async" else [text for row in batch["string"] for text in row]
    assert len(strings) == 8
    assert all(isinstance(text, str) for text in strings)
    batch = make(kind, [EnvWithDynamicSpec] * 2, frames_per_batch=8).next()
    assert batch.numel() == 8
    rows = batch.unbind(0) if kind == "sync" else [batch]
    for row in rows:
        sizes = [step["observation"].numel() for step in row.unbind(0)]
        assert sizes[0] < sizes[1] < sizes[2]


# Counts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "asked", "total", "batch", "batches"),
    [("sync", 25, 100, 26, 4), ("sync", 173, 300, 174, 2), ("async", 25, 100, 25, 4), ("async", 173, 300, 173, 2)],
)
def test_counts_are_those_that_were_announced(make, kind, asked, total, batch, batches):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        collector = make(kind, makers(), gain(), frames_per_batch=asked, total_frames=total)
    said = [str(w.message) for w in said if issubclass(w.category, UserWarning)]
    assert bool(said) == (batch != asked or batch * batches != total)
    assert not said or any(str(number) in " ".join(said) for number in (batch, batch * batches))
    assert len(collector) == batches
    delivered = list(collector)
    assert [data.numel() for data in delivered] == [batch] * batches
    stats = collector.stats()
    assert stats["frames"] == batch * batches
    assert stats["batches"] == batches
    assert stats["completed"]
    assert collector.next() is None


@pytest.mark.parametrize("kind", one_quick(KINDS, "sync"))
def test_an_endless_collector_has_no_length(make, kind):
    collector = make(kind, makers(), gain(), frames_per_batch=10)
    with pytest.raises(RuntimeError, match="total_frames"):
        len(collector)
    for number, _ in enumerate(collector):
        if number == 5:
            break
    assert collector.stats()["batches"] >= 6


@pytest.mark.parametrize("kind", KINDS)
def test_iteration_goes_on_where_it_stopped(make, kind):
    collector = make(kind, makers(), gain(), frames_per_batch=10, total_frames=80)
    batches = [next(iter(collector)), collector.next(), next(collector), *collector]
    assert len(batches) == 8
    assert check(batches).frames == 80


@pytest.mark.parametrize("kind", KINDS)
def test_random_frames_come_first(make, kind):
    collector = make(kind, makers(), gain(2.0), frames_per_batch=10, total_frames=80, init_random_frames=40)
    batches = list(collector)
    acted = [bool((batch["action"] == 2.0).all()) for batch in batches]
    if kind == "sync":
        assert acted == [False] * 4 + [True] * 4
    else:  # each worker begins with its share
        workers = [int(batch["observation"][0, IDENT]) for batch in batches]
        for worker in (0, 1):
            of_worker = [act for act, of in zip(acted, workers, strict=True) if of == worker]
            assert not any(of_worker[:2])
            assert all(of_worker[2:])


def test_frames_per_trajectory_are_limited(make):
    frames = flat(make("sync", makers(length=12), gain(), frames_per_batch=40, total_frames=160, max_frames_per_traj=5))
    assert int(frames["step_count"].max()) <= 5
    assert frames["next", "truncated"].any()


@pytest.mark.parametrize("kind", one_quick(KINDS, "async"))
def test_resets_at_each_iteration(make, kind):
    batches = list(make(kind, makers(length=50), gain(), frames_per_batch=10, total_frames=40, reset_at_each_iter=True))
    for batch in batches:
        first = batch["observation"][..., 0, 3]
        assert torch.equal(first, torch.zeros_like(first))


def test_a_threshold_of_one_interrupts_nobody_and_of_none_neither(make):
    for threshold in (None, 1.0, 0.7):
        options = {"frames_per_batch": 20, "total_frames": 60, "preemptive_threshold": threshold}
        collector = make("sync", makers(), gain(), **options)
        assert len(collector) == 3
        assert bool((collector.next()[IDS] >= 0).all())


def test_an_interrupt_is_heard_whenever_it_comes(make):
    """Also between the order and the first step; a rollout that misses it takes 500 steps."""
    collector = make("sync", makers(step_s=0.005), gain(), frames_per_batch=1000, preemptive_threshold=0)
    for _ in range(30):
        taken = (collector.next()[IDS] >= 0).sum(-1)
        assert 1 <= int(taken.min()) <= int(taken.max()) < 500


def test_slow_workers_are_interrupted(make):
    envs = [partial(tally, 0), partial(tally, 1), partial(tally, 2, step_s=0.05)]
    collector = make("sync", envs, gain(), frames_per_batch=90, total_frames=270, preemptive_threshold=0.6)
    with pytest.raises(TypeError, match="preemptive_threshold"):
        len(collector)
    for batch in collector:
        taken = (batch[IDS] >= 0).sum(-1)
        assert batch.shape == (3, 30)
        assert taken[:2].tolist() == [30, 30]
        assert 1 <= int(taken[2]) < 30
        assert bool((batch[IDS][2, int(taken[2]) :] == -1).all())
        assert bool((batch["observation"][2, : int(taken[2]), IDENT] == 2).all())


@pytest.mark.parametrize("value", [-0.1, 1.5])
def test_a_threshold_out_of_range(make, value):
    with pytest.raises(ValueError, match="preemptive_threshold"):
        make("sync", makers(), gain(), frames_per_batch=20, preemptive_threshold=value)


# Options by worker -------------------------------------------------------------------------------------------------


def make_offset(ident=0, offset=0):
    return tally(ident + offset)


def test_arguments_of_environments_by_worker(make):
    envs = [partial(make_offset, 1), partial(make_offset, 2)]
    batch = make("sync", envs, gain(), frames_per_batch=10, create_env_kwargs=[{"offset": 10}, {"offset": 20}]).next()
    assert batch["observation"][:, 0, IDENT].tolist() == [11.0, 22.0]
    batch = make("sync", envs, gain(), frames_per_batch=10, create_env_kwargs={"offset": 30}).next()
    assert batch["observation"][:, 0, IDENT].tolist() == [31.0, 32.0]


class Where:
    """A policy that says which process made it, as an action."""

    def __init__(self):
        self.pid = float(os.getpid() % 1000)

    def __call__(self, td):
        return td.set("action", torch.full((*td.batch_size, 1), self.pid))


def counted(folder, worker):
    number = len(list(folder.iterdir()))
    (folder / f"{worker}-{number}").touch()
    return gain(float(worker))


@pytest.mark.parametrize("kind", one_quick(KINDS, "sync"))
def test_policy_factories_are_called_once_a_worker_in_the_worker(make, kind, tmp_path):
    factories = [partial(counted, tmp_path, worker) for worker in range(2)]
    collector = make(kind, makers(), policy_factory=factories, frames_per_batch=10, total_frames=80)
    for batch in collector:
        assert torch.equal(batch["action"][..., 0].double(), batch["observation"][..., IDENT])
    assert sorted(path.name[0] for path in tmp_path.iterdir()) == ["0", "1"]
    batch = make("sync", makers(), policy_factory=Where, frames_per_batch=10).next()
    pids = batch["action"][:, 0, 0].tolist()
    assert pids[0] != pids[1]
    assert os.getpid() % 1000 not in pids


@pytest.mark.parametrize("kind", one_quick(KINDS, "async"))
def test_devices_by_worker(make, kind):
    collector = make(
        kind, makers(), gain(), frames_per_batch=10, device=["cpu", "cpu"], storing_device=["cpu", torch.device("cpu")]
    )
    assert collector.next().device == torch.device("cpu")


def test_init_fn_runs_in_each_worker(make, tmp_path):
    def touch():
        (tmp_path / str(os.getpid())).touch()

    collector = make("sync", makers(), gain(), frames_per_batch=10, init_fn=touch)
    pids = {str(worker["pid"]) for worker in collector.stats()["workers"]}
    assert {path.name for path in tmp_path.iterdir()} == pids
    assert str(os.getpid()) not in pids


@pytest.mark.parametrize("start_method", ["spawn", "fork"])
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_other_ways_to_start(make, start_method):
    envs = makers(1 if start_method == "spawn" else 2)  # each of these imports everything
    batches = list(make("sync", envs, gain(), frames_per_batch=20, total_frames=60, start_method=start_method))
    assert check(batches).frames == 60


@pytest.mark.parametrize("kind", one_quick(KINDS, "sync"))
def test_threads_are_shared_out(make, kind, tmp_path):
    def note():
        (tmp_path / f"{os.getpid()}-{torch.get_num_threads()}").touch()

    for options, expected in (({}, max(1, (os.cpu_count() or 1) // 4)), ({"num_sub_threads": 2}, 2)):
        collector = make(kind, makers(4), gain(), frames_per_batch=20, pre_collect_hook=note, **options)
        collector.next()
        pids = [worker["pid"] for worker in collector.stats()["workers"]]
        collector.shutdown()
        seen = dict(path.name.split("-") for path in tmp_path.iterdir())
        assert {seen[str(pid)] for pid in pids if str(pid) in seen} == {str(expected)}
        assert collector.stats()["threads"]


def test_threads_of_this_process(make):
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    collector = make("sync", makers(), gain(), frames_per_batch=20)
    assert torch.get_num_threads() == 3  # nobody asked for another number
    collector.shutdown()
    collector = make("sync", makers(), gain(), frames_per_batch=20, num_threads=1)
    assert torch.get_num_threads() == 1
    collector.shutdown()
    torch.set_num_threads(before)


# What Collector(...) makes --------------------------------------------------------------------------------------------


def test_what_collector_makes(make):
    from rollwright.collectors import MultiAsyncCollector, MultiCollector, MultiSyncCollector

    made = {
        "sync": make("front", tally, gain(), num_collectors=2, sync=True, frames_per_batch=10),
        "async": make("front", makers(), gain(), num_collectors=2, frames_per_batch=10),
        "backend": make("front", makers(), gain(), backend="process", sync=True, frames_per_batch=10),
        "multi": make("multi", tally, gain(), num_workers=2, sync=True, frames_per_batch=10),
    }
    assert isinstance(made["sync"], MultiSyncCollector)
    assert isinstance(made["async"], MultiAsyncCollector)
    assert isinstance(made["backend"], MultiSyncCollector)
    assert isinstance(made["multi"], MultiCollector)
    assert issubclass(MultiSyncCollector, MultiCollector)
    for name, collector in made.items():
        assert isinstance(collector, BaseCollector), name
        assert not isinstance(collector, Collector), name
        assert collector.next().numel() == 10, name
    direct = make("front", tally, gain(), frames_per_batch=10)
    assert type(direct) is Collector
    assert type(make("front", tally, gain(), backend="direct", frames_per_batch=10)) is Collector


@pytest.mark.parametrize(
    ("arguments", "options", "error", "text"),
    [
        ((makers(3),), {"num_collectors": 2}, ValueError, r"create_env_fn.*2 workers, got 3"),
        ((tally,), {"num_collectors": 0}, ValueError, "num_collectors"),
        ((tally,), {"num_collectors": True}, TypeError, "num_collectors"),
        ((tally,), {"backend": "teleport"}, ValueError, "backend"),
        ((makers(2),), {"num_collectors": 2, "frames_per_batch": [10, 20, 30]}, ValueError, "frames_per_batch"),
        ((makers(2),), {"num_collectors": 2, "frames_per_bacth": 10}, TypeError, "frames_per_batch"),
        ((makers(2),), {"num_collectors": 2, "create_env_kwargs": [{}]}, ValueError, "create_env_kwargs"),
        ((makers(2),), {"num_collectors": 2, "policy_factory": [gain]}, ValueError, "policy_factory"),
        ((makers(2),), {"num_collectors": 2, "device": ["cpu"]}, ValueError, "device"),
        ((makers(2),), {"num_collectors": 2, "start_method": "teleport"}, ValueError, "start_method"),
        ((makers(2),), {"num_collectors": 2, "sync": True, "cat_results": 7}, ValueError, "cat_results"),
        ((makers(2),), {"num_collectors": 2, "on_worker_failure": "shrug"}, ValueError, "on_worker_failure"),
        ((makers(2),), {"num_collectors": 2, "policy_lag": "shrug"}, ValueError, "policy_lag"),
        ((makers(2),), {"num_collectors": 2, "sync": True, "cat_results": [0]}, ValueError, "cat_results.*stack"),
        ((makers(2),), {"num_collectors": 2, "env_step_timeout": 0}, ValueError, r"more than 0 s \(None"),
        ((makers(2),), {"num_collectors": 2, "num_workers": 2}, ValueError, "num_workers.*num_collectors"),
        ((makers(2), 3), {"num_collectors": 2}, TypeError, "^policy: .*got int: 3"),
        ((makers(2), Where), {"num_collectors": 2}, TypeError, r"^policy: .*Where\(\.\.\.\)"),
        (([],), {"num_collectors": 2}, ValueError, "create_env_fn|num_collectors"),
        ((7,), {"num_collectors": 2}, TypeError, "create_env_fn"),
    ],
)
def test_wrong_arguments_are_refused_at_once(make, arguments, options, error, text):
    with pytest.raises(error, match=text):
        make("front", *arguments, **options)


def test_options_are_not_changed(make):
    envs, options = makers(), {"frames_per_batch": [10, 10], "create_env_kwargs": [{}, {}]}
    before = {name: list(value) for name, value in options.items()}
    make("sync", envs, gain(), **options).next()
    assert options == before
    assert len(envs) == 2


def test_a_random_policy_takes_the_spec_of_its_environment(make):
    for policy in (None, RandomPolicy()):
        batch = make("sync", [lambda: GymEnv("CartPole-v1")] * 2, policy, frames_per_batch=20).next()
        assert batch["action"].shape == (2, 10, 2)
        assert bool((batch["action"].sum(-1) == 1).all())


def test_streams_of_workers_are_joined_by_worker(make):
    first, second = per_worker(make("sync", makers(), gain(), frames_per_batch=20, total_frames=100))
    assert first.shape == second.shape == (50,)
    assert check(first).frames == check(second).frames == 50


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_whole_trajectories_are_padded_unless_something_else_is_asked_for(make, kind):
    shapes = {}
    for given in (None, "padded", "cat"):
        options = {} if given is None else {"traj_format": given}
        collector = make(kind, makers(), frames_per_batch=24, trajs_per_batch=2, **options)
        assert collector.traj_format == (given or "padded")
        batch = collector.next()
        shapes[given] = batch.ndim, ("collector", "mask") in batch.keys(True)
    assert shapes == {None: (2, True), "padded": (2, True), "cat": (1, False)}


@pytest.mark.filterwarnings("ignore:.*split_trajs=True pads:UserWarning")
def test_the_options_of_a_collector_are_those_that_were_given(make):
    options = {"split_trajs": True, "init_random_frames": 50, "return_same_td": False}
    collector = make("sync", makers(), gain(), frames_per_batch=24, **options)
    assert {name: getattr(collector.options, name) for name in options} == options
