"""``python -m tests.hosts 3``: three hosts to try things on, until Ctrl-C."""

from __future__ import annotations

import signal
import sys

from tests.hosts.namespaces import Network, why_not

if __name__ == "__main__":
    if (why := why_not()) is not None:
        sys.exit(why)
    with Network(int(sys.argv[1]) if len(sys.argv) > 1 else 2) as network:
        for host in network.hosts:
            print(f"{host.name} {host.address}: {' '.join(host.command('COMMAND'))}")
        try:
            signal.pause()
        except KeyboardInterrupt:
            print()
