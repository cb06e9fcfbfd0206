"""Torchrun: rank 0 of a program is the learner, and the other ranks run its groups of workers."""

from __future__ import annotations

import importlib
import os
import socket
import time
from datetime import timedelta
from typing import Any, NamedTuple

from rollwright.collectors.workers.remote.joining import join

dist: Any = importlib.import_module("torch.distributed")  # which names few of its classes as public

_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_KEY = "rollwright/address"
_SET_S = 20.0


class Torchrun(NamedTuple):
    """What torchrun says of this process.

    Attributes:
        rank: of it.
        num_ranks: of the program.
        master: host of rank 0.
        port: of the store there.
    """

    rank: int
    num_ranks: int
    master: str
    port: int

    @classmethod
    def here(cls) -> Torchrun:
        """Of this process.

        Raises:
            ValueError: torchrun has not started it.
        """
        lacking = [name for name in _VARIABLES if not os.environ.get(name)]
        if lacking:
            raise ValueError(
                f"launcher='torchrun': expected a program that torchrun has started, and {', '.join(lacking)} "
                f"{'is' if len(lacking) == 1 else 'are'} not set. Start it with `torchrun --nproc-per-node N "
                "program.py`, or pass launcher='mp'."
            )
        rank, count, port = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
        return cls(rank, count, os.environ["MASTER_ADDR"], port)

    def store(self, timeout_s: float) -> Any:
        """The store of torchrun, or that of rank 0 where torchrun keeps none."""
        is_master = self.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True)
        store = dist.TCPStore(
            self.master,
            self.port,
            None,
            is_master,
            timedelta(seconds=timeout_s),
            wait_for_workers=False,
            multi_tenant=True,
        )
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return dist.PrefixStore(f"rollwright/{attempt}", store)


class TorchrunLauncher:
    """Says to the other ranks where the collector listens; see :class:`Launcher`.

    Args:
        run: of rank 0.
    """

    def __init__(self, run: Torchrun) -> None:
        self._store = run.store(_SET_S)
        self._launched: set[int] = set()

    def launch(self, group: int, address: tuple[str, int], secret: bytes) -> _Rank | None:
        """See :class:`Launcher`."""
        if group in self._launched:
            return _Rank(group + 1)
        self._store.set(f"{_KEY}/{group + 1}", f"{address[0]} {address[1]}")
        self._launched.add(group)
        return None


class _Rank:
    """A rank in the place of one that is gone: there is none."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def how_it_ended(self) -> str:
        """See :class:`Host`."""
        return f"was rank {self._rank} of torchrun, which starts no other rank by itself"

    def end(self, timeout_s: float) -> None:
        """See :class:`Host`."""


def serve_as_rank(run: Torchrun, secret: bytes, start_timeout_s: float) -> None:
    """Run a group of workers in this process, which is not rank 0, until the collector of rank 0 ends.

    Raises:
        TimeoutError: rank 0 has made no collector in time.
        HandshakeRefused: it has another secret.
    """
    began = time.monotonic()
    try:
        host, port = run.store(start_timeout_s).get(f"{_KEY}/{run.rank}").decode().split()
    except (dist.DistStoreError, dist.DistNetworkError) as error:
        raise TimeoutError(
            f"launcher='torchrun': rank {run.rank} has waited {time.monotonic() - began:.0f} s for rank 0 to make its "
            f"collector: {str(error).partition(chr(10))[0]}"
        ) from error
    name = f"{socket.gethostname()} (rank {run.rank})"
    join((host, int(port)), secret, group=run.rank - 1, name=name)
