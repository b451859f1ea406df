"""Drafts from what was said before: of whom, and how many."""

from engine.paged.core_rank import Rank
from engine.paged.drafts.replay import Replay, echoing, novel, sequence
from services.engine.paged.drafters import Drafter, LookupSettings, Wish
from services.engine.paged.step_time import StepTimes


def steps_cost(batch, drafts):
    """On a CPU: eight rows' worth is fixed."""
    return 0.001 * (8 + batch + drafts)


def replayed(answers, seconds=steps_cost, itl_target_s=None, **bounds):
    replay = Replay(Drafter(LookupSettings(itl_target_s=itl_target_s), page_size=4), seconds)
    replay.run({sequence(prompt, answer): answer for prompt, answer in answers}, **bounds)
    return replay


def plain_tokens_per_s(batch, seconds=steps_cost):
    return batch / seconds(batch, 0)


def many(batch, answer_of, length=400):
    prompts = [novel(200, seed=100 + each) for each in range(batch)]
    return [(prompt, answer_of(prompt, length, each)) for each, prompt in enumerate(prompts)]


def test_drafts_pay_or_are_not_tried(subtests):
    with subtests.test("where most are right it goes to the maximum"):
        answers = many(1, lambda prompt, length, each: echoing(prompt, length, 0.96))
        replay = replayed(answers)
        assert replay.tokens_per_s > 2.2 * plain_tokens_per_s(1)
        copied = replayed(many(1, lambda prompt, length, each: echoing(prompt, length, 1.0)))
        assert copied.tokens_per_s > 3.4 * plain_tokens_per_s(1)  # 6 tokens in 14 ms, instead of 1 in 9

    for batch in [1, 4, 16]:
        with subtests.test("where none are right nothing is lost", batch=batch):
            # Three ids meet again by chance all the time, and tell nothing.
            replay = replayed(many(batch, lambda prompt, length, each: [x % 7 for x in novel(length, each)]))
            assert replay.drafted > 0
            assert replay.tokens_per_s > 0.97 * plain_tokens_per_s(batch)

    with subtests.test("where rows cost as much as sequences hardly any are tried"):

        def linear(batch, drafts):
            return 0.001 * (batch + drafts)

        replay = replayed(many(16, lambda prompt, length, each: echoing(prompt, length, 0.9, each)), linear)
        assert replay.drafted < 0.2 * replay.tokens
        assert replay.tokens_per_s > 0.97 * plain_tokens_per_s(16, linear)

    with subtests.test("who begins to repeat gets drafts and who does not gets none"):

        def late(prompt, length, each):
            return novel(length, each) + (
                echoing(prompt, length, 1.0) if each == 0 else novel(length, 50 + each)
            )

        answers = many(4, late)
        replay = Replay(Drafter(LookupSettings(), page_size=4), steps_cost)
        running = {sequence(prompt, answer): answer for prompt, answer in answers}
        replay.run(running, steps=400)
        assert replay.accepted == 0
        replay.run(running, steps=60)
        assert [len(seq.ids) > 200 + 400 + 200 for seq in running] == [True, False, False, False]


def test_bounds_hold(subtests):
    with subtests.test("a long prompt is taken in by and by"):
        prompt = novel(10_000)
        replay = Replay(Drafter(LookupSettings(), page_size=4), steps_cost)
        running = {sequence(prompt, answer := prompt[9000:]): answer}
        replay.run(running, steps=4)
        assert replay.accepted == 0
        replay.run(running, steps=10)
        assert replay.accepted > 10

    with subtests.test("the runners bound and the target hold"):
        answers = many(4, lambda prompt, length, each: echoing(prompt, length, 1.0, each))
        free = replayed(answers)
        bounded = replayed(answers, max_drafts=3)  # which Replay asserts
        assert 0 < bounded.drafted < free.drafted
        longest = []

        def noted(batch, drafts):
            longest.append(steps_cost(batch, drafts))
            return longest[-1]

        held = replayed(answers, noted, itl_target_s=0.020)
        assert 0 < held.drafted < free.drafted
        # Plain 12 ms: half of the rest is left to prompts.
        assert max(longest[20:]) <= 0.0161


def share(salts, **settings):
    """Each answers alike, one after the other; how many tokens of the last were drafted right."""
    drafter = Drafter(LookupSettings(**settings), page_size=4)
    prompts, answer = [novel(50, seed) for seed in range(len(salts))], novel(200, seed=9)
    for prompt, salt in zip(prompts, salts, strict=True):
        replay = Replay(drafter, steps_cost)
        replay.step_times.note(1, 0, steps_cost(1, 0))
        replay.run({sequence(prompt, answer, salt): answer})
    return replay.accepted


def test_only_who_may_share_gains_by_what_others_said(subtests):
    for salts, settings, shared in [
        (["a", "a"], {"shares": True}, True),
        (["a", "a"], {"shares": False}, False),
        (["a", "b"], {"shares": True}, False),
        (["a", ""], {"shares": True, "shares_unsalted": True}, False),
        (["", "a"], {"shares": True, "shares_unsalted": True}, False),
        (["", ""], {"shares": True}, False),
        (["", ""], {"shares": True, "shares_unsalted": True}, True),
    ]:
        with subtests.test(
            "only who may share gains by what others said", salts=salts, settings=settings, shared=shared
        ):
            accepted = share(salts, **settings)
            assert accepted > 150 if shared else accepted == 0

    for salt in ["a", ""]:
        with subtests.test("an answer given again takes few steps and stays the same", salt=salt):
            # By the radix tree. Without a salt, and unasked, nobody sees that somebody had it before.
            rank, _ = drafting_rank(shares=True)
            steps = []
            for _ in range(2):
                computed_before = rank.now
                seq = rank.submit(range(10), 60, cache_salt=salt)
                rank.run([seq])
                assert rank.tokens[seq] == rank.expected(range(10), 60)
                steps.append(rank.now - computed_before)
            assert (steps[1] < 0.5 * steps[0]) == (salt == "a")


def drafting_rank(**settings):
    drafter = Drafter(LookupSettings(**settings), page_size=4)
    rank = Rank(drafting=drafter, num_pages=128)
    return rank, drafter


def test_nothing_is_kept_or_shown_of_who_has_ended(subtests):
    with subtests.test("nothing is kept of who has ended"):
        rank, drafter = drafting_rank(shares=True)
        seqs = [rank.submit(range(each, each + 10), 12, cache_salt="a") for each in range(3)]
        for _ in range(6):
            rank.step()
        assert drafter._drafted
        rank.core.cancel(seqs[0])
        rank.run(seqs[1:])
        assert not drafter._drafted

    with subtests.test("no ids and no salt are in what a log may show"):
        drafter = Drafter(LookupSettings(shares=True), page_size=4)
        seq = sequence([77777, 77778, 77779], [77780] * 9, "the-salt")
        drafter.propose([Wish(seq, 5)], 10, StepTimes())
        drafter.ended(seq)
        assert "7777" not in repr(drafter) and "the-salt" not in repr(drafter)
