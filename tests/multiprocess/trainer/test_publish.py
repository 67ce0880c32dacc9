"""The trainer side against an engine of plain tensors: real gloo processes, real receivers."""

from pathlib import Path

import pytest
import torch
from tests.multiprocess.trainer.models import Kind, Tied, make_indexed, wrap
from tests.multiprocess.trainer.peer import PeerEngine, PeerModel
from tests.multiprocess.trainer.processes import join_default_group, run_ranks

import reshard_trainer

pytestmark = pytest.mark.multiprocess

CUTS = {
    "embed.weight": 0,
    "head.weight": 0,
    **{f"blocks.{b}.{m}.weight": 0 for b in (0, 1) for m in ("gate", "up")},
    **{f"blocks.{b}.{m}.bias": 0 for b in (0, 1) for m in ("gate", "up")},
    **{f"blocks.{b}.down.weight": 1 for b in (0, 1)},
}
SHAPES = {name: tuple(tensor.shape) for name, tensor in Tied().state_dict().items()}
MODEL = PeerModel(SHAPES, CUTS)


def _train(rank: int, size: int, kind: Kind, url: str, folder: str) -> list[dict[str, object]]:
    """Two steps that add 1000 to every parameter; what the hook says after each."""
    if kind != "plain":
        join_default_group(rank, size, folder)
    model = wrap(make_indexed(), kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    said = []
    with reshard_trainer.attach(model, optimizer, [url], deadline=8) as hook:
        for _ in range(2):
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, -1000.0)
            optimizer.step()
            report = hook.last_report
            assert report is not None
            said.append(
                {
                    "version": hook.version,
                    "report": report.version,
                    "received": report.received_bytes,
                    "redundancy": report.redundancy,
                    "direct": report.direct_bytes,
                    "phases": sorted(report.seconds),
                    "state": hook.manifest.state,
                }
            )
    return said


@pytest.mark.parametrize(
    ("kind", "size"),
    [("plain", 1), ("ddp", 2), ("fsdp2", 3), ("hsdp", 4), ("fsdp2_tp", 4)],
)
def test_every_step_is_served(kind: Kind, size: int, tmp_path: Path) -> None:
    expected = {n: t.clone() for n, t in make_indexed().state_dict().items()}
    for name in expected.keys() - {"steps"}:
        expected[name] += 2000
    with PeerEngine(MODEL) as peer:
        ranks = run_ranks(_train, size, size, kind, peer.url, str(tmp_path))

        weights = peer.weights()
        assert all(torch.equal(weights[name], whole) for name, whole in expected.items())
        assert peer.violations == []
        assert (peer.weight_version, peer.paused, peer.update_active) == ("2", False, False)
        assert peer.resets == ["1", "2"]
    assert all(rank == ranks[0] for rank in ranks)
