"""A plan is made once for the same layouts."""

import pytest
from tests.unit.plan.worlds import both, cut

from reshard.errors import PlanError
from reshard.plan import TransferPlan, make_plan
from reshard.plan.cache import PlanCache


def made(parts: int) -> TransferPlan:
    return make_plan(*both({"w": (cut(2, 0), cut(parts, 1, first=2))}))


def never() -> TransferPlan:
    raise AssertionError("planned again")


def test_the_same_layouts_are_planned_once() -> None:
    cache = PlanCache()
    first = cache.plan(b"a", lambda: made(4))
    assert cache.plan(b"a", never) is first
    assert cache.plan(b"b", lambda: made(2)) is not first
    assert (cache.hits, cache.misses) == (1, 2)


def test_the_plan_used_longest_ago_goes_first() -> None:
    cache = PlanCache(kept=2)
    for key in (b"a", b"b"):
        cache.plan(key, lambda: made(4))
    cache.plan(b"a", never)
    cache.plan(b"c", lambda: made(4))
    cache.plan(b"a", never)
    with pytest.raises(AssertionError, match="planned again"):
        cache.plan(b"b", never)


def test_what_cannot_be_planned_is_tried_again() -> None:
    def broken() -> TransferPlan:
        raise PlanError("no plan")

    cache = PlanCache()
    with pytest.raises(PlanError):
        cache.plan(b"a", broken)
    assert cache.plan(b"a", lambda: made(4)).redundancy == 1.0
