import pytest

from services.router.request.answers import BestAnswers
from services.router.request.client_request import ClientRequest
from services.values.errors import InvalidRequest
from services.values.request import SamplingParams
from services.wire.isthmus.v1.common_pb2 import TokenLogprob, TokenLogprobs
from services.wire.isthmus.v1.generation_pb2 import Finish, GenerateResponse, Totals

TOLD = [
    (0, "a", [-4.0], False),
    (1, "b", [-1.0, -1.0, -1.0], True),  # the most probable on average, though not in sum
    (0, "A", [-0.5], True),
    (3, "", [], True),
    (2, "c", [-2.25], True),  # as the first one's two
]


class Several:
    def __init__(self):
        self._responses = iter(
            GenerateResponse(
                index=index,
                text=text,
                token_ids=[7] * len(logprobs),
                logprobs=[TokenLogprobs(chosen=TokenLogprob(logprob=each)) for each in logprobs],
                finish=Finish(totals=Totals(completion_tokens=10**index)) if ends else None,
            )
            for index, text, logprobs, ends in TOLD
        )
        self.closed = False

    async def next_response(self):
        return next(self._responses)

    async def aclose(self):
        self.closed = True


async def best(answered, **fields):
    asked = ClientRequest("r", SamplingParams(), answers=4, answered=answered, **fields)
    answers = BestAnswers(Several(), asked)
    return [await answers.next_response() for _ in range(answered)]


async def test_the_most_probable_on_average_come_first_and_what_the_others_took_is_told():
    told = await best(4)
    assert [(answer.index, answer.text) for answer in told] == [(0, "b"), (1, "aA"), (2, "c"), (3, "")]
    assert [len(answer.logprobs) for answer in told] == [3, 2, 1, 0]
    assert all(answer.HasField("finish") for answer in told)

    first, second = await best(2)
    assert not first.finish.HasField("left_out")
    assert second.finish.left_out == Totals(completion_tokens=100 + 1000)  # with the last

    (told,) = await best(1, tells_logprobs=False)
    assert list(told.token_ids) == [7, 7, 7] and not told.logprobs


async def test_of_the_many_that_were_asked_for_no_more_are_held_than_for_any_whole(monkeypatch):
    monkeypatch.setattr("services.router.request.answers.MOST_HELD", 5)
    with pytest.raises(InvalidRequest, match="5 of them"):
        await best(1)
    assert len(await best(1, tells_logprobs=False)) == 1


class Scoring(Several):
    """The first answer, which is not the best, tells of the prompt: in a response of its own, and beside its
    own tokens."""

    def __init__(self):
        super().__init__()
        first, *others = self._responses
        first.prompt_logprobs.append(scored(2))
        self._responses = iter([GenerateResponse(answer_id="x", prompt_logprobs=[scored(1)]), first, *others])


def scored(token_id):
    return TokenLogprobs(chosen=TokenLogprob(token_id=token_id))


async def test_what_is_told_of_the_prompt_comes_first_and_once(subtests):
    for answered in [1, 2]:
        with subtests.test(answered=answered):
            asked = ClientRequest("r", SamplingParams(), answers=4, answered=answered)
            answers = BestAnswers(Scoring(), asked)
            told = [await answers.next_response() for _ in range(2 + answered)]
            assert [[each.chosen.token_id for each in response.prompt_logprobs] for response in told[:2]] == [
                [1],
                [2],
            ]
            assert not any(response.text or response.HasField("finish") for response in told[:2])
            assert [response.index for response in told] == [0, 0, *range(answered)]
            assert [response.text for response in told[2:]] == ["b", "aA"][:answered]
            assert not any(response.prompt_logprobs for response in told[2:])


class Refusing(Several):
    async def next_response(self):
        raise InvalidRequest("sampling.logprobs", ": engine sglang returns none")


async def test_an_engine_without_log_probabilities_is_told_of_by_what_was_asked(subtests):
    for tells_logprobs, says in [(False, "^best_of "), (True, "^sampling.logprobs")]:
        with subtests.test(tells_logprobs=tells_logprobs, says=says):
            asked = ClientRequest("r", SamplingParams(), answers=4, tells_logprobs=tells_logprobs)
            with pytest.raises(InvalidRequest, match=says):
                await BestAnswers(Refusing(), asked).next_response()


async def test_closing_closes_the_answers():
    several = Several()
    await BestAnswers(several, ClientRequest("r", SamplingParams(), answers=4)).aclose()
    assert several.closed
