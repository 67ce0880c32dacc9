"""Agreement: all ranks learn what all ranks say, or who did not say it.

The primitive under "ranks fail the same way, before the first byte". Built on the board, so it
works between processes that share no process group.
"""

from collections.abc import Callable, Sequence

from reshard.board import BoardClient, Deadline
from reshard.errors import DeadlineExceeded, PeerError
from reshard.session import Fault
from reshard.wire import decode


def rank_name(rank: int) -> str:
    """How an error names a rank, where nothing better is known."""
    return f"rank {rank}"


def gather(
    board: BoardClient,
    scope: str,
    rank: int,
    ranks: Sequence[int],
    value: bytes,
    deadline: Deadline,
    *,
    fault_key: str = "",
    name: Callable[[int], str] = rank_name,
) -> dict[int, bytes]:
    """Put this rank's value and collect everybody's.

    Args:
        board: the run's board.
        scope: key prefix; fresh for each use.
        rank: this rank; one that is not in `ranks` only collects.
        ranks: who takes part.
        value: this rank's.
        deadline: for the whole of it.
        fault_key: a key whose appearance ends the wait with its `Fault`.
        name: how errors name a rank.

    Raises:
        PeerError: a fault was put under `fault_key`.
        DeadlineExceeded: names the ranks that said nothing.
    """
    if rank in ranks:
        board.put(f"{scope}/{rank}", value, deadline)
    collected: dict[int, bytes] = {}
    for peer in ranks:
        keys = [f"{scope}/{peer}", *([fault_key] if fault_key else [])]
        try:
            key, raw = board.get_any(keys, deadline)
        except DeadlineExceeded:
            silent = [p for p in ranks if p not in collected and _absent(board, scope, p)]
            raise DeadlineExceeded(
                f"no answer in phase {scope.rsplit('/', 1)[-1]} within {deadline.seconds:g} s from "
                + (", ".join(map(name, silent)) or f"the control board {board.address}")
            ) from None
        if key == fault_key:
            raise PeerError(fault_text(decode(raw, Fault), name))
        collected[peer] = raw
    return collected


def _absent(board: BoardClient, scope: str, rank: int) -> bool:
    try:
        return board.peek(f"{scope}/{rank}", Deadline.after(2.0)) is None
    except DeadlineExceeded:
        return False


def fault_text(fault: Fault, name: Callable[[int], str] = rank_name) -> str:
    """A fault as a sentence."""
    at = f", tensor {fault.tensor}" if fault.tensor else ""
    return f"{name(fault.rank)} failed in phase {fault.phase}{at}: {fault.text}"


def agree(
    board: BoardClient,
    scope: str,
    rank: int,
    ranks: Sequence[int],
    error: str | None,
    deadline: Deadline,
    *,
    name: Callable[[int], str] = rank_name,
) -> None:
    """Return on every rank if no rank has an error; raise the same error on every rank otherwise.

    Raises:
        PeerError: lists every rank's error.
        DeadlineExceeded: names the ranks that said nothing.
    """
    answers = gather(board, scope, rank, ranks, (error or "").encode(), deadline, name=name)
    faults = [f"{name(peer)}: {raw.decode()}" for peer, raw in sorted(answers.items()) if raw]
    if faults:
        raise PeerError(f"phase {scope.rsplit('/', 1)[-1]} failed", faults)
