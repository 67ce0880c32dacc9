"""What clients ask of the board and what it answers: the frames of the control channel.

Decoding validates types; sizes and counts are the blackboard's business. Not here: sockets,
keys, what the values mean (`reshard.session`).
"""

import msgspec


class Put(msgspec.Struct, frozen=True, tag="put"):
    """Set a key, replacing what it held."""

    key: str
    value: bytes


class PutFirst(msgspec.Struct, frozen=True, tag="put_first"):
    """Set a key if it is absent; the answer holds the winner."""

    key: str
    value: bytes


class Add(msgspec.Struct, frozen=True, tag="add"):
    """Add to a decimal counter (absent: 0); the answer holds the sum."""

    key: str
    amount: int


class DeletePrefix(msgspec.Struct, frozen=True, tag="delete_prefix"):
    """Remove every key that starts so."""

    prefix: str


class Wait(msgspec.Struct, frozen=True, tag="wait"):
    """Answer when keys are there, or at the end of the time with what is there.

    Attributes:
        keys: which; every one of them, or any one.
        every: whether all must be there.
        unless: a key whose appearance ends the wait at once; empty: none.
        seconds: how long; 0 asks what is there now.
    """

    keys: tuple[str, ...]
    every: bool
    unless: str
    seconds: float


class Forget(msgspec.Struct, frozen=True, tag="forget"):
    """Nobody waits any more for the answer to this wait. Not answered itself."""

    number: int


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """Is anyone there?"""


class Leave(msgspec.Struct, frozen=True, tag="leave"):
    """The client goes; the board forgets it. Not answered."""


Operation = Put | PutFirst | Add | DeletePrefix | Wait | Forget | Ping | Leave


class Request(msgspec.Struct, frozen=True):
    """One operation of one client.

    A client sends a request again after its connection was cut, so the board may see it twice; it
    acts once.

    Attributes:
        number: counts up from 1 within a client.
        settled: every request up to this number has its answer; its record may be forgotten.
        operation: what to do.
    """

    number: int
    settled: int
    operation: Operation


class Reply(msgspec.Struct, frozen=True, omit_defaults=True):
    """The answer to one request.

    Attributes:
        number: of the request; 0 if the board itself speaks (it closes).
        values: of the keys that were asked for and are there.
        ages: seconds since each of them was put, on the board's clock.
        error: why it was refused, or empty.
    """

    number: int
    values: dict[str, bytes] = {}
    ages: dict[str, float] = {}
    error: str = ""
