"""Where prompts come from, and the book of which of them are done.

A run's prompts are numbered once and for all, so that a position is a number and a resumed run
goes on exactly where it was. Not here: when a prompt may start (`gate.py`).
"""

import heapq
import random
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple, Protocol

from reshard_trainer.rollouts.errors import RolloutError
from reshard_trainer.rollouts.gate import Ticket
from reshard_trainer.rollouts.rollout import Prompt, Serial


class Record(NamedTuple):
    """What is remembered of a serial until it is finished.

    Attributes:
        attempts: how often it was given out.
        charges: how often that ended in a way that may be its own fault.
    """

    attempts: int = 0
    charges: int = 0


class PromptSource(Protocol):
    """The run's stream of prompts, by position. The same serial always gives the same prompt."""

    def prompt(self, serial: Serial) -> Prompt | None:
        """The prompt at a position; None: the stream ends before it."""


class ShuffledPrompts:
    """A data set, each epoch in another order that follows from the seed."""

    def __init__(self, prompts: Sequence[Prompt], *, seed: int, epochs: int | None = None) -> None:
        """Describe the stream.

        Args:
            prompts: the data set.
            seed: of the orders.
            epochs: how often each prompt comes; None: without end.

        Raises:
            RolloutError: no prompts.
        """
        if not prompts:
            raise RolloutError("there are no prompts")
        self._prompts = prompts
        self._length = None if epochs is None else epochs * len(prompts)
        self._order = lru_cache(maxsize=2)(self._shuffled)
        self._seed = seed

    def prompt(self, serial: Serial) -> Prompt | None:
        """The prompt at a position of the stream."""
        if self._length is not None and serial >= self._length:
            return None
        epoch, position = divmod(serial, len(self._prompts))
        return self._prompts[self._order(epoch)[position]]

    def _shuffled(self, epoch: int) -> list[int]:
        order = list(range(len(self._prompts)))
        random.Random(f"{self._seed}/{epoch}").shuffle(order)
        return order


class PromptBook:
    """Which serials are out, and which wait to be given out again.

    Invariant: every serial under `next_serial` is in exactly one state: out (it runs, or its group
    waits for the trainer), waiting, or finished (trained, or dropped).
    """

    def __init__(self, source: PromptSource) -> None:
        self._source = source
        self._waiting: list[Serial] = []
        self._out: set[Serial] = set()
        self._records: dict[Serial, Record] = {}
        self.next_serial = Serial(0)

    @property
    def waiting(self) -> tuple[Serial, ...]:
        """Serials that wait to be given out again, ascending."""
        return tuple(sorted(self._waiting))

    @property
    def out(self) -> frozenset[Serial]:
        """Serials that were given out and are not finished."""
        return frozenset(self._out)

    @property
    def records(self) -> dict[Serial, Record]:
        """What is remembered of each serial that is not finished."""
        return dict(self._records)

    @property
    def exhausted(self) -> bool:
        """Whether nothing is left to give out (some may still be out)."""
        return not self._waiting and self._source.prompt(self.next_serial) is None

    def give_out(self) -> tuple[Ticket, Prompt] | None:
        """The next prompt: what waits first, lowest serial first; None: nothing is left."""
        serial = self._waiting[0] if self._waiting else self.next_serial
        prompt = self._source.prompt(serial)
        if prompt is None:
            return None
        if self._waiting:
            heapq.heappop(self._waiting)
        else:
            self.next_serial = Serial(serial + 1)
        record = self._records.get(serial, Record())
        self._records[serial] = Record(record.attempts + 1, record.charges)
        self._out.add(serial)
        return Ticket(serial, record.attempts), prompt

    def put_back(self, serial: Serial, *, charge: int = 0) -> int:
        """What was out waits to be given out again; the charges against it so far."""
        self._out.remove(serial)
        heapq.heappush(self._waiting, serial)
        record = self._records[serial]
        self._records[serial] = Record(record.attempts, record.charges + charge)
        return record.charges + charge

    def finish(self, serial: Serial) -> None:
        """What was out, or waits, never comes again."""
        if serial in self._out:
            self._out.remove(serial)
        else:
            self._waiting.remove(serial)
            heapq.heapify(self._waiting)
        del self._records[serial]

    def restore(
        self, next_serial: Serial, records: Mapping[Serial, Record], out: Iterable[Serial]
    ) -> None:
        """Go on where another book was saved.

        Args:
            next_serial: the first that was never given out.
            records: of every serial that is not finished.
            out: those of them whose groups are at hand; the others wait to be given out again.
        """
        self.next_serial = next_serial
        self._records = dict(records)
        self._out = set(out)
        self._waiting = sorted(records.keys() - self._out)
