"""The private process group of one session: gloo on CPUs, NCCL on GPUs, through the same code.

Registered nowhere: trainer and engine keep their own default groups, which ours neither is nor
touches, bound to a device or not. One group an engine, so engines come and go by themselves. After
a failure a group is finished; the next session opens another under its own scope.
"""

import contextlib
from collections.abc import Sequence
from datetime import timedelta
from typing import Literal, Protocol

import msgspec
import torch

# What torch.distributed re-exports, from where type checkers find it.
from torch._C._distributed_c10d import Backend, ProcessGroup, ProcessGroupGloo, Store

from reshard.agreement import gather, rank_name, session_of
from reshard.board import BoardClient, Deadline
from reshard.board.addresses import interfaces, listening_address, local_address_towards
from reshard.errors import PeerError, ReshardError
from reshard.ids import GroupRank
from reshard.transport.neighbours import Neighbours, Residence
from reshard.transport.rendezvous import BoardStore
from reshard.transport.staging import Staging
from reshard.wire import decode, encode

_ABORT_TAG = 2**31 - 1
_ABORT_WAIT = timedelta(milliseconds=1)
_MAX_MEMBER_BYTES = 2**16


class Work(Protocol):
    """A message on its way."""

    def wait(self, timeout: timedelta = ...) -> bool:
        """Block until it has arrived or left (gloo); make the stream wait for it (NCCL)."""


class Member(msgspec.Struct, frozen=True):
    """How a rank introduces itself to the group.

    Attributes:
        size: number of ranks, as it counts them.
        device: type and, of a GPU, identity.
        torch: its version.
        residence: where it runs.
    """

    size: int
    device: str
    torch: str
    residence: Residence


class RefitGroup:
    """Point-to-point messages between the ranks of a session.

    Attributes:
        rank: this process's group rank.
        size: number of ranks.
        device: where the messages lie.
        board: the run's board.
        session: prefix of the session's keys.
        trainer_size: number of trainer ranks, to name ranks in messages, or None.
        neighbours: the ranks whose processes can be seen from here.
        staging: buffers that the group's exchanges share.
    """

    def __init__(
        self,
        group: ProcessGroup,
        rank: GroupRank,
        size: int,
        device: torch.device,
        board: BoardClient,
        session: str,
        trainer_size: int | None,
        neighbours: Neighbours,
    ) -> None:
        self._group: ProcessGroup | None = group
        self.rank = rank
        self.size = size
        self.device = device
        self.board = board
        self.session = session
        self.trainer_size = trainer_size
        self.neighbours = neighbours
        self.staging = Staging(device)

    def __repr__(self) -> str:
        return f"RefitGroup({self.session!r}, rank {self.rank} of {self.size}, {self.device.type})"

    @property
    def backend(self) -> Literal["gloo", "nccl"]:
        """What moves the bytes."""
        return "nccl" if self.device.type == "cuda" else "gloo"

    @property
    def closed(self) -> bool:
        """Whether this rank has dropped the group."""
        return self._group is None

    def name(self, rank: int) -> str:
        """How messages call a rank."""
        return rank_name(rank, self.trainer_size)

    def send(self, message: torch.Tensor, peer: int, tag: int) -> Work:
        """Start sending a contiguous tensor."""
        return self._open().send([message], peer, tag)

    def receive(self, message: torch.Tensor, peer: int, tag: int) -> Work:
        """Start receiving into a contiguous tensor of exactly the message's size.

        A longer message than that ends the process (gloo), so sizes are agreed on before.
        """
        return self._open().recv([message], peer, tag)

    def batch(
        self,
        sends: Sequence[tuple[torch.Tensor, int]],
        receives: Sequence[tuple[torch.Tensor, int]],
    ) -> list[Work]:
        """Start some sends and receives (tensor, peer) together: one grouped call of NCCL."""
        group = self._open()
        if self.backend == "nccl":
            group._start_coalescing(self.device)
            for message, peer in receives:
                group.recv([message], peer, 0)
            for message, peer in sends:
                group.send([message], peer, 0)
            return [group._end_coalescing(self.device)]
        started: list[Work] = [group.recv([message], peer, 0) for message, peer in receives]
        return started + [group.send([message], peer, 0) for message, peer in sends]

    def abort(self) -> None:
        """Close every connection now: this rank's waits and its peers' end with an error.

        Callable from any thread. Write the fault down first: peers take it for a failure of this
        rank.
        """
        group, self._group = self._group, None
        if group is None:
            return
        if self.backend == "nccl":
            group.abort()
            return
        # gloo has no abort, but a receive that expires closes all pairs. On a pair that is closed
        # already it raises without expiring, so try until one expires.
        for peer in range(self.size):
            if peer == self.rank:
                continue
            with contextlib.suppress(RuntimeError):
                group.recv([torch.empty(1)], peer, _ABORT_TAG).wait(_ABORT_WAIT)

    def close(self) -> None:
        """Drop the group. Harmless when repeated."""
        self._group = None
        self.neighbours.close()

    def _open(self) -> ProcessGroup:
        if self._group is None:
            raise ReshardError(f"the group of {self.session} was closed; open another session")
        return self._group


def open_group(
    board: BoardClient,
    scope: str,
    rank: GroupRank,
    size: int,
    device: torch.device,
    host: str | None,
    deadline: Deadline,
    *,
    trainer_size: int | None = None,
) -> RefitGroup:
    """Meet the other ranks and connect to them.

    Args:
        board: the run's board.
        scope: key prefix of this group, in its session: `<engine>/e<epoch>/group`.
        rank: this process's group rank.
        size: number of ranks.
        device: where the messages will lie; its type picks gloo or NCCL.
        host: the address, host name or interface on which gloo listens; None: the address from
            which this machine reaches the board.
        deadline: for all of it.
        trainer_size: number of trainer ranks, to name ranks in messages.

    Raises:
        PeerError: the session has a fault, the ranks do not fit together, or cannot connect.
        DeadlineExceeded: names the ranks that did not come.
        ReshardError: `host` is no address or interface of this machine.
    """
    session = session_of(scope) or scope
    own = Member(size, _identity(device), str(torch.__version__), Residence.own())
    answers = gather(
        board,
        f"{scope}/open",
        rank,
        range(size),
        encode(own),
        deadline,
        trainer_size=trainer_size,
    )
    members = {
        r: decode(raw, Member, limit=_MAX_MEMBER_BYTES, sender=rank_name(r, trainer_size))
        for r, raw in answers.items()
    }
    _check_members(members, trainer_size)
    neighbours = Neighbours({r: member.residence for r, member in members.items()})
    store = BoardStore(board, f"{scope}/torch", deadline)
    timeout = timedelta(seconds=max(1.0, deadline.remaining()))
    try:
        if device.type == "cuda":
            group = _nccl(store, rank, size, device, timeout)
        else:
            group = _gloo(store, rank, size, _gloo_device(host, board.host), timeout)
    except ReshardError:
        raise
    except (RuntimeError, ValueError) as error:
        raise PeerError(
            f"{rank_name(rank, trainer_size)} could not connect the {device.type} group of "
            f"{session}: {error}"
        ) from error
    return RefitGroup(group, rank, size, device, board, session, trainer_size, neighbours)


def _identity(device: torch.device) -> str:
    if device.type != "cuda":
        return device.type
    return f"cuda:{torch.cuda.get_device_properties(device).uuid}"


def _check_members(members: dict[int, Member], trainer_size: int | None) -> None:
    """All ranks see the same answers, so all fail the same way."""
    faults = []
    first = members[min(members)]
    seen: dict[str, int] = {}
    for rank, member in sorted(members.items()):
        name = rank_name(rank, trainer_size)
        if member.size != len(members):
            faults.append(f"{name} counts {member.size} ranks; {len(members)} are expected")
        if member.device.partition(":")[0] != first.device.partition(":")[0]:
            faults.append(
                f"{name} sends from {member.device}, {rank_name(min(members), trainer_size)} from "
                f"{first.device}: one group is all gloo or all NCCL"
            )
        if ":" in member.device and member.device in seen:
            other = rank_name(seen[member.device], trainer_size)
            faults.append(f"{name} and {other} share GPU {member.device}: NCCL takes one rank each")
        seen[member.device] = rank
        if member.torch.partition("+")[0] != first.torch.partition("+")[0]:
            faults.append(f"{name} runs torch {member.torch}; others {first.torch}")
    if faults:
        raise PeerError("these ranks cannot form one group; nothing was sent", faults)


def _gloo_device(host: str | None, board_host: str) -> ProcessGroupGloo.Device:
    """The listener: always named, as gloo's default is the address of the host name."""
    create = ProcessGroupGloo.create_device
    address = ""
    try:
        if host in interfaces():
            return create(interface=host or "")
        address = listening_address(host) if host else local_address_towards(board_host)
        return create(hostname=address)
    except (RuntimeError, OSError) as error:
        raise ReshardError(
            f"gloo cannot listen on {host or board_host!r} ({address}): {error}; name an address "
            f"of this machine or an interface: {', '.join(interfaces())}"
        ) from error


def _gloo(
    store: Store,
    rank: int,
    size: int,
    listener: ProcessGroupGloo.Device,
    timeout: timedelta,
) -> ProcessGroup:
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [listener]
    options._timeout = timeout
    backend = ProcessGroupGloo(store, rank, size, options)
    return _registered(
        store, rank, size, torch.device("cpu"), ProcessGroup.BackendType.GLOO, backend
    )


def _nccl(
    store: Store, rank: int, size: int, device: torch.device, timeout: timedelta
) -> ProcessGroup:
    """After torch/distributed/_dist2.py. Never ran: this project's machines have no GPU."""
    # Not in the CPU wheel.
    from torch._C._distributed_c10d import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = timeout
    backend = ProcessGroupNCCL(store, rank, size, options)
    backend._set_sequence_number_for_group()
    backend.eager_connect_single_device(device)
    return _registered(store, rank, size, device, ProcessGroup.BackendType.NCCL, backend)


def _registered(
    store: Store,
    rank: int,
    size: int,
    device: torch.device,
    kind: ProcessGroup.BackendType,
    backend: Backend,
) -> ProcessGroup:
    group = ProcessGroup(store, rank, size)
    group._set_default_backend(kind)
    group._register_backend(device, kind, backend)
    return group
