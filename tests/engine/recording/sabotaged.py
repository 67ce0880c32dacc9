"""A rank worker that is wrong on purpose: its n-th request meets the n-th fault.

Shows that the comparison with vLLM's own loading can fail.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace

from vllm.config import VllmConfig

from reshard.session import TensorSpec
from reshard_vllm.inspect import rank, worker
from reshard_vllm.inspect.messages import RankReport
from reshard_vllm.install import installer
from reshard_vllm.recording.loader_map import LoaderMap, layout_of

FAULTS = ("none", "swapped", "shifted", "skipped post-load step")

_inspect = rank.inspect_rank
_remaining = list(FAULTS)


def _swap(recorded: LoaderMap) -> None:
    """Two landings of equal shape change places: the attention's output of two layers."""
    landings = recorded.landings.landings
    first, second = (at for at, x in enumerate(landings) if x.name.endswith("o_proj.weight"))
    one, two = landings[first].piece, landings[second].piece
    landings[first] = replace(landings[first], piece=replace(one, storage=two.storage))
    landings[second] = replace(landings[second], piece=replace(two, storage=one.storage))


def _shift(recorded: LoaderMap) -> None:
    """One landing takes the rows after its own: up for gate."""
    landings = recorded.landings.landings
    gate, up = (
        next(at for at, x in enumerate(landings) if x.name.endswith(f"0.mlp.{name}_proj.weight"))
        for name in ("gate", "up")
    )
    one, two = landings[gate], landings[up]
    landings[gate] = replace(one, piece=replace(one.piece, view=two.piece.view))
    landings[up] = replace(two, piece=replace(two.piece, view=one.piece.view))


def _sabotaged(config: VllmConfig, *, verify: bool, codings: int) -> RankReport:
    fault = _remaining.pop(0)

    def wrong(vllm_config: VllmConfig, specs: Sequence[TensorSpec]) -> LoaderMap:
        recorded = layout_of(vllm_config, specs)
        if fault == "swapped":
            _swap(recorded)
        elif fault == "shifted":
            _shift(recorded)
        return recorded

    rank.layout_of = wrong  # type: ignore[attr-defined]
    if fault == "skipped post-load step":
        installer.rerun = lambda *_: None  # type: ignore[attr-defined]
    return _inspect(config, verify=verify, codings=codings)


if __name__ == "__main__":
    worker.inspect_rank = _sabotaged  # type: ignore[attr-defined]
    worker.main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
