"""Each way a refit can fail: the same error on every trainer rank, the engine left as it was.

And what follows: the next refit, in the same processes, goes well.
"""

import socket
from pathlib import Path
from typing import Literal

import pytest
import torch
import zmq
from tests.multiprocess.trainer.peer import PeerEngine, PeerModel
from tests.multiprocess.trainer.plain_target import Phase
from tests.multiprocess.trainer.test_publish import CUTS, MODEL, check_serves, check_untouched
from tests.multiprocess.trainer.trainers import State, Trainers, close, publish, shapes, step
from torch import nn

import reshard_trainer
from reshard.board import Deadline
from reshard.engine_control import Message
from reshard_trainer.engines import HttpEngine

pytestmark = pytest.mark.multiprocess

SERVES = "The engine serves on with the weights that it had."
HELD = "The engine is held (paused) until a refit succeeds."
UNKNOWN = "What the engine does now is not known; the next refit finds out."


def test_layouts_that_do_not_fit_are_told_at_once_and_all(tmp_path: Path) -> None:
    wanted = {**shapes(), "blocks.0.tiny.weight": (3, 5), "extra.weight": (4,)}
    del wanted["steps"]
    with PeerEngine(PeerModel(wanted, CUTS)) as peer, Trainers(2, "fsdp2", tmp_path) as trainers:
        said = trainers.fail_to_attach(peer.url)

        assert said.error is not None
        assert said.error[0] == "PlanError"
        assert said.faults == tuple(
            f"engine rank {rank}: {fault}"
            for rank in (0, 1)
            for fault in (
                "steps: this model has no such tensor",
                "extra.weight: the trainer does not send it",
                "blocks.0.tiny.weight: shape (2, 5) from the trainer, (3, 5) here",
            )
        )
        assert SERVES in said.text
        check_untouched(peer)


def test_an_engine_that_cannot_describe_itself(tmp_path: Path) -> None:
    with PeerEngine(MODEL) as peer, Trainers(2, "fsdp2", tmp_path) as trainers:
        peer.break_rank(1, "describe")
        said = trainers.fail_to_attach(peer.url)

        assert said.faults == ("engine rank 1: RuntimeError: broken in describe, as asked",)
        check_untouched(peer)

        peer.break_rank(1)
        trainers.attach(peer.url)
        trainers.do(step)
        check_serves(peer, 1)


@pytest.mark.parametrize(
    ("phase", "transport"), [("begin", "gloo"), ("write", "gloo"), ("write", "shm")]
)
def test_a_staged_refit_that_fails_leaves_the_old_version(
    phase: Phase, transport: str, tmp_path: Path
) -> None:
    with PeerEngine(MODEL) as peer, Trainers(2, "fsdp2", tmp_path) as trainers:
        trainers.attach(peer.url, transport=transport)
        peer.break_rank(1, phase)
        said = trainers.fail(step)

        assert f"engine {peer.name} did not get version 1: " in said.text
        assert f"broken in {phase}, as asked" in said.text
        assert "engine rank 1" in said.text
        assert SERVES in said.text
        assert (said.version, said.state) == (1, "sealed")
        assert said.report is not None
        assert said.report.failed.keys() == {peer.name}
        check_untouched(peer)

        peer.break_rank(1)
        trainers.do(step)
        check_serves(peer, 2)


def test_a_commit_that_fails_on_one_rank_holds_the_engine(tmp_path: Path) -> None:
    with PeerEngine(MODEL) as peer, Trainers(2, "fsdp2", tmp_path) as trainers:
        trainers.attach(peer.url)
        trainers.do(step)
        peer.break_rank(1, "commit")
        said = trainers.fail(step)

        assert said.faults == ("engine rank 1: RuntimeError: broken in commit, as asked",)
        assert f"engine {peer.name} could not commit version 2" in said.text
        assert HELD in said.text
        assert (peer.paused, peer.update_active, peer.weight_version) == (True, False, "1")

        peer.break_rank(1)
        trainers.do(step)
        check_serves(peer, 3)


@pytest.mark.parametrize("install", ["staged", "in_place"])
def test_a_commit_that_fails_once_on_one_rank_is_rolled_forward(
    install: str, tmp_path: Path
) -> None:
    with PeerEngine(MODEL) as peer, Trainers(2, "fsdp2", tmp_path) as trainers:
        trainers.attach(peer.url, install=install)
        trainers.do(step)
        peer.break_rank_once(1, "commit")
        trainers.do(step)

        check_serves(peer, 2)
        assert [peer.status(rank)["fenced"] for rank in (0, 1)] == ["", ""]


def test_an_in_place_refit_that_fails_holds_the_engine(tmp_path: Path) -> None:
    with PeerEngine(MODEL) as peer, Trainers(2, "fsdp2", tmp_path) as trainers:
        trainers.attach(peer.url, install="in_place")
        peer.break_rank(0, "write")
        said = trainers.fail(step)

        assert HELD in said.text
        assert (peer.paused, peer.update_active, peer.weight_version) == (True, False, "default")

        peer.break_rank(0)
        trainers.do(step)
        check_serves(peer, 2)


@pytest.mark.parametrize("install", ["staged", "in_place"])
def test_an_engine_that_can_refuse_requests_does_while_it_is_torn(
    install: str, tmp_path: Path
) -> None:
    (tmp_path / "next").mkdir()
    phase: Phase = "commit" if install == "staged" else "write"
    with PeerEngine(MODEL) as peer:
        peer.fences = True
        with Trainers(2, "fsdp2", tmp_path) as trainers:
            trainers.attach(peer.url, install=install)
            assert "/reshard/fence" not in peer.calls
            peer.break_rank(1, phase)
            trainers.fail(step)

            assert "the install of policy version 1 did not finish" in peer.fence
            assert "did not finish" in str(peer.status(1)["fenced"])
            peer.break_rank(1)
            trainers.do(step)
            assert peer.fence == ""
            check_serves(peer, 2)
            peer.break_rank(1, "commit" if install == "staged" else "begin")
            trainers.fail(step)
            assert peer.fence
            peer.break_rank(1)
        with Trainers(1, "plain", tmp_path / "next") as trainers:
            trainers.attach(peer.url, install=install, deadline=30)
            trainers.do(step)
            assert peer.fence == ""
            check_serves(peer, 1)


Route = Literal[
    "/start_weight_update",
    "/update_weights",
    "/pause",
    "/finish_weight_update",
    "/reset_prefix_cache",
    "/resume",
]


@pytest.mark.parametrize(
    ("route", "state", "steps"),
    [
        ("/start_weight_update", UNKNOWN, 0),
        ("/update_weights", UNKNOWN, 0),
        ("/pause", UNKNOWN, 0),
        ("/finish_weight_update", HELD, 1),
        ("/reset_prefix_cache", HELD, 1),
        ("/resume", UNKNOWN, 1),
    ],
)
def test_a_control_call_that_is_refused(
    route: Route, state: str, steps: int, tmp_path: Path
) -> None:
    with PeerEngine(MODEL) as peer, Trainers(1, "plain", tmp_path) as trainers:
        trainers.attach(peer.url)
        peer.answers[route] = (500, {"error": {"message": "no, says the server"}})
        said = trainers.fail(step)

        assert said.error is not None
        assert said.error[0] == "EngineError"
        refusal = f"engine {peer.name} answered {route} with 500: no, says the server"
        assert refusal in said.text
        assert state in said.text
        weights = peer.weights()
        assert any(tensor.any() for tensor in weights.values()) == bool(steps)

        del peer.answers[route]
        trainers.do(step)
        check_serves(peer, 2)


def test_a_connect_call_that_is_refused(tmp_path: Path) -> None:
    with PeerEngine(MODEL) as peer, Trainers(2, "fsdp2", tmp_path) as trainers:
        route = "/init_weight_transfer_engine"
        peer.answers[route] = (500, {"error": {"message": "worker died"}})
        said = trainers.fail_to_attach(peer.url)

        assert f"engine {peer.name} answered {route} with 500: worker died" in said.text
        assert said.seconds < 15
        check_untouched(peer)


def test_a_cache_that_is_not_reset_at_once(tmp_path: Path) -> None:
    with PeerEngine(MODEL) as peer, Trainers(1, "plain", tmp_path) as trainers:
        trainers.attach(peer.url)
        peer.reset_refusals = 2
        trainers.do(step)

        assert peer.resets == ["1", "1", "1"]
        check_serves(peer, 1)


def test_a_cache_that_is_never_reset_surfaces(tmp_path: Path) -> None:
    with PeerEngine(MODEL) as peer, Trainers(1, "plain", tmp_path) as trainers:
        trainers.attach(peer.url, deadline=2)
        peer.reset_refusals = 10**6
        said = trainers.fail(step)

        assert "could not reset its prefix cache within 2 s" in said.text
        assert 'attach with prefix_cache="keep"' in said.text
        assert HELD in said.text
        assert peer.paused


@pytest.mark.parametrize("transport", ["gloo", "shm"])
def test_an_engine_rank_that_was_killed(transport: str, tmp_path: Path) -> None:
    with PeerEngine(MODEL) as peer, Trainers(2, "fsdp2", tmp_path) as trainers:
        trainers.attach(peer.url, deadline=6, transport=transport)
        trainers.do(step)
        peer.kill_rank(1)
        said = trainers.fail(step)

        assert f"engine {peer.name}" in said.text
        assert said.seconds < 30


def test_one_engine_that_dies_does_not_hold_up_the_others(tmp_path: Path) -> None:
    with (
        PeerEngine(MODEL, size=1) as lost,
        PeerEngine(MODEL) as kept,
        Trainers(2, "fsdp2", tmp_path) as trainers,
    ):
        trainers.attach(lost.url, kept.url, deadline=6)
        trainers.do(step)
        lost.kill_rank(0)
        said = trainers.fail(step)

        assert "1 of 2 engines did not get version 2" in said.text
        assert said.faults[0].startswith(f"{lost.name}: ")
        assert said.report is not None
        assert said.report.failed.keys() == {lost.name}
        assert said.state == "published"
        check_serves(kept, 2)


def test_going_on_without_an_engine_and_with_a_new_one_at_its_address(tmp_path: Path) -> None:
    with (
        PeerEngine(MODEL, size=1) as lost,
        PeerEngine(MODEL) as kept,
        Trainers(2, "fsdp2", tmp_path) as trainers,
    ):
        trainers.attach(lost.url, kept.url, deadline=6, on_failure="continue")
        lost.kill_rank(0)
        (said, _) = trainers.do(step)
        assert said.report is not None
        assert said.report.failed.keys() == {lost.name}

        lost.restart_rank(0)
        lost.update_active = False
        (said, _) = trainers.do(step)

        assert said.report is not None
        assert not said.report.failed
        check_serves(kept, 2)
        assert lost.weight_version == "2"


def test_an_engine_that_comes_late_gets_a_full_refit_before_it_serves_a_version(
    tmp_path: Path,
) -> None:
    with (
        PeerEngine(MODEL, size=3) as late,
        PeerEngine(MODEL) as kept,
        Trainers(2, "fsdp2", tmp_path) as trainers,
    ):
        late.answers["/health"] = (503, {})
        trainers.attach(late.url, kept.url, on_failure="continue")
        for steps in (1, 2):
            (said, _) = trainers.do(step)
            assert said.report is not None
            assert said.report.failed.keys() == {late.name}
            check_serves(kept, steps)
        check_untouched(late)

        del late.answers["/health"]
        (said, _) = trainers.do(step)

        assert said.report is not None
        assert not said.report.failed
        check_serves(late, 3)
        check_serves(kept, 3)


def test_an_engine_rank_that_hangs_is_named_by_the_deadline(tmp_path: Path) -> None:
    with PeerEngine(MODEL) as peer, Trainers(2, "fsdp2", tmp_path) as trainers:
        trainers.attach(peer.url, deadline=4)
        trainers.do(step)
        peer.stop_rank(1)
        said = trainers.fail(step)

        assert f"engine {peer.name} did not answer /start_weight_update within 4 s" in said.text
        assert UNKNOWN in said.text
        assert said.seconds < 15

        peer.continue_rank(1)
        trainers.do(step)
        check_serves(peer, 3)


def test_closing_leaves_an_engine_alone_that_another_trainer_has(tmp_path: Path) -> None:
    (tmp_path / "second").mkdir()
    with (
        PeerEngine(MODEL) as peer,
        Trainers(1, "plain", tmp_path) as first,
        Trainers(1, "plain", tmp_path / "second") as second,
    ):
        first.attach(peer.url)
        first.do(step)
        second.attach(peer.url, takeover=True, version=5)
        second.do(step)
        first.do(close)
        second.do(step)

        assert peer.weight_version == "7"


def _closed_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


def test_an_engine_that_is_not_there(tmp_path: Path) -> None:
    name = _closed_port()
    with Trainers(2, "fsdp2", tmp_path) as trainers:
        said = trainers.fail_to_attach(f"http://{name}")

    assert said.error is not None
    assert said.error[0] == "EngineError"
    assert f"engine {name} could not be connected: engine {name} cannot be reached" in said.text
    assert "is the server up, and is this its address?" in said.text


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"backend": ""},
            "was started without reshard's flag; start it with "
            '--weight-transfer-config \'{"backend": "reshard"}\'',
        ),
        ({"backend": "nccl"}, "runs with the weight-transfer backend 'nccl'; start it with"),
        (
            {"backend": "", "extension": "other.Extension"},
            "(or with --worker-extension-cls reshard_vllm.WorkerExtension)",
        ),
        ({"dev_mode": False}, "start the server with VLLM_SERVER_DEV_MODE=1"),
    ],
)
def test_an_engine_without_what_a_refit_needs(
    options: dict[str, bool | str], text: str, tmp_path: Path
) -> None:
    with (
        PeerEngine(MODEL, **options) as peer,  # type: ignore[arg-type]
        Trainers(1, "plain", tmp_path) as trainers,
    ):
        said = trainers.fail_to_attach(peer.url)

        assert text in said.text
        # No worker was reached: that alone would have put vLLM's replies out of step.
        assert peer.calls in (["/health", "/server_info"],)
        assert peer.violations == []


class Eavesdropper(HttpEngine):
    """Hands the engine another secret than the board's."""

    def connect(self, message: Message, deadline: Deadline) -> None:
        invitation = message["invitation"]
        assert isinstance(invitation, dict)
        _, secret = zmq.curve_keypair()
        wrong = {**invitation, "client_secret": secret.decode()}
        super().connect({**message, "invitation": wrong}, deadline)


def attach_eavesdropper(state: State, url: str) -> None:
    reshard_trainer.attach(state.model, state.optimizer, [Eavesdropper(url)], deadline=3)


def test_an_engine_with_a_wrong_secret_does_not_get_in(tmp_path: Path) -> None:
    with PeerEngine(MODEL) as peer, Trainers(2, "fsdp2", tmp_path) as trainers:
        said = trainers.fail(attach_eavesdropper, peer.url)

        # The call and the wait for the ranks' introductions end by the same deadline.
        silent = "no answer from engine rank 0, engine rank 1 of" in said.text
        assert silent or "did not answer /init_weight_transfer_engine" in said.text
        assert "within 3 s" in said.text
        check_untouched(peer)

        trainers.attach(peer.url)
        trainers.do(step)
        check_serves(peer, 1)


def test_an_engine_that_sleeps(tmp_path: Path) -> None:
    with PeerEngine(MODEL) as peer, Trainers(2, "fsdp2", tmp_path) as trainers:
        peer.tell_rank(1, "sleep", True)
        said = trainers.fail_to_attach(peer.url, deadline=6)

        assert "engine rank 1 is asleep: sleep level 2" in said.text
        assert said.seconds < 6
        check_untouched(peer)


def test_an_engine_with_another_reshard(tmp_path: Path) -> None:
    with PeerEngine(MODEL) as peer, Trainers(1, "plain", tmp_path) as trainers:
        peer.tell_rank(0, "versions", {"reshard": "0.0.7"})
        said = trainers.fail_to_attach(peer.url)

        assert "engine rank 0 runs reshard 0.0.7, the trainer" in said.text
        check_untouched(peer)


def test_a_second_trainer_is_refused_and_may_take_over(tmp_path: Path) -> None:
    (tmp_path / "first").mkdir()
    (tmp_path / "second").mkdir()
    with (
        PeerEngine(MODEL) as peer,
        Trainers(1, "plain", tmp_path / "first") as first,
        Trainers(2, "fsdp2", tmp_path / "second") as second,
    ):
        first.attach(peer.url, run_id="first")
        first.do(step)
        said = second.fail_to_attach(peer.url)

        assert "is taken: this engine is in a session with run first-" in said.text
        assert "close that trainer's hook, or attach with takeover=True" in said.text
        check_serves(peer, 1)
        first.do(step)
        check_serves(peer, 2)

        second.attach(peer.url, takeover=True, version=2)
        second.do(step)
        assert peer.weight_version == "3"


def test_a_killed_trainer_makes_room_for_the_next(tmp_path: Path) -> None:
    (tmp_path / "first").mkdir()
    (tmp_path / "second").mkdir()
    with PeerEngine(MODEL) as peer:
        with Trainers(2, "fsdp2", tmp_path / "first") as first:
            first.attach(peer.url)
            first.do(step)
            peer.answers["/resume"] = (500, {})
            first.fail(step)
        peer.answers.clear()
        peer._set_active(True)
        assert peer.paused

        with Trainers(3, "fsdp2", tmp_path / "second") as second:
            second.attach(peer.url, version=36, deadline=30)
            assert not peer.update_active
            second.do(step)

            assert (peer.weight_version, peer.paused) == ("37", False)
            assert peer.violations == []


@pytest.mark.parametrize("rank", [1, 2])
def test_a_trainer_rank_that_was_killed_is_named(rank: int, tmp_path: Path) -> None:
    with PeerEngine(MODEL) as peer, Trainers(3, "ddp", tmp_path) as trainers:
        trainers.attach(peer.url, deadline=4)
        trainers.do(step)
        trainers.kill_rank(rank)
        trainers.start(step, but=rank)
        said = trainers.ends(but=rank)

        assert len({each.error for each in said}) == 1
        assert f"no answer from rank {rank} (trainer rank {rank})" in said[0].text
        check_serves(peer, 1)


def test_when_trainer_rank_0_was_killed_the_others_end(tmp_path: Path) -> None:
    with PeerEngine(MODEL) as peer, Trainers(2, "ddp", tmp_path) as trainers:
        trainers.attach(peer.url, deadline=4)
        trainers.do(step)
        trainers.kill_rank(0)
        trainers.start(step, but=0)
        (said,) = trainers.ends(but=0)

        assert said.error is not None
        assert said.seconds < 30
        check_serves(peer, 1)


def empty_a_weight(state: State, rank: int) -> None:
    if state.rank == rank:
        for module in state.model.modules():
            if isinstance(module, nn.Linear):
                module.weight = nn.Parameter(torch.empty_like(module.weight, device="meta"))


def test_weights_that_one_rank_cannot_publish(tmp_path: Path) -> None:
    with PeerEngine(MODEL) as peer, Trainers(2, "ddp", tmp_path) as trainers:
        trainers.attach(peer.url)
        trainers.do(empty_a_weight, 1)
        said = trainers.fail(publish)

        assert said.error is not None
        assert said.error[0] == "LayoutError"
        without = [
            fault.split(": ")[1]
            for fault in said.faults
            if fault.startswith("trainer rank 1: ")
            and "on the meta device, without values" in fault
        ]
        assert "blocks.0.down.weight" in without
        assert len(without) == len(said.faults) == 9
        check_untouched(peer)


def resize_on(state: State, rank: int) -> None:
    if state.rank == rank:
        state.model.register_buffer("steps", torch.zeros(4))


def test_ranks_that_disagree_on_a_tensor(tmp_path: Path) -> None:
    with PeerEngine(MODEL) as peer, Trainers(2, "fsdp2", tmp_path) as trainers:
        trainers.do(resize_on, 1)
        said = trainers.fail_to_attach(peer.url)

        assert said.faults == (
            "steps: float32 (4,) on trainer rank 1, float32 (3,) on a rank before it",
        )
        check_untouched(peer)


@pytest.mark.parametrize(
    ("engines", "settings", "text"),
    [
        ([], {}, "give a list with at least one engine"),
        (["ftp://host"], {}, "engine 'ftp://host' is not a URL such as http://127.0.0.1:8000"),
        (["http://h:1", "http://h:1/"], {}, "engines that are named more than once\n  - h:1"),
        (["http://127.0.0.1:1"], {"publish_every": 0}, "publish_every=0: give a positive number"),
        (["http://127.0.0.1:1"], {"install": "later"}, "install='later': Invalid enum value"),
        (["http://127.0.0.1:1"], {"host": "nowhere.invalid"}, "host 'nowhere.invalid' has no addr"),
        (["http://127.0.0.1:1"], {"version": -1}, "version=-1: a policy version is not negative"),
    ],
)
def test_arguments_that_make_no_sense(
    engines: list[str], settings: dict[str, object], text: str, tmp_path: Path
) -> None:
    with Trainers(2, "fsdp2", tmp_path) as trainers:
        said = trainers.fail_to_attach(*engines, **settings)

    assert text in said.text


def test_a_closed_hook_does_nothing(tmp_path: Path) -> None:
    with PeerEngine(MODEL) as peer, Trainers(2, "fsdp2", tmp_path) as trainers:
        trainers.attach(peer.url)
        trainers.do(close)
        trainers.do(step)

        check_untouched(peer)
