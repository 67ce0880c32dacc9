import pytest

from reshard.errors import EngineError, PlanError, ReshardError
from reshard.ids import PolicyVersion
from reshard.wire import decode, encode
from reshard_trainer.reports import EngineReport, RefitReport
from reshard_trainer.verdicts import ErrorRecord, Verdict


def test_a_report_sums_up_its_engines() -> None:
    first = EngineReport(
        "a", PolicyVersion(3), seconds={"pause": 1.0, "commit": 0.5}, received_bytes=(8, 8),
        direct_bytes=10, repacked_bytes=4, computed_bytes=2,
    )  # fmt: skip
    second = EngineReport(
        "b", PolicyVersion(3), seconds={"pause": 0.25, "resume": 0.125}, received_bytes=(16,),
        redundancy=1.5, direct_bytes=16,
    )  # fmt: skip
    failed = EngineReport("c", error="it died", state="unknown")
    report = RefitReport(PolicyVersion(3), 2.0, {"a": first, "b": second, "c": failed})

    assert report.seconds == {"pause": 1.0, "commit": 0.5, "resume": 0.125}
    assert report.received_bytes == {"a": (8, 8), "b": (16,), "c": ()}
    assert report.redundancy == 1.5
    totals = (report.direct_bytes, report.repacked_bytes, report.computed_bytes)
    assert totals == (26, 4, 2)
    assert report.failed == {"c": "it died"}


@pytest.mark.parametrize(
    "error",
    [PlanError("no plan", ["a: missing", "b: unknown"]), EngineError("taken"), ReshardError("x")],
)
def test_an_error_is_the_same_on_the_other_ranks(error: ReshardError) -> None:
    raw = encode(Verdict(ErrorRecord.of(error), "held"))
    verdict = decode(raw, Verdict)
    assert verdict.error is not None
    revived = verdict.error.error()

    assert (type(revived), str(revived), revived.faults) == (type(error), str(error), error.faults)


def test_an_error_of_another_kind_is_named_by_its_type() -> None:
    record = ErrorRecord.of(KeyError("weight"))

    assert str(record.error()) == "KeyError: 'weight'"
    assert type(record.error()) is ReshardError


def test_a_report_crosses_between_ranks() -> None:
    report = EngineReport("a", PolicyVersion(3), seconds={"pause": 1.0}, received_bytes=(8, 8))

    assert decode(encode(Verdict(report=report)), Verdict).report == report
