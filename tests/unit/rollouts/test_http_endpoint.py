"""One engine over HTTP: what is asked, what is understood, and every refusal by its text."""

import asyncio
from collections.abc import Awaitable, Callable

import httpx
import pytest
from tests.unit.rollouts.fake_engine import Body, FakeEngine
from tests.unit.rollouts.values import spans
from tests.unit.rollouts.virtual_time import run

from reshard.errors import EngineError
from reshard_trainer.rollouts.clock import Until, now
from reshard_trainer.rollouts.errors import EngineFault, EngineFenced, RequestRefused
from reshard_trainer.rollouts.http_endpoint import HttpEndpoint
from reshard_trainer.rollouts.rollout import SampleId, Serial
from reshard_trainer.rollouts.sampling import Generation, Request, Sampling


def request(**more: object) -> Request:
    sampling = Sampling(max_tokens=6, temperature=0.7, seed=1, **more)  # type: ignore[arg-type]
    return Request(SampleId(Serial(0), 0), (5, 6, 7), 6, 99, sampling, "r-0")


def asked(
    engine: FakeEngine,
    call: Callable[[HttpEndpoint, Until], Awaitable[object]] | None = None,
    *,
    seconds: float = 60.0,
) -> object:
    """The outcome of one call to an endpoint of the engine."""

    async def ask() -> object:
        endpoint = HttpEndpoint("http://fake:8000", transport=engine.transport)
        until = Until.after(seconds)
        try:
            if call is not None:
                return await call(endpoint, until)
            return await endpoint.generate(request(), until)
        finally:
            await endpoint.close()

    return run(ask())


def test_an_answer_is_understood() -> None:
    engine = FakeEngine(label="3")
    answer = asked(engine)
    assert isinstance(answer, Generation)
    assert len(answer.tokens) == 6
    assert answer.log_probs == (-0.25,) * 6
    assert answer.spans == spans((3, 6))
    assert answer.finish == "length"


def test_what_is_asked_for() -> None:
    engine = FakeEngine()
    asked(engine, lambda endpoint, until: endpoint.generate(
        request(top_p=0.9, stop_token_ids=(2,), more={"min_p": 0.1}), until)
    )  # fmt: skip
    assert engine.requests == [
        {
            "request_id": "r-0",
            "token_ids": [5, 6, 7],
            "sampling_params": {
                "max_tokens": 6,
                "temperature": 0.7,
                "top_p": 0.9,
                "top_k": 0,
                "ignore_eos": False,
                "seed": 99,
                "logprobs": 0,
                "detokenize": False,
                "stop_token_ids": [2],
                "min_p": 0.1,
            },
        }
    ]


def test_a_refit_in_mid_request_splits_the_span() -> None:
    engine = FakeEngine(label="3", token_seconds=1.0)

    async def call(endpoint: HttpEndpoint, until: Until) -> Generation:
        asking = asyncio.create_task(endpoint.generate(request(), until))
        await asyncio.sleep(2.5)
        engine.label = "4"
        return await asking

    answer = asked(engine, call)
    assert isinstance(answer, Generation)
    assert answer.spans == spans((3, 2), (4, 4))


def test_an_abort_returns_the_tokens_so_far() -> None:
    engine = FakeEngine(token_seconds=1.0)

    async def call(endpoint: HttpEndpoint, until: Until) -> Generation:
        asking = asyncio.create_task(endpoint.generate(request(), until))
        await asyncio.sleep(2.5)
        await endpoint.abort(["r-0"], until)
        return await asking

    answer = asked(engine, call)
    assert isinstance(answer, Generation)
    assert (len(answer.tokens), answer.finish) == (2, "abort")
    assert engine.aborted == ["generate-tokens-r-0"]


def test_an_empty_span_between_two_labels_is_no_span() -> None:
    def change(choice: Body) -> None:
        choice["weight_versions"] = [
            {"version": "0", "start": 0, "end": 0},
            {"version": "1", "start": 0, "end": 6},
        ]

    answer = asked(FakeEngine(change=change))
    assert isinstance(answer, Generation)
    assert answer.spans == spans((1, 6))


@pytest.mark.parametrize(("label", "version"), [("7", 7), ("default", None), ("7b", None)])
def test_labels_and_versions(label: str, version: int | None) -> None:
    assert asked(FakeEngine(label=label), HttpEndpoint.version) == version


def set_of(**values: object) -> Callable[[Body], None]:
    return lambda choice: choice.update(values)


@pytest.mark.parametrize(
    ("engine", "text"),
    [
        (FakeEngine(label="default"), "weights labelled 'default', which is no policy version"),
        (
            FakeEngine(change=set_of(weight_versions=None)),
            "does not say which weights sampled the tokens",
        ),
        (
            FakeEngine(change=set_of(logprobs=None)),
            "log-probabilities of 0 tokens that are not the 6 sampled",
        ),
        (
            FakeEngine(
                change=lambda choice: choice.update(
                    logprobs={
                        "content": [
                            {"token_id": token, "logprob": -9999.0}
                            for token in choice["token_ids"]  # type: ignore[attr-defined]
                        ]
                    }
                )
            ),
            "sampled 6 .missing at .0, 1, 2, 3, 4, 5..; its weights may hold NaN",
        ),
        (FakeEngine(change=set_of(finish_reason="error")), "for the reason 'error'"),
        (FakeEngine(fail_with=[(500, {"error": {"message": "boom"}})]), "with 500: boom"),
        (FakeEngine(fail_with=[(429, {"detail": "slow down"})]), "with 429: slow down"),
        (FakeEngine(fail_with=[(200, {"hello": 1})]), "with something unexpected"),
        (FakeEngine(fail_with=[(200, {"choices": []})]), "answered 0 choices to r-0, not one"),
        (FakeEngine(down=True), r"fake:8000 cannot be reached for /inference/v1/generate"),
        (FakeEngine(token_seconds=100.0), "did not answer /inference/v1/generate within 60 s"),
    ],
)
def test_faults_of_one_engine(engine: FakeEngine, text: str) -> None:
    with pytest.raises(EngineFault, match=text):
        asked(engine)


def test_a_fenced_engine_is_told_apart() -> None:
    words: Body = {"error": {"message": "this engine is fenced: mixed weights"}}
    with pytest.raises(EngineFenced, match="answered /inference/v1/generate with 503: this engine"):
        asked(FakeEngine(fail_with=[(503, words)]))


def test_a_bad_request_is_not_the_engines_fault() -> None:
    words: Body = {"error": {"message": "prompt longer than max_model_len"}}
    with pytest.raises(RequestRefused, match="with 400: prompt longer than max_model_len"):
        asked(FakeEngine(fail_with=[(400, words)]))


def test_an_engine_without_the_route_is_refused_with_the_flag_that_is_missing() -> None:
    """There is no other route to fall back to: none says which weights sampled a token."""
    engine = FakeEngine(scale_out=False)
    for call in (None, HttpEndpoint.check):
        with pytest.raises(EngineError, match="start it with --enable-scale-out and VLLM_SERVER"):
            asked(engine, call)
    assert engine.requests == []


def test_an_engine_that_can_serve_passes_the_check() -> None:
    engine = FakeEngine(label="default")
    asked(engine, HttpEndpoint.check)
    assert engine.requests == []


@pytest.mark.parametrize("url", ["ftp://somewhere", "http://", ":8000"])
def test_what_is_no_url(url: str) -> None:
    with pytest.raises(EngineError, match="is not a URL such as"):
        HttpEndpoint(url)


def test_the_name_is_host_and_port_without_credentials() -> None:
    async def name() -> str:
        endpoint = HttpEndpoint("user:secret@host:81")
        await endpoint.close()
        return endpoint.name

    assert run(name()) == "host:81"


def test_a_connection_that_breaks_is_a_fault() -> None:
    """Over real TCP: nobody listens; and a server that hangs up in mid-answer."""

    async def broken() -> list[str]:
        async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read(10)
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{")
            writer.close()

        server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        texts = []
        for _ in range(2):
            endpoint = HttpEndpoint(f"http://127.0.0.1:{port}")
            with pytest.raises(EngineFault) as caught:
                await endpoint.generate(request(), Until.after(10))
            texts.append(str(caught.value))
            await endpoint.close()
            server.close()
            await server.wait_closed()
        return texts

    first, second = asyncio.run(broken())
    assert "RemoteProtocolError" in first
    assert "ConnectError" in second


def test_a_stalled_answer_ends_at_the_deadline() -> None:
    async def call(endpoint: HttpEndpoint, until: Until) -> float:
        start = now()
        with pytest.raises(EngineFault, match="did not answer /weight_info within 5 s"):
            await endpoint.version(until)
        return now() - start

    async def never(_: httpx.Request) -> httpx.Response:
        await asyncio.sleep(1e9)
        raise AssertionError

    async def ask() -> float:
        endpoint = HttpEndpoint("http://fake", transport=httpx.MockTransport(never))
        try:
            return await call(endpoint, Until.after(5.0))
        finally:
            await endpoint.close()

    assert run(ask()) == 5.0
