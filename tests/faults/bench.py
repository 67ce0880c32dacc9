"""Real trainer ranks and a real engine in which one fault after the other is injected.

Processes that survive a case are used for the next one: that the next full refit goes well, in the
same processes, is part of every case.
"""

import os
import pickle
import signal
import time
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Self

import torch
from tests.faults.cases import JOINING, ROUTES, Case, Install, Transport
from tests.faults.engine import FaultyEngine, RouteStrike
from tests.faults.judge import Outcome, Reader, judge, named
from tests.faults.strikes import Reach, Strike, arm_trainer, fired, install_trainer, trainer_passes
from tests.multiprocess.trainer.test_publish import CUTS, MODEL
from tests.multiprocess.trainer.trainers import STEP, Said, State, Trainers, step

DEADLINE = 2.0
"""Of each phase of a refit, in seconds."""

BOUND = 20.0
"""By when every surviving rank has said how the refit ended, in seconds."""

TRAINERS = 2
ENGINE = 2
_BUCKET_BYTES = 256
_EYE_SECONDS = 0.005


@dataclass(slots=True)
class Result:
    """How one case ended.

    Attributes:
        case: what was injected.
        outcome: what the engine was when all survivors had spoken, and afterwards.
        fired: whether the fault happened.
        hung: ranks that did not end in time.
        named: whether every error names the victim; true where nothing failed.
        recovered: whether the next full refit went well.
        seconds: until the survivors had spoken.
        words: what the engine held.
        text: rank 0's error, or another survivor's.
    """

    case: Case
    outcome: Outcome = "old"
    fired: bool = True
    hung: tuple[str, ...] = ()
    named: bool = True
    recovered: bool = True
    seconds: float = 0.0
    words: str = ""
    text: str = ""
    notes: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        """Whether nothing is to be complained of."""
        return (
            self.outcome != "mixed"
            and not self.hung
            and self.named
            and self.recovered
            and self.fired
        )


def resume(state: State, version: int) -> None:
    """As a trainer that loads its checkpoint of this version; a command of `Trainers`."""
    with torch.no_grad():
        for parameter in state.model.parameters():
            parameter.add_(version * STEP)


def forget(state: State) -> None:
    """End the session, so that the next refit opens another; a command of `Trainers`."""
    assert state.hook is not None
    for link in state.hook._publisher._links:
        link._leave()


class Bench:
    """An engine and a trainer that publishes to it, by one way of moving and installing."""

    def __init__(
        self,
        transport: Transport,
        install: Install,
        folder: Path,
        *,
        deadline: float = DEADLINE,
    ) -> None:
        self._transport = transport
        self._install = install
        self._folder = folder
        self._deadline = deadline
        self._memory = folder / "memory"
        self._memory.mkdir(parents=True)
        self._stack = ExitStack()
        self.engine = self._stack.enter_context(
            FaultyEngine(MODEL, ENGINE, self._memory, transport)
        )
        self.reader: Reader | None = None
        self.trainers: Trainers | None = None
        self.version = 0
        self.held: int | None = None
        self._runs = 0
        self._messages: dict[str, int] = {}

    def __enter__(self) -> Self:
        self._start_trainers()
        self._refit()
        return self

    def __exit__(self, *exception: object) -> None:
        self.engine.thaw()
        self._end_trainers()
        self._stack.close()

    def run(self, case: Case) -> Result:
        """Inject one fault into one refit, judge what follows, and refit again."""
        result = Result(case)
        fired(self._memory).unlink(missing_ok=True)
        trainers = self._live_trainers()
        if case.phase in JOINING or (case.phase == "describe" and case.victim.startswith("engine")):
            trainers.do(forget)
        self._arm(case)
        old, new = self.held, self.version + 1
        self.version = new
        start = time.monotonic()
        trainers.start(step)
        said = self._watch(result, case, old, new, start)
        result.seconds = time.monotonic() - start
        result.fired = fired(self._memory).exists()
        self._note(result, *self._judge(old, new))
        self._thaw(result, case, said)
        self._note(result, *self._judge(old, new))
        texts = [each.text for each in said.values() if each.error is not None]
        result.text = texts[0] if texts else ""
        result.named = named(case, texts, self.engine.name)
        if not texts and not self._is_new(new) and said:
            result.outcome = "mixed"
            result.notes.append("no error, but the engine has not got the version")
        if self._is_new(new):
            self.held = new
        self._recover(result, case)
        return result

    @property
    def way(self) -> tuple[Transport, Install]:
        """How bytes move and land here."""
        return self._transport, self._install

    def pids(self) -> dict[str, int]:
        """Every process of the bench by name; the engine's server is in this one."""
        trainers = self._live_trainers()._processes
        found = {f"trainer rank {rank}": process.pid for rank, process in enumerate(trainers)}
        ranks = self.engine._processes
        found |= {f"engine rank {rank}": process.pid for rank, process in ranks.items()}
        return {name: pid for name, pid in found.items() if pid is not None}

    def refit(self) -> None:
        """A refit that must go well."""
        self._refit()

    def _judge(self, old: int | None, new: int) -> tuple[Outcome, str]:
        assert self.reader is not None
        return judge(self.reader, self.engine, old, new)

    def _is_new(self, new: int) -> bool:
        assert self.reader is not None
        return self.reader.holds(new)

    def _note(self, result: Result, outcome: Outcome, words: str) -> None:
        """Keep the worst of what was seen, else the last."""
        if result.outcome != "mixed":
            result.outcome, result.words = outcome, words

    def _arm(self, case: Case) -> None:
        trainers = self._live_trainers()
        if case.on_route:
            self.engine.arm_route(RouteStrike(ROUTES[case.phase], case.kind))
            return
        reach: Reach = "engine" if case.victim == "engine" else "rank"
        strike = Strike(case.point, case.kind, self._nth(case), reach)
        if case.victim.startswith("trainer"):
            trainers.do(arm_trainer, int(case.victim[-1]), strike)
        else:
            self.engine.arm(self._armed_ranks(case), strike)

    def _armed_ranks(self, case: Case) -> list[int]:
        if case.victim != "engine":
            return [int(case.victim[-1])]
        # A signal reaches all by the first; a second one would stop what was let go on.
        return [0] if case.kind in ("kill", "stop") else list(range(ENGINE))

    def _nth(self, case: Case) -> int:
        """Which pass is the case's part of the phase."""
        count = self._messages.get(case.victim, 1) if case.phase == "transfer" else 1
        return {"": 0, "first": 0, "middle": count // 2, "last": max(0, count - 1)}[case.part]

    def _watch(
        self, result: Result, case: Case, old: int | None, new: int, start: float
    ) -> dict[int, Said]:
        """Wait until every rank that lives has spoken, with an eye on the engine."""
        trainers = self._live_trainers()
        pending = dict(enumerate(trainers._pipes))
        said: dict[int, Said] = {}
        victim = int(case.victim[-1]) if case.victim.startswith("trainer") else -1
        while pending and time.monotonic() < start + BOUND:
            if case.kind == "stop" and set(pending) == {victim}:
                break
            for rank, answer in self._spoken(trainers, pending):
                del pending[rank]
                if answer is not None:
                    said[rank] = answer
            self._look(result, old, new)
        else:
            result.hung = tuple(f"trainer rank {rank}" for rank in pending)
        return said

    def _spoken(
        self, trainers: Trainers, pending: dict[int, Connection]
    ) -> Iterable[tuple[int, Said | None]]:
        ready = wait(list(pending.values()), _EYE_SECONDS)
        for rank, pipe in list(pending.items()):
            if pipe in ready:
                yield rank, _said(pipe)

    def _look(self, result: Result, old: int | None, new: int) -> None:
        """Torn weights that are served are mixed, however short."""
        engine = self.engine
        assert self.reader is not None
        acted = engine.acted
        if engine.paused or engine.down or engine.lost():
            return
        torn = not self.reader.holds(old) and not self.reader.holds(new)
        if torn and not engine.paused and engine.acted == acted and not engine.lost():
            result.outcome, result.words = "mixed", "torn weights while the engine served"

    def _thaw(self, result: Result, case: Case, said: dict[int, Said]) -> None:
        """Let what was stopped go on, and hear what it says."""
        if case.kind != "stop":
            return
        trainers = self._live_trainers()
        self.engine.thaw()
        if not case.victim.startswith("trainer"):
            time.sleep(0.1)
            return
        rank = int(case.victim[-1])
        pid = trainers._processes[rank].pid
        assert pid is not None
        os.kill(pid, signal.SIGCONT)
        if rank in said:
            return
        if not trainers._pipes[rank].poll(BOUND):
            result.hung += (case.victim,)
            return
        late = _said(trainers._pipes[rank])
        if late is not None and late.error is not None and late.error[0] == "crash":
            result.notes.append(late.text)

    def _recover(self, result: Result, case: Case) -> None:
        """Replace what died, and refit: it must go well at once."""
        self.engine.arm_route(None)
        if self.engine.down or self.engine.lost():
            self.engine.restart()
            self.held = None
        else:
            self.engine.arm([], None)
        trainers = self._live_trainers()
        if result.hung or any(not process.is_alive() for process in trainers._processes):
            self._end_trainers()
            self._start_trainers()
        else:
            trainers.do(arm_trainer, -1, None)
        try:
            if case.kind == "cut" and not result.text:
                self._refit_or_fail_well(result, case)
            self._refit()
        except AssertionError as error:
            result.recovered = False
            result.notes.append(str(error))
            self._renew()

    def _refit_or_fail_well(self, result: Result, case: Case) -> None:
        """A connection that was cut after its last message is found out by the next refit."""
        trainers = self._live_trainers()
        old, new = self.held, self.version + 1
        self.version = new
        trainers.start(step)
        texts = [said.text for said in trainers.ends(seconds=BOUND) if said.error is not None]
        outcome, words = self._judge(old, new)
        assert outcome != "mixed", words
        assert named(case, texts, self.engine.name), texts
        if outcome == "new":
            self.held = new
        result.text = texts[0] if texts else ""

    def _renew(self) -> None:
        """Start over with new processes on both sides."""
        self._end_trainers()
        self.engine.restart()
        self.held = None
        self._start_trainers()
        self._refit()

    def _refit(self) -> None:
        """A full refit that must go well."""
        trainers = self._live_trainers()
        self.version += 1
        trainers.do(step)
        if self.reader is None:
            self.reader = Reader(self._memory, CUTS, ENGINE)
        outcome, words = judge(self.reader, self.engine, self.held, self.version)
        assert outcome == "new", f"after the refit to {self.version}: {outcome}, {words}"
        assert not self.engine.violations, self.engine.violations
        self.held = self.version
        self._count_messages(trainers)

    def _count_messages(self, trainers: Trainers) -> None:
        if self._messages:
            return
        counts = [said.value for said in trainers.do(trainer_passes, "transfer")]
        self._messages = {f"trainer rank {r}": int(str(n)) for r, n in enumerate(counts)}
        engine = [self.engine.passes(rank, "transfer") for rank in range(ENGINE)]
        self._messages |= {"engine rank 1": engine[1], "engine": min(engine)}

    def _start_trainers(self) -> None:
        self._runs += 1
        folder = self._folder / f"run{self._runs}"
        folder.mkdir()
        self.trainers = Trainers(TRAINERS, "ddp", folder)
        self.trainers.do(install_trainer, str(self._memory), self._transport)
        self.trainers.do(resume, self.version)
        self.trainers.attach(
            self.engine.url,
            version=self.version,
            deadline=self._deadline,
            transport=self._transport,
            install=self._install,
            bucket_bytes=_BUCKET_BYTES,
            verify="always",
        )

    def _end_trainers(self) -> None:
        if self.trainers is not None:
            self.trainers.__exit__(None, None, None)
            self.trainers = None

    def _live_trainers(self) -> Trainers:
        assert self.trainers is not None
        return self.trainers


def _said(pipe: Connection) -> Said | None:
    """What a rank says; None if it died."""
    try:
        said = pickle.loads(pipe.recv_bytes())
    except (EOFError, OSError):
        return None
    assert isinstance(said, Said)
    return said
