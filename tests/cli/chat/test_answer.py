"""An answer from its responses, and what goes back of it."""

import pytest

from cli.chat.turns import answered, finish, plain_answer
from services.wire.isthmus.v1.generation_pb2 import ToolCallDelta


def test_an_answer_goes_back_as_its_ids():
    message = plain_answer().message()
    assert (message.role, message.content, list(message.token_ids)) == ("assistant", "Hi", [7, 8, 9, 10, 11])
    assert not message.answer_id


def test_one_that_thinks_or_calls_goes_by_its_name():
    """The template decides what of it is shown again."""
    answer = answered(
        {"reasoning": "hm", "token_ids": [1]},
        {"text": "So", "token_ids": [2]},
        {"tool_calls": [ToolCallDelta(index=0, id="c1", name="add", arguments='{"a": ')], "token_ids": [3]},
        {"tool_calls": [ToolCallDelta(index=0, arguments="1}")], "token_ids": [4], "finish": finish()},
    )
    message = answer.message()
    assert (message.content, message.reasoning, message.answer_id) == ("So", "hm", "a1")
    assert not message.token_ids
    (call,) = message.tool_calls
    assert (call.id, call.name, call.arguments) == ("c1", "add", '{"a": 1}')


def test_one_that_says_nothing_does_not_go_back():
    assert answered({"finish": finish()}).message() is None


@pytest.mark.parametrize(
    "responses,rate",
    [
        ([], None),
        ([{"token_ids": [1, 2]}], None),
        ([{"token_ids": [1, 2]}, {"token_ids": [3, 4, 5]}], 6.0),
        ([{}, {"token_ids": [1]}, {"token_ids": [3]}, {"token_ids": [4, 5]}, {}], 3.0),
    ],
)
def test_the_pace_is_that_after_the_first_tokens(responses, rate):
    assert answered(*responses).tokens_per_s == rate
