"""What an exchange did, in bytes and seconds."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ExchangeReport:
    """One rank's account of one exchange.

    Attributes:
        received_bytes: wire bytes by source rank.
        sent_bytes: wire bytes by destination rank.
        local_bytes: wire bytes copied from this rank to itself.
        seconds: by step: `agree`, `pack`, `transfer` (waiting for messages), `unpack`, `local`;
            of shared memory: `stage`, `wait`, `copy`.
        messages: number of messages, sent and received.
        direct_bytes: of those received, bytes that landed in their place without a copy.
        peak_extra_bytes: most memory that the exchange held beside the weights themselves.
    """

    received_bytes: Mapping[int, int]
    sent_bytes: Mapping[int, int]
    local_bytes: int
    seconds: Mapping[str, float]
    messages: int
    direct_bytes: int
    peak_extra_bytes: int


def merge(reports: "list[ExchangeReport]") -> ExchangeReport:
    """One report of several exchanges that ran for the same refit, one after the other."""
    received: dict[int, int] = {}
    sent: dict[int, int] = {}
    seconds: dict[str, float] = {}
    for report in reports:
        for total, part in ((received, report.received_bytes), (sent, report.sent_bytes)):
            for rank, nbytes in part.items():
                total[rank] = total.get(rank, 0) + nbytes
        for step, took in report.seconds.items():
            seconds[step] = seconds.get(step, 0.0) + took
    return ExchangeReport(
        received_bytes=received,
        sent_bytes=sent,
        local_bytes=sum(report.local_bytes for report in reports),
        seconds=seconds,
        messages=sum(report.messages for report in reports),
        direct_bytes=sum(report.direct_bytes for report in reports),
        peak_extra_bytes=sum(report.peak_extra_bytes for report in reports),
    )
