"""An LLM of this process as an endpoint: collected calls, stillness, faults."""

import asyncio
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pytest

from reshard.ids import PolicyVersion
from reshard_trainer.rollouts.clock import Until
from reshard_trainer.rollouts.errors import EngineFault
from reshard_trainer.rollouts.local_endpoint import LocalEndpoint
from reshard_trainer.rollouts.rollout import SampleId, Serial, VersionSpan
from reshard_trainer.rollouts.sampling import Generation, Request, Sampling, Setting


@dataclass
class Entry:
    logprob: float


@dataclass
class Span:
    version: str
    start: int
    end: int


@dataclass
class Output:
    token_ids: list[int]
    logprobs: list[Mapping[int, Entry] | None]
    weight_versions: list[Span]
    finish_reason: str = "length"


@dataclass
class RequestOutput:
    outputs: list[Output]


@dataclass
class Llm:
    """Continues a prompt by counting on from its last token; a call waits for `go`."""

    label: str = "3"
    calls: list[int] = field(default_factory=list)
    go: threading.Event = field(default_factory=threading.Event)
    begun: threading.Event = field(default_factory=threading.Event)
    error: Exception | None = None

    def generate(
        self,
        prompts: Sequence[Mapping[str, list[int]]],
        sampling_params: Sequence[dict[str, Setting]],
        *,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        assert not use_tqdm
        self.calls.append(len(prompts))
        self.begun.set()
        assert self.go.wait(10)
        if self.error:
            raise self.error
        return [
            self._answer(prompt["prompt_token_ids"][-1], settings)
            for prompt, settings in zip(prompts, sampling_params, strict=True)
        ]

    def get_weight_version(self) -> str:
        return self.label

    def _answer(self, last: int, settings: dict[str, Setting]) -> RequestOutput:
        count = settings["max_tokens"]
        assert isinstance(count, int)
        tokens = list(range(last + 1, last + 1 + count))
        probabilities: list[Mapping[int, Entry] | None] = [{t: Entry(-0.5 * t)} for t in tokens]
        return RequestOutput([Output(tokens, probabilities, [Span(self.label, 0, count)])])


def parameters(**settings: Setting) -> dict[str, Setting]:
    return settings


def request(number: int) -> Request:
    sample = SampleId(Serial(number), 0)
    return Request(sample, (10 * number,), 2, 1, Sampling(max_tokens=2), f"r{number}")


def test_requests_that_come_during_a_call_go_into_the_next_one_together() -> None:
    llm = Llm()

    async def use() -> list[Generation]:
        endpoint = LocalEndpoint(llm, parameters, slots=3)
        until = Until.after(10)
        first = asyncio.create_task(endpoint.generate(request(1), until))
        await asyncio.to_thread(llm.begun.wait, 10)
        rest = [asyncio.create_task(endpoint.generate(request(n), until)) for n in range(2, 7)]
        await asyncio.sleep(0)
        llm.go.set()
        answers = await asyncio.gather(first, *rest)
        await endpoint.close()
        return list(answers)

    answers = asyncio.run(use())
    assert llm.calls == [1, 3, 2]
    for number, answer in enumerate(answers, start=1):
        tokens = (10 * number + 1, 10 * number + 2)
        assert answer.tokens == tokens
        assert answer.log_probs == tuple(-0.5 * token for token in tokens)
        assert answer.spans == (VersionSpan(PolicyVersion(3), 0, 2),)


def test_while_it_is_quiet_no_call_runs_and_afterwards_the_new_weights_answer() -> None:
    llm = Llm()
    llm.go.set()

    async def use() -> Generation:
        endpoint = LocalEndpoint(llm, parameters)
        async with endpoint.quiet():
            asking = asyncio.create_task(endpoint.generate(request(1), Until.after(10)))
            for _ in range(20):
                await asyncio.sleep(0)
            assert llm.calls == []
            llm.label = "4"
        answer = await asking
        assert await endpoint.version(Until.after(10)) == 4
        await endpoint.close()
        return answer

    assert asyncio.run(use()).spans == (VersionSpan(PolicyVersion(4), 0, 2),)


def test_an_error_of_a_call_is_a_fault_of_each_of_its_requests_and_the_next_call_works() -> None:
    llm = Llm(error=ValueError("no KV blocks"))
    llm.go.set()

    async def use() -> Generation:
        endpoint = LocalEndpoint(llm, parameters)
        asked = [endpoint.generate(request(n), Until.after(10)) for n in (1, 2)]
        for answer in await asyncio.gather(*asked, return_exceptions=True):
            assert isinstance(answer, EngineFault)
            assert "in-process-0: ValueError: no KV blocks" in str(answer)
        llm.error = None
        again = await endpoint.generate(request(3), Until.after(10))
        await endpoint.close()
        return again

    assert asyncio.run(use()).tokens == (31, 32)


def test_a_call_that_hangs_ends_at_the_requests_deadline_and_names_it() -> None:
    llm = Llm()

    async def use() -> None:
        endpoint = LocalEndpoint(llm, parameters)
        with pytest.raises(EngineFault, match=r"did not answer r1 within 0\.05 s"):
            await endpoint.generate(request(1), Until.after(0.05))
        llm.go.set()
        await endpoint.close()

    asyncio.run(use())
