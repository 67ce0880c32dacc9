"""Rollouts for a training script: blocking calls, the event loop in a thread of its own.

    with asynchronous_in_background(
        lambda: AsynchronousRollouts(prompts, HookRefresher(hook), how, settings),
        lambda: [HttpEndpoint(url) for url in urls],
    ) as rollouts:
        while hook.version < steps:
            batch = rollouts.take(hook.version, seconds=600)
            ...
            rollouts.publish(hook.version + 1)
            optimizer.step()

A version is published to the rollouts before the step that makes it: engines have it before
`step()` returns, and what they sample by then would else bear a label that nobody knows.

Not here: what the calls do (`asynchronous.py`, `sequential.py`).
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final, TypeVar

from reshard.board import Invitation
from reshard.errors import DeadlineExceeded
from reshard.ids import PolicyVersion
from reshard_trainer.rollouts.asynchronous import AsynchronousRollouts
from reshard_trainer.rollouts.buffer import Batch
from reshard_trainer.rollouts.desk import SavedDesk
from reshard_trainer.rollouts.desk_server import LEASE_SECONDS, DeskServer
from reshard_trainer.rollouts.endpoint import Endpoint
from reshard_trainer.rollouts.meter import Meter
from reshard_trainer.rollouts.rollout import EngineName, Prompt, RolloutGroup, Serial
from reshard_trainer.rollouts.sequential import Refresh, SequentialRollouts

T = TypeVar("T")

CALL_SECONDS: Final = 60.0
"""Longest that a call may take that does not wait for rollouts."""

_GRACE_SECONDS: Final = 10.0


class LoopThread:
    """An event loop in a daemon thread; calls from other threads have deadlines."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call(self, work: Coroutine[object, object, T], seconds: float) -> T:
        """Run to the end; its result.

        Raises:
            DeadlineExceeded: it took longer; it is cancelled.
        """
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(seconds)
        except TimeoutError as error:
            if future.done():
                raise
            future.cancel()
            raise DeadlineExceeded(
                f"the rollouts' event loop did not answer within {seconds:g} s"
            ) from error

    def close(self) -> None:
        """End the loop, and what still runs on it."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()


class BackgroundAsynchronous:
    """`AsynchronousRollouts`, called from other threads.

    Attributes:
        meter: counts.
    """

    def __init__(self, thread: LoopThread, rollouts: AsynchronousRollouts) -> None:
        self.meter: Meter = rollouts.meter
        self._thread = thread
        self._rollouts = rollouts
        self._servers: list[DeskServer] = []

    def join(self, *endpoints: Endpoint) -> None:
        """Engines join; see `AsynchronousRollouts.join`."""
        self._thread.call(self._rollouts.join(*endpoints), CALL_SECONDS)

    def leave(self, name: EngineName, seconds: float = 0.0) -> None:
        """An engine leaves; what it has in hand after `seconds` is asked again elsewhere."""
        self._thread.call(self._rollouts.leave(name, seconds), seconds + CALL_SECONDS)

    def serve(self, host: str = "127.0.0.1", *, lease_seconds: float = LEASE_SECONDS) -> Invitation:
        """Let producers on other machines work for this run; how they reach it."""

        async def start() -> Invitation:
            server = DeskServer(self._rollouts.service, host, lease_seconds=lease_seconds)
            self._servers.append(server)
            return server.invitation

        return self._thread.call(start(), CALL_SECONDS)

    def take(self, version: PolicyVersion, seconds: float) -> Batch:
        """The batch of the trainer's step at `version`; see `AsynchronousRollouts.take`."""
        work = self._rollouts.take(version, seconds)
        return self._thread.call(work, seconds + _GRACE_SECONDS)

    def publish(self, version: PolicyVersion) -> None:
        """Engines may have this version from now on; call it before the hook brings it to them."""

        async def publish() -> None:
            self._rollouts.publish(version)

        self._thread.call(publish(), CALL_SECONDS)

    def save(self, version: PolicyVersion) -> SavedDesk:
        """The state that belongs into the trainer's checkpoint of `version`."""

        async def save() -> SavedDesk:
            return self._rollouts.save(version)

        return self._thread.call(save(), CALL_SECONDS)

    def close(self) -> None:
        """All engines leave, all sockets close."""

        async def close() -> None:
            for server in self._servers:
                await server.close()
            await self._rollouts.close()

        self._thread.call(close(), CALL_SECONDS)


class BackgroundSequential:
    """`SequentialRollouts`, called from other threads.

    Attributes:
        meter: counts.
    """

    def __init__(self, thread: LoopThread, rollouts: SequentialRollouts) -> None:
        self.meter: Meter = rollouts.meter
        self._thread = thread
        self._rollouts = rollouts

    def join(self, *endpoints: Endpoint) -> None:
        """Engines join; see `SequentialRollouts.join`."""
        self._thread.call(self._rollouts.join(*endpoints), CALL_SECONDS)

    def leave(self, name: EngineName) -> None:
        """An engine leaves."""
        self._thread.call(self._rollouts.leave(name), CALL_SECONDS)

    def generate(
        self,
        prompts: Mapping[Serial, Prompt],
        *,
        min_version: PolicyVersion,
        seconds: float,
        refresh: Refresh | None = None,
    ) -> tuple[RolloutGroup, ...]:
        """Groups of one version; see `SequentialRollouts.generate`."""
        work = self._rollouts.generate(
            prompts, min_version=min_version, seconds=seconds, refresh=refresh
        )
        return self._thread.call(work, seconds + _GRACE_SECONDS)

    def close(self) -> None:
        """All engines leave."""
        self._thread.call(self._rollouts.close(), CALL_SECONDS)


@contextmanager
def asynchronous_in_background(
    make: Callable[[], AsynchronousRollouts],
    make_endpoints: Callable[[], Sequence[Endpoint]],
) -> Iterator[BackgroundAsynchronous]:
    """Asynchronous rollouts on a loop of their own; everything is closed at exit.

    Args:
        make: makes the rollouts; called on the loop.
        make_endpoints: makes the engines that join; called on the loop.
    """

    async def start() -> BackgroundAsynchronous:
        rollouts, endpoints = make(), make_endpoints()
        try:
            await rollouts.join(*endpoints)
        except BaseException:
            await rollouts.close()
            for endpoint in endpoints:
                await endpoint.close()
            raise
        return BackgroundAsynchronous(thread, rollouts)

    thread = LoopThread("reshard-rollouts")
    with contextlib.closing(thread):
        background = thread.call(start(), CALL_SECONDS)
        with contextlib.closing(background):
            yield background


@contextmanager
def sequential_in_background(
    make: Callable[[], SequentialRollouts],
    make_endpoints: Callable[[], Sequence[Endpoint]],
) -> Iterator[BackgroundSequential]:
    """Sequential rollouts on a loop of their own; everything is closed at exit.

    Args:
        make: makes the rollouts; called on the loop.
        make_endpoints: makes the engines that join; called on the loop.
    """

    async def start() -> BackgroundSequential:
        rollouts, endpoints = make(), make_endpoints()
        try:
            await rollouts.join(*endpoints)
        except BaseException:
            await rollouts.close()
            for endpoint in endpoints:
                await endpoint.close()
            raise
        return BackgroundSequential(thread, rollouts)

    thread = LoopThread("reshard-rollouts")
    with contextlib.closing(thread):
        background = thread.call(start(), CALL_SECONDS)
        with contextlib.closing(background):
            yield background
