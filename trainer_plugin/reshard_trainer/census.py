"""The census: before each publish all trainer ranks agree on what they hold.

Also where ranks meet that come from their optimizer steps at different times. Not here: engines.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from reshard.agreement import gather
from reshard.board import BoardClient, Deadline
from reshard.errors import LayoutError, PeerError, ReshardError
from reshard.layout.holding import TensorLayout
from reshard.session import TensorSpec
from reshard.wire import decode, encode
from reshard_trainer.run import TrainerRun
from reshard_trainer.sources import WeightSource
from reshard_trainer.verdicts import ErrorRecord


class SourceReport(msgspec.Struct, frozen=True):
    """What one rank says of its weights.

    Attributes:
        error: why they cannot be published; None if they can.
        digest: of its layout.
        specs: its tensors, where the layout is not that of its last report.
    """

    error: ErrorRecord | None
    digest: str = ""
    specs: tuple[TensorSpec, ...] = ()


@dataclass(frozen=True, slots=True)
class Holdings:
    """What the trainer holds, the same on every rank.

    Attributes:
        digest: of all ranks' layouts; a change of any makes another.
        specs: the canonical tensors, sorted by name.
    """

    digest: str
    specs: tuple[TensorSpec, ...]


class Census:
    """Takes the census again and again; static facts travel once a layout."""

    def __init__(self, run: TrainerRun) -> None:
        self._run = run
        self._number = 0
        self._reported: tuple[TensorLayout, ...] | None = None
        self._digest = ""
        self._digests: dict[int, str] = {}
        self._specs: dict[int, tuple[TensorSpec, ...]] = {}
        self._holdings = Holdings("", ())

    def take(self) -> Holdings:
        """Look at this rank's weights again, and hear of all others'.

        Raises:
            LayoutError: weights that cannot be published; the same error on every rank.
            DeadlineExceeded: names the ranks that did not come.
        """
        self._number += 1
        prefix = "trainer/census"
        deadline = Deadline.after(self._run.settings.deadline_seconds)
        board, size = self._run.board, self._run.size
        answers = gather(
            board,
            f"{prefix}{self._number}",
            self._run.rank,
            range(size),
            encode(self._own_report()),
            deadline,
            trainer_size=size,
        )
        if self._run.rank == 0 and self._number > 2:
            board.delete_prefix(f"{prefix}{self._number - 2}/")
        reports = {rank: decode(raw, SourceReport) for rank, raw in answers.items()}
        _raise_faults(reports)
        self._note(reports)
        return self._holdings

    def _own_report(self) -> SourceReport:
        source = self._run.source
        try:
            source.refresh()
        except Exception as error:
            self._reported = None
            return SourceReport(ErrorRecord.of(error))
        layout = source.layout()
        if layout is self._reported:
            return SourceReport(None, self._digest)
        self._reported = layout
        self._digest = hashlib.sha256(encode(layout)).hexdigest()
        specs = tuple(TensorSpec(tensor.name, tensor.shape, tensor.dtype) for tensor in layout)
        return SourceReport(None, self._digest, specs)

    def _note(self, reports: dict[int, SourceReport]) -> None:
        digests = {rank: report.digest for rank, report in reports.items()}
        self._specs |= {rank: report.specs for rank, report in reports.items() if report.specs}
        if digests == self._digests:
            return
        digest = hashlib.sha256(encode(sorted(digests.items()))).hexdigest()
        self._holdings = Holdings(digest, _merge(self._specs))
        self._digests = digests


def make_source(
    board: BoardClient, rank: int, size: int, make: Callable[[], WeightSource], deadline: Deadline
) -> WeightSource:
    """This rank's source, once all ranks have theirs.

    Raises:
        LayoutError: some rank's weights cannot be published; the same error on every rank.
        DeadlineExceeded: names the ranks that did not come.
    """
    source: WeightSource | None = None
    error: ErrorRecord | None = None
    try:
        source = make()
    except Exception as failure:
        error = ErrorRecord.of(failure)
    own = encode(SourceReport(error))
    key = "trainer/sources"
    answers = gather(board, key, rank, range(size), own, deadline, trainer_size=size)
    _raise_faults({each: decode(raw, SourceReport) for each, raw in answers.items()})
    assert source is not None
    return source


def _raise_faults(reports: dict[int, SourceReport]) -> None:
    errors = {rank: report.error for rank, report in reports.items() if report.error}
    if not errors:
        return
    faults = [
        f"trainer rank {rank}: {line}"
        for rank, error in errors.items()
        for line in error.faults or (error.text,)
    ]
    same_kind = {error.kind for error in errors.values()} == {LayoutError.__name__}
    kind: type[ReshardError] = LayoutError if same_kind else PeerError
    raise kind("the trainer's weights cannot be published; nothing was sent", faults)


def _merge(specs: dict[int, tuple[TensorSpec, ...]]) -> tuple[TensorSpec, ...]:
    """All ranks' tensors; ranks that share a name must agree on shape and dtype."""
    merged: dict[str, TensorSpec] = {}
    faults = []
    for rank, tensors in sorted(specs.items()):
        for spec in tensors:
            known = merged.setdefault(spec.name, spec)
            if known != spec:
                faults.append(
                    f"{spec.name}: {spec.dtype} {spec.shape} on trainer rank {rank}, "
                    f"{known.dtype} {known.shape} on a rank before it"
                )
    if faults:
        raise LayoutError("trainer ranks disagree on their tensors; nothing was sent", faults)
    return tuple(spec for _, spec in sorted(merged.items()))
