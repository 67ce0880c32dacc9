"""The one line in a training script: after each optimizer step the engines serve the new policy.

Not here: what the hook does then (`hook.py`).
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from reshard.engine_control import EngineControl
from reshard.manifest import ShardManifest
from reshard.session import Install, Share, Transport, Verify
from reshard_trainer.ensemble import Ensemble
from reshard_trainer.hook import Hook
from reshard_trainer.names import Rename, strip_wrappers
from reshard_trainer.reports import RefitReport
from reshard_trainer.settings import BusyEngines, OnFailure, PrefixCache, Replicas
from reshard_trainer.sources import (
    Adapter,
    Automatic,
    MakeSource,
    ModuleSource,
    Parts,
    Transform,
    WeightSource,
    whole,
)
from reshard_trainer.startup import Request, start


def attach(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    engines: Sequence[str | EngineControl],
    *,
    publish_every: int = 1,
    deadline: float = 120.0,
    transport: Transport = "auto",
    install: Install = "staged",
    share: Share = "snapshot",
    overlap: bool = False,
    busy_engines: BusyEngines = "wait",
    bucket_bytes: int = 16 * 2**20,
    buffer_bytes: int | None = None,
    prefix_cache: PrefixCache = "reset",
    on_failure: OnFailure = "raise",
    takeover: bool = False,
    verify: Verify = "first",
    replicas: Replicas = "first",
    run_id: str = "",
    version: int = 0,
    host: str = "",
    store: str | Path = "",
    keep: int = 2,
    group: dist.ProcessGroup | None = None,
    rename: Rename = strip_wrappers,
    adapter: Adapter | Automatic | None = "auto",
    transforms: Mapping[str, Transform] | None = None,
    parts: Parts = whole,
    source: MakeSource | None = None,
    on_manifest: Callable[[ShardManifest], None] | None = None,
    on_report: Callable[[RefitReport], None] | None = None,
) -> Hook:
    """Publish `model` to `engines` after each step of `optimizer`.

    Call it on every trainer rank, once the model is sharded and the optimizer made. From then on
    `optimizer.step()` returns when every engine serves the new version (with `overlap`: before).
    Engines are connected at once, so that what does not fit is told now; they get their first
    weights with the first published step, or from `Hook.publish`. An engine is always resumed after
    a refit.

    Args:
        model: plain, DDP, FSDP1, FSDP2, HSDP, tensor parallel or ZeRO-3, wrappers included.
        optimizer: the one whose steps make versions.
        engines: URLs of vLLM servers, or objects with `reshard.engine_control.EngineControl`; of
            rank 0: other ranks' are ignored, and so are their settings, but for `group`, `rename`,
            `adapter`, `transforms`, `parts`, `source` and `on_manifest`.
        publish_every: publish each step whose version is a multiple of it.
        deadline: bound of each phase of a refit, in seconds.
        transport: how bytes move.
        install: `staged`: the engine generates on while bytes arrive, and gets all or nothing;
            `in_place`: paused, but without a second copy of its shard.
        share: what readers on this host see: `snapshot`, a copy in the engine's dtype; `live`, the
            weights themselves, moved into shared memory once, without a copy.
        overlap: the step returns once the new values are kept; they move beside the next forward
            and backward pass. Where the weights themselves are read (`share="live"`, or a network),
            the next step waits until that is over; until then nothing else may change them. What
            fails is raised by the next publish, or by `Hook.wait`.
        busy_engines: with `overlap`: what a publish does while an engine still takes an earlier
            version. `wait` for it; or `skip` it: each engine takes the newest version once it is
            free, those in between never, and a slow one holds up neither the trainer nor others.
            With `skip` and `share="snapshot"` what goes over a network is copied first, as large as
            what a rank sends, whatever `buffer_bytes` says: the two are refused together. GPUs are
            free together: their engines take turns.
        bucket_bytes: largest message, in bytes.
        buffer_bytes: with `in_place`: most memory that tensors take on any rank beside the weights,
            in bytes, however large they are; None: no bound.
        prefix_cache: `reset`: drop KV blocks of the old weights after each refit; `keep` them.
        on_failure: `raise`, after the other engines are done; `continue`: the failed engine is in
            the report, and every publish tries it again.
        takeover: replace the session of another trainer that is still there.
        verify: in which refits both ends digest what went between them and compare: `first` of
            each session, `always`, or `never`. A mismatch installs nothing.
        replicas: before which publishes trainer ranks that hold the same elements compare digests
            of them: the `first` of each layout, `always`, or `never`. A difference sends nothing.
        run_id: name of the run, for messages.
        version: of the policy now: the number of optimizer steps that made it.
        host: address, host name or interface of rank 0 on which the control board listens; empty:
            that from which the engines are reached.
        store: folder, the same on all ranks, in which each published version is also written:
            `<store>/<run id>`, each rank its own shard, from which `reshard_trainer.restore` brings
            engines to it without this trainer. The step takes as long as that takes.
        keep: how many versions stay there.
        group: the ranks that hold the policy; None: all.
        rename: from a name in `model` to the checkpoint's, and where a rank has its own part of
            the layers or experts, to the global one (`global_names`).
        adapter: from a state dict of such names to the checkpoint's, of views, cat, stack, indexing
            and copies alone; it is run once, without values. `auto`: what transformers does when it
            saves `model`; None: nothing.
        transforms: arithmetic by pattern of a renamed name, on each rank's own elements.
        parts: which plain tensors are parts of larger ones.
        source: makes what is published, instead of `model` and the five arguments above.
        on_manifest: called with each shard manifest as its state changes: a draft after every
            step, sealed and published by a publish, retired by the next.
        on_report: called with the report of each publish that has ended, failed engines included:
            `reshard_trainer.rollouts.meter.Meter.published` counts it. With `overlap` when the
            trainer next looks, at the latest before the next publish; with `busy_engines="skip"`
            each engine's publish has a report of its own.

    Raises:
        ReshardError: what does not fit; the same error on every rank, all engines untouched.
    """
    ensemble = Ensemble.current(group)
    settings: dict[str, object] = {
        "publish_every": publish_every,
        "deadline_seconds": deadline,
        "transport": transport,
        "install": install,
        "share": share,
        "overlap": overlap,
        "busy_engines": busy_engines,
        "bucket_bytes": bucket_bytes,
        "buffer_bytes": buffer_bytes,
        "prefix_cache": prefix_cache,
        "on_failure": on_failure,
        "takeover": takeover,
        "verify": verify,
        "replicas": replicas,
        "host": host,
        "store": str(store),
        "keep": keep,
    }

    def make() -> WeightSource:
        if source is not None:
            return source(ensemble)
        return ModuleSource(
            model, ensemble, rename=rename, adapter=adapter, transforms=transforms, parts=parts
        )

    started = start(Request(engines, settings, run_id, version), ensemble, make)
    try:
        started.publisher.connect()
    except BaseException:
        started.publisher.close()
        raise
    return Hook(optimizer, started, on_manifest, on_report)
