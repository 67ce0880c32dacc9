"""How a trainer or an engine spreads a model over its ranks, from a few degrees of parallelism.

`pp=16,ep=16` or `tp=8,dp=16` in the words that trainers and engines use; the result is a
`SideLayout`. Ranks count tensor parallelism fastest, then fully sharded data parallelism, then
replicas, then pipeline stages. Not here: what the models are (`models`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from math import prod

from reshard.dtypes import DType
from reshard.errors import LayoutError
from reshard.ids import FQN
from reshard.layout.mesh import Mesh
from reshard.layout.placements import Placement, Replicate, Shard, StridedShard
from reshard.layout.sharding import Sharding, chunk
from reshard.layout.side import SideLayout
from reshard.simulation.models import Family, ModelShape, Role

_TP_DIM = {
    Role.EMBEDDING: 0,
    Role.COLUMN: 0,
    Role.QKV: 0,
    Role.GATE_UP: 0,
    Role.EXPERT_GATE_UP: 0,
    Role.ROW: 1,
    Role.EXPERT_DOWN: 1,
}
"""The dim that tensor parallelism cuts; roles that are not here are replicated."""


@dataclass(frozen=True, slots=True)
class Parallelism:
    """Degrees of parallelism of one side.

    Attributes:
        tp: tensor parallelism.
        fsdp: fully sharded data parallelism: every tensor is cut by rows as well.
        dp: replicas (context parallelism included).
        pp: pipeline stages: layers in contiguous runs of `ceil(layers / pp)`.
        ep: expert parallelism, over all ranks of a stage: whole experts, as many a rank group as
            `torch.chunk` gives. 1: experts are cut like other linears.
        etp: tensor parallelism inside an expert, where `ep` is given.
    """

    tp: int = 1
    fsdp: int = 1
    dp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1

    def __post_init__(self) -> None:
        faults = [
            f"{each.name}={getattr(self, each.name)}: at least 1"
            for each in fields(self)
            if getattr(self, each.name) < 1
        ]
        if not faults and self.stage % (self.ep * self.etp):
            faults.append(
                f"ep={self.ep} x etp={self.etp} does not divide the {self.stage} ranks of a stage"
            )
        if faults:
            raise LayoutError(f"no such parallelism: {self}", faults)

    def __str__(self) -> str:
        degrees = [(each.name, getattr(self, each.name)) for each in fields(self)]
        return ",".join(f"{name}={degree}" for name, degree in degrees if degree != 1) or "tp=1"

    @property
    def stage(self) -> int:
        """Ranks of one pipeline stage."""
        return self.tp * self.fsdp * self.dp

    @property
    def ranks(self) -> int:
        """All ranks."""
        return self.stage * self.pp


def parse_parallelism(text: str) -> Parallelism:
    """The parallelism that `text` stands for.

    >>> parse_parallelism("tp=8,dp=16").ranks
    128

    Raises:
        LayoutError: malformed, or degrees that do not fit together.
    """
    known = [each.name for each in fields(Parallelism)]
    degrees: dict[str, int] = {}
    for part in text.split(","):
        name, _, number = part.strip().partition("=")
        if name not in known or name in degrees or not number.isdecimal():
            raise LayoutError(
                f"parallelism {text!r}: {part.strip()!r}: expected each of {', '.join(known)} at "
                "most once, as in tp=8,dp=16"
            )
        degrees[name] = int(number)
    return Parallelism(**degrees)


def spread(model: ModelShape, over: Parallelism, first: int, dtype: DType) -> SideLayout:
    """What each rank holds or needs.

    Args:
        model: its tensors.
        over: the parallelism.
        first: group rank of the side's first rank.
        dtype: of all tensors.
    """
    return SideLayout.from_shardings(
        (names, sharding, dtype) for names, sharding, _ in placed(model, over, first)
    )


def placed(
    model: ModelShape, over: Parallelism, first: int
) -> Iterator[tuple[tuple[FQN, ...], Sharding, Family]]:
    """All tensors with their shardings, those that lie alike together."""
    for family in model.families:
        for stage, layers in _stages(model, family, over.pp):
            start = first + stage * over.stage
            if family.role.is_expert and over.ep > 1:
                yield from _by_expert(family, layers, over, start)
            else:
                names = tuple(family.names(layers, range(family.experts)))
                yield names, _sharding(family, over, start), family


def _stages(
    model: ModelShape, family: Family, stages: int
) -> Iterator[tuple[int, tuple[int, ...]]]:
    if not family.layers:
        yield (stages - 1 if family.last else 0), ()
        return
    for stage in range(stages):
        low, count = chunk(model.layers, stages, stage)
        if layers := tuple(layer for layer in family.layers if low <= layer < low + count):
            yield stage, layers


def _by_expert(
    family: Family, layers: Sequence[int], over: Parallelism, start: int
) -> Iterator[tuple[tuple[FQN, ...], Sharding, Family]]:
    size = over.stage // over.ep
    for group in range(over.ep):
        low, count = chunk(family.experts, over.ep, group)
        if not count:
            continue
        names = tuple(family.names(layers, range(low, low + count)))
        # Inside a group: cut by rows where the trainer shards fully, else replicas.
        rest = size // over.etp
        mesh, placements = _mesh(
            start + group * size,
            [
                (1 if over.fsdp > 1 else rest, Replicate()),
                (rest if over.fsdp > 1 else 1, Shard(0)),
                (over.etp, Shard(_TP_DIM[family.role])),
            ],
        )
        yield names, Sharding(mesh, placements, family.shape), family


def _sharding(family: Family, over: Parallelism, start: int) -> Sharding:
    dim = _TP_DIM.get(family.role)
    cuts = 1 if dim is None else over.tp
    if family.heads:
        cuts = min(cuts, family.heads)
    if dim is None or over.tp == 1:
        axes: list[tuple[int, Placement]] = [(over.fsdp, Shard(0)), (over.tp, Replicate())]
    else:
        # FSDP cuts after tensor parallelism, though its axis stands to the left.
        outer = StridedShard(0, cuts) if dim == 0 and cuts > 1 else Shard(0)
        axes = [(over.fsdp, outer), (cuts, Shard(dim)), (over.tp // cuts, Replicate())]
    mesh, placements = _mesh(start, [(over.dp, Replicate()), *axes])
    return Sharding(mesh, placements, family.shape)


def _mesh(start: int, axes: Sequence[tuple[int, Placement]]) -> tuple[Mesh, tuple[Placement, ...]]:
    """A mesh of consecutive ranks; axes of one rank are left out."""
    some = [(extent, placement) for extent, placement in axes if extent > 1]
    shape = tuple(extent for extent, _ in some)
    mesh = Mesh(shape, tuple(range(start, start + prod(shape))))
    return mesh, tuple(placement for _, placement in some)
