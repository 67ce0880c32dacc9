"""Faults with a real vLLM server and requests in flight: it serves one version, or refuses.

The engine is judged by vLLM's own checksums and by what its clients get. The whole matrix, over
plain tensors: `make faults`.
"""

import dataclasses
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import torch
from tests.support.checkpoints import make_model
from tests.support.engine_pool import A, B, EnginePool
from tests.support.vllm_server import EngineSpec, VllmServer

import reshard_trainer
import reshard_trainer.session
from reshard.errors import ReshardError
from reshard.session import Install
from reshard_trainer.engines import HttpEngine

PROMPT = (3, 1, 4, 1, 5, 9)
FENCE = ("--middleware", "reshard_vllm.FenceMiddleware")
CLIENTS = 3


def spec(engines: EnginePool) -> EngineSpec:
    return dataclasses.replace(engines.spec("llama", 2), arguments=FENCE)


@contextmanager
def clients(server: VllmServer) -> Iterator[list[int]]:
    """Clients that generate all the time; the status codes that they got."""
    statuses: list[int] = []
    over = threading.Event()

    def generate() -> None:
        with httpx.Client(base_url=server.url, timeout=60) as client:
            while not over.is_set():
                body = {"model": "policy", "prompt": list(PROMPT), "max_tokens": 8}
                try:
                    statuses.append(client.post("/v1/completions", json=body).status_code)
                except httpx.HTTPError:
                    statuses.append(-1)
                    time.sleep(0.05)

    with ThreadPoolExecutor(CLIENTS) as pool:
        running: list[Future[None]] = [pool.submit(generate) for _ in range(CLIENTS)]
        try:
            yield statuses
        finally:
            over.set()
        for each in running:
            each.result(90)


def broken(*_: object) -> None:
    raise RuntimeError("broken, as asked")


@pytest.mark.engine("llama", 2)
@pytest.mark.parametrize("install", ["staged", "in_place"])
@pytest.mark.parametrize("fault", ["verify", "commit"])
def test_a_refit_that_fails_under_load(
    engines: EnginePool, install: Install, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Old and whole, or fenced: then requests are refused, none hangs, and the next refit heals."""
    server = engines.shared(spec(engines))
    model = make_model("llama", seed=A)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with reshard_trainer.attach(
        model, optimizer, [server.url], deadline=30, install=install, verify="always"
    ) as hook:
        hook.publish()
        old, label = server.checksums(), server.weight_version()
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        with clients(server) as statuses:
            with monkeypatch.context() as patch:
                if fault == "verify":
                    patch.setattr(reshard_trainer.session, "digest_moves", broken)
                else:
                    patch.setattr(HttpEngine, "commit", broken)
                with pytest.raises(ReshardError, match="broken, as asked") as caught:
                    optimizer.step()
            assert "trainer rank 0" in str(caught.value)
            fenced = install == "in_place" or fault == "commit"
            assert server.get("/is_paused") == {"is_paused": fenced}
            assert server.weight_version() == label
            if fenced:
                refused = server.try_post(
                    "/v1/completions", {"model": "policy", "prompt": list(PROMPT)}
                )
                assert refused.status_code == 503
                error = refused.json()["error"]
                assert error["type"] == "EngineFenced"
                assert "the install of policy version 1 did not finish" in error["message"]
                assert server.get("/reshard/fence")["reason"]
            else:
                assert server.checksums() == old
            optimizer.step()
            assert server.get("/reshard/fence") == {"reason": ""}
        assert set(statuses) <= {200, 503}
        assert 200 in statuses
        assert server.weight_version() == "2"
        assert server.get("/is_paused") == {"is_paused": False}
        served = server.checksums()
        assert served != old
        # The same weights once more, by a refit of which nothing was broken.
        hook.publish()
        assert server.checksums() == served


@pytest.mark.engine("llama", 2)
def test_a_worker_that_is_stopped_is_named_and_goes_on(engines: EnginePool) -> None:
    server = engines.shared(spec(engines))
    model = make_model("llama", seed=B)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with reshard_trainer.attach(model, optimizer, [server.url], deadline=4) as hook:
        hook.publish()
        old = server.checksums()
        worker = _worker(server)
        os.kill(worker, signal.SIGSTOP)
        try:
            start = time.monotonic()
            with pytest.raises(ReshardError) as caught:
                optimizer.step()
            assert time.monotonic() - start < 30
        finally:
            os.kill(worker, signal.SIGCONT)
        assert f"engine {server.url.removeprefix('http://')}" in str(caught.value)
        deadline = time.monotonic() + 20
        while True:
            try:
                optimizer.step()
                break
            except ReshardError:
                assert time.monotonic() < deadline
        assert server.checksums() == old  # lr is 0: the same weights under every version
        assert server.weight_version() == str(hook.version)


@pytest.mark.engine("llama", 2)
def test_a_worker_that_is_killed_ends_the_engine_by_name(engines: EnginePool) -> None:
    server = engines.shared(spec(engines))  # the last test with it
    model = make_model("llama", seed=A)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with reshard_trainer.attach(model, optimizer, [server.url], deadline=6) as hook:
        hook.publish()
        os.kill(_worker(server), signal.SIGKILL)
        start = time.monotonic()
        with pytest.raises(ReshardError) as caught:
            optimizer.step()
        assert time.monotonic() - start < 40
        assert f"engine {server.url.removeprefix('http://')}" in str(caught.value)
    server.tree.process.wait(60)


def _worker(server: VllmServer) -> int:
    """The process of the second rank."""
    return next(
        pid for pid in server.tree.pids() if b"TP1" in Path(f"/proc/{pid}/cmdline").read_bytes()
    )
