"""The digest: equal for equal weights under any sharding, different for any mistake."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reshard.digest import add, digest_region
from reshard.errors import LayoutError
from reshard.ids import FQN
from reshard.layout.region import Region

W = FQN("w")
shapes = st.lists(st.integers(1, 6), min_size=0, max_size=4).map(tuple)
dtypes = st.sampled_from(
    [torch.float32, torch.bfloat16, torch.uint8, torch.int64, torch.bool, torch.float8_e4m3fn]
)


def of(values: torch.Tensor, name: str = "w") -> int:
    return digest_region(FQN(name), Region.whole(tuple(values.shape)), values)


def coded(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    return (torch.randn(shape, generator=generator) * 50).abs().to(dtype)


def tiles(region: Region, data: st.DataObject) -> list[Region]:
    """A random tiling by guillotine cuts."""
    cuttable = [d for d, n in enumerate(region.shape) if n > 1]
    if not cuttable or data.draw(st.booleans()):
        return [region]
    dim = data.draw(st.sampled_from(cuttable))
    at = data.draw(st.integers(1, region.shape[dim] - 1))
    low, high = list(region.shape), list(region.shape)
    low[dim], high[dim] = at, region.shape[dim] - at
    start = list(region.offset)
    start[dim] += at
    return [
        *tiles(Region(region.offset, tuple(low)), data),
        *tiles(Region(tuple(start), tuple(high)), data),
    ]


@given(shapes, dtypes, st.data())
def test_digests_of_any_tiling_sum_to_the_digest_of_the_whole(
    shape: tuple[int, ...], dtype: torch.dtype, data: st.DataObject
) -> None:
    whole = coded(shape, dtype)
    parts = [
        digest_region(W, r, whole[tuple(map(slice, r.offset, r.end))])
        for r in tiles(Region.whole(shape), data)
    ]
    assert add(*parts) == of(whole)


@given(shapes.filter(lambda s: len(s) > 1), st.data())
def test_strides_do_not_matter(shape: tuple[int, ...], data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(shape))))
    whole = coded(shape, torch.float32)
    inverse = [order.index(d) for d in range(len(shape))]
    assert of(whole.permute(order).contiguous().permute(inverse)) == of(whole)


@given(st.integers(2, 40), st.integers(1, 8), st.data())
def test_any_two_swapped_elements_show(rows: int, columns: int, data: st.DataObject) -> None:
    count = rows * columns
    whole = torch.arange(count, dtype=torch.float32)
    i, j = data.draw(st.lists(st.integers(0, count - 1), min_size=2, max_size=2, unique=True))
    swapped = whole.clone()
    swapped[i], swapped[j] = whole[j], whole[i]
    assert of(swapped.view(rows, columns)) != of(whole.view(rows, columns))


@given(st.integers(2, 8), st.integers(2, 8), st.data())
def test_any_single_changed_bit_shows(rows: int, columns: int, data: st.DataObject) -> None:
    whole = coded((rows, columns), torch.bfloat16)
    changed = whole.clone()
    at = data.draw(st.integers(0, rows * columns - 1))
    changed.view(torch.int16).view(-1)[at] ^= 1 << data.draw(st.integers(0, 14))
    assert of(changed) != of(whole)


def test_shift_transpose_name_and_dtype_show() -> None:
    whole = torch.arange(64, dtype=torch.float32).view(8, 8)
    seen = {
        of(whole),
        of(whole.roll(1, 0)),
        of(whole.roll(1, 1)),
        of(whole.T),
        of(whole, "v"),
        of(whole.to(torch.bfloat16)),
        of(whole.view(4, 16)),
        digest_region(W, Region((1, 0), (8, 8)), whole),
    }
    assert len(seen) == 8


def test_swapped_rows_and_columns_show_also_when_both_are_swapped() -> None:
    whole = torch.arange(64, dtype=torch.float32).view(8, 8)
    both = whole.clone()
    both[[0, 1]] = both[[1, 0]]
    both[:, [2, 3]] = both[:, [3, 2]]
    assert of(both) != of(whole)


def test_large_rows_are_summed_in_runs() -> None:
    whole = coded((300, 3001), torch.bfloat16)
    rows = [digest_region(W, Region((r, 0), (1, 3001)), whole[r : r + 1]) for r in range(300)]
    assert add(*rows) == of(whole)


def test_the_values_are_left_alone() -> None:
    whole = torch.arange(12).view(3, 4)
    of(whole)
    assert torch.equal(whole, torch.arange(12).view(3, 4))


def test_empty_regions_add_nothing() -> None:
    assert digest_region(W, Region((3, 0), (0, 8)), torch.empty(0, 8)) == 0


def test_golden() -> None:
    """The keys are part of the protocol: both sides of a refit may run different builds."""
    assert of(torch.arange(6, dtype=torch.float32).view(2, 3)) == 3434035473341743104


def test_values_of_another_shape_are_refused() -> None:
    with pytest.raises(LayoutError, match=r"w: values \(2, 3\) for a region of \(3, 2\)"):
        digest_region(W, Region.whole((3, 2)), torch.zeros(2, 3))
