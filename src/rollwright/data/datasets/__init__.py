"""Datasets on disk: one long batch in a memory-mapped TensorDict, and a description in JSON.

::

    runs/cartpole/
      dataset.json      what the frames are, where they come from, how many are complete
      frames/           the memory-mapped TensorDict, or
      rows/             frames with text, objects and ragged entries, each encoded by itself

The TensorDict has the layout of a collector's batch, ``[*env, T]``: every environment's frames lie in
order of time, so that trajectories are contiguous. ``dataset.json`` is replaced after each batch; frames
beyond the steps that it counts were allocated, not collected.
"""

from rollwright.data.datasets.description import describe_dataset, load_dataset, remove_dataset
from rollwright.data.datasets.episodes import Episodes, Summary, episodes_of, summarize
from rollwright.data.datasets.formats import save_parquet
from rollwright.data.datasets.writer import DatasetWriter

__all__ = [
    "DatasetWriter",
    "Episodes",
    "Summary",
    "describe_dataset",
    "episodes_of",
    "load_dataset",
    "remove_dataset",
    "save_parquet",
    "summarize",
]
