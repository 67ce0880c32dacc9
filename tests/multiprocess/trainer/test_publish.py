"""The trainer side against an engine of plain tensors: real gloo processes, real receivers."""

import logging
import time
from pathlib import Path

import pytest
import torch
from tests.multiprocess.trainer.models import Kind, unshard
from tests.multiprocess.trainer.peer import PeerEngine, PeerModel
from tests.multiprocess.trainer.trainers import (
    State,
    Trainers,
    close,
    expected,
    publish,
    shapes,
    step,
)
from torch import nn

import reshard_trainer
from reshard.board import BoardClient

pytestmark = pytest.mark.multiprocess

CUTS = {
    "embed.weight": 0,
    "head.weight": 0,
    **{f"blocks.{b}.{m}.weight": 0 for b in (0, 1) for m in ("gate", "up")},
    **{f"blocks.{b}.{m}.bias": 0 for b in (0, 1) for m in ("gate", "up")},
    **{f"blocks.{b}.down.weight": 1 for b in (0, 1)},
}
MODEL = PeerModel(shapes(), CUTS)


def check_serves(peer: PeerEngine, steps: int) -> None:
    """The engine holds exactly the weights after `steps` steps, says so, and runs."""
    weights = peer.weights()
    for name, whole in expected(steps).items():
        assert torch.equal(weights[name], whole), name
    assert peer.weight_version == str(steps)
    assert (peer.paused, peer.update_active) == (False, False)
    assert peer.violations == []


def check_untouched(peer: PeerEngine) -> None:
    """The engine has its first weights and runs."""
    assert all(not tensor.any() for tensor in peer.weights().values())
    assert peer.weight_version == "default"
    assert (peer.paused, peer.update_active) == (False, False)
    assert peer.violations == []


@pytest.mark.parametrize(
    ("kind", "size", "transport"),
    [
        ("plain", 1, "auto"),
        ("ddp", 2, "gloo"),
        ("fsdp2", 1, "gloo"),
        ("fsdp2", 2, "shm"),
        ("fsdp2", 3, "gloo"),
        ("hsdp", 4, "auto"),
        ("fsdp2_tp", 4, "gloo"),
        ("fsdp1", 2, "shm"),
        ("fsdp1_flat", 3, "gloo"),
        ("zero3", 3, "auto"),
    ],
)
def test_every_step_is_served(kind: Kind, size: int, transport: str, tmp_path: Path) -> None:
    with PeerEngine(MODEL) as peer, Trainers(size, kind, tmp_path) as trainers:
        trainers.attach(peer.url, transport=transport)
        check_untouched(peer)
        for steps in (1, 2):
            said = trainers.do(step)
            check_serves(peer, steps)

        first = said[0]
        assert (first.version, first.state) == (2, "published")
        assert first.report is not None
        assert first.report.version == 2
        assert first.report.redundancy == 1.0
        (received,) = first.report.received_bytes.values()
        assert sum(received) == first.report.direct_bytes > 0
        assert {"begin", "transfer", "pause", "commit", "finish", "reset", "resume"} <= set(
            first.report.seconds
        )
        engines = [each.report.engines for each in said if each.report]
        assert engines == [first.report.engines] * size
        assert peer.resets == ["1", "2"]
        trainers.do(close)
        assert peer.calls[-1] == "/shutdown_weight_transfer_engine"


def test_the_order_of_control_calls(tmp_path: Path) -> None:
    with PeerEngine(MODEL) as peer, Trainers(1, "plain", tmp_path) as trainers:
        trainers.attach(peer.url)
        trainers.do(step)

        assert peer.calls == [
            "/health",
            "/server_info",
            "/get_world_size",
            "/is_paused",
            "/weight_info",
            "/init_weight_transfer_engine",
            "/start_weight_update",
            "/update_weights",
            "/pause",
            "/update_weights",
            "/finish_weight_update",
            "/reset_prefix_cache",
            "/resume",
        ]


def test_through_the_worker_extension(tmp_path: Path) -> None:
    extension = "reshard_vllm.WorkerExtension"
    with (
        PeerEngine(MODEL, backend="", extension=extension) as peer,
        Trainers(2, "fsdp2", tmp_path) as trainers,
    ):
        trainers.attach(peer.url)
        for steps in (1, 2):
            trainers.do(step)
            check_serves(peer, steps)
        trainers.do(close)

        assert not {"/init_weight_transfer_engine", "/start_weight_update"} & set(peer.calls)
        assert peer.calls[-1] == "/collective_rpc"


def test_masters_are_cast_once_by_the_sender(tmp_path: Path) -> None:
    model = PeerModel(shapes(), CUTS, "bfloat16")
    with PeerEngine(model) as peer, Trainers(2, "fsdp2", tmp_path) as trainers:
        trainers.attach(peer.url)
        (said, _) = trainers.do(step)

        weights = peer.weights()
        for name, whole in expected(1).items():
            assert torch.equal(weights[name], whole.bfloat16().float()), name
        assert said.report is not None
        (received,) = said.report.received_bytes.values()
        needed = sum(tensor.numel() for tensor in weights.values())
        replicated = sum(
            tensor.numel() for name, tensor in weights.items() if name not in model.cuts
        )
        assert sum(received) == 2 * (needed + replicated)


@pytest.mark.parametrize(
    "wanted", [{"embed.weight"}, {"head.weight"}, {"embed.weight", "head.weight"}]
)
def test_an_engine_takes_the_tied_name_that_it_wants(wanted: set[str], tmp_path: Path) -> None:
    left_out = {"embed.weight", "head.weight"} - wanted
    kept = {name: shape for name, shape in shapes().items() if name not in left_out}
    model = PeerModel(kept, CUTS, ignored=frozenset(left_out))
    with PeerEngine(model) as peer, Trainers(2, "fsdp2", tmp_path) as trainers:
        trainers.attach(peer.url)
        trainers.do(step)

        weights = peer.weights()
        assert sorted(weights) == sorted(kept)
        assert all(torch.equal(weights[name], expected(1)[name]) for name in weights)


def test_some_steps_are_published(tmp_path: Path) -> None:
    with PeerEngine(MODEL) as peer, Trainers(1, "plain", tmp_path) as trainers:
        trainers.attach(peer.url, publish_every=2, version=3)
        (said,) = trainers.do(step)
        check_serves_version = (said.version, peer.weight_version)
        assert check_serves_version == (4, "4")

        (said,) = trainers.do(step)
        assert (said.version, said.state, peer.weight_version) == (5, "draft", "4")

        trainers.do(publish)
        assert peer.weight_version == "5"


def attach_noting_manifests(state: State, url: str) -> None:
    notes: list[tuple[int, str]] = []
    state.hook = reshard_trainer.attach(
        state.model,
        state.optimizer,
        [url],
        publish_every=2,
        deadline=20,
        on_manifest=lambda manifest: notes.append((manifest.version, str(manifest.state))),
    )
    state.notes = notes


def manifests(state: State) -> list[tuple[int, str]]:
    return state.notes


def test_every_step_emits_a_manifest(tmp_path: Path) -> None:
    with PeerEngine(MODEL) as peer, Trainers(2, "fsdp2", tmp_path) as trainers:
        trainers.do(attach_noting_manifests, peer.url)
        for _ in range(4):
            trainers.do(step)
        trainers.do(publish)

        assert [said.value for said in trainers.do(manifests)] == 2 * [
            [
                (1, "draft"),
                (2, "draft"),
                (2, "sealed"),
                (2, "published"),
                (3, "draft"),
                (4, "draft"),
                (4, "sealed"),
                (4, "published"),
                (2, "retired"),
                (4, "draft"),
                (4, "sealed"),
                (4, "published"),
                (4, "retired"),
            ]
        ]


def test_the_cache_can_be_kept(tmp_path: Path) -> None:
    with PeerEngine(MODEL) as peer, Trainers(1, "plain", tmp_path) as trainers:
        trainers.attach(peer.url, prefix_cache="keep")
        trainers.do(step)

        check_serves(peer, 1)
        assert peer.resets == []


def test_in_place(tmp_path: Path) -> None:
    with PeerEngine(MODEL) as peer, Trainers(2, "fsdp2", tmp_path) as trainers:
        trainers.attach(peer.url, install="in_place", bucket_bytes=256)
        for steps in (1, 2):
            trainers.do(step)
            check_serves(peer, steps)

        assert peer.calls.index("/pause") < peer.calls.index("/start_weight_update")


def leave_unsharded(state: State) -> None:
    unshard(state.model)


def test_a_module_that_was_left_unsharded(tmp_path: Path) -> None:
    with PeerEngine(MODEL) as peer, Trainers(2, "fsdp2", tmp_path) as trainers:
        trainers.attach(peer.url)
        for steps in (1, 2):
            trainers.do(leave_unsharded)
            trainers.do(step)
            check_serves(peer, steps)

        assert peer.calls.count("/init_weight_transfer_engine") == 1


def move_storage(state: State) -> None:
    """As an optimizer or offloading does that replaces what a parameter holds."""
    for parameter in state.model.parameters():
        parameter.data = parameter.data.clone()


def test_weights_are_found_where_they_now_lie(tmp_path: Path) -> None:
    with PeerEngine(MODEL) as peer, Trainers(1, "plain", tmp_path) as trainers:
        trainers.attach(peer.url)
        trainers.do(step)
        trainers.do(move_storage)
        trainers.do(step)

        check_serves(peer, 2)
        assert peer.calls.count("/init_weight_transfer_engine") == 1


def turn_weights(state: State) -> None:
    """The same weights in other strides and dtypes: another layout."""
    for module in state.model.modules():
        if isinstance(module, nn.Linear):
            module.weight.data = module.weight.data.t().contiguous().t().double()


def test_another_layout_makes_another_session(tmp_path: Path) -> None:
    with PeerEngine(MODEL) as peer, Trainers(2, "ddp", tmp_path) as trainers:
        trainers.attach(peer.url)
        trainers.do(step)
        trainers.do(turn_weights)
        trainers.do(step)

        check_serves(peer, 2)
        assert peer.calls.count("/init_weight_transfer_engine") == 2


def test_two_engines_of_different_sizes(tmp_path: Path) -> None:
    with (
        PeerEngine(MODEL, size=1) as small,
        PeerEngine(MODEL, size=3) as large,
        Trainers(2, "fsdp2", tmp_path) as trainers,
    ):
        trainers.attach(small.url, large.url)
        for steps in (1, 2):
            (said, _) = trainers.do(step)
            check_serves(small, steps)
            check_serves(large, steps)

        assert said.report is not None
        assert [len(nbytes) for nbytes in said.report.received_bytes.values()] == [1, 3]


def test_a_run_that_is_resumed_gets_its_first_weights(tmp_path: Path) -> None:
    with PeerEngine(MODEL) as peer, Trainers(2, "fsdp2", tmp_path) as trainers:
        trainers.attach(peer.url, version=37, run_id="resumed")
        trainers.do(publish)

        weights = peer.weights()
        assert all(torch.equal(weights[name], whole) for name, whole in expected(0).items())
        assert peer.weight_version == "37"


def test_attaching_again_after_closing(tmp_path: Path) -> None:
    with PeerEngine(MODEL) as peer, Trainers(2, "fsdp2", tmp_path) as trainers:
        for version in (0, 1):
            trainers.attach(peer.url, version=version)
            trainers.do(step)
            check_serves(peer, version + 1)
            trainers.do(close)


def _close_dawdling(state: State) -> list[str]:
    """Close; all but rank 0 are slow to notice what the board answers; what the logs say of it."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record)  # type: ignore[method-assign]
    put = BoardClient.put

    def dawdling(client: BoardClient, *arguments: object) -> None:
        put(client, *arguments)  # type: ignore[arg-type]
        time.sleep(0.3 if state.rank else 0.0)

    BoardClient.put = dawdling  # type: ignore[assignment,method-assign]
    logging.disable(logging.NOTSET)
    logging.getLogger("reshard_trainer").addHandler(handler)
    try:
        close(state)
    finally:
        logging.disable(logging.CRITICAL)
        BoardClient.put = put  # type: ignore[method-assign]
    return [record.getMessage() for record in records if record.levelno >= logging.WARNING]


def test_closing_takes_the_board_from_nobody(tmp_path: Path) -> None:
    with PeerEngine(MODEL) as peer, Trainers(2, "fsdp2", tmp_path) as trainers:
        trainers.attach(peer.url)
        trainers.do(step)
        assert [each.value for each in trainers.do(_close_dawdling)] == [[], []]
