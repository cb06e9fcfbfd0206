"""How rows of a dataset are read, by position: indexed datasets, streams, stateful loaders, files of JSON lines."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch

from rollwright.errors import EnvError

_MOST_MARKS = 256

Row = Mapping[str, Any]


class Read(NamedTuple):
    """A row that was read: its epoch, its index in the dataset, its columns."""

    epoch: int
    number: int
    row: Row


class RowReader(ABC):
    """Reads rows by their position, which counts on from epoch to epoch."""

    @abstractmethod
    def read(self, position: int) -> Read:
        """The row at a position; positions are asked for in rising order.

        Raises:
            StopIteration: all epochs are over.
            EnvError: the dataset is empty, or holds something else than rows.
        """

    @abstractmethod
    def restart(self, seed: int) -> bool:
        """Read from the start, shuffled by ``seed``; False: what was read already cannot be read again."""

    def forget_before(self, position: int) -> None:  # noqa: B027  (most remember nothing)
        """Positions before this one are not asked for again."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """What it takes to read again from the position of the last :meth:`forget_before`."""

    def check_state(self, state_dict: Mapping[str, Any]) -> None:
        """Raise what :meth:`load_state_dict` would raise; nothing is changed.

        Raises:
            KeyError: entries are missing.
            ValueError, EnvError: it is of another dataset, or this one cannot be read again.
        """
        missing = sorted(self.state_dict().keys() - state_dict.keys())
        if missing:
            raise KeyError(f"state_dict['reader']: expected {missing} among its entries, got {sorted(state_dict)}.")

    @abstractmethod
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a saved state, which :meth:`check_state` has passed."""


def reader_of(dataset: Any, *, epochs: int | None, shuffle: bool, batched: bool | None, key: str) -> RowReader:
    """The reader for a dataset, see :class:`~rollwright.envs.llm.DatasetSource`."""
    if isinstance(dataset, RowReader):
        return dataset
    if isinstance(dataset, (str, Path)):
        dataset = JsonLines(dataset)
    if isinstance(dataset, Mapping):
        raise TypeError(
            f"dataset: expected rows, got one mapping with {sorted(map(str, dataset))}. Pass a list of rows, "
            "[{'text': ...}, ...], or a dataloader that yields batches."
        )
    if batched is None:
        batched = bool(getattr(dataset, "batch_size", None)) or getattr(dataset, "batch_sampler", None) is not None
    if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__") and not batched:
        return IndexedReader(dataset, epochs, shuffle, key)
    if shuffle:
        raise ValueError(
            f"shuffle: {type(dataset).__name__} has no __len__ and __getitem__, and cannot be shuffled. "
            "Pass a list or a map-style dataset, or let the dataloader shuffle."
        )
    if not callable(dataset) and not hasattr(dataset, "__iter__"):
        raise TypeError(
            f"dataset: expected an iterable, a function that returns one, a map-style dataset or a path, got "
            f"{type(dataset).__name__}. Pass a list of rows, for example."
        )
    return StreamReader(dataset, epochs, batched, key)


class JsonLines(Sequence[Row]):
    """The rows of a file with one JSON object a line; lines are found once and parsed when they are read.

    Args:
        path: of the file, UTF-8. Empty lines are left out.

    Raises:
        FileNotFoundError: there is none.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._offsets: list[int] = []
        at = 0
        with self.path.open("rb") as file:
            for line in file:
                if line.strip():
                    self._offsets.append(at)
                at += len(line)

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, index: Any) -> Any:
        with self.path.open("rb") as file:
            file.seek(self._offsets[index])
            line = file.readline()
        try:
            return json.loads(line)
        except ValueError as error:
            raise EnvError(
                f"dataset: row {index} of {self.path} is no JSON: {error}. Write one JSON object a line."
            ) from error


def as_row(value: Any, key: str, where: str) -> Row:
    """A row of a dataset; strings and tensors stand for a row with one column."""
    if isinstance(value, Mapping):
        return value
    if isinstance(value, str):
        return {key: value}
    if isinstance(value, torch.Tensor):
        return {"tokens": value}
    remedy = "Give rows as {'text': ...}."
    if isinstance(value, list) and value and isinstance(value[0], (Mapping, str, torch.Tensor)):
        remedy = "It is a batch of rows: pass itertools.chain.from_iterable(dataset), or a torch DataLoader."
    raise EnvError(
        f"dataset: {where} is a {type(value).__name__}, expected a mapping of columns, a string or a tensor of tokens. "
        f"{remedy}"
    )


def empty() -> EnvError:
    """The error about a dataset without rows."""
    return EnvError(
        "dataset: expected at least one row, got an empty dataset. Check its path, its split and its filters."
    )


class IndexedReader(RowReader):
    """Reads a dataset that has ``__len__`` and ``__getitem__``."""

    def __init__(self, dataset: Any, epochs: int | None, shuffle: bool, key: str) -> None:
        self._dataset, self._epochs, self._shuffle, self._key = dataset, epochs, shuffle, key
        self._num = len(dataset)
        if not self._num:
            raise ValueError(str(empty()))
        self._seed = 0
        self._order: tuple[int, torch.Tensor] | None = None  # of an epoch

    def read(self, position: int) -> Read:
        """The row at a position; positions are asked for in rising order."""
        epoch, place = divmod(position, self._num)
        if self._epochs is not None and epoch >= self._epochs:
            raise StopIteration
        index = self._permutation(epoch)[place].item() if self._shuffle else place
        return Read(epoch, int(index), as_row(self._dataset[int(index)], self._key, f"row {index}"))

    def _permutation(self, epoch: int) -> torch.Tensor:
        if self._order is None or self._order[0] != epoch:
            generator = torch.Generator().manual_seed((self._seed * 1_000_003 + epoch) % 2**63)
            self._order = epoch, torch.randperm(self._num, generator=generator)
        return self._order[1]

    def restart(self, seed: int) -> bool:
        """Read from the start, shuffled by ``seed``; False: what was read already cannot be read again."""
        self._seed, self._order = seed, None
        return True

    def state_dict(self) -> dict[str, Any]:
        """What it takes to read again from the position of the last :meth:`forget_before`."""
        return {"rows": self._num}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """See :meth:`RowReader.load_state_dict`: the position is all that there is."""

    def check_state(self, state_dict: Mapping[str, Any]) -> None:
        """Raise what :meth:`load_state_dict` would raise; nothing is changed."""
        if state_dict.get("rows") != self._num:
            raise ValueError(
                f"state_dict: the place is in a dataset of {state_dict.get('rows', 'unknown many')} rows, this one has "
                f"{self._num}. Load it with the dataset that it was saved with."
            )


@dataclass(frozen=True)
class _Mark:
    """A place from which a stream can be read again."""

    position: int  # of the next row
    epoch: int
    start: int  # position of the epoch's first row
    loader: Any  # state of the loader; None: read from the epoch's start


class StreamReader(RowReader):
    """Reads what can only be iterated; goes to a position by reading up to it.

    Args:
        dataset: an iterable, or a function that returns one. With ``state_dict`` and ``load_state_dict`` it is loaded
            at the last batch that was not delivered whole, and read on from there.
        epochs: None: endless, or once for an iterator.
        batched: its items are batches: mappings of columns of one length, or lists of rows.
        key: of the column that strings stand for.
    """

    def __init__(self, dataset: Any, epochs: int | None, batched: bool, key: str) -> None:
        self._dataset, self._epochs, self._batched, self._key = dataset, epochs, batched, key
        self._factory: Callable[[], Iterable[Any]] | None = None
        if not hasattr(dataset, "__iter__"):
            self._factory = dataset
        self._once = self._factory is None and hasattr(dataset, "__next__")
        self._stateful = hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict")
        if self._once and not self._stateful and epochs is not None and epochs > 1:
            raise ValueError(
                f"epochs: expected 1 for {type(dataset).__name__}, an iterator, which can be read once, got {epochs}. "
                "Pass a function that returns a new iterator, or a list."
            )
        self._iterator: Iterator[Any] | None = None
        self._rows: deque[Row] = deque()  # of the current batch
        self._epoch = self._start = self._at = 0
        self._over = False
        self._marks: deque[_Mark] = deque()
        self._initial = self._place()

    def __getstate__(self) -> dict[str, Any]:
        if self._iterator is not None and not self._once:
            raise EnvError(
                "dataset: a stream that was read from cannot be sent to another process. Send it before the first "
                "prompt is drawn, or send a function that makes the environment."
            )
        return self.__dict__

    def read(self, position: int) -> Read:
        """The row at a position; positions are asked for in rising order."""
        while True:
            row = self._next_row()
            if self._at > position:
                return Read(self._epoch, position - self._start, row)

    def _next_row(self) -> Row:
        while not self._rows:
            if self._over:
                raise StopIteration
            if self._iterator is None:
                self._iterator = iter(self._factory() if self._factory is not None else self._dataset)
                self._mark()
            elif self._stateful:
                self._mark()
            try:
                item = next(self._iterator)
            except StopIteration:
                self._end_epoch()
                continue
            where = f"item {self._at - self._start}"
            self._rows.extend(split(item, self._key, where) if self._batched else [as_row(item, self._key, where)])
        self._at += 1
        return self._rows.popleft()

    def _end_epoch(self) -> None:
        if self._at == self._start:
            if self._epoch == 0:
                raise empty()
            if not self._stateful:
                raise EnvError(
                    f"dataset: {type(self._dataset).__name__} gave {self._at} rows, and none in epoch {self._epoch}. "
                    "Pass a function that returns a new iterator each time, or epochs=1."
                )
        self._epoch, self._start = self._epoch + 1, self._at
        self._over = (self._once and not self._stateful) or self._epoch == self._epochs
        self._iterator = None

    def _place(self) -> Any:
        """What the dataset saves of itself, a copy: what it gave may be its own memory. None: it saves nothing."""
        return deepcopy(self._dataset.state_dict()) if self._stateful else None

    def _mark(self) -> None:
        self._marks.append(_Mark(self._at, self._epoch, self._start, self._place()))
        if len(self._marks) > _MOST_MARKS:  # nobody says what was delivered: further apart will do
            self._marks = deque(islice(self._marks, 0, None, 2))

    def forget_before(self, position: int) -> None:
        """Positions before this one are not asked for again."""
        while len(self._marks) > 1 and self._marks[1].position <= position:
            self._marks.popleft()

    def restart(self, seed: int) -> bool:
        """Read from the start, shuffled by ``seed``; False: what was read already cannot be read again."""
        if self._iterator is None and not self._at:
            return True
        if self._once and not self._stateful:
            return False
        if self._stateful:
            self._dataset.load_state_dict(deepcopy(self._initial))
        self._begin(_Mark(0, 0, 0, None))
        return True

    def _begin(self, mark: _Mark) -> None:
        self._iterator, self._over = None, False
        self._rows.clear()
        self._marks.clear()
        self._at, self._epoch, self._start = mark.position, mark.epoch, mark.start

    def state_dict(self) -> dict[str, Any]:
        """What it takes to read again from the position of the last :meth:`forget_before`."""
        mark = self._marks[0] if self._marks else _Mark(self._at, self._epoch, self._start, self._initial)
        return dict(vars(mark))

    def check_state(self, state_dict: Mapping[str, Any]) -> None:
        """Raise what :meth:`load_state_dict` would raise; nothing is changed."""
        super().check_state(state_dict)
        if self._iterator is not None and self._once and not self._stateful:
            raise EnvError(
                f"dataset: {type(self._dataset).__name__}, an iterator, was read from before a place in it was loaded. "
                "Load into a new environment, or pass a function that returns an iterator."
            )

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a saved state, which :meth:`check_state` has passed."""
        mark = _Mark(*(state_dict[name] for name in ("position", "epoch", "start", "loader")))
        if self._stateful and mark.loader is not None:
            self._dataset.load_state_dict(deepcopy(mark.loader))
        else:
            mark = _Mark(mark.start, mark.epoch, mark.start, None)
        if self._once and not self._stateful:
            mark = _Mark(0, 0, 0, None)
        self._begin(mark)


def split(batch: Any, key: str, where: str) -> list[Row]:
    """The rows of a batch: a list of rows, or a mapping of columns."""
    if isinstance(batch, (list, tuple)):
        return [as_row(item, key, where) for item in batch]
    if isinstance(batch, torch.Tensor):
        batch = {"tokens": batch}
    if not isinstance(batch, Mapping):
        raise EnvError(
            f"dataset: {where} is a {type(batch).__name__}, expected a batch: a mapping of columns or a list of rows. "
            "Pass batched=False for a dataset of single rows."
        )
    sizes = {name: len(column) for name, column in batch.items() if hasattr(column, "__len__")}
    if len(sizes) < len(batch) or len(set(sizes.values())) != 1 or any(isinstance(v, str) for v in batch.values()):
        raise EnvError(
            f"dataset: {where} is no batch: expected columns of one length, got "
            f"{ {name: sizes.get(name, 'no length') for name in batch} }. Pass batched=False for single rows."
        )
    num = next(iter(sizes.values()))
    return [{name: column[i] for name, column in batch.items()} for i in range(num)]
