"""A vLLM server as an endpoint: tokens in, tokens out, with log-probabilities and version spans.

Only `/inference/v1/generate` says which weights sampled which token, and vLLM serves it only with
`--enable-scale-out`. There is no other way in: `/v1/completions` has no spans.
"""

from collections.abc import Collection, Mapping
from typing import Final, TypeVar
from urllib.parse import urlsplit

import httpx
import msgspec

from reshard.errors import EngineError
from reshard.ids import PolicyVersion
from reshard_trainer.rollouts.answers import generation, version_of_label
from reshard_trainer.rollouts.clock import Until
from reshard_trainer.rollouts.errors import EngineFault, EngineFenced, RequestRefused
from reshard_trainer.rollouts.rollout import EngineName
from reshard_trainer.rollouts.sampling import Generation, Request

GENERATE: Final = "/inference/v1/generate"

ABORT: Final = "/inference/v1/abort_requests"

_PREFIX: Final = "generate-tokens-"
"""What vLLM puts before the name of a request to `GENERATE`."""

_NO_LOG_PROB: Final = -9999.0
"""What vLLM sends where a sampled token has no log-probability, or one that is not a number."""

_CONNECT_SECONDS: Final = 10.0
_SHOWN_CHARACTERS: Final = 1_000
_FORBIDDEN: Final = frozenset({401, 403, 404})
_TRANSIENT: Final = frozenset({408, 429})

T = TypeVar("T")


class _LogProb(msgspec.Struct):
    token_id: int
    logprob: float


class _LogProbs(msgspec.Struct):
    content: list[_LogProb] | None = None


class _Span(msgspec.Struct):
    version: str
    start: int
    end: int


class _Choice(msgspec.Struct):
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    logprobs: _LogProbs | None = None
    weight_versions: list[_Span] | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice]


class _WeightInfo(msgspec.Struct):
    weight_version: str


class HttpEndpoint:
    """One server. `Endpoint` says what each call promises.

    Attributes:
        name: host and port.
        slots: requests that it runs at once (its `--max-num-seqs`).
    """

    def __init__(
        self,
        url: str,
        *,
        slots: int = 16,
        headers: Mapping[str, str] | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """Prepare; nothing is sent.

        Args:
            url: such as `http://127.0.0.1:8000`.
            slots: requests that the server runs at once.
            headers: sent with every call, an API key for instance.
            transport: how requests travel; None: TCP.

        Raises:
            EngineError: not a URL.
        """
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise EngineError(f"engine {url!r} is not a URL such as http://127.0.0.1:8000")
        self.name = EngineName(parts.netloc.rpartition("@")[2])
        self.slots = slots
        self._client = httpx.AsyncClient(
            base_url=f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}",
            headers=dict(headers or {}),
            timeout=httpx.Timeout(None, connect=_CONNECT_SECONDS),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=slots),
            transport=transport,
            trust_env=False,
        )

    def __repr__(self) -> str:
        return f"HttpEndpoint({self.name!r})"

    async def check(self, until: Until) -> None:
        """Whether both routes that rollouts need are there."""
        await self.version(until)
        # An empty body is refused either way: as invalid where the route is on.
        answer = await self._send("POST", GENERATE, until, body={})
        if answer.status_code in _FORBIDDEN:
            raise EngineError(self._forbidden(GENERATE, answer))

    async def generate(self, request: Request, until: Until) -> Generation:
        """Continue a prompt."""
        body = {
            "request_id": request.name,
            "token_ids": list(request.tokens),
            "sampling_params": request.parameters(),
        }
        answer = await self._send("POST", GENERATE, until, body=body)
        self._raise_for(GENERATE, answer)
        choices = self._parse(GENERATE, answer, _Answer).choices
        if len(choices) != 1:
            raise EngineFault(
                f"engine {self.name} answered {len(choices)} choices to {request.name}, not one"
            )
        return self._generation(choices[0])

    async def version(self, until: Until) -> PolicyVersion | None:
        """The policy version that it serves."""
        answer = await self._send("GET", "/weight_info", until)
        self._raise_for("/weight_info", answer)
        return version_of_label(self._parse("/weight_info", answer, _WeightInfo).weight_version)

    async def abort(self, requests: Collection[str], until: Until) -> None:
        """Have requests of these names answered at once, with the tokens so far."""
        body = {"request_ids": [f"{_PREFIX}{name}" for name in requests]}
        self._raise_for(ABORT, await self._send("POST", ABORT, until, body=body))

    async def close(self) -> None:
        """Drop the connections."""
        await self._client.aclose()

    async def _send(
        self, method: str, path: str, until: Until, body: Mapping[str, object] | None = None
    ) -> httpx.Response:
        try:
            async with until.limit():
                return await self._client.request(method, path, json=body)
        except TimeoutError as error:
            raise EngineFault(
                f"engine {self.name} did not answer {path} within {until.seconds:g} s; is it "
                "paused, or its workers gone?"
            ) from error
        except httpx.TransportError as error:
            raise EngineFault(
                f"engine {self.name} cannot be reached for {path} "
                f"({type(error).__name__}: {error}); is the server up?"
            ) from error

    def _raise_for(self, path: str, answer: httpx.Response) -> None:
        status = answer.status_code
        if status == httpx.codes.OK:
            return
        if status in _FORBIDDEN:
            raise RequestRefused(self._forbidden(path, answer))
        text = f"engine {self.name} answered {path} with {status}: {_words(answer)}"
        if "fenced" in answer.text:
            raise EngineFenced(text)
        if status < httpx.codes.INTERNAL_SERVER_ERROR and status not in _TRANSIENT:
            raise RequestRefused(text)
        raise EngineFault(text)

    def _forbidden(self, path: str, answer: httpx.Response) -> str:
        return (
            f"engine {self.name} does not serve {path} ({answer.status_code}: {_words(answer)}); "
            "start it with --enable-scale-out and VLLM_SERVER_DEV_MODE=1 in its environment, and "
            "give its API key if it has one. Its other routes do not say which weights sampled a "
            "token"
        )

    def _parse(self, path: str, answer: httpx.Response, as_type: type[T]) -> T:
        try:
            return msgspec.json.decode(answer.content, type=as_type)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise EngineFault(
                f"engine {self.name} answered {path} with something unexpected: {error}"
            ) from error

    def _generation(self, choice: _Choice) -> Generation:
        tokens = choice.token_ids or []
        content = (choice.logprobs.content if choice.logprobs else None) or []
        if [entry.token_id for entry in content] != tokens:
            raise EngineFault(
                f"engine {self.name} sent log-probabilities of {len(content)} tokens that are not "
                f"the {len(tokens)} sampled ones"
            )
        return generation(
            self.name,
            tokens=tokens,
            log_probs=[
                entry.logprob if entry.logprob > _NO_LOG_PROB else None for entry in content
            ],
            spans=choice.weight_versions,
            finish=choice.finish_reason,
        )


def _words(answer: httpx.Response) -> str:
    """The server's own words."""
    try:
        body = answer.json()
    except ValueError:
        return answer.text[:_SHOWN_CHARACTERS]
    if isinstance(body, dict):
        body = body.get("error", body.get("detail", body))
    if isinstance(body, dict):
        body = body.get("message", body)
    return str(body)[:_SHOWN_CHARACTERS]
