"""Drafts change how many steps an answer takes, and nothing else."""

import random
from itertools import cycle, repeat

from engine.paged.core_rank import Guesses, Rank
from services.engine.fake import fake_state, fake_window
from services.engine.paged.model_runner import Sampled, keep_accepted

CARRIED = [(), (fake_state(),), (fake_window(6),), (fake_window(3), fake_state())]


def make_rank(lengths, is_right=lambda seq, index: True, **settings):
    guesses = Guesses(lambda *args: rank.expected(*args), iter(lengths), is_right)
    rank = Rank(drafting=guesses, **settings)
    return rank, guesses


def test_right_drafts_save_steps_and_wrong_ones_leave_nothing(subtests):
    for carried in CARRIED:
        with subtests.test(carried=carried):
            rank, guesses = make_rank(repeat(3), carried=carried, block_pages=8, num_pages=64)
            seq = rank.submit(range(10), 20)
            rank.run([seq], max_steps=2 + 6)
            assert rank.tokens[seq] == rank.expected(range(10), 20)
            assert guesses.noted[seq][0] == (3, 3)

    # What stays in the tree is that of the answer, as the next turn finds.
    for carried in CARRIED:
        with subtests.test(carried=carried):
            chance = random.Random(1)
            rank, guesses = make_rank(
                cycle([3, 1, 0, 3]), lambda seq, index, chance=chance: chance.random() < 0.6, carried=carried
            )
            first = rank.submit(range(10), 30)
            rank.run([first])
            assert rank.tokens[first] == rank.expected(range(10), 30)
            assert {0, 1, 2} <= {accepted for _, accepted in guesses.noted[first]}
            turn = [*range(10), *rank.tokens[first], 5]
            second = rank.submit(turn, 5)
            rank.run([second])
            assert rank.tokens[second] == rank.expected(turn, 5)
            assert second.reused_tokens >= 36


def test_drafts_that_would_go_too_far_are_not_tried(subtests):
    with subtests.test("no draft passes the last token"):
        rank, guesses = make_rank(repeat(5))
        seq = rank.submit(range(4), 4)
        rank.run([seq])
        assert rank.tokens[seq] == rank.expected(range(4), 4)
        assert guesses.noted[seq] == [(2, 2)]  # one came with the prompt, and one is chosen after the drafts

    with subtests.test("no draft passes the context"):
        rank, _ = make_rank(repeat(5), num_pages=4)
        seq = rank.submit(range(10), 100)
        rank.run([seq])
        assert len(seq.ids) == 16
        assert rank.tokens[seq] == rank.expected(range(10), 6)

    with subtests.test("a draft that would end the answer is not tried"):
        # The choice after the drafts before it says so, and what would follow is never computed.
        rank, guesses = make_rank(repeat(5))
        ending = rank.expected(range(4), 4)[3]
        seq = rank.submit(range(4), 20, eos_token_ids=(ending,))
        rank.run([seq])
        assert rank.tokens[seq] == rank.expected(range(4), 4)
        assert guesses.noted[seq] == [(2, 2)]

    with subtests.test("with a state no step passes a border"):
        # Else the state at the border, which the next turn goes on from, would never have been there.
        rank, guesses = make_rank(repeat(5), carried=(fake_state(),), block_pages=2)
        seq = rank.submit(range(8), 30)
        rank.run([seq])
        assert rank.core.carried.resumable(rank.core.cache.look_up(seq.ids, "").deepest, 99) == 32
        assert max(drafts for drafts, _ in guesses.noted[seq]) == 5


def test_drafts_take_nobodys_pages(subtests):
    with subtests.test("nobody gives up pages for a draft"):
        rank, guesses = make_rank(repeat(5), num_pages=4, expected_output=0.0)
        seqs = [rank.submit([i], 7) for i in range(2)]
        rank.run(seqs)
        assert rank.core.retractions == 0
        assert all(rank.tokens[seq] == rank.expected([i], 7) for i, seq in enumerate(seqs))
        assert any(drafts == 5 for seq in seqs for drafts, _ in guesses.noted[seq])

    for seed in [3, 37, 41, 46, 74, 86, 199]:
        with subtests.test("wrong drafts retract nobody", seed=seed):
            # Others can have the pages that only they reached, and what is cached does not go for them.
            retractions = []
            for num_drafts in (0, 16):
                chance = random.Random(seed)
                page_size, running = chance.choice((1, 2, 4)), chance.randint(2, 6)
                rank, _ = make_rank(
                    repeat(num_drafts),
                    lambda seq, index: False,
                    num_pages=chance.randint(60 // page_size, 160 // page_size),
                    page_size=page_size,
                    expected_output=0.1,
                )
                rank.run([rank.submit([10 * i, 5, 6], chance.randint(5, 45)) for i in range(running)])
                retractions.append(rank.core.retractions)
            assert retractions[1] == retractions[0]

    with subtests.test("drafts without a page are not tried"):
        rank, guesses = make_rank(repeat(5), num_pages=4, expected_output=0.0)
        receiving = rank.submit(range(11), 2, receives=True)
        decoding = rank.submit([1], 7)
        for _ in range(4):
            rank.step()
        assert guesses.noted[decoding] == [(2, 2)]  # they fill its page; the others belong to who receives
        rank.core.cancel(receiving)
        rank.run([decoding])
        assert rank.tokens[decoding] == rank.expected([1], 7)

    with subtests.test("drafts without a windows page are not tried"):
        # What others need to go on by a token stays for them.
        rank, guesses = make_rank(
            repeat(8), carried=(fake_window(3),), block_pages=8, chunk_size=1, room_for=2
        )
        asked = [([1] * 6, 20), ([2] * 6, 40)]
        seqs = [rank.submit(prompt, answer, receives=True) for prompt, answer in asked]
        rank.step()
        rank.land(*seqs)
        rank.run(seqs)
        assert [rank.tokens[seq] for seq in seqs] == [rank.expected(*each) for each in asked]
        # Two pages each; the second has all four when the first has ended.
        assert [max(drafts for drafts, _ in guesses.noted[seq]) for seq in seqs] == [5, 8]


def test_who_drafts_is_told_of_every_end():
    rank, guesses = make_rank(repeat(2), max_running=1)
    done, cancelled, waiting = (rank.submit(range(i, i + 4), 6) for i in range(3))
    rank.run([done])
    rank.step()
    rank.core.cancel(cancelled)
    rank.core.cancel(waiting)
    assert guesses.over == [done, cancelled, waiting]


def test_choices_are_kept_up_to_the_first_that_was_not_guessed(subtests):
    for drafts, chosen, kept in [
        ([], [4], [4]),
        ([4, 5], [4, 5, 6], [4, 5, 6]),
        ([4, 5], [4, 6, 7], [4, 6]),
        ([4, 5], [3, 5, 6], [3]),
    ]:
        with subtests.test(drafts=drafts, chosen=chosen, kept=kept):
            assert keep_accepted(drafts, [Sampled(token) for token in chosen]) == tuple(map(Sampled, kept))
