"""The board's state: values, waits, and which requests were already carried out.

A plain object, driven by one thread; time is an argument. Not here: sockets and keys
(`server.py`).
"""

import heapq
import math
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from reshard.board.messages import (
    Add,
    DeletePrefix,
    Forget,
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
    """Invariant: `done` holds the replies to the mutations numbered above `settled`."""

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
        """Carry out one request, once however often it comes; the answers that are now due."""
        record = self._remember(client, request.settled)
        if request.number in record.done:
            return [(client, record.done[request.number])]
        if request.number <= record.settled or request.number in record.waits:
            return []
        try:
            return self._carry_out(client, record, request, now)
        except WireError as error:
            return [(client, Reply(request.number, error=str(error)))]

    def expire(self, now: float) -> list[Delivery]:
        """The answers to waits whose time is over: what is there of their keys."""
        due: list[Delivery] = []
        while self._expiries and self._expiries[0][0] <= now:
            _, ticket = heapq.heappop(self._expiries)
            if ticket in self._waits:
                due.append(self._answer(ticket, now))
        return due

    def next_expiry(self) -> float | None:
        """When `expire` next has something to do."""
        while self._expiries and self._expiries[0][1] not in self._waits:
            heapq.heappop(self._expiries)
        return self._expiries[0][0] if self._expiries else None

    def _remember(self, client: bytes, settled: int) -> _Client:
        record = self._clients.setdefault(client, _Client())
        self._clients.move_to_end(client)
        if settled > record.settled:
            record.settled = settled
            record.done = {n: reply for n, reply in record.done.items() if n > settled}
        if len(self._clients) > self._limits.clients:
            self._forget(next(iter(self._clients)))
        return record

    def _forget(self, client: bytes) -> None:
        record = self._clients.pop(client)
        for number in record.waits:
            self._close_wait((client, number))

    def _carry_out(
        self, client: bytes, record: _Client, request: Request, now: float
    ) -> list[Delivery]:
        operation, number = request.operation, request.number
        reply = Reply(number)
        due: list[Delivery] = []
        match operation:
            case Put(key, value):
                due = self._set(key, value, now)
            case PutFirst(key, value):
                if key not in self._entries:
                    due = self._set(key, value, now)
                reply = Reply(number, values={key: self._entries[key].value})
            case Add(key, amount):
                total = b"%d" % (self._counter(key) + amount)
                due = self._set(key, total, now)
                reply = Reply(number, values={key: total})
            case DeletePrefix(prefix):
                self._delete(prefix)
            case Wait():
                return self._open_wait(client, record, number, operation, now)
            case Forget(forgotten):
                if forgotten in record.waits:
                    record.waits.discard(forgotten)
                    self._close_wait((client, forgotten))
                return []
            case Leave():
                self._forget(client)
                return []
            case Ping():
                return [(client, reply)]
        record.done[number] = reply
        return [(client, reply), *due]

    def _counter(self, key: str) -> int:
        entry = self._entries.get(key)
        if entry is None:
            return 0
        try:
            return int(entry.value)
        except ValueError:
            raise WireError(f"key {key!r} is no counter") from None

    def _set(self, key: str, value: bytes, now: float) -> list[Delivery]:
        self._check_room(key, value)
        held = self._entries.get(key)
        self._bytes += len(value) - (len(held.value) if held else -len(key))
        self._entries[key] = _Entry(value, now)
        due: list[Delivery] = []
        for ticket in self._waiters.pop(key, ()):
            open_wait = self._waits[ticket]
            open_wait.missing.discard(key)
            if self._satisfied(open_wait):
                due.append(self._answer(ticket, now))
        return due

    def _check_room(self, key: str, value: bytes) -> None:
        limits = self._limits
        if not key or len(key) > limits.key_length:
            raise WireError(f"a key of {len(key)} characters; 1 to {limits.key_length} are allowed")
        held = self._entries.get(key)
        if held is None and len(self._entries) >= limits.keys:
            raise WireError(f"the board is full: {limits.keys} keys; no room for {key!r}")
        total = self._bytes + len(value) + len(key) - (len(held.value) if held else 0)
        if total > limits.total_bytes:
            raise WireError(
                f"the board is full: {key!r} of {len(value)} bytes does not fit beside "
                f"{self._bytes} of {limits.total_bytes}"
            )

    def _delete(self, prefix: str) -> None:
        for key in [key for key in self._entries if key.startswith(prefix)]:
            self._bytes -= len(key) + len(self._entries.pop(key).value)
            # A wait that saw the key waits for it again.
        for ticket, open_wait in self._waits.items():
            for key in open_wait.wait.keys:
                if key.startswith(prefix) and key not in open_wait.missing:
                    open_wait.missing.add(key)
                    self._waiters.setdefault(key, set()).add(ticket)

    def _open_wait(
        self, client: bytes, record: _Client, number: int, wait: Wait, now: float
    ) -> list[Delivery]:
        if len(self._waits) >= self._limits.waits:
            raise WireError(f"{self._limits.waits} waits are open on the board; no room for more")
        ticket = (client, number)
        open_wait = _OpenWait(wait, {key for key in wait.keys if key not in self._entries})
        self._waits[ticket] = open_wait
        record.waits.add(number)
        if self._satisfied(open_wait) or not wait.seconds > 0:
            return [self._answer(ticket, now)]
        for key in _watched(wait):
            self._waiters.setdefault(key, set()).add(ticket)
        self._schedule(now + wait.seconds, ticket)
        return []

    def _schedule(self, at: float, ticket: _Ticket) -> None:
        if at == math.inf:
            return
        heapq.heappush(self._expiries, (at, ticket))
        if len(self._expiries) > 2 * len(self._waits) + 64:
            # Most belong to waits that were answered before their time.
            self._expiries = [each for each in self._expiries if each[1] in self._waits]
            heapq.heapify(self._expiries)

    def _satisfied(self, open_wait: _OpenWait) -> bool:
        wait = open_wait.wait
        if wait.unless and wait.unless in self._entries:
            return True
        allowed = 0 if wait.every else max(0, len(set(wait.keys)) - 1)
        return len(open_wait.missing) <= allowed

    def _answer(self, ticket: _Ticket, now: float) -> Delivery:
        """Close a wait with what is there."""
        client, number = ticket
        wait = self._waits[ticket].wait
        self._clients[client].waits.discard(number)
        self._close_wait(ticket)
        found = {key: self._entries[key] for key in _watched(wait) if key in self._entries}
        nbytes = sum(len(key) + len(entry.value) for key, entry in found.items())
        if nbytes > self._limits.message_bytes:
            return client, Reply(
                number,
                error=f"{len(found)} values of {nbytes} bytes in one answer; the limit is "
                f"{self._limits.message_bytes}: ask for fewer at a time",
            )
        values = {key: entry.value for key, entry in found.items()}
        ages = {key: now - entry.put_at for key, entry in found.items()}
        return client, Reply(number, values, ages)

    def _close_wait(self, ticket: _Ticket) -> None:
        for key in _watched(self._waits.pop(ticket).wait):
            waiting = self._waiters.get(key)
            if waiting is not None:
                waiting.discard(ticket)
                if not waiting:
                    del self._waiters[key]


def _watched(wait: Wait) -> Iterable[str]:
    return (*wait.keys, wait.unless) if wait.unless else wait.keys
