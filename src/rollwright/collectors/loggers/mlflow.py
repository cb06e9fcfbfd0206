"""MLflowLogger: numbers and videos in MLflow. The only module that imports mlflow."""

from __future__ import annotations

import os
import re
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollwright._video import VideoFiles
from rollwright.collectors.loggers.base import StatsLogger
from rollwright.errors import require

_MOST_IN_A_CALL = 1000  # that servers take
_NOT_IN_NAMES = re.compile(r"[^\w\-./: ]")


class _Run(NamedTuple):
    client: Any
    id: str


class MLflowLogger(StatsLogger):
    """Writes into a run of MLflow: numbers as metrics, videos as artifacts below ``videos``.

    The run begins with the first point, and ends with :meth:`close`.

    Args:
        log_dir: folder of a local store, made where needed (to show it, newer versions of MLflow want
            ``MLFLOW_ALLOW_FILE_STORE=true mlflow ui --backend-store-uri FOLDER``); or an address, such as
            ``"http://localhost:5000"`` or ``"sqlite:///mlflow.db"``.
        experiment: that the run belongs to, made where needed.
        run_name: of the run; None: MLflow makes one up.
        prefix: of the names of metrics, where the logger is called as a function.
        every_s: seconds between two calls that write; see :class:`StatsLogger`.

    Raises:
        MissingExtraError: mlflow is not installed.
        ValueError: ``every_s`` is negative.
    """

    def __init__(
        self,
        log_dir: str | os.PathLike[str] = "mlruns",
        *,
        experiment: str = "rollwright",
        run_name: str | None = None,
        prefix: str = "collector",
        every_s: float = 0.0,
    ) -> None:
        super().__init__(log_dir, prefix=prefix, every_s=every_s)
        self._address = str(log_dir) if "://" in str(log_dir) else None
        self.experiment, self.run_name = experiment, run_name
        _mlflow()

    @property
    def run_id(self) -> str:
        """Of the run in this process."""
        with self._ready() as run:
            return str(run.id)

    def _opened(self) -> Any:
        if self._address is None:
            return super()._opened()
        if self._sink is None:
            self._sink = self._open(self.log_dir)
        return self._sink

    def _open(self, folder: Path) -> Any:
        if self._address is None:
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # newer versions want to be asked for one
        client = _mlflow().MlflowClient(tracking_uri=self._address or folder.absolute().as_uri())
        found = client.get_experiment_by_name(self.experiment)
        number = client.create_experiment(self.experiment) if found is None else found.experiment_id
        return _Run(client, client.create_run(number, run_name=self.run_name).info.run_id)

    def _write(self, sink: Any, values: dict[str, float], step: int) -> None:
        metric, now = _mlflow().entities.Metric, int(time.time() * 1000)
        points = [metric(_NOT_IN_NAMES.sub("_", name), float(value), now, step) for name, value in values.items()]
        for first in range(0, len(points), _MOST_IN_A_CALL):
            sink.client.log_batch(sink.id, metrics=points[first : first + _MOST_IN_A_CALL])

    def _write_video(self, sink: Any, name: str, frames: NDArray[np.uint8], step: int, fps: float) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = VideoFiles(folder).log_video(name.replace("/", "_"), frames.transpose(0, 3, 1, 2), step, fps)
            sink.client.log_artifact(sink.id, str(path), "videos")

    def _close(self, sink: Any) -> None:
        sink.client.set_terminated(sink.id)


def _mlflow() -> Any:
    return require("mlflow", extra="mlflow", purpose="MLflowLogger")
