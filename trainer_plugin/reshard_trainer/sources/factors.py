"""The factors of low-rank adapters, as far as a rank needs them, gathered where it lacks some.

All ranks first say what they hold and lack; from that all know, without further talk, which cells
travel and who sends them. Coordinate space: global regions of factors.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence

import msgspec
import torch

from reshard.board import Deadline
from reshard.dtypes import DType, parse_dtype
from reshard.errors import LayoutError
from reshard.layout.boxes import missing, partition, union
from reshard.layout.region import Region
from reshard.transport.places import torch_dtype
from reshard.wire import decode, encode
from reshard_trainer.ensemble import Ensemble
from reshard_trainer.sources.held import Held


class _Factor(msgspec.Struct, frozen=True):
    """One factor on one rank.

    Attributes:
        dtype: of its elements.
        held: regions that the rank has.
        lacking: regions that it needs beside these.
    """

    dtype: DType
    held: tuple[Region, ...]
    lacking: tuple[Region, ...]


class _Factors(msgspec.Struct, frozen=True):
    by_name: dict[str, _Factor]


class Factors:
    """This rank's factors and needs."""

    def __init__(self, held: Mapping[str, Held], needs: Mapping[str, Sequence[Region]]) -> None:
        """Take them.

        Args:
            held: by name.
            needs: regions that this rank computes with, by name.
        """
        self._held = held
        self._needs = {name: union(regions) for name, regions in needs.items()}

    def gathered(self, ensemble: Ensemble, deadline: Deadline) -> dict[str, torch.Tensor]:
        """Every factor whole, of which what this rank needs is filled in.

        Raises:
            DeadlineExceeded: not all ranks came.
            LayoutError: some needed part is held by nobody.
        """
        own = {name: self._describe(name) for name in self._held}
        answers = ensemble.all_gather(encode(_Factors(own)), deadline)
        ranks = [decode(raw, _Factors).by_name for raw in answers]
        senders = _senders(ranks)
        whole = {name: self._own(name) for name in self._held}
        if senders:
            cells = [cell for cell, sender in senders.items() if sender == ensemble.rank]
            parts = ensemble.all_gather(_bytes(whole, cells), deadline)
            self._fill(whole, senders, parts, ranks)
        return whole

    def _describe(self, name: str) -> _Factor:
        held = union(region for region, _ in self._held[name].places.pieces())
        lacking = tuple(gap for need in self._needs[name] for gap in missing(need, held))
        return _Factor(parse_dtype(str(self._held[name].flat.dtype)), held, lacking)

    def _own(self, name: str) -> torch.Tensor:
        held = self._held[name]
        whole = torch.zeros(held.shape, dtype=held.flat.dtype, device=held.flat.device)
        for region, values in held.views():
            _cell(whole, region).copy_(values)
        return whole

    def _fill(
        self,
        whole: Mapping[str, torch.Tensor],
        senders: Mapping[tuple[str, Region], int],
        parts: Sequence[bytes],
        ranks: Sequence[Mapping[str, _Factor]],
    ) -> None:
        at: dict[int, int] = defaultdict(int)
        for (name, cell), sender in senders.items():
            dtype = torch_dtype(ranks[sender][name].dtype)
            nbytes = cell.volume * dtype.itemsize
            raw = parts[sender][at[sender] : at[sender] + nbytes]
            at[sender] += nbytes
            if name in whole and nbytes:
                values = torch.frombuffer(bytearray(raw), dtype=dtype).view(cell.shape)
                _cell(whole[name], cell).copy_(values)


def _bytes(whole: Mapping[str, torch.Tensor], cells: Sequence[tuple[str, Region]]) -> bytes:
    parts = []
    for name, cell in cells:
        values = _cell(whole[name], cell).contiguous().cpu().reshape(-1)
        parts.append(values.view(torch.uint8).numpy().tobytes())
    return b"".join(parts)


def _senders(ranks: Sequence[Mapping[str, _Factor]]) -> dict[tuple[str, Region], int]:
    """Who sends which cell of which factor: all that somebody lacks, in an order that all share."""
    found: dict[tuple[str, Region], int] = {}
    for name in sorted({name for rank in ranks for name in rank}):
        lacking = union(gap for rank in ranks if name in rank for gap in rank[name].lacking)
        if not lacking:
            continue
        holders, regions = [], []
        for number, rank in enumerate(ranks):
            for region in rank[name].held if name in rank else ():
                holders.append(number)
                regions.append(region)
        cells = {cell: holders[min(members)] for cell, members in partition(regions)}
        for need in lacking:
            if gaps := missing(need, cells):
                raise LayoutError(f"{name}: no trainer rank holds {', '.join(map(str, gaps))}")
        found |= {(name, cell): sender for cell, sender in sorted(cells.items())}
    return found


def _cell(whole: torch.Tensor, region: Region) -> torch.Tensor:
    return whole[tuple(map(slice, region.offset, region.end))]
