"""Proxy: hands on TCP connections, and cuts them, or changes what they carry, when it is asked to."""

from __future__ import annotations

import contextlib
import socket
import threading

__all__ = ["Proxy"]


class Proxy:
    """Hands on connections to an address; what is on its way when they are cut is lost.

    Attributes:
        alter: takes what is about to be handed on, and whether it goes to who has connected; returns what is instead.
    """

    def __init__(self, address):
        self._to, self.alter = address, lambda content, is_back: content
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.address = self._socket.getsockname()[:2]
        self._pairs = []
        self.num_cut = 0
        self._lock = threading.Lock()

    def __enter__(self):
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error):
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._socket.close()
        self.cut()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._socket.accept()
                far = socket.create_connection(self._to)
                with self._lock:
                    self._pairs.append((near, far))
                for source, sink in ((near, far), (far, near)):
                    threading.Thread(target=self._hand_on, args=(source, sink, sink is near), daemon=True).start()

    def _hand_on(self, source, sink, is_back):
        with contextlib.suppress(OSError):
            while content := source.recv(1 << 12):
                sink.sendall(self.alter(content, is_back))
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def cut(self):
        with self._lock:
            pairs, self._pairs = self._pairs, []
        for pair in pairs:
            self.num_cut += 1
            for end in pair:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
                end.close()
