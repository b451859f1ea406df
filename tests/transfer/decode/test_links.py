"""Decode's links, the handshake server and the sender together: real gRPC, real threads, real memcpy."""

import asyncio
from dataclasses import replace

import grpc
import numpy as np
import pytest

from services.kv.handshake import ReservationState
from services.kv.page_digest import digest_of
from services.kv.transfer_plan import runs_of
from services.net import channels
from services.transfer.decode import links as links_module
from services.transfer.decode import room_watch
from services.transfer.decode.room_watch import RoomWatch
from services.transfer.hello import Hello
from services.transfer.local import LocalTransport
from services.transfer.prefill.room import Outcome
from services.transfer.prefill.sender import KvSender
from services.values.errors import ConfigError, PeerFailed, StaleGeneration, Unavailable
from services.values.kv import KvTicket, PageId, PoolMemory
from services.values.rank import Generation, RankAddress, RankId, Room
from services.wire.isthmus.v1 import handshake_pb2, handshake_pb2_grpc
from transfer.decode.link_pair import DECODE, LAYOUT, NUM_PAGES, PAGE, PAGE_BYTES, FakeLink, Pair


@pytest.fixture
async def pair(make_pool):
    pair = Pair(make_pool)
    yield pair
    await pair.close()


@pytest.fixture
async def prefill(pair):
    return pair.prefill()


@pytest.fixture
async def link(pair, prefill):
    return await pair.links.link(await prefill.listen())


@pytest.mark.parametrize(("prefix_len", "targets"), [(0, (9, 3, 4)), (8, (20,))])
@pytest.mark.parametrize("ticket_first", [True, False])
async def test_the_delta_lands_and_nothing_else_changes(
    pair, prefill, link, prefix_len, targets, ticket_first
):
    expected = pair.pool.snapshot()
    sources = (5, 6, 30)
    expected[list(targets)] = prefill.pool.pages[list(sources[prefix_len // PAGE :])]

    if ticket_first:
        watch = pair.send_ticket(link, targets, prefix_len=prefix_len)
        await until(lambda: prefill.sender.open_rooms == 1)
        ended = prefill.request(watch.room, 10, sources)
    else:
        ended = prefill.request(Room(77), 10, sources)
        watch = pair.send_ticket(link, targets, prefix_len=prefix_len, room=Room(77))

    landed = await watch.outcome()
    assert landed.bytes_moved == len(targets) * PAGE_BYTES == (await ended).bytes_moved
    assert landed.descriptors == (await ended).descriptors == prefill.sender.descriptors_total
    assert prefill.sender.bytes_moved_total == landed.bytes_moved
    assert prefill.sender.writes_in_flight == 0
    assert (pair.pool.pages == expected).all()
    await watch.writer_stopped(fence_s=60.0)


@pytest.mark.parametrize("want_digests", [True, False])
async def test_digests_come_with_the_last_word_to_who_wants_them(pair, prefill, link, want_digests):
    watch = pair.send_ticket(link, (9, 3), prefix_len=4, want_digests=want_digests)
    prefill.request(watch.room, 10, (5, 6, 30))
    digests = (await watch.outcome()).page_digests
    assert digests == tuple(digest_of(memoryview(pair.pool.pages[page])) for page in (9, 3) if want_digests)


async def test_a_full_hit_lands_before_anything_is_computed(pair, prefill, link):
    watch = pair.send_ticket(link, [], prompt_len=8, prefix_len=8)
    ends = []
    prefill.sender.open_room(watch.room, 8, DECODE, ends.append)
    assert (await watch.outcome()).bytes_moved == 0
    assert [end.outcome for end in ends] == [Outcome.LANDED]


async def test_one_stream_serves_many_requests(pair, prefill, link):
    again, other = await asyncio.gather(pair.links.link(link.address), pair.links.link(link.address))
    assert again is other is link
    watches = [pair.send_ticket(link, (i,), prompt_len=3) for i in range(20)]
    for watch in watches:
        prefill.request(watch.room, 3, [1])
    assert len(await asyncio.gather(*(watch.outcome() for watch in watches))) == 20


async def test_an_abort_is_acknowledged_after_the_last_write(pair, prefill, link):
    prefill.transport.gate.clear()
    watch = pair.send_ticket(link, (1, 2, 3))
    ended = prefill.request(watch.room, 10, (1, 2, 3))
    await until(lambda: prefill.sender.writes_in_flight == 1)
    watch.abort()
    pair.send_ticket(link, (4,), prompt_len=3)  # a word after the abort, on the same stream
    await until(lambda: prefill.sender.open_rooms == 2)
    assert not ended.done()

    stopped = asyncio.create_task(watch.writer_stopped(60.0))
    prefill.transport.gate.set()

    await stopped
    assert (await ended).outcome is Outcome.ABORTED
    with pytest.raises(PeerFailed, match="aborted"):
        await watch.outcome()


async def test_a_refused_ticket_has_no_writer(pair, prefill, link):
    watch = pair.send_ticket(link, (1, 2), prompt_len=10)
    with pytest.raises(PeerFailed, match="refused: the delta covers 3 pages"):
        await watch.outcome()
    await watch.writer_stopped(60.0)


async def test_a_ticket_that_cannot_be_read_is_refused(pair, prefill, link):
    watch = pair.send_ticket(link, (1, 2, 3), lease_s=float("inf"))
    with pytest.raises(PeerFailed, match="must be finite"):
        await watch.outcome()


async def test_a_lease_that_is_over_fails_the_transfer(pair, prefill, link):
    before = pair.pool.snapshot()
    watch = pair.send_ticket(link, (1, 2, 3), lease_s=-1.0)
    ended = prefill.request(watch.room, 10, (1, 2, 3))
    with pytest.raises(PeerFailed, match="failed"):
        await watch.outcome()
    assert (await ended).outcome is Outcome.FAILED
    assert (pair.pool.pages == before).all()


async def test_a_renewal_lets_the_writer_go_on(pair, prefill, link):
    watch = pair.send_ticket(link, (1, 2, 3), lease_s=5.0)
    first_end_s = watch._lease_end_s
    watch.renew(link.write_until_s(50.0))
    assert watch._lease_end_s > first_end_s + 40
    watch.renew(link.write_until_s(1.0))
    assert watch._lease_end_s > first_end_s + 40  # what was granted stays granted
    prefill.request(watch.room, 10, (1, 2, 3))
    await watch.outcome()


async def test_the_same_life_is_asked_again_when_the_stream_is_lost(pair, prefill, link):
    prefill.transport.gate.clear()
    watch = pair.send_ticket(link, (1, 2, 3))
    prefill.request(watch.room, 10, (1, 2, 3))
    await until(lambda: prefill.sender.writes_in_flight == 1)
    port = prefill.server.port
    await prefill.stop_listening()
    with pytest.raises(PeerFailed, match="lost"):
        await watch.outcome()
    with pytest.raises(PeerFailed):
        pair.send_ticket(link, (1, 2, 3))
    watch.abort()
    stopped = asyncio.create_task(watch.writer_stopped(60.0))

    await prefill.listen(port)
    await until(lambda: pair.links._links and not pair.links._orphans)
    (await pair.links.link(link.address)).send_ticket(ticket_of(pair, link))
    await until(lambda: prefill.sender.open_rooms == 2)
    assert not stopped.done(), "the write is under way still"
    prefill.transport.gate.set()
    await stopped


async def test_the_next_life_proves_the_last_one_dead(pair, prefill, link):
    watch = pair.send_ticket(link, (1, 2, 3), lease_s=60.0)
    await until(lambda: prefill.sender.open_rooms == 1)
    port = prefill.server.port
    await prefill.stop_listening()
    stopped = asyncio.create_task(watch.writer_stopped(60.0))
    await pair.prefill(generation=9).listen(port)

    await stopped

    with pytest.raises(StaleGeneration):
        await pair.links.link(link.address)
    next_life = replace(link.address, id=replace(prefill.id, generation=Generation(9)))
    assert (await pair.links.link(next_life)).alive


async def test_fence_time_ends_the_wait_for_a_writer_that_says_nothing(pair, prefill, link):
    watch = pair.send_ticket(link, (1, 2, 3), lease_s=60.0)
    await until(lambda: prefill.sender.open_rooms == 1)
    await prefill.stop_listening()
    await until(lambda: not link.alive)
    end_s = watch._lease_end_s = links_module.time.monotonic() + 0.2
    await watch.writer_stopped(fence_s=0.1)
    assert links_module.time.monotonic() >= end_s + 0.1
    assert watch.state is ReservationState.EXPIRED


async def test_fence_time_ends_nothing_while_the_link_stands(pair, prefill, link, monkeypatch, caplog):
    """A writer that is there and does not acknowledge may be writing; it is asked again, and told of once."""
    monkeypatch.setattr(room_watch, "_ASK_AGAIN_S", 0.01)
    prefill.transport.gate.clear()
    asked = []
    monkeypatch.setattr(prefill.sender, "abort", lambda link_id, room: asked.append(room))  # it is deaf
    watch = pair.send_ticket(link, (1, 2, 3), lease_s=60.0)
    ended = prefill.request(watch.room, 10, (1, 2, 3))
    await until(lambda: prefill.sender.writes_in_flight == 1)
    watch._lease_end_s = 0.0  # over long ago, by our clock

    stopped = asyncio.create_task(watch.writer_stopped(fence_s=0.0))
    await until(lambda: len(asked) >= 3)
    assert not stopped.done()
    assert prefill.sender.writes_in_flight == 1
    told = [record.message for record in caplog.records if "kv_abort_unanswered" in record.message]
    assert told == [f"kv_abort_unanswered room={watch.room:016x} writer={prefill.id}"]

    prefill.transport.gate.set()
    await stopped
    assert (await ended).outcome is Outcome.LANDED


async def test_a_link_that_is_lost_late_wakes_who_waits_and_leaves_the_posts_their_time(pair, prefill, link):
    prefill.transport.gate.clear()
    watch = pair.send_ticket(link, (1, 2, 3), lease_s=60.0)
    prefill.request(watch.room, 10, (1, 2, 3))
    await until(lambda: prefill.sender.writes_in_flight == 1)
    watch._lease_end_s, fence_s = 0.0, 0.3
    stopped = asyncio.create_task(watch.writer_stopped(fence_s))
    await asyncio.sleep(0)
    assert not stopped.done()

    began_s = links_module.time.monotonic()
    await prefill.stop_listening()
    async with asyncio.timeout(room_watch._ASK_AGAIN_S + 20):
        await stopped
    assert links_module.time.monotonic() >= began_s + fence_s
    assert watch.state is ReservationState.EXPIRED


@pytest.mark.parametrize("news", ["acknowledged", "lost", "lost again"])
async def test_who_awaits_a_writers_end_hears_at_once_of_a_change(news):
    """The lease has hours to go."""
    link, now_s, sought = FakeLink(), 0.0, []
    writer = RankAddress(RankId("prefill", 0, Generation(7)), "nowhere:1")
    watch = RoomWatch(Room(5), writer, link, 20_000.0, lambda: now_s, sought.append)
    stopped = asyncio.create_task(watch.writer_stopped(fence_s=1.0))
    await asyncio.sleep(0)
    if news == "acknowledged":
        watch.on_last_word("the transfer was aborted")
    else:
        watch.on_lost()
        if news == "lost again":
            await asyncio.sleep(0)
            watch.on_linked(link)
            await asyncio.sleep(0)
            now_s = 30_000.0
            watch.on_lost()
            assert link.asked == [5, 5]
        assert sought and not stopped.done()
        now_s += 20_001.0
    async with asyncio.timeout(10):
        await stopped


@pytest.mark.parametrize("word", ["failed", "acknowledged"])
async def test_pages_wait_for_the_fence_after_a_word_that_leaves_the_end_open(word):
    """Also while the stream stands. The transfer itself has failed at once."""
    link, now_s, sought = FakeLink(), 0.0, []
    writer = RankAddress(RankId("prefill", 0, Generation(7)), "nowhere:1")
    watch = RoomWatch(Room(5), writer, link, 10.0, lambda: now_s, sought.append)
    if word == "acknowledged":
        watch.abort()
    watch.on_unsettled("cut")
    with pytest.raises(PeerFailed, match="cut"):
        await watch.outcome()
    watch.abort()
    assert link.asked == [5] * (word == "acknowledged")  # there is nothing to ask any more
    for now_s in (0.0, 10.0, 14.9, 15.0):
        assert watch.is_over(fence_s=5.0) == (now_s == 15.0)
    await watch.writer_stopped(fence_s=5.0)
    assert sought == []


async def test_a_word_that_comes_after_the_lease_has_the_fence_before_it_still():
    now_s = 100.0
    writer = RankAddress(RankId("prefill", 0, Generation(7)), "nowhere:1")
    watch = RoomWatch(Room(5), writer, FakeLink(), 10.0, lambda: now_s, lambda watch: None)
    watch.on_unsettled("cut")
    for now_s in (104.9, 105.0):
        assert watch.is_over(fence_s=5.0) == (now_s == 105.0)


async def test_a_failed_write_whose_end_is_not_known_keeps_pages_on_both_sides(pair, prefill, link):
    """The stream stands all the time."""
    prefill.transport.fails = True
    watch = pair.send_ticket(link, (1, 2, 3), lease_s=600.0)
    ended = prefill.request(watch.room, 10, (1, 2, 3))
    with pytest.raises(PeerFailed, match="failed: the network"):
        await watch.outcome()
    prefill.transport.fails = False
    other = pair.send_ticket(link, (4, 5, 6))
    prefill.request(other.room, 10, (1, 2, 3))
    await other.outcome()  # the peer is reached anew
    assert link.alive and not watch.is_over(fence_s=60.0) and not ended.done()
    await asyncio.to_thread(prefill.sender.stop)
    assert (await ended).outcome is Outcome.FAILED


async def test_a_lease_is_early_on_the_writers_clock_never_late(pair, prefill, link):
    before_s = prefill.sender.clock()
    until_s = link.write_until_s(10.0)
    assert until_s <= prefill.sender.clock() + 10.0
    assert until_s > before_s + 9.0
    # ... and on our own clock it ends no sooner than the writer may write.
    assert link.lease_end_s(until_s) >= until_s


async def test_links_with_an_old_stamp_are_made_anew(pair, prefill, link, monkeypatch):
    watch = pair.send_ticket(link, (1, 2, 3))
    monkeypatch.setattr(links_module, "_MAX_STAMP_AGE_S", 0.0)
    newer = await pair.links.link(link.address)
    assert newer is not link
    prefill.request(watch.room, 10, (1, 2, 3))
    await watch.outcome()  # the old stream serves its rooms to their end
    await until(lambda: not link.alive)


async def test_ranks_that_do_not_fit_get_a_sentence(pair, prefill):
    address = await prefill.listen()
    for changes, reason in (
        ({"layout": replace(LAYOUT, page_size=8)}, "page_size"),
        ({"transport": "nixl"}, "transports differ"),
    ):
        async with pair.make_links(**changes) as links:
            with pytest.raises(PeerFailed, match=reason):
                await links.link(address)
    stale = replace(address, id=replace(address.id, generation=Generation(6)))
    with pytest.raises(StaleGeneration):
        await pair.links.link(stale)


async def test_nobody_at_the_endpoint_is_a_peer_failure(pair, prefill):
    with pytest.raises(PeerFailed):
        await pair.links.link(RankAddress(prefill.id, "127.0.0.1:1"))


@pytest.mark.parametrize(
    "message",
    [
        handshake_pb2.HandshakeMessage(abort=handshake_pb2.Abort(room=1)),
        handshake_pb2.HandshakeMessage(),
        handshake_pb2.HandshakeMessage(hello=handshake_pb2.Hello(version=2)),
        Hello(DECODE, replace(LAYOUT, page_size=8), PoolMemory(0, 1), "local", b"").message(0.0),
    ],
)
async def test_the_server_too_wants_a_hello_that_fits_first(prefill, message):
    address = await prefill.listen()
    async with grpc.aio.insecure_channel(address.endpoint) as channel:
        call = handshake_pb2_grpc.HandshakeStub(channel).Connect(iter([message]))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION


async def test_decode_sends_no_second_hello(pair, prefill, link):
    link._stream.send(pair.links._own.message(0.0))
    await until(lambda: not link.alive)


async def test_closing_the_links_loses_what_runs(pair, prefill, link):
    watch = pair.send_ticket(link, (1, 2, 3))
    ended = prefill.request(watch.room, 12, (1, 2, 3))  # not the ticket's prompt: it fails
    await ended
    waiting = pair.send_ticket(link, (4, 5, 6))
    await pair.links.close()
    with pytest.raises(PeerFailed):
        await waiting.outcome()
    with pytest.raises(Unavailable):
        await pair.links.link(link.address)


async def test_a_stopped_sender_ends_every_room_and_takes_no_more(pair, prefill, link):
    watch = pair.send_ticket(link, (1, 2, 3))
    await until(lambda: prefill.sender.open_rooms == 1)
    ended = asyncio.get_running_loop().create_future()
    loop = asyncio.get_running_loop()
    prefill.sender.open_room(
        watch.room, 10, DECODE, lambda end: loop.call_soon_threadsafe(ended.set_result, end)
    )
    await asyncio.to_thread(prefill.sender.stop)
    assert (await ended).error == "the rank is stopping"
    with pytest.raises(PeerFailed, match="the rank is stopping"):
        await watch.outcome()
    late = []
    prefill.sender.open_room(Room(99), 10, DECODE, late.append)
    assert [end.outcome for end in late] == [Outcome.FAILED]


def test_a_pool_that_cannot_be_registered_stops_the_start():
    vram = PoolMemory(0, 4, kind="VRAM")
    sender = KvSender(LocalTransport, vram, LAYOUT, DECODE, read_pages=lambda pages: iter(()))
    with pytest.raises(ConfigError, match="VRAM"):
        sender.start()
    sender.stop()


async def test_random_transfers_equal_a_dumb_copy(pair, prefill, link):
    """Many rooms at once, chunks before and after the tickets, through the real path."""
    rng = np.random.default_rng(3)
    expected, free = pair.pool.snapshot(), list(rng.permutation(NUM_PAGES))
    watches = []
    for room in range(100, 108):
        num_pages, held = int(rng.integers(1, 4)), 0
        prompt_len = num_pages * PAGE - int(rng.integers(0, PAGE))
        held = int(rng.integers(0, prompt_len // PAGE + 1))
        sources = [int(page) for page in rng.permutation(NUM_PAGES)[:num_pages]]
        targets = [int(free.pop()) for _ in range(num_pages - held)]
        for source, target in zip(sources[held:], targets, strict=True):
            expected[target] = prefill.pool.pages[source]
        late = bool(rng.integers(0, 2))
        if not late:
            prefill.request(Room(room), prompt_len, sources)
        watches.append(
            pair.send_ticket(link, targets, prompt_len=prompt_len, prefix_len=held * PAGE, room=Room(room))
        )
        if late:
            prefill.request(Room(room), prompt_len, sources)
    await asyncio.gather(*(watch.outcome() for watch in watches))
    assert (pair.pool.pages == expected).all()


def ticket_of(pair, link):
    until_s = link.write_until_s(10.0)
    return KvTicket(next(pair.rooms), link.address.id.generation, 3, 0, runs_of([PageId(9)]), until_s)


async def until(holds, timeout_s=10.0):
    async with asyncio.timeout(timeout_s):
        while not holds():
            await asyncio.sleep(0.005)


async def test_those_behind_a_silent_rank_share_one_attempt(pair, prefill, monkeypatch):
    """They hold pages meanwhile; one after the other they would wait for minutes."""
    monkeypatch.setattr(links_module, "_CONNECT_TIMEOUT_S", 0.2)
    silent = await asyncio.start_server(lambda reader, writer: reader.read(), "127.0.0.1", 0)
    opened = []
    open_channel = channels.open_channel
    pair.links._open_channel = lambda endpoint: opened.append(endpoint) or open_channel(endpoint)
    address = RankAddress(prefill.id, f"127.0.0.1:{silent.sockets[0].getsockname()[1]}")
    leaver = asyncio.create_task(pair.links.link(address))
    others = [asyncio.create_task(pair.links.link(address)) for _ in range(5)]
    await asyncio.sleep(0)
    leaver.cancel()  # the others' attempt goes on without it
    failures = await asyncio.gather(leaver, *others, return_exceptions=True)
    assert isinstance(failures[0], asyncio.CancelledError)
    assert all(isinstance(failure, PeerFailed) for failure in failures[1:])
    assert len(opened) == 1
    with pytest.raises(PeerFailed):
        await pair.links.link(address)  # a new one may try anew
    assert len(opened) == 2
    silent.close()
