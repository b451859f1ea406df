"""The turns of a conversation."""

import pytest

from isthmus import InvalidRequest, Message, ToolCall
from isthmus.base import History, check_options
from isthmus.values.answer import Growing
from router.scripted_router import finished
from services.wire.isthmus.v1 import common_pb2
from services.wire.isthmus.v1.generation_pb2 import ToolCallDelta


def answered(*responses):
    growing = Growing()
    for response in responses:
        growing.add(response)
    return growing.answer()


def test_what_was_said(subtests):
    with subtests.test("a plain answer comes back as its ids"):
        history = History([Message("system", "Be brief.")])
        history.keep(history.with_question("Hello"), answered(finished("Hi", 5, 6)), {})
        assert [message.role for message in history.messages] == ["system", "user", "assistant"]
        assert history.messages[-1] == Message("assistant", "Hi", token_ids=(5, 6))
        assert history.with_question("More")[-1] == Message("user", "More")
        assert len(history.messages) == 3, "what is asked is not said before it is answered"
    # With a stop string, which was not said; or with thinking, which the template may leave out.
    for response, options in [
        (finished("Hi", 5, 6), {"stop": ["\n"]}),
        (finished("Hi", 5, 6), {"stop_token_ids": [6]}),
        (finished("Hi", 5, 6, reasoning="well"), {}),
    ]:
        with subtests.test(response=response):
            response.finish.answer_id = "a"
            history = History()
            history.keep(history.with_question("Hello"), answered(response), options)
            last = history.messages[-1]
            assert last.answer_id == "a" and not last.token_ids and last.reasoning == response.reasoning
    with subtests.test("an answer that was stopped was not said"):
        history = History()
        history.keep(
            history.with_question("Hello"),
            answered(finished("H", 5, reason=common_pb2.FINISH_REASON_ABORTED)),
            {},
        )
        assert history.messages == []


def test_results_are_of_calls_that_wait():
    pieces = [
        finished("", 5, tool_calls=[ToolCallDelta(index=0, id="c1", name="f", arguments='{"a"')]),
        finished(
            "", 6, tool_calls=[ToolCallDelta(index=0, arguments=": 1}"), ToolCallDelta(index=1, id="c2")]
        ),
    ]
    history, answer = History(), answered(*pieces)
    assert answer.tool_calls == (ToolCall("c1", "f", '{"a": 1}'), ToolCall("c2", "", ""))
    assert answer.tool_calls[0].arguments == {"a": 1}
    history.keep(history.with_question("Hello"), answer, {})
    with pytest.raises(InvalidRequest, match="nothing to answer"):
        history.with_question(None)
    history.add_result(answer.tool_calls[0], "21")
    assert list(history.waiting) == ["c2"]
    assert history.with_question(None)[-1] == Message("tool", "21", tool_call_id="c1", name="f")
    with pytest.raises(InvalidRequest, match="c1"):
        history.add_result("c1", "22")


def test_a_conversation_goes_on_from_one_answer():
    check_options({"n": 1})
    with pytest.raises(InvalidRequest, match="leave n out"):
        check_options({"n": 2})
