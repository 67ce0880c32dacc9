"""How the trainer's ranks come together: one broadcast, then all over the control board.

Rank 0 decides (settings, engines, version) and serves the board; a failure there reaches all ranks
as the same error. Not here: sessions with engines.
"""

import ipaddress
import logging
import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from reshard.agreement import gather
from reshard.board import BoardClient, BoardServer, Deadline, Invitation
from reshard.board.addresses import local_address_towards
from reshard.board.client import LOST_SECONDS
from reshard.engine_control import EngineControl
from reshard.errors import EngineError, ReshardError
from reshard.ids import GroupRank, PolicyVersion
from reshard.wire import decode, encode
from reshard_trainer.census import make_source
from reshard_trainer.engines import HttpEngine
from reshard_trainer.ensemble import Ensemble
from reshard_trainer.link import EngineLink
from reshard_trainer.pilot import Pilot
from reshard_trainer.publisher import Publisher
from reshard_trainer.run import TrainerRun
from reshard_trainer.settings import Settings
from reshard_trainer.sources import WeightSource
from reshard_trainer.verdicts import ErrorRecord

logger = logging.getLogger(__name__)

_CLOSE_SECONDS = 5.0

STARTUP_SECONDS = 300.0
"""How long ranks wait for each other: one may still load its model."""

_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Request:
    """What the caller of `attach` wants; rank 0's counts.

    Attributes:
        engines: URLs, or control planes.
        settings: keyword arguments of `Settings`.
        run_id: name of the run; made unique.
        version: of the policy now.
    """

    engines: Sequence[str | EngineControl]
    settings: dict[str, object]
    run_id: str
    version: int


class Welcome(msgspec.Struct, frozen=True):
    """What rank 0 tells the others.

    Attributes:
        error: why there is nothing to join; None if there is.
        invitation: how to join the control board.
        run_id: unique to this run.
        version: of the policy now.
        settings: for all ranks.
        engines: names, in the order in which they are refitted.
    """

    error: ErrorRecord | None = None
    invitation: Invitation | None = None
    run_id: str = ""
    version: int = 0
    settings: Settings = Settings()
    engines: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Started:
    """All ranks have come together.

    Attributes:
        run: this rank's place.
        version: of the policy now, as rank 0 says.
        publisher: to all engines; nothing was sent to them yet.
    """

    run: TrainerRun
    version: PolicyVersion
    publisher: Publisher


def start(request: Request, ensemble: Ensemble, make: Callable[[], WeightSource]) -> Started:
    """Come together with the other trainer ranks.

    Args:
        request: of this rank's caller.
        ensemble: the trainer's ranks.
        make: makes this rank's source.

    Raises:
        ReshardError: the same on every rank.
    """
    opened = Opened(ensemble.rank, ensemble.size)
    try:
        deadline = Deadline.after(STARTUP_SECONDS)
        own = _decide(request, opened) if ensemble.rank == 0 else Welcome()
        welcome = decode(ensemble.broadcast(encode(own), deadline), Welcome)
        if welcome.error is not None:
            raise welcome.error.error()
        assert welcome.invitation is not None
        lost = min(LOST_SECONDS, welcome.settings.deadline_seconds)
        opened.board = board = BoardClient(welcome.invitation, deadline, lost_seconds=lost)
        source = make_source(board, ensemble.rank, ensemble.size, make, deadline)
    except BaseException:
        opened.close()
        raise
    run = TrainerRun(
        run_id=welcome.run_id,
        rank=GroupRank(ensemble.rank),
        size=ensemble.size,
        board=board,
        invitation=welcome.invitation,
        settings=welcome.settings,
        source=source,
    )
    pilots = {control.name: Pilot(control, board) for control in opened.controls}
    links = [EngineLink(name, run, pilots.get(name)) for name in welcome.engines]
    return Started(run, PolicyVersion(welcome.version), Publisher(run, links, opened.close))


@dataclass(slots=True)
class Opened:
    """What this rank has opened, to be closed at the end or after a failure.

    Attributes:
        rank, size: of the trainer.
        server: on rank 0, the control board.
        board: this rank's client of it.
        controls: on rank 0, of all engines.
        owned: those of them that were made here.
    """

    rank: int
    size: int
    server: BoardServer | None = None
    board: BoardClient | None = None
    controls: list[EngineControl] = field(default_factory=list)
    owned: list[EngineControl] = field(default_factory=list)

    def close(self) -> None:
        """Leave the control board; it goes with rank 0, which waits until all others have left."""
        for control in self.owned:
            control.close()
        if self.board is not None:
            patience = Deadline.after(_CLOSE_SECONDS)
            try:
                if self.rank == 0:
                    gather(self.board, "trainer/left", 0, range(1, self.size), b"", patience)
                else:
                    # And nothing more: rank 0 may take the board away as soon as it is there.
                    self.board.put(f"trainer/left/{self.rank}", b"", patience)
            except ReshardError as error:
                logger.warning("trainer rank %d leaves alone: %s", self.rank, error)
            self.board.close()
        if self.server is not None:
            self.server.close()


def _decide(request: Request, opened: Opened) -> Welcome:
    """Rank 0: open what the run needs, or say why there is none."""
    try:
        if request.version < 0:
            raise ReshardError(f"version={request.version}: a policy version is not negative")
        settings = Settings(**request.settings)  # type: ignore[arg-type]
        _make_controls(request.engines, opened)
        opened.server = BoardServer(settings.host or _board_host(opened.controls))
    except Exception as error:
        return Welcome(ErrorRecord.of(error))
    # Unique: an engine must tell a restarted trainer from the one that it knows.
    unique = secrets.token_hex(6)
    return Welcome(
        invitation=opened.server.invitation,
        run_id=f"{request.run_id}-{unique}" if request.run_id else unique,
        version=request.version,
        settings=settings,
        engines=tuple(control.name for control in opened.controls),
    )


def _make_controls(given: Sequence[str | EngineControl], opened: Opened) -> None:
    if isinstance(given, str) or not given:
        raise EngineError(
            f"engines={given!r}: give a list with at least one engine, such as "
            '["http://127.0.0.1:8000"]'
        )
    for engine in given:
        control = as_engine(engine)
        opened.controls.append(control)
        if control is not engine:
            opened.owned.append(control)
    names = Counter(control.name for control in opened.controls)
    twice = sorted(name for name, count in names.items() if count > 1)
    if twice:
        raise EngineError("engines that are named more than once", twice)


def as_engine(engine: str | EngineControl) -> EngineControl:
    """A URL's server, or the object itself.

    Raises:
        EngineError: neither a URL nor a control plane.
    """
    if isinstance(engine, str):
        return HttpEngine(engine)
    if not isinstance(engine, EngineControl):
        raise EngineError(
            f"engine {engine!r} is neither a URL nor an EngineControl (reshard.engine_control); "
            "wrap a vllm.LLM as reshard_trainer.InProcessEngine(llm)"
        )
    return engine


def _board_host(controls: Sequence[EngineControl]) -> str:
    """The address of this machine that engines can reach: loopback if all are here."""
    found = [_LOOPBACK]
    for control in controls:
        if isinstance(control, HttpEngine):
            try:
                found.append(local_address_towards(control.host))
            except OSError as error:
                raise EngineError(
                    f"engine {control.name}: its host has no address from here ({error})"
                ) from error
    outward = [host for host in found if not ipaddress.ip_address(host).is_loopback]
    return (outward or found)[-1]
