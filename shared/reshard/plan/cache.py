"""Plans that were made, by the layouts that they were made from.

The same layouts make the same plan: a session that opens again, or with another engine of the same
shape, plans nothing.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Callable
from threading import Lock
from typing import Final

from reshard.plan.model import TransferPlan

KEPT: Final = 8
"""Most plans of a process; the one used longest ago goes first."""


class PlanCache:
    """A few plans.

    Attributes:
        hits: how often a plan was there.
        misses: how often one had to be made.
    """

    def __init__(self, kept: int = KEPT) -> None:
        self.hits = 0
        self.misses = 0
        self._kept = kept
        self._plans: OrderedDict[bytes, TransferPlan] = OrderedDict()
        # The publisher refits its engines from several threads.
        self._lock = Lock()

    def plan(self, layouts: bytes, make: Callable[[], TransferPlan]) -> TransferPlan:
        """The plan for some layouts.

        Args:
            layouts: of both sides, encoded; equal bytes make equal plans.
            make: makes it; what it raises is not kept.
        """
        key = hashlib.sha256(layouts).digest()
        with self._lock:
            found = self._plans.get(key)
            if found is not None:
                self.hits += 1
                self._plans.move_to_end(key)
                return found
            self.misses += 1
        made = make()
        with self._lock:
            self._plans[key] = made
            while len(self._plans) > self._kept:
                self._plans.popitem(last=False)
        return made
