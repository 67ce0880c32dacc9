"""`make fuzz`: messages of every kind, near to valid ones and far from them, into every decoder.

A decoder answers with a value of its type or with its own error, whatever it is given; what it
accepts is stable: encoded and decoded again it is the same bytes.
"""

import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click
import msgspec
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from msgspec import inspect as types
from rich.console import Console

from reshard.board.messages import Reply, Request
from reshard.errors import ReshardError, WireError
from reshard.joining import Layouts, World
from reshard.session import (
    CommitInfo,
    ConnectInfo,
    EngineHello,
    Fault,
    LayoutReport,
    RankResult,
    ReceiveInfo,
    TensorSpec,
)
from reshard.store.manifest import ShardRecord, StoredVersion
from reshard.transport.exchange import Greeting
from reshard.transport.exhibits import Manifest
from reshard.transport.group import Member
from reshard.transport.shm import Announcement
from reshard.transport.watch import Stall
from reshard.wire import decode
from reshard_trainer.census import CensusVerdict, SourceReport
from reshard_trainer.rollouts.desk_messages import DeskReply, DeskRequest
from reshard_trainer.startup import Welcome
from reshard_trainer.verdicts import Verdict

WIRE: tuple[Any, ...] = (
    Request,
    Reply,
    ConnectInfo,
    ReceiveInfo,
    CommitInfo,
    EngineHello,
    LayoutReport,
    RankResult,
    Fault,
    tuple[TensorSpec, ...],
    World,
    Layouts,
    Greeting,
    Manifest,
    Member,
    Announcement,
    Stall,
    SourceReport,
    CensusVerdict,
    Verdict,
    Welcome,
    DeskRequest,
    DeskReply,
)
"""Decoded from MessagePack by `reshard.wire`."""

CONTROL: tuple[Any, ...] = (ConnectInfo, ReceiveInfo, CommitInfo)
"""Converted from the JSON of vLLM's routes; the receiver catches all that conversion raises."""

STORED: tuple[Any, ...] = (StoredVersion, ShardRecord)
"""Decoded from JSON files of a store."""

_JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4)
    ),
    max_leaves=8,
)


def near(kind: types.Type) -> st.SearchStrategy[Any]:
    """Plain values that are nearly a type: of the right form, with any content."""
    match kind:
        case types.StructType(cls=cls, fields=fields) | types.DataclassType(cls=cls, fields=fields):
            members = {f.encode_name: near(f.type) for f in fields}
            required = {f.encode_name for f in fields if f.required}
            tag = getattr(kind, "tag", None)
            fixed: dict[str, Any] = (
                {str(getattr(kind, "tag_field", "type")): st.just(tag)} if tag is not None else {}
            )
            return st.fixed_dictionaries(
                {**fixed, **{n: m for n, m in members.items() if n in required}},
                optional={n: m for n, m in members.items() if n not in required},
            )
        case types.VarTupleType(item_type=item) | types.ListType(item_type=item):
            return st.lists(near(item), max_size=3)
        case types.SetType(item_type=item) | types.FrozenSetType(item_type=item):
            return st.lists(near(item), max_size=3)
        case types.TupleType(item_types=items):
            return st.tuples(*map(near, items))
        case types.DictType(key_type=key, value_type=value):
            return st.dictionaries(near(key), near(value), max_size=3)
        case types.UnionType(types=options):
            return st.one_of(*map(near, options))
        case types.LiteralType(values=values):
            return st.sampled_from(values)
        case types.EnumType(cls=cls):
            return st.sampled_from([member.value for member in cls])
        case types.IntType():
            return st.integers(-2, 9) | st.integers(-(2**63), 2**64 - 1)
        case types.StrType():
            return st.sampled_from(["", "float32", "a", "engine/e1"]) | st.text(max_size=6)
        case types.FloatType():
            return st.floats()
        case types.BoolType():
            return st.booleans()
        case types.BytesType() | types.ByteArrayType():
            return st.binary(max_size=9)
        case types.NoneType():
            return st.none()
        case types.CustomType() | types.AnyType():
            return _JUNK
    return _JUNK


@st.composite
def frames(draw: st.DrawFn, plain: st.SearchStrategy[Any], encode: Callable[[Any], bytes]) -> bytes:
    """Bytes as they may arrive: a near message, whole, cut, longer, a byte changed; or junk."""
    way = draw(st.integers(0, 9))
    if way == 0:
        return draw(st.binary(max_size=64))
    raw = encode(draw(_JUNK if way == 1 else plain))
    if way < 6:
        return raw
    at = draw(st.integers(0, max(0, len(raw) - 1)))
    if way == 6:
        return raw[:at]
    if way == 7:
        return raw + draw(st.binary(min_size=1, max_size=8))
    return raw[:at] + bytes([draw(st.integers(0, 255))]) + raw[at + 1 :]


def _json(value: Any) -> bytes:
    try:
        return msgspec.json.encode(value)
    except (TypeError, ValueError, msgspec.MsgspecError):
        return b"null"


class Fuzz:
    """Counts what was tried and what was accepted, by type."""

    def __init__(self) -> None:
        self.tried: Counter[str] = Counter()
        self.accepted: Counter[str] = Counter()

    def wire(self, kind: Any, raw: bytes) -> None:
        """One frame into the wire decoder."""
        name = getattr(kind, "__name__", str(kind))
        self.tried[name] += 1
        try:
            message = decode(raw, kind)
        except WireError as error:
            if "malformed" not in str(error):
                raise
            return
        self.accepted[name] += 1
        once = msgspec.msgpack.encode(message)
        assert msgspec.msgpack.encode(decode(once, kind)) == once

    def control(self, kind: Any, plain: Any) -> None:
        """One JSON value into a control message."""
        name = f"{kind.__name__} (JSON)"
        self.tried[name] += 1
        try:
            msgspec.convert(plain, kind)
        except (msgspec.ValidationError, ValueError):
            return
        self.accepted[name] += 1

    def stored(self, kind: Any, raw: bytes) -> None:
        """One file into the store's decoder."""
        name = f"{kind.__name__} (JSON)"
        self.tried[name] += 1
        try:
            msgspec.json.decode(raw, type=kind)
        except (msgspec.DecodeError, ReshardError):
            return
        self.accepted[name] += 1


def fuzz(inputs: int, number: int = 20261201) -> Fuzz:
    """Try so many inputs, spread evenly over all decoders."""
    counts = Fuzz()
    each = -(-inputs // (len(WIRE) + len(CONTROL) + len(STORED)))
    for kind in WIRE:
        plain = near(types.type_info(kind))
        _try(
            frames(plain, msgspec.msgpack.encode),
            partial(counts.wire, kind),
            each,
            number,
        )
    for kind in CONTROL:
        plain = near(types.type_info(kind)) | _JUNK
        _try(plain, partial(counts.control, kind), each, number)
    for kind in STORED:
        plain = near(types.type_info(kind))
        _try(frames(plain, _json), partial(counts.stored, kind), each, number)
    return counts


def _try(
    inputs: st.SearchStrategy[Any], check: Callable[[Any], None], examples: int, number: int
) -> None:
    @seed(number)
    @settings(
        max_examples=examples,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(inputs)
    def run(value: Any) -> None:
        check(value)

    run()


@click.command()
@click.option("--inputs", default=100_000, show_default=True)
@click.option("--out", default="build/fuzz.json", type=click.Path(path_type=Path))
def main(inputs: int, out: Path) -> None:
    """Fuzz every decoder of what comes from the network or from a store."""
    start = time.monotonic()
    counts = fuzz(inputs)
    console = Console()
    for name, tried in counts.tried.items():
        console.print(f"{name}: {tried} inputs, {counts.accepted[name]} accepted", highlight=False)
    total = sum(counts.tried.values())
    console.print(
        f"{total} inputs into {len(counts.tried)} decoders in {time.monotonic() - start:.0f} s: "
        f"{sum(counts.accepted.values())} accepted, the rest refused by name; none crashed"
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    figures = {"inputs": total, "tried": counts.tried, "accepted": counts.accepted}
    out.write_text(json.dumps(figures, indent=1) + "\n")
    sys.exit(0)


if __name__ == "__main__":
    main()
