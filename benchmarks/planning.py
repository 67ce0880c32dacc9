"""What planning costs a rank of a large refit: seconds, memory, bytes of layouts; no GPU needed.

Each case does what the ranks of such a refit do, for one rank after the other on this machine: the
ranks' reports, trainer rank 0's merge of them, the plan from the merged layouts, and a rank's own
part of it down to its ordered messages. Prints tables, writes `build/bench_plan.json`.

    python -m benchmarks.planning [--json] [--quick] [--figure FILE.svg]
"""

import argparse
import gc
import json
import os
import platform
import time
import tracemalloc
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

from rich.console import Console

from benchmarks.planning_report import Cost, as_figure, as_tables
from reshard.ids import GroupRank
from reshard.joining import Layouts, merge_layouts, plan_from
from reshard.layout.compact import CompactGroup, CompactSide
from reshard.layout.holding import RankLayout
from reshard.layout.names import pack_numbers
from reshard.plan.cache import PlanCache
from reshard.plan.model import TransferPlan
from reshard.simulation.models import Experts, Latent, ModelShape, decoder, model
from reshard.simulation.parallelism import Parallelism, parse_parallelism, spread
from reshard.transport.schedule import make_schedule
from reshard.wire import decode, encode

OUTPUT = Path("build/bench_plan.json")
BUCKET_BYTES = 256 << 20
T = TypeVar("T")


@dataclass(frozen=True)
class Case:
    """One refit to plan.

    Attributes:
        name: for the table.
        model: its tensors.
        trainer, engine: parallelism of both sides.
        target_seconds: what a rank's planning should take at most, or 0.
    """

    name: str
    model: ModelShape
    trainer: Parallelism
    engine: Parallelism
    target_seconds: float = 0.0


def cases() -> list[Case]:
    """256 trainer ranks to 128 engine ranks."""
    moe = "tp=4,dp=32,ep=32,etp=4"

    def case(name: str, of: str, trainer: str, engine: str, target: float) -> Case:
        return Case(name, model(of), parse_parallelism(trainer), parse_parallelism(engine), target)

    return [
        case("dense 70B", "llama-70b", "fsdp=256", "tp=8,dp=16", 1.0),
        case("dense 70B, HSDP", "llama-70b", "fsdp=64,dp=4", "tp=8,dp=16", 1.0),
        case("DeepSeek-V3", "deepseek-v3", "fsdp=256,ep=32", moe, 3.0),
        case("DeepSeek-V3, all FSDP", "deepseek-v3", "fsdp=256", moe, 3.0),
        case("Kimi-K2", "kimi-k2", "fsdp=256,ep=32", moe, 3.0),
        case("Kimi-K2, all FSDP", "kimi-k2", "fsdp=256", moe, 3.0),
    ]


def by_ranks() -> list[Case]:
    """DeepSeek-V3 on more and more ranks; trainer and engine of equal size."""
    made = []
    for ranks in (16, 32, 64, 128, 256, 512, 1024):
        half = ranks // 2
        groups = min(32, half // 4)
        made.append(
            Case(
                f"{ranks} ranks",
                model("deepseek-v3"),
                Parallelism(fsdp=half, ep=groups),
                Parallelism(tp=4, dp=half // 4, ep=groups, etp=4),
            )
        )
    return made


def by_tensors() -> list[Case]:
    """More and more experts, 256 to 128 ranks."""
    made = []
    for experts in (4, 16, 64, 256, 544):
        shape = decoder(
            f"{experts} experts",
            vocabulary=129280,
            hidden=7168,
            layers=61,
            attention=Latent(128),
            width=18432,
            experts=Experts(experts, 2048, dense_layers=3, shared=1, corrected=True),
        )
        groups = min(32, experts)
        made.append(
            Case(
                f"{shape.tensors:,} tensors",
                shape,
                Parallelism(fsdp=256, ep=groups),
                Parallelism(tp=4, dp=32, ep=groups, etp=4),
            )
        )
    return made


def measure(case: Case) -> Cost:
    """Do what the ranks of a case do."""
    size = case.trainer.ranks + case.engine.ranks
    held = spread(case.model, case.trainer, 0, "float32")
    needed = spread(case.model, case.engine, case.trainer.ranks, "bfloat16")
    ends = (GroupRank(0), GroupRank(case.trainer.ranks))
    layouts_of = [side.for_rank(rank) for side, rank in zip((held, needed), ends, strict=True)]
    gc.collect()
    describing = _slowest(_timed(partial(_describe, layout))[1] for layout in layouts_of)
    sources, destinations = CompactSide.of_side(held), CompactSide.of_side(needed)
    del held, needed, layouts_of
    reports = [
        encode(_report(side, rank))
        for side, ranks in (
            (sources, range(case.trainer.ranks)),
            (destinations, range(case.trainer.ranks, size)),
        )
        for rank in ranks
    ]
    gc.collect()
    layouts, merging = _timed(partial(_merge, reports, case.trainer.ranks))
    report_bytes = max(map(len, reports))
    del reports
    gc.collect()
    cache = PlanCache()
    planned = partial(cache.plan, layouts, partial(plan_from, layouts))
    plan, planning = _timed(planned)
    part = _slowest(_timed(partial(_part, plan, rank, size))[1] for rank in ends)
    _, again = _timed(planned)
    if (cache.hits, cache.misses) != (1, 1):
        raise RuntimeError("the plan for the same layouts was made twice")
    _check(plan, decode(layouts, Layouts))
    del cache, planned
    operations = len(plan.ops)
    del plan
    peaks = _memory(layouts, ends, size)
    return Cost(
        name=case.name,
        trainer=str(case.trainer),
        engine=str(case.engine),
        ranks=size,
        tensors=case.model.tensors,
        operations=operations,
        describe_seconds=describing.processor,
        merge_seconds=merging.processor,
        plan_seconds=planning.processor,
        part_seconds=part.processor,
        wall_seconds=describing.clock + planning.clock + part.clock,
        again_seconds=again.processor,
        report_bytes=report_bytes,
        received_bytes=len(layouts),
        plan_mib=peaks[0],
        kept_mib=peaks[1],
        part_mib=peaks[2],
        target_seconds=case.target_seconds,
    )


def _describe(layout: RankLayout) -> bytes:
    return encode(CompactSide.of_rank(layout))


def _merge(reports: Sequence[bytes], trainers: int) -> bytes:
    decoded = [decode(raw, CompactSide) for raw in reports]
    return merge_layouts(decoded[:trainers], decoded[trainers:])


def _part(plan: TransferPlan, rank: GroupRank, size: int) -> int:
    schedule = make_schedule(plan.for_rank(rank), size, BUCKET_BYTES)
    return len(schedule.sends) + len(schedule.receives)


def _check(plan: TransferPlan, layouts: Layouts) -> None:
    if plan.redundancy != 1.0 or layouts.source.faults or layouts.destination.faults:
        raise RuntimeError("this is not the plan that was meant to be measured")


def _memory(layouts: bytes, ends: Sequence[GroupRank], size: int) -> tuple[float, float, float]:
    """MiB in use: most while planning, of the plan, most for a rank's part. Slow: all is traced."""
    gc.collect()
    tracemalloc.start()
    try:
        plan = plan_from(layouts)
        planning = tracemalloc.get_traced_memory()[1]
        gc.collect()
        kept = tracemalloc.get_traced_memory()[0]
        largest = 0
        for rank in ends:
            tracemalloc.reset_peak()
            _part(plan, rank, size)
            largest = max(largest, tracemalloc.get_traced_memory()[1] - kept)
    finally:
        tracemalloc.stop()
    return planning / 2**20, kept / 2**20, largest / 2**20


def _report(side: CompactSide, rank: int) -> CompactSide:
    """One rank's report, from its side's: as `CompactSide.of_rank` of its layout, much faster."""
    own = pack_numbers([rank])
    return CompactSide(
        tuple(
            CompactGroup(group.names, group.shape, group.dtype, ((boxes, own),))
            for group in side.groups
            for boxes, runs in group.held
            if any(a <= rank < a + n for a, n in zip(runs[0::2], runs[1::2], strict=True))
        )
    )


class _Seconds(NamedTuple):
    processor: float
    clock: float


def _timed(work: Callable[[], T]) -> tuple[T, _Seconds]:
    """The result, and what it took."""
    clock, processor = time.perf_counter(), time.process_time()
    result = work()
    return result, _Seconds(time.process_time() - processor, time.perf_counter() - clock)


def _slowest(each: Iterable[_Seconds]) -> _Seconds:
    return max(each)


def _machine() -> dict[str, object]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = {line.partition(":")[2].strip() for line in lines if line.startswith("model name")}
    return {
        "processor": ", ".join(sorted(names)) or platform.machine(),
        "cores": os.cpu_count() or 0,
        "python": platform.python_version(),
        "load_before": round(os.getloadavg()[0], 2),
    }


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", action="store_true", help="print the JSON instead of tables")
    parser.add_argument("--quick", action="store_true", help="few and small cases")
    parser.add_argument("--figure", type=Path, help="draw the growth curves into this file")
    arguments = parser.parse_args()
    machine = _machine()
    chosen = {"cases": cases(), "by_ranks": by_ranks(), "by_tensors": by_tensors()}
    if arguments.quick:
        chosen = {name: some[:2] for name, some in chosen.items()}
    progress = Console(stderr=True)
    costs: dict[str, list[Cost]] = {}
    for name, some in chosen.items():
        costs[name] = []
        for case in some:
            progress.print(f"{name}: {case.name}: {case.trainer} -> {case.engine}", style="dim")
            costs[name].append(measure(case))
    document = {
        "date": date.today().isoformat(),
        "machine": machine,
        **{name: [asdict(cost) for cost in some] for name, some in costs.items()},
    }
    OUTPUT.parent.mkdir(exist_ok=True)
    OUTPUT.write_text(json.dumps(document, indent=1))
    if arguments.figure:
        as_figure(costs["by_ranks"], costs["by_tensors"], arguments.figure)
    if arguments.json:
        print(json.dumps(document))
    else:
        for table in as_tables(costs):
            Console(width=170).print(table)
        print(f"{machine}\nwritten to {OUTPUT}")


if __name__ == "__main__":
    main()
