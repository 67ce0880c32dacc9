"""One publish that is under way, and what it keeps the training from.

The values of a version are fixed by the time it exists: kept in a snapshot, or held by a *lease*,
under which the weights may not change before their bytes have been read. The rest can run beside
the next forward and backward pass. Not here: what it does (`publisher.py`), when (`hook.py`).
"""

import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future

from reshard.board import Deadline
from reshard.errors import DeadlineExceeded, ReshardError
from reshard.ids import PolicyVersion
from reshard_trainer.reports import EngineReport, RefitReport

Outcome = tuple[dict[str, EngineReport], ReshardError | None]
"""Each engine's report, and the error of those that did not get the version."""


class Publication:
    """A publish that has begun; its thread is started once.

    Attributes:
        version: that is published.
        engines: names of those that it goes to.
    """

    def __init__(
        self,
        version: PolicyVersion,
        engines: Iterable[str],
        began: float,
        leases: Iterable[str],
        finish: Callable[["Publication"], Outcome],
    ) -> None:
        """Take over a publish whose values are fixed; nothing runs yet.

        Args:
            version: that is published.
            engines: names of those that it goes to.
            began: when, on the performance counter.
            leases: names of the engines that still read the live weights.
            finish: the rest of it; calls `release` for each lease.
        """
        self.version = version
        self.engines = frozenset(engines)
        self._began = began
        self._stalled = time.perf_counter() - began
        self._leases = set(leases)
        self._lock = threading.Lock()
        self._released = threading.Event()
        self._finish = finish
        self._total = 0.0
        self._outcome: Future[Outcome] = Future()
        if not self._leases:
            self._released.set()

    @property
    def over(self) -> bool:
        """Whether it has ended, well or not."""
        return self._outcome.done()

    @property
    def report(self) -> RefitReport | None:
        """What was done, as soon as it has ended; None before, and where it broke off."""
        if not self.over or self._outcome.exception() is not None:
            return None
        reports, _ = self._outcome.result()
        return RefitReport(self.version, self._total, reports, self._stalled)

    def run(self) -> None:
        """Do the rest on this thread, which the training waits for."""
        start = time.perf_counter()
        self._run()
        self._stalled += time.perf_counter() - start

    def _run(self) -> None:
        try:
            outcome = self._finish(self)
        except BaseException as error:
            self._outcome.set_exception(error)
        else:
            self._total = time.perf_counter() - self._began
            self._outcome.set_result(outcome)
        finally:
            self._released.set()

    def start(self) -> None:
        """Do the rest beside the training."""
        # A daemon: the script's end does not wait for engines.
        threading.Thread(
            target=self._run, name=f"reshard-publish-v{self.version}", daemon=True
        ).start()

    def release(self, engine: str) -> None:
        """An engine has read the live weights, or will not."""
        with self._lock:
            self._leases.discard(engine)
            if not self._leases:
                self._released.set()

    def await_release(self, seconds: float) -> None:
        """Wait until the weights may change.

        Raises:
            DeadlineExceeded: names the engines that still read them.
        """
        start = time.perf_counter()
        if not self._released.wait(seconds):
            raise DeadlineExceeded(
                f"version {self.version} is still being read by {', '.join(sorted(self._leases))} "
                f"after {seconds:g} s: its weights may not change yet"
            )
        self._stalled += time.perf_counter() - start

    def result(self, deadline: Deadline) -> tuple[RefitReport, ReshardError | None]:
        """Wait for its end: what was done, and the error to raise.

        Raises:
            DeadlineExceeded: it is still under way.
        """
        start = time.perf_counter()
        try:
            reports, error = self._outcome.result(deadline.remaining())
        except TimeoutError as waited:
            raise DeadlineExceeded(
                f"the publish of version {self.version} to {', '.join(sorted(self.engines))} is "
                f"still under way after {deadline.seconds:g} s"
            ) from waited
        self._stalled += time.perf_counter() - start
        return RefitReport(self.version, self._total, reports, self._stalled), error
