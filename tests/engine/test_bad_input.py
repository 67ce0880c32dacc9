"""What does not fit is refused with every mismatch, and the engine serves on, in step, at TP 2."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import zmq
from tests.engine.trainers import Trainer, publish
from tests.multiprocess.trainer.processes import Running, run_ranks
from tests.support.checkpoints import UNEVEN_VOCAB, Family, make_model
from tests.support.engine_pool import A, B, EnginePool
from tests.support.processes import wait_until
from tests.support.vllm_server import VllmServer
from torch import nn

import reshard_trainer
from reshard.board import Invitation
from reshard.errors import ReshardError

PROMPT = (3, 1, 4, 1, 5, 9)


@contextmanager
def untouched(server: VllmServer) -> Iterator[None]:
    """The engine's bytes, label, outputs and replies are the same before and after."""
    before = (server.checksums(), server.weight_version(), server.complete(PROMPT))
    yield
    after = (server.checksums(), server.weight_version(), server.complete(PROMPT))
    assert after == before
    # Twice, as a reply that is one call late shows in the next.
    assert server.checksums() == before[0]
    assert server.get("/is_paused") == {"is_paused": False}


def refused(model: nn.Module, url: str, **settings: object) -> ReshardError:
    """What attaching a single-process trainer raises."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    arguments: dict[str, object] = {"deadline": 30.0, **settings}
    with pytest.raises(ReshardError) as caught:
        reshard_trainer.attach(model, optimizer, [url], **arguments)  # type: ignore[arg-type]
    return caught.value


def of_another_size() -> nn.Module:
    model: nn.Module = make_model("llama", seed=B, vocab=UNEVEN_VOCAB)
    return model


def of_another_architecture() -> nn.Module:
    model: nn.Module = make_model("qwen3", seed=B)
    return model


def without_head() -> nn.Module:
    model: nn.Module = make_model("llama", seed=B)
    del model.lm_head
    return model


def with_integers() -> nn.Module:
    model: nn.Module = make_model("llama", seed=B)
    weight = torch.zeros(256, 128, dtype=torch.int32)
    model.get_submodule("lm_head").weight = nn.Parameter(weight, requires_grad=False)
    return model


def with_an_extra() -> nn.Module:
    model: nn.Module = make_model("llama", seed=B)
    model.value_head = nn.Linear(128, 1)
    return model


@pytest.mark.engine("llama", 2)
@pytest.mark.parametrize(
    ("make", "texts"),
    [
        (of_another_size, ["lm_head.weight", "model.embed_tokens.weight", "250", "256"]),
        (of_another_architecture, ["q_norm"]),
        (without_head, ["lm_head.weight", "get no tensor of the trainer"]),
        (with_integers, ["lm_head.weight", "int32", "bfloat16"]),
        (with_an_extra, ["value_head"]),
    ],
)
def test_models_that_do_not_fit(
    engines: EnginePool, make: Callable[[], nn.Module], texts: list[str]
) -> None:
    server = engines.shared(engines.spec("llama", 2))
    with untouched(server):
        error = refused(make(), server.url)
    for text in texts:
        assert text in str(error)


@pytest.mark.engine("llama", 2)
def test_a_second_trainer_is_refused_unless_it_takes_over(engines: EnginePool) -> None:
    server = engines.shared(engines.spec("llama", 2))
    model = make_model("llama", seed=A)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with reshard_trainer.attach(model, optimizer, [server.url], deadline=30) as first:
        with untouched(server):
            error = refused(make_model("llama", seed=B), server.url)
        assert "in a session with run" in str(error)
        assert "takeover=True" in str(error)
        optimizer.step()
        assert first.version == 1
        other = make_model("llama", seed=B)
        steps = torch.optim.SGD(other.parameters(), lr=0.0)
        with reshard_trainer.attach(
            other, steps, [server.url], deadline=30, takeover=True, version=6
        ):
            steps.step()
        assert server.weight_version() == "7"


@pytest.mark.engine("llama", 2)
def test_junk_on_the_control_routes_leaves_replies_in_step(engines: EnginePool) -> None:
    server = engines.shared(engines.spec("llama", 2))
    wrong = Invitation("tcp://127.0.0.1:9", *(key.decode() for key in _keys()))
    session = {
        "run_id": "r", "engine": "e", "epoch": 1, "trainer_size": 1, "engine_size": 2,
        "invitation": {
            "address": wrong.address, "server_key": wrong.server_key,
            "client_key": wrong.client_key, "client_secret": wrong.client_secret,
        },
        "host": None, "transport": "auto", "install": "staged", "bucket_bytes": 1024,
        "deadline_seconds": 1.0,
    }  # fmt: skip
    with untouched(server):
        for init_info in ({}, {"session": 3}, {"session": {"run_id": 1}}, {"x": 1}):
            server.post("/init_weight_transfer_engine", {"init_info": init_info})
        server.post("/init_weight_transfer_engine", {"init_info": {"session": session}})
        server.post("/start_weight_update")
        for update in ({}, {"step": "commit"}, {"step": "receive", "message": {"attempt": "x"}}):
            server.post("/update_weights", {"update_info": update})
        server.post("/finish_weight_update")


def _keys() -> tuple[bytes, bytes, bytes]:
    public, secret = zmq.curve_keypair()
    return zmq.curve_keypair()[0], public, secret


@pytest.mark.engine("llama", 2)
def test_a_killed_trainer_is_followed_by_the_next_one(
    engines: EnginePool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    server = engines.shared(engines.spec("llama", 2))
    joined = tmp_path_factory.mktemp("before") / "joined"
    victim = Running(hold_a_session, ("llama", server.url, str(joined)))
    try:
        assert wait_until(joined.exists, 60, every=0.1)
        os.kill(victim.pid, signal.SIGKILL)
    finally:
        victim.end()
    folder = tmp_path_factory.mktemp("after")
    trainer = Trainer("fsdp2", 2)
    run_ranks(
        publish, 2, trainer, "llama", A, server.url, 38, str(folder), {}, seconds=120
    )  # fmt: skip
    assert server.weight_version() == "38"
    assert server.fingerprint() == engines.cold_fingerprint(engines.spec("llama", 2, seed=A))


def hold_a_session(family: Family, url: str, joined: str) -> None:
    model = make_model(family, seed=B)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    reshard_trainer.attach(model, optimizer, [url], deadline=30)
    Path(joined).touch()
    time.sleep(120)


@pytest.mark.engine
def test_an_engine_without_the_flag(engines: EnginePool) -> None:
    spec = engines.spec("llama", 2, flags=())
    with engines.own(spec) as server, untouched(server):
        error = refused(make_model("llama", seed=B), server.url)
    assert '--weight-transfer-config \'{"backend": "reshard"}\'' in str(error)


def test_an_engine_that_is_not_there() -> None:
    error = refused(make_model("llama", seed=B), "http://127.0.0.1:9", deadline=3.0)
    assert "127.0.0.1:9" in str(error)
