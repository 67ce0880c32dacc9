"""The board's state: values, waits, and which requests were already carried out.

A plain object, driven by one thread; time is an argument. Not here: sockets and keys
(`server.py`).
"""

import heapq
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from reshard.board.messages import (
    Add,
    DeletePrefix,
    Leave,
    Ping,
    Put,
    PutFirst,
    Reply,
    Request,
    Wait,
)
from reshard.errors import WireError
from reshard.wire import MAX_MESSAGE_BYTES


@dataclass(frozen=True, slots=True)
class BoardLimits:
    """What one board accepts at most.

    Attributes:
        message_bytes: one message, either way.
        total_bytes: all keys and values together.
        keys: number of keys.
        key_length: characters of one key.
        waits: waits that are open at one time.
        clients: clients that are remembered; the one silent for longest is forgotten first.
    """

    message_bytes: int = MAX_MESSAGE_BYTES
    total_bytes: int = 4 * 2**30
    keys: int = 1_000_000
    key_length: int = 1024
    waits: int = 65_536
    clients: int = 16_384


Delivery = tuple[bytes, Reply]
"""Client, and what to tell it."""

_Ticket = tuple[bytes, int]
"""Client and request number: one open wait."""


@dataclass(slots=True)
class _Entry:
    value: bytes
    put_at: float


@dataclass(slots=True)
class _Client:
    """Invariant: `done` holds the replies to mutations numbered above `settled`."""

    settled: int = 0
    done: dict[int, Reply] = field(default_factory=dict)
    waits: set[int] = field(default_factory=set)


@dataclass(slots=True)
class _OpenWait:
    wait: Wait
    missing: set[str]


class Blackboard:
    """Keys and values, with waits that are answered when their keys appear."""

    def __init__(self, limits: BoardLimits) -> None:
        self._limits = limits
        self._entries: dict[str, _Entry] = {}
        self._bytes = 0
        self._clients: OrderedDict[bytes, _Client] = OrderedDict()
        self._waits: dict[_Ticket, _OpenWait] = {}
        self._waiters: dict[str, set[_Ticket]] = {}
        self._expiries: list[tuple[float, _Ticket]] = []

    @property
    def clients(self) -> tuple[bytes, ...]:
        """The clients that are known."""
        return tuple(self._clients)

    @property
    def open_waits(self) -> int:
        """Number of waits that have no answer yet."""
        return len(self._waits)

    @property
    def total_bytes(self) -> int:
        """Bytes of all keys and values."""
        return self._bytes

    def handle(self, client: bytes, request: Request, now: float) -> list[Delivery]:
        """Carry out one request once, however often it comes; the answers that are now due."""
        record = self._remember(client, request)
        if request.number in record.done:
            return [(client, record.done[request.number])]
        if request.number <= record.settled:
            return []
        try:
            return self._carry_out(client, record, request, now)
        except WireError as error:
            return [(client, Reply(request.number, error=str(error)))]

    def expire(self, now: float) -> list[Delivery]:
        """Answers to the waits whose time is over: what is there."""
        due: list[Delivery] = []
        while self._expiries and self._expiries[0][0] <= now:
            at, ticket = heapq.heappop(self._expiries)
            if ticket in self._waits and self._waits[ticket].wait.seconds <= at:
                due.append((ticket[0], self._answer(ticket, now)))
        return due

    def next_expiry(self) -> float | None:
        """When `expire` has something to do next."""
        while self._expiries and self._expiries[0][1] not in self._waits:
            heapq.heappop(self._expiries)
        return self._expiries[0][0] if self._expiries else None
