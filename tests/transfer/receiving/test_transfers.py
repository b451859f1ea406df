"""Deltas from pool to pool: real gRPC, real threads, real memcpy."""

import asyncio

import numpy as np
import pytest

from services.kv.page_digest import digest_of
from services.transfer.local import LocalTransport
from services.transfer.sending.sender import KvSender
from services.transfer.sending.sending_transfer import Outcome
from services.values.errors import ConfigError, PeerFailed
from services.values.kv import PoolMemory
from services.values.rank import TransferId
from transfer.receiving.link_pair import DECODE, LAYOUT, NUM_PAGES, PAGE, PAGE_BYTES, until


async def check_delta(pair, prefill, link, transfer_id, prefix_len, targets, ticket_first):
    expected, before = pair.pool.snapshot(), prefill.sender.bytes_moved_total
    descriptors = prefill.sender.descriptors_total
    sources = (5, 6, 30)
    expected[list(targets)] = prefill.pool.pages[list(sources[prefix_len // PAGE :])]

    if ticket_first:
        watch = pair.send_ticket(link, targets, prefix_len=prefix_len, transfer_id=transfer_id)
        await until(lambda: prefill.sender.open_transfers == 1)
        ended = prefill.request(transfer_id, 10, sources)
    else:
        ended = prefill.request(transfer_id, 10, sources)
        watch = pair.send_ticket(link, targets, prefix_len=prefix_len, transfer_id=transfer_id)

    landed = await watch.outcome()
    assert landed.bytes_moved == len(targets) * PAGE_BYTES == (await ended).bytes_moved
    assert landed.descriptors == (await ended).descriptors == prefill.sender.descriptors_total - descriptors
    assert prefill.sender.bytes_moved_total - before == landed.bytes_moved
    assert prefill.sender.writes_in_flight == 0
    assert (pair.pool.pages == expected).all()
    await watch.writer_stopped(fence_s=60.0)


async def test_the_delta_lands_and_nothing_else_changes(subtests, pair, prefill, link):
    cases = [(0, (9, 3, 4), True), (8, (20,), True), (0, (11, 7, 8), False), (8, (21,), False)]
    for transfer_id, case in enumerate(cases, start=77):
        with subtests.test(case=case):
            await check_delta(pair, prefill, link, TransferId(transfer_id), *case)


async def test_transfers_on_one_stream(subtests, pair, prefill, link):
    for want_digests in [True, False]:
        with subtests.test("digests come with the last word to who wants them", want_digests=want_digests):
            watch = pair.send_ticket(link, (9, 3), prefix_len=4, want_digests=want_digests)
            prefill.request(watch.transfer_id, 10, (5, 6, 30))
            digests = (await watch.outcome()).page_digests
            assert digests == tuple(
                digest_of(memoryview(pair.pool.pages[page])) for page in (9, 3) if want_digests
            )

    with subtests.test("a full hit lands before anything is computed"):
        watch = pair.send_ticket(link, [], prompt_len=8, prefix_len=8)
        ends = []
        prefill.sender.open_transfer(watch.transfer_id, 8, DECODE, ends.append)
        assert (await watch.outcome()).bytes_moved == 0
        await until(lambda: ends)  # the sender's thread tells decode first
        assert [end.outcome for end in ends] == [Outcome.LANDED]

    with subtests.test("one stream serves many requests"):
        again, other = await asyncio.gather(pair.links.link(link.address), pair.links.link(link.address))
        assert again is other is link
        watches = [pair.send_ticket(link, (i,), prompt_len=3) for i in range(20)]
        for watch in watches:
            prefill.request(watch.transfer_id, 3, [1])
        assert len(await asyncio.gather(*(watch.outcome() for watch in watches))) == 20


async def test_transfers_that_fail(subtests, pair, prefill, link):
    with subtests.test("a refused ticket has no writer"):
        watch = pair.send_ticket(link, (1, 2), prompt_len=10)
        with pytest.raises(PeerFailed, match="refused: the delta covers 3 pages"):
            await watch.outcome()
        await watch.writer_stopped(60.0)

    with subtests.test("a ticket that cannot be read is refused"):
        watch = pair.send_ticket(link, (1, 2, 3), lease_s=float("inf"))
        with pytest.raises(PeerFailed, match="must be finite"):
            await watch.outcome()

    with subtests.test("a lease that is over fails the transfer"):
        before = pair.pool.snapshot()
        watch = pair.send_ticket(link, (1, 2, 3), lease_s=-1.0)
        ended = prefill.request(watch.transfer_id, 10, (1, 2, 3))
        with pytest.raises(PeerFailed, match="failed"):
            await watch.outcome()
        assert (await ended).outcome is Outcome.FAILED
        assert (pair.pool.pages == before).all()


async def test_a_renewal_lets_the_writer_go_on(pair, prefill, link):
    watch = pair.send_ticket(link, (1, 2, 3), lease_s=5.0)
    watch.renew(link.write_until_s(50.0))
    pair.send_ticket(link, (4,), prompt_len=3)  # a word after the renewal, on the same stream
    await until(lambda: prefill.sender.open_transfers == 2)
    prefill.skipped_s = 40.0
    prefill.request(watch.transfer_id, 10, (1, 2, 3))
    await watch.outcome()


async def test_a_stopped_sender_ends_every_transfer_and_takes_no_more(pair, prefill, link):
    watch = pair.send_ticket(link, (1, 2, 3))
    await until(lambda: prefill.sender.open_transfers == 1)
    ended = asyncio.get_running_loop().create_future()
    loop = asyncio.get_running_loop()
    prefill.sender.open_transfer(
        watch.transfer_id, 10, DECODE, lambda end: loop.call_soon_threadsafe(ended.set_result, end)
    )
    await asyncio.to_thread(prefill.sender.stop)
    assert (await ended).error == "the rank is stopping"
    with pytest.raises(PeerFailed, match="the rank is stopping"):
        await watch.outcome()
    late = []
    prefill.sender.open_transfer(TransferId(99), 10, DECODE, late.append)
    assert [end.outcome for end in late] == [Outcome.FAILED]


def test_a_pool_that_cannot_be_registered_stops_the_start(caplog):
    vram = PoolMemory(0, 4, kind="VRAM")
    sender = KvSender(LocalTransport, (vram,), LAYOUT, DECODE, read_pages=lambda pages, group: iter(()))
    with pytest.raises(ConfigError, match="VRAM"):
        sender.start()
    assert sender.stop() and "sender_hangs" not in caplog.text


async def test_random_transfers_equal_a_dumb_copy(pair, prefill, link):
    """Many transfers at once, chunks before and after the tickets, through the real path."""
    rng = np.random.default_rng(3)
    expected, free = pair.pool.snapshot(), list(rng.permutation(NUM_PAGES))
    watches = []
    for transfer_id in range(100, 108):
        num_pages, held = int(rng.integers(1, 4)), 0
        prompt_len = num_pages * PAGE - int(rng.integers(0, PAGE))
        held = int(rng.integers(0, prompt_len // PAGE + 1))
        sources = [int(page) for page in rng.permutation(NUM_PAGES)[:num_pages]]
        targets = [int(free.pop()) for _ in range(num_pages - held)]
        for source, target in zip(sources[held:], targets, strict=True):
            expected[target] = prefill.pool.pages[source]
        late = bool(rng.integers(0, 2))
        if not late:
            prefill.request(TransferId(transfer_id), prompt_len, sources)
        watches.append(
            pair.send_ticket(
                link,
                targets,
                prompt_len=prompt_len,
                prefix_len=held * PAGE,
                transfer_id=TransferId(transfer_id),
            )
        )
        if late:
            prefill.request(TransferId(transfer_id), prompt_len, sources)
    await asyncio.gather(*(watch.outcome() for watch in watches))
    assert (pair.pool.pages == expected).all()
