"""Publishes policy versions to all engines, one trainer rank's part of it.

Each engine has its own session and group; one that fails does not hold up the others. Not here:
when to publish (`hook.py`), one engine (`link.py`).
"""

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from reshard.errors import EngineError, ReshardError
from reshard.ids import PolicyVersion
from reshard_trainer.census import Census, Holdings
from reshard_trainer.link import EngineLink, Staged
from reshard_trainer.publication import Outcome, Publication
from reshard_trainer.replicas import ReplicaCheck
from reshard_trainer.reports import EngineReport, EngineState
from reshard_trainer.run import TrainerRun
from reshard_trainer.storing import Storing
from reshard_trainer.verdicts import Verdict

logger = logging.getLogger(__name__)

Step = TypeVar("Step")

_STATES: Mapping[EngineState, str] = {
    "serving": "The engine serves on with the weights that it had.",
    "held": "The engine is held (paused) until a refit succeeds.",
    "unknown": "What the engine does now is not known; the next refit finds out.",
}


class Publisher:
    """Brings engines to the trainer's weights; all trainer ranks call each method together."""

    def __init__(
        self, run: TrainerRun, links: Sequence[EngineLink], close_rest: Callable[[], None]
    ) -> None:
        """Take over.

        Args:
            run: this rank's place.
            links: to each engine, in the same order on all ranks.
            close_rest: closes, after the engines were left, what was opened for the run.
        """
        self._run = run
        self._links = tuple(links)
        self._close_rest = close_rest
        self._census = Census(run)
        self._replicas = ReplicaCheck(run)
        self._storing = Storing(run)
        self.holdings = Holdings("", ())

    def connect(self) -> None:
        """Open all sessions, so that what does not fit is told before the first step.

        Raises:
            ReshardError: an engine cannot be refitted, or the weights cannot be published.
        """
        self.meet()
        for number, link in enumerate(self._links):
            self._align(number, link)
        verdicts = _for_each(self._links, self._at_once, lambda link: link.connect(self.holdings))
        self._raise_failures(verdicts, "could not be connected")

    @property
    def engines(self) -> frozenset[str]:
        """Names of all."""
        return frozenset(link.name for link in self._links)

    def meet(self, busy: Collection[str] = ()) -> frozenset[str]:
        """All ranks agree on what they hold, on where they stand with each engine, on who is busy.

        Args:
            busy: engines that this rank still sends an earlier version.

        Returns:
            those that rank 0 has done with: each other rank waits until it has, too.

        Raises:
            ReshardError: the weights cannot be published; no engine was touched.
        """
        self.holdings = self._census.take(
            [link.standing for link in self._links],
            self._replicas.checked,
            [number for number, link in enumerate(self._links) if link.name in busy],
        )
        return frozenset(
            link.name for number, link in enumerate(self._links) if number not in self._census.busy
        )

    def begin(
        self, version: PolicyVersion, engines: Collection[str], start: float, *, apart: bool = False
    ) -> list[Publication]:
        """Begin to bring engines to `version`, the weights as they are now; all ranks have met.

        Args:
            version: of the weights.
            engines: names; none of them is busy on any rank.
            start: when the publish began, on the performance counter.
            apart: each engine on its own, as far as the device allows it.

        Returns:
            what has still to be run; what held up the training so far counts to the first.

        Raises:
            ReshardError: the weights cannot be published; no engine was touched.
        """
        links = []
        for number, link in enumerate(self._links):
            if link.name in engines:
                self._align(number, link)
                links.append(link)
        self._replicas.prepare(self._census, self.holdings)
        if self._run.source.device.type == "cuda":
            torch.cuda.current_stream(self._run.source.device).synchronize()
        self._store(version)
        connected = _for_each(links, self._at_once, lambda link: link.connect(self.holdings))
        # Live shards move into shared memory at their first refit: nobody may read them meanwhile.
        at_once = self._at_once and self._run.settings.share != "live"
        staged = _for_each(links, at_once, lambda link: link.stage(connected[link.name]))
        together = [[link] for link in links] if apart and self._at_once else [links]
        return [
            self._publication(version, each, start if number == 0 else None, staged)
            for number, each in enumerate(together)
            if each
        ]

    def _publication(
        self,
        version: PolicyVersion,
        links: Sequence[EngineLink],
        start: float | None,
        staged: Mapping[str, Staged],
    ) -> Publication:
        names = [link.name for link in links]
        leases = [name for name in names if not staged[name].kept]
        began = time.perf_counter() if start is None else start
        return Publication(
            version, names, began, leases, lambda under: self._complete(under, links, staged)
        )

    def _complete(
        self, publication: Publication, links: Sequence[EngineLink], staged: Mapping[str, Staged]
    ) -> Outcome:
        """Bring engines to what was staged."""
        version = publication.version
        verdicts = _for_each(
            links,
            self._at_once,
            lambda link: link.complete(
                version, staged[link.name], lambda: publication.release(link.name)
            ),
        )
        reports = {
            name: verdict.report or _failed(name, verdict) for name, verdict in verdicts.items()
        }
        return reports, _failure(verdicts, f"did not get version {version}")

    def close(self) -> None:
        """Leave all engines, then the board."""
        for link in self._links:
            link.close()
        self._close_rest()

    def _store(self, version: PolicyVersion) -> None:
        try:
            self._storing.write(version)
        except ReshardError as error:
            if self._run.settings.on_failure == "raise":
                raise
            logger.warning("%s", error)

    @property
    def _at_once(self) -> bool:
        """Not on GPUs: collectives of two communicators must start in one order on all ranks."""
        return self._run.source.device.type != "cuda"

    def _align(self, number: int, link: EngineLink) -> None:
        link.align([standings[number] for standings in self._census.standings])

    def _raise_failures(self, verdicts: Mapping[str, Verdict], what: str) -> None:
        error = _failure(verdicts, what)
        if error is None:
            return
        if self._run.settings.on_failure == "raise":
            raise error
        logger.warning("%s", error)


def _for_each(
    links: Sequence[EngineLink], at_once: bool, step: Callable[[EngineLink], Step]
) -> dict[str, Step]:
    """A step with each engine; at once, so that a slow one holds up none."""
    if len(links) < 2 or not at_once:
        return {link.name: step(link) for link in links}
    with ThreadPoolExecutor(len(links), thread_name_prefix="reshard-engine") as pool:
        return dict(zip((link.name for link in links), pool.map(step, links), strict=True))


def _failed(name: str, verdict: Verdict) -> EngineReport:
    text = verdict.error.text if verdict.error else "unknown"
    return EngineReport(engine=name, error=text, state=verdict.state)


def _failure(verdicts: Mapping[str, Verdict], what: str) -> ReshardError | None:
    """One error for all engines that failed; a lone engine's keeps its type."""
    failed = {name: verdict for name, verdict in verdicts.items() if verdict.error is not None}
    if not failed:
        return None
    texts = {
        name: f"{verdict.error.text}\n{_STATES[verdict.state]}"
        for name, verdict in failed.items()
        if verdict.error is not None
    }
    if len(verdicts) > 1:
        faults = [f"{name}: {text}" for name, text in texts.items()]
        return EngineError(f"{len(failed)} of {len(verdicts)} engines {what}", faults)
    ((name, verdict),) = failed.items()
    assert verdict.error is not None
    error = verdict.error.error()
    lone = type(error)(f"engine {name} {what}: {texts[name]}")
    lone.faults = error.faults
    return lone
