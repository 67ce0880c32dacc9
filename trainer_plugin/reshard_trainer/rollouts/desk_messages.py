"""What producers on other machines ask of the desk, and what it answers.

MessagePack, validated on arrival (`reshard.wire`). Not here: sockets, keys.
"""

import msgspec

from reshard.ids import PolicyVersion
from reshard_trainer.rollouts.buffer import Verdict
from reshard_trainer.rollouts.desk import Assignment
from reshard_trainer.rollouts.desk_service import Standing
from reshard_trainer.rollouts.gate import Ticket
from reshard_trainer.rollouts.rollout import EngineName, RolloutGroup


class Assign(msgspec.Struct, frozen=True, tag="assign"):
    """A prompt for an engine; answered when one is admitted, or when the time is over."""

    engine: EngineName
    version: PolicyVersion
    seconds: float


class Deliver(msgspec.Struct, frozen=True, tag="deliver"):
    """The group of an assignment; sent again until it is acknowledged."""

    group: RolloutGroup


class GiveUp(msgspec.Struct, frozen=True, tag="give_up"):
    """An assignment ends without a group."""

    ticket: Ticket
    reason: str
    charge: int


class News(msgspec.Struct, frozen=True, tag="news"):
    """What is new; answered when something is, or when the time is over."""

    known: PolicyVersion | None
    tickets: frozenset[Ticket]
    seconds: float


class Leave(msgspec.Struct, frozen=True, tag="leave"):
    """The producer goes; what it has in hand is asked again. Not answered."""


Operation = Assign | Deliver | GiveUp | News | Leave


class DeskRequest(msgspec.Struct, frozen=True):
    """One operation of one producer.

    It is sent again while no answer comes, so the desk may see it twice; it acts once.

    Attributes:
        number: counts up from 1 within a producer.
        settled: every request up to this number has its answer.
        operation: what to do.
    """

    number: int
    settled: int
    operation: Operation


class DeskReply(msgspec.Struct, frozen=True, omit_defaults=True):
    """The answer to one request; the field that its operation calls for.

    Attributes:
        number: of the request; 0 if the desk itself speaks (it closes).
        assignment: of `Assign`; None: nothing was admitted in time.
        verdict: of `Deliver`.
        standing: of `News`.
        error: why it was refused, or empty.
    """

    number: int
    assignment: Assignment | None = None
    verdict: Verdict | None = None
    standing: Standing | None = None
    error: str = ""
