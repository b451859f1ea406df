"""A draft model through P/D: the same tokens, its KV where both ranks have it, and drafts that come true."""

import asyncio
from dataclasses import replace
from itertools import product

import pytest

from engine.paged.draft_ranks import draft_with
from engine.pair import FAKE, Pair, core_of
from exactness.prompt_scores import prompt_scores
from services.engine.fake import continuation, parse_carried
from services.engine.fake_draft import parse_draft
from services.kv.ticket import StartsWithinPage
from services.kv.transfer_plan import moved_bytes
from services.transfer.sending import transfers
from services.values.errors import ConfigError, KvCorrupt
from services.values.rank import Plan
from services.values.request import SamplingParams

ALWAYS = replace(FAKE, fake_draft="agree:1")
WITHOUT = FAKE
PAGE_BYTES = FAKE.page_size * 8
CARRIED = ["", "state:3", "window:6", "window:6,state"]
PROMPT = list(range(40, 63))


def right(prompt, count, carried=""):
    return continuation(prompt, count, parse_carried(carried))


async def test_a_conversation_moves_the_drafts_delta_too(subtests):
    for carried in CARRIED:
        with subtests.test(carried=carried):
            settings = replace(ALWAYS, fake_carried=carried, index_block=8)
            async with Pair(settings) as pair:
                drafting = draft_with(core_of(pair.decode))
                history = PROMPT[:13]
                for turn in range(5):
                    answer = await pair.generate(history, 7)
                    assert answer.tokens == right(history, 7, carried)
                    admitted, layout = answer.admitted, pair.decode.layout
                    delta_pages = -(-len(history) // 4) - admitted.decode_prefix_len // 4
                    assert admitted.carried_bytes["draft"] == delta_pages * PAGE_BYTES
                    moved = moved_bytes(admitted.decode_prefix_len, len(history), layout)
                    assert admitted.kv_bytes_moved == sum(moved)
                    assert admitted.kv_bytes_prompt == sum(moved_bytes(0, len(history), layout))
                    assert admitted.digested_pages >= 2 * delta_pages
                    history += [*answer.tokens, 400 + turn, 3, 5]
                assert drafting.accepted == drafting.drafted > 10
                draft = core_of(pair.decode).runner.draft
                assert (
                    draft.computed_tokens <= 5 * 7 + 5
                )  # the answers' tokens; those of the prompts came by wire
                await pair.assert_nothing_held()


async def test_what_is_told_of_a_prompt_is_the_same_with_drafts(subtests):
    for carried, plan in product(["", "window:6,state"], list(Plan)):
        with subtests.test(carried=carried, plan=plan):
            async with Pair(replace(ALWAYS, fake_carried=carried, index_block=8)) as pair:
                drafting = draft_with(core_of(pair.decode))
                for start in (0, 9, 22):
                    sampling = SamplingParams(temperature=0, prompt_logprobs=1, prompt_logprobs_start=start)
                    answer = await pair.generate(PROMPT, 12, plan, sampling=sampling)
                    assert answer.tokens == right(PROMPT, 12, carried)
                    groups = parse_carried(carried)
                    assert answer.prompt_logprobs == prompt_scores(PROMPT, max(1, start), 1, groups)
                assert drafting.accepted > 10
                await pair.assert_nothing_held()


async def test_ranks_that_differ_in_drafts(subtests):
    for side in ["decode", "prefill"]:
        with subtests.test("ranks with and without a draft pair", side=side):
            decode, prefill = (ALWAYS, WITHOUT) if side == "decode" else (WITHOUT, ALWAYS)
            async with Pair(decode, prefill_settings=prefill) as pair:
                drafting = draft_with(core_of(pair.decode)) if side == "decode" else None
                answer = await pair.generate(PROMPT, 12)
                assert answer.tokens == right(PROMPT, 12)
                assert answer.admitted.kv_bytes_moved == 6 * PAGE_BYTES
                assert answer.admitted.carried_bytes == {}
                if drafting is not None:
                    assert drafting.accepted == drafting.drafted > 5  # it caught up
                    assert core_of(pair.decode).runner.draft.computed_tokens >= len(PROMPT)
                await pair.assert_nothing_held()

    with subtests.test("drafts of other models do not cross"):
        async with Pair(ALWAYS) as pair:
            sender, layout = pair.prefill.sender, pair.prefill.layout
            other = replace(layout, draft=replace(layout.draft, model_fingerprint=1))
            sender._hello = replace(sender._hello, layout=other)
            sender._transfers._layout = other
            answer = await pair.generate(PROMPT, 5)
            assert answer.tokens == right(PROMPT, 5)
            assert answer.admitted.kv_bytes_moved == 6 * PAGE_BYTES
            await pair.assert_nothing_held()

    for text in ["0.8", "agree", "agree:2", "agree:x", "agree:1:-1", "agree:1:0:0"]:
        with (
            subtests.test("drafts that are none are refused", text=text),
            pytest.raises(ConfigError, match="--fake-draft takes"),
        ):
            parse_draft(text)


async def test_a_source_lends_what_it_holds_without_the_drafts_kv():
    async with Pair(ALWAYS, dp_size=2) as pair:
        drafting = draft_with(core_of(pair.decodes[1]))
        for prompt in (PROMPT, [*PROMPT[1:], 7]):  # The second one is lent by a sender that still lives.
            await pair.generate(prompt, 2, Plan.LOCAL)
            core_of(pair.decode).runner.draft.validity.lent(range(ALWAYS.kv_pages))
            source = pair.source(pair.decode, len(prompt) // 4 * 4)
            answer = await pair.generate(prompt, 12, Plan.LOCAL, decode=1, pull_from=source)
            assert answer.tokens == right(prompt, 12)
            pulled = answer.admitted.pulled
            assert (pulled.tokens, pulled.bytes, pulled.refused) == (20, 5 * PAGE_BYTES, "")
        assert drafting.accepted == drafting.drafted > 10  # It has computed what did not come.
        await pair.assert_nothing_held()


async def test_prefill_says_how_much_it_sends_without_the_drafts_kv():
    """It lacks that for what it has pulled or read from a tier, or has computed as a decode rank."""
    async with Pair(ALWAYS, dp_size=2) as pair:
        await pair.generate(PROMPT, 2)
        draft = core_of(pair.prefill).runner.draft
        draft.validity.lent(range(2, ALWAYS.kv_pages))
        draft.slots[2:] = 0
        drafting = draft_with(core_of(pair.decodes[1]))
        answer = await pair.generate(PROMPT, 12, decode=1)
        assert answer.tokens == right(PROMPT, 12)
        assert answer.admitted.prefill_prefix_len == 20
        assert drafting.accepted == drafting.drafted > 5
        await pair.assert_nothing_held()


async def test_prefill_counts_the_drafts_kv_that_was_there_when_its_page_was_sent(subtests):
    """It computes cached tokens once more behind a checkpoint, whose pages are on their way by then."""
    for lacking, told in [(5, 16), (2, 4), (None, 23)]:
        with subtests.test(lacking=lacking):
            settings = replace(ALWAYS, fake_carried="state:3", index_block=8)
            async with Pair(settings, dp_size=2) as pair:
                await pair.generate(PROMPT, 2)
                prefill, draft_ends = core_of(pair.prefill), []
                pages = [node.page for node in prefill.cache._tree.nodes() if node.depth == lacking]
                prefill.runner.draft.validity.lent(pages)
                decode = core_of(pair.decodes[1])
                landed = decode.landed

                def noting(seq, token, *, draft_end, landed=landed, ends=draft_ends):
                    ends.append(draft_end)
                    landed(seq, token, draft_end=draft_end)

                decode.landed = noting
                drafting = draft_with(decode)
                answer = await pair.generate(PROMPT, 12, decode=1)
                assert answer.tokens == right(PROMPT, 12, "state:3")
                assert (answer.admitted.prefill_prefix_len, draft_ends) == (16, [told])
                assert drafting.accepted == drafting.drafted > 5
                await pair.assert_nothing_held()


async def test_who_computes_the_draft(subtests):
    with subtests.test("decode catches up by slices"):
        # Of a prompt that came without the draft's KV a chunk a step; no drafts meanwhile.
        async with Pair(
            replace(ALWAYS, kv_pages=128), prefill_settings=replace(WITHOUT, kv_pages=128)
        ) as pair:
            drafting = draft_with(core_of(pair.decode))
            prompt = [i % 400 for i in range(100)]
            answer = await pair.generate(prompt, 40)
            assert answer.tokens == right(prompt, 40)
            # 13 steps of 8 tokens beside 13 tokens; then 4 tokens a step
            assert drafting.drafted == drafting.accepted
            assert 15 <= drafting.accepted <= 21
            await pair.assert_nothing_held()

    with subtests.test("plan local computes the draft with the prompt"):
        async with Pair(ALWAYS) as pair:
            drafting = draft_with(core_of(pair.decode))
            answer = await pair.generate(PROMPT, 9, Plan.LOCAL)
            assert answer.tokens == right(PROMPT, 9)
            assert answer.admitted.carried_bytes == {} and answer.admitted.kv_bytes_moved == 0
            assert drafting.drafted == drafting.accepted == 6  # 1, 1 + 3, 1 + 3
            again = await pair.generate([*PROMPT, *answer.tokens, 9], 9, Plan.LOCAL)
            assert again.tokens == right([*PROMPT, *answer.tokens, 9], 9)
            assert drafting.drafted == drafting.accepted == 12
            await pair.assert_nothing_held()


async def test_drafts_of_a_batch(subtests):
    # With evictions and retractions: pages are lent anew all the time.
    for carried in ["", "window:6,state"]:
        with subtests.test(carried=carried):
            settings = replace(ALWAYS, fake_carried=carried, kv_pages=24, max_running_requests=3)
            async with Pair(settings) as pair:
                drafting = draft_with(core_of(pair.decode))
                prompts = [[5] * 9 + [i] * (i + 1) for i in range(8)]
                answers = await asyncio.gather(
                    *(pair.generate(p, 24, list(Plan)[i % 2]) for i, p in enumerate(prompts))
                )
                assert [a.tokens for a in answers] == [right(p, 24, carried) for p in prompts]
                assert (
                    drafting.accepted == drafting.drafted > 20
                )  # what it holds of a page is never another's
                await pair.assert_nothing_held()

    with subtests.test("acceptance is that of one process"):
        prompts = [[(7 * i + j * j) % 500 for j in range(30)] for i in range(10)]
        shares = []
        for plan in (Plan.LOCAL, Plan.REMOTE):
            async with Pair(replace(FAKE, fake_draft="agree:0.8")) as pair:
                drafting = draft_with(core_of(pair.decode))
                for prompt in prompts:
                    answer = await pair.generate(prompt, 20, plan)
                    assert answer.tokens == right(prompt, 20)
                shares.append((drafting.accepted, drafting.drafted))
        assert shares[0] == shares[1]
        assert 0.6 < shares[0][0] / shares[0][1] < 0.95


async def test_transfers_with_a_draft_that_do_not_go_straight(subtests):
    with (
        subtests.test("a renegotiated delta brings the drafts pages again"),
        pytest.MonkeyPatch.context() as monkeypatch,
    ):
        check = transfers.check_ticket

        def in_larger_units(ticket, prompt_len, layout, memories, generation):
            check(ticket, prompt_len, layout, memories, generation)
            if ticket.decode_prefix_len == 16:
                raise StartsWithinPage(8, 16)

        async with Pair(ALWAYS) as pair:
            drafting = draft_with(core_of(pair.decode))
            first = await pair.generate(PROMPT[:17], 2)
            monkeypatch.setattr(transfers, "check_ticket", in_larger_units)
            answer = await pair.generate(PROMPT, 10)
            assert (first.tokens, answer.tokens) == (right(PROMPT[:17], 2), right(PROMPT, 10))
            assert answer.admitted.decode_prefix_len == 8
            assert answer.admitted.carried_bytes == {"draft": 4 * PAGE_BYTES}
            assert drafting.accepted == drafting.drafted > 5
            await pair.assert_nothing_held()

    with subtests.test("a page of the draft that comes changed fails the transfer"):
        # All that lands is compared, and what failed is in nobody's pages.
        async with Pair(ALWAYS) as pair:
            runner = core_of(pair.prefill).runner
            read = runner.read_pages

            def of_other_bytes(pages, group=0):
                for index, page in enumerate(read(pages, group)):
                    yield bytes(len(page)) if (group, index) == (1, 0) else page

            pair.prefill.sender._transfers._read_pages = of_other_bytes
            with pytest.raises(KvCorrupt, match="1 of 12 pages"):
                await pair.generate(PROMPT)
            pair.prefill.sender._transfers._read_pages = read
            assert (await pair.generate(PROMPT)).tokens == right(PROMPT, 8)
            await pair.assert_nothing_held()

    with subtests.test("an aborted transfer leaks nothing"):
        async with Pair(replace(ALWAYS, fake_prompt_token_s=0.002)) as pair:
            drafting = draft_with(core_of(pair.decode))
            for _ in range(2):
                async with pair.outputs(pair.request(range(60), 8)) as outputs:
                    with pytest.raises(TimeoutError):
                        async with asyncio.timeout(0.03):
                            await anext(outputs)
            answer = await pair.generate(range(60), 8)
            assert answer.tokens == right(list(range(60)), 8)
            assert drafting.accepted == drafting.drafted > 3
            await pair.assert_nothing_held()


async def test_what_a_tier_brings_has_the_drafts_kv_with_it():
    settings = replace(ALWAYS, kv_tier=("memory:1MiB",), kv_pages=40, fake_prompt_token_s=2e-4)
    async with Pair(settings) as pair:
        core = core_of(pair.decode)
        drafting, prompts = draft_with(core), [[seed, *range(90)] for seed in range(4)]
        for prompt in prompts * 20:
            before = core.runner.draft.computed_tokens
            answer = await pair.generate(prompt, 6, Plan.LOCAL)
            assert answer.tokens == right(prompt, 6)
            if brought := answer.admitted.brought_tokens:
                break
            await asyncio.sleep(0.01)
        assert brought >= 40
        assert core.runner.draft.computed_tokens - before <= len(prompt) - brought + 6 + 5
        assert drafting.accepted == drafting.drafted > 5
        await pair.assert_nothing_held()
