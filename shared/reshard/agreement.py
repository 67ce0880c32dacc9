"""Steps that all ranks take together, over the board: gather values, agree on the outcome.

Every wait ends by its deadline, and at once when the session has a fault: the failure that some
rank wrote down first. Not here: what is agreed on (`joining`, `transport`).
"""

import re
from collections.abc import Collection

from reshard.board import BoardClient, Deadline
from reshard.errors import DeadlineExceeded, PeerError, WireError
from reshard.session import Fault
from reshard.wire import decode, encode

_SESSION = re.compile(r"^(.*/e\d+)(?:/|$)", re.DOTALL)

_MAX_FAULT_BYTES = 2**20


def session_of(scope: str) -> str | None:
    """The session that a scope lies in (`<engine>/e<epoch>`), or None.

    >>> session_of("http://host:8000/e2/a7/received")
    'http://host:8000/e2'
    """
    found = _SESSION.match(scope)
    return found[1] if found else None


def rank_name(rank: int, trainer_size: int | None = None) -> str:
    """How messages call a group rank.

    >>> rank_name(3, trainer_size=2), rank_name(0, trainer_size=2), rank_name(3)
    ('rank 3 (engine rank 1)', 'rank 0 (trainer rank 0)', 'rank 3')
    """
    if trainer_size is None:
        return f"rank {rank}"
    if rank < trainer_size:
        return f"rank {rank} (trainer rank {rank})"
    return f"rank {rank} (engine rank {rank - trainer_size})"


def gather(
    board: BoardClient,
    scope: str,
    rank: int,
    ranks: Collection[int],
    value: bytes,
    deadline: Deadline,
    *,
    trainer_size: int | None = None,
) -> dict[int, bytes]:
    """Put this rank's value and wait for those of all `ranks`.

    Args:
        board: the run's board.
        scope: a key of this step alone; its last part names the phase in messages. In a session,
            the session's fault ends the wait.
        rank: this rank; its value lies at `<scope>/<rank>`.
        ranks: whose values to wait for.
        value: this rank's.
        deadline: of the wait.
        trainer_size: number of trainer ranks, to name ranks in messages.

    Returns:
        The values by rank, in the order of `ranks`.

    Raises:
        PeerError: the session has a fault.
        DeadlineExceeded: names the ranks that did not answer.
    """
    board.put(f"{scope}/{rank}", value, deadline)
    session = session_of(scope)
    fault_key = f"{session}/fault" if session else ""
    keys = {each: f"{scope}/{each}" for each in ranks}
    found = board.get_all(tuple(keys.values()), deadline, unless=fault_key)
    if not found.missing:
        return {each: found.values[key] for each, key in keys.items()}
    if fault_key in found.values:
        raise fault_error(found.values[fault_key], trainer_size)
    silent = [each for each, key in keys.items() if key in found.missing]
    names = ", ".join(rank_name(each, trainer_size) for each in silent)
    raise DeadlineExceeded(
        f"no answer from {names} in phase {_phase(scope)} within {deadline.seconds:g} s"
    )


def agree(
    board: BoardClient,
    scope: str,
    rank: int,
    ranks: Collection[int],
    error: str | None,
    deadline: Deadline,
    *,
    trainer_size: int | None = None,
) -> None:
    """Return on every rank if all are well, or raise the same error on every rank.

    Args:
        board: the run's board.
        scope: a key of this step alone; its last part names the phase in messages.
        rank: this rank.
        ranks: who takes part.
        error: this rank's error text; None: all is well.
        deadline: of the wait.
        trainer_size: number of trainer ranks, to name ranks in messages.

    Raises:
        PeerError: lists every rank's error.
        DeadlineExceeded: names the ranks that did not answer.
    """
    own = encode(error)
    answers = gather(board, scope, rank, ranks, own, deadline, trainer_size=trainer_size)
    texts = {
        each: _text(raw, rank_name(each, trainer_size)) for each, raw in sorted(answers.items())
    }
    faults = [
        f"{rank_name(each, trainer_size)}: {text}"
        for each, text in texts.items()
        if text is not None
    ]
    if faults:
        raise PeerError(f"{len(faults)} of {len(texts)} ranks failed in {_phase(scope)}", faults)


def report_fault(board: BoardClient, session: str, fault: Fault, deadline: Deadline) -> Fault:
    """Write a failure down, unless another one was first; the fault that stands.

    To be called before anything that other ranks could take for a failure of this one.
    """
    winner = board.put_first(f"{session}/fault", encode(fault), deadline)
    return decode(winner, Fault, limit=_MAX_FAULT_BYTES)


def read_fault(board: BoardClient, session: str, deadline: Deadline) -> Fault | None:
    """The session's first failure, once there is one, or None at the deadline."""
    found = board.get_all((f"{session}/fault",), deadline)
    raw = found.values.get(f"{session}/fault")
    return None if raw is None else decode(raw, Fault, limit=_MAX_FAULT_BYTES)


def fault_error(fault: Fault | bytes, trainer_size: int | None = None) -> PeerError:
    """The error that a fault is on the ranks that only hear of it."""
    if isinstance(fault, bytes):
        try:
            fault = decode(fault, Fault, limit=_MAX_FAULT_BYTES)
        except WireError as error:
            return PeerError(f"this session has failed, and its fault cannot be read: {error}")
    tensor = f", tensor {fault.tensor}" if fault.tensor else ""
    return PeerError(
        f"{rank_name(fault.rank, trainer_size)} failed in phase {fault.phase}{tensor}: {fault.text}"
    )


def _phase(scope: str) -> str:
    return scope.rpartition("/")[2]


def _text(raw: bytes, sender: str) -> str | None:
    text: str | None = decode(raw, str | None, limit=_MAX_FAULT_BYTES, sender=sender)  # type: ignore[arg-type]
    return text
