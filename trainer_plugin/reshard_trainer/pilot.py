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
from reshard.engine_control import EngineControl, EngineDescription, Message
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

_TIDY_SECONDS: Final = 20.0
"""How long a failed refit tries to leave the engine as it was."""

_RESET_PAUSE_SECONDS: Final = 0.05


class Pilot:
    """Drives one engine. Its calls come from one thread at a time.

    Attributes:
        name: the engine's.
        seconds: by phase, of the refit that runs.
    """

    def __init__(self, control: EngineControl, board: BoardClient) -> None:
        self.name = control.name
        self.seconds: dict[str, float] = {}
        self._control = control
        self._board = board
        self._connecting: threading.Thread | None = None
        self._connect_error: ReshardError | None = None
        self._admitted = False
        self._label = ""
        self._stale_update = False
        self._open = False
        self._paused = False
        self._torn = False
        self._doubtful = False

    def describe(self, deadline: Deadline) -> EngineDescription:
        """Check that the engine can be refitted, before any worker is reached.

        Raises:
            EngineError: it cannot, and why.
        """
        description = self._control.describe(deadline)
        self._label = description.weight_version
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
        label = CommitInfo(order.run_id, order.epoch, order.attempt, order.version)
        self._pause(deadline)
        self._torn = True
        self._call("commit", lambda: self._control.commit(_plain(label), deadline))
        self._timed("commit", lambda: self._await_committed(info, order, deadline))
        self._call("finish", lambda: self._control.finish(str(order.version), deadline))
        self._open, self._label = False, str(order.version)
        if prefix_cache == "reset":
            self._call("reset", lambda: self._reset(deadline))
        self._torn = False
        self._call("resume", lambda: self._control.resume(deadline))
        self._paused = False

    def abandon(self) -> EngineState:
        """After a failure: leave the engine at its old version and resumed, or held if torn."""
        deadline = Deadline.after(_TIDY_SECONDS)
        try:
            self._await_connect(deadline)
            if self._open and not self._doubtful:
                self._control.finish(None, deadline)
                self._open = False
            if self._torn:
                return "held"
            if self._paused:
                self._control.resume(deadline)
                self._paused = False
        except ReshardError as error:
            logger.warning("engine %s: tidying up failed: %s", self.name, error)
            return "unknown"
        return "unknown" if self._doubtful else "serving"

    def explain(self, error: BaseException) -> BaseException:
        """The failed connect call itself, where `error` only is its consequence."""
        return self._connect_error or error

    def release(self) -> None:
        """Have the engine's ranks leave the session, if it is still ours; the engine serves on."""
        if not self._admitted or self._open or self._doubtful:
            return
        deadline = Deadline.after(_TIDY_SECONDS)
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
        return [decode(raw, EngineHello) for raw in found]

    def _await_committed(self, info: ConnectInfo, order: ReceiveInfo, deadline: Deadline) -> None:
        prefix = attempt_scope(info.engine, info.epoch, order.attempt)
        ranks = range(info.trainer_size, info.trainer_size + info.engine_size)
        found = self._answers(
            [f"{prefix}/committed/{rank}" for rank in ranks],
            f"{scope(info.engine, info.epoch)}/fault",
            "commit",
            info,
            deadline,
        )
        results = [decode(raw, RankResult) for raw in found]
        faults = [
            f"engine rank {rank}: {result.error}"
            for rank, result in enumerate(results)
            if result.error
        ]
        if faults:
            raise EngineError(
                f"engine {self.name} could not commit version {order.version}", faults
            )
        for result in results:
            for step, seconds in result.seconds.items():
                key = f"commit/{step}"
                self.seconds[key] = max(seconds, self.seconds.get(key, 0.0))

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

    def _pause(self, deadline: Deadline) -> None:
        # Set first: a call without an answer may have taken effect.
        self._paused = True
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
        if hello.size != info.engine_size:
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
