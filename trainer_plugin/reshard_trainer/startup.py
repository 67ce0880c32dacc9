"""How the trainer's ranks come together: one broadcast, then all over the control board.

Rank 0 decides (settings, engines, version) and serves the board; a failure there reaches all ranks
as the same error. Not here: sessions with engines.
"""

import ipaddress
import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from reshard.board import BoardClient, BoardServer, Deadline, Invitation
from reshard.board.addresses import local_address_towards
from reshard.engine_control import EngineControl
from reshard.errors import EngineError, ReshardError
from reshard.ids import GroupRank, PolicyVersion
from reshard.wire import decode, encode
from reshard_trainer.census import make_source
from reshard_trainer.engines import HttpEngine
from reshard_trainer.ensemble import Ensemble
from reshard_trainer.link import EngineLink
from reshard_trainer.pilot import Pilot
from reshard_trainer.publisher import Publisher, leave_board
from reshard_trainer.run import TrainerRun
from reshard_trainer.settings import Settings
from reshard_trainer.sources import WeightSource
from reshard_trainer.verdicts import ErrorRecord

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
    deadline = Deadline.after(STARTUP_SECONDS)
    pilots: dict[str, Pilot] = {}
    server: BoardServer | None = None
    controls: list[EngineControl] = []
    welcome = Welcome()
    if ensemble.rank == 0:
        try:
            settings = Settings(**request.settings)  # type: ignore[arg-type]
            controls = _engines(request.engines)
            server = BoardServer(settings.host or _board_host(controls))
            welcome = _welcome(request, settings, controls, server)
        except Exception as error:
            welcome = Welcome(ErrorRecord.of(error))
    welcome = decode(ensemble.broadcast(encode(welcome), deadline), Welcome)
    if welcome.error is not None:
        raise welcome.error.error()
    assert welcome.invitation is not None
    board = BoardClient(welcome.invitation, deadline)
    try:
        source = make_source(board, ensemble.rank, ensemble.size, make, deadline)
    except BaseException:
        leave_board(board, ensemble.rank, ensemble.size, server)
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
    pilots = {control.name: Pilot(control, board) for control in controls}
    links = [EngineLink(name, run, pilots.get(name)) for name in welcome.engines]
    return Started(run, PolicyVersion(welcome.version), Publisher(run, links, server))


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


def _engines(given: Sequence[str | EngineControl]) -> list[EngineControl]:
    if isinstance(given, str) or not given:
        raise EngineError(
            f"engines={given!r}: give a list with at least one engine, such as "
            '["http://127.0.0.1:8000"]'
        )
    controls = [as_engine(engine) for engine in given]
    names = Counter(control.name for control in controls)
    twice = sorted(name for name, count in names.items() if count > 1)
    if twice:
        raise EngineError("engines that are named more than once", twice)
    return controls


def _welcome(
    request: Request, settings: Settings, controls: Sequence[EngineControl], server: BoardServer
) -> Welcome:
    if request.version < 0:
        raise ReshardError(f"version={request.version}: a policy version is not negative")
    # Unique: an engine must tell a restarted trainer from the one that it knows.
    unique = secrets.token_hex(6)
    return Welcome(
        invitation=server.invitation,
        run_id=f"{request.run_id}-{unique}" if request.run_id else unique,
        version=request.version,
        settings=settings,
        engines=tuple(control.name for control in controls),
    )


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
