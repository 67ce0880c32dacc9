"""Index-coded tensors: values that say which element of which checkpoint tensor they are.

A value is a scrambled count of (tensor, global element), kept in the range of ordinary weights so
that computations on it stay finite. In fp32 it is unique to its element among 2^27; in narrower
dtypes, among as many as their mantissa can tell apart (2^11 in bf16), so two codings with different
`seed` are used where that is too few to show every swap.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from math import prod

import torch

from reshard.session import TensorSpec

_SCRAMBLE = 0x9E3779B1
"""Odd, so that multiplying by it is a bijection of the numbers below any power of two."""

_BETWEEN_CODINGS = 7919

_EXPONENT_BITS = 3
_EXPONENTS_BELOW_ONE = 6


def coded(
    specs: Sequence[TensorSpec], seed: int, equal: Mapping[str, str] = {}
) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of `specs`, in order, filled with codes.

    Args:
        specs: the tensors.
        seed: number of the coding.
        equal: names of tensors that get the codes of another tensor of the same shape.
    """
    firsts = itertools.accumulate(
        (prod(spec.shape) for spec in specs), initial=1 + seed * _BETWEEN_CODINGS
    )
    first_of = {spec.name: first for spec, first in zip(specs, firsts, strict=False)}
    for spec in specs:
        first = first_of[equal.get(spec.name, spec.name)]
        numbers = torch.arange(first, first + prod(spec.shape), dtype=torch.int64)
        yield spec.name, _values(numbers, getattr(torch, spec.dtype)).reshape(spec.shape)


def _values(numbers: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if not dtype.is_floating_point:
        return (numbers % 2).to(dtype) if dtype == torch.bool else (numbers % 125).to(dtype)
    mantissa_bits = {torch.float32: 23, torch.float16: 10, torch.bfloat16: 7}.get(dtype, 2)
    bits = 1 + _EXPONENT_BITS + mantissa_bits
    scrambled = (numbers * _SCRAMBLE) % 2**bits
    mantissa = scrambled % 2**mantissa_bits
    exponent = (scrambled >> mantissa_bits) % 2**_EXPONENT_BITS
    sign = 1 - 2 * (scrambled >> (mantissa_bits + _EXPONENT_BITS))
    exact = (1 + mantissa.to(torch.float64) / 2**mantissa_bits) * torch.exp2(
        exponent.to(torch.float64) - _EXPONENTS_BELOW_ONE
    )
    values: torch.Tensor = sign * exact
    return values.to(dtype)
