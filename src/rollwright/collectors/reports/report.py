"""What ``stats()`` of a collector means, in words: where the time goes, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

STAGES = {
    "env": "environment",
    "policy": "policy",
    "write": "writing frames",
    "weights": "taking weights",
    "wait": "waiting for work",
}
_BAR = 24  # characters of a whole bar
_MUCH = 0.5  # of the time: worth a remark
_UNEVEN = 1.5  # times as long as the fastest worker: worth a remark


def report_of(name: str, stats: Mapping[str, Any]) -> str:
    """Lines about a collector.

    Args:
        name: of its class.
        stats: what its ``stats()`` returned.
    """
    shares = shares_of(stats)
    lines = [_headline(name, stats)]
    if shares:
        lines += ["", "Where the time goes" + (" (all workers together)" if "workers" in stats else "")]
        spent = stats["seconds"]
        for stage, share in shares.items():
            taken = _seconds(spent.get(stage))
            lines.append(f"  {STAGES.get(stage, stage):<17}{share:>5.0%}{taken}  {'█' * round(_BAR * share)}".rstrip())
    facts = [*_facts(stats)]
    remarks = [*_remarks(stats, shares)]
    for title, found in (("State", facts), ("What you can do", remarks)):
        if found:
            lines += ["", title, *(f"  - {line}" for line in found)]
    return "\n".join(lines)


def shares_of(stats: Mapping[str, Any]) -> dict[str, float]:
    """The share of each stage in the time that was measured; empty before the first batch."""
    seconds = dict(stats.get("seconds") or {})
    whole = seconds.pop("total", 0.0)
    if "workers" in stats:
        whole += seconds.get("wait", 0.0)  # the total of a worker is that of its rollouts
    whole = max(whole, sum(seconds.values()))
    if not whole:
        return {}
    shares = {stage: seconds[stage] / whole for stage in sorted(seconds, key=lambda stage: -seconds[stage])}
    other = 1.0 - sum(shares.values())
    return {**shares, "everything else": other} if other > 0.005 else shares


def _headline(name: str, stats: Mapping[str, Any]) -> str:
    rate, mean = stats.get("frames_per_second"), stats.get("mean_return")
    parts = [f"{stats['frames']:,} frames in {stats['batches']:,} batches"]
    if rate:
        parts.append(f"{rate:,.0f} frames/s")
    if stats.get("episodes"):
        parts.append(f"{stats['episodes']:,} episodes" + ("" if mean is None else f", mean return {mean:.4g}"))
    return f"{name}: {'; '.join(parts)}"


def _facts(stats: Mapping[str, Any]) -> Iterator[str]:
    workers = stats.get("workers")
    if isinstance(workers, list) and workers:
        yield f"workers: {stats['workers_alive']} of {len(workers)} alive, {stats['restarts']} restarts"
        spent = _seconds_a_batch(workers)
        if len(spent) > 1:
            slowest = max(spent, key=lambda index: spent[index])
            fastest = min(spent.values())
            yield f"slowest worker: {slowest}, {spent[slowest]:.3g} s a batch (the fastest {fastest:.3g} s)"
    version, lag = stats.get("policy_version"), stats.get("policy_lag")
    if lag is None and version and "policy_version_acting" in stats:
        lag = version - stats["policy_version_acting"]
    if lag is not None:
        yield f"weights: version {version}; the oldest that act are {lag} versions behind"
    elif version:
        yield f"weights: version {version}"
    leases = stats.get("leases")
    if leases:
        yield f"batches that you hold: {leases['held']} of {leases['most']}"
    yield from _queued(stats)
    if stats.get("bytes_held"):
        yield f"memory of batches: {stats['bytes_held'] / 1e6:,.1f} MB"
    if stats.get("waiting_for"):
        yield f"waiting for {stats['waiting_for']}"
    background = stats.get("background") or {}
    if background.get("error"):
        yield f"the thread of start() has failed: {background['error']}"


def _queued(stats: Mapping[str, Any]) -> Iterator[str]:
    """What was collected and not learned from yet."""
    if buffer := stats.get("buffer"):
        fill = f"{buffer['size']:,} of {buffer['capacity']:,} elements ({buffer['utilization']:.0%})"
        yield f"buffer: {fill}, {stats['write_count'] or 0:,} written so far"
    elif stats.get("write_count") is not None:
        yield f"elements written to the buffer so far: {stats['write_count']:,}"
    if stats.get("undelivered"):
        yield f"rollouts that wait for your loop: {stats['undelivered']}"
    if stats.get("trajectories_held"):
        yield f"complete trajectories that no batch has yet: {stats['trajectories_held']}"
    if limiter := stats.get("limiter"):
        yield from (f"the limiter of the buffer holds up: {reason}" for reason in limiter["waiting"])


def _seconds(spent: float | None) -> str:
    return " " * 11 if spent is None else f"{spent:>9,.3g} s"


def _seconds_a_batch(workers: list[Mapping[str, Any]]) -> dict[int, float]:
    """What each worker needs for one rollout."""
    return {each["index"]: each["seconds"]["total"] / each["batches"] for each in workers if each["batches"]}


def _held_up_by(stats: Mapping[str, Any]) -> int | None:
    """The worker that has next to no time to wait, where the others wait for it."""
    workers = stats.get("workers")
    spent = _seconds_a_batch(workers) if isinstance(workers, list) else {}
    if len(spent) < 2:
        return None
    slowest = max(spent, key=lambda index: spent[index])
    seconds = next(each["seconds"] for each in workers or () if each["index"] == slowest)
    busy = seconds["total"] > _MUCH * (seconds["total"] + seconds.get("wait", 0.0))
    return slowest if busy and spent[slowest] > _UNEVEN * min(spent.values()) else None


def _remarks(stats: Mapping[str, Any], shares: Mapping[str, float]) -> Iterator[str]:
    """What is slow, and what to do; the largest first."""
    has_workers = isinstance(stats.get("workers"), list)
    slowest = _held_up_by(stats)
    if slowest is not None:
        yield (
            f"Worker {slowest} is much slower than the others: look at its environment. In a synchronous batch the "
            "others wait for it; with sync=False or preemptive_threshold= they do not."
        )
    elif shares.get("wait", 0.0) > _MUCH:
        yield (
            "Workers wait for your loop most of the time: learn faster, or use fewer workers. sync=False lets them "
            "go on while you learn."
        )
    elif shares.get("env", 0.0) > _MUCH:
        more = "more workers (num_collectors=)" if has_workers else "several processes (num_collectors=N)"
        yield f"The environment takes most of the time: step several side by side (num_envs=), or use {more}."
    elif shares.get("policy", 0.0) > _MUCH:
        yield (
            "The policy takes most of the time: act for several environments at once (num_envs=), try "
            "compile_policy=True, or policy_device= with a GPU for large networks."
        )
    for part, explanation in (stats.get("paths") or {}).items():
        if part in ("env", "policy") and not str(explanation).startswith("native"):
            what = "environment" if part == "env" else "policy"
            yield f"The {what} runs on TensorDicts, which costs time at each step: {explanation}."
    leases = stats.get("leases") or {}
    if leases.get("batches_copied"):
        yield (
            f"{leases['batches_copied']} batches were copied because you keep more than {leases['most']}: drop them, "
            "or raise max_batches_held."
        )
    if stats.get("frames_stale"):
        yield f"{stats['frames_stale']:,} frames were thrown away (max_policy_lag): publish less often, or raise it."
    if stats.get("frames_dropped"):
        yield f"{stats['frames_dropped']:,} frames were dropped after errors."
    if stats.get("restarts"):
        yield f"Workers were replaced {stats['restarts']} times: look at the warnings for the reason."
