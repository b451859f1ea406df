"""These tests show what is told of a request, and what is not."""

from dataclasses import replace
from itertools import pairwise

import pytest

from services.router.request.response_stream import finish_of
from services.router.watch_cluster import finished_request, running_request
from services.values.rank import Plan
from services.values.request import FinishReason
from services.wire.generation_messages import PackedIds


def told(progress, outcome="finished"):
    return finished_request(progress, outcome, duration_s=2.5, ended_at_s=1e9)


def test_a_running_request_says_how_far_it_is(subtests, requests, placed):
    with subtests.test("a running request says how far it is"):
        progress = requests.begin("r", tenant="a")
        waiting = running_request(progress, 103.0)
        assert (waiting.request_id, waiting.conversation_id, waiting.tenant) == ("r", "c", "a")
        assert (waiting.model, waiting.age_s) == ("m", 3.0)
        assert not waiting.HasField("decode") and not waiting.HasField("prefill")
        asked = progress.request
        progress.encoded(asked.encoded(PackedIds.of(range(9)), None, asked.sampling), 101.0)
        progress.output_ids, progress.placed = [1, 2], placed()
        running = running_request(progress, 103.0)
        assert (running.prompt_tokens, running.completion_tokens) == (9, 2)
        chosen = progress.placed.decision.chosen
        assert chosen.plan is Plan.REMOTE
        assert (running.decode.worker, running.decode.rank) == ("decode", chosen.decode.id.rank)
        assert running.prefill.worker == "prefill"
    with subtests.test("of several answers the tokens and calls of all are told"):
        progress = requests.begin("r", answers=3)
        progress.output_ids, progress.num_calls = [1, 2], 1
        progress.split()
        progress.others[1].output_ids, progress.others[1].num_calls = [3], 2
        running, finished = running_request(progress, 103.0), told(progress)
        assert (running.answers, running.completion_tokens) == (3, 3)
        assert (finished.answers, finished.completion_tokens, finished.tool_calls) == (3, 3, 3)


def test_how_it_ended(subtests, requests):
    for outcome, reason, told_as in [
        ("finished", FinishReason.STOP, "ok"),
        ("finished", FinishReason.ABORTED, "aborted"),
        ("cancelled", None, "aborted"),
        ("NoCapacity", None, "RESOURCE_EXHAUSTED"),
        ("DeadlineExceeded", None, "DEADLINE_EXCEEDED"),
        ("Internal", None, "INTERNAL"),
    ]:
        with subtests.test(outcome=outcome):
            progress = requests.begin("r", tenant="a", constraint="json_schema")
            progress.finish_reason, progress.num_calls = reason, 2
            finished = told(progress, outcome)
            assert (finished.outcome, finished.duration_s, finished.ended_at_s) == (told_as, 2.5, 1e9)
            assert (finished.tool_calls, finished.constraint, finished.tenant) == (2, "json_schema", "a")
            assert not finished.HasField("finish") and not finished.candidates


def test_its_finish_is_the_clients_without_what_was_said(requests, placed):
    progress = requests.begin("r")
    progress.placed = placed()
    progress.finish = finish_of(progress, FinishReason.STOP, "SECRET", 3)
    progress.finish.answer_id = "handle"
    shown = told(progress).finish
    assert progress.finish.matched_stop == "SECRET"  # the client's own is left as it was
    assert b"SECRET" not in shown.SerializeToString() and b"handle" not in shown.SerializeToString()
    expected = finish_of(progress, FinishReason.STOP, "", 3)
    assert shown == expected and shown.usage.drift_tokens == 3


def test_its_price_list_is_that_of_its_placement_and_ranks_without_a_price_come_last(
    subtests, requests, placed
):
    with subtests.test("its price list is that of its placement"):
        bytes_per_s = [1e9]
        progress = requests.begin("r")
        progress.placed = placed(bandwidth=lambda sender, receiver: bytes_per_s[0])
        bytes_per_s[0] = 1.0  # what a link is worth by now was not known then
        candidates = told(progress).candidates
        assert len(candidates) == 16
        totals = [candidate.total_s for candidate in candidates]
        assert totals == sorted(totals) and totals[-1] < 10.0
        (chosen,) = [candidate for candidate in candidates if candidate.chosen]
        assert chosen.total_s == progress.placed.decision.chosen.total_s
        assert all(sum(term.seconds for term in each.terms) == each.total_s for each in candidates)
    with subtests.test("ranks without a price come last"):
        progress = requests.begin("r")
        progress.placed = placed()
        decision = progress.placed.decision
        progress.placed = replace(
            progress.placed,
            decision=replace(decision, _compared=decision._compared[:3], chosen=decision.chosen),
        )
        candidates = told(progress).candidates
        assert candidates[-1].excluded == "draining" and not candidates[-1].terms
        assert not any(each.excluded for each in candidates[:-1])
        assert all(a.total_s <= b.total_s for a, b in pairwise(candidates[:-1]))


def test_the_choice_is_among_the_few_though_others_are_cheaper(requests, placed):
    progress = requests.begin("r")
    progress.placed = placed(pinned=39)
    chosen = progress.placed.decision.chosen
    cheaper = [each for each in progress.placed.decision.ranked if each.total_s < chosen.total_s]
    if len(cheaper) < 16:
        pytest.fail(f"the pin must cost something, or nothing is tested: {len(cheaper)}")
    candidates = told(progress).candidates
    assert len(candidates) == 16
    assert [each.chosen for each in candidates] == [False] * 15 + [True]
    assert candidates[-1].pinned and candidates[-1].decode.rank == 39
