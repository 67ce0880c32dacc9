"""What was found of one configuration."""

from collections.abc import Sequence
from typing import Literal

import msgspec

from reshard_vllm.inspect.messages import RankReport
from reshard_vllm.inspect.report import bit_identical

State = Literal["identical", "different", "refused", "not built"]


class Outcome(msgspec.Struct, frozen=True):
    """One layout of one configuration, over all its ranks.

    Attributes:
        state: `identical` counts as covered; `not built`: vLLM, or its loader, cannot do it here.
        reason: why not.
        bytes: received, by class.
        computed: parameters whose values the loader computes.
    """

    state: State
    reason: str = ""
    bytes: dict[str, int] = {}
    computed: tuple[str, ...] = ()


class Result(msgspec.Struct, frozen=True):
    """One configuration."""

    name: str
    kind: str
    vllm_class: str
    outcomes: dict[str, Outcome]
    seconds: float


def outcome(reports: Sequence[RankReport]) -> Outcome:
    """The worst of all ranks."""
    for report in reports:
        if report.error:
            return Outcome("not built", report.error.splitlines()[0][:300])
    counts = {
        kind: sum(getattr(report, f"{kind}_bytes") for report in reports)
        for kind in ("direct", "repacked", "computed", "refused")
    }
    computed = tuple(
        sorted(
            {
                place.parameter
                for report in reports
                for places in report.tensors.values()
                for place in places
                if place.kind == "computed"
            }
        )
    )
    for report in reports:
        faults = [f"{key}: {why}" for key, why in report.refused.items()]
        faults += [f"{key}: {n} elements not covered" for key, n in report.uncovered.items()]
        if faults:
            return Outcome("refused", faults[0][:300], counts, computed)
    if not bit_identical(reports):
        lines = [line for report in reports for line in report.differences]
        return Outcome("different", lines[0][:300], counts, computed)
    return Outcome("identical", "", counts, computed)
