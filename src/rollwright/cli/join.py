"""``rollwright join``: runs workers of a collector on another machine."""

from __future__ import annotations

import argparse
import sys

from rollwright._processes.network.handshake import SECRET, checked_secret, parse_address, secret_of
from rollwright.cli.errors import Failure
from rollwright.collectors.workers.remote.group import join


def run(arguments: argparse.Namespace) -> int:
    """Join, and serve until the collector ends; returns the exit status."""
    try:
        address = parse_address("HOST:PORT", arguments.address)
        secret = _secret(arguments)
        wait = f"{arguments.timeout} s at most"
        print(f"waiting for the collector at {arguments.address}, {wait}; Ctrl-C ends it", file=sys.stderr, flush=True)
        join(address, secret, name=arguments.name, timeout_s=arguments.timeout)
    except (ValueError, OSError) as error:
        raise Failure(str(error)) from error
    print("the collector has ended", file=sys.stderr)
    return 0


def _secret(arguments: argparse.Namespace) -> bytes:
    if arguments.secret_file is not None:
        found = arguments.secret_file.read_text().strip()
        checked_secret("--secret-file", found)
        return bytes(found.encode())
    secret = secret_of(None)
    if secret is None:
        raise Failure(
            f"the secret of the run is missing. Set {SECRET} to what the collector has, or pass --secret-file."
        )
    return secret.encode()
