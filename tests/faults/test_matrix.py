"""A dozen cases of the fault matrix, and that its judge can fail. The whole: `make faults`."""

from pathlib import Path

import numpy as np
import pytest
from tests.faults.bench import Bench, Result
from tests.faults.cases import Case, all_cases, selected, short
from tests.faults.engine import live_file
from tests.faults.judge import accused, judge, named
from tests.faults.matrix import as_json, faults, run

pytestmark = pytest.mark.multiprocess


def test_a_dozen_faults_end_well(tmp_path: Path) -> None:
    results = run(short(), tmp_path)
    bad = [f"{r.case}: {faults(r)}: {r.words}: {r.text}" for r in results if not r.good]
    assert not bad, "\n".join(bad)
    assert {r.outcome for r in results} >= {"old", "fenced"}
    counts = as_json(results, 0.0)
    assert counts["cases"] == len(short())
    assert (counts["mixed"], counts["hung"], counts["unnamed"]) == (0, 0, 0)


def test_the_generated_matrix() -> None:
    cases = list(all_cases())
    assert len(set(cases)) == len(cases)
    assert len(selected()) >= 200
    assert set(short()) <= set(cases)
    assert all({c.phase for c in cases if c.way == way} for way in {c.way for c in cases})


def test_the_judge_sees_one_wrong_element(tmp_path: Path) -> None:
    with Bench("shm", "staged", tmp_path) as bench:
        assert bench.reader is not None
        version = bench.version
        assert judge(bench.reader, bench.engine, None, version)[0] == "new"
        held = np.memmap(
            live_file(bench.engine.folder, 1, "embed.weight"), dtype=np.float32, mode="r+"
        )
        held[3] += 1
        assert judge(bench.reader, bench.engine, None, version)[0] == "mixed"
        bench.engine.paused = True
        assert judge(bench.reader, bench.engine, None, version)[0] == "fenced"
        held[3] -= 1
        bench.engine.paused = False
        bench.engine.weight_version = str(version + 1)
        assert judge(bench.reader, bench.engine, None, version)[0] == "mixed"


CASE = Case("gloo", "staged", "transfer", "engine rank 1", "kill")


@pytest.mark.parametrize(
    ("text", "who"),
    [
        ("rank 3 (engine rank 1) failed in phase transfer: x", {"engine rank 1"}),
        ("no answer from rank 1 (trainer rank 1) in phase census within 2 s", {"trainer rank 1"}),
        ("engine h:1 did not get version 3: RuntimeError: no idea", set()),
        ("engine h:1 did not answer /pause within 2 s", {"engine"}),
    ],
)
def test_who_is_accused(text: str, who: set[str]) -> None:
    assert accused(text, "h:1") == who
    assert named(CASE, [text], "h:1") == bool(who & {"engine rank 1", "engine"})


def test_a_result_that_is_not_good() -> None:
    assert Result(CASE).good
    assert not Result(CASE, outcome="mixed").good
    assert not Result(CASE, hung=("trainer rank 0",)).good
    assert not Result(CASE, named=False).good
    assert not Result(CASE, fired=False).good
