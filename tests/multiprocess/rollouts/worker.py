"""A producer in a process of its own, on simulated engines: `python -m ... FILE`.

FILE holds the invitation and the settings; it is deleted once read.
"""

import asyncio
import random
import sys
from pathlib import Path

import msgspec
from tests.unit.rollouts.runs import half
from tests.unit.rollouts.simulated import SimulatedEngine, SimulatedTrainer

from reshard.board import Invitation
from reshard.errors import PeerError
from reshard.ids import PolicyVersion
from reshard_trainer.rollouts.asynchronous import Crew
from reshard_trainer.rollouts.clock import Until
from reshard_trainer.rollouts.desk_client import RemoteDesk
from reshard_trainer.rollouts.generating import Generating
from reshard_trainer.rollouts.meter import Meter
from reshard_trainer.rollouts.refresh import Boundary, Refreshed
from reshard_trainer.rollouts.reward import immediate
from reshard_trainer.rollouts.rollout import EngineName
from reshard_trainer.rollouts.sampling import Sampling


class Order(msgspec.Struct):
    """What a worker is to do."""

    invitation: Invitation
    name: str
    token_seconds: float
    slots: int
    samples: int
    tokens: int


class Follower(SimulatedTrainer):
    """Brings the engine to what the desk says is published."""

    async def refresh(
        self, engine: EngineName, at_least: PolicyVersion, boundary: Boundary, until: Until
    ) -> Refreshed:
        self.published = max(self.published, at_least)
        return await super().refresh(engine, at_least, boundary, until)


async def work(order: Order) -> None:
    engine = SimulatedEngine(
        EngineName(order.name), slots=order.slots, token_seconds=order.token_seconds
    )
    desk = RemoteDesk(order.invitation)
    how = Generating(
        Sampling(max_tokens=order.tokens, seed=7),
        immediate(half),
        samples=order.samples,
        chance=random.Random(order.name),
    )
    trainer = Follower({engine.name: engine}, {engine.name: 0.02}, commit_seconds=0.005)
    crew = Crew(desk, trainer, how, Meter())
    await crew.join(engine)
    try:
        while True:
            crew.raise_failure()
            await asyncio.sleep(0.05)
    finally:
        await crew.close()
        await desk.close()


if __name__ == "__main__":
    file = Path(sys.argv[1])
    raw = file.read_bytes()
    file.unlink()
    try:
        asyncio.run(work(msgspec.json.decode(raw, type=Order)))
    except Exception as error:
        # The trainer has closed the desk: the work is done.
        cause = error.__cause__
        if "has closed the desk" not in f"{error} {cause!r}" and not isinstance(error, PeerError):
            raise
