"""What follows each optimizer step: which publish begins, which has ended, what its manifest says.

Not here: how it is set up (`attaching.py`), what a publish does (`publisher.py`).
"""

import logging
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from types import TracebackType
from typing import Self

import torch

from reshard.board import Deadline
from reshard.errors import EngineError, ReshardError
from reshard.ids import PolicyVersion
from reshard.manifest import ManifestState, ShardManifest
from reshard_trainer.publication import Publication
from reshard_trainer.reports import EngineReport, RefitReport
from reshard_trainer.startup import Started

logger = logging.getLogger(__name__)


class Hook:
    """Publishes after optimizer steps, until it is closed. A context manager.

    Attributes:
        version: of the policy on this trainer: number of optimizer steps.
        manifest: of the present version.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        started: Started,
        on_manifest: Callable[[ShardManifest], None] | None,
        on_report: Callable[[RefitReport], None] | None = None,
    ) -> None:
        """Take over; `attach` makes it."""
        self.version = started.version
        self._last_report: RefitReport | None = None
        self._on_report = on_report
        self.manifest = ShardManifest(started.run.run_id, started.version)
        self._run = started.run
        self._publisher = started.publisher
        self._on_manifest = on_manifest
        self._sealed: dict[PolicyVersion, ShardManifest] = {}
        self._served: ShardManifest | None = None
        self._under_way: tuple[Publication, ...] = ()
        self._skipped: frozenset[str] = frozenset()
        self._closed = False
        self._handles = (
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            # Other ranks may not come to bring skipped engines up to date.
            self._skipped = frozenset()
        self.close()

    @property
    def last_report(self) -> RefitReport | None:
        """Of the last publish that has ended, whether or not all engines got it; None before it.

        With `busy_engines="skip"` each engine's part is that of its own last publish.
        """
        newest = self._last_report
        for publication in self._under_way:
            report = publication.report
            if report is not None:
                newest = _merged(newest, report)
        return newest

    def publish(self) -> RefitReport:
        """Bring all engines to the present weights now, under the present version.

        To be called on all trainer ranks; for the first weights of a run that was resumed.

        Raises:
            ReshardError: some engine did not get it (unless `on_failure="continue"`), or the
                weights cannot be published.
        """
        self._await(self._under_way, self._run.settings.patience_seconds)
        self._publish_to(self._publisher.engines)
        report = self.wait()
        assert report is not None
        return report

    def wait(self, deadline: float | None = None) -> RefitReport | None:
        """Wait until all engines serve what was published last; its report.

        To be called on all trainer ranks. Without `overlap` there is nothing to wait for. Engines
        that were skipped get the present weights, under the present version.

        Args:
            deadline: in seconds; None: what a refit takes at most.

        Raises:
            ReshardError: some engine did not get it (unless `on_failure="continue"`), or it is
                still under way at the deadline.
        """
        seconds = self._run.settings.patience_seconds if deadline is None else deadline
        self._await(self._under_way, seconds)
        if self._skipped:
            self._publish_to(self._skipped)
            self._await(self._under_way, self._run.settings.patience_seconds)
        return self._last_report

    def close(self) -> None:
        """Stop publishing; engines keep the weights that they have. Harmless when repeated."""
        if self._closed:
            return
        for handle in self._handles:
            handle.remove()
        try:
            self.wait()
        except ReshardError as error:
            logger.warning("the last publish before the end failed: %s", error)
        finally:
            self._closed = True
            self._publisher.close()

    def _after_step(self, *_: object) -> None:
        self.version = PolicyVersion(self.version + 1)
        self._emit(ShardManifest(self._run.run_id, self.version))
        if self.version % self._run.settings.publish_every:
            return
        if self._run.settings.overlap:
            for publication in self._begin():
                publication.start()
        else:
            self.publish()

    def _before_step(self, *_: object) -> None:
        """Weights that are still read may not change."""
        for publication in self._under_way:
            publication.await_release(self._run.settings.patience_seconds)

    def _publish_to(self, engines: Collection[str]) -> None:
        """Bring free engines to the present weights, beside each other."""
        first, *others = self._begin(engines)
        for publication in others:
            publication.start()
        first.run()

    def _begin(self, engines: Collection[str] | None = None) -> tuple[Publication, ...]:
        """Fix the values of the present version for some engines, or for all that are free."""
        if self._closed:
            raise ReshardError("this hook was closed; attach again")
        settings = self._run.settings
        if settings.busy_engines == "wait":
            self._await(self._under_way, settings.patience_seconds)
        start = time.perf_counter()
        busy = {
            name
            for publication in self._under_way
            if not publication.over
            for name in publication.engines
        }
        free = self._publisher.meet(busy)
        self._await(
            [each for each in self._under_way if each.engines <= free], settings.patience_seconds
        )
        if self.manifest.state is not ManifestState.DRAFT:
            self._emit(ShardManifest(self._run.run_id, self.version))
        wanted = free if engines is None else free.intersection(engines)
        begun = tuple(
            self._publisher.begin(
                self.version, wanted, start, apart=settings.busy_engines == "skip"
            )
        )
        self._under_way += begun
        self._skipped = (self._skipped | (self._publisher.engines - free)) - wanted
        self._emit(self.manifest.seal(self._publisher.holdings.digest))
        used = {publication.version for publication in self._under_way}
        self._sealed = {v: m for v, m in self._sealed.items() if v in used}
        self._sealed[self.version] = self.manifest
        return begun

    def _await(self, publications: Collection[Publication], seconds: float) -> None:
        """Wait for the end of these publishes, all before one deadline, and take in how they ended.

        Raises:
            ReshardError: some engine did not get its version (unless `on_failure="continue"`), or
                a publish is still under way.
        """
        deadline = Deadline.after(seconds)
        failures: list[ReshardError] = []
        for publication in publications:
            try:
                report, error = publication.result(deadline)
            except ReshardError as unfinished:
                failures.append(unfinished)
                continue
            finally:
                if publication.over:
                    self._under_way = tuple(p for p in self._under_way if p is not publication)
            self._last_report = _merged(self._last_report, report)
            if self._on_report is not None:
                self._on_report(report)
            self._note(report)
            if error is None:
                continue
            if self._run.settings.on_failure == "raise":
                failures.append(error)
            else:
                logger.warning("%s", error)
        if len(failures) == 1:
            raise failures[0]
        if failures:
            raise EngineError(f"{len(failures)} publishes failed", map(str, failures))

    def _note(self, report: RefitReport) -> None:
        """The sealed manifest moves on: published where an engine serves it."""
        plans = {
            name: engine.plan_digest for name, engine in report.engines.items() if not engine.error
        }
        sealed = self._sealed.pop(report.version, None) if plans else None
        if sealed is None:
            return  # nobody serves it, or another engine did before
        published = sealed.publish(plans)
        if self.manifest is sealed:
            self.manifest = published
        if self._on_manifest is not None:
            self._on_manifest(published)
        older, self._served = self._served, published
        if older is not None and older.version > published.version:
            older, self._served = published, older
        if older is not None and self._on_manifest is not None:
            self._on_manifest(older.retire())

    def _emit(self, manifest: ShardManifest) -> None:
        self.manifest = manifest
        if self._on_manifest is not None:
            self._on_manifest(manifest)


def _merged(older: RefitReport | None, report: RefitReport) -> RefitReport:
    """The newer of two reports, with the part of each engine that only the other one names."""
    if older is None:
        return report
    engines: dict[str, EngineReport] = {**older.engines, **report.engines}
    newest = report if report.version >= older.version else older
    return replace(newest, engines=engines)
