"""A `vllm.LLM` of this process as an endpoint; vLLM is not imported here.

`LLM.generate` blocks and takes many prompts at once: requests that come while it runs are
collected and go into its next call. Between calls the engine stands still; a refit must hold
`quiet()` so that no call runs meanwhile.
"""

import asyncio
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from reshard.ids import PolicyVersion
from reshard_trainer.rollouts.answers import LabelledSpan, generation, version_of_label
from reshard_trainer.rollouts.clock import Until
from reshard_trainer.rollouts.errors import EngineFault
from reshard_trainer.rollouts.rollout import EngineName
from reshard_trainer.rollouts.sampling import Generation, Request, Setting

P = TypeVar("P")
P_co = TypeVar("P_co", covariant=True)
P_contra = TypeVar("P_contra", contravariant=True)


class _LogProb(Protocol):
    @property
    def logprob(self) -> float: ...


class _Output(Protocol):
    @property
    def token_ids(self) -> Sequence[int]: ...
    @property
    def logprobs(self) -> Sequence[Mapping[int, _LogProb] | None] | None: ...
    @property
    def finish_reason(self) -> str | None: ...
    @property
    def weight_versions(self) -> Sequence[LabelledSpan] | None: ...


class _RequestOutput(Protocol):
    @property
    def outputs(self) -> Sequence[_Output]: ...


class SamplingLlm(Protocol[P_contra]):
    """The part of `vllm.LLM` that generation calls."""

    def generate(
        self,
        prompts: Sequence[Mapping[str, list[int]]],
        sampling_params: Sequence[P_contra],
        *,
        use_tqdm: bool,
    ) -> Sequence[_RequestOutput]:
        """As in vLLM; prompts are `{"prompt_token_ids": [...]}`."""

    def get_weight_version(self) -> str:
        """As in vLLM."""


class MakeParameters(Protocol[P_co]):
    """`vllm.SamplingParams`, or what takes its keywords."""

    def __call__(self, **settings: Setting) -> P_co:
        """Sampling parameters of one request."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    request: Request
    answer: "asyncio.Future[_Output]"


class LocalEndpoint(Generic[P]):
    """One LLM. `Endpoint` says what each call promises.

    Attributes:
        name: as given.
        slots: requests in one call of `LLM.generate`.
    """

    def __init__(
        self,
        llm: SamplingLlm[P],
        make_parameters: MakeParameters[P],
        *,
        name: str = "in-process-0",
        slots: int = 16,
    ) -> None:
        """Take an LLM.

        Args:
            llm: its `generate` is called by this endpoint alone.
            make_parameters: `vllm.SamplingParams`.
            name: the same as that of its `InProcessEngine`.
            slots: requests in one call.
        """
        self.name = EngineName(name)
        self.slots = slots
        self._llm = llm
        self._make_parameters = make_parameters
        self._waiting: list[_Waiting] = []
        self._quiet = asyncio.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"reshard-{name}")
        self._caller: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def quiet(self) -> AsyncIterator[None]:
        """No call of `generate` runs inside; requests wait."""
        async with self._quiet:
            yield

    async def check(self, until: Until) -> None:
        """Nothing to check."""

    async def generate(self, request: Request, until: Until) -> Generation:
        """Continue a prompt, in the next call."""
        answer: asyncio.Future[_Output] = asyncio.get_running_loop().create_future()
        waiting = _Waiting(request, answer)
        self._waiting.append(waiting)
        if self._caller is None or self._caller.done():
            self._caller = asyncio.create_task(self._call())
        try:
            async with until.limit():
                output = await answer
        except TimeoutError as error:
            raise EngineFault(
                f"engine {self.name} did not answer {request.name} within {until.seconds:g} s"
            ) from error
        finally:
            if waiting in self._waiting:
                self._waiting.remove(waiting)
        return self._generation(output)

    async def version(self, until: Until) -> PolicyVersion | None:
        """The policy version that it serves."""
        try:
            async with until.limit(), self._quiet:
                return version_of_label(self._llm.get_weight_version())
        except TimeoutError as error:
            raise EngineFault(f"engine {self.name} is busy for {until.seconds:g} s") from error

    async def abort(self, requests: Collection[str], until: Until) -> None:
        """A call cannot be interrupted: it runs to its end."""

    async def close(self) -> None:
        """End the thread of calls; the LLM stays."""
        if self._caller is not None:
            self._caller.cancel()
            await asyncio.gather(self._caller, return_exceptions=True)
        self._thread.shutdown(wait=False)

    async def _call(self) -> None:
        """Call `LLM.generate` until nothing waits."""
        loop = asyncio.get_running_loop()
        while self._waiting:
            async with self._quiet:
                taken, self._waiting = self._waiting[: self.slots], self._waiting[self.slots :]
                try:
                    outputs = await loop.run_in_executor(self._thread, self._generate, taken)
                except Exception as error:
                    fault = f"engine {self.name}: {type(error).__name__}: {error}"
                    _settle(taken, [EngineFault(fault) for _ in taken])
                else:
                    _settle(taken, outputs)

    def _generate(self, taken: Sequence[_Waiting]) -> list[_Output]:
        """On the thread of calls."""
        outputs = self._llm.generate(
            [{"prompt_token_ids": list(each.request.tokens)} for each in taken],
            [self._make_parameters(**each.request.parameters()) for each in taken],
            use_tqdm=False,
        )
        return [output.outputs[0] for output in outputs]

    def _generation(self, output: _Output) -> Generation:
        entries = zip(output.token_ids, output.logprobs or (), strict=False)
        return generation(
            self.name,
            tokens=output.token_ids,
            log_probs=[
                entry[token].logprob if entry and token in entry else None
                for token, entry in entries
            ],
            spans=output.weight_versions,
            finish=output.finish_reason,
        )


def _settle(taken: Sequence[_Waiting], answers: Sequence[_Output | EngineFault]) -> None:
    for waiting, answer in zip(taken, answers, strict=True):
        if waiting.answer.done():
            continue
        if isinstance(answer, EngineFault):
            waiting.answer.set_exception(answer)
        else:
            waiting.answer.set_result(answer)
