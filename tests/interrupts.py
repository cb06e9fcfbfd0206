"""Ctrl-C at random moments, in the middle of whatever the main thread does."""

from __future__ import annotations

import dis
import functools
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


class EverywhereOnce:
    """Ctrl-C at each place of the package where Python handles signals, in turn: at one in each ``with`` block.

    These are the operations after a call of a function in C, the beginning of a function, and the end of a turn of a
    loop. What holds off signals holds off these.

    Args:
        after_all_calls: whether calls of functions in Python count, too. So it is where something has replaced the
            evaluation of frames, as ``torch.compile`` does.

    Attributes:
        places: where it was pressed.
        pressed: whether it was, in the last block.
    """

    def __init__(self, *, after_all_calls=False):
        self.places, self.pressed, self._after_all = set(), False, after_all_calls
        self._before = {}

    def __enter__(self):
        self.pressed = False
        self._before.clear()
        sys.settrace(self._called)

    def __exit__(self, *error):
        sys.settrace(None)

    def _called(self, frame, event, arg):
        if not self._after_all:
            self._before[id(frame.f_back)] = None
        if "/rollwright/" not in frame.f_code.co_filename:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._step

    def _step(self, frame, event, arg):
        if event == "opcode":
            before = self._before.get(id(frame))
            self._before[id(frame)] = _operations(frame.f_code).get(frame.f_lasti)
            place = frame.f_code, frame.f_lasti
            if before in _INTERRUPTIBLE and not self.pressed and place not in self.places:
                self.pressed = True
                self.places.add(place)
                signal.getsignal(signal.SIGINT)(signal.SIGINT, frame)
        return self._step


_INTERRUPTIBLE = {"RESUME", "JUMP_BACKWARD", "CALL", "CALL_FUNCTION_EX"}


@functools.cache
def _operations(code):
    return {each.offset: each.opname for each in dis.get_instructions(code)}


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
