"""One outcome for all trainer ranks: rank 0 decides how a step ended, the others read it.

Whatever a rank saw of a failure itself (a closed connection, a missed deadline), all ranks end
with the same error. Not here: what the steps are (`link.py`).
"""

import logging
from collections.abc import Mapping
from typing import NoReturn

import msgspec

from reshard import errors
from reshard.agreement import report_fault
from reshard.board import BoardClient, Deadline
from reshard.errors import LayoutError, PeerError, ReshardError
from reshard.session import Fault
from reshard_trainer.reports import EngineReport, EngineState

logger = logging.getLogger(__name__)

REPORT_SECONDS = 10.0
"""How long a failing rank tries to write its failure down."""


class ErrorRecord(msgspec.Struct, frozen=True):
    """An error of our tree, as it crosses between trainer ranks.

    Attributes:
        kind: class name in `reshard.errors`.
        text: the whole message.
        faults: its lines.
    """

    kind: str
    text: str
    faults: tuple[str, ...] = ()

    @classmethod
    def of(cls, error: BaseException) -> "ErrorRecord":
        """The record of any error; what is not of our tree is named by its type."""
        if isinstance(error, ReshardError):
            return cls(type(error).__name__, str(error), error.faults)
        return cls(ReshardError.__name__, f"{type(error).__name__}: {error}")

    @classmethod
    def of_rank(cls, error: BaseException, rank: int, phase: str) -> "ErrorRecord":
        """The record of what one trainer rank raised: our own errors say where, others do not."""
        if isinstance(error, ReshardError):
            return cls.of(error)
        text = f"trainer rank {rank} failed in phase {phase}: {type(error).__name__}: {error}"
        return cls(ReshardError.__name__, text)

    def error(self) -> ReshardError:
        """The error again."""
        kind = getattr(errors, self.kind, ReshardError)
        revived: ReshardError = kind(self.text)
        revived.faults = self.faults
        return revived


class Verdict(msgspec.Struct, frozen=True):
    """How a step with one engine ended.

    Attributes:
        error: why it failed; None if it did not.
        state: what the engine does after a failure.
        report: of a refit that succeeded.
    """

    error: ErrorRecord | None = None
    state: EngineState = "serving"
    report: EngineReport | None = None

    def raise_error(self) -> NoReturn:
        """Raise the error of a step that ended before this rank had a part in it."""
        raise self.error.error() if self.error else ReshardError("a step ended before it began")


def raise_errors(errors_by_rank: Mapping[int, ErrorRecord]) -> None:
    """Raise one error for those of all trainer ranks, if any: the same on each of them."""
    if not errors_by_rank:
        return
    faults = [
        f"trainer rank {rank}: {line}"
        for rank, error in sorted(errors_by_rank.items())
        for line in error.faults or (error.text,)
    ]
    same_kind = {error.kind for error in errors_by_rank.values()} == {LayoutError.__name__}
    kind: type[ReshardError] = LayoutError if same_kind else PeerError
    raise kind("the trainer's weights cannot be published; nothing was sent", faults)


def write_fault(
    board: BoardClient, session: str, rank: int, phase: str, error: BaseException
) -> None:
    """Make every wait of the session end; the failure that was written first stands."""
    fault = Fault(rank=rank, phase=phase, text=ErrorRecord.of(error).text)
    try:
        report_fault(board, session, fault, Deadline.after(REPORT_SECONDS))
    except ReshardError:
        logger.warning("the control board is gone; peers end their waits by their own deadlines")
