import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager

import pytest
from tests.unit.trainer.stub_server import Answer, Asked, StubServer

from reshard.board import Deadline
from reshard.engine_control import EngineControl, EngineDescription
from reshard.errors import DeadlineExceeded, EngineError
from reshard_trainer.engines import HttpEngine, InFlight

SESSION = {"run_id": "r", "engine": "e"}


def _answers(backend: str | None = "reshard", extension: str = "") -> dict[str, Answer]:
    transfer = {"backend": backend} if backend is not None else None
    parallel = {"tensor_parallel_size": 2, "worker_extension_cls": extension}
    config = {"weight_transfer_config": transfer, "parallel_config": parallel}
    return {
        "/server_info": Answer(body={"vllm_config": config}),
        "/get_world_size": Answer(body={"world_size": 4}),
        "/is_paused": Answer(body={"is_paused": True}),
        "/weight_info": Answer(body={"weight_version": "12"}),
        "/reset_prefix_cache": Answer(body={"success": True}),
    }


def _soon() -> Deadline:
    return Deadline.after(10)


@contextmanager
def _stub(
    answers: Mapping[str, Answer],
    host: str = "127.0.0.1",
    headers: Mapping[str, str] | None = None,
    in_flight: InFlight = "keep",
) -> Iterator[tuple[StubServer, HttpEngine]]:
    """A server and its client, both closed at the end."""
    with (
        StubServer(answers, host) as stub,
        closing(HttpEngine(f"{stub.url}/", headers=headers, in_flight=in_flight)) as engine,
    ):
        yield stub, engine


def test_a_server_with_the_flag_describes_itself() -> None:
    with _stub(_answers()) as (stub, engine):
        description = engine.describe(_soon())

        assert isinstance(engine, EngineControl)
        assert description == EngineDescription(ranks=4, weight_version="12", paused=True)
        assert [asked.target for asked in stub.asked] == [
            "/health",
            "/server_info?config_format=json",
            "/get_world_size",
            "/is_paused",
            "/weight_info",
        ]
        assert {asked.method for asked in stub.asked} == {"GET"}


def _refusal(engine: HttpEngine) -> str:
    with pytest.raises(EngineError) as caught:
        engine.describe(_soon())
    return str(caught.value)


@pytest.mark.parametrize(
    ("path", "answer", "text"),
    [
        ("/health", Answer(503), "is not healthy (/health answers 503); look into its log"),
        (
            "/server_info",
            Answer(404, {"detail": "Not Found"}),
            "has no RL routes (/server_info answers 404); start the server with "
            "VLLM_SERVER_DEV_MODE=1",
        ),
        ("/server_info", Answer(401), "answered /server_info with 401; pass its API key in"),
        ("/server_info", Answer(500), "answered /server_info with 500"),
        ("/server_info", Answer(body="VllmConfig(...)"), "does not tell its configuration"),
        ("/server_info", Answer(body={"vllm_config": "text"}), "needs vLLM 0.32 or newer"),
        ("/get_world_size", Answer(500, "boom"), "answered /get_world_size with 500: boom"),
        ("/health", Answer(hang_up=True), "broke off /health"),
    ],
)
def test_a_server_that_cannot_be_refitted(path: str, answer: Answer, text: str) -> None:
    with _stub({**_answers(), path: answer}) as (stub, engine):
        message = _refusal(engine)

    assert f"engine {stub.name} " in message
    assert text in message


@pytest.mark.parametrize(
    ("backend", "extension", "text"),
    [
        (None, "", "was started without reshard's flag; start it with --weight-transfer-config"),
        ("nccl", "", "runs with the weight-transfer backend 'nccl'; start it with"),
        (None, "mine.Extension", "(or with --worker-extension-cls reshard_vllm.WorkerExtension)"),
    ],
)
def test_a_server_without_the_flag(backend: str | None, extension: str, text: str) -> None:
    with _stub(_answers(backend, extension)) as (stub, engine):
        message = _refusal(engine)

        assert text in message
        # None of these reaches a worker.
        assert [asked.target.partition("?")[0] for asked in stub.asked] == [
            "/health",
            "/server_info",
        ]


def test_nobody_listens() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    with closing(HttpEngine(f"http://127.0.0.1:{port}")) as engine:
        message = _refusal(engine)

    assert f"engine 127.0.0.1:{port} cannot be reached" in message
    assert "is the server up, and is this its address?" in message


def test_no_answer_is_not_asked_for_again() -> None:
    with _stub({**_answers(), "/start_weight_update": Answer(seconds=1.0)}) as (stub, engine):
        engine.describe(_soon())
        with pytest.raises(DeadlineExceeded) as caught:
            engine.begin(Deadline.after(0.2))

        assert "did not answer /start_weight_update within 0.2 s" in str(caught.value)
        assert "the call may still take effect, so it is not repeated" in str(caught.value)
        assert [a.target for a in stub.asked].count("/start_weight_update") == 1


Call = Callable[[HttpEngine], object]

CALLS: list[tuple[str, Call]] = [
    ("connect", lambda engine: engine.connect(SESSION, _soon())),
    ("begin", lambda engine: engine.begin(_soon())),
    ("receive", lambda engine: engine.receive({"attempt": 1}, _soon())),
    ("commit", lambda engine: engine.commit({"attempt": 1}, _soon())),
    ("finish", lambda engine: engine.finish("7", _soon())),
    ("finish nothing", lambda engine: engine.finish(None, _soon())),
    ("pause", lambda engine: engine.pause(_soon())),
    ("resume", lambda engine: engine.resume(_soon())),
    ("reset", lambda engine: engine.reset_prefix_cache(_soon())),
    ("version", lambda engine: engine.weight_version(_soon())),
    ("release", lambda engine: engine.release(_soon())),
]

COMMON = {
    "pause": [Asked("POST", "/pause?mode=keep&clear_cache=false")],
    "resume": [Asked("POST", "/resume")],
    "reset": [Asked("POST", "/reset_prefix_cache?reset_running_requests=true")],
    "version": [Asked("GET", "/weight_info")],
}

THROUGH_BACKEND = {
    **COMMON,
    "connect": [
        Asked("POST", "/init_weight_transfer_engine", {"init_info": {"session": SESSION}}),
    ],
    "begin": [Asked("POST", "/start_weight_update")],
    "receive": [
        Asked(
            "POST",
            "/update_weights",
            {"update_info": {"step": "receive", "message": {"attempt": 1}}},
        )
    ],
    "commit": [
        Asked(
            "POST",
            "/update_weights",
            {"update_info": {"step": "commit", "message": {"attempt": 1}}},
        )
    ],
    "finish": [Asked("POST", "/finish_weight_update", {"weight_version": "7"})],
    "finish nothing": [Asked("POST", "/finish_weight_update", {})],
    "release": [Asked("POST", "/shutdown_weight_transfer_engine")],
}


def _rpc(method: str, message: dict[str, object]) -> Asked:
    body = {"method": method, "kwargs": {"message": message}}
    return Asked("POST", "/collective_rpc", body)


THROUGH_EXTENSION = {
    **COMMON,
    "connect": [_rpc("refit_connect", dict(SESSION))],
    "begin": [],
    "receive": [_rpc("refit_receive", {"attempt": 1})],
    "commit": [_rpc("refit_commit", {"attempt": 1})],
    "finish": [Asked("POST", "/update_weight_version", {"new_version": "7"})],
    "finish nothing": [],
    "release": [Asked("POST", "/collective_rpc", {"method": "refit_close"})],
}


@pytest.mark.parametrize(("name", "call"), CALLS)
def test_calls_through_the_backend(name: str, call: Call) -> None:
    with _stub(_answers()) as (stub, engine):
        engine.describe(_soon())
        del stub.asked[:]
        call(engine)

        assert stub.asked == THROUGH_BACKEND[name]


@pytest.mark.parametrize(("name", "call"), CALLS)
def test_calls_through_the_extension(name: str, call: Call) -> None:
    with _stub(_answers(None, "reshard_vllm.WorkerExtension")) as (stub, engine):
        engine.describe(_soon())
        del stub.asked[:]
        call(engine)

        assert stub.asked == THROUGH_EXTENSION[name]


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"error": {"message": "worker died", "code": 500}}, "with 500: worker died"),
        ({"error": "no mode"}, "with 500: no mode"),
        ({"detail": "Not Found"}, "with 500: Not Found"),
        ("Internal Server Error", "with 500: Internal Server Error"),
    ],
)
def test_the_servers_own_words_are_shown(body: object, text: str) -> None:
    with _stub({**_answers(), "/resume": Answer(500, body)}) as (stub, engine):
        engine.describe(_soon())
        with pytest.raises(EngineError) as caught:
            engine.resume(_soon())

        assert str(caught.value) == f"engine {stub.name} answered /resume {text}"
        assert [a.target for a in stub.asked].count("/resume") == 1


def test_a_cache_that_was_not_reset_is_told() -> None:
    answers = {**_answers(), "/reset_prefix_cache": Answer(body={"success": False})}
    with _stub(answers) as (_, engine):
        assert engine.reset_prefix_cache(_soon()) is False


def test_nothing_is_asked_of_workers_before_the_description() -> None:
    with _stub(_answers()) as (stub, engine):
        for name in ("connect", "begin", "receive", "commit", "finish", "release"):
            with pytest.raises(EngineError, match="was not described yet; call describe first"):
                dict(CALLS)[name](engine)

        assert stub.asked == []


def test_a_server_that_lost_its_flag_is_not_used_as_before() -> None:
    with _stub(_answers()) as (stub, engine):
        engine.describe(_soon())
        stub.answers = _answers(None)
        with pytest.raises(EngineError, match="without reshard's flag"):
            engine.describe(_soon())
        with pytest.raises(EngineError, match="was not described yet"):
            engine.begin(_soon())


def test_headers_are_sent_and_proxies_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:9")
    with _stub(_answers(), headers={"Authorization": "Bearer key"}) as (stub, engine):
        engine.describe(_soon())

        assert {headers["Authorization"] for headers in stub.headers} == {"Bearer key"}


def test_an_ipv6_address() -> None:
    with _stub(_answers(), host="::1") as (stub, engine):
        engine.describe(_soon())

        assert (engine.name, engine.host) == (stub.name, "::1")


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("127.0.0.1:8000", "127.0.0.1:8000"),
        ("http://user:secret@host:8000/", "host:8000"),
        ("https://host/prefix", "host"),
    ],
)
def test_names_of_urls(url: str, name: str) -> None:
    with closing(HttpEngine(url)) as engine:
        assert engine.name == name


@pytest.mark.parametrize("url", ["", "ftp://host", "http://"])
def test_what_is_no_url(url: str) -> None:
    with pytest.raises(EngineError, match="is not a URL such as"):
        HttpEngine(url)


@pytest.mark.parametrize("in_flight", ["keep", "wait", "abort"])
def test_a_pause_says_what_becomes_of_running_requests(in_flight: InFlight) -> None:
    with _stub(_answers(), in_flight=in_flight) as (stub, engine):
        engine.pause(_soon())
    assert [asked.target for asked in stub.asked] == [f"/pause?mode={in_flight}&clear_cache=false"]
