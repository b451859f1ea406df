"""Answers that go on: of their rest a parser tells what it tells of the whole, behind what was said."""

from hypothesis import given
from hypothesis import strategies as st

from router.request.test_answer_text import CALL, CHOICE, Characters, answer_text, ids_of, told
from services.router.request.answer_text import AnswerText

PIECES = ["a", " ", "\n", "<", "<think>", "</think>", "b", CALL]


def resumed(said, rest, step=1):
    answer = answer_text()
    answer.resume(ids_of(said), said)
    return told(answer, ids_of(rest), step)


RESTS = [
    ("It is", " 42", " 42", ""),
    ("It is ", "42", "42", ""),
    ("It is\n\n", "42", "42", ""),
    ("It is\n\n", "\n42", "\n42", ""),
    ("1 <", " 2", " 2", ""),
    ("1 <", "think", "think", ""),
    ("<think>Hm", ", so</think>\n\n42", "42", ", so"),
    ("<think>Hm ", "so</think>42", "42", "so"),
    ("<think>\n", "so</think>42", "42", "so"),
    ("<think>Hm</think>\n\n", "42", "42", ""),
    ("<think>Hm</thi", "nk>42", "42", ""),
]


def test_only_the_rest_is_told_but_of_a_call_that_was_begun_all(subtests):
    for said, rest, content, reasoning in RESTS:
        for step in [1, 100]:
            with subtests.test(said=said, rest=rest, content=content, reasoning=reasoning, step=step):
                assert resumed(said, rest, step)[:3] == (content, reasoning, [])
    begun, rest = CALL[: len(CALL) // 2], CALL[len(CALL) // 2 :]
    assert resumed("I look. " + begun, rest)[2] == told(answer_text(), ids_of(CALL))[2]


@given(st.lists(st.sampled_from(PIECES), min_size=1, max_size=8).map("".join), st.data())
def test_the_rest_is_the_end_of_what_the_whole_answer_tells(text, data):
    cut = data.draw(st.integers(1, len(text)))
    content, reasoning, calls, *_ = told(answer_text(), ids_of(text))
    rest = resumed(text[:cut], text[cut:])
    assert content.endswith(rest[0]) and reasoning.endswith(rest[1])
    assert [call[1:] for call in calls[len(calls) - len(rest[2]) :]] == [call[1:] for call in rest[2]]


def test_without_a_parser_half_a_character_is_made_whole():
    class Bytes(Characters):
        def text_of(self, token_ids):
            return bytes(token_ids).decode(errors="replace")

        def is_silent(self, token_id):
            return False

    answer = AnswerText(Bytes(), ())
    whole = "an é".encode()
    answer.resume(list(whole[:-1]), "an ")
    assert answer.push([whole[-1]]).content == "é"


ENDS = [
    ("<think>\n", "", True),
    ("", "", False),
    ("", "It is", False),
    ("", "<think>Hm", True),
    ("", "<think>Hm</think>It", False),
    ("<think>\n", "Hm", True),
    ("<think>\n", "Hm</think>", False),
]


def test_whether_it_goes_on_with_thinking(subtests):
    for prompt_end, said, thinks in ENDS:
        with subtests.test(prompt_end=prompt_end, said=said, thinks=thinks):
            assert CHOICE.thinks_behind(prompt_end, said) is thinks
