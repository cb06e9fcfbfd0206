"""Backend "tcp": groups of workers that join over sockets, started here or by hand on any machine."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from rollwright._options import Check
from rollwright._processes.network.handshake import SECRET, checked_address, checked_secret, secret_of
from rollwright.collectors.workers.remote.transport import (
    LocalLauncher,
    Manual,
    RemoteOptions,
    RemoteTransport,
    remote_transport,
)

if TYPE_CHECKING:
    from rollwright.collectors.workers.options import WorkerOptions


@dataclass(frozen=True, kw_only=True)
class Options(RemoteOptions):
    """Options of ``backend="tcp"``, besides those of :class:`RemoteOptions`.

    Attributes:
        launcher: ``"mp"``: groups are processes of this machine; ``"join"``: somebody starts each, on any machine, by
            ``rollwright join HOST:PORT``.
        address: where the collector listens, ``"HOST:PORT"``; port 0: any that is free. Groups on other machines need
            an address that they reach, such as ``"0.0.0.0:29400"`` for all of this machine's.
        secret: that whoever joins has to know; None: the environment variable ``ROLLWRIGHT_SECRET``, or, with
            ``launcher="mp"``, one that is made up. What is sent after the proof is authenticated, not encrypted.
    """

    launcher: Literal["mp", "join"] = "mp"
    address: Annotated[str, Check(checked_address)] = "127.0.0.1:0"
    secret: Annotated[str | None, Check(checked_secret)] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if secret_of(self.secret) is None and self.launcher == "join":
            raise ValueError(
                f"secret: launcher='join' needs one that those who join know, and neither secret= nor {SECRET} is "
                f"there. Set {SECRET}=$(openssl rand -hex 16) here and where `rollwright join` runs."
            )


def transport(options: Options, own: WorkerOptions, num_workers: int) -> RemoteTransport:
    """Listen, and start groups as workers are asked for.

    Raises:
        OSError: the address cannot be listened at.
    """
    secret = secret_of(options.secret) or secrets.token_hex(32)
    launcher = LocalLauncher() if options.launcher == "mp" else Manual()
    return remote_transport(options, own, num_workers, launcher, secret=secret.encode(), address=options.address)
