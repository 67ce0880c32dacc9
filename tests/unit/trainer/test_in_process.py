import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from reshard.board import Deadline
from reshard.engine_control import EngineControl, EngineDescription
from reshard.errors import DeadlineExceeded, EngineError
from reshard_trainer.in_process import InProcessEngine


class FakeLlm:
    """Test double of `vllm.LLM`: remembers its calls."""

    def __init__(self, backend: str | None = "reshard", extension: str = "") -> None:
        transfer = SimpleNamespace(backend=backend) if backend else None
        parallel = SimpleNamespace(world_size_across_dp=2, worker_extension_cls=extension)
        config = SimpleNamespace(parallel_config=parallel, weight_transfer_config=transfer)
        self.llm_engine: Any = SimpleNamespace(vllm_config=config)
        self.calls: list[tuple[object, ...]] = []
        self.act: Callable[[str], object] = lambda name: None

    def _note(self, name: str, *arguments: object) -> object:
        self.calls.append((name, *arguments))
        return self.act(name)

    def init_weight_transfer_engine(self, request: dict[str, object]) -> None:
        self._note("init", request)

    def start_weight_update(self) -> None:
        self._note("start")

    def update_weights(self, request: dict[str, object]) -> None:
        self._note("update", request)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._note("finish", weight_version)

    def update_weight_version(self, new_version: str) -> None:
        self._note("label", new_version)

    def get_weight_version(self) -> str:
        self._note("version")
        return "12"

    def shutdown_weight_transfer_engine(self) -> None:
        self._note("shutdown")

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        self._note("reset", reset_running_requests)
        return True

    def collective_rpc(
        self, method: str, *, kwargs: dict[str, object] | None = None
    ) -> list[object]:
        self._note(method, kwargs)
        return []


def _soon() -> Deadline:
    return Deadline.after(10)


def _refit(engine: InProcessEngine) -> None:
    engine.connect({"run_id": "r"}, _soon())
    engine.begin(_soon())
    engine.receive({"attempt": 1}, _soon())
    engine.pause(_soon())
    engine.commit({"attempt": 1}, _soon())
    engine.finish("7", _soon())
    assert engine.reset_prefix_cache(_soon())
    engine.resume(_soon())
    engine.finish(None, _soon())
    engine.release(_soon())


def test_through_the_backend() -> None:
    llm = FakeLlm()
    engine = InProcessEngine(llm)

    assert isinstance(engine, EngineControl)
    assert engine.describe(_soon()) == EngineDescription(2, "12", False)
    _refit(engine)
    assert llm.calls == [
        ("version",),
        ("init", {"init_info": {"session": {"run_id": "r"}}}),
        ("start",),
        ("update", {"update_info": {"step": "receive", "message": {"attempt": 1}}}),
        ("update", {"update_info": {"step": "commit", "message": {"attempt": 1}}}),
        ("finish", "7"),
        ("reset", True),
        ("finish", None),
        ("shutdown",),
    ]
    engine.close()


def test_through_the_extension() -> None:
    llm = FakeLlm(None, "reshard_vllm.WorkerExtension")
    engine = InProcessEngine(llm)
    engine.describe(_soon())
    _refit(engine)

    assert llm.calls == [
        ("version",),
        ("refit_connect", {"message": {"run_id": "r"}}),
        ("refit_receive", {"message": {"attempt": 1}}),
        ("refit_commit", {"message": {"attempt": 1}}),
        ("label", "7"),
        ("reset", True),
        ("refit_close", None),
    ]
    engine.close()


def test_without_the_flag_no_worker_is_reached() -> None:
    llm = FakeLlm(None)
    engine = InProcessEngine(llm)

    with pytest.raises(EngineError, match="was started without reshard's flag"):
        engine.describe(_soon())
    with pytest.raises(EngineError, match="was not described yet"):
        engine.begin(_soon())
    assert llm.calls == []
    engine.close()


def test_names_differ() -> None:
    first, second = InProcessEngine(FakeLlm()), InProcessEngine(FakeLlm())

    assert first.name != second.name
    first.close()
    second.close()


def test_an_exception_of_the_engine_is_its_error() -> None:
    llm = FakeLlm()
    engine = InProcessEngine(llm)
    engine.describe(_soon())

    def act(name: str) -> object:
        raise TimeoutError("worker is gone")

    llm.act = act
    with pytest.raises(EngineError, match=r"in-process-\d+: TimeoutError: worker is gone"):
        engine.begin(_soon())
    engine.close()


def test_a_call_without_an_answer_ends_by_its_deadline_and_holds_up_the_next() -> None:
    llm = FakeLlm()
    engine = InProcessEngine(llm)
    engine.describe(_soon())
    go_on = threading.Event()

    llm.act = lambda name: go_on.wait(10) if name == "start" else None
    with pytest.raises(DeadlineExceeded, match="did not answer; the call may still take effect"):
        engine.begin(Deadline.after(0.1))
    with pytest.raises(DeadlineExceeded, match="this one was not made"):
        engine.finish(None, Deadline.after(0.1))
    go_on.set()
    engine.finish("1", _soon())

    assert [call[0] for call in llm.calls] == ["version", "start", "finish"]
    engine.close()
