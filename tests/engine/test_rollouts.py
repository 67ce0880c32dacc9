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
    async def use() -> Generation:
        endpoint = HttpEndpoint(server.url)
        try:
            until = Until.after(120)
            await endpoint.check(until)
            assert await endpoint.version(until) == 1
            asking = asyncio.create_task(endpoint.generate(request("spans"), until))
            await asyncio.sleep(0.3)
            await asyncio.to_thread(server.post, "/update_weight_version", {"new_version": "2"})
            return await asking
        finally:
            await endpoint.close()

    answer = asyncio.run(use())
    assert len(answer.tokens) == len(answer.log_probs) == LENGTH
    assert [span.version for span in answer.spans] == [1, 2]
    assert answer.spans[0].start == 0
    assert answer.spans[0].end == answer.spans[1].start
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
