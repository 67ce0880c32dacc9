"""`--middleware reshard_vllm.FenceMiddleware`: a fenced engine refuses requests and says why.

Stock vLLM can only pause, and requests to a paused engine hang. This stands before vLLM's routes:
while the fence is up, whatever would generate is answered with 503. The trainer raises it after a
refit that may have left weights of two versions, and takes it down with the next one that succeeds.
Imports nothing, so that a server never fails because of it. Not here: what the workers know
(`receiver.py`).
"""

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final

ROUTE: Final = "/reshard/fence"
_GENERATING: Final = ("/v1/", "/v2/", "/inference/", "/generate", "/invocations", "/generative_")
_MAX_BODY_BYTES: Final = 2**16

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class FenceMiddleware:
    """ASGI middleware of one API server process.

    `GET /reshard/fence` tells the reason (empty: no fence); `POST` with `{"reason": text}` sets it.

    Attributes:
        reason: why nothing may be generated; empty if it may.
    """

    def __init__(self, app: App) -> None:
        """Stand before `app`; the fence is down."""
        self.reason = ""
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer what concerns the fence, pass on the rest."""
        path = scope.get("path", "")
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif path == ROUTE:
            await self._own(scope, receive, send)
        elif self.reason and scope.get("method") == "POST" and path.startswith(_GENERATING):
            error = {"message": self.refusal, "type": "EngineFenced", "code": 503}
            await _answer(send, 503, {"error": error})
        else:
            await self._app(scope, receive, send)

    @property
    def refusal(self) -> str:
        """What clients are told."""
        return f"this engine is fenced by reshard and generates nothing: {self.reason}"

    async def _own(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope.get("method") == "POST":
            try:
                given = json.loads(await _body(receive) or b"null")
                reason = given["reason"]
                if not isinstance(reason, str):
                    raise TypeError("reason is no text")
            except (ValueError, TypeError, KeyError) as error:
                await _answer(
                    send, 400, {"error": {"message": f'give {{"reason": text}}: {error}'}}
                )
                return
            self.reason = reason
        await _answer(send, 200, {"reason": self.reason})


async def _body(receive: Receive) -> bytes:
    body: bytes = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if len(body) > _MAX_BODY_BYTES:
            raise ValueError(f"more than {_MAX_BODY_BYTES} bytes")
        if not message.get("more_body"):
            return body


async def _answer(send: Send, status: int, value: object) -> None:
    payload = json.dumps(value).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(payload))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": payload})
