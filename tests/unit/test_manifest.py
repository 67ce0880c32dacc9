from collections.abc import Callable

import pytest

from reshard.errors import ReshardError
from reshard.ids import PolicyVersion
from reshard.manifest import ManifestState, ShardManifest


def _draft() -> ShardManifest:
    return ShardManifest("run", PolicyVersion(7), PolicyVersion(6))


def test_a_version_goes_through_all_states() -> None:
    draft = _draft()
    sealed = draft.seal("layout")
    published = sealed.publish({"engine": "plan"})
    retired = published.retire()

    assert [m.state for m in (draft, sealed, published, retired)] == list(ManifestState)
    assert (retired.layout_digest, retired.plan_digests) == ("layout", {"engine": "plan"})
    assert draft == _draft()


def test_no_state_is_skipped_or_entered_twice() -> None:
    draft = _draft()
    sealed = draft.seal("layout")
    published = sealed.publish({})

    steps: list[Callable[[], object]] = [
        lambda: draft.publish({}),
        draft.retire,
        lambda: sealed.seal("layout"),
        sealed.retire,
        lambda: published.seal("layout"),
        lambda: published.publish({}),
        lambda: published.retire().retire(),
    ]
    for step in steps:
        with pytest.raises(ReshardError, match=r"version 7 of run run is \w+, not \w+"):
            step()


@pytest.mark.parametrize(
    ("make", "fault"),
    [
        (lambda: ShardManifest("r", PolicyVersion(-1)), "version -1 is negative"),
        (
            lambda: ShardManifest("r", PolicyVersion(3), PolicyVersion(3)),
            "base 3 is not before version 3",
        ),
        (lambda: _draft().seal(""), "sealed with layout digest ''"),
        (
            lambda: ShardManifest("r", PolicyVersion(3), layout_digest="x"),
            "draft with layout digest 'x'",
        ),
    ],
)
def test_an_invalid_manifest_cannot_exist(make: Callable[[], object], fault: str) -> None:
    with pytest.raises(ReshardError) as caught:
        make()

    assert caught.value.faults == (fault,)
