"""Copies between local views, and buckets as bytes, against plain slices."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reshard.dtypes import DType
from reshard.errors import ReshardError
from reshard.ids import FQN
from reshard.layout.region import Region
from reshard.plan import Move, split_into_buckets
from reshard.transport.packing import emptying, filling, in_place
from reshard.transport.places import CopyList, checked, copy_between, part
from reshard.transport.staging import Staging


def move(region: Region, source: DType = "float32", wire: DType = "float32") -> Move:
    return Move(FQN("t"), region, source, wire)


def whole(*shape: int) -> Region:
    return Region((0,) * len(shape), shape)


def test_a_part_is_the_slice() -> None:
    view = torch.arange(24).view(4, 6)
    inner = part(view, Region((10, 20), (4, 6)), Region((11, 22), (2, 3)))
    assert inner.tolist() == [[8, 9, 10], [14, 15, 16]]
    scalar = torch.tensor(5)
    assert part(scalar, whole(), whole()).item() == 5


@pytest.mark.parametrize(
    ("source", "wire", "destination"),
    [
        (torch.float32, torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.bfloat16, torch.float32),
        (torch.float32, torch.float16, torch.bfloat16),
        (torch.bfloat16, torch.bfloat16, torch.float32),
        (torch.float64, torch.float32, torch.float32),
    ],
)
def test_a_copy_rounds_as_if_it_travelled(
    source: torch.dtype, wire: torch.dtype, destination: torch.dtype
) -> None:
    values = torch.randn(100, generator=torch.Generator().manual_seed(0)).to(source)
    target = torch.zeros(100, dtype=destination)
    copies = CopyList()
    copies.add(target, values, wire)
    copies.run()
    assert torch.equal(target, values.to(wire).to(destination))


def test_the_rounding_oracle_can_fail() -> None:
    values = torch.tensor([1.001])
    assert not torch.equal(values, values.to(torch.bfloat16).to(torch.float32))


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.float8_e8m0fnu,
        torch.float4_e2m1fn_x2,
        torch.bool,
        torch.uint16,
        torch.uint64,
        torch.complex64,
        torch.bfloat16,
    ],
)
def test_equal_dtypes_are_copied_bit_by_bit(dtype: torch.dtype) -> None:
    """Also where no copy kernel exists, and where the bits are no number."""
    raw = torch.arange(0, 64 * 8, dtype=torch.int64).remainder(2 if dtype == torch.bool else 251)
    source = raw.to(torch.uint8)[: 64 * dtype.itemsize].clone().view(dtype).view(8, 8).t()
    target = torch.zeros(64 * dtype.itemsize, dtype=torch.uint8).view(dtype).view(8, 8)
    copies = CopyList()
    copies.add(target, source, dtype)
    copies.run()
    bits = {1: torch.uint8, 2: torch.int16, 8: torch.int64}[dtype.itemsize]
    assert torch.equal(target.view(bits), source.view(bits))


def test_copies_leave_no_graph_behind() -> None:
    """A parameter that is packed again and again must not grow a chain of operations."""
    parameter = torch.nn.Parameter(torch.ones(4))
    buffer = torch.zeros(4)
    copies = CopyList()
    copies.add(buffer, parameter, torch.float32)
    for _ in range(3):
        copies.run()
    assert not buffer.requires_grad
    assert buffer.grad_fn is None
    into = CopyList()
    into.add(parameter, buffer * 3, torch.float32)
    into.run()
    assert parameter.tolist() == [3.0] * 4
    assert parameter.is_leaf


def test_the_temporary_of_a_rounded_copy_is_counted() -> None:
    copies = CopyList()
    copies.add(torch.zeros(10), torch.ones(10), torch.bfloat16)
    copies.add(torch.zeros(99), torch.ones(99), torch.float32)
    assert (copies.temporary_bytes, copies.nbytes, len(copies)) == (20, 436, 2)


def test_local_copies_meet_where_the_regions_do() -> None:
    full = torch.arange(48, dtype=torch.float32).view(6, 8)
    sources = [(Region((0, 0), (3, 8)), full[:3]), (Region((3, 0), (3, 8)), full[3:])]
    targets = [
        (Region((1, 2), (4, 3)), torch.zeros(4, 3)),
        (Region((1, 2), (4, 3)), torch.zeros(3, 4).t()),
    ]
    copies = CopyList()
    copy_between(copies, sources, targets, move(Region((1, 2), (4, 3))))
    copies.run()
    for _, view in targets:
        assert torch.equal(view, full[1:5, 2:5])


def test_a_hole_in_the_sources_is_an_error() -> None:
    sources = [(Region((0,), (3,)), torch.zeros(3))]
    with pytest.raises(ReshardError, match=r"t: 2 elements of .* have no source"):
        copy_between(CopyList(), sources, [(whole(5), torch.zeros(5))], move(whole(5)))


@pytest.mark.parametrize(
    ("places", "text"),
    [
        ([(Region((0,), (3,)), torch.zeros(3))], "hold 3 of the 5 elements"),
        ([(whole(5), torch.zeros(4))], r"view of shape \(4,\) for region"),
        ([(Region((1,), (5,)), torch.zeros(5))], r"source region .* is not in"),
    ],
)
def test_wrong_places_are_refused(places: list[tuple[Region, torch.Tensor]], text: str) -> None:
    with pytest.raises(ReshardError, match=text):
        checked(places, move(whole(5)), "source")


MIXED: list[tuple[DType, DType, tuple[int, ...]]] = [
    ("bool", "bool", (3,)),
    ("float32", "float32", (2, 3)),
    ("uint8", "uint8", (5,)),
    ("float32", "bfloat16", (7,)),
    ("int64", "int64", ()),
    ("complex64", "complex64", (2,)),
]


@given(st.permutations(MIXED), st.sampled_from([16, 24, 64, 4096]))
def test_what_is_packed_is_unpacked(
    tensors: list[tuple[DType, DType, tuple[int, ...]]], bucket_bytes: int
) -> None:
    """Mixed dtypes share buckets; every element comes out where it belongs."""
    moves, full, target = [], {}, {}
    for k, (source, wire, shape) in enumerate(tensors):
        name = FQN(f"t{k}")
        moves.append(Move(name, whole(*shape), source, wire))
        codes = torch.from_numpy(np.arange(1, 1 + np.prod(shape, dtype=int))).view(shape)
        full[name] = codes.to(getattr(torch, source))
        target[name] = torch.zeros(shape, dtype=getattr(torch, wire))

    def read(m: Move) -> list[tuple[Region, torch.Tensor]]:
        return [(m.region, part(full[m.name], whole(*full[m.name].shape), m.region))]

    def write(m: Move) -> list[tuple[Region, torch.Tensor]]:
        return [(m.region, part(target[m.name], whole(*target[m.name].shape), m.region))]

    for bucket in split_into_buckets(moves, bucket_bytes):
        message = torch.full((bucket.nbytes,), 99, dtype=torch.uint8)
        filling(bucket, message, read).run()
        emptying(bucket, message, write).run()
    for name, tensor in target.items():
        assert torch.equal(tensor, full[name].to(tensor.dtype))


def test_one_stretch_of_memory_is_its_own_message() -> None:
    memory = torch.arange(100, dtype=torch.float32)
    views = {"a": memory[10:16].view(2, 3), "b": memory[16:20], "c": memory[21:25]}

    def locate(m: Move) -> list[tuple[Region, torch.Tensor]]:
        return [(m.region, views[m.name])]

    def message(*names: str) -> torch.Tensor | None:
        moves = [Move(FQN(n), whole(*views[n].shape), "float32", "float32") for n in names]
        (bucket,) = split_into_buckets(moves, 10_000)
        return in_place(bucket, locate)

    together = message("a", "b")
    assert together is not None
    assert together.view(torch.float32).tolist() == list(range(10, 20))
    assert together.data_ptr() == views["a"].data_ptr()
    assert message("a", "c") is None
    assert message("b", "a") is None
    views["a"] = memory[10:16].view(3, 2).t()
    assert message("a") is None
    views["a"] = memory[10:16].view(2, 3).to(torch.bfloat16)
    assert message("a") is None


def test_padding_is_never_received_into_the_weights() -> None:
    storage = torch.zeros(16, dtype=torch.uint8)
    views = {"a": storage[:1].view(torch.bool), "b": storage[4:8].view(torch.float32)}
    moves = [
        Move(FQN("a"), whole(1), "bool", "bool"),
        Move(FQN("b"), whole(1), "float32", "float32"),
    ]
    (bucket,) = split_into_buckets(moves, 100)
    assert bucket.nbytes == 8
    assert in_place(bucket, lambda m: [(m.region, views[m.name])]) is None


def test_staging_is_made_once() -> None:
    staging = Staging(torch.device("cpu"))
    first = staging.take("sending", 0, 100)
    assert staging.take("sending", 0, 60).data_ptr() == first.data_ptr()
    assert staging.take("sending", 1, 60).data_ptr() != first.data_ptr()
    assert staging.held_bytes == 160
    assert staging.take("sending", 0, 200).numel() == 200
    assert staging.held_bytes == 260
