"""An engine of one role goes on as one of the other, with its model, pages and tree."""

import asyncio
import secrets
import threading
from dataclasses import replace

import pytest

from engine.paged.draft_ranks import draft_with
from engine.pair import FAKE, Pair, core_of
from engine.torch.paired.families import torch_settings
from services.engine.choose import decode_engines, prefill_engines
from services.engine.fake import continuation
from services.transfer.sending.transfers import TransferTable
from services.values.errors import Unavailable
from services.values.rank import Plan, RankId, Role

PROMPT = [(i * 7) % 200 for i in range(72)]
SPECULATING = replace(FAKE, itl_target_ms=50.0, speculation="lookup")
DRAFTING = replace(FAKE, fake_draft="agree:0.8", speculation="draft")
WITHOUT_PULLS = replace(FAKE, pull="off")  # Then a role has one end of transfers alone.


async def turned(pair, engine, role):
    """Return the engine's successor in that role, started, and what `outputs` of the pair call it."""
    own_id = RankId("decode", 0, secrets.randbits(64))
    makers = {Role.DECODE: decode_engines, Role.PREFILL: prefill_engines}
    (successor,) = makers[role](pair.settings, [own_id])
    successor.succeed(engine)
    await engine.stop()
    pair._stack.push_async_callback(successor.stop)
    await successor.start()
    if role is Role.PREFILL:
        pair.prefills.append(successor)
        await pair._serve(own_id, successor)
    else:
        pair.prefills.pop()
        pair.decodes[0] = successor
    return successor


async def goes_on_in_both_roles(settings):
    async with Pair(settings, dp_size=2) as pair:
        engine = pair.decodes[0]
        core, pages = core_of(engine), engine.memories
        before = await pair.generate(PROMPT, plan=Plan.LOCAL)
        engine = await turned(pair, engine, Role.PREFILL)
        assert core_of(engine) is core and engine.memories == pages
        answer = await pair.generate(PROMPT, decode=1, prefill=2)
        assert answer.tokens == before.tokens
        assert answer.admitted.prefill_prefix_len > 0  # It holds as prefill what it held as decode.
        engine = await turned(pair, engine, Role.DECODE)
        again = await pair.generate([*PROMPT, *before.tokens, 3], plan=Plan.LOCAL)
        assert again.admitted.decode_prefix_len > len(PROMPT) / 2
        other = await pair.generate([*PROMPT, *before.tokens, 3], decode=1)
        assert other.tokens == again.tokens
        assert (core._drafting is not None) == (settings.speculation != "off")
        await pair.assert_nothing_held()
        held = {block async for events in now(engine) for block in events.stored}
        assert held  # What its first lives recorded comes out of the last one's queue, too.


async def now(engine):
    """Yield the events that have come."""
    events = engine.cache_events()
    while not engine._cache_events.empty():
        yield await anext(events)


async def test_it_keeps_what_it_has_cached(subtests):
    each = {"alone": FAKE, "lookup": SPECULATING, "draft": DRAFTING, "no pulls": WITHOUT_PULLS}
    for name, settings in each.items():
        with subtests.test(name):
            await goes_on_in_both_roles(settings)


async def test_one_that_was_a_decode_rank_says_what_it_sends_without_the_drafts_kv():
    """A decode rank's draft model does not compute chunks of one token with the target's."""
    async with Pair(replace(DRAFTING, fake_draft="agree:1"), dp_size=2) as pair:
        await pair.generate(PROMPT, 2, plan=Plan.LOCAL)
        await turned(pair, pair.decodes[0], Role.PREFILL)
        drafting, prompt = draft_with(core_of(pair.decodes[1])), PROMPT[:61]
        answer = await pair.generate(prompt, 12, decode=1, prefill=2)
        assert answer.tokens == continuation(prompt, 12)
        assert answer.admitted.prefill_prefix_len == 60
        assert drafting.accepted == drafting.drafted > 5
        await pair.assert_nothing_held()


@pytest.mark.exact
async def test_of_a_recurrent_model_it_does_too():
    await goes_on_in_both_roles(torch_settings("qwen3_5"))


async def test_one_that_has_crashed_has_no_successor(subtests, monkeypatch):
    """Before the successor starts, or just then, when the crash is still told to the first. Writes that have
    not ended count as one: who sees another life takes them for ended."""
    for moment in ("writes left", "before", "after"):
        with subtests.test(moment), monkeypatch.context() as patch:
            await check_crashed(moment, patch)


async def check_crashed(moment, monkeypatch):
    async with Pair(FAKE) as pair:
        engine = pair.decode
        (successor,) = prefill_engines(FAKE, [RankId("decode", 0, 5)])
        successor.succeed(engine)
        if moment == "writes left":
            monkeypatch.setattr(TransferTable, "is_settled", False)
        await engine.stop()
        if moment != "after":
            if moment == "before":
                engine._fail_all(RuntimeError("a bug"))
            with pytest.raises(Unavailable, match="has failed in its other role"):
                await successor.start()
        else:
            pair._stack.push_async_callback(successor.stop)
            await successor.start()
            engine._fail_all(RuntimeError("a bug"))
            async with asyncio.timeout(5):
                assert not await successor.crashed()


async def test_only_the_engines_thread_touches_the_core_that_is_taken_over(monkeypatch):
    async with Pair(FAKE) as pair:
        core, threads = core_of(pair.decode), set()
        load = core.load
        monkeypatch.setattr(core, "load", lambda: threads.add(threading.current_thread().name) or load())
        engine = await turned(pair, pair.decode, Role.PREFILL)
        books = (await engine.books()).free
        assert threads == {"engine"} and engine.load().books.free == books
