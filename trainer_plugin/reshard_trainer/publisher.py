"""Publishes policy versions to all engines, one trainer rank's part of it.

Each engine has its own session and group; one that fails does not hold up the others. Not here:
when to publish (`hook.py`), one engine (`link.py`).
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from reshard.errors import EngineError, ReshardError
from reshard.ids import PolicyVersion
from reshard_trainer.census import Census, Holdings
from reshard_trainer.link import EngineLink
from reshard_trainer.reports import EngineReport, EngineState, RefitReport
from reshard_trainer.run import TrainerRun
from reshard_trainer.verdicts import Verdict

logger = logging.getLogger(__name__)

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
        self.holdings = Holdings("", ())

    def connect(self) -> None:
        """Open all sessions, so that what does not fit is told before the first step.

        Raises:
            ReshardError: an engine cannot be refitted, or the weights cannot be published.
        """
        self.holdings = self._census.take()
        verdicts = self._for_each(lambda link: link.connect(self.holdings))
        self._raise_failures(verdicts, "could not be connected")

    def publish(self, version: PolicyVersion) -> tuple[RefitReport, ReshardError | None]:
        """Bring all engines to `version`, the weights as they are now.

        Returns:
            What was done, and the error to raise if some engine did not get the version.

        Raises:
            ReshardError: the weights cannot be published; no engine was touched.
        """
        start = time.perf_counter()
        self.holdings = self._census.take()
        if self._run.source.device.type == "cuda":
            torch.cuda.current_stream(self._run.source.device).synchronize()
        verdicts = self._for_each(lambda link: link.refit(version, self.holdings))
        reports = {
            name: verdict.report or _failed(name, verdict) for name, verdict in verdicts.items()
        }
        report = RefitReport(version, time.perf_counter() - start, reports)
        return report, _failure(verdicts, f"did not get version {version}")

    def close(self) -> None:
        """Leave all engines, then the board."""
        for link in self._links:
            link.close()
        self._close_rest()

    def _for_each(self, step: Callable[[EngineLink], Verdict]) -> dict[str, Verdict]:
        """A step with every engine: at once on CPUs, so that a slow one holds up none.

        On GPUs one after the other: collectives of two communicators must start in the same order
        on all ranks.
        """
        links = self._links
        if len(links) < 2 or self._run.source.device.type == "cuda":
            return {link.name: step(link) for link in links}
        with ThreadPoolExecutor(len(links), thread_name_prefix="reshard-engine") as pool:
            return dict(zip((link.name for link in links), pool.map(step, links), strict=True))

    def _raise_failures(self, verdicts: Mapping[str, Verdict], what: str) -> None:
        error = _failure(verdicts, what)
        if error is None:
            return
        if self._run.settings.on_failure == "raise":
            raise error
        logger.warning("%s", error)


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
