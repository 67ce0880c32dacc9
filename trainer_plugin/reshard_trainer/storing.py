"""Writes published versions to a store: each trainer rank its own shard, the manifest last.

Runs beside nothing: the weights may not change before they are written. Not here: the files
(`reshard.store`), reading them (`restore.py`).
"""

import time
from collections.abc import Callable
from pathlib import Path

import torch

from reshard.agreement import gather
from reshard.board import Deadline
from reshard.ids import FQN, PolicyVersion
from reshard.layout.holding import RankLayout
from reshard.layout.region import Region
from reshard.store import StoreError, retire, seal, write_shard
from reshard.transport.places import part
from reshard.wire import decode, encode
from reshard_trainer.run import TrainerRun
from reshard_trainer.sources import views
from reshard_trainer.verdicts import ErrorRecord


class Storing:
    """One trainer rank's part of the run's store, at `<store>/<run id>`.

    Attributes:
        seconds: that the last version took on this rank.
    """

    def __init__(self, run: TrainerRun) -> None:
        self._run = run
        self._number = 0
        self.seconds = 0.0

    def write(self, version: PolicyVersion) -> None:
        """Write and seal the weights as they are now; older versions are retired.

        Raises:
            StoreError: a rank could not write; all ranks' errors, the same on every rank. What was
                sealed before stays readable.
            DeadlineExceeded: names the ranks that did not come.
        """
        run = self._run
        if not run.settings.store:
            return
        start = time.perf_counter()
        self._number += 1
        folder = folder_of_run(run)
        layout = RankLayout(run.rank, run.source.layout())
        self._together(
            "written", lambda: write_shard(folder, run.run_id, version, layout, self._read), version
        )

        def close() -> None:
            if run.rank == 0:
                seal(folder, run.run_id, version, run.size)
                retire(folder, run.settings.keep)

        self._together("sealed", close, version)
        self.seconds = time.perf_counter() - start

    def _together(self, step: str, work: Callable[[], None], version: PolicyVersion) -> None:
        """Do a step on all ranks; how it went is the same on all."""
        run = self._run
        errors: tuple[ErrorRecord, ...] = ()
        try:
            work()
        except Exception as failure:
            errors = (ErrorRecord.of(failure),)
        deadline = Deadline.after(run.settings.deadline_seconds)
        scope = f"trainer/store{self._number}/{step}"
        answers = gather(run.board, scope, run.rank, range(run.size), encode(errors), deadline)
        if run.rank == 0 and self._number > 2:
            run.board.delete_prefix(f"trainer/store{self._number - 2}/")
        faults = [
            f"trainer rank {rank}: {record.text}"
            for rank, raw in answers.items()
            for record in decode(raw, tuple[ErrorRecord, ...])
        ]
        if faults:
            raise StoreError(
                f"version {version} could not be {step} in {run.settings.store}; "
                "versions that are sealed stay readable",
                faults,
            )

    def _read(self, name: FQN, region: Region) -> torch.Tensor:
        """A held region, of its shape."""
        held = views(self._run.source, name, region)
        first, values = held[0]
        if first == region:
            return values
        whole = torch.empty(region.shape, dtype=values.dtype, device=values.device)
        for each, values in held:
            part(whole, region, each).copy_(values)
        return whole


def folder_of_run(run: TrainerRun) -> Path:
    """Where this run's versions lie."""
    return Path(run.settings.store) / run.run_id
