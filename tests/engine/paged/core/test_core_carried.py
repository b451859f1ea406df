"""These tests show where a core keeps checkpoints, and what they save."""

import pytest

from engine.paged.core_rank import Prefill, Rank
from services.engine.fake import fake_state, fake_window
from services.engine.paged import carrying
from services.engine.paged.admitting import Patience
from services.engine.paged.model_runner import RunnerFailed, Sampled
from services.engine.paged.sequence import Phase
from services.kv.checkpoints import shared_border

CARRIED = [(fake_state(),), (fake_window(6),), (fake_window(3), fake_state())]


def small_rank(carried):
    return Rank(num_pages=64, chunk_size=8, carried=carried)


def computed_by(rank, seq):
    before = rank.computed_tokens
    rank.run([seq])
    return rank.computed_tokens - before


def points(rank):
    return sorted(point.position for point in rank.core.carried.points)


def test_what_is_computed_again_and_what_is_not(subtests):
    for carried in CARRIED:
        with subtests.test("a turn is computed from the end of the answer before it", carried=carried):
            rank = small_rank(carried)
            first = rank.submit(range(10), 8)
            rank.run([first])
            assert points(rank) == [
                8,
                16,
            ]  # the prompt's last border, and the answer's: 17 tokens have K and V
            turn = [*range(10), *rank.tokens[first], 70, 71]
            second = rank.submit(turn, 1)
            assert computed_by(rank, second) == len(turn) - 16
            assert rank.tokens[second] == rank.expected(turn, 1)

    for carried in CARRIED:
        with subtests.test(
            "what attention has beyond the checkpoint is computed and not stored", carried=carried
        ):
            rank = small_rank(carried)
            rank.run([rank.submit(range(23), 1)])
            while rank.core.carried.points.evict():
                pass
            second = rank.submit(range(22), 1)
            assert computed_by(rank, second) == 22
            assert second.reused_tokens == 0
            assert rank.tokens[second] == rank.expected(range(22), 1)

    for carried in CARRIED:
        with subtests.test("where prompts branch off a checkpoint is kept", carried=carried):
            rank = small_rank(carried)
            rank.run([rank.submit(range(30), 1)])
            rank.run([rank.submit([*range(14), 90, 91, 92], 1)])
            third = rank.submit([*range(14), 95, 96], 1)
            assert computed_by(rank, third) == 16 - 12
            assert rank.tokens[third] == rank.expected([*range(14), 95, 96], 1)

    for carried in CARRIED:
        with subtests.test("the index hears of checkpoints that come and go", carried=carried):
            rank = small_rank(carried)
            rank.run([rank.submit(range(10), 1)])
            events = rank.core.take_cache_events()
            assert len(events.resumable_stored) == 1 and set(events.resumable_stored) <= set(events.stored)
            rank.core.carried.points.evict()
            assert rank.core.take_cache_events().resumable_removed == events.resumable_stored

    with subtests.test("a long prompt keeps a checkpoint every eight chunks"):
        rank = small_rank((fake_state(),))
        rank.run([rank.submit(range(150), 1)])
        assert points(rank) == [64, 128, 148]


def test_transfers_hold_their_units_until_they_are_read(subtests):
    for carried in CARRIED:
        with subtests.test(
            "a prefill rank offers what it holds at once and what is carried last", carried=carried
        ):
            rank = small_rank(carried)
            rank.run([rank.submit(range(23), 1)])
            while rank.core.carried.points.evict():
                pass
            seq = rank.submit(range(23), transfer_id=1)
            rank.step()
            assert (rank.offered[seq][0].start_token, rank.offered[seq][0].end_token) == (0, 20)
            assert seq not in rank.carried
            rank.run([seq])
            assert [(o.start_token, o.end_token) for o in rank.offered[seq][1:]] == [(20, 23)]
            rank.check_transfer(seq)
            assert rank.core.carried.num_open == 1  # its units stay for the transfer
            rank.core.transfer_ended(seq)
            assert rank.core.carried.num_open == 0

    with subtests.test("prompts whose transfers are read slowly take what they hold and no more"):
        rank = Rank(num_pages=64, carried=(fake_state(),), room_for=6)
        seqs = [rank.submit([i] * 6, transfer_id=i + 1) for i in range(8)]
        for _ in range(20):
            rank.step()
        computed = [seq for seq in seqs if seq in rank.carried]
        assert len(computed) == 6
        for seq in computed[:2]:
            rank.core.transfer_ended(seq)
        rank.run(seqs)
        assert all(seq in rank.carried for seq in seqs)

    with subtests.test("a failed step leaves no chunk behind in a transfers pages"):
        rank = Rank(num_pages=64, chunk_size=12, carried=(fake_window(3),), room_for=6)
        for transfer_id in range(2):
            rank.submit(range(transfer_id, 30 + transfer_id), transfer_id=transfer_id)
            rank.runner_fails = True
            with pytest.raises(RunnerFailed):
                rank.core.step()
            rank.core.fail_active()
            rank.core.check()
        rank.runner_fails = False
        assert rank.core.carried.num_open == 2
        seq = rank.submit(range(50, 80), 1)
        rank.step()
        assert seq.computed == 12
        rank.run([seq])


def test_prompts_that_come_at_once(subtests):
    for carried in CARRIED:
        with subtests.test(
            "of prompts that come at once the first computes what they share", carried=carried
        ):
            rank = small_rank(carried)
            shared = range(20)
            seqs = [rank.submit([*shared, 50 + i, 60 + i], 1) for i in range(4)]
            rank.run(seqs)
            assert rank.computed_tokens == 22 + 3 * 2
            assert [rank.tokens[seq] for seq in seqs] == [
                rank.expected(seq.request.prompt_ids, 1) for seq in seqs
            ]

    for carried in CARRIED:
        with subtests.test(
            "prompts that differ for longer than a block wait for what they share", carried=carried
        ):
            rank = small_rank(carried)
            seqs = [rank.submit([*range(20), *range(100 + 20 * i, 110 + 20 * i)], 1) for i in range(4)]
            rank.run(seqs)
            assert rank.computed_tokens == 30 + 3 * 10
            assert [rank.tokens[seq] for seq in seqs] == [
                rank.expected(seq.request.prompt_ids, 1) for seq in seqs
            ]

    for carried in CARRIED:
        with subtests.test("who comes later and goes first computes what both share", carried=carried):
            rank = small_rank(carried)
            later = rank.submit([*range(20), 50, 51, 52, 53, 54, 55], 1)
            rank.step()  # 8 of them
            first = rank.submit([*range(20), 60, 61, 62, 63, 64, 65], 1, priority=1)
            rank.run([first, later])
            assert rank.computed_tokens == 8 + 26 + 6  # at 8 there is no point
            assert rank.tokens[later] == rank.expected(later.request.prompt_ids, 1)

    for carried in CARRIED:
        with subtests.test("nobody waits for one that is past what both share", carried=carried):
            rank = Rank(num_pages=2000, chunk_size=64, carried=carried, block_pages=4)
            shared = range(200)
            long = rank.submit([*shared, *(3 * number % 500 for number in range(3000))], 1)
            for _ in range(5):
                rank.step()
            short = rank.submit([*shared, *range(300, 500), *range(400)], 1)
            assert (long.computed > 200, short.in_common) == (True, 192)
            steps = 0
            while short not in rank.finished:
                rank.step()
                steps += 1
            assert steps <= 1 + -(-len(short.ids) // 64)
            rank.run([long])

    for carried in CARRIED:
        with subtests.test("nobody waits for a point of another salt", carried=carried):
            rank = small_rank(carried)
            one, same, other = (rank.submit(range(23), 1, cache_salt=salt) for salt in ("a", "a", "b"))
            rank.limit(chunk_size=64)
            rank.step()
            assert (one.computed, same.computed, other.computed) == (20, 0, 20)
            rank.run([one, same, other])
            assert rank.tokens[other] == rank.expected(range(23), 1)

    for carried in CARRIED:
        with (
            subtests.test("what many prompts share is compared once", carried=carried),
            pytest.MonkeyPatch.context() as monkeypatch,
        ):
            rank = small_rank(carried)
            compared = []

            def counting(ids, other, block, known=0, compared=compared):
                border = shared_border(ids, other, block, known)
                compared.append((border - known) // block + 1)
                return border

            monkeypatch.setattr(carrying, "shared_border", counting)
            rank = Rank(num_pages=64, chunk_size=8, carried=rank.groups, room_for=16)
            seqs = [rank.submit([*range(24), *range(100 + 20 * i, 110 + 20 * i)], 1) for i in range(6)]
            rank.run(seqs)
            pairs = 6 * 5 // 2
            assert (len(compared), sum(compared)) == (
                pairs,
                pairs + 5 * 6,
            )  # six blocks, once for each newcomer


def test_those_who_leave_hold_nobody_up(subtests):
    for carried in CARRIED:
        with subtests.test("who has ended is known to nobody", carried=carried):
            rank = small_rank(carried)
            seqs = [rank.submit([*range(20), 50 + i], 3) for i in range(3)]
            rank.step()
            assert all(len(seq.common) == 2 for seq in seqs)
            rank.core.cancel(seqs[0])
            assert [list(seq.common) for seq in seqs] == [[], [seqs[2]], [seqs[1]]]

    for carried in CARRIED:
        with subtests.test("one that waits for anothers point goes on when that is aborted", carried=carried):
            rank = small_rank(carried)
            shared = range(20)
            first, second = (rank.submit([*shared, 50 + i], 3) for i in range(2))
            rank.step()
            rank.core.cancel(first)
            rank.run([second])
            assert rank.tokens[second] == rank.expected(second.request.prompt_ids, 3)


def test_what_comes_by_wire(subtests):
    for carried in CARRIED:
        with subtests.test("what came by wire is gone on from and kept at the answers end", carried=carried):
            rank = small_rank(carried)
            prompt = list(range(40, 53))
            seq = rank.submit(prompt, 8, receives=True)
            rank.step()
            reserved = rank.reserved[seq]
            first = Prefill(rank.runner).run(
                prompt, reserved.delta_pages, reserved.prefix_len, reserved.carried
            )
            rank.core.landed(seq, Sampled(first))
            assert computed_by(rank, seq) == 7
            assert rank.tokens[seq] == rank.expected(prompt, 8)
            assert points(rank) == [20]

    for carried in CARRIED:
        with subtests.test("a full hit receives what is carried too", carried=carried):
            rank = small_rank(carried)
            prompt = list(range(16))
            rank.run([rank.submit([*prompt, 99], 1)])
            seq = rank.submit(prompt, 4, receives=True)
            rank.step()
            reserved = rank.reserved[seq]
            assert (reserved.prefix_len, reserved.delta_pages) == (16, ())
            assert all(reserved.carried)
            first = Prefill(rank.runner).run(prompt, (), 16, reserved.carried)
            rank.core.landed(seq, Sampled(first))
            rank.run([seq])
            assert rank.tokens[seq] == rank.expected(prompt, 4)


def test_who_waits_lacks_pages_for_what_attention_has_not_and_computes_from_the_checkpoint(subtests):
    """Who receives needs no point."""
    for carried in CARRIED:
        with subtests.test(carried=carried):
            rank = small_rank(carried)
            rank.run([rank.submit(range(23), 1)])
            rank.let_run(0)
            loads = []

            def wait(receives, rank=rank, loads=loads):
                rank.submit([*range(20), 50, 51, 52], 1, receives=receives)
                loads.append(rank.core.load())

            wait(receives=False)
            while rank.core.carried.points.evict():
                pass
            wait(receives=True)
            wait(receives=False)
            assert [load.waiting_tokens for load in loads] == [3, 6, 9]
            assert [load.pending_tokens for load in loads] == [3, 3, 3 + 23]


def test_a_retracted_sequence_and_one_without_a_cache(subtests):
    with subtests.test("a retracted sequence goes on from the last border it passed"):
        rank = Rank(num_pages=12, chunk_size=8, carried=(fake_state(),), expected_output=0.0)
        prompts = [[0] * 7, [1] * 5]
        seqs = [rank.submit(prompt, 26) for prompt in prompts]
        while not rank.core.retractions:
            rank.step()
        retracted = next(seq for seq in seqs if seq.phase is Phase.WAITING)
        assert rank.core.carried.num_open == 1
        passed = (len(retracted.ids) - 1) // 4 * 4
        assert passed in points(rank)
        rank.run(seqs)
        assert [rank.tokens[seq] for seq in seqs] == [rank.expected(prompt, 26) for prompt in prompts]

    with subtests.test("without a cache nothing is kept"):
        rank = Rank(num_pages=64, carried=(fake_window(3), fake_state()), cache=False)
        seq = rank.submit(range(23), 9)
        rank.run([seq])
        assert rank.tokens[seq] == rank.expected(range(23), 9)
        assert points(rank) == []


def test_who_comes_in_where_states_are_few(subtests):
    for receives, waiting in [(True, 1), (False, 3)]:
        with subtests.test("no more come in than there are states for", receives=receives, waiting=waiting):
            # One to go on at for each; those that compute take room for as many checkpoints, too.
            rank = Rank(num_pages=64, carried=(fake_state(),), room_for=4)
            seqs = [rank.submit([i] * 6, 4, receives=receives) for i in range(5)]
            rank.step()
            assert sum(seq.phase is Phase.WAITING for seq in seqs) == waiting
            if not receives:
                rank.run(seqs)

    with subtests.test("who has no room to compute is passed by those that receive as often as others are"):
        rank = Rank(num_pages=64, carried=(fake_state(),), room_for=4, patience=Patience(1, 1e9))
        receiving = [rank.submit([i] * 6, 2, receives=True) for i in range(3)]
        rank.step()
        computes = rank.submit([3] * 6, 2)
        receiving += [rank.submit([i] * 6, 2, receives=True) for i in (4, 5)]
        rank.step()
        assert [seq.phase for seq in (computes, *receiving[3:])] == [
            Phase.WAITING,
            Phase.RECEIVING,
            Phase.WAITING,
        ]
        for seq in receiving[:2]:
            rank.core.cancel(seq)
        rank.step()
        assert (computes.phase, receiving[4].phase) == (Phase.COMPUTING, Phase.WAITING)
        rank.run([computes])
        rank.step()
        assert receiving[4].phase is Phase.RECEIVING

    with subtests.test("what one has saved is given up for one that comes in"):
        # Both answers are right; only the one that kept what it saved leaves a checkpoint.
        rank = Rank(num_pages=64, carried=(fake_state(),), room_for=3)
        prompts = [[i] * 8 for i in range(3)]
        seqs = [rank.submit(prompts[i], 6, receives=True) for i in (0, 1)]
        rank.step()
        rank.land(*seqs)
        rank.step()
        assert [seq.carried.saved is None for seq in seqs] == [False, True]  # there are three states
        seqs.append(rank.submit(prompts[2], 6, receives=True))
        rank.step()
        assert seqs[0].carried.saved is None
        rank.land(seqs[2])
        rank.run(seqs)
        assert [rank.tokens[seq] for seq in seqs] == [rank.expected(prompt, 6) for prompt in prompts]
