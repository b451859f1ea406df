"""The checking of a run's answers, against answers that are spoilt."""

from dataclasses import replace

import pytest

from bench.chaos.answers import Answer, Asked, Ended, Front
from bench.chaos.oracle import FakeOracle
from bench.chaos.run import judge
from services.engine.fake import continuation

pytestmark = pytest.mark.long


PROMPT = (5, 6, 7)
RIGHT = tuple(continuation(PROMPT, 6))
ASKED = Asked(1, prompt_ids=PROMPT, max_tokens=6, temperature=1.0, seed=1, front=Front.GRPC)
ANSWER = Answer(ASKED, RIGHT, Ended.FINISHED, began_s=0.0, arrivals_s=(0.5,))
AGAIN = replace(ANSWER, asked=replace(ASKED, number=2, again=1, tenant="again"))


def wrongs(*answers):
    return [each.wrong for each in judge(list(answers), FakeOracle())]


def test_wrong_answers_are_found(subtests):
    with subtests.test("right answers stay right"):
        assert wrongs(ANSWER, AGAIN) == ["", ""]
    with subtests.test("one token that is another is found whoever got it"):
        spoilt = (*RIGHT[:4], RIGHT[4] + 1, RIGHT[5])
        assert wrongs(replace(ANSWER, tokens=spoilt)) == ["token 4 of 6 is not the one"]
        assert wrongs(ANSWER, replace(AGAIN, tokens=spoilt)) == ["", "token 4 of 6 is not the one"]
        lost = replace(ANSWER, tokens=spoilt[:5], ended=Ended.LOST)
        assert wrongs(lost) == ["token 4 of 5 is not the one"]
    with subtests.test("an answer that ends early is found"):
        assert wrongs(replace(ANSWER, tokens=RIGHT[:3])) == ["ended after 3 tokens of 6"]
