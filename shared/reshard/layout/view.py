"""Strided views of local storage.

Coordinate space: local, in elements of one storage. Not here: what the elements mean.
"""

from dataclasses import dataclass

from reshard.errors import LayoutError


@dataclass(frozen=True, slots=True, order=True)
class StridedView:
    """`torch.as_strided` as a value: element `i` lies at `offset + sum(i[d] * stride[d])`.

    Attributes:
        offset: of the first element, in elements of the storage.
        shape: extent in each dim, in elements.
        stride: step in each dim, in elements of the storage.
    """

    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.stride):
            raise LayoutError(f"shape {self.shape} and stride {self.stride} differ in rank")

    @classmethod
    def contiguous(cls, shape: tuple[int, ...], offset: int = 0) -> "StridedView":
        """The row-major view of `shape` that starts at `offset`.

        >>> StridedView.contiguous((2, 3, 4))
        StridedView(offset=0, shape=(2, 3, 4), stride=(12, 4, 1))
        """
        stride: list[int] = []
        step = 1
        for extent in reversed(shape):
            stride.append(step)
            step *= max(extent, 1)
        return cls(offset, shape, tuple(reversed(stride)))
