"""Checks of what a transport delivers: the same bits, every frame once, whole trajectories, exact counts."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict, TensorDictBase, tensorclass
from tensordict.nn import TensorDictModule, TensorDictSequential

from rollwright.collectors import Collector
from rollwright.collectors.workers.transports import shares_memory
from rollwright.data import LazyTensorStorage, ReplayBuffer
from rollwright.envs import InitTracker, TransformedEnv
from rollwright.modules import GRUModule
from rollwright.testing.comparison import differing_key
from rollwright.testing.transports import frames as of
from rollwright.testing.transports.frames import IDS, expect
from rollwright.testing.transports.trial import Trial

_SEED, _NUM_STEPS, _NUM_BATCHES = 5, 20, 3
_STILL_S = 1.5


# The same bits ----------------------------------------------------------------------------------------


def stacked(trial: Trial) -> None:
    """Batches ``[workers, time]`` hold what single collectors in this process collect."""
    _compare(trial, of.numbered, of.sampling)


def concatenated(trial: Trial) -> None:
    """So do batches that are joined along the environments, and along time."""
    for dim in (0, -1):
        _compare(trial, of.several, of.sampling, cat_results=dim)


def batched(trial: Trial) -> None:
    """So do batches of batched environments."""
    _compare(trial, of.several, of.sampling)


def images(trial: Trial) -> None:
    """So do images, which are larger than what a connection holds at once."""
    _compare(trial, of.images, _random, steps=50)


def recurrent(trial: Trial) -> None:
    """So do batches of a recurrent policy, whose state goes on from batch to batch."""
    _compare(trial, _primed, _gru)


def reshaped(trial: Trial) -> None:
    """So do batches that a ``postproc`` has changed, which do not lie in the block any more."""
    _compare(trial, of.numbered, of.sampling, postproc=_every_other)


def entries(trial: Trial) -> None:
    """So do entries of every kind, of the environment and the policy, or which a ``postproc`` or a hook changes."""
    for dim in (None, 0):
        _compare(trial, of.numbered, of.sampling, postproc=_every_kind, cat_results=dim)
    _compare(trial, of.several, of.sampling, post_collect_hook=_every_kind)
    for change in (_every_kind, _nested_tensors):
        options: dict[str, Any] = {"postproc": change, "total_frames": 2 * _NUM_STEPS}
        env = of.numbered
        with Collector(partial(env, life=0), of.sampling(), frames_per_batch=_NUM_STEPS, **options) as one:
            one.set_seed(_SEED)
            wanted = [batch.clone() for batch in one]
        collector = trial.collector("async", [partial(env, life=0)], of.sampling(), each=_NUM_STEPS, **options)
        collector.set_seed(_SEED)
        for number, (batch, expected) in enumerate(zip(collector, wanted, strict=True)):
            _expect_equal(batch, expected, f"{change.__name__}, batch {number}")
        collector.shutdown()
    _compare(trial, of.ragged, of.counting)


@tensorclass
class _Record:
    """An entry that is a tensorclass."""

    number: torch.Tensor
    text: str


def _every_kind(batch: TensorDictBase) -> TensorDictBase:
    size = tuple(batch.batch_size)
    batch.set("text", _stacked(size, lambda t: NonTensorData(f"step {t}")))
    batch.set(("nest", "text"), _stacked(size, lambda t: NonTensorData({"step": t})))
    batch.set(("next", "ragged"), _stacked(size, lambda t: TensorDict({"many": torch.arange(t % 3 + 1)})))
    batch.set_non_tensor("word", "one for all")
    record: Any = _Record
    batch.set("record", record(number=torch.ones(size), text="yes", batch_size=size))
    batch.set(("empty", "deep"), TensorDict({}, [*size, 2]))
    batch.set("agents", TensorDict({"of_each": torch.ones(*size, 2, 3)}, [*size, 2]))
    batch.set(("next", "reward"), batch["next", "reward"].double().expand(*size, 2))  # another dtype, another shape
    complex_pairs = torch.view_as_complex(batch["observation"][..., :2].contiguous())
    batch.set("conjugated", complex_pairs.conj())
    batch.set("same", batch["observation"])
    batch.rename_key_("loc", "renamed")
    del batch["scale"]
    return batch


def _stacked(size: tuple[int, ...], make: Callable[[int], Any]) -> Any:
    """A lazy stack of what ``make`` returns for each step, ``[*size]``."""
    if len(size) > 1:
        return LazyStackedTensorDict.lazy_stack([_stacked(size[1:], make) for _ in range(size[0])], 0)
    return LazyStackedTensorDict.lazy_stack([make(step) for step in range(size[0])], 0)


def _nested_tensors(batch: TensorDictBase) -> TensorDictBase:
    rows = [torch.ones(step % 3 + 1) for step in range(len(batch))]
    return batch.set("nested", torch.nested.nested_tensor(rows, layout=torch.jagged))


def _random() -> None:
    """Actions at random."""


def _gru() -> TensorDictModule:
    torch.manual_seed(0)
    gru = GRUModule(
        input_size=5, hidden_size=8, in_keys=["inputs", "state", "is_init"], out_keys=["features", ("next", "state")]
    )
    return TensorDictSequential(
        TensorDictModule(_scaled, ["observation"], ["inputs"]),
        gru,
        TensorDictModule(torch.nn.Linear(8, 1), ["features"], ["action"]),
    )


def _scaled(observation: torch.Tensor) -> torch.Tensor:
    return observation.float() / 10.0


def _primed(ident: int, **options: Any) -> TransformedEnv:
    env = TransformedEnv(of.numbered(ident, **options), InitTracker())
    gru = next(module for module in _gru().modules() if isinstance(module, GRUModule))
    return env.append_transform(gru.make_tensordict_primer())


def _every_other(batch: TensorDictBase) -> TensorDictBase:
    return batch[..., ::2].clone()


def _compare(
    trial: Trial, make: Callable[..., Any], policy: Callable[[], Any], *, steps: int = _NUM_STEPS, **options: Any
) -> None:
    """Compare what the transport delivers with what single collectors do.

    Raises:
        AssertionError: they differ.
    """
    given = {} if make is of.images else {"life": 0}
    envs = of.factories(trial.num_workers, make, **given)
    frames = steps * (of.NUM_SEVERAL if make is of.several else 1)
    dim = options.pop("cat_results", None)
    singles, seed = [], _SEED - 1
    for env in envs:
        total = frames * _NUM_BATCHES
        with Collector(env, policy(), frames_per_batch=frames, total_frames=total, **options) as one:
            seed = one.set_seed(seed + 1)
            singles.append([batch.clone() for batch in one])
    joined = {} if dim is None else {"cat_results": dim}
    total = frames * _NUM_BATCHES * trial.num_workers
    collector = trial.collector("sync", envs, policy(), each=frames, total_frames=total, **joined, **options)
    expect(collector.set_seed(_SEED) == seed, f"set_seed: expected {seed}, the seed after those of all workers")
    batches = [batch.clone() for batch in collector]
    collector.shutdown()
    expect(len(batches) == _NUM_BATCHES, f"expected {_NUM_BATCHES} batches, got {len(batches)}")
    ids: list[dict[int, int]] = [{} for _ in envs]
    for number, batch in enumerate(batches):
        wanted = [single[number] for single in singles]
        together: Any = LazyStackedTensorDict.lazy_stack(wanted, 0) if dim is None else torch.cat(wanted, dim)
        _expect_equal(batch, together, f"batch {number}")
        sizes = [len(w) if dim == 0 else w.shape[-1] for w in wanted]
        rows = batch[IDS].unbind(0) if dim is None else batch[IDS].split(sizes, dim)
        for worker, (row, single) in enumerate(zip(rows, wanted, strict=True)):
            for mine, theirs in zip(row.flatten().tolist(), single[IDS].flatten().tolist(), strict=True):
                expect(ids[worker].setdefault(theirs, mine) == mine, f"worker {worker}: a trajectory changes its id")
    all_ids = [number for of_worker in ids for number in of_worker.values()]
    expect(len(set(all_ids)) == len(all_ids), "two trajectories have one id")


def _expect_equal(found: TensorDictBase, expected: TensorDictBase, where: str) -> None:
    expect(found.batch_size == expected.batch_size, f"{where}: {found.batch_size} in place of {expected.batch_size}")
    unequal = differing_key(*(each.exclude(IDS, ("collector", "boundary")) for each in (found, expected)))
    if unequal is not None:
        raise AssertionError(
            f"{where}: {unequal!r} differs from what single collectors with the same seeds have: expected "
            f"{expected.get(unequal, None)}, got {found.get(unequal, None)}"
        )


# Every frame once -------------------------------------------------------------------------------------


def asynchronous(trial: Trial) -> None:
    """Asynchronous batches hold every frame once, of one worker each, and as many as were asked for."""
    total = 20 * 5 * trial.num_workers
    envs = of.factories(trial.num_workers)
    collector = trial.collector("async", envs, of.sampling(), each=20, total_frames=total)
    batches = [batch.clone() for batch in collector]
    sizes = [batch.numel() for batch in batches]
    expect(sizes == [20] * (total // 20), f"expected {total // 20} batches of 20 frames, got {sizes}")
    idents = [batch["observation"][..., of.IDENT].unique().numel() for batch in batches]
    expect(idents == [1] * len(batches), f"expected each batch to be of one worker, got {idents}")
    of.no_episode_missing(of.whole_trajectories(batches))


def counts(trial: Trial) -> None:
    """``total_frames`` is exact, and the counters agree with what was delivered, for each worker."""
    each, num_batches = 10, 4
    total = each * num_batches * trial.num_workers
    envs = of.factories(trial.num_workers)
    collector = trial.collector("sync", envs, of.constant(), each=each, total_frames=total)
    batches = [batch.clone() for batch in collector]
    delivered = sum(batch.numel() for batch in batches)
    expect(delivered == total, f"total_frames={total}: {delivered} frames were delivered")
    stats = collector.stats()
    expect(stats["frames"] == total, f"stats()['frames']: expected {total}, got {stats['frames']}")
    for name, wanted in {"frames": each * num_batches, "batches": num_batches}.items():
        found = [worker[name] for worker in stats["workers"]]
        expect(found == [wanted] * trial.num_workers, f"{name} of the workers: expected {wanted} each, got {found}")
    ended = int(sum(batch["next", "done"].sum() for batch in batches))
    expect(stats["episodes"] == ended, f"stats()['episodes']: {ended} have ended, and {stats['episodes']} are counted")


def trajectories(trial: Trial) -> None:
    """With ``trajs_per_batch``, batches hold so many trajectories, each whole."""
    for kind in ("sync", "async"):
        envs = of.factories(trial.num_workers)
        options = {"trajs_per_batch": 4, "traj_format": "cat"}
        total = 90 * trial.num_workers
        collector = trial.collector(kind, envs, of.constant(), each=15, total_frames=total, **options)
        batches = [batch.clone() for batch in collector]
        numbers = [batch[IDS].unique().numel() for batch in batches]
        expect(batches, "expected batches of whole trajectories, got none")
        expect(
            numbers[:-1] == [4] * (len(numbers) - 1) and numbers[-1] <= 4, f"expected 4 in each batch, got {numbers}"
        )
        found = of.whole_trajectories(batches, ended=True)
        of.no_episode_missing(found)
        stepped, least = sum(batch.numel() for batch in batches), total - 13 * (trial.num_workers + 4)
        expect(stepped >= least, f"{kind}: of {total} frames, {stepped} were delivered in {len(found)} trajectories")


def buffer(trial: Trial) -> None:
    """A replay buffer gets whole trajectories, each once; or it is refused, where workers cannot write to it."""
    settings = trial.settings
    shared = shares_memory(settings.backend)
    make = settings.make_buffer or partial(ReplayBuffer, storage=LazyTensorStorage(10_000), shared=True)
    options: dict[str, Any] = {"each": 30, "total_frames": 300, "trajs_per_batch": 1, "replay_buffer": make()}
    envs = of.factories(trial.num_workers)
    if settings.make_buffer is None and not shared:
        try:
            trial.collector("async", envs, of.constant(), **options)
        except ValueError as error:
            expect("replay_buffer" in str(error), f"expected an error that names replay_buffer, got: {error}")
            return
        raise AssertionError("expected a replay buffer of this process to be refused: each worker would fill a copy")
    collector = trial.collector("async", envs, of.constant(), **options)
    for batch in collector:
        expect(batch is None, f"with a replay buffer: expected None for each batch, got {type(batch).__name__}")
    filled = options["replay_buffer"]
    expect(len(filled) > 0, "expected frames in the replay buffer, got none")
    of.whole_trajectories([filled[:]], ended=True)


def backpressure(trial: Trial) -> None:
    """Workers rest while nothing is taken from them, and nothing is lost by that."""
    each, total = 20, 20 * 40
    envs = of.factories(trial.num_workers)
    collector = trial.collector("async", envs, of.constant(), each=each, total_frames=total)
    batches = [collector.next().clone()]
    most = each * (1 + 2 * trial.num_workers)
    stepped, since = -1, time.monotonic()
    while time.monotonic() < since + _STILL_S:
        now = sum(worker["frames"] for worker in collector.stats()["workers"])
        if now != stepped:
            stepped, since = now, time.monotonic()
        expect(stepped <= most, f"one batch was taken: expected at most {most} frames to be stepped, got {stepped}")
        time.sleep(0.05)
    batches += [batch.clone() for batch in collector]
    found = sum(batch.numel() for batch in batches)
    expect(found == total, f"expected {total} frames, got {found}")
    of.no_episode_missing(of.whole_trajectories(batches))
