"""A sequence's first token tells what its time went into: queued, waiting with its pages, or computing.

A step takes a second, and each look at the clock a millisecond. But for one test, prompts are computed in the
order of arrival.
"""

import pytest

from engine.paged.core.test_core_tiers import prompt_of, with_stored
from engine.paged.core_rank import Rank
from services.engine.paged.sequence import Phase
from services.tier.copies import LoadCopy
from services.values.request import Pulled


def slow(rank=None, **settings):
    rank = rank or Rank(**{"num_pages": 64, "shorter_first": 0.0, **settings})
    rank.step_s = 1.0
    return rank


def about(queued_s, waited_s, computed_s):
    return pytest.approx((queued_s, waited_s, computed_s, 0), abs=0.2)


def time_of(rank, seq):
    (time,) = rank.times[seq]
    return time._replace(rank_tokens=0)


def test_others_prompts_are_waited_for_and_are_no_computing(subtests):
    with subtests.test("a prompt's own chunks are all of its computing"):
        rank = slow(chunk_size=8)
        long, short = rank.submit(range(24)), rank.submit(range(100, 108))
        rank.run([long, short])
        assert time_of(rank, long) == about(0, 0, 3) and time_of(rank, short) == about(0, 3, 1)

    with subtests.test("what a step has room for beside others is computed from that step on"):
        rank = slow(chunk_size=8)
        first, second = rank.submit(range(20)), rank.submit(range(100, 110))
        rank.run([first, second])  # Four tokens of the second are in the third step.
        assert time_of(rank, first) == about(0, 0, 3) and time_of(rank, second) == about(0, 2, 2)

    with subtests.test("who is overtaken computes from its first chunk on, and who overtakes waits less"):
        rank = slow(chunk_size=8, shorter_first=2.0)
        long = rank.submit(range(24))
        rank.step()
        short = rank.submit(range(100, 108))
        rank.run([long, short])
        assert time_of(rank, long) == about(0, 0, 4) and time_of(rank, short) == about(0, 0, 1)

    with subtests.test("pages are waited for apart"):
        rank = slow(num_pages=8)
        holds, lacks = rank.submit(range(24), 4), rank.submit(range(100, 116), 4)
        rank.run([holds, lacks])
        assert time_of(rank, holds) == about(0, 0, 3)
        assert time_of(rank, lacks) == about(6, 0, 2)  # Four tokens come with the last chunk and three steps.

    with subtests.test("a transfer is told the same"):
        rank = slow(chunk_size=8)
        long, short = rank.submit(range(24), transfer_id=1), rank.submit(range(100, 108), transfer_id=2)
        rank.run([long, short])
        assert time_of(rank, short) == about(0, 3, 1)


def test_what_a_rank_computes_meanwhile_is_told(subtests):
    """Its time for so many tokens is the rank's speed, whoever goes first."""
    for shorter_first in (0.0, 2.0):
        with subtests.test(shorter_first=shorter_first):
            rank = slow(chunk_size=8, shorter_first=shorter_first)
            long = rank.submit(range(24), 4)
            rank.step()
            short = rank.submit(range(100, 108), 4)
            rank.run([long, short])
            (of_long,), (of_short,) = rank.times[long], rank.times[short]
            assert of_long.rank_tokens == 32 if shorter_first else 24
            assert of_short.rank_tokens == 8 if shorter_first else 24
            for time in (of_long, of_short):
                assert time.rank_tokens / 8 == pytest.approx(sum(time[:3]), abs=0.2)


def test_what_another_computes_of_a_prompt_is_waited_for(subtests):
    prompt = list(range(33))
    with subtests.test("while it is computed"):
        rank = slow(chunk_size=8)
        first, second = rank.submit(prompt), rank.submit(prompt)
        rank.run([first, second])
        assert time_of(rank, first) == about(0, 0, 5) and second.reused_tokens == 32
        assert time_of(rank, second) == about(0, 4, 1)  # Its last token is in the first one's last step.

    with subtests.test("nothing of it where it was there before"):
        again = rank.submit(prompt)
        rank.run([again])
        assert again.reused_tokens == 32 and time_of(rank, again) == about(0, 0, 1)


def test_a_source_and_a_tier_are_waited_for(subtests):
    with subtests.test("a pull, which is told apart"):
        rank = slow(chunk_size=8)
        seq = rank.submit(range(30), held=16)
        rank.step()
        other = rank.submit([*range(30), 9], held=16)
        rank.step()
        assert (seq.phase, other.awaits) == (Phase.PULLING, seq)
        rank.now += 5.0
        rank.pull(seq)
        rank.run([seq, other])
        assert time_of(rank, seq) == about(0, 5, 2)
        assert time_of(rank, seq).unpulled_s(Pulled(seconds=4.99)) == pytest.approx(0, abs=0.1)
        assert time_of(rank, seq).unpulled_s(Pulled(seconds=99.0)) == 0.0
        assert time_of(rank, other) == about(0, 7, 1)  # Two steps are the first one's.
        assert time_of(rank, other).unpulled_s(None) == time_of(rank, other).waited_s

    with subtests.test("a pull that fails"):
        rank = slow(chunk_size=8)
        seq = rank.submit(range(30), held=16)
        rank.step()
        rank.now += 5.0
        rank.core.pulls.failed(seq)
        rank.run([seq])
        assert time_of(rank, seq) == about(0, 5, 4)

    with subtests.test("a read"):
        prompt = prompt_of(1, 40)
        rank = slow(with_stored(prompt))
        seq = rank.submit(prompt)
        rank.step()
        assert seq.phase is Phase.FILLING
        rank.now += 0.5
        rank.thread.run(LoadCopy)
        rank.run([seq])
        assert seq.brought_tokens >= 32 and time_of(rank, seq) == about(0, 0.5, 1)


def test_a_prompt_that_is_received_is_not_computed_here():
    rank = slow()
    seq = rank.submit(range(24), receives=True)
    rank.step()
    rank.now += 3.0
    rank.land(seq)
    rank.run([seq])
    assert time_of(rank, seq) == about(0, 3, 0) and time_of(rank, seq).computed_s == 0


def test_who_is_sent_back_computes_for_as_long_as_it_did(subtests):
    with subtests.test("in the middle of its prompt"):
        rank = slow(chunk_size=8, max_running=2)
        crowd = [rank.submit([number, *range(100 * number, 100 * number + 23)], 4) for number in (1, 2)]
        for _ in range(4):  # The second has one chunk of three.
            rank.step()
        short = rank.submit(range(8), 4, cache_salt="quiet")
        rank.step()
        assert crowd[1].phase is Phase.WAITING and crowd[1].computed == 8
        rank.run([*crowd, short])
        assert time_of(rank, crowd[0]) == about(0, 0, 3) and time_of(rank, short) == about(0, 0, 1)
        again = time_of(rank, crowd[1])
        assert again.computed_s == pytest.approx(3, abs=0.1) and again.waited_s == pytest.approx(3, abs=0.1)
        assert 1 < again.queued_s < 5

    with subtests.test("before its first chunk"):
        rank = slow(chunk_size=8, max_running=2)
        crowd = [rank.submit(range(100 * number, 100 * number + 24), 4) for number in (1, 2)]
        rank.step()
        short = rank.submit(range(8), 4, cache_salt="quiet")
        rank.run([*crowd, short])
        assert crowd[1].retractions == 1
        assert time_of(rank, crowd[1]).computed_s == pytest.approx(3, abs=0.1)

    with subtests.test("after its first token"):
        rank = slow(num_pages=12, chunk_size=16)
        seqs = [rank.submit([number, 1, 2], 20) for number in range(3)]
        rank.run(seqs)
        (back,) = (seq for seq in seqs if seq.retractions)
        first, second = (time._replace(rank_tokens=0) for time in rank.times[back])
        assert first == about(0, 0, 1)
        # What it decoded between the two is in neither.
        assert second == about(6, 0, 2)
