"""Seconds by step."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Timing:
    """Adds up how long each step took.

    Attributes:
        seconds: by step.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, step: str) -> Iterator[None]:
        """Time the body as part of `step`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[step] = self.seconds.get(step, 0.0) + time.perf_counter() - start
