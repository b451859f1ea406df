"""One answer's progress, by the verbs of its owner."""

import asyncio
from unittest.mock import MagicMock

from opentelemetry.trace import INVALID_SPAN

from services.router.request.client_request import ClientRequest
from services.router.request.progress import Progress
from services.values.rank import Generation, Plan, RankId
from services.values.request import Admitted, Output, SamplingParams

D0, D1 = (RankId("d", index, Generation(1)) for index in range(2))
ADMITTED = Admitted(9, 0, 0, 9, 0, 0, 0.0, 0.0, 0.0, 0.0, Plan.LOCAL)


def placed_at(rank):
    placed = MagicMock()
    placed.decision.chosen.decode.id = rank
    return placed


def begun(**fields):
    return Progress(ClientRequest("r", SamplingParams(seed=5), **fields), 100.0, INVALID_SPAN)


def generate(progress, rank, num_tokens, now):
    progress.attempt()
    progress.place(placed_at(rank))
    progress.routed(0.25)
    progress.own(MagicMock())
    progress.sent(now)
    progress.admit(ADMITTED)
    return progress.add_tokens(range(num_tokens), now + 1.0)


def test_a_placement_that_got_on_forgives_those_before_it():
    progress = begun()
    assert generate(progress, D0, 1, 101.0) is None  # its first token
    stream = progress.stream
    progress.fail(D0)
    progress.give_time()
    assert (progress.failures, progress.excluded, progress.gave_time) == (1, set(), True)
    progress.fail(D0)
    assert progress.withdraw() is not None
    stream.close.assert_called_once()
    assert (progress.failures, progress.excluded, progress.gave_time) == (2, {D0}, True)
    progress.outgrow(102.5)
    assert generate(progress, D1, 2, 103.0) == 2.0  # seconds after its first
    assert progress.outgrown_s is None
    progress.withdraw()
    assert (progress.failures, progress.excluded, progress.gave_time) == (0, set(), False)
    assert progress.withdraw() is None and progress.stream is None
    assert (progress.attempts, progress.route_s, progress.sent_s) == (2, 0.5, 3.0)
    assert (progress.first_token_s, progress.completion_tokens) == (2.0, 3)
    assert [served.first_output for served in progress.served] == [0, 1]


def test_drafts_count_where_they_were_verified():
    progress = begun()
    progress.add_drafts(Output(drafted_tokens=9, accepted_draft_tokens=9))  # nowhere yet
    for rank, drafted in ((D0, 3), (D1, 5)):
        generate(progress, rank, 1, 101.0)
        for _ in range(2):
            progress.add_drafts(Output(drafted_tokens=drafted, accepted_draft_tokens=2))
    assert [(each.drafted_tokens, each.accepted_draft_tokens) for each in progress.served] == [
        (6, 4),
        (10, 4),
    ]


async def test_answers_share_a_prompt_and_an_abort():
    progress = begun(answers=3)
    progress.split()
    first, second, third = progress.answers
    assert [each.request.index for each in progress.answers] == [0, 1, 2]
    assert len({each.request.sampling.seed for each in progress.answers}) == 3
    turns = first.turns
    assert turns.lead(0) and not turns.lead(1)
    generate(first, D0, 1, 101.0)
    assert turns.holders(()) == [D0]
    first.fail(D0)
    assert turns.holders(()) == [] and turns.lead(1)
    second.leave()
    assert turns.lead(2)
    waiting = asyncio.create_task(turns.changed(60))
    await asyncio.sleep(0)
    stream = first.stream
    progress.abort()
    await asyncio.wait_for(waiting, 5)
    assert first.aborted and second.aborted and third.aborted
    stream.abort.assert_called_once()
    late = begun(answers=2)
    late.abort()
    late.split()
    assert late.others[0].aborted
