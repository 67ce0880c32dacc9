"""Bytes on the control board: typed MessagePack with limits, never pickle.

Every message is a msgspec struct; decoding validates. Not here: what the messages mean
(`reshard.session`), who may send them (`reshard.board`).
"""

from typing import Final, TypeVar

import msgspec

from reshard.errors import ReshardError, WireError

MAX_MESSAGE_BYTES: Final = 256 * 2**20
"""Largest message that is decoded, in bytes."""

T = TypeVar("T")


def encode(message: object) -> bytes:
    """`message` (a struct, dataclass or plain value) as MessagePack."""
    return msgspec.msgpack.encode(message)


def decode(raw: bytes, as_type: type[T], *, limit: int = MAX_MESSAGE_BYTES, sender: str = "") -> T:
    """The message in `raw`, validated as `as_type`.

    Args:
        raw: MessagePack bytes.
        as_type: a struct, dataclass or plain type.
        limit: largest accepted size, in bytes.
        sender: whose message it is, for errors; empty where no single one is to blame.

    Raises:
        WireError: too large, malformed, or not an `as_type`.
    """
    name = getattr(as_type, "__name__", str(as_type)) + (f" from {sender}" if sender else "")
    if len(raw) > limit:
        raise WireError(f"a {name}: {len(raw)} bytes are over the limit of {limit}")
    try:
        return msgspec.msgpack.decode(raw, type=as_type)
    except (msgspec.DecodeError, ValueError, ReshardError) as error:
        # The last two: what values of ours refuse to be, such as a region of two ranks.
        raise WireError(f"malformed {name}: {error}") from error
