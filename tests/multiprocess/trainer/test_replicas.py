"""What several ranks hold under one name must be one content: real ranks, one bit changed."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.multiprocess.trainer.kinds import Stage, my_stage
from tests.multiprocess.trainer.peer import PeerEngine, PeerModel
from tests.multiprocess.trainer.test_publish import MODEL, check_serves, check_untouched
from tests.multiprocess.trainer.trainers import State, Trainers, publish, shapes, step
from torch import nn
from torch.distributed.tensor import DTensor

pytestmark = pytest.mark.multiprocess


def differ(state: State, rank: int, name: str, place: int) -> None:
    """Change one bit on one rank."""
    if state.rank == rank:
        _of(state, name).view(torch.int32).view(-1)[place] ^= 1


def agree(state: State, name: str) -> None:
    """Have rank 0's values everywhere."""
    dist.broadcast(_of(state, name), 0)


def _of(state: State, name: str) -> torch.Tensor:
    parameter = state.model.module.get_parameter(name)  # type: ignore[union-attr]
    assert isinstance(parameter, nn.Parameter)
    return parameter.detach()


def test_a_plain_tensor_that_differs_is_not_taken_for_a_replica(tmp_path: Path) -> None:
    with PeerEngine(MODEL) as peer, Trainers(3, "ddp", tmp_path) as trainers:
        trainers.attach(peer.url)
        trainers.do(differ, 1, "blocks.1.up.weight", 40)
        trainers.do(differ, 2, "blocks.0.tiny.bias", 1)
        said = trainers.fail(publish)

        assert said.error is not None
        assert said.error[0] == "LayoutError"
        assert "hold different content under one name; nothing was sent" in said.text
        assert said.faults == (
            "blocks.0.tiny.bias: [0:2] is one thing on trainer ranks 0, 1, another on trainer "
            "rank 2",
            "blocks.1.up.weight: [0:16, 0:6] is one thing on trainer ranks 0, 2, another on "
            "trainer rank 1",
        )
        check_untouched(peer)
        for name in ("blocks.1.up.weight", "blocks.0.tiny.bias"):
            trainers.do(agree, name)
        trainers.do(step)
        check_serves(peer, 1)


@pytest.mark.parametrize(("when", "told"), [("first", False), ("always", True), ("never", False)])
def test_later_differences_are_seen_where_that_is_asked_for(
    when: str, told: bool, tmp_path: Path
) -> None:
    with PeerEngine(MODEL) as peer, Trainers(2, "ddp", tmp_path) as trainers:
        trainers.attach(peer.url, replicas=when)
        trainers.do(publish)
        trainers.do(differ, 1, "embed.weight", 3)
        if told:
            # Tied weights differ under both of their names.
            assert [fault.split(":")[0] for fault in trainers.fail(publish).faults] == [
                "embed.weight",
                "head.weight",
            ]
        else:
            trainers.do(publish)


def differ_in_replica(state: State) -> None:
    """HSDP on 2 x 2: the second replica's first shard."""
    if state.rank == 2:
        embedding = dict(state.model.named_parameters())["embed.weight"]
        assert isinstance(embedding, DTensor)
        embedding.to_local().detach().view(-1)[0] += 1


def test_replicated_mesh_axes_are_compared_too(tmp_path: Path) -> None:
    with PeerEngine(MODEL) as peer, Trainers(4, "hsdp", tmp_path) as trainers:
        trainers.attach(peer.url)
        trainers.do(differ_in_replica)
        said = trainers.fail(publish)

        assert said.faults[0] == (
            "embed.weight: [0:6, 0:6] is one thing on trainer rank 0, another on trainer rank 2"
        )
        check_untouched(peer)


def one_stage_with_another_embedding() -> nn.Module:
    model = my_stage()
    with torch.no_grad():
        model.embed.weight += dist.get_rank()  # type: ignore[union-attr,operator]
    return model


def same_names(name: str) -> str:
    return name


def test_two_ranks_that_give_one_name_to_two_things(tmp_path: Path) -> None:
    """Stages whose layers were not renumbered, and an embedding that has come apart."""
    model = PeerModel(shapes(Stage(layers=2, experts=4)))
    with (
        PeerEngine(model) as peer,
        Trainers(2, one_stage_with_another_embedding, tmp_path) as trainers,
    ):
        trainers.attach(peer.url, rename=same_names)
        faults = trainers.fail(publish).faults

        assert sorted({fault.split(":")[0] for fault in faults}) == [
            "embed.weight",
            *(f"layers.{n}.experts.{e}.{k}" for n in (0, 1) for e in range(4) for k in KINDS),
        ]
        assert all("trainer rank 0, another on trainer rank 1" in fault for fault in faults)
        check_untouched(peer)


KINDS = ("bias", "weight")
