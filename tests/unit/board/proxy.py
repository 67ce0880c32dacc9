"""A TCP proxy whose connections can be cut."""

import contextlib
import selectors
import socket
import threading
from urllib.parse import urlsplit


class Proxy:
    """Forwards to a `tcp://` address; a context manager.

    Attributes:
        address: of the proxy.
        cuts: connections that were cut.
    """

    def __init__(self, target: str) -> None:
        parts = urlsplit(target)
        self._target = (parts.hostname, parts.port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.cuts = 0
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._lock = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def __enter__(self) -> "Proxy":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def cut(self) -> None:
        """Cut every connection; new ones are taken."""
        with self._lock:
            pairs, self._pairs = self._pairs, []
        for pair in pairs:
            self.cuts += 1
            for end in pair:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
                end.close()

    def close(self) -> None:
        """Cut every connection and take no new ones."""
        self._closed = True
        self._thread.join()
        self._listener.close()
        self.cut()

    def _run(self) -> None:
        self._listener.settimeout(0.01)
        while not self._closed:
            with contextlib.suppress(TimeoutError):
                near, _ = self._listener.accept()
                far = socket.create_connection(self._target)
                with self._lock:
                    self._pairs.append((near, far))
            with self._lock:
                pairs = list(self._pairs)
            _forward(pairs)


def _forward(pairs: list[tuple[socket.socket, socket.socket]]) -> None:
    with selectors.DefaultSelector() as selector:
        for near, far in pairs:
            with contextlib.suppress(ValueError, OSError):
                selector.register(near, selectors.EVENT_READ, far)
                selector.register(far, selectors.EVENT_READ, near)
        for key, _ in selector.select(0.005) if selector.get_map() else []:
            with contextlib.suppress(OSError, ValueError):
                assert isinstance(key.fileobj, socket.socket)
                key.data.sendall(key.fileobj.recv(65536))
