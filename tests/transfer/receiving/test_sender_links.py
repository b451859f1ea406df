"""Links of a decode rank to its writers: who is linked with whom, once, and what they say first."""

import asyncio
from dataclasses import replace

import grpc
import pytest

from services.net import channels
from services.transfer.hello import Hello
from services.transfer.receiving import sender_links as links_module
from services.values.errors import PeerFailed, StaleGeneration, Unavailable
from services.values.kv import PoolMemory, PullGrant, PullRequest
from services.values.rank import Generation, RankAddress, TransferId
from services.wire.isthmus.v1 import handshake_pb2, handshake_pb2_grpc
from transfer.receiving.link_pair import DECODE, LAYOUT, until


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
    prefill.request(watch.transfer_id, 10, (1, 2, 3))
    await watch.outcome()  # the old stream serves its transfers to their end
    await until(lambda: not link.alive)


async def test_a_stream_on_which_something_was_granted_stays_for_its_ticket(pair, prefill):
    def lend(link_id, puller, request):
        prefill.request(request.transfer_id, 12, (1, 2, 3))
        prefill.sender.grant(link_id, PullGrant(request.transfer_id, 12))

    link = await pair.links.link(await prefill.listen(lend=lend))
    until_s = link.write_until_s(10.0)
    grants = [await link.ask(PullRequest(TransferId(n), 7, "", (1,) * 12, 0, 1, until_s)) for n in (50, 51)]
    link.close_when_idle()  # Its stamp is old: another one takes its place.
    watch = pair.send_ticket(link, (4, 5, 6), prompt_len=12, transfer_id=grants[0].transfer_id)
    await watch.outcome()
    assert link.alive
    link.end_grant(grants[1].transfer_id)
    await until(lambda: not link.alive)


async def test_a_pull_that_cannot_be_read_ends_no_other_transfer(pair, prefill, link, monkeypatch):
    watch = pair.send_ticket(link, (1, 2, 3))
    unreadable = handshake_pb2.PullRequest(room=50, token_ids=b"123")
    monkeypatch.setattr(links_module.convert, "pull_request_to_proto", lambda request: unreadable)
    with pytest.raises(links_module.PullRefused, match="grants nothing: failed"):
        await link.ask(PullRequest(TransferId(50), 7, "", (), 0, 1, 0.0))
    prefill.request(watch.transfer_id, 10, (1, 2, 3))
    await watch.outcome()
    assert link.alive


async def test_who_cannot_be_linked_with_gets_a_sentence(subtests, pair, prefill):
    with subtests.test("ranks that do not fit get a sentence"):
        address = await prefill.listen()
        for changes, reason in (
            ({"layout": replace(LAYOUT, page_size=8)}, "page_size"),
            ({"transport": "nixl"}, "transports differ"),
        ):
            links = pair.make_links(**changes)
            with pytest.raises(PeerFailed, match=reason):
                await links.link(address)
            await links.close()
        stale = replace(address, id=replace(address.id, generation=Generation(6)))
        with pytest.raises(StaleGeneration):
            await pair.links.link(stale)

    with subtests.test("nobody at the endpoint is a peer failure"), pytest.raises(PeerFailed):
        await pair.links.link(RankAddress(prefill.id, "127.0.0.1:1"))


async def test_the_server_too_wants_a_hello_that_fits_first(subtests, prefill):
    for message in [
        handshake_pb2.HandshakeMessage(abort=handshake_pb2.Abort(room=1)),
        handshake_pb2.HandshakeMessage(),
        handshake_pb2.HandshakeMessage(hello=handshake_pb2.Hello(version=2)),
        Hello(DECODE, replace(LAYOUT, page_size=8), PoolMemory(0, 1), "local", b"").message(0.0),
    ]:
        with subtests.test(message=message):
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
    ended = prefill.request(watch.transfer_id, 12, (1, 2, 3))  # not the ticket's prompt: it fails
    await ended
    waiting = pair.send_ticket(link, (4, 5, 6))
    await pair.links.close()
    with pytest.raises(PeerFailed):
        await waiting.outcome()
    with pytest.raises(Unavailable):
        await pair.links.link(link.address)


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
