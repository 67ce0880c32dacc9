"""How long an engine has nothing to do, in either mode."""

from typing import Final

from reshard_trainer.rollouts.clock import Until, now
from reshard_trainer.rollouts.fleet import Fleet, Seat
from reshard_trainer.rollouts.meter import Meter

_COUNT_SECONDS: Final = 2.0
"""At least this often what was idle so far is counted."""


async def measure_idleness(fleet: Fleet, seat: Seat, meter: Meter) -> None:
    """Count an engine's seconds without a request in flight, until it is cancelled."""
    while True:
        since, idle = now(), not seat.requests
        try:
            await fleet.changed.next(Until.after(_COUNT_SECONDS))
        finally:
            if idle:
                meter.idle("engine", seat.name, now() - since)
