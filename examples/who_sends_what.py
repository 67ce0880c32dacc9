"""Two small reshardings, planned for real, printed and drawn: who sends what to whom.

    python examples/who_sends_what.py --folder docs/pictures

1. An 8 x 8 matrix, by rows over two trainer ranks and by columns over four engine ranks.
2. Four trainer ranks hold columns; four engine ranks each receive the whole matrix.

Everything shown comes out of `reshard.plan.make_plan`, the function that plans a real refit. It
needs nothing but layouts: no device, no process group, no model.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from reshard.ids import FQN, GroupRank
from reshard.layout.holding import RankLayout, TensorLayout
from reshard.layout.region import Region
from reshard.layout.sharding import Mesh, Placement, Replicate, Shard, Sharding
from reshard.plan import TransferPlan, make_plan

SHAPE = (8, 8)


@dataclass(frozen=True, slots=True)
class Resharding:
    """A source and a destination sharding of one matrix, over disjoint ranks.

    Attributes:
        title: what it shows.
        trainers: how many ranks hold it, and how.
        engines: how many ranks need it, and how.
    """

    title: str
    trainers: tuple[int, Placement]
    engines: tuple[int, Placement]

    def layouts(self) -> tuple[list[RankLayout], list[RankLayout]]:
        """What each rank reports: trainer ranks first, then the engine's."""
        count = self.trainers[0]
        return _layouts(*self.trainers, first=0), _layouts(*self.engines, first=count)

    def plan(self) -> TransferPlan:
        """Who sends what to whom."""
        return make_plan(*self.layouts())


RESHARDINGS = {
    "rows_to_columns": Resharding(
        "8 x 8: rows over two trainer ranks, columns over four engine ranks",
        trainers=(2, Shard(0)),
        engines=(4, Shard(1)),
    ),
    "columns_to_full": Resharding(
        "8 x 8: columns over four trainer ranks, the whole on each of four engine ranks",
        trainers=(4, Shard(1)),
        engines=(4, Replicate()),
    ),
}


def _layouts(size: int, placement: Placement, *, first: int) -> list[RankLayout]:
    mesh = Mesh(axes=("ranks",), shape=(size,), ranks=tuple(range(first, first + size)))
    sharding = Sharding(mesh, (placement,), SHAPE)
    return [
        RankLayout(
            GroupRank(rank),
            (TensorLayout(FQN("w"), SHAPE, "bfloat16", sharding.regions(rank)),),
        )
        for rank in mesh.ranks
    ]


def describe(resharding: Resharding) -> str:
    """The plan in words, one line a transfer."""
    plan, count = resharding.plan(), resharding.trainers[0]
    lines = [
        f"  trainer {transfer.source} -> engine {transfer.destination - count}: "
        + ", ".join(map(str, transfer.regions))
        for transfer in plan.transfers()
    ]
    received = max(plan.received_bytes.values())
    total = f"  each engine rank receives {received} bytes; redundancy {plan.redundancy:.3f}"
    return "\n".join([resharding.title, *lines, total])


# --- The drawing ---------------------------------------------------------------------------------

CELL = 15  # pixels of a matrix element
GAP = 34  # pixels between blocks
WIDTH = 700  # pixels of the page
BETWEEN = 150  # pixels of height for the curves
COLOURS = ("#3b76c4", "#e08a2e", "#4a9d5b", "#a05bb5")  # by trainer rank


@dataclass(frozen=True, slots=True)
class Block:
    """One rank's part of the matrix on the page.

    Attributes:
        region: global region that the rank holds or needs.
        x, y: pixels of its upper left corner.
    """

    region: Region
    x: float
    y: float

    def box(self, part: Region) -> tuple[float, float, float, float]:
        """Pixels (x, y, width, height) of a part of the region."""
        row, column = (o - b for o, b in zip(part.offset, self.region.offset, strict=True))
        rows, columns = part.shape
        return self.x + column * CELL, self.y + row * CELL, columns * CELL, rows * CELL

    def along(self, share: float) -> float:
        """The x at a share of the block's width."""
        return self.x + share * self.region.shape[1] * CELL


def draw(resharding: Resharding) -> str:
    """The plan as SVG: trainer ranks above, engine ranks below, a curve a transfer."""
    sources, destinations = (
        [layout.tensors[0].regions[0] for layout in side] for side in resharding.layouts()
    )
    above = _row(sources, y=70)
    below = _row(destinations, y=70 + _height(sources) + BETWEEN)
    height = below[0].y + _height(destinations) + 64
    plan = resharding.plan()
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" '
        f'width="{WIDTH}" height="{height:g}" font-family="sans-serif" font-size="12">',
        f"<title>{resharding.title}</title>",
        '<rect width="100%" height="100%" fill="white"/>',
        _text(WIDTH / 2, 24, resharding.title, "font-size='14' font-weight='bold'"),
    ]
    for rank, block in enumerate(above):
        parts += [_tile(block, block.region, COLOURS[rank])]
        parts += [_text(block.along(0.5), block.y - 9, f"trainer {rank}")]
    for transfer in plan.transfers():
        engine = transfer.destination - len(above)
        for region in transfer.regions:
            parts += [_tile(below[engine], region, COLOURS[transfer.source])]
            start = _centre(above[transfer.source], region)
            end = below[engine].along((transfer.source + 0.5) / len(above))
            parts += [
                _curve(start, end, above[0].y + _height(sources), below[0].y, transfer.source)
            ]
    for rank, block in enumerate(below):
        received = plan.received_bytes[GroupRank(len(above) + rank)]
        bottom = block.y + _height(destinations)
        parts += [_text(block.along(0.5), bottom + 17, f"engine {rank}")]
        parts += [_text(block.along(0.5), bottom + 32, f"{received} bytes", "fill='#666'")]
    summary = f"every element arrives once: redundancy {plan.redundancy:.3f}"
    parts += [_text(WIDTH / 2, height - 10, summary, "fill='#666'"), "</svg>"]
    return "\n".join(parts) + "\n"


def _row_width(regions: Sequence[Region]) -> int:
    return sum(region.shape[1] * CELL for region in regions) + GAP * (len(regions) - 1)


def _height(regions: Sequence[Region]) -> int:
    return max(region.shape[0] for region in regions) * CELL


def _row(regions: Sequence[Region], y: float) -> list[Block]:
    """Blocks side by side, in the middle of the page."""
    x = (WIDTH - _row_width(regions)) / 2
    blocks = []
    for region in regions:
        blocks.append(Block(region, x, y))
        x += region.shape[1] * CELL + GAP
    return blocks


def _centre(block: Block, part: Region) -> float:
    """The x of the middle of a part of a block."""
    x, _, width, _ = block.box(part)
    return x + width / 2


def _tile(block: Block, part: Region, colour: str) -> str:
    """A filled part of a block, with a line around each of its elements."""
    x, y, width, height = block.box(part)
    box = f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{colour}"/>'
    columns = (f"M{x + i * CELL:g} {y:g}v{height:g}" for i in range(part.shape[1] + 1))
    rows = (f"M{x:g} {y + i * CELL:g}h{width:g}" for i in range(part.shape[0] + 1))
    grid = "".join((*columns, *rows))
    return f'{box}<path d="{grid}" stroke="white" stroke-width="0.8" fill="none"/>'


def _curve(start: float, end: float, top: float, bottom: float, rank: int) -> str:
    """One transfer: from below a trainer's tile to an arrow head above the engine's block."""
    high, low, middle = top + 4, bottom - 9, (top + bottom) / 2
    path = f"M{start:g} {high:g}C{start:g} {middle:g} {end:g} {middle:g} {end:g} {low:g}"
    head = f"M{end - 4:g} {low - 1:g}h8l-4 8z"
    colour = COLOURS[rank]
    return (
        f'<path d="{path}" stroke="{colour}" stroke-width="1.6" fill="none" opacity="0.8"/>'
        f'<path d="{head}" fill="{colour}"/>'
    )


def _text(x: float, y: float, text: str, style: str = "fill='#222'") -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="middle" {style}>{text}</text>'


def main(folder: Path) -> None:
    """Print both plans and write their pictures."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, resharding in RESHARDINGS.items():
        print(describe(resharding), end="\n\n")
        (folder / f"{name}.svg").write_text(draw(resharding))
    print(f"Pictures: {folder}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("build"), help="where pictures go")
    main(parser.parse_args().folder)
