"""Growth, retraction and what a sequence owes when it comes in again: exact, and the books balance."""

from engine.paged.core_rank import Rank
from services.engine.fake import continuation
from services.engine.paged.sequence import Phase


def test_who_is_retracted_and_who_never(subtests):
    with subtests.test("retraction goes on with the same tokens"):
        rank = Rank(num_pages=12, page_size=4)
        prompts = [[i, i + 1, i + 2] for i in range(3)]
        seqs = [rank.submit(p, 20) for p in prompts]
        rank.run(seqs)
        assert rank.core.retractions > 0
        for seq, prompt in zip(seqs, prompts, strict=True):
            assert rank.tokens[seq] == continuation(prompt, 20)

    with subtests.test("retractions die out"):
        # Each one lifts what is expected of the others, so newcomers wait: no two take turns for ever.
        rank = Rank(num_pages=16, page_size=2, max_running=16, expected_output=0.0)
        seqs = [rank.submit([i, i + 1], 24) for i in range(16)]
        rank.run(seqs, max_steps=2000)
        assert 0 < rank.core.retractions <= 3 * len(seqs)
        for i, seq in enumerate(seqs):
            assert rank.tokens[seq] == continuation([i, i + 1], 24)

    with subtests.test("a transfer that may be read is never retracted"):
        rank = Rank(num_pages=12, page_size=4, chunk_size=1, expected_output=0.0)
        growing = [rank.submit([i], 30) for i in range(2)]
        rank.step()
        transfer = rank.submit(
            range(100, 124), 1, transfer_id=7
        )  # the last to come, hence the first that would go
        rank.run([transfer])
        rank.core.transfer_ended(transfer)
        rank.run(growing)
        assert rank.core.retractions > 0
        assert transfer.retractions == 0
        spans = [(o.start_token, o.end_token) for o in rank.offered[transfer]]
        assert spans[0][0] == 0 and spans[-1][1] == 24

    with subtests.test("those of lower priority give way first"):
        rank = Rank(num_pages=12, page_size=4)
        low = [rank.submit([i, i + 1, i + 2], 20) for i in range(2)]
        high = rank.submit([9, 9, 9], 20, priority=1)
        rank.run([*low, high])
        assert rank.core.retractions > 0
        assert next(iter(rank.finished)) is high


def test_the_reserve_counts_what_will_be_given_back(subtests):
    with subtests.test("with enough kept back for growth nobody is retracted"):
        # Each one fits alone with all it may generate; how many do together is the reserve's to say.
        outcomes = {}
        for share in (0.0, 1.0):
            rank = Rank(num_pages=12, page_size=4, expected_output=share)
            prompts = [[i, i + 1, i + 2] for i in range(6)]
            seqs = [rank.submit(p, 20) for p in prompts]
            rank.run(seqs)
            assert [rank.tokens[seq] for seq in seqs] == [continuation(p, 20) for p in prompts]
            outcomes[share] = rank.core.retractions
        assert outcomes[0.0] > 0
        assert outcomes[1.0] == 0

    with subtests.test("the reserve counts what those who end earlier give back"):
        rank = Rank(num_pages=10, page_size=4, expected_output=1.0)
        ends_soon = rank.submit(range(15), 5)  # 5 pages at its end
        rank.step()
        # 8 pages at its end, which do not fit beside it, but it is not there any more by then.
        long = rank.submit(range(100, 107), 25)
        rank.step()
        assert long.phase is not Phase.WAITING
        rank.run([ends_soon, long])
        assert rank.core.retractions == 0

    with subtests.test("the reserve counts what a second turn gives back"):
        # Its own match is no sign that others hold its pages.
        rank = Rank(num_pages=12, page_size=4, expected_output=1.0)
        first = rank.submit(range(15), 2)
        rank.run([first])
        turn = rank.submit([*range(15), *rank.tokens[first], 7], 4)  # 6 pages at its end
        rank.step()
        long = rank.submit(range(100, 107), 35)  # 11 pages at its end
        rank.step()
        assert long.phase is not Phase.WAITING
        rank.run([turn, long])
        assert rank.core.retractions == 0

    with subtests.test("the reserve counts a prefix that was taken over as nobodys"):
        # While it is computed: nobody has matched it.
        rank = Rank(num_pages=20, page_size=4, expected_output=1.0)
        sharing = [
            rank.submit([*range(32), 100 + i], 6) for i in range(2)
        ]  # 12 pages at their ends, 8 shared
        while any(len(rank.tokens.get(seq, ())) < 2 for seq in sharing):
            rank.step()
        assert rank.core.cache.books().locked == 8
        growing = rank.core._gate._growing(sharing)
        assert [each.own_pages for each in growing] == [1, 1]


def test_what_a_retracted_sequence_owes_and_protects(subtests):
    with subtests.test("a retracted sequence computes again only what was evicted"):
        rank = Rank(num_pages=12, page_size=4, expected_output=0.0)
        seqs = [rank.submit([i] * 10, 20) for i in range(2)]
        rank.run(seqs)
        assert rank.core.retractions == seqs[1].retractions == 1
        # Retracted at 6 pages of 8, and the first needed two of them: no more was lost, nor computed again.
        recomputed = rank.computed_tokens - 2 * (10 + 19)
        assert 0 < recomputed <= 2 * 4
        assert [rank.tokens[s] for s in seqs] == [continuation([i] * 10, 20) for i in range(2)]

    with subtests.test("who comes in again after a retraction protects nothing"):
        # Nobody else has asked for its pages.
        rank = Rank(num_pages=12, page_size=4, expected_output=0.0)
        seqs = [rank.submit([i] * 10, 20) for i in range(2)]
        rank.run(seqs)
        assert seqs[1].retractions == 1
        assert not any(node.protected for node in rank.core.cache._tree.nodes())
        turn = rank.submit([1] * 10 + rank.tokens[seqs[1]] + [3], 1)
        rank.run([turn])
        protected = sum(node.protected for node in rank.core.cache._tree.nodes())
        assert 4 * protected == rank.reserved[turn].prefix_len > 0

    with subtests.test("who is retracted owes what the tree does not have"):
        rank = Rank(num_pages=12, page_size=4, expected_output=0.0)
        seqs = [rank.submit([i] * 10, 20) for i in range(2)]
        while rank.core.retractions == 0:
            rank.step()
        assert seqs[1].phase is Phase.WAITING
        cached = rank.core.cache.match_len(seqs[1].ids, "")
        assert 0 < cached < len(seqs[1].ids)
        assert rank.core.load().pending_tokens == len(seqs[1].ids) - cached
