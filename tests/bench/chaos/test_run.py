"""The checking of a run's answers, against answers that are spoilt."""

from dataclasses import replace

from bench.chaos.answers import Answer, Asked, Ended, Front
from bench.chaos.oracle import FakeOracle
from bench.chaos.run import judge
from services.engine.fake import continuation

PROMPT = (5, 6, 7)
RIGHT = tuple(continuation(PROMPT, 6))
ASKED = Asked(1, prompt_ids=PROMPT, max_tokens=6, temperature=1.0, seed=1, front=Front.GRPC)
ANSWER = Answer(ASKED, RIGHT, Ended.FINISHED, began_s=0.0, arrivals_s=(0.5,))
AGAIN = replace(ANSWER, asked=replace(ASKED, number=2, again=1, tenant="again"))


def wrongs(*answers):
    return [each.wrong for each in judge(list(answers), FakeOracle())]


def test_right_answers_stay_right():
    assert wrongs(ANSWER, AGAIN) == ["", ""]


def test_one_token_that_is_another_is_found_whoever_got_it():
    spoilt = (*RIGHT[:4], RIGHT[4] + 1, RIGHT[5])
    assert wrongs(replace(ANSWER, tokens=spoilt)) == ["token 4 of 6 is not the one"]
    assert wrongs(ANSWER, replace(AGAIN, tokens=spoilt)) == ["", "token 4 of 6 is not the one"]
    lost = replace(ANSWER, tokens=spoilt[:5], ended=Ended.LOST)
    assert wrongs(lost) == ["token 4 of 5 is not the one"]


def test_an_answer_that_ends_early_is_found():
    assert wrongs(replace(ANSWER, tokens=RIGHT[:3])) == ["ended after 3 tokens of 6"]
