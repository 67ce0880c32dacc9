import pytest

from reshard.errors import ReshardError
from reshard_trainer.settings import Settings


def test_all_that_is_wrong_is_told_at_once() -> None:
    with pytest.raises(ReshardError) as caught:
        Settings(publish_every=0, deadline_seconds=-1.0, install="later")  # type: ignore[arg-type]

    assert [fault.partition(":")[0] for fault in caught.value.faults] == [
        "publish_every=0",
        "deadline_seconds=-1.0",
        "install='later'",
    ]


def test_a_bound_on_memory_needs_an_install_that_has_one() -> None:
    with pytest.raises(ReshardError, match='choose install="in_place"'):
        Settings(buffer_bytes=2**20)
    with pytest.raises(ReshardError, match="at least 1024"):
        Settings(buffer_bytes=100, install="in_place")
    skip = {"install": "in_place", "overlap": True, "busy_engines": "skip"}
    with pytest.raises(ReshardError, match="the copy that a slow engine reads has no bound"):
        Settings(buffer_bytes=2**20, **skip)  # type: ignore[arg-type]
    Settings(buffer_bytes=2**20, share="live", **skip)  # type: ignore[arg-type]


@pytest.mark.parametrize(("host", "group_host"), [("", None), ("127.0.0.1", None), ("lo", "lo")])
def test_only_an_interface_is_the_same_on_every_machine(host: str, group_host: str | None) -> None:
    assert Settings(host=host).group_host == group_host
