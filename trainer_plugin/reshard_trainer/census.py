"""The census: before each publish all trainer ranks agree on what they hold.

Also where ranks meet that come from their optimizer steps at different times. Not here: engines,
the content of what is held (`replicas.py`).
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from reshard.agreement import gather, rank_name
from reshard.board import BoardClient, Deadline
from reshard.errors import DeadlineExceeded, LayoutError, ReshardError
from reshard.layout.holding import TensorLayout
from reshard.session import TensorSpec
from reshard.wire import decode, encode
from reshard_trainer.run import TrainerRun
from reshard_trainer.sources import WeightSource
from reshard_trainer.verdicts import REPORT_SECONDS, ErrorRecord, raise_errors

_VERDICT_SECONDS = 5.0


class Standing(msgspec.Struct, frozen=True):
    """How far one rank has come with one engine.

    Attributes:
        epoch: of its last session.
        attempt: its last refit in it.
        open: whether that session stands.
    """

    epoch: int
    attempt: int
    open: bool


class SourceReport(msgspec.Struct, frozen=True):
    """What one rank says of its weights.

    Attributes:
        error: why they cannot be published; None if they can.
        digest: of its layout.
        specs: its tensors, where the layout is not that of its last report.
        standings: with each engine.
        unused: what was asked for and concerns none of its tensors.
        prepares: whether its source has to bring values up to date.
        checked: digest of the holdings whose replicas it has compared.
        busy: numbers of the engines that still take an earlier version, as this rank sees it.
    """

    error: ErrorRecord | None
    digest: str = ""
    specs: tuple[TensorSpec, ...] = ()
    standings: tuple[Standing, ...] = ()
    unused: tuple[str, ...] = ()
    prepares: bool = False
    checked: str = ""
    busy: tuple[int, ...] = ()


class CensusVerdict(msgspec.Struct, frozen=True):
    """Trainer rank 0 says whether all ranks have come.

    Attributes:
        error: why not; None if they have.
    """

    error: ErrorRecord | None = None


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
    """Takes the census again and again; static facts travel once a layout.

    Attributes:
        number: of the last census; the same on all ranks that came through it.
        standings: by rank, with each engine, as told in the last census.
        prepares: whether any rank's source has to bring values up to date.
        checked: whether all ranks have compared the replicas of these holdings.
        busy: numbers of the engines that still take an earlier version: rank 0's word for all.
    """

    def __init__(self, run: TrainerRun) -> None:
        self._run = run
        self.number = 0
        self._reported: tuple[TensorLayout, ...] | None = None
        self._digest = ""
        self._digests: dict[int, str] = {}
        self._specs: dict[int, tuple[TensorSpec, ...]] = {}
        self._holdings = Holdings("", ())
        self.standings: tuple[tuple[Standing, ...], ...] = ()
        self.prepares = False
        self.checked = False
        self.busy: tuple[int, ...] = ()

    def take(
        self, standings: Sequence[Standing], checked: str = "", busy: Sequence[int] = ()
    ) -> Holdings:
        """Look at this rank's weights again, and hear of all others'.

        Args:
            standings: of this rank, with each engine.
            checked: digest of the holdings whose replicas this rank has compared.
            busy: numbers of the engines that this rank still sends an earlier version.

        Raises:
            LayoutError: weights that cannot be published; the same error on every rank.
            DeadlineExceeded: names the ranks that did not come.
        """
        self.number += 1
        prefix = "trainer/census"
        deadline = Deadline.after(self._run.settings.deadline_seconds)
        own = msgspec.structs.replace(
            self._own_report(), standings=tuple(standings), checked=checked, busy=tuple(busy)
        )
        try:
            self._meet(f"{prefix}{self.number}", encode(own), deadline)
        except BaseException:
            # Not all have taken in what this rank said: it says it all again.
            self._reported = None
            raise
        if self._run.rank == 0 and self.number > 2:
            self._run.board.delete_prefix(f"{prefix}{self.number - 2}/")
        return self._holdings

    def _meet(self, scope: str, own: bytes, deadline: Deadline) -> None:
        """All ranks' reports; whether they will do, and came in time, is for rank 0 to say."""
        run, key = self._run, f"{scope}/verdict"
        if run.rank != 0:
            run.board.put(f"{scope}/{run.rank}", own, deadline)
            # Rank 0 waits for the others as long, and then has to say so.
            patience = Deadline.after(deadline.remaining() + _VERDICT_SECONDS)
            found = run.board.get_all((key,), patience)
            if found.missing:
                raise DeadlineExceeded(
                    f"no answer from {rank_name(0, run.size)} in phase census within "
                    f"{patience.seconds:g} s"
                )
            verdict = decode(found.values[key], CensusVerdict, sender="trainer rank 0")
            if verdict.error is not None:
                raise verdict.error.error()
            keys = [f"{scope}/{rank}" for rank in range(run.size)]
            values = run.board.look(keys).values
            self._take_in({rank: values[each] for rank, each in enumerate(keys)})
            return
        try:
            answers = gather(
                run.board, scope, 0, range(run.size), own, deadline, trainer_size=run.size
            )
            if deadline.expired:
                # It was stopped, or starved: the others have given up on it.
                raise DeadlineExceeded(
                    f"trainer rank 0 did not come to the census within {deadline.seconds:g} s"
                )
            self._take_in(answers)
        except ReshardError as error:
            self._tell(key, CensusVerdict(ErrorRecord.of(error)))
            raise
        self._tell(key, CensusVerdict())

    def _take_in(self, answers: dict[int, bytes]) -> None:
        reports = _decoded(answers)
        _raise_faults(reports)
        _refuse_unused(reports)
        self._note(reports)
        self.standings = tuple(reports[rank].standings for rank in range(self._run.size))
        self.busy = reports[0].busy
        self.prepares = any(report.prepares for report in reports.values())
        self.checked = {report.checked for report in reports.values()} == {self._holdings.digest}

    def _tell(self, key: str, verdict: CensusVerdict) -> None:
        self._run.board.put(key, encode(verdict), Deadline.after(REPORT_SECONDS))

    def _own_report(self) -> SourceReport:
        source = self._run.source
        try:
            source.refresh()
        except Exception as error:
            self._reported = None
            return SourceReport(ErrorRecord.of(error))
        layout = source.layout()
        if layout is self._reported:
            return SourceReport(None, self._digest, unused=source.unused, prepares=source.prepares)
        self._reported = layout
        self._digest = hashlib.sha256(encode(layout)).hexdigest()
        specs = tuple(TensorSpec(tensor.name, tensor.shape, tensor.dtype) for tensor in layout)
        return SourceReport(
            None, self._digest, specs, unused=source.unused, prepares=source.prepares
        )

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
    _raise_faults(_decoded(answers))
    assert source is not None
    return source


def _decoded(answers: dict[int, bytes]) -> dict[int, SourceReport]:
    return {
        rank: decode(raw, SourceReport, sender=f"trainer rank {rank}")
        for rank, raw in answers.items()
    }


def _raise_faults(reports: dict[int, SourceReport]) -> None:
    raise_errors({rank: report.error for rank, report in reports.items() if report.error})


def _refuse_unused(reports: dict[int, SourceReport]) -> None:
    """A misspelt pattern would leave weights as they are, silently."""
    unused = set.intersection(*(set(report.unused) for report in reports.values()))
    if unused:
        raise LayoutError(
            "this fits no tensor on any trainer rank; nothing was sent", sorted(unused)
        )


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
