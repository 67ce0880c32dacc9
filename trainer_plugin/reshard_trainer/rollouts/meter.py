"""What a run measures, as Prometheus counters, histograms and gauges.

One meter a run, with a registry of its own unless one is given, so that two runs in a process do
not share numbers. Serve it with `prometheus_client.start_http_server(port, registry=...)`. The
names are listed in `docs/protocols.md`.
"""

from collections.abc import Mapping, Sequence
from typing import Final, Literal, Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from reshard.ids import PolicyVersion
from reshard_trainer.rollouts.rollout import EngineName

Side = Literal["trainer", "engine"]

_LAGS: Final = (0, 1, 2, 3, 4, 6, 8, 12, 16, 32)
_SECONDS: Final = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)


class _PublishedEngine(Protocol):
    @property
    def error(self) -> str: ...
    @property
    def received_bytes(self) -> Sequence[int]: ...
    @property
    def seconds(self) -> Mapping[str, float]: ...


class Published(Protocol):
    """What is counted of `reshard_trainer.RefitReport`."""

    @property
    def engines(self) -> Mapping[str, _PublishedEngine]:
        """Each engine's part, by name."""


class Meter:
    """See the module.

    Attributes:
        registry: where the numbers are.
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        """Start at zero.

        Args:
            registry: to add to; None: a new one.
        """
        self.registry = registry or CollectorRegistry()
        on = self.registry
        self._groups = Counter(
            "reshard_groups",
            "Groups of rollouts, by what became of them.",
            ["outcome"],
            registry=on,
        )
        self._staleness = Histogram(
            "reshard_staleness_versions",
            "Data staleness: trainer version minus the oldest version of a trained group.",
            buckets=_LAGS,
            registry=on,
        )
        self._publish_lag = Histogram(
            "reshard_publish_lag_versions",
            "Publish lag: newest published version minus the engine's, at admission.",
            ["engine"],
            buckets=_LAGS,
            registry=on,
        )
        self._buffered = Gauge(
            "reshard_buffered_groups", "Groups that wait for the trainer.", registry=on
        )
        self._running = Gauge(
            "reshard_running_groups", "Groups that are being generated.", registry=on
        )
        self._idle = Counter(
            "reshard_idle_seconds",
            "Seconds in which a side had nothing to do.",
            ["side", "name"],
            registry=on,
        )
        self._tokens = Counter(
            "reshard_rollout_tokens", "Sampled tokens, by engine.", ["engine"], registry=on
        )
        self._refreshes = Counter(
            "reshard_refreshes", "Refreshes of an engine.", ["engine", "outcome"], registry=on
        )
        self._version = Gauge(
            "reshard_version",
            "Policy version, of the trainer and of engines.",
            ["name"],
            registry=on,
        )
        self._refits = Counter(
            "reshard_refits", "Published refits of an engine.", ["engine", "outcome"], registry=on
        )
        self._bytes = Counter(
            "reshard_refit_bytes", "Bytes that an engine received.", ["engine"], registry=on
        )
        self._phases = Histogram(
            "reshard_refit_seconds",
            "Seconds of a refit, by phase.",
            ["engine", "phase"],
            buckets=_SECONDS,
            registry=on,
        )

    def count(self, outcome: str, by: int) -> None:
        """Groups came to an outcome, a field of `Counters`."""
        self._groups.labels(outcome).inc(by)

    def levels(self, *, buffered: int, running: int) -> None:
        """Where groups are now."""
        self._buffered.set(buffered)
        self._running.set(running)

    def admitted(self, engine: EngineName, publish_lag: int) -> None:
        """An engine was given a prompt."""
        self._publish_lag.labels(engine).observe(publish_lag)

    def trained(self, version: PolicyVersion, staleness: tuple[int, ...]) -> None:
        """The trainer took a batch."""
        self._version.labels("trainer").set(version)
        for each in staleness:
            self._staleness.observe(each)

    def sampled(self, engine: EngineName, tokens: int) -> None:
        """An engine sampled tokens that are used."""
        self._tokens.labels(engine).inc(tokens)

    def idle(self, side: Side, name: str, seconds: float) -> None:
        """A side had nothing to do."""
        self._idle.labels(side, name).inc(seconds)

    def refreshed(self, engine: EngineName, version: PolicyVersion | None) -> None:
        """An engine was brought to a version, or could not be."""
        self._refreshes.labels(engine, "failed" if version is None else "done").inc()
        if version is not None:
            self._version.labels(engine).set(version)

    def published(self, report: Published) -> None:
        """A publish has ended: `attach(on_report=meter.published)`."""
        for name, engine in report.engines.items():
            self.refit(
                name,
                error=engine.error,
                received_bytes=sum(engine.received_bytes),
                seconds=engine.seconds,
            )

    def refit(
        self, engine: str, *, error: str, received_bytes: int, seconds: Mapping[str, float]
    ) -> None:
        """The publisher's report of one engine.

        Args:
            engine: its name.
            error: empty, or why it did not get the version.
            received_bytes: by all its ranks.
            seconds: by phase.
        """
        self._refits.labels(engine, "failed" if error else "done").inc()
        self._bytes.labels(engine).inc(received_bytes)
        for phase, spent in seconds.items():
            self._phases.labels(engine, phase).observe(spent)
