"""What a publish did: figures for people and logs, the same on every trainer rank.

Not here: how they are measured.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from reshard.ids import PolicyVersion

EngineState = Literal["serving", "held", "unknown"]
"""Whether an engine serves one whole version, is held back (paused), or nobody knows."""


@dataclass(frozen=True, slots=True)
class EngineReport:
    """One engine's part of a publish.

    Attributes:
        engine: its name.
        version: the policy version it now serves; None where that is not known to be this one.
        error: empty, or why it did not get the version.
        state: what it does now.
        seconds: by phase; `transfer/...` are the slowest rank's.
        pause_seconds: how long the engine generated nothing.
        received_bytes: by engine rank, counted there.
        extra_bytes: by group rank, trainer ranks first: memory that its tensors took at most beside
            the weights; kept from refit to refit.
        redundancy: bytes received over bytes needed; 1.0 is exact.
        direct_bytes, repacked_bytes, computed_bytes: needed bytes by class of destination, summed
            over the engine's ranks.
        plan_digest: of the plan that brought them.
        notes: what its ranks want people to know: a draft model that stays as it was, parameters
            made of constants where no tensor is published, tensors that travel whole.
    """

    engine: str
    version: PolicyVersion | None = None
    error: str = ""
    state: EngineState = "serving"
    seconds: Mapping[str, float] = field(default_factory=dict)
    pause_seconds: float = 0.0
    received_bytes: tuple[int, ...] = ()
    extra_bytes: tuple[int, ...] = ()
    redundancy: float = 1.0
    direct_bytes: int = 0
    repacked_bytes: int = 0
    computed_bytes: int = 0
    plan_digest: str = ""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RefitReport:
    """One publish to all engines.

    Attributes:
        version: the policy version that was published.
        total_seconds: from the end of the optimizer's step until it was done, on this rank.
        engines: each engine's part, by name.
        stall_seconds: how long it held up the training on this rank.
    """

    version: PolicyVersion
    total_seconds: float
    engines: Mapping[str, EngineReport]
    stall_seconds: float = 0.0

    @property
    def seconds(self) -> dict[str, float]:
        """By phase: the slowest engine's."""
        slowest: dict[str, float] = {}
        for engine in self.engines.values():
            for phase, seconds in engine.seconds.items():
                slowest[phase] = max(seconds, slowest.get(phase, 0.0))
        return slowest

    @property
    def received_bytes(self) -> dict[str, tuple[int, ...]]:
        """By engine: bytes that each of its ranks received."""
        return {name: engine.received_bytes for name, engine in self.engines.items()}

    @property
    def redundancy(self) -> float:
        """The worst engine's."""
        return max((engine.redundancy for engine in self.engines.values()), default=1.0)

    @property
    def direct_bytes(self) -> int:
        """Bytes received straight into live storage's layout, all engines."""
        return sum(engine.direct_bytes for engine in self.engines.values())

    @property
    def repacked_bytes(self) -> int:
        """Bytes that an engine repacks after they arrived, all engines."""
        return sum(engine.repacked_bytes for engine in self.engines.values())

    @property
    def computed_bytes(self) -> int:
        """Bytes from which an engine computes its own, all engines."""
        return sum(engine.computed_bytes for engine in self.engines.values())

    @property
    def failed(self) -> dict[str, str]:
        """Error texts of the engines that did not get the version, by name."""
        return {name: engine.error for name, engine in self.engines.items() if engine.error}
