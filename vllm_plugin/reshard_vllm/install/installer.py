"""The installer of one engine rank: where received regions land, and how they become live.

`staged`: everything lands in shadows in load layout; the commit copies it into the live parameters
and repeats the post-load steps, while nothing is generated. `in_place`: what is proven direct lands
in the live parameters, only repacked layers have shadows.
"""

import functools
from collections import defaultdict
from collections.abc import Sequence

import torch
from vllm.config import VllmConfig

from reshard.dtypes import DType
from reshard.errors import RecordingError
from reshard.ids import FQN
from reshard.layout.holding import TensorLayout
from reshard.layout.pieces import Piece
from reshard.layout.region import Region
from reshard.layout.table import PieceTable
from reshard.layout.view import StridedView
from reshard.session import ClassBytes, Install, TensorSpec
from reshard_vllm.install.classes import class_bytes, find_faults, wire_dtype, written_slots
from reshard_vllm.install.evidence import Proof
from reshard_vllm.install.notes import notes_of
from reshard_vllm.install.postload import Layer, keeps_nothing, rerun
from reshard_vllm.install.shadow import Shadow, run
from reshard_vllm.recording.loader_map import LoaderMap


class VllmInstaller:
    """Receives into one rank of a vLLM engine.

    Attributes:
        classes: bytes that this rank receives, by class of destination.
        faults: why the trainer's tensors cannot be installed; empty if they can.
        notes: what a refit leaves as it was, or makes up, one line each.
        unused: canonical names that this rank's loader ignores.
        basis: what the classes were proven by.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        config: VllmConfig,
        recorded: LoaderMap,
        proof: Proof,
        specs: Sequence[TensorSpec],
        *,
        install: Install,
    ) -> None:
        self._config = config
        self._recorded = recorded
        self._proof = proof
        self._live = dict(
            [
                *model.named_parameters(remove_duplicate=False),
                *model.named_buffers(remove_duplicate=False),
            ]
        )
        self._specs = {FQN(spec.name): spec for spec in specs}
        self._written = written_slots(recorded)
        self._shadowed = [key for key in self._written if install == "staged" or self._apart(key)]
        self.faults = find_faults(recorded, proof, model).lines()
        self._shadow = Shadow(
            recorded,
            () if self.faults else self._shadowed,
            next(iter(self._live.values())).device,
        )
        self._tables = self._build_tables()
        counts = class_bytes(recorded, proof, specs) if not self.faults else {}
        self.classes = ClassBytes(**{k: n for k, n in counts.items() if k != "refused"})
        self.notes = notes_of(config, recorded, proof, specs)
        self.unused = recorded.unused
        self.basis = proof.basis

    @property
    def staging_bytes(self) -> int:
        """Extra memory of a refit, in bytes."""
        return self._shadow.nbytes

    def needs(self) -> tuple[TensorLayout, ...]:
        """The regions that this rank must receive, each once."""
        needs = [
            TensorLayout(name, self._specs[name].shape, dtype, table.regions(name))
            for dtype, table in self._tables.items()
            for name in table.names
        ]
        return tuple(sorted(needs, key=lambda need: (need.name, need.dtype)))

    def write(
        self, name: FQN, dtype: DType, region: Region
    ) -> Sequence[tuple[Region, torch.Tensor]]:
        """Every local place of a region."""
        pieces = self._tables[dtype].cut(name, region)
        return [(piece.region, self._place(piece)) for piece in pieces]

    def begin(self) -> None:
        """Write the loader's constants where what arrives will lie around them, or over them.

        Shadows are kept from refit to refit, and have theirs since they were made.
        """
        for key in self._written:
            if key not in self._shadowed:
                run(
                    self._recorded.landings.constants.get(key, ()),
                    functools.partial(self._live_view, key),
                )

    def commit(self) -> None:
        """Compute, copy into the live parameters, repeat the post-load steps of what changed.

        Parameters that no tensor fills get what they had when the engine started: an engine that
        slept may have lost them.
        """
        self._shadow.compute()
        self._check_ties()
        for key, value in self._proof.kept.items():
            if self._proof.classes[key] == "direct" and key not in self._written:
                self._live[key].data.copy_(value)
        for key in self._shadowed:
            if self._proof.classes[key] == "direct":
                self._live[key].data.copy_(self._shadow.tensor(key))
            for name in self._proof.copies.get(key, ()):
                self._live[name].data.copy_(self._shadow.named(key, name))
        owners = self._proof.owners
        changed = {layer for key in self._written for layer in owners.get(key, ())}
        other = {
            layer
            for key, layers in owners.items()
            if self._proof.classes.get(key) != "direct"
            for layer in layers
        }
        for name, layer in self._proof.layers.items():
            if not layer.deferred and name not in other and keeps_nothing(layer):
                continue
            if layer.deferred or name in changed:
                rerun(layer, self._config, self._loaded(layer))

    def _check_ties(self) -> None:
        """What vLLM tied must have arrived equal: one live storage cannot hold both."""
        faults = []
        for key, first in self._proof.tied.items():
            if key not in self._shadowed or first not in self._written:
                continue
            other = self._shadow.tensor(first) if first in self._shadowed else self._live[first]
            if not torch.equal(self._shadow.tensor(key), other):
                faults.append(
                    f"{key} differs from {first}; vLLM tied them when they were equal in its "
                    "checkpoint: start the engine on a checkpoint where they differ"
                )
        if faults:
            raise RecordingError("tied weights arrived with different values", faults)

    def abandon(self) -> None:
        """Nothing to undo: live parameters change in `commit` only, or are fenced."""

    def _loaded(self, layer: Layer) -> dict[str, torch.Tensor]:
        """Repacked parameters of a layer, in load layout, by local name."""
        prefix = layer.parameter_name("")
        received = {key: self._shadow.tensor(key) for key in self._shadowed}
        values = {
            key: value
            for key, value in {**self._proof.kept, **received}.items()
            if self._proof.classes[key] == "repacked"
        }
        loaded = {}
        for key, value in values.items():
            for name in self._recorded.slots[key].names:
                local = name.removeprefix(prefix)
                if name.startswith(prefix) and "." not in local:
                    loaded[local] = value
        return loaded

    def _apart(self, key: str) -> bool:
        """Whether a slot cannot be received in live storage."""
        computed = bool(self._recorded.landings.programs.get(key))
        beside = key in self._proof.tied or key in self._proof.copies
        return computed or beside or self._proof.classes.get(key) != "direct"

    def _build_tables(self) -> dict[DType, PieceTable]:
        pieces: dict[DType, dict[FQN, list[Piece]]] = defaultdict(lambda: defaultdict(list))
        if not self.faults:
            for landing in self._recorded.landings.landings:
                pieces[wire_dtype(landing, self._specs[landing.name].dtype)][landing.name].append(
                    landing.piece
                )
        return {dtype: PieceTable(by_name) for dtype, by_name in sorted(pieces.items())}

    def _place(self, piece: Piece) -> torch.Tensor:
        if piece.storage in self._shadow.flat or piece.storage in self._shadow.stages:
            return self._shadow.place(piece.storage, piece.view)
        return self._live_view(piece.storage, piece.view)

    def _live_view(self, key: str, view: StridedView) -> torch.Tensor:
        """A view of a slot's load-layout storage, in the live parameter."""
        live = self._live[key].data
        start = live.storage_offset() - self._recorded.slots[key].offset
        return live.as_strided(view.shape, view.stride, start + view.offset)
