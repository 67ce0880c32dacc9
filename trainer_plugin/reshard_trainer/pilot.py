"""Trainer rank 0's hold on one engine: the control calls of a refit, in their order.

Knows at each point what a failure leaves behind: whether vLLM's update session is open, whether
the engine is paused, whether its weights may be of two versions. Not here: bytes, other ranks.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Final

import msgspec

from reshard.agreement import fault_error
from reshard.board import BoardClient, Deadline
from reshard.engine_control import EngineControl, EngineDescription, Fenceable, Message
from reshard.errors import DeadlineExceeded, EngineError, ReshardError
from reshard.session import (
    CommitInfo,
    ConnectInfo,
    EngineHello,
    RankResult,
    ReceiveInfo,
    attempt_scope,
    scope,
)
from reshard.wire import decode
from reshard_trainer.reports import EngineState
from reshard_trainer.settings import PrefixCache
from reshard_trainer.verdicts import write_fault

logger = logging.getLogger(__name__)

_TIDY_SECONDS: Final = (5.0, 20.0)
"""How long a failed refit tries to leave the engine as it was: a phase's deadline, within these."""

_COMMIT_TRIALS: Final = 2
"""How often a commit is asked for: what failed on one rank of several leaves no other way out."""

_RESET_PAUSE_SECONDS: Final = 0.05


class Pilot:
    """Drives one engine. Its calls come from one thread at a time.

    Attributes:
        name: the engine's.
        seconds: by phase, of the refit that runs.
        pause_seconds: how long the engine was paused in the last refit that succeeded.
    """

    def __init__(self, control: EngineControl, board: BoardClient) -> None:
        self.name = control.name
        self.seconds: dict[str, float] = {}
        self.pause_seconds = 0.0
        self._paused_at = 0.0
        self._control = control
        self._board = board
        self._connecting: threading.Thread | None = None
        self._connect_error: ReshardError | None = None
        self._admitted = False
        self._label = ""
        self._tidy_seconds = _TIDY_SECONDS[1]
        self._stale_update = False
        self._open = False
        self._paused = False
        self._torn = False
        self._doubtful = False
        self._fenced = False
        self._version: int | None = None

    def describe(self, deadline: Deadline) -> EngineDescription:
        """Check that the engine can be refitted, before any worker is reached.

        Raises:
            EngineError: it cannot, and why.
        """
        description = self._control.describe(deadline)
        self._label = description.weight_version
        # Another trainer may have left it so.
        self._fenced = self._fenced or description.paused
        low, high = _TIDY_SECONDS
        self._tidy_seconds = min(high, max(low, deadline.seconds))
        return description

    def connect(self, info: ConnectInfo, deadline: Deadline) -> None:
        """Have the engine's ranks join; returns once all have introduced themselves well.

        The call itself goes on until they have joined; its failure becomes the session's fault.

        Raises:
            EngineError: not reached, taken, asleep, or of another version of reshard.
        """
        self._await_connect(deadline)
        self._connect_error = None
        self._doubtful = self._open = self._admitted = False
        thread = threading.Thread(
            target=self._connect, args=(info, deadline), name=f"reshard-{self.name}", daemon=True
        )
        self._connecting = thread
        thread.start()
        hellos = self._hellos(info, deadline)
        _check_hellos(self.name, info, hellos)
        self._admitted = True
        self._stale_update = any(hello.update_active for hello in hellos)

    def settle(self, deadline: Deadline) -> None:
        """After all ranks have joined: end the connect call, and what a dead trainer left open."""
        self._await_connect(deadline)
        if self._stale_update:
            self._control.finish(None, deadline)
            self._stale_update = False

    def begin(self, info: ConnectInfo, order: ReceiveInfo, deadline: Deadline) -> None:
        """Have the engine's ranks start to receive."""
        self.seconds = {}
        self._version = order.version
        if info.install == "in_place":
            self._pause(deadline)
        self._call("begin", lambda: self._control.begin(deadline))
        self._open = True
        if info.install == "in_place":
            self._torn = True
        self._call("begin", lambda: self._control.receive(_plain(order), deadline))

    def install(
        self,
        info: ConnectInfo,
        order: ReceiveInfo,
        prefix_cache: PrefixCache,
        deadline: Deadline,
    ) -> None:
        """Pause, make the received version live, label it, drop old KV blocks, resume.

        Raises:
            EngineError: a rank could not, or the cache could not be reset.
        """
        if info.install == "staged":
            self._pause(deadline)
        self._torn = True
        self._commit(info, order, deadline)
        self._call("finish", lambda: self._control.finish(str(order.version), deadline))
        self._open, self._label = False, str(order.version)
        if prefix_cache == "reset":
            self._call("reset", lambda: self._reset(deadline))
        self._torn = False
        self._lift_fence(deadline)
        self._call("resume", lambda: self._control.resume(deadline))
        self._paused = False
        self.pause_seconds = time.perf_counter() - self._paused_at

    def abandon(self) -> EngineState:
        """After a failure: leave the engine at its old version and resumed, or held if torn."""
        deadline = Deadline.after(self._tidy_seconds)
        try:
            self._await_connect(deadline)
            if self._open and not self._doubtful:
                self._control.finish(None, deadline)
                self._open = False
            if self._torn:
                self._fence(deadline)
                return "held"
            if self._paused:
                self._control.resume(deadline)
                self._paused = False
        except ReshardError as error:
            logger.warning("engine %s: tidying up failed: %s", self.name, error)
            return "unknown"
        # Nobody knows what became of an engine whose connect call ended badly, either.
        return "unknown" if self._doubtful or self._connect_error else "serving"

    def explain(self, error: BaseException) -> BaseException:
        """The failed connect call itself, where `error` only is its consequence."""
        if isinstance(self._connect_error, DeadlineExceeded):
            # Its ranks waited, too: what this rank knows of the one that did not come says more.
            return error
        return self._connect_error or error

    def release(self) -> None:
        """Have the engine's ranks leave the session, if it is still ours; the engine serves on."""
        if not self._admitted or self._open or self._doubtful:
            return
        deadline = Deadline.after(self._tidy_seconds)
        try:
            self._await_connect(deadline)
            # Another label: another trainer has taken the engine over.
            if self._control.weight_version(deadline) == self._label:
                self._control.release(deadline)
        except ReshardError as error:
            logger.warning("engine %s was not released: %s", self.name, error)

    def _connect(self, info: ConnectInfo, deadline: Deadline) -> None:
        try:
            self._control.connect(_plain(info), deadline)
        except ReshardError as error:
            self._connect_error = error
            if isinstance(error, DeadlineExceeded):
                return
            write_fault(self._board, scope(info.engine, info.epoch), 0, "connect", error)

    def _await_connect(self, deadline: Deadline) -> None:
        thread = self._connecting
        if thread is None:
            return
        thread.join(deadline.remaining())
        if thread.is_alive():
            raise DeadlineExceeded(
                f"engine {self.name} is still busy with an earlier connect call "
                f"(within {deadline.seconds:g} s)"
            )
        self._connecting = None

    def _hellos(self, info: ConnectInfo, deadline: Deadline) -> list[EngineHello]:
        prefix = scope(info.engine, info.epoch)
        found = self._answers(
            [f"{prefix}/hello/{rank}" for rank in range(info.engine_size)],
            f"{prefix}/fault",
            "connect",
            info,
            deadline,
        )
        return [
            decode(raw, EngineHello, sender=f"engine rank {rank}") for rank, raw in enumerate(found)
        ]

    def _commit(self, info: ConnectInfo, order: ReceiveInfo, deadline: Deadline) -> None:
        """Have all ranks commit; where only some could, roll forward: all have what it takes."""
        faults: list[str] = []
        for trial in range(1, _COMMIT_TRIALS + 1):
            commit = CommitInfo(order.run_id, order.epoch, order.attempt, order.version, trial)
            self._call("commit", lambda: self._control.commit(_plain(commit), deadline))  # noqa: B023
            start = time.perf_counter()
            faults = self._commit_faults(info, commit, deadline)
            self.seconds["commit"] += time.perf_counter() - start
            if not faults:
                return
            logger.warning("engine %s, commit %d: %s", self.name, trial, "; ".join(faults))
        raise EngineError(f"engine {self.name} could not commit version {order.version}", faults)

    def _commit_faults(
        self, info: ConnectInfo, commit: CommitInfo, deadline: Deadline
    ) -> list[str]:
        """What the ranks say of a commit; empty if all have made it."""
        prefix = attempt_scope(info.engine, info.epoch, commit.attempt)
        ranks = range(info.trainer_size, info.trainer_size + info.engine_size)
        found = self._answers(
            [f"{prefix}/committed{commit.trial}/{rank}" for rank in ranks],
            f"{scope(info.engine, info.epoch)}/fault",
            "commit",
            info,
            deadline,
        )
        results = [
            decode(raw, RankResult, sender=f"engine rank {rank}") for rank, raw in enumerate(found)
        ]
        faults = [
            f"engine rank {rank}: {result.error}"
            for rank, result in enumerate(results)
            if result.error
        ]
        for result in results:
            for step, seconds in result.seconds.items():
                key = f"commit/{step}"
                self.seconds[key] = max(seconds, self.seconds.get(key, 0.0))
        return faults

    def _answers(
        self, keys: list[str], fault: str, phase: str, info: ConnectInfo, deadline: Deadline
    ) -> list[bytes]:
        """One value of each engine rank, in the order of `keys`."""
        found = self._board.get_all(keys, deadline, unless=fault)
        if not found.missing:
            return [found.values[key] for key in keys]
        if fault in found.values:
            raise fault_error(found.values[fault], info.trainer_size)
        silent = ", ".join(f"engine rank {keys.index(key)}" for key in found.missing)
        raise DeadlineExceeded(
            f"no answer from {silent} of {self.name} in phase {phase} within "
            f"{deadline.seconds:g} s; can its host reach the control board at "
            f"{self._board.address}?"
        )

    def _fence(self, deadline: Deadline) -> None:
        """Have requests refused rather than held, where the engine can."""
        self._fenced = True
        if isinstance(self._control, Fenceable):
            self._control.fence(
                f"the install of policy version {self._version} did not finish, so the weights may "
                "be of two versions; the next refit that succeeds ends this",
                deadline,
            )

    def _lift_fence(self, deadline: Deadline) -> None:
        control = self._control
        if self._fenced and isinstance(control, Fenceable):
            control.fence("", deadline)
        self._fenced = False

    def _pause(self, deadline: Deadline) -> None:
        # Set first: a call without an answer may have taken effect.
        self._paused = True
        self._paused_at = time.perf_counter()
        self._call("pause", lambda: self._control.pause(deadline))

    def _reset(self, deadline: Deadline) -> None:
        while not self._control.reset_prefix_cache(deadline):
            if deadline.remaining() <= _RESET_PAUSE_SECONDS:
                raise EngineError(
                    f"engine {self.name} could not reset its prefix cache within "
                    f"{deadline.seconds:g} s: KV blocks of the old weights are still held. The new "
                    "weights are live; the next refit tries again, or attach with "
                    'prefix_cache="keep"'
                )
            time.sleep(_RESET_PAUSE_SECONDS)

    def _call(self, phase: str, call: Callable[[], None]) -> None:
        """A control call: after one that failed, nobody knows whether it took effect."""
        try:
            self._timed(phase, call)
        except ReshardError:
            self._doubtful = True
            raise

    def _timed(self, phase: str, step: Callable[[], None]) -> None:
        start = time.perf_counter()
        try:
            step()
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start


def _check_hellos(name: str, info: ConnectInfo, hellos: list[EngineHello]) -> None:
    faults = []
    own = installed_version()
    for hello in hellos:
        who = f"engine rank {hello.rank}"
        if hello.state in ("taken", "asleep", "failed"):
            faults.append(f"{who} is {hello.state}: {hello.detail or 'no reason given'}")
        # Replicas of a dense model know nothing of each other: each counts its own ranks.
        if info.engine_size % hello.size or hello.rank >= info.engine_size:
            faults.append(f"{who} counts {hello.size} ranks; {info.engine_size} are expected")
        theirs = hello.versions.get("reshard", "unknown")
        if theirs != own:
            faults.append(f"{who} runs reshard {theirs}, the trainer {own}; install the same")
    if faults:
        raise EngineError(f"engine {name} cannot be refitted; nothing was sent", faults)


def installed_version() -> str:
    """Version of reshard, `source` where it is not installed."""
    try:
        return version("reshard")
    except PackageNotFoundError:
        return "source"


def _plain(message: msgspec.Struct) -> Message:
    """A message as plain JSON values, as vLLM's routes take it."""
    plain: Mapping[str, object] = msgspec.to_builtins(message)
    return plain
