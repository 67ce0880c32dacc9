"""Real refits of a real vLLM while samples run: spans agree with them, by each setting."""

import asyncio
import contextlib
from dataclasses import dataclass

import pytest
import torch
from tests.support.checkpoints import make_model
from tests.support.engine_pool import EnginePool
from tests.support.vllm_server import VllmServer

from reshard.ids import PolicyVersion
from reshard_trainer import HttpEngine, attach
from reshard_trainer.engines import InFlight
from reshard_trainer.rollouts.client import RolloutClient, Route
from reshard_trainer.rollouts.clock import Until
from reshard_trainer.rollouts.fleet import Fleet
from reshard_trainer.rollouts.http_endpoint import HttpEndpoint
from reshard_trainer.rollouts.rollout import Prompt, PromptId, Rollout, SampleId, Serial
from reshard_trainer.rollouts.sampling import Sampling

pytestmark = pytest.mark.engine("llama", 1)

LENGTH = 240
SAMPLES = 8
BETWEEN_STEPS = 0.02
"""Seconds in which samples get on."""

FIRST = PolicyVersion(1)


@dataclass(frozen=True, slots=True)
class Sampled:
    """A rollout, and the labels that the engine had before it was asked for and after it ended."""

    before: int
    after: int
    rollout: Rollout


@pytest.fixture
def server(engines: EnginePool) -> VllmServer:
    return engines.shared(engines.spec("llama", 1))


def refit_while_sampling(server: VllmServer, in_flight: InFlight) -> tuple[list[Sampled], int]:
    """Samples of a full engine, refitted again and again until all are done; its last version."""
    model = make_model("llama", seed=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    engine = HttpEngine(server.url, in_flight=in_flight)
    with contextlib.closing(engine), attach(model, optimizer, [engine], version=FIRST) as hook:
        hook.publish()

        async def sample(client: RolloutClient, number: int, until: Until) -> Sampled:
            before = hook.version - 1  # a refit that is under way may have any label
            prompt = Prompt(PromptId(f"p{number}"), (10, 11, 12 + number))
            identity = SampleId(Serial(number), 0)
            rollout = await client.sample(identity, prompt, Route(at_least=FIRST), until)
            return Sampled(before, hook.version, rollout)

        async def use() -> list[Sampled]:
            endpoint, fleet = HttpEndpoint(server.url), Fleet()
            seat = fleet.join(endpoint)
            fleet.refreshed(seat, FIRST)
            client = RolloutClient(fleet, Sampling(max_tokens=LENGTH, ignore_eos=True))
            until = Until.after(120)
            try:
                asking = [asyncio.create_task(sample(client, n, until)) for n in range(SAMPLES)]
                while not all(task.done() for task in asking):
                    await asyncio.sleep(BETWEEN_STEPS)
                    await asyncio.to_thread(optimizer.step)
                    fleet.refreshed(seat, hook.version)
                return await asyncio.gather(*asking)
            finally:
                await endpoint.close()

        return asyncio.run(use()), hook.version


@pytest.mark.parametrize("in_flight", ["keep", "wait", "abort"])
def test_spans_agree_with_the_refits_that_took_place_while_samples_ran(
    server: VllmServer, in_flight: InFlight
) -> None:
    sampled, last = refit_while_sampling(server, in_flight)
    assert server.weight_version() == str(last)
    assert last > FIRST
    for each in sampled:
        versions = [span.version for span in each.rollout.spans]
        assert len(each.rollout.tokens) == LENGTH
        assert max(each.before, FIRST) <= versions[0]
        assert versions[-1] <= each.after
        assert versions == sorted(set(versions))
        assert ("continued" in each.rollout.marks) == (len(versions) > 1)
    split = [each.rollout for each in sampled if len(each.rollout.spans) > 1]
    resubmitted = [each.rollout for each in sampled if "resubmitted" in each.rollout.marks]
    # Drained before the refit; frozen beside it; or asked for again, with the tokens so far.
    assert bool(split) == (in_flight != "wait")
    assert bool(resubmitted) == (in_flight == "abort")
