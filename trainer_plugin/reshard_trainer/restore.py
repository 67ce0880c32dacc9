"""Brings engines to a version in a store, without the trainer that wrote it.

For an engine that joined late, was restarted, or cannot reach the trainer. This process stands in
for the trainer's rank 0 and sends no weights: each engine rank reads the regions that it needs, and
they are planned, received, verified and installed as in any other refit.
"""

import time
from collections.abc import Sequence
from pathlib import Path

import torch

from reshard.board import Deadline
from reshard.engine_control import EngineControl
from reshard.ids import FQN, PolicyVersion, TrainerRank
from reshard.layout.holding import TensorLayout
from reshard.layout.region import Region
from reshard.layout.table import PieceTable
from reshard.session import Install, StoredAt
from reshard.store import StoreReader, VersionGone
from reshard.store.retire import sealed_versions
from reshard_trainer.ensemble import Ensemble, GlobalRank
from reshard_trainer.reports import RefitReport
from reshard_trainer.settings import PrefixCache
from reshard_trainer.startup import Request, start


class StoredSource:
    """A stored version as a weight source whose weights nobody reads here.

    Attributes:
        device: of this process.
        table: empty.
        moves: none.
        unused: nothing.
        prepares: nothing.
    """

    unused: tuple[str, ...] = ()
    prepares = False

    def __init__(self, reader: StoreReader) -> None:
        """Describe a version."""
        wholes = {
            part.name: TensorLayout(
                FQN(part.name), part.shape, part.dtype, (Region.whole(part.shape),)
            )
            for part in reader.stored.parts
        }
        self._layout = tuple(wholes[name] for name in sorted(wholes))
        self.device = torch.device("cpu")
        self.table = PieceTable({})
        self.moves = 0

    def layout(self) -> tuple[TensorLayout, ...]:
        """All of every tensor."""
        return self._layout

    def storage(self, key: str) -> torch.Tensor:
        """There is none: engine ranks read the store themselves."""
        raise LookupError(f"{key} lies in a store, not in this process")

    def refresh(self) -> None:
        """A sealed version never changes."""

    def prepare(self, deadline: Deadline) -> None:
        """Nothing to compute."""


def restore(
    engines: Sequence[str | EngineControl],
    folder: str | Path,
    *,
    version: int | None = None,
    deadline: float = 120.0,
    install: Install = "staged",
    prefix_cache: PrefixCache = "reset",
    takeover: bool = False,
    host: str = "",
) -> RefitReport:
    """Bring engines to a stored version; returns when all serve it.

    Args:
        engines: URLs of vLLM servers, or objects with `reshard.engine_control.EngineControl`.
        folder: `<store>/<run id>` as `attach(store=...)` filled it, under the same path on every
            engine rank's machine.
        version: which; None: the newest.
        deadline: bound of each phase, in seconds.
        install: `staged` or `in_place`.
        prefix_cache: `reset` or `keep`.
        takeover: replace the session of a trainer that is still there.
        host: address on which this process listens; empty: that from which engines are reached.

    Raises:
        StoreError: there is no such version, or it is half written or damaged.
        ReshardError: an engine did not get it; it serves on with what it had unless the error says
            otherwise.
    """
    root = Path(folder).absolute()
    reader = StoreReader(root, newest(root) if version is None else version)
    stored = StoredAt(str(root), reader.stored.version, reader.stored.run_id)
    settings: dict[str, object] = {
        "deadline_seconds": deadline,
        "install": install,
        "prefix_cache": prefix_cache,
        "takeover": takeover,
        "verify": "never",  # each block that is read is verified by the store's digest
        "host": host,
        "stored": stored,
    }
    alone = Ensemble(TrainerRank(0), (GlobalRank(0),))
    request = Request(engines, settings, f"{stored.run_id}-restored", stored.version)
    started = start(request, alone, lambda: StoredSource(reader))
    publisher = started.publisher
    try:
        publisher.connect()
        free = publisher.meet()
        (publication,) = publisher.begin(PolicyVersion(stored.version), free, time.perf_counter())
        publication.run()
        report, error = publication.result(Deadline.after(deadline))
    finally:
        publisher.close()
    if error is not None:
        raise error
    return report


def newest(folder: Path) -> int:
    """The newest version that can be read.

    Raises:
        VersionGone: there is none.
    """
    versions = sealed_versions(folder)
    if not versions:
        raise VersionGone(
            f"{folder} holds no sealed version; give the folder of one run, <store>/<run id>"
        )
    return versions[-1]
