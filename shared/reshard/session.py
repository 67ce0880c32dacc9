"""The messages of a refit session between one trainer and one engine.

A session is one *epoch*: a trainer connects (or reconnects) to an engine, both sides describe
their layouts, build the same plan and open a private group. Then each refit is one *attempt*.

Keys on the board, under `scope(engine, epoch)`:

    specs                 trainer rank 0   tuple[TensorSpec, ...]: the canonical tensors
    hello/<engine rank>   engine           EngineHello
    layout/<group rank>   every rank       LayoutReport
    world                 trainer rank 0   joining.World: all reports, merged
    digest/...            every rank       agreement on the plan's digest
    group/...             every rank       rendezvous of the private process group
    fault                 first writer     Fault: the culprit of the first failure
    a<attempt>/received/<group rank>    RankResult: this rank's bytes have arrived (or left)
    a<attempt>/committed<trial>/<group rank>   RankResult: this engine rank serves the new version

Control calls (`ConnectInfo`, `ReceiveInfo`, `CommitInfo`) travel as JSON through vLLM's own
routes; every answer comes over the board, because an exception in a vLLM worker desynchronises
the worker replies for good.
"""

from typing import Literal

import msgspec

from reshard.board import Invitation
from reshard.dtypes import DType
from reshard.layout.compact import CompactSide

Transport = Literal["auto", "gloo", "nccl", "shm"]
Install = Literal["staged", "in_place"]
Share = Literal["snapshot", "live"]
Verify = Literal["first", "always", "never"]


class TensorSpec(msgspec.Struct, frozen=True):
    """A canonical tensor as the trainer publishes it.

    Attributes:
        name: canonical (checkpoint) name.
        shape: whole shape, in elements.
        dtype: the trainer's dtype.
    """

    name: str
    shape: tuple[int, ...]
    dtype: DType


class StoredAt(msgspec.Struct, frozen=True):
    """A sealed version in a store, to be read by the engine's ranks themselves.

    Attributes:
        folder: of one run's versions, as every engine rank sees it.
        version: which.
        run_id: the run that wrote it.
    """

    folder: str
    version: int
    run_id: str


class ConnectInfo(msgspec.Struct, frozen=True):
    """What an engine's ranks need to join a session.

    Attributes:
        run_id: the training run.
        engine: this engine's name on the board.
        epoch: number of this session with this engine, from 1.
        trainer_size: number of trainer ranks.
        engine_size: number of engine ranks, data-parallel replicas included.
        invitation: how to join the control board; holds the secret.
        host: address or interface on which the private group listens; None: that of the board.
        transport: how bytes move.
        install: `staged` (shadow, all-or-nothing) or `in_place` (bounded memory).
        bucket_bytes: largest message, in bytes.
        buffer_bytes: most memory that a rank may take beside its weights; None: no bound.
        deadline_seconds: bound of every wait of one phase.
        takeover: whether to replace another trainer's session.
        verify: in which refits both ends digest what went between them and compare: the first of a
            session, every one, or none.
        stored: where the engine's ranks read the weights themselves; None: the trainer sends them.
    """

    run_id: str
    engine: str
    epoch: int
    trainer_size: int
    engine_size: int
    invitation: Invitation
    host: str | None
    transport: Transport
    install: Install
    bucket_bytes: int
    deadline_seconds: float
    takeover: bool = False
    verify: Verify = "first"
    buffer_bytes: int | None = None
    stored: StoredAt | None = None

    def verifies(self, attempt: int) -> bool:
        """Whether attempt number `attempt` of the session is verified."""
        return self.verify == "always" or (self.verify == "first" and attempt == 1)


class ReceiveInfo(msgspec.Struct, frozen=True):
    """Start receiving one version.

    Attributes:
        run_id: the training run.
        epoch: the session.
        attempt: number of this refit within the session, from 1.
        version: the policy version that arrives.
        plan_digest: of the plan that the trainer executes.
    """

    run_id: str
    epoch: int
    attempt: int
    version: int
    plan_digest: str


class CommitInfo(msgspec.Struct, frozen=True):
    """Make the received version live; the engine is paused.

    Attributes:
        run_id, epoch, attempt, version: as in `ReceiveInfo`.
        trial: counts from 1; a rank that has committed already says so again.
    """

    run_id: str
    epoch: int
    attempt: int
    version: int
    trial: int = 1


class EngineHello(msgspec.Struct, frozen=True):
    """How one engine rank introduces itself, before anything is built.

    Attributes:
        rank: engine rank.
        size: engine ranks, as the engine counts them; one replica's where replicas do not know of
            each other.
        host: host name.
        device: device type and identity (`"cpu"`, `"cuda:GPU-..."`).
        versions: of reshard, torch and vllm.
        model: what the engine serves, for messages.
        state: `ready`, `fenced` (mixed weights; a full refit heals it), `asleep`, `taken`.
        detail: why, where the state is not `ready`.
        run_id: of the session it is in, or empty.
        version: the policy version that it serves, or None.
        update_active: whether vLLM's own update session is open (a trainer died between start and
            finish); it must be finished before the next start.
    """

    rank: int
    size: int
    host: str
    device: str
    versions: dict[str, str]
    model: str
    state: Literal["ready", "fenced", "asleep", "taken", "failed"]
    detail: str = ""
    run_id: str = ""
    version: int | None = None
    update_active: bool = False


class ClassBytes(msgspec.Struct, frozen=True):
    """Bytes that one engine rank receives, by class of destination."""

    direct: int = 0
    repacked: int = 0
    computed: int = 0


class LayoutReport(msgspec.Struct, frozen=True):
    """What one rank holds or needs, or why it cannot say.

    Attributes:
        layout: the regions; None if `faults` is not empty.
        faults: every mismatch that this rank found, one line each.
        classes: of an engine rank: its bytes by class.
        staging_bytes: extra memory that a refit takes on this rank, in bytes.
        host: identity of the machine (host name and boot id), to tell who shares memory.
        notes: of an engine rank: what a refit leaves out or does beyond moving bytes, a line each.
    """

    layout: CompactSide | None
    faults: tuple[str, ...] = ()
    classes: ClassBytes = ClassBytes()
    staging_bytes: int = 0
    host: str = ""
    notes: tuple[str, ...] = ()


class RankResult(msgspec.Struct, frozen=True):
    """How one phase went on one rank.

    Attributes:
        error: empty, or this rank's error text.
        seconds: by step of the phase.
        nbytes: wire bytes received (engine) or sent (trainer).
        extra_bytes: memory that this rank took at most beside its weights, shadows included.
        digests: by peer: the digest of what went between this rank and that one; empty where the
            refit is not verified.
    """

    error: str = ""
    seconds: dict[str, float] = {}
    nbytes: int = 0
    extra_bytes: int = 0
    digests: dict[int, int] = {}


class Fault(msgspec.Struct, frozen=True):
    """The first failure of a session, written before the group is dropped."""

    rank: int
    phase: str
    text: str
    tensor: str = ""


def scope(engine: str, epoch: int) -> str:
    """Prefix of a session's keys on the board."""
    return f"{engine}/e{epoch}"


def attempt_scope(engine: str, epoch: int, attempt: int) -> str:
    """Prefix of one refit's keys on the board."""
    return f"{scope(engine, epoch)}/a{attempt}"
