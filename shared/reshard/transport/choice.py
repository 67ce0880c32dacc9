"""Which transport carries which pair of ranks, and the exchanges that follow from it."""

from collections.abc import Sequence

from reshard.board import Deadline
from reshard.errors import ReshardError
from reshard.ids import GroupRank
from reshard.plan import RankPlan
from reshard.session import Share, Transport
from reshard.transport.bounds import IN_FLIGHT, UNBOUNDED, Bound
from reshard.transport.exchange import Exchange
from reshard.transport.group import RefitGroup
from reshard.transport.places import Locate
from reshard.transport.report import ExchangeReport, merge
from reshard.transport.shm import ShmExchange


class MixedExchange:
    """Shared memory with the ranks of this host, the group with all others."""

    def __init__(self, near: ShmExchange | None, far: Exchange | None) -> None:
        """Combine two exchanges of one rank; None where a kind has no pairs."""
        self._near = near
        self._far = far

    @property
    def snapshots(self) -> bool:
        """Whether the weights may change once `stage` has returned."""
        return self._far is None and (self._near is None or self._near.snapshots)

    def run(self, deadline: Deadline, attempt: int) -> ExchangeReport:
        """Make all transfers of one refit: `stage`, then `complete`.

        Args:
            deadline: for all of it.
            attempt: number of the refit within its session; never twice the same.

        Raises:
            PeerError: another rank failed, or did not take part in time.
            ReshardError: this rank failed; the others are told.
        """
        self.stage(deadline, attempt)
        return self.complete(deadline, attempt)

    def stage(self, deadline: Deadline, attempt: int) -> None:
        """Show this rank's present values to the readers of this host."""
        if self._near is not None:
            self._near.stage(deadline, attempt)

    def complete(self, deadline: Deadline, attempt: int) -> ExchangeReport:
        """All the rest; from now on the weights may change in any case."""
        reports = []
        try:
            if self._near is not None:
                self._near.receive(deadline, attempt)
            if self._far is not None:
                reports.append(self._far.run(deadline, attempt))
            if self._near is not None:
                reports.append(self._near.finish(deadline, attempt))
        except BaseException:
            if self._near is not None:
                self._near.retire()
            raise
        return merge(reports)

    def close(self) -> None:
        """Give up the shared memory."""
        if self._near is not None:
            self._near.close()


def open_exchange(
    group: RefitGroup,
    rank_plan: RankPlan,
    read: Locate,
    write: Locate,
    bucket_bytes: int,
    *,
    transport: Transport,
    hosts: Sequence[str],
    share: Share = "snapshot",
    bound: Bound = UNBOUNDED,
    in_flight: int = IN_FLIGHT,
) -> MixedExchange:
    """The exchanges of one rank for a transport.

    Args:
        group: the session's.
        rank_plan: this rank's part.
        read: where this rank holds the elements of a move.
        write: where it puts them; all places of an element.
        bucket_bytes: largest message, in bytes; the same on all ranks.
        transport: `auto` takes shared memory for CPU ranks of one host and the group for all
            others; GPUs always use NCCL. The same on all ranks.
        hosts: by group rank: identity of the machine (`reshard.hosts`).
        share: of shared memory: a snapshot, or the live weights.
        bound: on extra memory. Where a sender's snapshot would not fit, `auto` takes the group.
        in_flight: messages under way at one time, each way; the same on all ranks.

    Raises:
        ReshardError: the transport cannot carry these pairs.
    """
    if transport in ("gloo", "nccl") and transport != group.backend:
        raise ReshardError(
            f"transport={transport!r} for tensors on {group.device}: that group is "
            f"{group.backend}; choose {group.backend!r} or 'auto'"
        )
    peers = {int(peer) for peer in (*rank_plan.sends, *rank_plan.receives)}
    near = set() if transport in ("gloo", "nccl") else _near(rank_plan, peers, hosts)
    if transport == "auto":
        own = int(rank_plan.rank)
        receivers = {int(peer) for peer in rank_plan.sends}
        near = {
            peer
            for peer in near
            if group.backend != "nccl"
            and bound.allows_showing(own if peer in receivers else peer, share)
        }
    elif near:
        _check_bound(group, rank_plan, bound, share)
    if transport == "shm" and near != peers:
        raise ReshardError(
            'transport="shm" needs all ranks on one host, in one process namespace',
            (
                f"{group.name(peer)} is on {hosts[peer]}, {group.name(rank_plan.rank)} on "
                f"{hosts[rank_plan.rank]}"
                for peer in sorted(peers - near)
            ),
        )
    far = peers - near
    shared = (
        ShmExchange(group, _only(rank_plan, near, local=not far), read, write, share=share)
        if near
        else None
    )
    grouped = (
        Exchange(
            group,
            _only(rank_plan, far, local=True),
            read,
            write,
            bound.bucket_bytes(bucket_bytes, group.backend),
            in_flight=in_flight,
        )
        if far or not near
        else None
    )
    return MixedExchange(shared, grouped)


def _check_bound(group: RefitGroup, rank_plan: RankPlan, bound: Bound, share: Share) -> None:
    """Refuse shared memory that the bound does not allow."""
    senders = {*map(int, rank_plan.receives), *([int(rank_plan.rank)] if rank_plan.sends else [])}
    faults = [
        f"{group.name(sender)} shows {bound.sent_bytes.get(GroupRank(sender), 0)} bytes"
        for sender in sorted(senders)
        if not bound.allows_showing(sender, share)
    ]
    if faults:
        raise ReshardError(
            f'transport="shm" with share={share!r} takes more than the {bound.nbytes} bytes of '
            'buffer_bytes; choose share="live", transport="auto", or a larger bound',
            faults,
        )


def _near(rank_plan: RankPlan, peers: set[int], hosts: Sequence[str]) -> set[int]:
    own = hosts[rank_plan.rank]
    return {peer for peer in peers if hosts[peer] == own}


def _only(rank_plan: RankPlan, peers: set[int], *, local: bool) -> RankPlan:
    """The part of a plan that concerns some peers."""
    return RankPlan(
        GroupRank(rank_plan.rank),
        {peer: moves for peer, moves in rank_plan.sends.items() if int(peer) in peers},
        {peer: moves for peer, moves in rank_plan.receives.items() if int(peer) in peers},
        rank_plan.local if local else (),
    )
