"""A live board: values, waits, admission, addresses, connections that break."""

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
import zmq
from tests.unit.board.proxy import Proxy

from reshard.board import BoardClient, BoardLimits, BoardServer, Deadline, Invitation
from reshard.errors import DeadlineExceeded, PeerError, ReshardError, WireError


@pytest.fixture(scope="module")
def server() -> Iterator[BoardServer]:
    with BoardServer() as served:
        yield served


@pytest.fixture
def client(server: BoardServer) -> Iterator[BoardClient]:
    with BoardClient(server.invitation, Deadline.after(10)) as connected:
        connected.delete_prefix("")
        yield connected


def soon() -> Deadline:
    return Deadline.after(0.05)


def later() -> Deadline:
    return Deadline.after(20)


def test_values(client: BoardClient) -> None:
    assert client.peek("k") is None
    client.put("k", b"1")
    assert client.put_first("k", b"2") == b"1"
    assert client.put_first("f", b"3") == b"3"
    assert client.peek("k") == b"1"
    assert client.get("f", later()) == b"3"
    assert client.get_any(["absent", "f", "k"], later()) == ("f", b"3")
    assert [client.add("n", 4), client.add("n", -1)] == [4, 3]
    client.delete_prefix("k")
    assert client.look(["k", "f"]).missing == ("k",)


def test_waits_are_served_when_the_key_appears(client: BoardClient, server: BoardServer) -> None:
    """Several threads of one client wait at once; none polls."""
    with ThreadPoolExecutor(8) as pool:
        waits = [pool.submit(client.get, f"w{i}", later()) for i in range(8)]
        with BoardClient(server.invitation, later()) as other:
            for i in reversed(range(8)):
                other.put(f"w{i}", b"%d" % i)
        assert [wait.result(20) for wait in waits] == [b"%d" % i for i in range(8)]


def test_get_all_tells_what_is_missing(client: BoardClient) -> None:
    client.put("a", b"1")
    found = client.get_all(["a", "b"], soon())
    assert (found.values, found.missing) == ({"a": b"1"}, ("b",))
    client.put("fault", b"!")
    assert client.get_all(["a", "b"], later(), unless="fault").values["fault"] == b"!"


def test_a_watch_sees_the_key_and_ends_at_once(client: BoardClient) -> None:
    watch = client.watch(["w"])
    assert watch.found(0.01) is None
    client.put("w", b"1")
    found = watch.found(20)
    assert found is not None
    assert found.values == {"w": b"1"}
    watch.end()
    with ThreadPoolExecutor(1) as pool:
        other = client.watch(["never"])
        waiting = pool.submit(other.found, 60)
        other.end()
        with pytest.raises(CancelledError):
            waiting.result(20)
    watch.end()


def test_a_wait_that_is_over_says_for_what(client: BoardClient) -> None:
    with pytest.raises(DeadlineExceeded, match=r"nobody put x or y on the control board tcp://"):
        client.get_any(["x", "y"], soon())


def test_a_value_over_the_limit_is_refused() -> None:
    limits = BoardLimits(message_bytes=1000, total_bytes=5000)
    with (
        BoardServer(limits=limits) as server,
        BoardClient(server.invitation, later()) as client,
    ):
        with pytest.raises(WireError, match="refused: the board is full: 'k' of 6000 bytes"):
            client.put("k", b"x" * 6000)
        client.put("k", b"x" * 4000)
        with pytest.raises(WireError, match="1 values of 4001 bytes in one answer"):
            client.peek("k")


def test_an_enormous_message_costs_the_sender_its_call_alone() -> None:
    limits = BoardLimits(message_bytes=1000)
    with BoardServer(limits=limits) as server, BoardClient(server.invitation, later()) as other:
        with (
            BoardClient(server.invitation, later()) as client,
            pytest.raises(DeadlineExceeded, match="did not answer within"),
        ):
            client.put("k", b"x" * 200_000, Deadline.after(0.5))
        other.put("k", b"fine")
        assert other.peek("k") == b"fine"


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "[::1]", "localhost", "lo"])
def test_addresses(host: str) -> None:
    """By address, IPv6 with and without brackets, host name, interface; two at a time."""
    with BoardServer(host) as one, BoardServer(host) as two:
        assert one.invitation.address != two.invitation.address
        with BoardClient(one.invitation, later()) as client:
            client.put("k", b"1")
            assert client.host in ("127.0.0.1", "::1")


def test_it_listens_on_the_named_address_only(server: BoardServer) -> None:
    port = int(server.invitation.address.rpartition(":")[2])
    with socket.socket() as probe:
        probe.settimeout(1)
        # All of 127/8 is this machine; a listener on every interface would answer.
        assert probe.connect_ex(("127.0.0.2", port)) != 0


@pytest.mark.parametrize(
    ("host", "text"),
    [
        ("0.0.0.0", "stands for every interface; name the one address"),
        ("::", "stands for every interface"),
        ("no.such.host.invalid", "has no address"),
        ("192.0.2.1", "cannot listen on '192.0.2.1'"),
    ],
)
def test_addresses_that_cannot_be(host: str, text: str) -> None:
    with pytest.raises(ReshardError, match=text):
        BoardServer(host)


def test_nobody_there_is_an_error_by_the_deadline() -> None:
    with BoardServer() as gone:
        invitation = gone.invitation
    with pytest.raises(
        DeadlineExceeded, match=rf"{invitation.address} did not answer within 0.3 s"
    ):
        BoardClient(invitation, Deadline.after(0.3))


def stranger(invitation: Invitation) -> Invitation:
    """The same board with keys that it does not know."""
    public, secret = zmq.curve_keypair()
    return msgspec.structs.replace(
        invitation, client_key=public.decode(), client_secret=secret.decode()
    )


def test_a_wrong_secret_is_refused_at_once(server: BoardServer) -> None:
    with pytest.raises(WireError, match="does not accept this invitation"):
        BoardClient(stranger(server.invitation), later())


def test_a_board_with_another_key_is_not_believed(server: BoardServer) -> None:
    other = zmq.curve_keypair()[0].decode()
    with pytest.raises(DeadlineExceeded, match="not for this invitation"):
        BoardClient(
            msgspec.structs.replace(server.invitation, server_key=other), Deadline.after(0.5)
        )


@pytest.mark.parametrize("mechanism", ["null", "plain"])
def test_no_other_mechanism_gets_in(server: BoardServer, mechanism: str) -> None:
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.linger = 0
    if mechanism == "plain":
        dealer.plain_username, dealer.plain_password = b"user", b"password"
    dealer.connect(server.invitation.address)
    # The board may have turned the connection down by now: then libzmq takes nothing to send.
    with contextlib.suppress(zmq.Again):
        dealer.send(b"let me in", zmq.NOBLOCK)
    assert dealer.poll(300) == 0
    dealer.close()
    context.term()


def test_keys_that_are_no_keys(server: BoardServer) -> None:
    broken = msgspec.structs.replace(server.invitation, client_secret="short")
    with pytest.raises(WireError, match="are no CURVE keys"):
        BoardClient(broken, later())


def test_secrets_show_nowhere(
    server: BoardServer, client: BoardClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    invitation = server.invitation
    client.put("k", b"the value")
    shown = [repr(invitation), str(invitation), f"{invitation}", repr([invitation])]
    shown += [repr(server), repr(client), str(invitation.__rich_repr__())]
    errors: list[Callable[[], object]] = [
        lambda: BoardClient(stranger(invitation), later()),
        lambda: BoardClient(msgspec.structs.replace(invitation, client_secret="x"), later()),
        lambda: client.get("absent", soon()),
        lambda: client.add("k", 1),
    ]
    for each in errors:
        with pytest.raises(ReshardError) as caught:
            each()
        shown.append(str(caught.value))
    shown.append(caplog.text)
    for text in shown:
        for secret in (invitation.client_secret, invitation.client_key, invitation.server_key):
            assert secret not in text
        assert "the value" not in text
    assert invitation.client_secret in str(msgspec.to_builtins(invitation))


def test_closing_a_client_ends_its_waits(server: BoardServer) -> None:
    client = BoardClient(server.invitation, later())
    with ThreadPoolExecutor(2) as pool:
        waits = [pool.submit(client.get, "never", later()) for _ in range(2)]
        time.sleep(0.1)
        client.close()
        for wait in waits:
            with pytest.raises(PeerError, match="was closed"):
                wait.result(20)
    with pytest.raises(PeerError, match="was closed"):
        client.peek("k")
    client.close()


def test_closing_the_board_ends_all_waits() -> None:
    server = BoardServer()
    with BoardClient(server.invitation, later()) as client, ThreadPoolExecutor(1) as pool:
        wait = pool.submit(client.get, "never", later())
        time.sleep(0.1)
        server.close()
        with pytest.raises(PeerError, match="the trainer has closed the control board"):
            wait.result(20)
    server.close()


def test_a_cut_connection_is_repaired_without_a_trace(server: BoardServer) -> None:
    with Proxy(server.invitation.address) as proxy:
        through = msgspec.structs.replace(server.invitation, address=proxy.address)
        with BoardClient(through, later()) as client, ThreadPoolExecutor(4) as pool:
            client.delete_prefix("")
            wait = pool.submit(client.get, "late", later())
            adding = [pool.submit(_add_many, client, 60) for _ in range(3)]
            for _ in range(5):
                time.sleep(0.05)
                proxy.cut()
            for each in adding:
                each.result(30)
            assert client.add("n", 0) == 180
            client.put("late", b"1")
            assert wait.result(20) == b"1"
        assert proxy.cuts > 0


def _add_many(client: BoardClient, times: int) -> None:
    for _ in range(times):
        client.add("n", 1, later())


def test_a_connection_that_stays_lost_ends_the_waits(server: BoardServer) -> None:
    with Proxy(server.invitation.address) as proxy:
        through = msgspec.structs.replace(server.invitation, address=proxy.address)
        with (
            BoardClient(through, later(), lost_seconds=0.3) as client,
            ThreadPoolExecutor(1) as pool,
        ):
            wait = pool.submit(client.get, "never", later())
            time.sleep(0.1)
            proxy.close()
            with pytest.raises(DeadlineExceeded, match=r"has been unreachable for 0\.3 s"):
                wait.result(20)


def test_no_thread_or_descriptor_stays(server: BoardServer) -> None:
    def use() -> None:
        with BoardServer() as own, BoardClient(own.invitation, later()) as client:
            client.put("k", b"1")

    use()
    before = (threading.active_count(), _open_files())
    for _ in range(5):
        use()
    assert (threading.active_count(), _open_files()) == before


def _open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_an_invitation_survives_json(server: BoardServer) -> None:
    """It travels through the engine's HTTP route."""
    raw = msgspec.json.encode(server.invitation)
    with BoardClient(msgspec.json.decode(raw, type=Invitation), later()) as client:
        client.put("k", b"1")
