"""Rollouts from a real vLLM: spans agree with the versions that were set while requests ran."""

import asyncio

import pytest
from tests.support.engine_pool import EnginePool
from tests.support.vllm_server import VllmServer

from reshard_trainer.rollouts.clock import Until
from reshard_trainer.rollouts.http_endpoint import HttpEndpoint
from reshard_trainer.rollouts.rollout import SampleId, Serial
from reshard_trainer.rollouts.sampling import Generation, Request, Sampling

pytestmark = pytest.mark.engine("llama", 1)

LENGTH = 240


def request(name: str, seed: int = 5) -> Request:
    sampling = Sampling(max_tokens=LENGTH, ignore_eos=True)
    return Request(SampleId(Serial(0), 0), (10, 11, 12), LENGTH, seed, sampling, name)


@pytest.fixture
def server(engines: EnginePool) -> VllmServer:
    found = engines.shared(engines.spec("llama", 1))
    found.post("/update_weight_version", {"new_version": "1"})
    return found


def test_spans_split_where_the_label_changed_in_mid_request(server: VllmServer) -> None:
    """Labels change all the time while a full engine generates: some change meets a request."""

    async def use() -> tuple[list[Generation], int]:
        endpoint = HttpEndpoint(server.url)
        try:
            until = Until.after(120)
            await endpoint.check(until)
            assert await endpoint.version(until) == 1
            names = [f"spans-{number}" for number in range(16)]
            asking = [asyncio.create_task(endpoint.generate(request(n), until)) for n in names]
            last = 1
            while not all(task.done() for task in asking):
                last += 1
                body = {"new_version": str(last)}
                await asyncio.to_thread(server.post, "/update_weight_version", body)
                await asyncio.sleep(0.02)
            return await asyncio.gather(*asking), last
        finally:
            await endpoint.close()

    answers, last = asyncio.run(use())
    assert any(len(answer.spans) > 1 for answer in answers)
    for answer in answers:
        assert len(answer.tokens) == len(answer.log_probs) == LENGTH
        versions = [span.version for span in answer.spans]
        assert versions == sorted(set(versions))
        assert versions[0] >= 1
        assert versions[-1] <= last
        starts = [span.start for span in answer.spans]
        assert starts == [0, *(span.end for span in answer.spans[:-1])]
        assert answer.spans[-1].end == LENGTH
        assert all(value <= 0 for value in answer.log_probs)


def test_the_same_seed_gives_the_same_sample(server: VllmServer) -> None:
    async def use() -> list[Generation]:
        endpoint = HttpEndpoint(server.url)
        try:
            until = Until.after(120)
            return [await endpoint.generate(request(f"seed-{n}"), until) for n in range(2)]
        finally:
            await endpoint.close()

    first, second = asyncio.run(use())
    assert first.tokens == second.tokens


def test_aborted_requests_answer_with_the_tokens_so_far(server: VllmServer) -> None:
    """A full engine, so that none of them can be done before the abort arrives."""
    names = [f"abort-me-{number}" for number in range(16)]

    async def use() -> list[Generation]:
        endpoint = HttpEndpoint(server.url)
        try:
            until = Until.after(120)
            asking = [asyncio.create_task(endpoint.generate(request(n), until)) for n in names]
            while not all(task.done() for task in asking):
                await asyncio.sleep(0.02)  # an abort before the request has arrived has no effect
                await endpoint.abort(names, until)
            return await asyncio.gather(*asking)
        finally:
            await endpoint.close()

    aborted = [answer for answer in asyncio.run(use()) if answer.finish == "abort"]
    assert aborted
    for answer in aborted:
        assert len(answer.tokens) == len(answer.log_probs) < LENGTH
