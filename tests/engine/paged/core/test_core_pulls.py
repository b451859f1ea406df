"""A core grants pages to others, and asks a source for some; test_core_stateful.py does it in any order."""

from engine.paged.core_rank import Rank
from services.engine.fake import fake_state
from services.engine.paged.pulls import Granted, Refused
from services.engine.paged.sequence import Phase


def prompt(first, length=16):
    return [first, *range(100, 99 + length)]


def holding(*prompts, **settings):
    rank = Rank(num_pages=96, **settings)
    seqs = [rank.submit(ids, 2) for ids in prompts]
    rank.run(seqs)
    return rank


def test_a_first_grant_may_be_of_any_size_and_others_are_few_beside_what_runs():
    rank = holding(prompt(1, 60), *(prompt(first) for first in range(2, 12)))
    rank.submit([7, *range(200, 359)], 2)
    rank.step()  # With 40 of 96 pages for this one, less than half would be available beside a second grant.
    pulls, locked = rank.core.pulls, rank.core.load().books.locked
    assert isinstance(pulls.grant(0, prompt(1, 60), "", 1), Granted)
    assert pulls.grant(1, prompt(2), "", 1) == Refused("busy", 16)  # 15 pages of 96 are lent already
    pulls.grant_ended(0)
    granted = [pulls.grant(10 + first, prompt(first), "", 1) for first in range(2, 12)]
    assert [isinstance(each, Granted) for each in granted] == [True] * 3 + [False] * 7  # of 4 pages each
    assert rank.core.load().granted_pages == 12 == rank.core.load().books.locked - locked
    for first in range(2, 12):
        pulls.grant_ended(10 + first)
    assert rank.core.load().granted_pages == 0
    rank.core.check()


def test_an_idle_rank_grants_as_much_as_leaves_half_of_its_pool_available():
    rank = holding(*(prompt(first, 60) for first in range(4)))
    granted = [rank.core.pulls.grant(first, prompt(first, 60), "", 1) for first in range(4)]
    assert [isinstance(each, Granted) for each in granted] == [True] * 3 + [False]  # of 15 pages each, of 96


def test_a_grant_is_no_second_demand_for_what_it_locks():
    rank = holding(prompt(1))
    tree = rank.core.cache._tree
    assert rank.core.pulls.grant(0, prompt(1), "", 1).end == 16
    assert not any(node.protected for node in tree.nodes())
    assert rank.core.pulls.grant(1, prompt(1), "", 17) == Refused("evicted", 16)
    assert rank.core.pulls.grant(2, prompt(9), "", 1) == Refused("evicted", 0)


def test_a_retracted_sequence_asks_no_source_again():
    rank = Rank(num_pages=12, max_running=4)
    seq = rank.submit(prompt(1, 12), 30, held=12)
    rank.step()
    assert seq.phase is Phase.PULLING and rank.wanted[seq].expected_end == 8
    rank.pull(seq)
    others = [rank.submit(prompt(first, 8), 30) for first in (2, 3)]
    rank.run([seq, *others])
    assert sum(each.retractions for each in (seq, *others)) > 0
    assert rank.tokens[seq] == rank.expected(prompt(1, 12), 30)


def test_what_a_source_wrote_is_a_checkpoint_for_others():
    rank = Rank(num_pages=32, carried=(fake_state(),))
    seq = rank.submit(prompt(1, 18), 2, held=16)
    rank.step()
    rank.pull(seq)
    rank.run([seq])
    before = rank.computed_tokens
    other = rank.submit([*prompt(1, 18)[:16], 7, 7], 2)
    rank.run([other])
    assert rank.computed_tokens - before == 3  # two of its own, and its first answer


def test_steps_look_at_nobody_where_nobody_lacks_pages():
    """It is done at every step, however many run."""

    class Unseen:
        def __iter__(self):
            raise AssertionError("all that run were looked at")

    rank = Rank(num_pages=32)
    seq = rank.submit(prompt(1), 4)
    rank.core.pulls._active = Unseen()
    rank.run([seq])
    assert rank.tokens[seq] == rank.expected(prompt(1), 4)
