"""What a rollout client needs of an engine.

Implementations: `HttpEndpoint` (a vLLM server), `LocalEndpoint` (an LLM in this process).
"""

from collections.abc import Collection
from typing import Protocol

from reshard.ids import PolicyVersion
from reshard_trainer.rollouts.clock import Until
from reshard_trainer.rollouts.rollout import EngineName
from reshard_trainer.rollouts.sampling import Generation, Request


class Endpoint(Protocol):
    """One engine."""

    @property
    def name(self) -> EngineName:
        """By which trainer and engine know it."""

    @property
    def slots(self) -> int:
        """Requests that it runs at once; more wait in its queue."""

    async def check(self, until: Until) -> None:
        """Can it serve rollouts at all?

        Raises:
            EngineError: it cannot, or is not there; says what to change.
        """

    async def generate(self, request: Request, until: Until) -> Generation:
        """Continue a prompt.

        Raises:
            EngineFault: this engine failed; another may do it.
            RequestRefused: no engine would do it.
        """

    async def version(self, until: Until) -> PolicyVersion | None:
        """The policy version that it serves; None: weights that no trainer of reshard published.

        Raises:
            EngineFault: it does not answer.
        """

    async def abort(self, requests: Collection[str], until: Until) -> None:
        """Have requests of these names answered at once, with the tokens so far.

        Raises:
            EngineFault: it does not answer.
        """

    async def close(self) -> None:
        """Let go of connections; the engine stays."""
