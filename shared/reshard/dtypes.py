"""Element types: the one home of their names and sizes.

Names are torch's (`"bfloat16"`), so `getattr(torch, name)` is the torch dtype. No torch here.
"""

from typing import Final, Literal, get_args

from reshard.errors import LayoutError

DType = Literal[
    "float64",
    "float32",
    "float16",
    "bfloat16",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "float4_e2m1fn_x2",
    "int64",
    "int32",
    "int16",
    "int8",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "bool",
    "complex64",
]

_SIZES: Final[dict[DType, int]] = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1, "float4_e2m1fn_x2": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1,
    "uint8": 1, "uint16": 2, "uint32": 4, "uint64": 8, "bool": 1, "complex64": 8,
}  # fmt: skip

_FLOATS: Final = frozenset({"float64", "float32", "float16", "bfloat16"})


def parse_dtype(name: str) -> DType:
    """The dtype called `name`, with or without torch's prefix.

    >>> parse_dtype("torch.bfloat16")
    'bfloat16'

    Raises:
        LayoutError: no such dtype.
    """
    bare = name.removeprefix("torch.")
    for known in get_args(DType):
        if known == bare:
            return known  # type: ignore[no-any-return]
    raise LayoutError(f"unknown dtype {name!r}; known: {', '.join(get_args(DType))}")


def itemsize(dtype: DType) -> int:
    """Bytes of one element."""
    return _SIZES[dtype]


def castable(source: DType, destination: DType) -> bool:
    """Whether a sender may cast: equal dtypes, or both plain floating point."""
    return source == destination or (source in _FLOATS and destination in _FLOATS)
