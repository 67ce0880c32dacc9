"""The published layouts of a reshard collective, all of them, as facts."""

import json
from math import prod
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from tests.unit.plan.oracles import least_largest_load
from tests.unit.plan.worlds import both

from reshard.dtypes import itemsize, parse_dtype
from reshard.layout.region import Region
from reshard.layout.sharding import Mesh, Placement, Replicate, Shard, Sharding
from reshard.plan import TransferPlan, make_plan

CASES = json.loads((Path(__file__).parents[2] / "data" / "reshard_matrix.json").read_text())[
    "cases"
]

Mask = npt.NDArray[np.int8]
"""How often each element of the tensor is meant."""


def _placement(text: str) -> Placement:
    return Replicate() if text == "R" else Shard(int(text[1:]))


def _sharding(facts: dict[str, list[int]], shape: tuple[int, ...], start: int) -> Sharding:
    mesh = tuple(facts["mesh"])
    ranks = tuple(range(start, start + prod(mesh)))
    return Sharding(
        Mesh(mesh, ranks), tuple(_placement(str(p)) for p in facts["placements"]), shape
    )


def _mask(shape: tuple[int, ...], regions: tuple[Region, ...]) -> Mask:
    mask = np.zeros(shape, np.int8)
    for region in regions:
        mask[tuple(map(slice, region.offset, region.end))] += 1
    return mask


def _assert_exact(plan: TransferPlan, source: Sharding, destination: Sharding) -> None:
    got = {rank: np.zeros(source.shape, np.int8) for rank in destination.mesh.ranks}
    held = {rank: _mask(source.shape, source.regions(rank)) for rank in source.mesh.ranks}
    for op in plan.ops:
        box = tuple(map(slice, op.region.offset, op.region.end))
        assert held[op.source][box].all()
        for rank in op.destinations:
            got[rank][box] += 1
    for receiver in destination.mesh.ranks:
        assert (got[receiver] == _mask(source.shape, destination.regions(receiver))).all()


def test_there_are_332_cases() -> None:
    assert len(CASES) == 332


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_published_layouts_are_covered_exactly(case: dict[str, object]) -> None:
    shape: tuple[int, ...] = tuple(case["global_shape"])  # type: ignore[arg-type]
    facts: tuple[dict[str, list[int]], ...] = (case["src"], case["dst"])  # type: ignore[assignment]
    source, destination = (_sharding(f, shape, int(f["start"])) for f in facts)  # type: ignore[call-overload]
    for sharding, stated in zip((source, destination), facts, strict=True):
        for rank in sharding.mesh.ranks:
            assert list(sharding.local_shape(rank)) == stated["local_shape"]
    dtype = parse_dtype(str(case["dtype"]))
    plan = make_plan(*both({"w": (source, destination)}, dtype, dtype))
    assert plan.redundancy == 1.0
    _assert_exact(plan, source, destination)
    _assert_balanced(plan, source, destination, itemsize(dtype))


def _assert_balanced(
    plan: TransferPlan, source: Sharding, destination: Sharding, size: int
) -> None:
    """Within 1 % of the LP's optimum, or less than an element above it."""
    holders: dict[Region, list[int]] = {}
    for rank in source.mesh.ranks:
        for region in source.regions(rank):
            holders.setdefault(region, []).append(rank)
    amounts: dict[tuple[int, ...], float] = {}
    for rank in destination.mesh.ranks:
        for wanted in destination.regions(rank):
            for region, ranks in holders.items():
                common = region.intersect(wanted)
                if common is not None and rank not in ranks:
                    key = tuple(ranks)
                    amounts[key] = amounts.get(key, 0) + common.volume * size
    least = least_largest_load(amounts)
    largest = max(plan.sent_bytes.values(), default=0)
    assert plan.bounds.max_sent_bytes == pytest.approx(least, abs=1)
    assert largest <= max(1.01 * least, least + size)


def test_the_mask_oracle_can_fail() -> None:
    source = Sharding(Mesh((2,), (0, 1)), (Shard(0),), (4, 4))
    destination = Sharding(Mesh((2,), (2, 3)), (Shard(1),), (4, 4))
    plan = make_plan(*both({"w": (source, destination)}))
    _assert_exact(plan, source, destination)
    lost = TransferPlan(plan.classes, plan.ops[1:], plan.bounds, ())
    with pytest.raises(AssertionError):
        _assert_exact(lost, source, destination)
