"""An answer from its responses, and what goes back of it."""

import pytest

from cli.chat.turns import answered, finish, plain_answer
from services.wire.isthmus.v1.generation_pb2 import ToolCallDelta

pytestmark = pytest.mark.long


def test_an_answer_and_how_it_goes_back(subtests):
    with subtests.test("an answer goes back as its ids"):
        message = plain_answer().message()
        assert (message.role, message.content, list(message.token_ids)) == (
            "assistant",
            "Hi",
            [7, 8, 9, 10, 11],
        )
        assert not message.answer_id
    # The template decides what of it is shown again.
    with subtests.test("one that thinks or calls goes by its name"):
        answer = answered(
            {"reasoning": "hm", "token_ids": [1]},
            {"text": "So", "token_ids": [2]},
            {
                "tool_calls": [ToolCallDelta(index=0, id="c1", name="add", arguments='{"a": ')],
                "token_ids": [3],
            },
            {"tool_calls": [ToolCallDelta(index=0, arguments="1}")], "token_ids": [4], "finish": finish()},
        )
        message = answer.message()
        assert (message.content, message.reasoning, message.answer_id) == ("So", "hm", "a1")
        assert not message.token_ids
        (call,) = message.tool_calls
        assert (call.id, call.name, call.arguments) == ("c1", "add", '{"a": 1}')
    with subtests.test("one that says nothing does not go back"):
        assert answered({"finish": finish()}).message() is None
    for responses, rate in [
        ([], None),
        ([{"token_ids": [1, 2]}], None),
        ([{"token_ids": [1, 2]}, {"token_ids": [3, 4, 5]}], 6.0),
        ([{}, {"token_ids": [1]}, {"token_ids": [3]}, {"token_ids": [4, 5]}, {}], 3.0),
    ]:
        with subtests.test("the pace is that after the first tokens", responses=responses, rate=rate):
            assert answered(*responses).tokens_per_s == rate
