"""A fake HTTP engine: the routes and answers of vLLM 0.32 that a rollout client meets, no model.

The real ones are met in `tests/engine/test_rollouts.py`.
"""

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field

import httpx
from tests.unit.rollouts.simulated import token_of

from reshard.ids import PolicyVersion

Body = dict[str, object]
Change = Callable[[Body], None]


def untouched(choice: Body) -> None:
    """Answers are as vLLM's."""


@dataclass(eq=False)
class FakeEngine:
    """One server.

    Attributes:
        label: vLLM's weight version.
        scale_out: whether it was started with `--enable-scale-out`.
        token_seconds: of one token.
        fail_with: (status, body) of the next answers to generation, first in, first out.
        change: what is done to each choice before it is sent.
        requests: bodies of generation requests, in order.
    """

    label: str = "0"
    scale_out: bool = True
    token_seconds: float = 0.0
    down: bool = False
    fail_with: list[tuple[int, Body]] = field(default_factory=list)
    change: Change = untouched
    requests: list[Body] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)

    @property
    def transport(self) -> httpx.MockTransport:
        return httpx.MockTransport(self.handle)

    async def handle(self, request: httpx.Request) -> httpx.Response:
        if self.down:
            raise httpx.ConnectError("All connection attempts failed", request=request)
        path = request.url.path
        if path == "/weight_info":
            return httpx.Response(200, json={"weight_version": self.label})
        if path.startswith("/inference/v1/") and not self.scale_out:
            return httpx.Response(403, json={"detail": "Use --enable-scale-out to enable them."})
        body = json.loads(request.content)
        if path == "/inference/v1/abort_requests":
            self.aborted += body["request_ids"]
            return httpx.Response(200)
        assert path == "/inference/v1/generate", path
        if "token_ids" not in body:
            return httpx.Response(400, json={"error": {"message": "token_ids: field required"}})
        self.requests.append(body)
        if self.fail_with:
            status, answer = self.fail_with.pop(0)
            return httpx.Response(status, json=answer)
        return httpx.Response(200, json=await self.answer(body))

    async def answer(self, body: Body) -> Body:
        parameters = body["sampling_params"]
        assert isinstance(parameters, dict)
        tokens: list[int] = []
        versions: list[str] = []
        finish = "length"
        for position in range(parameters["max_tokens"]):
            await asyncio.sleep(self.token_seconds)
            if f"generate-tokens-{body['request_id']}" in self.aborted:
                finish = "abort"
                break
            numeric = int(self.label) if self.label.isdigit() else 0
            tokens.append(token_of(parameters["seed"], position, numeric))
            versions.append(self.label)
        choice: Body = {
            "index": 0,
            "finish_reason": finish,
            "stop_reason": None,
            "token_ids": tokens,
            "routed_experts": None,
            "sampling_mask": None,
            "weight_versions": spans_of(versions),
            "logprobs": {
                "content": [
                    {"token_id": t, "logprob": -0.25, "rank": 1, "top_logprobs": []} for t in tokens
                ]
            },
        }
        self.change(choice)
        return {"request_id": f"generate-tokens-{body['request_id']}", "choices": [choice]}


def spans_of(versions: list[str]) -> list[Body]:
    spans: list[Body] = []
    for i, version in enumerate(versions):
        if spans and spans[-1]["version"] == version:
            spans[-1]["end"] = i + 1
        else:
            spans.append({"version": version, "start": i, "end": i + 1})
    return spans


def version(number: int) -> PolicyVersion:
    return PolicyVersion(number)
