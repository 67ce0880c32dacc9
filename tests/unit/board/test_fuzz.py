"""Whatever comes over the wire, the board neither stops nor forgets."""

import socket
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from reshard.board import BoardClient, BoardServer, Deadline
from reshard.board.messages import Put, Request, Wait
from reshard.wire import encode

VALID = [
    encode(Request(1, 0, Put("fuzz/k", b"value"))),
    encode(Request(2, 1, Wait(("fuzz/k",), True, "", 0.0))),
]


@dataclass(frozen=True)
class Bench:
    """A live board, a client of it, and a socket that is admitted but sends what it likes."""

    server: BoardServer
    client: BoardClient
    dealer: "zmq.Socket[bytes]"

    def still_works(self) -> bool:
        self.client.put("alive", b"yes")
        return self.client.get("alive", Deadline.after(20)) == b"yes"


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    with (
        BoardServer() as server,
        BoardClient(server.invitation, Deadline.after(10)) as client,
        zmq.Context() as context,
    ):
        dealer = context.socket(zmq.DEALER)
        dealer.curve_serverkey = server.invitation.server_key.encode()
        dealer.curve_publickey = server.invitation.client_key.encode()
        dealer.curve_secretkey = server.invitation.client_secret.encode()
        dealer.linger = 0
        dealer.sndtimeo = 20_000
        dealer.connect(server.invitation.address)
        yield Bench(server, client, dealer)
        dealer.close()


@st.composite
def mangled(draw: st.DrawFn) -> bytes:
    """A valid request with some bytes changed, cut off, or added."""
    raw = bytearray(draw(st.sampled_from(VALID)))
    for _ in range(draw(st.integers(0, 4))):
        raw[draw(st.integers(0, len(raw) - 1))] = draw(st.integers(0, 255))
    return bytes(raw[: draw(st.integers(0, len(raw)))]) + draw(st.binary(max_size=8))


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(frames=st.lists(st.one_of(st.binary(max_size=64), mangled()), min_size=1, max_size=4))
def test_admitted_nonsense_is_dropped(bench: Bench, frames: list[bytes]) -> None:
    bench.dealer.send_multipart(frames)
    assert bench.still_works()


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(raw=st.binary(max_size=200), greeting=st.booleans())
def test_strangers_on_the_port_are_dropped(bench: Bench, raw: bytes, greeting: bool) -> None:
    host, port = "127.0.0.1", int(bench.server.invitation.address.rpartition(":")[2])
    with socket.create_connection((host, port), timeout=5) as stranger:
        if greeting:
            # A valid ZMTP greeting for CURVE, then nonsense.
            raw = b"\xff" + b"\0" * 8 + b"\x7f\x03\x00CURVE" + b"\0" * 15 + b"\0" * 32 + raw
        stranger.sendall(raw)
    assert bench.still_works()


def test_the_dealer_is_admitted(bench: Bench) -> None:
    """Else the fuzzing would test the handshake alone."""
    bench.dealer.send(encode(Request(10**9, 10**9 - 1, Put("fuzz/admitted", b"1"))))
    assert bench.client.get("fuzz/admitted", Deadline.after(10)) == b"1"
