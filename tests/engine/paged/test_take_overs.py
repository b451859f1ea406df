"""A rank takes over what another has cached: pulled, as old as it was, and computed by nobody."""

import asyncio
from dataclasses import replace

import pytest

from engine.paged.test_pulls import HYBRIDS, PROMPT, Held, Ranks, patient, until, wait
from engine.pair import core_of
from services.engine.fake import continuation, parse_carried
from services.values.errors import Unavailable
from services.values.rank import Plan, TakeOver

__all__ = ["patient"]


class Pairs(Ranks):
    async def offers(self, within_s=20.0):
        """These are the prefixes that the first decode rank has to hand over."""
        leaver = self.decode.hands_over
        listed = await leaver.idle_prefixes()
        return [
            TakeOver(
                self.decode_peers[0],
                prefix.salt,
                await leaver.spell(prefix),
                prefix.idle_s,
                prefix.protected_tokens,
                within_s,
            )
            for prefix in sorted(listed, key=lambda each: each.idle_s)
        ]

    async def hand_over(self, offer):
        return await self.decodes[1].hands_over.take_over(offer)


async def test_a_prefix_crosses_and_is_computed_by_nobody(subtests):
    for carried in ("", *HYBRIDS):
        with subtests.test(carried=carried):
            async with Pairs(fake_carried=carried, index_block=8 if carried else 4) as ranks:
                prompt = await ranks.hold(cache_salt="s")
                (offer,) = await ranks.offers()
                taken = await ranks.hand_over(offer)
                assert taken.refused == "" and 0 < taken.held_tokens == taken.pulled_tokens
                assert taken.digested_pages >= taken.held_tokens // 4
                again = await ranks.hand_over(offer)
                assert (again.refused, again.pulled_tokens) == ("", 0)
                assert again.held_tokens == taken.held_tokens
                answer = await ranks.generate(prompt, 8, Plan.LOCAL, decode=1, cache_salt="s")
                assert answer.tokens == continuation(prompt, 8, parse_carried(carried))
                assert answer.admitted.computed_tokens == len(prompt) - taken.held_tokens
                await ranks.assert_nothing_held()


async def test_it_is_as_old_and_as_much_wanted_as_it_was():
    async with Pairs() as ranks:
        await ranks.hold()
        await ranks.generate(PROMPT, 1, Plan.LOCAL)  # twice
        (offer,) = await ranks.offers()
        assert offer.protected_tokens == 44
        await ranks.generate([1, 2, 3, 4, 5], 1, Plan.LOCAL, decode=1)
        await asyncio.sleep(0.3)
        for _ in range(2):  # The second time it is here.
            await ranks.hand_over(replace(offer, idle_s=offer.idle_s + 5.0))
        told = {p.tokens: p for p in await ranks.decodes[1].hands_over.idle_prefixes()}
        own, brought = told[4], told[len(offer.token_ids)]
        assert own.idle_s < 5.0 < brought.idle_s < 7.0 and brought.protected_tokens == 44


async def test_nothing_younger_goes_for_it(subtests):
    async with Pairs(kv_pages=32) as ranks:
        await ranks.hold()
        (offer,) = await ranks.offers()
        others = [[first] * 40 for first in range(3)]
        for other in others:
            await ranks.generate(other, 1, Plan.LOCAL, decode=1)
        await asyncio.sleep(0.3)
        cache = core_of(ranks.decodes[1]).cache
        with subtests.test("there is room for its beginning"):
            free = cache.books().free
            taken = await ranks.hand_over(replace(offer, idle_s=60.0))
            assert taken.refused == "" and taken.held_tokens == 4 * free < len(offer.token_ids)
            assert taken.room_tokens == 0
            assert cache.books().free == 0
        with subtests.test("there is none"):
            taken = await ranks.hand_over(replace(offer, idle_s=60.0))
            assert (taken.refused, taken.held_tokens) == ("no_room", 4 * free)
            assert [cache.match_len(other, "") for other in others] == [40, 40, 40]
        with subtests.test("what is older goes"):
            await ranks.hold([9, *PROMPT])
            newest = (await ranks.offers())[0]
            taken = await ranks.hand_over(newest)
            assert taken.refused == "" and taken.held_tokens == len(newest.token_ids)
            assert taken.room_tokens > 0
        await ranks.assert_nothing_held()


async def test_it_gives_way_to_those_that_wait(monkeypatch):
    async with Pairs() as ranks:
        await ranks.hold()
        (offer,) = await ranks.offers()
        gate = type(core_of(ranks.decodes[1])._gate)
        length = gate.__len__
        monkeypatch.setattr(gate, "__len__", lambda waiting: 1)
        assert (await ranks.hand_over(offer)).refused == "busy"
        monkeypatch.setattr(gate, "__len__", length)
        assert (await ranks.hand_over(offer)).refused == ""


@pytest.mark.long
async def test_what_goes_wrong_costs_nothing(subtests, monkeypatch):
    with subtests.test("the leaver is another life"):
        async with Pairs() as ranks:
            await ranks.hold()
            (offer,) = await ranks.offers()
            own = offer.source.id
            former = replace(offer.source, id=replace(own, generation=own.generation ^ 1))
            assert (await ranks.hand_over(replace(offer, source=former))).refused == "gone"
            await ranks.assert_nothing_held()
    with subtests.test("it holds it no more"):
        async with Pairs() as ranks:
            await ranks.hold()
            (offer,) = await ranks.offers()
            taken = await ranks.hand_over(replace(offer, token_ids=tuple(range(40))))
            assert (taken.refused, taken.held_tokens) == ("evicted", 0)
            await ranks.assert_nothing_held()
    for carried in ("", "window:6,state"):
        for how in ("cancelled", "late", "endless", "stopped"):
            with subtests.test(how, carried=carried):
                held = Held(monkeypatch)
                async with Pairs(fake_carried=carried, write_lease_s=0.5) as ranks:
                    await ranks.hold()
                    within_s = {"late": 0.2, "endless": 1e9}.get(how, 20.0)
                    (offer,) = await ranks.offers(within_s)
                    wait(monkeypatch, 0.2 if how == "endless" else 20.0)
                    held.closed = True
                    task = asyncio.create_task(ranks.hand_over(offer))
                    await until(lambda: ranks.decode.sender.writes_in_flight)
                    if how == "cancelled":
                        task.cancel()
                        with pytest.raises(asyncio.CancelledError):
                            await task
                    elif how in ("late", "endless"):
                        assert (await task).refused == "late"
                    else:
                        stopping = asyncio.create_task(ranks.decodes[1].stop())
                        with pytest.raises(Unavailable):
                            await task
                    held.closed = False
                    if how == "stopped":
                        await stopping
                    else:
                        wait(monkeypatch, 20.0)
                        await ranks.assert_nothing_held()


async def test_it_leaves_what_those_that_run_will_grow_into():
    async with Pairs(kv_pages=32, fake_step_s=0.01) as ranks:
        await ranks.hold(list(range(1, 101)))
        (offer,) = await ranks.offers()
        running = asyncio.create_task(ranks.generate([5] * 40, 60, Plan.LOCAL, decode=1))
        core = core_of(ranks.decodes[1])
        await until(lambda: core.load().running)
        kept = core._gate.growth_pages(core._active)
        taken = await ranks.hand_over(offer)
        assert kept > 5 and 0 < taken.held_tokens <= 4 * (32 - 10 - kept + 1)
        await running
        assert core.retractions == 0


async def test_what_stays_behind_is_found_by_the_next_life_in_its_file(tmp_path, subtests):
    """Nothing is stored before: there is room for all. The fake computes slowly enough to read instead."""
    for carried in ("", *HYBRIDS):
        with subtests.test(carried=carried):
            tier = {"kv_tier": (f"{tmp_path}/{carried.replace(':', '-')}:1MiB",), "fake_prompt_token_s": 2e-4}
            shape = {"fake_carried": carried, "index_block": 8 if carried else 4}
            async with Pairs(**tier, **shape) as ranks:
                prompt = await ranks.hold()
                tiers = core_of(ranks.decode).tiers
                assert tiers.figures().bytes_down == 0
                await ranks.decode.hands_over.keep(20.0)
                assert tiers.books.num_blocks and tiers.storing.has_kept_all
                kept = tiers.books.num_blocks * (8 if carried else 4)
            async with Pairs(**tier, **shape) as ranks:
                answer = await ranks.generate(prompt, 8, Plan.LOCAL)
                assert answer.tokens == continuation(prompt, 8, parse_carried(carried))
                assert 0 < answer.admitted.brought_tokens <= kept
                assert answer.admitted.computed_tokens < len(prompt) // 2
                await ranks.assert_nothing_held()


async def test_a_tier_that_does_not_answer_holds_up_no_stop(tmp_path, caplog):
    async with Pairs(kv_tier=(f"{tmp_path}:1MiB",)) as ranks:
        await ranks.hold()
        core_of(ranks.decode).tiers.thread.submit = lambda copy: False
        await ranks.decode.hands_over.keep(0.2)
        assert "kv_not_all_kept" in caplog.text
        await until(lambda: not core_of(ranks.decode).tiers.storing._keeps_all)
    caplog.clear()
    await ranks.decode.hands_over.keep(0.2)  # The engine has ended, so nobody answers.
    assert "kv_not_all_kept" in caplog.text
