"""The desk over its socket: authenticated, once however often it is sent, leased."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import msgspec
import pytest
import zmq
import zmq.asyncio
from tests.unit.board.proxy import Proxy
from tests.unit.rollouts.simulated import Prompts
from tests.unit.rollouts.values import group

from reshard.board import Invitation
from reshard.errors import DeadlineExceeded, PeerError, ReshardError, WireError
from reshard.ids import PolicyVersion
from reshard.wire import encode
from reshard_trainer.rollouts.buffer import Verdict
from reshard_trainer.rollouts.desk import DeskSettings, RolloutDesk
from reshard_trainer.rollouts.desk_client import RemoteDesk
from reshard_trainer.rollouts.desk_server import DeskServer
from reshard_trainer.rollouts.desk_service import DeskService
from reshard_trainer.rollouts.errors import RolloutError
from reshard_trainer.rollouts.gate import Ticket
from reshard_trainer.rollouts.meter import Meter
from reshard_trainer.rollouts.rollout import EngineName, Serial
from reshard_trainer.rollouts.staleness import StalenessBound

V = PolicyVersion
E = EngineName("far")


class Bench:
    """A desk, its server, and the way there."""

    def __init__(self, server: DeskServer, service: DeskService, invitation: Invitation) -> None:
        self.server = server
        self.service = service
        self.desk = service.desk
        self.invitation = invitation

    @asynccontextmanager
    async def producer(self, *, lost_seconds: float = 20.0) -> AsyncIterator[RemoteDesk]:
        remote = RemoteDesk(self.invitation, lost_seconds=lost_seconds)
        try:
            yield remote
        finally:
            await remote.close()


def with_desk(
    use: Callable[[Bench], Awaitable[None]],
    *,
    lease_seconds: float = 30.0,
    batch: int = 4,
) -> None:
    async def whole() -> None:
        desk = RolloutDesk(DeskSettings(StalenessBound(batch, 1)), Prompts())
        service = DeskService(desk, Meter())
        server = DeskServer(service, lease_seconds=lease_seconds)
        try:
            await use(Bench(server, service, server.invitation))
        finally:
            await server.close()

    asyncio.run(asyncio.wait_for(whole(), 60))


def test_a_prompt_goes_out_and_its_group_comes_back() -> None:
    async def use(bench: Bench) -> None:
        async with bench.producer() as remote:
            given = await remote.assign(E, V(0), 5.0)
            assert given is not None
            assert given.prompt == Prompts().prompt(Serial(0))
            assert await remote.deliver(group(0, 0)) is Verdict.ACCEPTED
            assert await remote.deliver(group(0, 0)) is Verdict.DUPLICATE
            assert bench.desk.counters.accepted == 1
            other = await remote.assign(E, V(0), 5.0)
            assert other is not None
            await remote.give_up(other.ticket, "no", 0)
            assert bench.desk.running == 0

    with_desk(use)


def test_nothing_is_assigned_beyond_the_gate() -> None:
    async def use(bench: Bench) -> None:
        async with bench.producer() as remote:
            given = [await remote.assign(E, V(0), 5.0) for _ in range(8)]
            assert len({each.ticket for each in given if each}) == 8
            assert await remote.assign(E, V(0), 0.05) is None

    with_desk(use)


def test_waits_end_when_something_happens() -> None:
    async def use(bench: Bench) -> None:
        async with bench.producer() as remote:
            assert (await remote.news(None, frozenset(), 30.0)).published == 0
            waiting = asyncio.create_task(remote.news(V(0), frozenset(), 30.0))
            await asyncio.sleep(0.05)
            bench.service.publish(V(1))
            assert (await waiting).published == 1
            given = await remote.assign(E, V(1), 5.0)
            assert given is not None
            ticket = given.ticket
            waiting = asyncio.create_task(remote.news(V(1), frozenset([ticket]), 30.0))
            await asyncio.sleep(0.05)
            await bench.service.give_up(ticket, "test", 0)
            assert (await waiting).ended == {ticket}

    with_desk(use)


def test_refusals_reach_the_producer_in_words() -> None:
    async def use(bench: Bench) -> None:
        async with bench.producer() as remote:
            with pytest.raises(RolloutError, match="refused: engine far says that it serves ver"):
                await remote.assign(E, V(7), 5.0)

    with_desk(use)


@pytest.mark.parametrize("pause", [0.0, 0.5])
def test_who_does_not_hold_the_invitation_is_not_heard(pause: float) -> None:
    """libzmq gives it up for good: once it has, a send that waits never returns."""

    async def use(bench: Bench) -> None:
        public, secret = zmq.curve_keypair()
        forged = msgspec.structs.replace(
            bench.invitation, client_key=public.decode(), client_secret=secret.decode()
        )
        bench.invitation = forged
        async with bench.producer(lost_seconds=1.0) as remote:
            await asyncio.sleep(pause)
            with pytest.raises(DeadlineExceeded, match=r"silent for 1 s; is the trainer gone, or"):
                await remote.assign(E, V(0), 30.0)
        assert bench.desk.counters.assigned == 0

    with_desk(use)


def test_an_invitation_without_keys_is_refused() -> None:
    async def use(bench: Bench) -> None:
        for wrong in (
            msgspec.structs.replace(bench.invitation, server_key="no"),
            msgspec.structs.replace(bench.invitation, address="nowhere"),
        ):
            with pytest.raises(WireError, match="no desk can be reached at"):
                RemoteDesk(wrong)

    with_desk(use)


def test_a_cut_connection_costs_nothing_and_counts_nothing_twice() -> None:
    async def use(bench: Bench) -> None:
        with Proxy(bench.invitation.address) as proxy:
            bench.invitation = msgspec.structs.replace(bench.invitation, address=proxy.address)
            async with bench.producer() as remote:
                for serial in range(8):
                    given = await remote.assign(E, V(0), 20.0)
                    assert given is not None
                    delivering = asyncio.create_task(remote.deliver(group(serial, 0)))
                    if serial % 3 == 0:
                        await asyncio.sleep(0.002 * serial)
                        proxy.cut()
                    assert await delivering in (Verdict.ACCEPTED, Verdict.DUPLICATE)
            assert proxy.cuts > 0
        assert bench.desk.counters.accepted == 8
        assert bench.desk.buffered == 8

    with_desk(use)


def test_a_silent_producer_loses_its_lease_and_its_prompts_are_asked_again() -> None:
    async def use(bench: Bench) -> None:
        with Proxy(bench.invitation.address) as proxy:
            lost = RemoteDesk(msgspec.structs.replace(bench.invitation, address=proxy.address))
            given = await lost.assign(E, V(0), 5.0)
            assert given is not None
        # The way there is closed for good.
        async with bench.producer() as remote:
            for _ in range(200):
                if not bench.desk.running:
                    break
                await asyncio.sleep(0.05)
            again = await remote.assign(E, V(0), 5.0)
            assert again is not None
            assert again.ticket == Ticket(given.serial, given.attempt + 1)
            assert await remote.deliver(group(given.serial, 0)) is Verdict.LATE
            arrived = await remote.deliver(group(given.serial, 0, attempt=1))
            assert arrived is Verdict.ACCEPTED
        await lost.close()

    with_desk(use, lease_seconds=0.4)


def test_a_producer_that_leaves_gives_back_what_it_has() -> None:
    async def use(bench: Bench) -> None:
        async with bench.producer() as remote:
            assert await remote.assign(E, V(0), 5.0) is not None
        for _ in range(100):
            if not bench.desk.running:
                return
            await asyncio.sleep(0.02)
        raise AssertionError("the prompt was not given back")

    with_desk(use)


def test_what_is_assigned_to_a_call_that_was_given_up_is_given_back() -> None:
    async def use(bench: Bench) -> None:
        async with bench.producer() as remote:
            held = [await remote.assign(E, V(0), 5.0) for _ in range(8)]
            asking = asyncio.create_task(remote.assign(E, V(0), 30.0))
            await asyncio.sleep(0.05)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            assert held[0] is not None
            await remote.give_up(held[0].ticket, "test", 0)
            for _ in range(100):
                await asyncio.sleep(0.02)
                if bench.desk.counters.given_up == 2:
                    return
        raise AssertionError("the prompt was lost")

    with_desk(use)


def test_closing_the_desk_ends_every_call() -> None:
    async def whole() -> None:
        service = DeskService(RolloutDesk(DeskSettings(StalenessBound(1, 0)), Prompts()), Meter())
        server = DeskServer(service)
        remote = RemoteDesk(server.invitation)
        assert await remote.assign(E, V(0), 5.0) is not None
        waiting = asyncio.create_task(remote.assign(E, V(0), 30.0))
        await asyncio.sleep(0.1)
        await server.close()
        with pytest.raises(PeerError, match="the trainer has closed the desk"):
            await waiting
        assert service.desk.running == 0
        with pytest.raises(PeerError, match="the trainer has closed the desk"):
            await remote.news(None, frozenset(), 1.0)
        await remote.close()

    asyncio.run(asyncio.wait_for(whole(), 30))


@pytest.mark.parametrize(
    "frames",
    [
        [b"", b"x", b"y"],
        [b"\xc1\xc1"],
        [encode({"number": 1, "settled": 0, "operation": {"type": "assign", "engine": 3}})],
        [encode({"number": 1, "settled": 0, "operation": {"type": "reboot"}})],
        [
            encode(
                {
                    "number": 1,
                    "settled": 0,
                    "operation": {
                        "type": "deliver",
                        "group": {"serial": 0, "attempt": 0, "rollouts": []},
                    },
                }
            )
        ],
    ],
)
def test_malformed_messages_are_dropped_and_the_desk_goes_on(frames: list[bytes]) -> None:
    async def use(bench: Bench) -> None:
        context = zmq.asyncio.Context()
        raw = context.socket(zmq.DEALER)
        raw.linger = 0
        raw.sndtimeo = 20_000
        raw.curve_serverkey = bench.invitation.server_key.encode()
        raw.curve_publickey = bench.invitation.client_key.encode()
        raw.curve_secretkey = bench.invitation.client_secret.encode()
        raw.connect(bench.invitation.address)
        await raw.send_multipart(frames)
        async with bench.producer() as remote:
            assert await remote.assign(E, V(0), 5.0) is not None
        raw.close()
        context.term()

    with_desk(use)


def test_the_address_must_be_one_of_this_machine() -> None:
    async def make(host: str) -> None:
        service = DeskService(RolloutDesk(DeskSettings(StalenessBound(1, 0)), Prompts()), Meter())
        DeskServer(service, host)

    with pytest.raises(ReshardError, match="stands for every interface"):
        asyncio.run(make("0.0.0.0"))
    with pytest.raises(ReshardError, match=r"the desk cannot listen on '192\.0\.2\.1'"):
        asyncio.run(make("192.0.2.1"))


def test_the_desk_listens_on_ipv6() -> None:
    async def whole() -> None:
        service = DeskService(RolloutDesk(DeskSettings(StalenessBound(1, 0)), Prompts()), Meter())
        server = DeskServer(service, "[::1]")
        remote = RemoteDesk(server.invitation)
        assert await remote.assign(E, V(0), 5.0) is not None
        await remote.close()
        await server.close()

    asyncio.run(asyncio.wait_for(whole(), 30))
