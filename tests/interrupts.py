"""Ctrl-C at random moments, in the middle of whatever the main thread does."""

from __future__ import annotations

import random
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Raising:
    """Handles SIGINT by raising inside of a ``with`` block; elsewhere it does nothing.

    Attributes:
        raises: whether the block is entered, and nothing was raised in it yet.
        count: how often it has raised.
    """

    def __init__(self):
        self.raises, self.count = False, 0

    def __enter__(self):
        self.raises = True

    def __exit__(self, *error):
        self.raises = False

    def handle(self, number, frame):
        if self.raises:
            self.raises = False
            self.count += 1
            raise KeyboardInterrupt


@contextmanager
def pressed(least_s: float, most_s: float, switch_s: float | None = None) -> Iterator[Raising]:
    """Send SIGINT to the main thread again and again, and yield what it raises in.

    Args:
        least_s: shortest time between two.
        most_s: longest time.
        switch_s: after which the main thread lets others run: if that is short, it is interrupted between any two
            calls, and not only where it waits.
    """
    raising, over, moments, main = Raising(), threading.Event(), random.Random(0), threading.get_ident()

    def press():
        while not over.wait(moments.uniform(least_s, most_s)):
            signal.pthread_kill(main, signal.SIGINT)

    before, interval = signal.signal(signal.SIGINT, raising.handle), sys.getswitchinterval()
    pressing = threading.Thread(target=press)
    sys.setswitchinterval(switch_s or interval)
    pressing.start()
    try:
        yield raising
    finally:
        over.set()
        pressing.join()
        sys.setswitchinterval(interval)
        signal.signal(signal.SIGINT, before)
