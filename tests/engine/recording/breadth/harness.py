"""`python -m tests.engine.recording.breadth.harness`: every configuration, on every rank.

For each case: an index-coded checkpoint is written, the model is built on its ranks, refitted
through the recorded map in both modes with two further codings, and compared with vLLM's own
loading, post-load steps included. Results go to `build/breadth.json`, case by case, and into the
table `docs/architectures.md`.
"""

import argparse
import json
import multiprocessing
import os
import shutil
import time
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import msgspec
from tests.engine.recording.breadth.cases import CASES, FOLDER, Case
from tests.engine.recording.breadth.results import Outcome, Result, outcome
from tests.engine.recording.breadth.table import as_markdown
from tests.engine.recording.breadth.tiny import make_tiny

from reshard.errors import EngineError
from reshard_vllm.inspect.messages import Option, RankReport, Request
from reshard_vllm.inspect.ranks import RankPool

ROOT = Path(__file__).parents[4]

RESULTS = ROOT / "build" / "breadth.json"
TABLE = ROOT / "docs" / "architectures.md"
STAND_INS = Path(__file__).parent / "stand_ins"

_SECONDS = 300.0


class Pools:
    """Rank processes of one and of two ranks, and one that writes checkpoints.

    Started when asked for, and again after a crash.
    """

    def __init__(self) -> None:
        self._open: dict[int, RankPool] = {}
        self._builder: ProcessPoolExecutor | None = None

    def build(self, case: Case, folder: Path) -> str:
        """Write the checkpoint of a case; the error text, or nothing."""
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        if self._builder is None:
            # Not forked: this process may have threads.
            context = multiprocessing.get_context("spawn")
            self._builder = ProcessPoolExecutor(1, mp_context=context)
        try:
            return self._builder.submit(_write_checkpoint, case, folder).result(_SECONDS)
        except (BrokenProcessPool, TimeoutError) as error:
            self._end_builder()
            return f"the process died: {type(error).__name__}"

    def _end_builder(self) -> None:
        if self._builder is None:
            return
        for process in list(self._builder._processes.values()):
            process.kill()
        self._builder.shutdown(wait=True, cancel_futures=True)
        self._builder = None

    def run(self, size: int, request: Request) -> Sequence[RankReport]:
        if size not in self._open:
            log = FOLDER / f"ranks{size}.log"
            path = os.pathsep.join(filter(None, (str(STAND_INS), os.environ.get("PYTHONPATH"))))
            self._open[size] = RankPool(size, log=log, environment={"PYTHONPATH": path})
        try:
            return self._open[size].run(request, _SECONDS)
        except EngineError as error:
            del self._open[size]
            return [RankReport(0, error=f"the process died: {str(error).splitlines()[-1]}")]

    def close(self) -> None:
        self._end_builder()
        for pool in self._open.values():
            pool.close()


def layouts(case: Case) -> Iterator[tuple[str, int, Request]]:
    """Name, number of ranks and request of each layout of a case."""
    options: dict[str, Option] = {
        "dtype": "bfloat16",
        "max_model_len": 64,
        "max_num_batched_tokens": 512,
    }
    base = Request(str(FOLDER / case.name), options={**options, **case.options}, codings=1)
    replace = msgspec.structs.replace
    yield "tp1", 1, base
    yield "tp2", 2, replace(base, tensor_parallel=2)
    if case.experts:
        yield "ep2", 2, replace(base, tensor_parallel=2, expert_parallel=True)
    if case.stages:
        yield "pp2", 2, replace(base, pipeline_parallel=2)


def run(case: Case, pools: Pools, wanted: Sequence[str]) -> Result:
    """Build and inspect one case."""
    began = time.monotonic()
    outcomes: dict[str, Outcome] = {}
    if fault := pools.build(case, FOLDER / case.name):
        outcomes["tp1"] = Outcome("not built", fault)
        return Result(case.name, case.kind, "", outcomes, time.monotonic() - began)
    vllm_class = ""
    for layout, size, request in layouts(case):
        if layout not in wanted:
            continue
        reports = pools.run(size, request)
        vllm_class = vllm_class or reports[0].model_class
        outcomes[layout] = outcome(reports)
    shutil.rmtree(FOLDER / case.name)
    return Result(case.name, case.kind, vllm_class, outcomes, time.monotonic() - began)


def _write_checkpoint(case: Case, folder: Path) -> str:
    """In the builder's process: the error text, or nothing."""
    try:
        make_tiny(folder, case.model_class, case.overrides, case.edits, case.renames)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def main() -> None:
    """Run the cases that are named, or all; merge into the results; write the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--layouts", default="tp1,tp2,ep2,pp2")
    parser.add_argument("--missing", action="store_true", help="only cases without a result")
    parser.add_argument("--table", action="store_true", help="only write the table")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    FOLDER.mkdir(parents=True, exist_ok=True)
    results = _read()
    pools = Pools()
    try:
        for case in () if arguments.table else CASES:
            skip = arguments.missing and case.name in results
            if skip or (arguments.names and case.name not in arguments.names):
                continue
            found = run(case, pools, arguments.layouts.split(","))
            results[case.name] = _merged(results.get(case.name), found)
            _write(results)
            said = {k: o.state for k, o in found.outcomes.items()}
            print(case.name, found.vllm_class, said, f"{found.seconds:.0f} s", flush=True)
    finally:
        pools.close()
    TABLE.write_text(as_markdown([results[c.name] for c in CASES if c.name in results]))


def _merged(old: Result | None, new: Result) -> Result:
    if old is None:
        return new
    outcomes = {**old.outcomes, **new.outcomes}
    return msgspec.structs.replace(
        new, outcomes=outcomes, vllm_class=new.vllm_class or old.vllm_class
    )


def _read() -> dict[str, Result]:
    if not RESULTS.exists():
        return {}
    found = msgspec.json.decode(RESULTS.read_bytes(), type=list[Result])
    return {result.name: result for result in found}


def _write(results: dict[str, Result]) -> None:
    plain = msgspec.to_builtins(list(results.values()))
    RESULTS.write_text(json.dumps(plain, indent=1))


if __name__ == "__main__":
    main()
