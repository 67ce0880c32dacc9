"""Replicas: elements that several trainer ranks hold must be the same elements on all of them.

A plain tensor may be one replica of many (DDP), or a rank's own (a stage's, an expert's, under a
name that was not made global). Digests tell: each rank adds up those of all that it shares with the
same other ranks, so that a check is one number a set of ranks; only where numbers differ are the
tensors gone through. Not here: the digest itself (`reshard.digest`).
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from reshard.agreement import gather
from reshard.board import Deadline
from reshard.digest import add, digest_region
from reshard.errors import LayoutError
from reshard.ids import FQN, GroupRank
from reshard.layout.boxes import partition
from reshard.layout.holding import RankLayout
from reshard.layout.region import Region
from reshard.layout.side import SideLayout
from reshard.wire import decode, encode
from reshard_trainer.census import Census, Holdings
from reshard_trainer.run import TrainerRun
from reshard_trainer.sources import WeightSource, views
from reshard_trainer.verdicts import ErrorRecord, raise_errors

Holders = tuple[int, ...]
"""Trainer ranks that hold the same elements, ascending; two at least."""


@dataclass(frozen=True, slots=True)
class Shared:
    """Elements that several ranks hold.

    Attributes:
        name: canonical name.
        region: global.
    """

    name: FQN
    region: Region


class Answer(msgspec.Struct, frozen=True):
    """What one rank says in a check.

    Attributes:
        error: why it cannot say more; None if it can.
        layout: what it holds.
        digests: of what it shares, in the order that all ranks give it.
    """

    error: ErrorRecord | None = None
    layout: RankLayout | None = None
    digests: tuple[int, ...] = ()


class ReplicaCheck:
    """Readies the source's values before a publish, and compares those that several ranks hold.

    Attributes:
        checked: digest of the holdings that this rank has compared last.
    """

    def __init__(self, run: TrainerRun) -> None:
        self.checked = ""
        self._run = run
        self._scope = ""
        self._read_scope = ""

    def prepare(self, census: Census, holdings: Holdings) -> None:
        """Have all ranks prepare their sources, then compare digests; each only where it is due.

        Args:
            census: the last one, in which all ranks have said what is due.
            holdings: that it found.

        Raises:
            LayoutError: ranks hold different content under one name; the same error on every rank.
            ReshardError: a source could not be prepared; likewise.
            DeadlineExceeded: names the ranks that did not come.
        """
        self._scope = f"trainer/replicas{census.number}"
        deadline = Deadline.after(self._run.settings.deadline_seconds)
        when = self._run.settings.replicas
        # A rank that fell out of step in the last check has not done it: then all do it again.
        due = when == "always" or (when == "first" and not census.checked)
        compares = due and self._run.size > 1
        if census.prepares:
            self._exchange("prepared", lambda: self._prepared(deadline), deadline)
        if compares:
            self._compare(deadline)
        self.checked = holdings.digest
        if census.prepares or compares:
            if self._run.rank == 0 and self._read_scope:
                # All ranks have come to a later exchange, and so have read this one.
                self._run.board.delete_prefix(f"{self._read_scope}/")
            self._read_scope = self._scope

    def _prepared(self, deadline: Deadline) -> Answer:
        self._run.source.prepare(deadline)
        return Answer()

    def _layout(self) -> Answer:
        return Answer(layout=RankLayout(self._run.rank, self._run.source.layout()))

    def _compare(self, deadline: Deadline) -> None:
        told = self._exchange("layouts", self._layout, deadline)
        layouts = [answer.layout for answer in told.values() if answer.layout is not None]
        sets = list(shared_by_holders(layouts).items())
        sums = self._exchange("sums", lambda: self._digests(sets), deadline)
        suspects = [
            (holders, [each])
            for at, (holders, shared) in enumerate(sets)
            if _differ(sums, holders, at)
            for each in shared
        ]
        if not suspects:
            return
        found = self._exchange("tensors", lambda: self._digests(suspects), deadline)
        raise LayoutError(
            "trainer ranks hold different content under one name; nothing was sent (give what "
            'differs names of its own with `rename`, or make it equal; `replicas="never"` takes '
            "any rank's)",
            _faults(suspects, found),
        )

    def _digests(self, sets: Sequence[tuple[Holders, Sequence[Shared]]]) -> Answer:
        """The digest of each set; zero for what only other ranks hold."""
        source, rank = self._run.source, self._run.rank
        return Answer(
            digests=tuple(
                add(*(_digest(source, each) for each in shared)) if rank in holders else 0
                for holders, shared in sets
            )
        )

    def _exchange(
        self, step: str, own: Callable[[], Answer], deadline: Deadline
    ) -> dict[int, Answer]:
        """Every rank's answer; an error of any is one of all."""
        try:
            answer = own()
        except Exception as error:
            answer = Answer(ErrorRecord.of(error))
        size = self._run.size
        raw = gather(
            self._run.board,
            f"{self._scope}/{step}",
            self._run.rank,
            range(size),
            encode(answer),
            deadline,
            trainer_size=size,
        )
        answers = {
            rank: decode(each, Answer, sender=f"trainer rank {rank}") for rank, each in raw.items()
        }
        raise_errors({rank: each.error for rank, each in answers.items() if each.error})
        return answers


def shared_by_holders(layouts: Iterable[RankLayout]) -> dict[Holders, list[Shared]]:
    """What several ranks hold, by who holds it; in an order that all ranks give it."""
    found: dict[Holders, list[Shared]] = defaultdict(list)
    for group in SideLayout.from_ranks(layouts).groups:
        ranks: list[GroupRank] = []
        regions: list[Region] = []
        for rank, held in group.by_rank:
            ranks += [rank] * len(held)
            regions += held
        for cell, members in partition(regions):
            holders = tuple(sorted({int(ranks[member]) for member in members}))
            if len(holders) > 1:
                found[holders] += [Shared(name, cell) for name in group.names]
    return dict(sorted(found.items()))


def _digest(source: WeightSource, shared: Shared) -> int:
    held = views(source, shared.name, shared.region)
    return add(*(digest_region(shared.name, region, values) for region, values in held))


def _differ(answers: Mapping[int, Answer], holders: Holders, at: int) -> bool:
    return len({answers[rank].digests[at] for rank in holders}) > 1


def _faults(
    suspects: Sequence[tuple[Holders, Sequence[Shared]]], found: Mapping[int, Answer]
) -> Iterator[str]:
    for at, (holders, (shared,)) in enumerate(suspects):
        if not _differ(found, holders, at):
            continue
        alike: dict[int, list[int]] = defaultdict(list)
        for rank in holders:
            alike[found[rank].digests[at]].append(rank)
        sides = (
            f"on trainer rank{'s' * (len(r) > 1)} {', '.join(map(str, r))}" for r in alike.values()
        )
        yield f"{shared.name}: {shared.region} is one thing {', another '.join(sides)}"
