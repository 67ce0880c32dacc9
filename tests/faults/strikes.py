"""Faults in the processes of a refit: where they strike, and what they do there.

Points are wrapped around the product's own functions once, when a process starts; a strike that is
armed fires at one pass of one point. Imported by trainer ranks and by engine ranks.
"""

import functools
import os
import signal
import socket
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Kind = Literal["exception", "kill", "stop", "cut", "wrong"]
Reach = Literal["rank", "engine"]

TEXT = "struck by the matrix"
_JUNK = b"\xc1"  # the one byte that MessagePack never uses


@dataclass(frozen=True, slots=True)
class Strike:
    """A fault to come.

    Attributes:
        point: where.
        kind: what happens there.
        nth: at which pass, from 0, counted from the arming.
        reach: `engine`: kill and stop take all ranks of the engine, and its server.
    """

    point: str
    kind: Kind
    nth: int = 0
    reach: Reach = "rank"


class _Process:
    """What the wrappers share; one a process."""

    def __init__(self) -> None:
        self.folder = Path()
        self.strike: Strike | None = None
        self.passes: Counter[str] = Counter()
        self.corrupt_next_put = False
        self.boards: set[int] = set()
        self.servers: set[int] = set()
        self.before: set[str] = set()
        self.kept: list[object] = []


_process = _Process()


def arm(strike: Strike | None) -> None:
    """Strike once from now on, or never; counting begins anew."""
    _process.strike = strike
    _process.passes.clear()
    _process.corrupt_next_put = False


def passes(point: str) -> int:
    """How often a point was passed since the last arming."""
    return _process.passes[point]


def fired(folder: Path) -> Path:
    """The file that appears when a strike has fired."""
    return folder / "fired"


def reached(point: str) -> bool:
    """Pass a point. True: this pass is to be done wrongly (`wrong`), by the caller.

    Raises:
        RuntimeError: as armed.
    """
    strike = _process.strike
    if strike is None or strike.point != point:
        _process.passes[point] += 1
        return False
    number = _process.passes[point]
    _process.passes[point] += 1
    if number != strike.nth:
        return False
    _process.strike = None
    fired(_process.folder).touch()
    match strike.kind:
        case "exception":
            raise RuntimeError(f"{TEXT} at {point}")
        case "kill" | "stop":
            _signal(strike)
        case "cut":
            cut(data=point in ("snapshot", "transfer", "verify"))
        case "wrong":
            return True
    return False


def _signal(strike: Strike) -> None:
    number = signal.SIGKILL if strike.kind == "kill" else signal.SIGSTOP
    if strike.reach == "engine":
        (_process.folder / ("down" if strike.kind == "kill" else "frozen")).touch()
        for pid in (_process.folder / "pids").read_text().split():
            if int(pid) != os.getpid():
                with suppress(ProcessLookupError):
                    os.kill(int(pid), number)
    os.kill(os.getpid(), number)


def cut(*, data: bool) -> None:
    """Cut this process's connections: those of the private group, or those to the board."""
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
        with suppress(OSError):
            place = str(Path(f"/proc/self/fd/{name}").readlink())
            if not place.startswith("socket:") or place in _process.before:
                continue
            copy = socket.socket(fileno=os.dup(int(name)))
            with copy:
                if copy.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                ports = {copy.getsockname()[1], copy.getpeername()[1]}
                of_board = bool(ports & _process.boards)
                if of_board != data and not ports & _process.servers:
                    copy.shutdown(socket.SHUT_RDWR)


def _sockets() -> set[str]:
    found = set()
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
        with suppress(OSError):
            found.add(str(Path(f"/proc/self/fd/{name}").readlink()))
    return found


def _wrap(owner: object, name: str, point: str) -> None:
    """Make a function a point; done wrongly, its next message on the board is junk."""
    inner: Callable[..., object] = getattr(owner, name)

    @functools.wraps(inner)
    def wrapped(*arguments: object, **keywords: object) -> object:
        if reached(point):
            _process.corrupt_next_put = True
        return inner(*arguments, **keywords)

    setattr(owner, name, wrapped)


def _note_ports() -> None:
    from reshard.board import BoardClient
    from reshard_trainer.http_calls import HttpCalls

    make_client, make_calls, put = BoardClient.__init__, HttpCalls.__init__, BoardClient.put

    def client(self, invitation, *arguments, **keywords):  # type: ignore[no-untyped-def]
        _process.boards.add(int(invitation.address.rpartition(":")[2]))
        make_client(self, invitation, *arguments, **keywords)

    def calls(self, url, *arguments, **keywords):  # type: ignore[no-untyped-def]
        _process.servers.add(int(url.rpartition(":")[2]))
        make_calls(self, url, *arguments, **keywords)

    def corrupted(self, key, value, *arguments, **keywords):  # type: ignore[no-untyped-def]
        if _process.corrupt_next_put:
            _process.corrupt_next_put = False
            value = _JUNK + value
        put(self, key, value, *arguments, **keywords)

    BoardClient.__init__ = client  # type: ignore[method-assign]
    HttpCalls.__init__ = calls  # type: ignore[method-assign]
    BoardClient.put = corrupted  # type: ignore[method-assign]


def _install_messages() -> None:
    from reshard.transport.group import RefitGroup

    send, receive = RefitGroup.send, RefitGroup.receive

    def sending(self, message, peer, tag):  # type: ignore[no-untyped-def]
        if reached("transfer"):
            # A copy: the message may be the weights themselves.
            message = message.clone()
            message[0] ^= 0xFF
            _process.kept.append(message)
        return send(self, message, peer, tag)

    def receiving(self, message, peer, tag):  # type: ignore[no-untyped-def]
        wrong = reached("transfer")
        work = receive(self, message, peer, tag)
        return _Spoilt(work, message) if wrong else work

    RefitGroup.send = sending  # type: ignore[method-assign]
    RefitGroup.receive = receiving  # type: ignore[method-assign]


class _Spoilt:
    """A message that arrives with one wrong byte."""

    def __init__(self, work, message) -> None:  # type: ignore[no-untyped-def]
        self._work, self._message = work, message

    def wait(self, *arguments: object) -> object:
        answer = self._work.wait(*arguments)
        self._message[0] ^= 0xFF
        return answer


def _install_digests(module: object) -> None:
    digest = module.digest_moves  # type: ignore[attr-defined]

    def digesting(*arguments: object) -> dict[int, int]:
        wrong = reached("verify")
        return {peer: each + wrong for peer, each in digest(*arguments).items()}

    module.digest_moves = digesting  # type: ignore[attr-defined]


def install_trainer(state: object, folder: str, transport: str) -> None:
    """Make this trainer rank's functions points; a command of `Trainers`."""
    import reshard_trainer.session
    from reshard.plan.cache import PlanCache
    from reshard.transport import exhibits, shm, windows
    from reshard_trainer.engines import HttpEngine
    from reshard_trainer.link import EngineLink
    from reshard_trainer.sources import ModuleSource

    _process.folder = Path(folder)
    _process.before = _sockets()
    _note_ports()
    _wrap(ModuleSource, "refresh", "describe")
    _wrap(PlanCache, "plan", "plan")
    _wrap(reshard_trainer.session, "open_group", "bootstrap")
    _install_digests(reshard_trainer.session)
    for step in ("commit", "finish", "reset_prefix_cache"):
        _wrap(HttpEngine, step, step)
    hear = EngineLink._hear

    def hearing(self, key, failure):  # type: ignore[no-untyped-def]
        if key.endswith("/refit"):
            reached("hear")
        return hear(self, key, failure)

    EngineLink._hear = hearing  # type: ignore[method-assign]
    if transport == "gloo":
        _wrap(windows.Windows, "run", "snapshot")
        _install_messages()
        return
    _wrap(shm.ShmExchange, "finish", "transfer")
    refresh = exhibits.Snapshot.refresh

    def refreshing(self):  # type: ignore[no-untyped-def]
        wrong = reached("snapshot")
        refresh(self)
        if wrong:
            self._memory.memory[0] ^= 0xFF

    exhibits.Snapshot.refresh = refreshing  # type: ignore[method-assign]


def install_engine(folder: str, transport: str, spoil: Callable[[], None]) -> None:
    """Make this engine rank's functions points.

    Args:
        folder: of the engine.
        transport: how bytes move.
        spoil: changes one byte of what this rank has received.
    """
    import reshard_vllm.attempt
    import reshard_vllm.membership
    from reshard.plan.cache import PlanCache
    from reshard.transport import shm

    _process.folder = Path(folder)
    _process.before = _sockets()
    _note_ports()
    _wrap(PlanCache, "plan", "plan")
    _wrap(reshard_vllm.membership, "open_group", "bootstrap")
    _install_digests(reshard_vllm.attempt)
    if transport == "gloo":
        _install_messages()
        return
    check = shm.ShmExchange._check_seal

    def checking(self, *arguments):  # type: ignore[no-untyped-def]
        if reached("transfer"):
            spoil()
        check(self, *arguments)

    shm.ShmExchange._check_seal = checking  # type: ignore[method-assign]


def arm_trainer(state: object, rank: int, strike: Strike | None) -> None:
    """Arm one trainer rank; a command of `Trainers`."""
    arm(strike if getattr(state, "rank", -1) == rank else None)


def trainer_passes(state: object, point: str) -> int:
    """`passes`, as a command of `Trainers`."""
    return passes(point)
