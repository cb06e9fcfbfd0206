"""Shared by the examples: settings from the command line, and a run with progress, logs, checkpoints and a curve."""

from __future__ import annotations

import argparse
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, fields
from itertools import repeat
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import torch

from rollwright.collectors import BaseCollector, loggers

LOGGERS = {"csv": "CSVLogger", "tensorboard": "TensorBoardLogger", "wandb": "WandbLogger", "mlflow": "MLflowLogger"}
S = TypeVar("S", bound="Common")


@dataclass
class Common:
    """Settings of every example."""

    seed: Annotated[int, "seeds environments, networks, and what is drawn"] = 0
    total_frames: Annotated[int, "stop after this many frames"] = 100_000
    goal: Annotated[float, "stop at this mean return"] = math.inf
    log_dir: Annotated[Path | None, "folder for logs and checkpoint.pt"] = None
    logger: Annotated[str, f"what writes the logs: {', '.join(LOGGERS)}"] = "csv"
    save_every: Annotated[float, "seconds between two checkpoints"] = 60.0
    resume: Annotated[bool, "continue from the checkpoint in --log-dir"] = False
    plot: Annotated[Path | None, "save the learning curve as this picture"] = None

    def in_batches(self, frames: int) -> int:
        """``total_frames`` in whole batches of so many frames."""
        return -(-self.total_frames // frames) * frames


def parse(kind: type[S]) -> S:
    """Settings from the command line: an option for each field; the annotation is its help."""
    description = (sys.modules[kind.__module__].__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(description=description)
    hints = get_type_hints(kind, include_extras=True)
    for field in fields(kind):
        hint, text = get_args(hints[field.name])
        made = get_args(hint)[0] if get_origin(hint) else hint  # Path of Path | None
        how: dict[str, Any] = {"action": argparse.BooleanOptionalAction} if made is bool else {"type": made}
        parser.add_argument(
            f"--{field.name.replace('_', '-')}", default=field.default, help=f"{text} (default: {field.default})", **how
        )
    given = kind(**vars(parser.parse_args()))
    if given.logger not in LOGGERS:
        parser.error(f"--logger: expected one of {', '.join(LOGGERS)}, got {given.logger}")
    if given.resume and not given.log_dir:
        parser.error("--resume: needs the folder of the run, --log-dir")
    return given


class Run:
    """Yields what there is to learn from, until the last frame, the goal or Ctrl-C, and ends the collector.

    Ctrl-C ends the run after the round that it comes in, with a checkpoint; a second one ends it at once.

    Args:
        settings: of the example.
        collector: ended with the run.
        parts: what else a checkpoint holds, by name: networks, optimizers, a buffer.
        measure: from ``collector.stats()`` to the value of the learning curve, or to None between two points. Without
            it, it is the mean return of the last 100 episodes that were collected.
        background: start the collector, which fills a buffer, and yield None for each round of learning.
    """

    def __init__(
        self,
        settings: Common,
        collector: BaseCollector,
        parts: Mapping[str, Any],
        *,
        measure: Callable[[Mapping[str, Any]], float | None] | None = None,
        background: bool = False,
    ) -> None:
        self.settings, self.collector, self.background, self._measure = settings, collector, background, measure
        self.parts = {"collector": collector, **parts}
        self.curve: list[tuple[int, float]] = []  # frames, value
        self.reached = self.interrupted = False
        self._path = settings.log_dir / "checkpoint.pt" if settings.log_dir else None
        self._begun = self._saved = time.perf_counter()
        collector.set_seed(settings.seed)
        if settings.resume:
            state = torch.load(self._path, weights_only=True)
            for name, part in self.parts.items():
                part.load_state_dict(state[name])
            self.curve, self.reached = [*map(tuple, state["curve"])], state["reached"]
            self.reached = self.reached and self.curve[-1][1] >= settings.goal  # which may be a higher one now

    @property
    def frames(self) -> int:
        """Frames that were collected."""
        return self.collector.stats(workers=False)["frames"]

    def __iter__(self) -> Iterator[Any]:
        handler = signal.signal(signal.SIGINT, self._interrupt)
        with ExitStack() as scope:
            scope.callback(signal.signal, signal.SIGINT, handler)
            if self.settings.log_dir:
                made = getattr(loggers, LOGGERS[self.settings.logger])(self.settings.log_dir)
                self.collector.log_to(scope.enter_context(made))
            scope.callback(self.collector.async_shutdown if self.background else self.collector.shutdown)
            yield from self._rounds()
        frames, value = self.curve[-1] if self.curve else (self.frames, math.nan)
        why = "interrupted" if self.interrupted else "goal reached" if self.reached else "no frames left"
        seconds = time.perf_counter() - self._begun
        print(f"\n{why}: {frames:,} frames, mean return {value:.1f}, {seconds:.0f} s", flush=True)
        if self.settings.plot:
            self._plot(self.settings.plot)

    def _rounds(self) -> Iterator[Any]:
        if self.background:
            self.collector.start()
        batches = repeat(None) if self.background else iter(self.collector)
        ends = self.reached
        while not ends:
            batch = next(batches, self)
            ends = batch is self  # there are no frames left
            if not ends:
                yield batch
                ends = self._record() or self.interrupted
            if self._path and (ends or time.perf_counter() - self._saved >= self.settings.save_every):
                self.save()

    def _record(self) -> bool:
        """Add a point to the curve and print it; whether it is the last one."""
        stats = self.collector.stats(workers=False)
        value = self._measure(stats) if self._measure else stats["mean_return"]
        if value is not None:
            self.curve.append((stats["frames"], value))
            self.reached = value >= self.settings.goal and (self._measure is not None or stats["episodes"] >= 100)
            line = (
                f"{stats['frames']:,} frames, mean return {value:.1f}, {stats['frames_per_second'] or 0:,.0f} frames/s"
            )
            print(f"\r{line:60}", end="", flush=True)
        return self.reached or stats["frames"] >= self.settings.total_frames

    def save(self) -> None:
        """Write the checkpoint, as a whole or not at all."""
        with self.collector.pause() if self.background else nullcontext():
            state = {name: part.state_dict() for name, part in self.parts.items()}  # the collector ends its batch first
            torch.save({**state, "curve": self.curve, "reached": self.reached}, self._path.with_suffix(".tmp"))
        os.replace(self._path.with_suffix(".tmp"), self._path)
        self._saved = time.perf_counter()

    def _interrupt(self, number: int, frame: Any) -> None:
        if self.interrupted:
            raise KeyboardInterrupt
        self.interrupted = True

    def _plot(self, path: Path) -> None:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.add_subplot(xlabel="frames", ylabel="mean return", title=path.stem.replace("_", " "))
        axes.plot(*zip(*self.curve, strict=True) if self.curve else ([], []))
        figure.savefig(path, dpi=120)
