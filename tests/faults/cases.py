"""The cases of the fault matrix, generated: phase x victim x fault, over ways to move and install.

What cannot happen is left out: an engine takes no snapshot, trainer ranks but the first make no
control calls, a signal has no wrong bytes.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

from tests.faults.strikes import Kind

Phase = Literal[
    "describe",
    "plan",
    "bootstrap",
    "begin",
    "snapshot",
    "transfer",
    "verify",
    "pause",
    "commit",
    "finish",
    "reset",
    "resume",
]
Victim = Literal["trainer rank 0", "trainer rank 1", "engine rank 1", "engine"]
Transport = Literal["gloo", "shm"]
Install = Literal["staged", "in_place"]
Part = Literal["", "first", "middle", "last"]

PHASES: tuple[Phase, ...] = get_args(Phase)
VICTIMS: tuple[Victim, ...] = get_args(Victim)
KINDS: tuple[Kind, ...] = ("exception", "kill", "stop", "cut", "wrong")
WAYS: tuple[tuple[Transport, Install], ...] = (
    ("gloo", "staged"),
    ("shm", "staged"),
    ("gloo", "in_place"),
    ("shm", "in_place"),
)

JOINING: frozenset[Phase] = frozenset({"plan", "bootstrap"})
"""Phases of opening a session."""

ROUTES: dict[Phase, str] = {
    "begin": "/start_weight_update",
    "pause": "/pause",
    "finish": "/finish_weight_update",
    "reset": "/reset_prefix_cache",
    "resume": "/resume",
}
"""Phases in which the engine's server is struck, not its ranks."""

_CONTROL: dict[Phase, str] = {
    "commit": "commit",
    "finish": "finish",
    "reset": "reset_prefix_cache",
}


@dataclass(frozen=True, slots=True)
class Case:
    """One fault, injected into one refit.

    Attributes:
        transport, install: how the bytes move and land.
        phase, victim, kind: what happens where.
        part: in `transfer`: at the first, middle or last message of the victim.
    """

    transport: Transport
    install: Install
    phase: Phase
    victim: Victim
    kind: Kind
    part: Part = ""

    def __str__(self) -> str:
        part = f" ({self.part})" if self.part else ""
        return (
            f"{self.transport} {self.install}: {self.kind} of {self.victim} in {self.phase}{part}"
        )

    @property
    def way(self) -> tuple[Transport, Install]:
        return self.transport, self.install

    @property
    def on_route(self) -> bool:
        """Whether the engine's server is struck."""
        return self.victim == "engine" and self.phase in ROUTES

    @property
    def point(self) -> str:
        """Of `strikes`, where this case strikes a rank."""
        if self.victim == "trainer rank 0":
            return _CONTROL.get(self.phase, self.phase)
        if self.victim == "trainer rank 1" and self.phase == "commit":
            return "hear"
        return self.phase

    @property
    def possible(self) -> bool:
        """Whether there is such a fault."""
        if self.victim == "engine":
            return self.phase in ROUTES or self._in_rank
        if self.victim == "engine rank 1":
            return self.phase not in ROUTES and self._in_rank
        control = self.phase in _CONTROL
        if self.phase in ("begin", "pause", "resume"):
            return False
        if self.victim == "trainer rank 1":
            return not control or (self.phase == "commit" and self.kind in ("kill", "stop", "cut"))
        return not (control and self.kind == "wrong") and self._in_rank

    @property
    def _in_rank(self) -> bool:
        """Whether wrong bytes can be made there."""
        if self.kind != "wrong":
            return True
        if self.phase == "snapshot":
            return self.victim.startswith("trainer") and self.transport == "shm"
        if self.phase == "transfer" and self.victim.startswith("trainer"):
            return self.transport == "gloo"
        return True


def _parts(phase: Phase, victim: Victim, transport: Transport) -> tuple[Part, ...]:
    """Where in the phase; ranks that show shared memory send no messages."""
    if phase != "transfer":
        return ("",)
    if transport == "shm" and victim.startswith("trainer"):
        return ("first",)
    return ("first", "middle", "last")


def all_cases() -> Iterator[Case]:
    """Every case that is possible, by way."""
    for transport, install in WAYS:
        for phase in PHASES:
            for victim in VICTIMS:
                for kind in KINDS:
                    for part in _parts(phase, victim, transport):
                        case = Case(transport, install, phase, victim, kind, part)
                        if not case.possible:
                            continue
                        if kind == "wrong" and transport == "shm" and part in ("first", "middle"):
                            continue  # what is spoilt before the last copy is overwritten by it
                        yield case


def selected() -> list[Case]:
    """All of the first way, and of the others a third each: what a run of minutes can hold."""
    chosen = []
    for way in WAYS:
        cases = [case for case in all_cases() if case.way == way]
        first = WAYS.index(way)
        chosen += cases if not first else cases[first - 1 :: 3]
    return chosen


def short() -> list[Case]:
    """A dozen that differ, for the suite."""
    return [
        Case("gloo", "staged", "transfer", "engine rank 1", "kill", "middle"),
        Case("gloo", "staged", "transfer", "trainer rank 1", "wrong", "last"),
        Case("gloo", "staged", "commit", "engine rank 1", "exception"),
        Case("gloo", "staged", "plan", "trainer rank 0", "exception"),
        Case("gloo", "staged", "finish", "engine", "cut"),
        Case("gloo", "staged", "describe", "trainer rank 1", "kill"),
        Case("shm", "in_place", "transfer", "engine rank 1", "exception", "middle"),
        Case("shm", "in_place", "snapshot", "trainer rank 0", "wrong"),
        Case("shm", "in_place", "transfer", "trainer rank 0", "kill", "first"),
        Case("shm", "in_place", "verify", "engine", "stop"),
        Case("shm", "in_place", "commit", "trainer rank 1", "stop"),
        Case("shm", "in_place", "bootstrap", "engine rank 1", "wrong"),
    ]
