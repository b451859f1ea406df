"""These tests show who comes in when, and what a target for the time between tokens lets in."""

import pytest

from engine.paged.core_rank import CountingRunner, Prefill, Rank
from services.engine.fake import continuation
from services.engine.paged.admitting import Patience
from services.engine.paged.model_runner import RunnerFailed, Sampled
from services.engine.paged.sequence import Phase


def test_the_load_reports_how_fast_the_queue_moves(subtests):
    with subtests.test("the load says how fast those that wait come in"):
        rank = Rank(num_pages=64, max_running=1)
        seqs = [rank.submit([i, 1, 2], 5) for i in range(12)]
        assert rank.core.load().queue_wait_s == 0.0  # nothing is known yet
        rank.run(seqs[:6])
        began = rank.now
        foretold_s, load = rank.core.load().queue_wait_s, rank.core.load()
        assert load.waiting == 6
        rank.run(seqs[6:])
        assert foretold_s == pytest.approx(rank.now - began, rel=0.5)
        assert rank.core.load().admitted_per_s == 0.0  # nobody waits

    with subtests.test("those that leave the queue leave it empty"):
        rank = Rank(num_pages=64, max_running=1)
        seqs = [rank.submit([i, 1, 2], 5) for i in range(8)]
        rank.run(seqs[:6])
        assert rank.core.load().admitted_per_s > 0
        for seq in seqs[6:]:
            rank.core.cancel(seq)
        assert rank.core.load().admitted_per_s == 0.0


def test_small_ones_pass_a_large_one_and_do_not_starve_it(subtests):
    with subtests.test("a small one does not wait behind one that does not fit"):
        rank = Rank(num_pages=10, page_size=4)
        running = rank.submit(range(16), 12)
        rank.step()
        large = rank.submit(range(100, 130), 2)
        small = rank.submit([1, 2], 2)
        rank.step()
        assert large.phase is Phase.WAITING and small.phase is not Phase.WAITING
        assert rank.core.load().overtakes == 1
        rank.run([running, large, small])

    with subtests.test("a small one behind the window is not overlooked"):
        rank = Rank(num_pages=10, page_size=4, patience=Patience(overtakes=2, wait_s=1e9, window=3))
        running = rank.submit(range(16), 12)
        rank.step()
        large = [rank.submit(range(100 + i, 130 + i), 2) for i in range(5)]
        small = [rank.submit([1, i], 2) for i in range(4)]
        rank.run(small[:2])
        assert running not in rank.finished
        assert [seq.phase for seq in (*large, *small[2:])] == [Phase.WAITING] * 7  # overtaken often enough
        rank.run([running, *large, *small])

    with subtests.test("those that come in small do not starve a large one"):
        patience = Patience(overtakes=4, wait_s=1e9)
        rank = Rank(num_pages=10, page_size=4, patience=patience)
        running = [rank.submit([i, i + 1], 6) for i in range(4)]
        rank.step()
        large = rank.submit(range(100, 136), 2)
        number = 0
        while large not in rank.finished:
            number += 1
            running.append(rank.submit([200 + number, number], 6))
            rank.step()
            assert large.overtaken <= 4
            assert number < 60
        assert rank.core.load().overtakes == 4


def test_what_is_shared_is_counted_once(subtests):
    with subtests.test("those who share what is running come in first"):
        rank = Rank(num_pages=64, page_size=4, max_running=2)
        prefix = list(range(40, 56))
        first = rank.submit([*prefix, 1], 12)
        other = rank.submit([9, 9], 3)
        while len(rank.tokens.get(first, ())) < 1:
            rank.step()
        stranger = rank.submit([8, 8, 8], 3)
        mate = rank.submit([*prefix, 2], 3)
        rank.run([first, other, stranger, mate])
        order = list(rank.finished)
        assert order.index(mate) < order.index(stranger)

    with subtests.test("those who share a cached prefix come in together"):
        # It ceases to be evictable once, with the first of them.
        rank = Rank(num_pages=40, page_size=4, expected_output=0.0)
        prefix = list(range(33 * 4))
        rank.run([rank.submit([*prefix, 1], 1)])
        assert rank.core.cache.books().cached == 33
        mates = [rank.submit([*prefix, *[100 + i] * 10], 2, receives=True) for i in range(2)]
        rank.step()
        assert [seq.phase for seq in mates] == [Phase.RECEIVING] * 2

    with subtests.test("pages that were freed for anothers let the next one in"):
        rank = Rank(num_pages=26, page_size=4, chunk_size=64, expected_output=0.0)
        prompt = list(range(50, 91))
        sharing = [rank.submit(prompt, 40) for _ in range(2)]  # 11 pages each, 10 of them the same
        waiting = rank.submit(range(200, 216), 2)
        rank.step()
        assert waiting.phase is Phase.WAITING
        rank.step()
        rank.step()
        assert waiting.phase is not Phase.WAITING
        rank.run([*sharing, waiting])


def test_the_order_in_which_prompts_are_computed(subtests):
    for transfers in [True, False]:
        with subtests.test(
            "who has priority is computed before those who came in earlier", transfers=transfers
        ):
            rank = Rank(num_pages=4000, page_size=4, chunk_size=8, max_running=64)
            low = [rank.submit([i + 1] * 82, 5, transfer_id=i if transfers else None) for i in range(20)]
            rank.step()
            high = rank.submit(range(300, 308), 5, transfer_id=99 if transfers else None, priority=100)
            rank.step()
            assert high in rank.tokens
            rank.run([*low, high])
            first_tokens = list(rank.tokens)
            assert first_tokens == [high, *low]

    with subtests.test("who was overtaken is computed before those who came in meanwhile"):
        # A retracted sequence, too, finds its place again.
        rank = Rank(num_pages=30, page_size=4, chunk_size=4, expected_output=0.0, shorter_first=0.0)
        running = rank.submit(range(100, 156), 9)
        while running not in rank.tokens:
            rank.step()
        large = rank.submit(range(200, 264), 1)  # 16 pages where there are 15
        small = [rank.submit(range(300 + 50 * i, 320 + 50 * i), 1) for i in range(2)]
        rank.step()
        assert small[0].phase is Phase.COMPUTING and large.phase is Phase.WAITING
        rank.core.cancel(running)
        rank.run([large, *small])
        assert list(rank.tokens) == [running, large, *small]


def test_a_target_for_the_time_between_tokens(subtests):
    with subtests.test("a target for the time between tokens bounds the batch"):
        # A step takes 1 ms and another for each sequence.
        rank = Rank(num_pages=64, page_size=4, max_running=32, itl_target_s=0.0085)

        class Timed(CountingRunner):
            def run(self, chunks):
                rank.now += 0.001 * len(chunks)  # the clock's own tick is the fixed part
                return super().run(chunks)

        rank.core.runner = Timed(rank)
        seqs = [rank.submit([i, i + 1], 40) for i in range(20)]
        batches = []
        while len(rank.finished) < len(seqs):
            rank.step()
            batches.append(rank.core.load().running)
        assert max(batches) == 7
        assert batches.count(7) > len(batches) / 2

    with subtests.test("a target does not hold off those whose prefill takes its time"):
        # Few decode, for few have landed: that is no reason to let few receive.
        rank = Rank(num_pages=256, page_size=4, max_running=32, itl_target_s=0.0125)
        prefill = Prefill(rank.runner)

        class Timed(CountingRunner):
            def run(self, chunks):
                rank.now += 0.001 * len(chunks)
                return super().run(chunks)

        rank.core.runner = Timed(rank)
        seqs = [rank.submit([i, i + 1], 3, receives=True) for i in range(30)]
        receiving, decoding = [], []
        while len(rank.finished) < len(seqs):
            rank.step()
            flying = [seq for seq in seqs if seq.phase is Phase.RECEIVING]
            receiving.append(len(flying))
            decoding.append(rank.core.load().running - len(flying))
            for seq in flying[:1]:
                reserved = rank.reserved[seq]
                first = prefill.run(seq.ids, reserved.delta_pages, reserved.prefix_len)
                rank.core.landed(seq, Sampled(first))
        assert max(decoding) <= 3
        assert 8 <= max(receiving) <= 11  # a batch of 11 takes 12 ms

    with subtests.test("a target bounds prompt chunks beside tokens but prompts are done"):
        rank = Rank(num_pages=256, page_size=4, chunk_size=256, itl_target_s=0.010)
        sizes = []

        class Timed(CountingRunner):
            def run(self, chunks):
                tokens = [len(chunk.token_ids) for chunk in chunks]
                sizes.append(sum(size for size in tokens if size > 1))
                rank.now += 0.0001 * sum(tokens)
                return super().run(chunks)

        rank.core.runner = Timed(rank)
        decoding = rank.submit([1, 2], 200)
        warm = rank.submit(range(200, 300), 1)
        rank.run([warm])
        del sizes[:]
        prompt = rank.submit([i % 500 for i in range(700)], 1)
        rank.run([prompt])
        assert all(16 <= size <= 100 for size in sizes if size)
        assert rank.tokens[prompt] == continuation(prompt.request.prompt_ids, 1)
        rank.run([decoding])


def test_who_waits_for_pages_is_matched_again_only_when_there_are_more(monkeypatch):
    """A long prompt takes longer to match than a step; those that decode would feel it at every token."""
    rank = Rank(num_pages=10, page_size=4)
    running = rank.submit(range(4), 20)
    rank.step()
    waiting = rank.submit(range(100, 134), 2)
    looks = []
    look_up = rank.core.cache.look_up
    monkeypatch.setattr(rank.core.cache, "look_up", lambda *args: looks.append(1) or look_up(*args))
    for _ in range(10):
        rank.step()
    assert waiting.phase is Phase.WAITING
    assert len(looks) == 1
    rank.run([running, waiting])
    assert rank.tokens[waiting] == continuation(range(100, 134), 2)


def land(rank, seq):
    """As a prefill rank and its transfer do."""
    reserved = rank.reserved[seq]
    first = Prefill(rank.runner).run(seq.ids, reserved.delta_pages, reserved.prefix_len)
    rank.core.landed(seq, Sampled(first))
    rank.take()


def test_places_of_those_that_receive(subtests):
    with subtests.test("who receives takes nobodys place and waits for one when it has landed"):
        rank = Rank(num_pages=64, max_running=2)
        receiving = [rank.submit([i, 1, 2], 3, receives=True) for i in range(2)]
        rank.step()
        local = [rank.submit([10 + i, 1, 2], 6) for i in range(4)]
        rank.step()
        assert [seq.phase for seq in local] == [Phase.DECODING] * 2 + [Phase.WAITING] * 2
        for seq in receiving:
            land(rank, seq)
        assert [seq.phase for seq in receiving] == [Phase.LANDED] * 2 and not rank.tokens.get(receiving[0])
        for seq in local[:2]:
            rank.core.cancel(seq)
        rank.step()
        # Before those that are new; what they say is what they would have said at once.
        assert [seq.phase for seq in receiving] == [Phase.DECODING] * 2
        assert [seq.phase for seq in local[2:]] == [Phase.WAITING] * 2
        rank.run([*receiving, *local[2:]])
        for seq in receiving:
            assert rank.tokens[seq] == continuation(seq.request.prompt_ids, 3)
        assert rank.core.check().free + rank.core.check().cached == 64

    with subtests.test("no more come in to receive than could run unless they are overdue"):
        rank = Rank(num_pages=64, max_running=2, patience=Patience(overtakes=3, wait_s=10.0))
        first = [rank.submit([i, 1, 2], 3, receives=True) for i in range(4)]
        rank.step()
        assert [seq.phase for seq in first] == [Phase.RECEIVING] * 2 + [Phase.WAITING] * 2
        local = [rank.submit([10 + i, 1, 2], 2) for i in range(6)]
        for _ in range(10):
            rank.step()
        # Those that wait to receive were overtaken so often, and then by nobody any more ...
        assert sum(seq in rank.finished for seq in local) == 3
        rank.now += 10.0
        rank.submit([50], 1)  # something happens there
        rank.step()
        # ... until those that received before them were given up hope of.
        assert [seq.phase for seq in first] == [Phase.RECEIVING] * 4
        rank.run(local)


def test_one_that_has_landed_beside_those_that_need_its_pages(subtests):
    with subtests.test("one that has landed gives its pages to who runs and still says all"):
        # It came last; the one place is taken, and whoever has it needs its pages.
        rank = Rank(num_pages=7, page_size=4, max_running=1, expected_output=0.0)
        running, late = rank.submit(range(7), 16), rank.submit(range(100, 111), 6, receives=True)
        rank.let_run(2)
        rank.step()
        rank.let_run(1)
        land(rank, late)
        assert late.phase is Phase.LANDED
        rank.run([running, late])
        assert late.retractions == 1
        assert rank.tokens[running] == continuation(range(7), 16)
        assert rank.tokens[late] == continuation(range(100, 111), 6)

    with subtests.test("one that has landed with its only token ends where its pages are needed"):
        rank = Rank(num_pages=7, page_size=4, max_running=1, expected_output=0.0)
        running, late = rank.submit(range(7), 16), rank.submit(range(100, 111), 1, receives=True)
        rank.let_run(2)
        rank.step()
        rank.let_run(1)
        land(rank, late)
        rank.run([late])
        assert running not in rank.finished and late.retractions == 0
        assert rank.tokens[late] == continuation(range(100, 111), 1)
        rank.run([running])

    with subtests.test("a failed step takes nothing from one that has landed"):
        rank = Rank(num_pages=64, max_running=1)
        receiving = rank.submit([1, 2, 3], 3, receives=True)
        rank.step()
        local = rank.submit([4, 5, 6], 5)
        rank.step()
        land(rank, receiving)
        rank.runner_fails = True
        with pytest.raises(RunnerFailed):
            rank.step()
        rank.runner_fails = False
        assert rank.core.fail_active() == [local]
        rank.run([receiving])
        assert rank.tokens[receiving] == continuation([1, 2, 3], 3)
