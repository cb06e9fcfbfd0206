"""WandbLogger: numbers and videos in Weights & Biases. The only module that imports wandb."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from rollwright._video import save_video
from rollwright.collectors.loggers.base import StatsLogger
from rollwright.errors import require


class WandbLogger(StatsLogger):
    """Writes into a run of Weights & Biases.

    The axis of all curves is ``step``, so that points may come in any order: those of a collector at its frames, those
    of an evaluation at the step that it is of. The run begins with the first point, and ends with :meth:`close`.

    Args:
        log_dir: folder of the run's files, made where needed.
        project: that the run belongs to.
        name: of the run; None: W&B makes one up.
        mode: ``"online"``, ``"offline"`` (files alone; ``wandb sync`` sends them later) or ``"disabled"``; None: what
            ``WANDB_MODE`` says, else online.
        config: settings to show beside the run.
        prefix: of the names of curves, where the logger is called as a function.
        every_s: seconds between two calls that write; see :class:`StatsLogger`.

    Raises:
        MissingExtraError: wandb is not installed.
        ValueError: ``every_s`` is negative, or ``mode`` is unknown.
    """

    def __init__(
        self,
        log_dir: str | os.PathLike[str] = ".",
        *,
        project: str = "rollwright",
        name: str | None = None,
        mode: Literal["online", "offline", "disabled"] | None = None,
        config: Mapping[str, Any] | None = None,
        prefix: str = "collector",
        every_s: float = 0.0,
    ) -> None:
        super().__init__(log_dir, prefix=prefix, every_s=every_s)
        if mode not in (None, "online", "offline", "disabled"):
            raise ValueError(f"mode: expected 'online', 'offline', 'disabled' or None, got {mode!r}.")
        self.project, self.name, self.mode = project, name, mode
        self.config = None if config is None else dict(config)
        _wandb()

    @property
    def run(self) -> Any:
        """The run of W&B in this process, for whatever else it offers."""
        with self._ready() as run:
            return run

    def _open(self, folder: Path) -> Any:
        run = _wandb().init(
            dir=str(folder),
            project=self.project,
            name=self.name,
            mode=self.mode,
            config=self.config,
            reinit="create_new",
        )
        run.define_metric("*", step_metric="step")
        return run

    def _write(self, sink: Any, values: dict[str, float], step: int) -> None:
        sink.log({**values, "step": step})

    def _write_video(self, sink: Any, name: str, frames: NDArray[np.uint8], step: int, fps: float) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "video.gif"
            save_video(path, frames, fps)
            sink.log({name: _wandb().Video(str(path), format="gif"), "step": step})  # copies the file

    def _close(self, sink: Any) -> None:
        sink.finish()


def _wandb() -> Any:
    return require("wandb", extra="wandb", purpose="WandbLogger")
