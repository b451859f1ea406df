"""Where a core keeps resume points, and what they save."""

import pytest

from engine.paged.core_rank import Prefill, Rank
from services.engine.fake import fake_state, fake_window
from services.engine.paged import carrying
from services.engine.paged.queue.admission import Patience
from services.engine.paged.runner import RunnerFailed, Sampled
from services.engine.paged.sequence import Phase
from services.kv.carried.borders import shared_border

CARRIED = [(fake_state(),), (fake_window(6),), (fake_window(3), fake_state())]


@pytest.fixture(params=CARRIED, ids=["state", "window", "both"])
def rank(request):
    return Rank(num_pages=64, chunk_size=8, carried=request.param)


def computed_by(rank, seq):
    before = rank.computed_tokens
    rank.run([seq])
    return rank.computed_tokens - before


def points(rank):
    return sorted(point.position for point in rank.core.carried.points)


def test_a_turn_is_computed_from_the_end_of_the_answer_before_it(rank):
    first = rank.submit(range(10), 8)
    rank.run([first])
    assert points(rank) == [8, 16]  # the prompt's last border, and the answer's: 17 tokens have K and V
    turn = [*range(10), *rank.tokens[first], 70, 71]
    second = rank.submit(turn, 1)
    assert computed_by(rank, second) == len(turn) - 16
    assert rank.tokens[second] == rank.expected(turn, 1)


def test_what_attention_has_beyond_the_resume_point_is_computed_and_not_stored(rank):
    rank.run([rank.submit(range(23), 1)])
    while rank.core.carried.points.evict():
        pass
    second = rank.submit(range(22), 1)
    assert computed_by(rank, second) == 22
    assert second.reused_tokens == 0
    assert rank.tokens[second] == rank.expected(range(22), 1)


def test_a_prefill_rank_offers_what_it_holds_at_once_and_what_is_carried_last(rank):
    rank.run([rank.submit(range(23), 1)])
    while rank.core.carried.points.evict():
        pass
    seq = rank.submit(range(23), room=1)
    rank.step()
    assert (rank.offered[seq][0].start_token, rank.offered[seq][0].end_token) == (0, 20)
    assert seq not in rank.carried
    rank.run([seq])
    assert [(o.start_token, o.end_token) for o in rank.offered[seq][1:]] == [(20, 23)]
    rank.check_room(seq)
    assert rank.core.carried.num_open == 1  # its units stay for the room
    rank.core.room_ended(seq)
    assert rank.core.carried.num_open == 0


def test_prompts_whose_rooms_are_read_slowly_take_what_they_hold_and_no_more():
    rank = Rank(num_pages=64, carried=(fake_state(),), room_for=6)
    seqs = [rank.submit([i] * 6, room=i + 1) for i in range(8)]
    for _ in range(20):
        rank.step()
    computed = [seq for seq in seqs if seq in rank.carried]
    assert len(computed) == 6
    for seq in computed[:2]:
        rank.core.room_ended(seq)
    rank.run(seqs)
    assert all(seq in rank.carried for seq in seqs)


def test_where_prompts_branch_off_a_resume_point_is_kept(rank):
    rank.run([rank.submit(range(30), 1)])
    rank.run([rank.submit([*range(14), 90, 91, 92], 1)])
    third = rank.submit([*range(14), 95, 96], 1)
    assert computed_by(rank, third) == 16 - 12
    assert rank.tokens[third] == rank.expected([*range(14), 95, 96], 1)


def test_of_prompts_that_come_at_once_the_first_computes_what_they_share(rank):
    shared = range(20)
    seqs = [rank.submit([*shared, 50 + i, 60 + i], 1) for i in range(4)]
    rank.run(seqs)
    assert rank.computed_tokens == 22 + 3 * 2
    assert [rank.tokens[seq] for seq in seqs] == [rank.expected(seq.request.prompt_ids, 1) for seq in seqs]


def test_prompts_that_differ_for_longer_than_a_block_wait_for_what_they_share(rank):
    seqs = [rank.submit([*range(20), *range(100 + 20 * i, 110 + 20 * i)], 1) for i in range(4)]
    rank.run(seqs)
    assert rank.computed_tokens == 30 + 3 * 10
    assert [rank.tokens[seq] for seq in seqs] == [rank.expected(seq.request.prompt_ids, 1) for seq in seqs]


def test_who_comes_later_and_goes_first_computes_what_both_share(rank):
    later = rank.submit([*range(20), 50, 51, 52, 53, 54, 55], 1)
    rank.step()  # 8 of them
    first = rank.submit([*range(20), 60, 61, 62, 63, 64, 65], 1, priority=1)
    rank.run([first, later])
    assert rank.computed_tokens == 8 + 26 + 6  # at 8 there is no point
    assert rank.tokens[later] == rank.expected(later.request.prompt_ids, 1)


def test_nobody_waits_for_a_point_of_another_salt(rank):
    one, same, other = (rank.submit(range(23), 1, cache_salt=salt) for salt in ("a", "a", "b"))
    rank.limit(chunk_size=64)
    rank.step()
    assert (one.computed, same.computed, other.computed) == (20, 0, 20)
    rank.run([one, same, other])
    assert rank.tokens[other] == rank.expected(range(23), 1)


def test_what_many_prompts_share_is_compared_once(rank, monkeypatch):
    compared = []

    def counting(ids, other, block, known=0):
        border = shared_border(ids, other, block, known)
        compared.append((border - known) // block + 1)
        return border

    monkeypatch.setattr(carrying, "shared_border", counting)
    rank = Rank(num_pages=64, chunk_size=8, carried=rank.groups, room_for=16)
    seqs = [rank.submit([*range(24), *range(100 + 20 * i, 110 + 20 * i)], 1) for i in range(6)]
    rank.run(seqs)
    pairs = 6 * 5 // 2
    assert (len(compared), sum(compared)) == (pairs, pairs + 5 * 6)  # six blocks, once for each newcomer


def test_who_has_ended_is_known_to_nobody(rank):
    seqs = [rank.submit([*range(20), 50 + i], 3) for i in range(3)]
    rank.step()
    assert all(len(seq.common) == 2 for seq in seqs)
    rank.core.cancel(seqs[0])
    assert [list(seq.common) for seq in seqs] == [[], [seqs[2]], [seqs[1]]]


def test_one_that_waits_for_anothers_point_goes_on_when_that_is_aborted(rank):
    shared = range(20)
    first, second = (rank.submit([*shared, 50 + i], 3) for i in range(2))
    rank.step()
    rank.core.cancel(first)
    rank.run([second])
    assert rank.tokens[second] == rank.expected(second.request.prompt_ids, 3)


def test_what_came_by_wire_is_gone_on_from_and_kept_at_the_answers_end(rank):
    prompt = list(range(40, 53))
    seq = rank.submit(prompt, 8, receives=True)
    rank.step()
    reserved = rank.reserved[seq]
    first = Prefill(rank.runner).run(prompt, reserved.delta_pages, reserved.prefix_len, reserved.carried)
    rank.core.landed(seq, Sampled(first))
    assert computed_by(rank, seq) == 7
    assert rank.tokens[seq] == rank.expected(prompt, 8)
    assert points(rank) == [20]


def test_who_waits_lacks_pages_for_what_attention_has_not_and_computes_from_the_resume_point(rank):
    """Who receives needs no point."""
    rank.run([rank.submit(range(23), 1)])
    rank.let_run(0)
    loads = []

    def wait(receives):
        rank.submit([*range(20), 50, 51, 52], 1, receives=receives)
        loads.append(rank.core.load())

    wait(receives=False)
    while rank.core.carried.points.evict():
        pass
    wait(receives=True)
    wait(receives=False)
    assert [load.waiting_tokens for load in loads] == [3, 6, 9]
    assert [load.pending_tokens for load in loads] == [3, 3, 3 + 23]


def test_a_full_hit_receives_what_is_carried_too(rank):
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


def test_a_retracted_sequence_goes_on_from_the_last_border_it_passed():
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


@pytest.mark.parametrize(("receives", "waiting"), [(True, 1), (False, 3)])
def test_no_more_come_in_than_there_are_states_for(receives, waiting):
    """One to go on at for each; those that compute take room for as many resume points, too."""
    rank = Rank(num_pages=64, carried=(fake_state(),), room_for=4)
    seqs = [rank.submit([i] * 6, 4, receives=receives) for i in range(5)]
    rank.step()
    assert sum(seq.phase is Phase.WAITING for seq in seqs) == waiting
    if not receives:
        rank.run(seqs)


def test_who_has_no_room_to_compute_is_passed_by_those_that_receive_as_often_as_others_are():
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


def test_what_one_has_saved_is_given_up_for_one_that_comes_in():
    """Both answers are right; only the one that kept what it saved leaves a resume point."""
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


def test_a_failed_step_leaves_no_chunk_behind_in_a_rooms_pages():
    rank = Rank(num_pages=64, chunk_size=12, carried=(fake_window(3),), room_for=6)
    for room in range(2):
        rank.submit(range(room, 30 + room), room=room)
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


def test_the_index_hears_of_resume_points_that_come_and_go(rank):
    rank.run([rank.submit(range(10), 1)])
    events = rank.core.take_cache_events()
    assert len(events.resumable_stored) == 1 and set(events.resumable_stored) <= set(events.stored)
    rank.core.carried.points.evict()
    assert rank.core.take_cache_events().resumable_removed == events.resumable_stored


def test_without_a_cache_nothing_is_kept():
    rank = Rank(num_pages=64, carried=(fake_window(3), fake_state()), cache=False)
    seq = rank.submit(range(23), 9)
    rank.run([seq])
    assert rank.tokens[seq] == rank.expected(range(23), 9)
    assert points(rank) == []
