"""Chunked casts give what one `copy_` gives, whatever the strides."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reshard.transport import casting
from reshard.transport.casting import cast_in_chunks, is_scattered

BIG = 512


@st.composite
def views(draw: st.DrawFn, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """A view of `shape`: dims permuted in memory, and padded on either side."""
    order = draw(st.permutations(range(len(shape))))
    padding = [draw(st.integers(0, 2)) for _ in shape]
    room = [shape[dim] + 2 * padding[dim] for dim in order]
    count = torch.Size(room).numel()
    memory = torch.arange(1, count + 1, dtype=torch.float64).div(7).to(dtype).view(room)
    inverse = [order.index(dim) for dim in range(len(shape))]
    view = memory.permute(inverse)
    return view[tuple(slice(p, p + n) for p, n in zip(padding, shape, strict=True))]


@given(st.data(), st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(1, 40))
def test_chunks_are_one_copy(data: st.DataObject, shape: list[int], chunk: int) -> None:
    source = data.draw(views(torch.float32, tuple(shape)))
    destination = data.draw(views(torch.bfloat16, tuple(shape)))
    expected = source.to(torch.bfloat16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(casting, "CHUNK_ELEMENTS", chunk)
        cast_in_chunks(destination, source)
    assert torch.equal(destination, expected)


@pytest.mark.parametrize(
    ("source", "destination", "scattered"),
    [
        (torch.zeros(BIG, 2 * BIG)[:, :BIG], torch.zeros(BIG, BIG, dtype=torch.bfloat16), True),
        (torch.zeros(BIG, BIG).t(), torch.zeros(BIG, BIG, dtype=torch.bfloat16), True),
        (torch.zeros(BIG, BIG), torch.zeros(BIG, BIG, dtype=torch.bfloat16).t(), True),
        (torch.zeros(BIG, BIG), torch.zeros(BIG, 2 * BIG, dtype=torch.bfloat16)[:, :BIG], False),
        (torch.zeros(BIG, BIG), torch.zeros(BIG, BIG, dtype=torch.bfloat16), False),
        (torch.zeros(BIG, BIG).t(), torch.zeros(BIG, BIG), False),
        (torch.zeros(8, 16)[:, :8], torch.zeros(8, 8, dtype=torch.bfloat16), False),
    ],
)
def test_what_is_scattered(
    source: torch.Tensor, destination: torch.Tensor, scattered: bool
) -> None:
    assert is_scattered(destination, source) is scattered
