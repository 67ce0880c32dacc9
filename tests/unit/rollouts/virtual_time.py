"""An event loop whose time is virtual: waiting takes none, and a deadlock is an error at once."""

import asyncio
import selectors
from collections.abc import Coroutine, Mapping
from typing import TypeVar

T = TypeVar("T")


class Deadlock(AssertionError):
    """Nothing is scheduled, and nothing can happen any more."""


class _Jump(selectors.BaseSelector):
    """Instead of waiting, moves the loop's clock."""

    def __init__(self, loop: "VirtualLoop") -> None:
        self._inner = selectors.DefaultSelector()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = self._inner.select(0)
        if events:
            return events
        if timeout is None:
            raise Deadlock("every task waits for something that nobody will do")
        self._loop.now += max(0.0, timeout)
        return []

    def register(self, fileobj: object, events: int, data: object = None) -> selectors.SelectorKey:
        return self._inner.register(fileobj, events, data)  # type: ignore[arg-type]

    def unregister(self, fileobj: object) -> selectors.SelectorKey:
        return self._inner.unregister(fileobj)  # type: ignore[arg-type]

    def get_map(self) -> Mapping[object, selectors.SelectorKey]:  # type: ignore[override]
        return self._inner.get_map()  # type: ignore[return-value]

    def close(self) -> None:
        self._inner.close()


class VirtualLoop(asyncio.SelectorEventLoop):
    """Time starts at 0 and moves only when nothing is left to do at the present time."""

    def __init__(self) -> None:
        self.now = 0.0
        super().__init__(_Jump(self))

    def time(self) -> float:
        return self.now


def run(coroutine: Coroutine[object, object, T], *, seconds: float = 1e6) -> T:
    """Run to the end in virtual time; fails if that takes more virtual seconds."""

    async def limited() -> T:
        async with asyncio.timeout(seconds):
            return await coroutine

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(limited())
