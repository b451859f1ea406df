import json

import pytest

from services.router.request.client_request import MAX_TOOLS, CallMode, ChatTools, read_tools
from services.values.errors import InvalidRequest
from services.wire.isthmus.v1.generation_pb2 import (
    Chat,
    ChatMessage,
    GenerateRequest,
    Tool,
    ToolCall,
    ToolChoice,
)

F = Tool(name="f", parameters='{"type": "object", "properties": {"a": {"type": "integer"}}}')

NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}


def of(*tools, **fields):
    return read_tools(GenerateRequest(chat=Chat(tools=tools, **fields)))


def test_a_chats_tools():
    tools = of(F, Tool(name="ns.g-1", strict=True))
    assert tools.schemas == {"f": json.loads(F.parameters), "ns.g-1": NOTHING}
    assert (tools.mode, tools.named, tools.parallel) == (CallMode.AUTO, "", True)
    assert tools.strict == {"ns.g-1"} and tools.parsed and not tools.must_call
    assert set(tools.callable) == {"f", "ns.g-1"}


def test_what_is_chosen_and_which_calls_are_past():
    assert of(F, tool_choice=ToolChoice(mode=ToolChoice.MODE_NONE)).callable is None
    assert of(F, tool_choice=ToolChoice(mode=ToolChoice.MODE_REQUIRED)).must_call
    named = of(F, tool_choice=ToolChoice(name="f"))
    assert named.must_call and named.named == "f"
    assert not of(F, parallel_tool_calls=False).parallel
    assert not of(F, raw_answer=True).parsed
    assert of().callable is None
    assert read_tools(GenerateRequest(text="a")) == ChatTools()
    past = ChatMessage(role="assistant", tool_calls=[ToolCall(id="a", name="f"), ToolCall(id="b", name="f")])
    assert of(F, messages=[past]).past_ids == {"a", "b"}


WRONG = [
    ([Tool()], {}, r"chat.tools\[0\].name must be"),
    ([Tool(name="a b")], {}, r"chat.tools\[0\].name must be"),
    ([Tool(name="a" * 129)], {}, r"chat.tools\[0\].name must be"),
    ([F, F], {}, r"chat.tools\[1\].name is another"),
    ([Tool(name="f", parameters="{")], {}, r"chat.tools\[0\].parameters must be"),
    ([Tool(name="f", parameters="[" * 10**5)], {}, r"chat.tools\[0\].parameters must be"),
    ([Tool(name="f", parameters="[]")], {}, r"chat.tools\[0\].parameters must be"),
    ([Tool(name="f", parameters='{"type": "string"}')], {}, r"chat.tools\[0\].parameters must be"),
    ([F], {"tool_choice": ToolChoice(name="g")}, "chat.tool_choice.name is none"),
    ([F], {"tool_choice": ToolChoice(name="f", mode=3)}, "chat.tool_choice.mode and"),
    ([F], {"tool_choice": ToolChoice(mode=9)}, "chat.tool_choice.mode is not known"),
    ([], {"tool_choice": ToolChoice(mode=3)}, "chat.tool_choice requires a call"),
    ([Tool(name=f"f{i}") for i in range(MAX_TOOLS + 1)], {}, "chat.tools must be at most"),
]


def test_what_is_wrong_is_named(subtests):
    for tools, fields, problem in WRONG:
        with subtests.test(problem, fields=fields), pytest.raises(InvalidRequest, match=f"^{problem}"):
            of(*tools, **fields)
