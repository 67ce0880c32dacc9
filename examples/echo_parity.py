"""One GRPO task, trained four ways: what staleness costs, and what it buys.

    make parity          or: python -m examples.echo_parity --steps 20 --seeds 1

Co-located (the trainer generates with its own model), sequential pull, and asynchronous push-pull
with at most 1 and 4 versions of staleness; the same task, the same seeds. All but the first
generate on two real vLLM servers, one of which is slow: it runs four requests at once, the other
sixteen. The servers stay up for all runs.

Writes a table (docs/parity.md), a figure (docs/pictures/parity.png) and build/parity.json. After
the Echo paper (arXiv 2508.05387), which reports comparable rewards and busier machines for its own
tasks; what comes out here is in the table, whatever it is.

Its parts are in `examples/parity`: `ways.py` is the one to read.
"""

import argparse
import json
import os
import time
from contextlib import ExitStack
from pathlib import Path

import torch
from examples.grpo_tiny import make_policy, vllm_engine
from examples.parity.document import write_document
from examples.parity.experiment import Engine, Experiment, Run
from examples.parity.figure import draw
from examples.parity.live import Live
from examples.parity.task import VOCAB, counting
from examples.parity.ways import WAYS
from rich.console import Console
from transformers.utils.logging import disable_progress_bar

SLOTS = (16, 4)  # requests that each engine runs at once
STEPS = 80
SEEDS = 3
ROOT = Path(__file__).resolve().parents[1]


def run_all(experiment: Experiment, seeds: int, live: Live) -> list[Run]:
    """Every way with every seed."""
    runs = []
    for seed in range(seeds):
        for name, way in WAYS.items():
            live.begin(name, seed)
            runs.append(way(experiment, seed, live.notice))
            live.end(runs[-1])
    return runs


def write_json(runs: list[Run], experiment: Experiment, file: Path) -> None:
    """All figures of all runs."""
    settings = {
        "task": experiment.task.name,
        "steps": experiment.steps,
        "batch": experiment.batch,
        "samples": experiment.samples,
        "slots": [engine.slots for engine in experiment.engines],
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }
    content = {"settings": settings, "runs": [run.as_json() for run in runs]}
    file.write_text(json.dumps(content, indent=1))


def main() -> None:
    """Start the engines, make all runs, tell what came out."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--build", type=Path, default=ROOT / "build", help="figures and logs")
    parser.add_argument("--docs", type=Path, help="folder of the table and the figure")
    arguments = parser.parse_args()

    os.environ["HF_HUB_OFFLINE"] = "1"
    torch.set_num_threads(1)
    disable_progress_bar()
    build: Path = arguments.build
    build.mkdir(parents=True, exist_ok=True)
    docs: Path = arguments.docs or build
    console = Console()
    start = build / "parity-start"
    make_policy(start, VOCAB)
    with ExitStack() as stack:
        engines = []
        for number, slots in enumerate(SLOTS):
            console.print(f"starting engine {number} ({slots} requests at once) ...")
            flags: tuple[str, ...] = ("--tensor-parallel-size", "1", "--max-num-seqs", str(slots))
            flags += ("--weight-transfer-config", '{"backend": "reshard"}')
            log = build / f"parity-engine-{number}.log"
            url = stack.enter_context(vllm_engine(start, log, *flags, "--dtype", "float32"))
            engines.append(Engine(url, slots))
        experiment = Experiment(counting(), start, tuple(engines), steps=arguments.steps)
        with Live(console, experiment) as live:
            runs = run_all(experiment, arguments.seeds, live)
    write_json(runs, experiment, build / "parity.json")
    draw(runs, docs / "pictures/parity.png")
    write_document(runs, experiment, docs / "parity.md")
    console.print(f"written: {build / 'parity.json'}, {docs / 'parity.md'}")


if __name__ == "__main__":
    main()
