"""One outcome for all trainer ranks: rank 0 decides how a step ended, the others read it.

Whatever a rank saw of a failure itself (a closed connection, a missed deadline), all ranks raise
the same error. Not here: what the steps are.
"""

import logging
from collections.abc import Callable
from typing import TypeVar

import msgspec

from reshard import errors
from reshard.agreement import report_fault
from reshard.board import BoardClient, Deadline
from reshard.errors import ReshardError
from reshard.session import Fault
from reshard.wire import decode, encode
from reshard_trainer.reports import EngineReport

logger = logging.getLogger(__name__)

T = TypeVar("T")

_REPORT_SECONDS = 10.0
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

    def error(self) -> ReshardError:
        """The error again."""
        kind = getattr(errors, self.kind, ReshardError)
        revived: ReshardError = kind(self.text)
        revived.faults = self.faults
        return revived


class Verdict(msgspec.Struct, frozen=True):
    """How a step ended.

    Attributes:
        error: why it failed; None if it did not.
        report: of a refit that succeeded.
    """

    error: ErrorRecord | None = None
    report: EngineReport | None = None


def give_verdict(board: BoardClient, key: str, step: Callable[[], T], session: str) -> T:
    """Trainer rank 0: take the step, tell all how it ended.

    Args:
        board: the run's board.
        key: of this step's verdict.
        step: rank 0's part, which sees every other rank's; may return an `EngineReport`.
        session: whose other ranks are to stop waiting if it fails.

    Raises:
        ReshardError: the step failed; the same error that the other ranks raise.
    """
    try:
        result = step()
    except Exception as error:
        record = ErrorRecord.of(error)
        write_fault(board, session, 0, key.rpartition("/")[2], error)
        board.put(key, encode(Verdict(record)), Deadline.after(_REPORT_SECONDS))
        raise record.error() from error
    report = result if isinstance(result, EngineReport) else None
    board.put(key, encode(Verdict(report=report)), Deadline.after(_REPORT_SECONDS))
    return result


def await_verdict(
    board: BoardClient,
    key: str,
    step: Callable[[], T],
    session: str,
    rank: int,
    deadline: Deadline,
) -> tuple[T | None, EngineReport | None]:
    """Any other trainer rank: take one's part of the step, then learn how it ended.

    Returns:
        What the part returned (None if it failed here and yet went well for all) and the report.

    Raises:
        ReshardError: rank 0's error; one's own only if rank 0 gives no verdict.
    """
    own: Exception | None = None
    result: T | None = None
    try:
        result = step()
    except Exception as error:
        own = error
        write_fault(board, session, rank, key.rpartition("/")[2], error)
    try:
        verdict = decode(board.get(key, deadline), Verdict)
    except ReshardError as error:
        raise (own or error) from error
    if verdict.error is not None:
        raise verdict.error.error() from own
    if own is not None:
        logger.warning("trainer rank %d failed where all others went on: %s", rank, own)
    return result, verdict.report


def write_fault(
    board: BoardClient, session: str, rank: int, phase: str, error: BaseException
) -> None:
    """Make every wait of the session end; the first failure that was written stands."""
    fault = Fault(rank=rank, phase=phase, text=ErrorRecord.of(error).text)
    try:
        report_fault(board, session, fault, Deadline.after(_REPORT_SECONDS))
    except ReshardError:
        logger.warning("the control board is gone; peers end their waits by their own deadlines")
