"""The cost model against arithmetic by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.errors import LayoutError
from reshard.simulation.machine import Machine
from reshard.simulation.traffic import Traffic

BYTE_A_SECOND = 8e-9
"""A rate, in gigabits a second."""


def slow(nodes: int, gpus: int = 1, **rates: float) -> Machine:
    """A byte a second on the links; neighbours, copies, latency and loaders cost nothing."""
    given = {
        "link_gbps": BYTE_A_SECOND,
        "local_gbps": 1e9,
        "copy_gbps": 1e9,
        "latency_us": 0.0,
        "loader_us": 0.0,
    } | rates
    return Machine(nodes, gpus, **given)


def seconds(traffic: Traffic) -> float:
    return traffic.busiest[0]


def test_one_message() -> None:
    traffic = Traffic(Machine(2, 1, link_gbps=80, latency_us=5, copy_gbps=800, bucket_mib=4))
    traffic.send(0, 1, 10**9)
    traffic.copy(0, 10**9)
    assert seconds(traffic) == pytest.approx(0.1)
    # 10^9 bytes are 239 messages of 4 MiB.
    assert traffic.latency == pytest.approx(239 * 5e-6)
    assert traffic.copies == pytest.approx(0.01)


def test_a_rank_that_keeps_its_own_sends_nothing() -> None:
    traffic = Traffic(slow(1))
    traffic.send(0, 0, 100)
    assert traffic.busiest == (0.0, "nothing")


def test_neighbours_use_their_own_links() -> None:
    traffic = Traffic(slow(2, 2, local_gbps=2 * BYTE_A_SECOND))
    traffic.send(0, 1, 100)
    assert traffic.busiest[0] == pytest.approx(50)
    assert traffic.busiest[1] == "out of the local link of rank 0"
    traffic.send(0, 2, 70)
    assert traffic.busiest[0] == pytest.approx(70)


def test_uneven_links_the_node_binds() -> None:
    """Two ranks of a node send 60 bytes each; its link carries 1.5 bytes a second in all."""
    traffic = Traffic(slow(2, 2, node_link_gbps=1.5 * BYTE_A_SECOND))
    traffic.send(0, 2, 60)
    traffic.send(1, 3, 60)
    assert traffic.busiest[0] == pytest.approx(80)
    assert traffic.busiest[1] == "out of the links of node 0"


def test_one_receiver_binds() -> None:
    traffic = Traffic(slow(3))
    traffic.send(0, 2, 60)
    traffic.send(1, 2, 60)
    assert traffic.busiest[0] == pytest.approx(120)
    assert traffic.busiest[1] == "into the link of rank 2"


def test_a_broadcast_is_a_chain_of_nodes() -> None:
    traffic = Traffic(slow(3))
    traffic.broadcast(0, (1, 2), 100)
    assert seconds(traffic) == pytest.approx(100)
    assert {at for (_, way, at) in traffic.loads if way == "out of"} == {0, 1}
    assert {at for (_, way, at) in traffic.loads if way == "into"} == {1, 2}


def test_a_broadcast_enters_a_node_once_through_all_its_links() -> None:
    traffic = Traffic(slow(2, 4, local_gbps=BYTE_A_SECOND))
    traffic.broadcast(0, (4, 5, 6, 7), 100)
    assert traffic.loads["link", "out of", 0] == 100
    assert traffic.loads["node link", "into", 1] == pytest.approx(100)
    assert traffic.loads["link", "into", 5] == pytest.approx(25)
    assert traffic.loads["neighbours", "into", 5] == pytest.approx(75)


def test_an_all_gather_crosses_once_a_node() -> None:
    """100 bytes over two nodes of two: 50 enter each, a half by each rank; all end with 100."""
    traffic = Traffic(slow(2, 2))
    traffic.share((0, 1, 2, 3), 100)
    assert traffic.loads["node link", "into", 1] == pytest.approx(50)
    assert traffic.loads["link", "into", 3] == pytest.approx(25)
    assert traffic.loads["neighbours", "into", 3] == pytest.approx(50)
    assert traffic.total("into") == pytest.approx(4 * 75)


def test_an_all_gather_inside_a_node_uses_no_link() -> None:
    traffic = Traffic(slow(1, 4, local_gbps=BYTE_A_SECOND))
    traffic.share((0, 1, 2, 3), 100)
    assert traffic.busiest[0] == pytest.approx(75)
    assert all(wire == "neighbours" for wire, _, _ in traffic.loads)


sends = st.lists(
    st.tuples(st.integers(0, 7), st.integers(0, 7), st.integers(0, 10**12)), max_size=12
)


@given(sends, st.floats(1, 1000), st.floats(1, 4))
def test_a_faster_wire_is_never_slower(
    each: list[tuple[int, int, int]], rate: float, factor: float
) -> None:
    def took(**rates: float) -> float:
        traffic = Traffic(Machine(4, 2, **{"link_gbps": rate, "local_gbps": rate, **rates}))
        for source, destination, nbytes in each:
            traffic.send(source, destination, nbytes)
        return seconds(traffic)

    assert took(link_gbps=rate * factor) <= took()
    assert took(local_gbps=rate * factor) <= took()
    assert took(node_link_gbps=2 * rate) == pytest.approx(took())
    assert took(node_link_gbps=rate) >= took()


@given(sends, st.integers(0, 7), st.integers(0, 7), st.integers(1, 10**12))
def test_more_bytes_are_never_faster(
    each: list[tuple[int, int, int]], source: int, destination: int, nbytes: int
) -> None:
    traffic = Traffic(Machine(4, 2))
    for send in each:
        traffic.send(*send)
    before = (seconds(traffic), traffic.latency)
    traffic.send(source, destination, nbytes)
    assert before <= (seconds(traffic), traffic.latency)


@given(sends)
def test_what_goes_out_comes_in(each: list[tuple[int, int, int]]) -> None:
    traffic = Traffic(Machine(4, 2))
    for send in each:
        traffic.send(*send)
    moved = sum(nbytes for source, destination, nbytes in each if source != destination)
    assert traffic.total("out of") == traffic.total("into") == moved


def test_a_machine_that_cannot_be() -> None:
    with pytest.raises(LayoutError, match="no such machine") as caught:
        Machine(0, link_gbps=-1, latency_us=float("nan"), bucket_mib=0)
    assert len(caught.value.faults) == 4
