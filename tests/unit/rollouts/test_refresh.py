"""A refresher that looks at a hook: what it believes, and what it says it can."""

import asyncio
import contextlib
from dataclasses import dataclass

import pytest

from reshard.errors import EngineError
from reshard.ids import PolicyVersion
from reshard_trainer import EngineReport, RefitReport
from reshard_trainer.engines import InFlight
from reshard_trainer.rollouts.clock import Until
from reshard_trainer.rollouts.errors import EngineFenced, RolloutError
from reshard_trainer.rollouts.fleet import Fleet
from reshard_trainer.rollouts.meter import Meter
from reshard_trainer.rollouts.refresh import HookRefresher, Renewal
from reshard_trainer.rollouts.rollout import EngineName


@dataclass
class Hook:
    """What a refresher sees of one."""

    last_report: RefitReport | None = None

    def publish(self, version: int, *, error: str = "", held: bool = False) -> None:
        engine = EngineReport(
            "e", PolicyVersion(version), error=error, state="held" if held else "serving"
        )
        self.last_report = RefitReport(PolicyVersion(version), 0.1, {"e": engine})


async def refreshed(hook: Hook, at_least: int, seconds: float = 5.0) -> PolicyVersion:
    done = await HookRefresher(hook).refresh(
        EngineName("e"), PolicyVersion(at_least), contextlib.nullcontext(), Until.after(seconds)
    )
    return done.version


def test_it_waits_for_the_report_of_the_version_or_a_newer_one() -> None:
    hook = Hook()
    hook.publish(1)

    async def use() -> PolicyVersion:
        waiting = asyncio.create_task(refreshed(hook, 2))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        hook.publish(3)
        return await waiting

    assert asyncio.run(use()) == 3


def test_a_held_engine_is_fenced_and_a_missing_version_is_an_error_with_the_reason() -> None:
    hook = Hook()
    with pytest.raises(EngineError, match="nothing was published yet"):
        asyncio.run(refreshed(hook, 1, seconds=0.01))
    hook.publish(1, error="its rank 1 is gone")
    with pytest.raises(EngineError, match="its rank 1 is gone"):
        asyncio.run(refreshed(hook, 2, seconds=0.01))
    hook.publish(1, error="torn", held=True)
    with pytest.raises(EngineFenced, match="engine e is held: torn"):
        asyncio.run(refreshed(hook, 1))


@pytest.mark.parametrize("in_flight", ["keep", "wait", "abort"])
def test_it_can_what_its_engines_do_and_nothing_else(in_flight: InFlight) -> None:
    refresher = HookRefresher(Hook(), in_flight=in_flight)
    Renewal(Fleet(), refresher, in_flight=in_flight, meter=Meter())
    other: InFlight = "abort" if in_flight == "keep" else "keep"
    with pytest.raises(RolloutError, match=f"in_flight='{other}' cannot be had with Hook"):
        Renewal(Fleet(), refresher, in_flight=other, meter=Meter())
