"""Random worlds of uneven layouts, INDEX-CODED, from a seed: the same in every process.

Every element has a value of its own; destinations are checked against it with plain slices, by no
code of the package.
"""

import itertools
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from reshard.dtypes import DType
from reshard.ids import FQN, GroupRank
from reshard.layout.holding import RankLayout, TensorLayout
from reshard.layout.region import Region
from reshard.plan import Move, TransferPlan, make_plan

SENTINEL = 77

_SHAPES = [(), (1,), (7,), (0, 5), (13, 6), (8, 8), (5, 3, 4), (64, 33), (2, 1, 9, 3), (257,)]
_DTYPES: list[tuple[DType, DType]] = [
    ("float32", "float32"),
    ("float32", "float32"),
    ("float32", "bfloat16"),
    ("bfloat16", "bfloat16"),
    ("bfloat16", "float32"),
    ("int64", "int64"),
    ("int32", "int32"),
    ("bool", "bool"),
    ("uint8", "uint8"),
    ("float8_e4m3fn", "float8_e4m3fn"),
]


@dataclass(frozen=True)
class Tensor:
    """One tensor of a world, with who holds and who needs which boxes."""

    name: str
    number: int
    shape: tuple[int, ...]
    source: DType
    wire: DType
    held: dict[int, list[Region]]
    needed: dict[int, list[Region]]

    def coded(self) -> torch.Tensor:
        """The whole tensor in its source dtype; fp32 and integers hold unique codes."""
        count = torch.Size(self.shape).numel()
        codes = torch.arange(count, dtype=torch.int64) + 1 + 10_000 * self.number
        if self.source == "bool":
            codes = (codes * 2654435761 >> 7) & 1
        elif self.source in ("uint8", "float8_e4m3fn"):
            codes = codes * 37 % 251
        if self.source == "float8_e4m3fn":
            whole = (codes % 120).to(torch.uint8).view(torch.float8_e4m3fn)
        else:
            whole = codes.to(getattr(torch, self.source))
        return whole.reshape(self.shape)


@dataclass(frozen=True)
class World:
    """Tensors over `trainers` source ranks and `engines` destination ranks."""

    trainers: int
    engines: int
    tensors: list[Tensor]

    def plan(self) -> TransferPlan:
        def layout(rank: int, side: str) -> RankLayout:
            entries = []
            for tensor in self.tensors:
                boxes = (tensor.held if side == "source" else tensor.needed).get(rank, [])
                dtype = tensor.source if side == "source" else tensor.wire
                entries.append(TensorLayout(FQN(tensor.name), tensor.shape, dtype, tuple(boxes)))
            return RankLayout(GroupRank(rank), tuple(entries))

        total = self.trainers + self.engines
        return make_plan(
            [layout(rank, "source") for rank in range(self.trainers)],
            [layout(rank, "destination") for rank in range(self.trainers, total)],
        )


def random_world(seed: int, trainers: int, engines: int, tensors: int = 12) -> World:
    draw = random.Random(seed)
    made = []
    for number in range(tensors):
        shape = draw.choice(_SHAPES)
        source, wire = draw.choice(_DTYPES)
        held = _spread(draw, shape, list(range(trainers)))
        needed = _spread(draw, shape, list(range(trainers, trainers + engines)))
        made.append(Tensor(f"t{number}", number, shape, source, wire, held, needed))
    return World(trainers, engines, made)


def _spread(
    draw: random.Random, shape: tuple[int, ...], ranks: list[int]
) -> dict[int, list[Region]]:
    """Cut a tensor at random places into boxes, and give each to one rank or to several."""
    cuts = []
    for extent in shape:
        inner = draw.sample(range(1, extent), min(extent - 1, draw.randint(0, 2))) if extent else []
        cuts.append(list(itertools.pairwise([0, *sorted(inner), extent])))
    spread: dict[int, list[Region]] = defaultdict(list)
    for box in itertools.product(*cuts):
        region = Region(tuple(low for low, _ in box), tuple(high - low for low, high in box))
        owners = ranks if draw.random() < 0.2 else [draw.choice(ranks)]
        for rank in owners:
            if region.volume:
                spread[rank].append(region)
    return {rank: sorted(boxes) for rank, boxes in spread.items()}


Store = dict[str, list[tuple[Region, torch.Tensor]]]


def _slices(region: Region) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(region.offset, region.shape, strict=True))


def _room(draw: random.Random, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A view of `shape` in some storage: contiguous, transposed, or inside a larger tensor."""
    form = draw.choice(["contiguous", "transposed", "inside"])
    fill = torch.tensor(SENTINEL).to(dtype)
    if form == "transposed":
        return (
            fill.expand(tuple(reversed(shape))).clone().permute(tuple(reversed(range(len(shape)))))
        )
    if form == "inside":
        large = fill.expand(tuple(n + 2 for n in shape)).clone()
        return large[tuple(slice(1, n + 1) for n in shape)]
    return fill.expand(tuple(shape)).clone()


def sources(world: World, rank: int, seed: int) -> Store:
    """What a trainer rank holds."""
    draw = random.Random(seed * 1000 + rank)
    store: Store = {}
    for tensor in world.tensors:
        whole, pieces = tensor.coded(), []
        for region in tensor.held.get(rank, []):
            view = _room(draw, region.shape, whole.dtype)
            _bits(view).copy_(_bits(whole)[_slices(region)])
            pieces.append((region, view))
        store[tensor.name] = pieces
    return store


def destinations(world: World, rank: int, seed: int) -> Store:
    """Where an engine rank puts what it receives; some in another dtype than the wire's."""
    draw = random.Random(seed * 1000 + rank)
    store: Store = {}
    for tensor in world.tensors:
        dtype = getattr(torch, tensor.wire)
        if tensor.wire == "bfloat16" and draw.random() < 0.3:
            dtype = torch.float32
        pieces = []
        for region in tensor.needed.get(rank, []):
            for _ in range(draw.choice([1, 1, 2])):
                pieces.append((region, _room(draw, region.shape, dtype)))
        store[tensor.name] = pieces
    return store


def locate(store: Store) -> Callable[[Move], list[tuple[Region, torch.Tensor]]]:
    """The local places of a move, by plain slicing."""

    def places(move: Move) -> list[tuple[Region, torch.Tensor]]:
        found = []
        for region, view in store[move.name]:
            low = [max(a, b) for a, b in zip(region.offset, move.region.offset, strict=True)]
            high = [min(a, b) for a, b in zip(region.end, move.region.end, strict=True)]
            if all(a < b for a, b in zip(low, high, strict=True)):
                index = tuple(
                    slice(a - o, b - o) for a, b, o in zip(low, high, region.offset, strict=True)
                )
                shape = tuple(b - a for a, b in zip(low, high, strict=True))
                found.append((Region(tuple(low), shape), view[index]))
        return found

    return places


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


def mismatches(world: World, rank: int, store: Store) -> list[str]:
    """Every destination view that does not hold its codes."""
    wrong = []
    for tensor in world.tensors:
        expected = tensor.coded().to(getattr(torch, tensor.wire))
        for region, view in store[tensor.name]:
            right = expected[_slices(region)].to(view.dtype)
            if not torch.equal(_bits(view), _bits(right)):
                wrong.append(f"rank {rank}: {tensor.name} {tensor.source}>{tensor.wire} {region}")
            if _touched_outside(view):
                wrong.append(f"rank {rank}: {tensor.name} wrote beside {region}")
    return wrong


def _touched_outside(view: torch.Tensor) -> bool:
    """Whether the storage around a view has changed."""
    storage = torch.empty(0, dtype=view.dtype).set_(view.untyped_storage())
    guard = torch.zeros(storage.numel(), dtype=torch.bool)
    guard.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(True)
    fill = torch.tensor(SENTINEL).to(view.dtype)
    return not torch.equal(_bits(storage)[~guard], _bits(fill.expand(int((~guard).sum())).clone()))
