"""The one line in a training script: after each optimizer step the engines serve the new policy."""

import logging
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

import torch
import torch.distributed as dist

from reshard.engine_control import EngineControl
from reshard.errors import ReshardError
from reshard.ids import PolicyVersion
from reshard.manifest import ManifestState, ShardManifest
from reshard.session import Install, Transport, Verify
from reshard_trainer.ensemble import Ensemble
from reshard_trainer.names import Rename, strip_wrappers
from reshard_trainer.reports import RefitReport
from reshard_trainer.settings import OnFailure, PrefixCache
from reshard_trainer.sources import ModuleSource
from reshard_trainer.startup import Request, Started, start

logger = logging.getLogger(__name__)


def attach(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    engines: Sequence[str | EngineControl],
    *,
    publish_every: int = 1,
    deadline: float = 120.0,
    transport: Transport = "auto",
    install: Install = "staged",
    bucket_bytes: int = 16 * 2**20,
    prefix_cache: PrefixCache = "reset",
    on_failure: OnFailure = "raise",
    takeover: bool = False,
    verify: Verify = "first",
    run_id: str = "",
    version: int = 0,
    host: str = "",
    group: dist.ProcessGroup | None = None,
    rename: Rename = strip_wrappers,
    on_manifest: Callable[[ShardManifest], None] | None = None,
) -> "Hook":
    """Publish `model` to `engines` after each step of `optimizer`.

    Call it on every trainer rank, once the model is sharded and the optimizer made. From then on
    `optimizer.step()` returns when every engine serves the new version. Engines are connected at
    once, so that what does not fit is told now; they get their first weights with the first
    published step, or from `Hook.publish`. An engine is always resumed after a refit.

    Args:
        model: plain, DDP, FSDP2, HSDP or tensor parallel, wrappers included.
        optimizer: the one whose steps make versions.
        engines: URLs of vLLM servers, or objects with `reshard.engine_control.EngineControl`; of
            rank 0: other ranks' are ignored, and so are their settings, but for `group`, `rename`
            and `on_manifest`.
        publish_every: publish each step whose version is a multiple of it.
        deadline: bound of each phase of a refit, in seconds.
        transport: how bytes move.
        install: `staged`: the engine generates on while bytes arrive, and gets all or nothing;
            `in_place`: paused, but without a second copy of its shard.
        bucket_bytes: largest message, in bytes.
        prefix_cache: `reset`: drop KV blocks of the old weights after each refit; `keep` them.
        on_failure: `raise`, after the other engines are done; `continue`: the failed engine is in
            the report, and every publish tries it again.
        takeover: replace the session of another trainer that is still there.
        verify: in which refits both ends digest what went between them and compare: `first` of
            each session, `always`, or `never`. A mismatch installs nothing.
        run_id: name of the run, for messages.
        version: of the policy now: the number of optimizer steps that made it.
        host: address, host name or interface of rank 0 on which the control board listens; empty:
            that from which the engines are reached.
        group: the ranks that hold the policy; None: all.
        rename: from a name in `model` to the checkpoint's.
        on_manifest: called with each shard manifest as its state changes: a draft after every
            step, sealed and published by a publish, retired by the next.

    Raises:
        ReshardError: what does not fit; the same error on every rank, all engines untouched.
    """
    ensemble = Ensemble.current(group)
    settings: dict[str, object] = {
        "publish_every": publish_every,
        "deadline_seconds": deadline,
        "transport": transport,
        "install": install,
        "bucket_bytes": bucket_bytes,
        "prefix_cache": prefix_cache,
        "on_failure": on_failure,
        "takeover": takeover,
        "verify": verify,
        "host": host,
    }
    started = start(
        Request(engines, settings, run_id, version),
        ensemble,
        lambda: ModuleSource(model, ensemble, rename=rename),
    )
    try:
        started.publisher.connect()
    except BaseException:
        started.publisher.close()
        raise
    return Hook(optimizer, started, on_manifest)


class Hook:
    """Publishes after optimizer steps, until it is closed. A context manager.

    Attributes:
        version: of the policy on this trainer: number of optimizer steps.
        last_report: of the last publish, whether or not all engines got it; None before it.
        manifest: of the present version.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        started: Started,
        on_manifest: Callable[[ShardManifest], None] | None,
    ) -> None:
        """Take over; `attach` makes it."""
        self.version = started.version
        self.last_report: RefitReport | None = None
        self.manifest = ShardManifest(started.run.run_id, started.version)
        self._run = started.run
        self._publisher = started.publisher
        self._on_manifest = on_manifest
        self._served: ShardManifest | None = None
        self._closed = False
        self._handle = optimizer.register_step_post_hook(self._after_step)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def publish(self) -> RefitReport:
        """Bring all engines to the present weights now, under the present version.

        To be called on all trainer ranks; for the first weights of a run that was resumed.

        Raises:
            ReshardError: some engine did not get it (unless `on_failure="continue"`), or the
                weights cannot be published.
        """
        if self._closed:
            raise ReshardError("this hook was closed; attach again")
        if self.manifest.state is not ManifestState.DRAFT:
            self._emit(ShardManifest(self._run.run_id, self.version))
        report, error = self._publisher.publish(self.version)
        self.last_report = report
        self._seal(report)
        if error is not None:
            if self._run.settings.on_failure == "raise":
                raise error
            logger.warning("%s", error)
        return report

    def close(self) -> None:
        """Stop publishing; engines keep the weights that they have. Harmless when repeated."""
        if self._closed:
            return
        self._closed = True
        self._handle.remove()
        self._publisher.close()

    def _after_step(self, *_: object) -> None:
        self.version = PolicyVersion(self.version + 1)
        self._emit(ShardManifest(self._run.run_id, self.version))
        if self.version % self._run.settings.publish_every == 0:
            self.publish()

    def _seal(self, report: RefitReport) -> None:
        """Move the manifest on: sealed as all ranks agreed, published where an engine serves it."""
        self._emit(self.manifest.seal(self._publisher.holdings.digest))
        plans = {
            name: engine.plan_digest for name, engine in report.engines.items() if not engine.error
        }
        if not plans:
            return
        self._emit(self.manifest.publish(plans))
        if self._served is not None and self._on_manifest is not None:
            self._on_manifest(self._served.retire())
        self._served = self.manifest

    def _emit(self, manifest: ShardManifest) -> None:
        self.manifest = manifest
        if self._on_manifest is not None:
            self._on_manifest(manifest)
