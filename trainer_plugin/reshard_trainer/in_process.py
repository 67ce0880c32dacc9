"""A `vllm.LLM` of this process as an engine; vLLM is not imported here.

Calls run on a thread of their own, so that this process can take part in the exchange while the
engine waits for it, and so that each has a deadline. An `LLM` runs nothing between calls, so there
is nothing to pause; do not call `generate` while an optimizer steps.
"""

import itertools
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Protocol, TypeVar

from reshard.board import Deadline
from reshard.engine_control import EngineDescription, Message
from reshard.errors import DeadlineExceeded, EngineError, ReshardError
from reshard_trainer.engines import Entry, entry_of

T = TypeVar("T")
_numbers = itertools.count()


class _ParallelConfig(Protocol):
    world_size_across_dp: int
    worker_extension_cls: str


class _WeightTransferConfig(Protocol):
    backend: str


class _VllmConfig(Protocol):
    @property
    def parallel_config(self) -> _ParallelConfig: ...
    @property
    def weight_transfer_config(self) -> _WeightTransferConfig | None: ...


class _LlmEngine(Protocol):
    @property
    def vllm_config(self) -> _VllmConfig: ...


class Llm(Protocol):
    """The part of `vllm.LLM` that a refit calls."""

    @property
    def llm_engine(self) -> _LlmEngine:
        """Holds the configuration."""

    def init_weight_transfer_engine(self, request: dict[str, object]) -> None:
        """As in vLLM."""

    def start_weight_update(self) -> None:
        """As in vLLM."""

    def update_weights(self, request: dict[str, object]) -> None:
        """As in vLLM."""

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """As in vLLM."""

    def update_weight_version(self, new_version: str) -> None:
        """As in vLLM."""

    def get_weight_version(self) -> str:
        """As in vLLM."""

    def shutdown_weight_transfer_engine(self) -> None:
        """As in vLLM."""

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """As in vLLM."""

    def collective_rpc(
        self, method: str, *, kwargs: dict[str, object] | None = None
    ) -> list[object]:
        """As in vLLM."""


class InProcessEngine:
    """A `vllm.LLM` that trainer rank 0 holds. `EngineControl` says what each call promises.

    Attributes:
        name: `in-process-<number>`.
    """

    def __init__(self, llm: Llm) -> None:
        self.name = f"in-process-{next(_numbers)}"
        self._llm = llm
        self._calls = _OneAtATime(self.name)
        self._entry: Entry | None = None

    def __repr__(self) -> str:
        return f"InProcessEngine({self.name!r})"

    def describe(self, deadline: Deadline) -> EngineDescription:
        """Check the engine's configuration; reaches no worker."""
        config = self._llm.llm_engine.vllm_config
        transfer = config.weight_transfer_config
        self._entry = entry_of(
            self.name,
            backend=transfer.backend if transfer else "",
            extension=config.parallel_config.worker_extension_cls,
        )
        return EngineDescription(
            ranks=config.parallel_config.world_size_across_dp,
            weight_version=self.weight_version(deadline),
            paused=False,
        )

    def connect(self, message: Message, deadline: Deadline) -> None:
        """Have every rank join a session."""
        if self._through_backend():
            request: dict[str, object] = {"init_info": {"session": message}}
            self._run(lambda: self._llm.init_weight_transfer_engine(request), deadline)
        else:
            self._rpc("refit_connect", message, deadline)

    def begin(self, deadline: Deadline) -> None:
        """Open vLLM's update session; with the extension alone there is none."""
        if self._through_backend():
            self._run(self._llm.start_weight_update, deadline)

    def receive(self, message: Message, deadline: Deadline) -> None:
        """Have every rank start to receive."""
        self._step("receive", message, deadline)

    def commit(self, message: Message, deadline: Deadline) -> None:
        """Have every rank make the received version live."""
        self._step("commit", message, deadline)

    def finish(self, version: str | None, deadline: Deadline) -> None:
        """Close vLLM's update session, with the version if there is one."""
        if self._through_backend():
            self._run(lambda: self._llm.finish_weight_update(version), deadline)
        elif version is not None:
            self._run(lambda: self._llm.update_weight_version(version), deadline)

    def pause(self, deadline: Deadline) -> None:
        """Nothing runs between calls."""

    def resume(self, deadline: Deadline) -> None:
        """Nothing runs between calls."""

    def reset_prefix_cache(self, deadline: Deadline) -> bool:
        """Drop all KV blocks."""
        return self._run(lambda: self._llm.reset_prefix_cache(True), deadline)

    def weight_version(self, deadline: Deadline) -> str:
        """The label of the engine's outputs."""
        return self._run(self._llm.get_weight_version, deadline)

    def release(self, deadline: Deadline) -> None:
        """Have every rank leave its session."""
        if self._through_backend():
            self._run(self._llm.shutdown_weight_transfer_engine, deadline)
        else:
            self._run(lambda: self._llm.collective_rpc("refit_close"), deadline)

    def close(self) -> None:
        """End the thread of calls; the engine lives on."""
        self._calls.close()

    def _through_backend(self) -> bool:
        if self._entry is None:
            raise EngineError(f"engine {self.name} was not described yet; call describe first")
        return self._entry == "backend"

    def _step(self, step: str, message: Message, deadline: Deadline) -> None:
        if self._through_backend():
            request: dict[str, object] = {"update_info": {"step": step, "message": message}}
            self._run(lambda: self._llm.update_weights(request), deadline)
        else:
            self._rpc(f"refit_{step}", message, deadline)

    def _rpc(self, method: str, message: Message, deadline: Deadline) -> None:
        self._run(lambda: self._llm.collective_rpc(method, kwargs={"message": message}), deadline)

    def _run(self, call: Callable[[], T], deadline: Deadline) -> T:
        try:
            return self._calls.run(call, deadline)
        except ReshardError:
            raise
        except Exception as error:
            raise EngineError(f"engine {self.name}: {type(error).__name__}: {error}") from error


class _OneAtATime:
    """A daemon thread that runs calls in order; a caller waits until its deadline."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._todo: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=f"reshard-{name}", daemon=True)
        self._thread.start()

    def run(self, call: Callable[[], T], deadline: Deadline) -> T:
        done: Future[T] = Future()

        def task() -> None:
            if not done.set_running_or_notify_cancel():
                return
            try:
                done.set_result(call())
            except BaseException as error:
                done.set_exception(error)

        self._todo.put(task)
        if wait([done], deadline.remaining()).done:
            return done.result()
        if done.cancel():
            text = "is still busy with an earlier call; this one was not made"
        else:
            text = "did not answer; the call may still take effect"
        raise DeadlineExceeded(f"engine {self._name} {text} (within {deadline.seconds:g} s)")

    def close(self) -> None:
        self._todo.put(None)

    def _work(self) -> None:
        while (task := self._todo.get()) is not None:
            task()
