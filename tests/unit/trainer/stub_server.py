"""A tiny HTTP server that answers as told and remembers what it was asked."""

import json
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Self


@dataclass(frozen=True)
class Asked:
    """One request.

    Attributes:
        method: GET or POST.
        target: path and query.
        body: of JSON, or None.
    """

    method: str
    target: str
    body: object = None


@dataclass(frozen=True)
class Answer:
    """What to answer.

    Attributes:
        status: of HTTP.
        body: an object goes as JSON, a string as it is.
        seconds: to wait before.
        hang_up: whether to close the connection instead.
    """

    status: int = 200
    body: object = None
    seconds: float = 0.0
    hang_up: bool = False


class _IPv6Server(ThreadingHTTPServer):
    address_family = socket.AF_INET6


class StubServer:
    """Answers by path; what is not listed gets 200 and an empty object."""

    def __init__(
        self, answers: Mapping[str, Answer] | None = None, host: str = "127.0.0.1"
    ) -> None:
        self.answers = dict(answers or {})
        self.asked: list[Asked] = []
        self.headers: list[dict[str, str]] = []
        kind = _IPv6Server if ":" in host else ThreadingHTTPServer
        self._server = kind((host, 0), _handler(self))
        self._server.daemon_threads = True
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.02,), daemon=True
        )
        self._thread.start()
        bare = f"[{host}]" if ":" in host else host
        self.name = f"{bare}:{self._server.server_port}"
        self.url = f"http://{self.name}"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._server.server_close()


def _handler(stub: StubServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_GET(self) -> None:
            self._handle()

        def do_POST(self) -> None:
            self._handle()

        def _handle(self) -> None:
            raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            body = json.loads(raw) if raw else None
            stub.asked.append(Asked(self.command, self.path, body))
            stub.headers.append(dict(self.headers.items()))
            answer = stub.answers.get(self.path.partition("?")[0], Answer())
            time.sleep(answer.seconds)
            if answer.hang_up:
                self.close_connection = True
                return
            text = answer.body if isinstance(answer.body, str) else json.dumps(answer.body or {})
            with suppress(OSError):
                self.send_response(answer.status)
                self.send_header("Content-Length", str(len(text.encode())))
                self.end_headers()
                self.wfile.write(text.encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    return Handler
