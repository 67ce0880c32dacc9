"""`make invariants`: random interleavings of steps, publishes, slow readers, failures, generation.

Held, over every run: no engine step sees bytes of two versions (2); the engine's version and the
latest never decrease (3); what a reader got of a version is that version, also where the trainer
stepped meanwhile, and only versions that were published are served (4); after a failed install the
engine is at the old version or the new one, or held (6).
"""

import functools
import logging
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, TypeVar

import click
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from rich.console import Console
from tests.faults.local import RANKS, Local

from reshard.manifest import ManifestState
from reshard.session import Install, Share

WAYS: tuple[tuple[Share, Install], ...] = (
    ("live", "staged"),
    ("snapshot", "staged"),
    ("live", "in_place"),
    ("snapshot", "in_place"),
)
RANK = st.integers(0, RANKS - 1)
_NEXT: dict[ManifestState, tuple[ManifestState, ...]] = {
    ManifestState.DRAFT: (ManifestState.SEALED,),
    # A publish that failed is begun anew.
    ManifestState.SEALED: (ManifestState.PUBLISHED, ManifestState.DRAFT),
    ManifestState.PUBLISHED: (ManifestState.DRAFT,),
}


class Broken(Exception):
    """An invariant did not hold; raised through Hypothesis, which cannot replay a world."""


@dataclass
class Tally:
    """What was done in one world.

    Attributes:
        runs: of the state machine.
        rules: that were carried out.
        failure: the first, as text.
        states: of each version's manifest, but for retirement.
        published: how often each version was published and not yet retired.
    """

    runs: int = 0
    rules: int = 0
    failure: str = ""
    states: dict[int, ManifestState] = field(default_factory=dict)
    published: Counter[int] = field(default_factory=Counter)


Method = TypeVar("Method", bound=Callable[..., None])


def kept(method: Method) -> Method:
    """Keep the first failure: the world goes on, so Hypothesis cannot repeat it."""

    @functools.wraps(method)
    def keeping(self: "Interleaving", *arguments: object, **keywords: object) -> None:
        if self.tally.failure:
            return
        try:
            method(self, *arguments, **keywords)
        except Exception:
            self.tally.failure = traceback.format_exc()

    return keeping  # type: ignore[return-value]


class Interleaving(RuleBasedStateMachine):
    """One run; the world goes on from run to run."""

    world: ClassVar[Local]
    share: ClassVar[Share]
    tally: ClassVar[Tally]

    def __init__(self) -> None:
        super().__init__()
        self.tally.runs += 1

    @rule()
    @kept
    def step(self) -> None:
        """Train on; the version travels beside what comes next."""
        self.tally.rules += 1
        self.world.step()

    @rule()
    @kept
    def publish(self) -> None:
        """Publish the present version again."""
        self.tally.rules += 1
        self.world.hook.publish()

    @rule()
    @kept
    def wait(self) -> None:
        """Let the publish under way end."""
        self.tally.rules += 1
        self.world.hook.wait()

    @rule(rank=RANK)
    @kept
    def slow_reader(self, rank: int) -> None:
        """A rank reads so late that the trainer would have stepped: it steps, or waits."""
        self.tally.rules += 1
        world, gate = self.world, self.world.engine.targets[rank].gate
        world.hook.wait()
        gate.clear()
        world.step()
        version = world.hook.version
        assert world.weights == version
        stepping = threading.Thread(target=world.step)
        stepping.start()
        stepping.join(0.01)
        if self.share == "live":
            # Under a lease: not one byte may change before it was read.
            assert world.weights == version
            assert stepping.is_alive()
        gate.set()
        stepping.join(30)
        assert not stepping.is_alive()
        world.hook.wait()
        assert world.weights == version + 1

    @rule(rank=RANK, phase=st.sampled_from(["begin", "commit"]))
    @kept
    def fail(self, rank: int, phase: str) -> None:
        """A rank fails in the next refit: old, new or held; the one after it goes well."""
        self.tally.rules += 1
        world, engine = self.world, self.world.engine
        world.hook.wait()
        before = engine.generate()
        engine.targets[rank].broken = {phase}  # type: ignore[arg-type]
        world.step()
        report = world.hook.wait()
        engine.targets[rank].broken = set()
        assert report is not None
        assert report.failed
        assert f"engine rank {rank}" in str(report.failed)
        after = engine.generate()
        assert after is None or after == before
        if phase == "commit":
            assert after is None
        world.hook.publish()
        assert engine.generate() == (world.hook.version, str(world.hook.version))

    @invariant()
    @kept
    def holds(self) -> None:
        """The invariants of the design, by what the engine's steps saw."""
        world = self.world
        seen = list(world.seen)
        versions = [version for version, _ in seen]
        labels = [int(label) for _, label in seen]
        assert all(version == version for version in versions), "bytes of two versions"
        assert versions == sorted(versions)
        assert labels == sorted(labels)
        # Between commit and label the engine is paused: a step sees both, or neither.
        assert versions == labels
        del world.seen[: max(0, len(seen) - 1)]
        for target in world.engine.targets:
            assert target.installed == sorted(target.installed)
            del target.installed[:-1]
        self._check_manifests()

    def _check_manifests(self) -> None:
        """States follow each other; what retires was published, once a publish."""
        told, tally = self.world.manifests, self.tally
        while told:
            manifest = told.pop(0)
            version, state = manifest.version, manifest.state
            if state is ManifestState.RETIRED:
                tally.published[version] -= 1
                assert tally.published[version] >= 0, f"{version} retired, but not published"
                continue
            known = tally.states.get(version)
            assert known is None or state in _NEXT[known], f"{version}: {known}, then {state}"
            tally.states[version] = state
            tally.published[version] += state is ManifestState.PUBLISHED


def run(share: Share, install: Install, runs: int, number: int = 20261201) -> Tally:
    """So many runs in one world.

    Raises:
        Broken: an invariant does not hold.
    """
    tally = Tally()
    with Local(share, install, overlap=True) as world:

        @seed(number)
        class Here(Interleaving):
            pass

        Here.world, Here.share, Here.tally = world, share, tally
        run_state_machine_as_test(
            Here,
            settings=settings(
                max_examples=runs,
                stateful_step_count=6,
                database=None,
                deadline=None,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            ),
        )
    if tally.failure:
        raise Broken(f"{share}, {install}, run {tally.runs}: {tally.failure}")
    return tally


@click.command()
@click.option("--runs", default=1_000, show_default=True)
@click.option("--out", default="build/invariants.txt", type=click.Path(path_type=Path))
def main(runs: int, out: Path) -> None:
    """Check the invariants over many random interleavings."""
    logging.disable(logging.CRITICAL)  # failures are what is tried here
    console = Console()
    start = time.monotonic()
    total = 0
    for share, install in WAYS:
        tally = run(share, install, -(-runs // len(WAYS)))
        total += tally.runs
        console.print(f"{share}, {install}: {tally.runs} runs, {tally.rules} rules")
    text = f"{total} runs in {time.monotonic() - start:.0f} s: invariants 2, 3, 4 and 6 held"
    console.print(text)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(text + "\n")
    sys.exit(0)


if __name__ == "__main__":
    main()
