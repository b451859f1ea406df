"""Digests of what crosses between two engines, and what becomes of a page that came changed."""

import logging
from dataclasses import replace

import pytest

from engine.pair import FAKE, Pair
from services.engine import choose
from services.engine.fake import continuation
from services.engine.paged.shell import decode_engine as decode
from services.transfer.sending.sending_transfer import SendingTransfer
from services.values.errors import KvCorrupt, PeerFailed
from services.values.rank import Plan
from services.wire import convert
from transfer.spoiling_transport import SpoilingTransport

PROMPT = list(range(40, 63))  # 6 pages
PAGES = 6


@pytest.fixture
def spoiling(monkeypatch):
    monkeypatch.setattr(SpoilingTransport, "spoils", 0)
    monkeypatch.setattr(choose, "open_transport", lambda name, nixl: SpoilingTransport())
    return SpoilingTransport


async def test_every_page_that_moves_is_compared():
    """The mutation of a wrong page must be noticed here by the comparison alone: no token is looked at."""
    async with Pair() as pair:
        assert (await pair.generate(PROMPT)).admitted.digested_pages == PAGES
        assert (await pair.generate([*PROMPT, 9, 9, 9])).admitted.digested_pages == 2
        full_hit = await pair.generate(PROMPT[:20])
        assert full_hit.admitted.kv_bytes_moved == full_hit.admitted.digested_pages == 0
        assert (await pair.generate([7] * 9, plan=Plan.LOCAL)).admitted.digested_pages == 0
        await pair.assert_nothing_held()


async def test_which_pages_are_digested(subtests):
    with subtests.test("the share is kept"), pytest.MonkeyPatch.context() as monkeypatch:
        transfers = iter([0, 2**62 - 1, 2**62, 2**63, 2**64 - 1])
        async with Pair(replace(FAKE, kv_digest_share=0.25, decode_cache="off", prefill_cache="off")) as pair:
            monkeypatch.setattr(decode.secrets, "randbits", lambda bits: next(transfers))
            pages = [(await pair.generate(PROMPT)).admitted.digested_pages for _ in range(5)]
        assert pages == [PAGES, PAGES, 0, 0, 0]

    with (
        subtests.test("a writer that knows no digests is believed"),
        pytest.MonkeyPatch.context() as monkeypatch,
    ):
        read = convert.ticket_from_proto
        monkeypatch.setattr(convert, "ticket_from_proto", lambda pb: replace(read(pb), want_digests=False))
        async with Pair() as pair:
            answer = await pair.generate(PROMPT)
            assert (answer.tokens, answer.admitted.digested_pages) == (continuation(PROMPT, 8), 0)


@pytest.mark.nixl
async def test_over_nixl():
    async with Pair(replace(FAKE, transport="nixl")) as pair:
        answer = await pair.generate(PROMPT)
        assert answer.tokens == continuation(PROMPT, 8)
        assert answer.admitted.digested_pages == PAGES
        await pair.assert_nothing_held()


async def test_a_page_that_comes_changed(subtests, spoiling, caplog):
    with subtests.test("a page that comes changed fails the transfer and is told once"):
        async with Pair() as pair:
            spoiling.spoils = 1
            with caplog.at_level(logging.ERROR), pytest.raises(KvCorrupt, match="1 of 6 pages"):
                await pair.generate(PROMPT)
            (told,) = [r.getMessage() for r in caplog.records if "kv_digest_mismatch" in r.getMessage()]
            assert "request_id=r1 writer=prefill/0" in told and "page=" in told
            await pair.assert_nothing_held()
            # Nothing of it is in the tree: all of it moves again, and is right.
            again = await pair.generate(PROMPT)
            assert again.admitted.decode_prefix_len == 0
            assert again.tokens == continuation(PROMPT, 8)
            await pair.assert_nothing_held()

    with subtests.test("unchecked a changed page changes the answer"):
        # So that what the others prove is not for nothing.
        async with Pair(replace(FAKE, kv_digest_share=0.0)) as pair:
            spoiling.spoils = 1
            answer = await pair.generate(PROMPT)
            assert answer.admitted.digested_pages == 0
            assert answer.tokens[1:] != continuation(PROMPT, 8)[1:]
            await pair.assert_nothing_held()


async def test_digests_of_other_pages_than_the_deltas_are_a_failed_peer(monkeypatch):
    say = SendingTransfer.send_status

    def say_one_less(transfer_id, state):
        if transfer_id.digests is not None:
            del transfer_id.digests.values[-1:]
        say(transfer_id, state)

    async with Pair() as pair:
        with monkeypatch.context() as patch:
            patch.setattr(SendingTransfer, "send_status", say_one_less)
            with pytest.raises(PeerFailed, match="5 digests of 6 pages"):
                await pair.generate(PROMPT)
        await pair.assert_nothing_held()
        assert (await pair.generate(PROMPT)).tokens == continuation(PROMPT, 8)
