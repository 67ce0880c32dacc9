"""Sets of boxes: partition, union, difference, look-up.

Coordinate space: whatever the boxes share; global regions everywhere in this package. Nothing here
compares all pairs: cutting halves the boxes at an edge, looking up bisects.
"""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from math import prod

from reshard.layout.region import Region

Members = tuple[int, ...]
"""Numbers of the boxes that hold a cell, ascending."""

_Corners = tuple[tuple[int, ...], tuple[int, ...]]
"""First element of a box, and one past its last, in each dim."""


def partition(regions: Sequence[Region]) -> list[tuple[Region, Members]]:
    """Disjoint boxes that together are all of `regions`, each with the regions that hold it.

    Each returned box lies in the same regions throughout; boxes are sorted and few.

    >>> [(cell.offset, cell.shape, who) for cell, who in partition(
    ...     [Region((0,), (4,)), Region((2,), (4,))])]
    [((0,), (2,), (0,)), ((2,), (2,), (0, 1)), ((4,), (2,), (1,))]
    """
    boxes = [(i, (r.offset, r.end)) for i, r in enumerate(regions) if r.volume]
    if not boxes:
        return []
    lows, highs = zip(*(corners for _, corners in boxes), strict=True)
    hull = (tuple(map(min, *lows, lows[0])), tuple(map(max, *highs, highs[0])))
    cells: dict[Members, list[Region]] = defaultdict(list)
    _halve(hull, boxes, cells)
    merged = [(box, who) for who, same in cells.items() for box in merge(same)]
    return sorted(merged)


def _halve(
    cell: _Corners, boxes: list[tuple[int, _Corners]], cells: dict[Members, list[Region]]
) -> None:
    """Cut `cell` at an edge of its boxes until each part lies in the same boxes throughout."""
    low, high = cell
    cut = _middle_edge(low, high, boxes)
    if cut is None:
        # No edge runs through the cell: a box that touches it holds all of it.
        shape = tuple(b - a for a, b in zip(low, high, strict=True))
        cells[tuple(i for i, _ in boxes)].append(Region(low, shape))
        return
    dim, at = cut
    below = [box for box in boxes if box[1][0][dim] < at]
    above = [box for box in boxes if box[1][1][dim] > at]
    if below:
        _halve((low, (*high[:dim], at, *high[dim + 1 :])), below, cells)
    if above:
        _halve(((*low[:dim], at, *low[dim + 1 :]), high), above, cells)


def _middle_edge(
    low: tuple[int, ...], high: tuple[int, ...], boxes: list[tuple[int, _Corners]]
) -> tuple[int, int] | None:
    """The middle one of the edges inside a cell, along the dim that has most of them."""
    best: list[int] = []
    best_dim = 0
    for dim, (start, end) in enumerate(zip(low, high, strict=True)):
        edges = {at for _, corners in boxes for at in (corners[0][dim], corners[1][dim])}
        inside = [at for at in edges if start < at < end]
        if len(inside) > len(best):
            best, best_dim = inside, dim
    if not best:
        return None
    return best_dim, sorted(best)[len(best) // 2]


def union(regions: Iterable[Region]) -> tuple[Region, ...]:
    """Disjoint boxes that together are the given ones, which may overlap; sorted, few.

    >>> union([Region((0,), (4,)), Region((2,), (4,)), Region((8,), (1,))])
    (Region(offset=(0,), shape=(6,)), Region(offset=(8,), shape=(1,)))
    """
    # What touches is joined first: most often nothing is left to cut.
    boxes = merge({region for region in regions if region.volume})
    return tuple(sorted(merge(cell for cell, _ in partition(boxes))))


def merge(boxes: Iterable[Region]) -> list[Region]:
    """Join boxes that touch along one dim and agree in the others, until none do; sorted.

    Boxes that overlap stay as they are.
    """
    merged = sorted(boxes)
    before = 0
    while len(merged) != before:
        before = len(merged)
        for dim in reversed(range(merged[0].ndim if merged else 0)):
            merged = _merge_along(merged, dim)
    return merged


def _merge_along(boxes: list[Region], dim: int) -> list[Region]:
    rows: dict[_Corners, list[Region]] = defaultdict(list)
    for box in boxes:
        offset, shape = box.offset, box.shape
        others = (offset[:dim] + offset[dim + 1 :], shape[:dim] + shape[dim + 1 :])
        rows[others].append(box)
    if len(rows) == len(boxes):
        return boxes
    merged: list[Region] = []
    for row in rows.values():
        row.sort(key=lambda box: box.offset[dim])
        merged += _merge_row(row, dim)
    return sorted(merged)


def _merge_row(row: list[Region], dim: int) -> Iterator[Region]:
    first = row[0]
    extent = first.shape[dim]
    for box in row[1:]:
        if box.offset[dim] == first.offset[dim] + extent:
            extent += box.shape[dim]
        else:
            yield _stretched(first, dim, extent)
            first, extent = box, box.shape[dim]
    yield _stretched(first, dim, extent)


def _stretched(box: Region, dim: int, extent: int) -> Region:
    if extent == box.shape[dim]:
        return box
    return Region(box.offset, (*box.shape[:dim], extent, *box.shape[dim + 1 :]))


def subtract(region: Region, other: Region) -> tuple[Region, ...]:
    """The elements of `region` that are not in `other`, as disjoint boxes.

    >>> subtract(Region((0, 0), (2, 4)), Region((0, 1), (1, 2)))
    (Region(offset=(1, 0), shape=(1, 4)), Region(offset=(0, 0), shape=(1, 1)), \
Region(offset=(0, 3), shape=(1, 1)))
    """
    common = region.intersect(other)
    if common is None:
        return (region,)
    parts: list[Region] = []
    offset, shape = region.offset, region.shape
    for dim in range(region.ndim):
        low, high = common.offset[dim], common.end[dim]
        for start, stop in ((offset[dim], low), (high, offset[dim] + shape[dim])):
            if start < stop:
                parts.append(
                    Region(
                        (*offset[:dim], start, *offset[dim + 1 :]),
                        (*shape[:dim], stop - start, *shape[dim + 1 :]),
                    )
                )
        offset = (*offset[:dim], low, *offset[dim + 1 :])
        shape = (*shape[:dim], high - low, *shape[dim + 1 :])
    return tuple(parts)


def missing(region: Region, parts: Iterable[Region]) -> tuple[Region, ...]:
    """The elements of `region` that are in none of `parts`."""
    left = [region] if region.volume else []
    for part in parts:
        left = [rest for box in left for rest in subtract(box, part)]
    return union(left)


def flat_boxes(shape: tuple[int, ...], start: int, length: int) -> tuple[Region, ...]:
    """The boxes that hold elements `[start, start + length)` of the flattened tensor, in order.

    At most `2 * ndim - 1`: a ragged head, whole rows, a ragged tail, in each dim.

    >>> [(r.offset, r.shape) for r in flat_boxes((4, 4), 2, 8)]
    [((0, 2), (1, 2)), ((1, 0), (1, 4)), ((2, 0), (1, 2))]
    """
    if not length:
        return ()
    if not shape:
        return (Region((), ()),)
    row = prod(shape[1:])
    if len(shape) == 1 or not row:
        return (Region((start,), (length,)),)
    first, head = divmod(start, row)
    last, tail = divmod(start + length, row)
    if first == last:
        return _in_row(shape, first, head, length)
    boxes: list[Region] = []
    if head:
        boxes += _in_row(shape, first, head, row - head)
        first += 1
    if last > first:
        boxes.append(Region((first,) + (0,) * (len(shape) - 1), (last - first, *shape[1:])))
    if tail:
        boxes += _in_row(shape, last, 0, tail)
    return tuple(boxes)


def _in_row(shape: tuple[int, ...], row: int, start: int, length: int) -> tuple[Region, ...]:
    return tuple(
        Region((row, *box.offset), (1, *box.shape)) for box in flat_boxes(shape[1:], start, length)
    )


class BoxIndex:
    """Finds the boxes that meet a region, by bisection along the dim that tells them apart best."""

    def __init__(self, boxes: Sequence[Region]) -> None:
        self._boxes = boxes
        ndim = boxes[0].ndim if boxes else 0
        distinct = [len({box.offset[dim] for box in boxes}) for dim in range(ndim)]
        self._dim = distinct.index(max(distinct)) if distinct else -1
        self._rows = self._sorted_by_extent() if distinct else []

    def _sorted_by_extent(self) -> list[tuple[int, list[int], list[int]]]:
        """Boxes of similar extent: (longest, starts, numbers), so that one long box hides none."""
        dim = self._dim
        rows: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for i, box in enumerate(self._boxes):
            if box.volume:
                rows[box.shape[dim].bit_length()].append((box.offset[dim], i))
        found = []
        for row in rows.values():
            row.sort()
            longest = max(self._boxes[i].shape[dim] for _, i in row)
            found.append((longest, [start for start, _ in row], [i for _, i in row]))
        return found

    def meeting(self, region: Region) -> list[tuple[int, Region]]:
        """The number of each box that meets `region`, and what they have in common; by number."""
        if self._dim < 0:
            return [(i, region) for i in range(len(self._boxes))]
        found = []
        low, high = region.offset[self._dim], region.end[self._dim]
        for longest, starts, numbers in self._rows:
            first, last = bisect_right(starts, low - longest), bisect_left(starts, high)
            for i in numbers[first:last]:
                common = self._boxes[i].intersect(region)
                if common is not None:
                    found.append((i, common))
        return sorted(found)
