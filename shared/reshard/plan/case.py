"""A planning case as JSON: shardings of both sides, without a device or a model.

Parsing is validating: a `Case` can be planned, up to dtypes that cannot be cast; all faults of a
file are found in one go.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from reshard.dtypes import DType, parse_dtype
from reshard.errors import LayoutError, PlanError
from reshard.ids import FQN, GroupRank
from reshard.layout.compact import MAX_RANKS
from reshard.layout.mesh import Mesh
from reshard.layout.placements import (
    Placement,
    Replicate,
    Shard,
    StridedShard,
    parse_placement,
)
from reshard.layout.sharding import Sharding
from reshard.layout.side import SideLayout
from reshard.plan.build import make_plan
from reshard.plan.model import TransferPlan

_MAX_EXTENT = 1 << 48
_MAX_DIMS = 64


@dataclass(frozen=True, slots=True)
class CaseTensor:
    """One tensor and how it lies on both sides.

    Attributes:
        name: of the tensor.
        source: how the source ranks hold it.
        destination: how the destination ranks need it.
        source_dtype: what the source ranks hold.
        wire_dtype: what the destination ranks want.
    """

    name: FQN
    source: Sharding
    destination: Sharding
    source_dtype: DType
    wire_dtype: DType


@dataclass(frozen=True, slots=True)
class Case:
    """What `reshard plan` reads.

    Attributes:
        tensors: in the order of the file; names are distinct.
    """

    tensors: tuple[CaseTensor, ...]

    @property
    def source_ranks(self) -> tuple[GroupRank, ...]:
        """All ranks of the source meshes, sorted."""
        return _ranks(tensor.source for tensor in self.tensors)

    @property
    def destination_ranks(self) -> tuple[GroupRank, ...]:
        """All ranks of the destination meshes, sorted."""
        return _ranks(tensor.destination for tensor in self.tensors)

    def plan(self) -> TransferPlan:
        """Who sends what to whom.

        Raises:
            PlanError: dtypes that cannot be cast.
        """
        return make_plan(*self.sides())

    def sides(self) -> tuple[SideLayout, SideLayout]:
        """What source ranks hold, and what destination ranks need."""
        sources = (([t.name], t.source, t.source_dtype) for t in self.tensors)
        destinations = (([t.name], t.destination, t.wire_dtype) for t in self.tensors)
        return SideLayout.from_shardings(sources), SideLayout.from_shardings(destinations)


def _ranks(shardings: Iterable[Sharding]) -> tuple[GroupRank, ...]:
    meshes = {sharding.mesh for sharding in shardings}
    return tuple(GroupRank(rank) for rank in sorted({r for mesh in meshes for r in mesh.ranks}))


def read_case(raw: bytes) -> Case:
    """The case in `raw`, UTF-8 encoded JSON.

    Raises:
        PlanError: lists every fault of the file.
    """
    reader = _Reader()
    tensors = reader.case(reader.parse(raw))
    if reader.faults:
        raise PlanError("this is not a planning case", reader.faults)
    return Case(tuple(tensors))


class _Reader:
    """Reads what it can, and notes what it cannot."""

    def __init__(self) -> None:
        self.faults: list[str] = []

    def parse(self, raw: bytes) -> object:
        try:
            return json.loads(raw.decode(), object_pairs_hook=self._object)
        except UnicodeDecodeError as error:
            self.faults.append(f"not UTF-8: {error}")
        except json.JSONDecodeError as error:
            self.faults.append(f"malformed JSON: {error}")
        except (RecursionError, ValueError) as error:
            self.faults.append(f"malformed JSON: nested too deeply or a number too long ({error})")
        return None

    def case(self, document: object) -> list[CaseTensor]:
        if self.faults:
            return []
        fields = self._fields(document, "the case", ("tensors",), ())
        entries = fields.get("tensors", [])
        if not isinstance(entries, list):
            self.faults.append(f"tensors: expected a list, not {_brief(entries)}")
            return []
        read = [self._tensor(f"tensors[{i}]", entry) for i, entry in enumerate(entries)]
        tensors = [tensor for tensor in read if tensor is not None]
        for name, count in Counter(_names(entries)).items():
            if count > 1:
                self.faults.append(f"{name}: described {count} times; give each tensor once")
        return tensors

    def _tensor(self, where: str, entry: object) -> CaseTensor | None:
        fields = self._fields(entry, where, ("name", "shape", "dtype", "source", "destination"), ())
        name = fields.get("name", where)
        if not isinstance(name, str):
            self.faults.append(f"{where}: name: expected a string, not {_brief(name)}")
            name = where
        shape = self._integers(name, "shape", fields.get("shape"), _MAX_EXTENT)
        dtype = self._dtype(f"{name}: dtype", fields.get("dtype"))
        source = self._sharding(f"{name}: source", fields.get("source"), shape)
        destination = self._sharding(f"{name}: destination", fields.get("destination"), shape)
        source_dtype = self._own_dtype(f"{name}: source", fields.get("source"), dtype)
        wire_dtype = self._own_dtype(f"{name}: destination", fields.get("destination"), dtype)
        if source is None or destination is None or source_dtype is None or wire_dtype is None:
            return None
        return CaseTensor(FQN(name), source, destination, source_dtype, wire_dtype)

    def _sharding(
        self, where: str, entry: object, shape: tuple[int, ...] | None
    ) -> Sharding | None:
        if entry is None:
            return None
        fields = self._fields(entry, where, ("mesh", "ranks", "placements"), ("dtype", "shape"))
        extents = self._integers(where, "mesh", fields.get("mesh"), MAX_RANKS)
        ranks = self._integers(where, "ranks", fields.get("ranks"), MAX_RANKS)
        placements = self._placements(where, fields.get("placements"))
        if "shape" in fields:
            own = self._integers(where, "shape", fields["shape"], _MAX_EXTENT)
            if own is not None and shape is not None and own != shape:
                self.faults.append(f"{where}: shape {own}, but the tensor is of shape {shape}")
        mesh = None
        if extents is not None and ranks is not None:
            try:
                mesh = Mesh(extents, ranks)
            except LayoutError as error:
                self.faults += [f"{where}: {fault}" for fault in error.faults]
        if placements is None:
            return None
        # What cannot be read has a stand-in here, so that the other faults are found too.
        known = tuple(Replicate() if placement is None else placement for placement in placements)
        axes = len(known) if extents is None else len(extents)
        try:
            sharding = Sharding(
                mesh or _stand_in(axes), known, _roomy(known) if shape is None else shape
            )
        except LayoutError as error:
            self.faults += [f"{where}: {fault}" for fault in error.faults]
            return None
        return None if mesh is None or shape is None or None in placements else sharding

    def _placements(self, where: str, entry: object) -> tuple[Placement | None, ...] | None:
        """One for each text, None where it is none."""
        if entry is None:
            return None
        if not isinstance(entry, list):
            self.faults.append(f"{where}: placements: expected a list, not {_brief(entry)}")
            return None
        return tuple(self._placement(where, text) for text in entry)

    def _placement(self, where: str, text: object) -> Placement | None:
        try:
            if not isinstance(text, str):
                raise LayoutError(f"placement {_brief(text)}: expected a string")
            return parse_placement(text)
        except LayoutError as error:
            self.faults.append(f"{where}: {error}")
            return None

    def _own_dtype(self, where: str, entry: object, default: DType | None) -> DType | None:
        if isinstance(entry, dict) and "dtype" in entry:
            return self._dtype(f"{where}: dtype", entry["dtype"])
        return default

    def _dtype(self, where: str, entry: object) -> DType | None:
        if entry is None:
            return None
        if not isinstance(entry, str):
            self.faults.append(f"{where}: expected a string, not {_brief(entry)}")
            return None
        try:
            return parse_dtype(entry)
        except LayoutError as error:
            self.faults.append(f"{where}: {error}")
            return None

    def _integers(self, where: str, key: str, entry: object, most: int) -> tuple[int, ...] | None:
        if entry is None:
            return None
        if isinstance(entry, list) and all(type(n) is int and 0 <= n < most for n in entry):
            return tuple(entry)
        self.faults.append(
            f"{where}: {key}: expected a list of integers from 0 to {most - 1}, not {_brief(entry)}"
        )
        return None

    def _fields(
        self, entry: object, where: str, required: tuple[str, ...], optional: tuple[str, ...]
    ) -> Mapping[str, object]:
        """The object's fields; missing and unknown ones are faults. None stands for missing."""
        if not isinstance(entry, dict):
            self.faults.append(f"{where}: expected an object, not {_brief(entry)}")
            return {}
        self.faults += [
            f"{where}: {key!r} is missing" for key in required if entry.get(key) is None
        ]
        self.faults += [
            f"{where}: unknown field {key!r}; known: {', '.join((*required, *optional))}"
            for key in entry
            if key not in required and key not in optional
        ]
        return entry

    def _object(self, pairs: list[tuple[str, object]]) -> dict[str, object]:
        repeated = [key for key, count in Counter(key for key, _ in pairs).items() if count > 1]
        self.faults += [f"malformed JSON: field {key!r} is given twice" for key in repeated]
        return dict(pairs)


def _names(entries: Iterable[object]) -> list[str]:
    named = [entry.get("name") for entry in entries if isinstance(entry, dict)]
    return [name for name in named if isinstance(name, str)]


def _stand_in(axes: int) -> Mesh:
    """A mesh of as many axes."""
    return Mesh((1,) * axes, (0,))


def _roomy(placements: Iterable[Placement]) -> tuple[int, ...]:
    """A shape that has every dim that is sharded."""
    dims = [p.dim for p in placements if isinstance(p, Shard | StridedShard)]
    return (1,) * min(max(dims, default=-1) + 1, _MAX_DIMS)


def _brief(value: object) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."
