"""The middleware that refuses requests of a fenced engine, before a small ASGI application."""

import asyncio
import json
from typing import Any

import pytest

from reshard_vllm.fence import ROUTE, FenceMiddleware


async def application(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"generated"})


def ask(fence: FenceMiddleware, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
    sent: list[dict[str, Any]] = []
    pieces = [body[:3], body[3:]]

    async def receive() -> dict[str, Any]:
        piece = pieces.pop(0)
        return {"type": "http.request", "body": piece, "more_body": bool(pieces)}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": method, "path": path}
    asyncio.run(fence(scope, receive, send))
    return sent[0]["status"], sent[1]["body"]


def test_a_fenced_engine_refuses_until_the_fence_is_down() -> None:
    fence = FenceMiddleware(application)
    assert ask(fence, "POST", "/v1/completions") == (200, b"generated")
    assert ask(fence, "POST", ROUTE, b'{"reason": "two versions"}')[0] == 200

    for path in ("/v1/completions", "/v1/chat/completions", "/inference/v1/generate", "/generate"):
        status, body = ask(fence, "POST", path)
        error = json.loads(body)["error"]
        assert (status, error["type"]) == (503, "EngineFenced")
        assert error["message"].endswith("generates nothing: two versions")
    for method, path in (("GET", "/health"), ("POST", "/update_weights"), ("GET", "/v1/models")):
        assert ask(fence, method, path) == (200, b"generated")
    assert json.loads(ask(fence, "GET", ROUTE)[1]) == {"reason": "two versions"}

    ask(fence, "POST", ROUTE, b'{"reason": ""}')
    assert ask(fence, "POST", "/v1/completions") == (200, b"generated")


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"reason": 3}', b'{"x": 1}', b"x" * 70_000])
def test_junk_changes_nothing(body: bytes) -> None:
    fence = FenceMiddleware(application)
    ask(fence, "POST", ROUTE, b'{"reason": "two versions"}')
    assert ask(fence, "POST", ROUTE, body)[0] == 400
    assert fence.reason == "two versions"
