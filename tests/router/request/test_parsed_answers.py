"""These tests show what a client gets of an answer that is parsed."""

import json
from unittest.mock import MagicMock

import pytest
from prometheus_client import CollectorRegistry

from router.conftest import character_backend, save_tokenizer
from router.request.test_generation import LosingCluster
from services.router.connections.output_stream import OutputStream
from services.router.parsing.parser_choice import choose
from services.router.request import story
from services.router.request.generation import Generator
from services.router.request.router_metrics import RouterMetrics
from services.router.text.tokenizer import Tokenizer
from services.values.errors import InvalidRequest
from services.values.rank import Plan
from services.values.request import Admitted, FinishReason, Output
from services.wire.isthmus.v1 import common_pb2
from services.wire.isthmus.v1.generation_pb2 import Chat, ChatMessage, GenerateRequest, Tool, ToolChoice

TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}"
    "{% for m in messages %}{{ m.role }}:{{ m.content }}|{% endfor %}"
)
CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
F = Tool(name="f")
UNASKED = [
    ("no", None),
    (CALL, None),
    (CALL, Chat(tools=[F], tool_choice=ToolChoice(mode=ToolChoice.MODE_NONE))),
    (CALL, Chat(tools=[F], raw_answer=True)),
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    directory = save_tokenizer(tmp_path_factory.mktemp("tools"), character_backend(), TEMPLATE)
    return Tokenizer(str(directory))


class TalkingCluster(LosingCluster):
    """Its rank says `text`, three tokens at a time, and ends as `finished` says."""

    def __init__(self, tokenizer, text, finished=FinishReason.STOP):
        super().__init__(0)
        self.ids = [*tokenizer.encode(text, special_tokens=False)]
        self.ids += [tokenizer.eos_token_ids[0]] if finished is FinishReason.STOP else []
        self.ends = finished
        self.eos = None

    def max_context_tokens(self):
        return 1000

    def _start(self, start, prompt):
        self.eos = start.eos_token_ids
        stream = OutputStream(MagicMock(), "r")
        admitted = Admitted(1, 0, 0, 1, 0, 0, 0.0, 0.0, 0.0, 0.0, Plan.LOCAL)
        for begin in range(0, len(self.ids), 3):
            ids = tuple(self.ids[begin : begin + 3])
            finished = self.ends if begin + 3 >= len(self.ids) else None
            stream.put(Output(ids, admitted=None if begin else admitted, finished=finished))
        return stream

    def finished(self, placed, all_ids):
        pass


def generator_of(tokenizer, cluster, tools="hermes", metrics=None, max_attempts=1):
    return Generator(
        "m",
        tokenizer,
        cluster,
        metrics or MagicMock(),
        max_attempts=max_attempts,
        max_wait_s=1.0,
        request_timeout_s=60.0,
        parsers=choose(tools, "think", "", None),
    )


async def answer(tokenizer, text, chat=None, finished=FinishReason.STOP, **sampling):
    """(content, reasoning, calls, Finish)"""
    cluster = TalkingCluster(tokenizer, text, finished)
    chat = chat or Chat()
    chat.messages.append(ChatMessage(role="user", content="a"))
    request = GenerateRequest(chat=chat, sampling=common_pb2.SamplingParams(**sampling))
    content, reasoning, calls = "", "", []
    async for response in generator_of(tokenizer, cluster).generate(request):
        content += response.text
        reasoning += response.reasoning
        calls += [(call.index, call.name, call.arguments) for call in response.tool_calls]
    return content, reasoning, calls, response.finish


async def test_thinking_is_apart_and_counted_unless_an_answer_is_raw(tokenizer):
    content, reasoning, calls, finish = await answer(tokenizer, "<think>hm.</think>Yes.")
    assert (content, reasoning, calls) == ("Yes.", "hm.", [])
    assert finish.reason == common_pb2.FINISH_REASON_STOP
    assert finish.usage.completion_tokens == len("<think>hm.</think>Yes.") + 1
    assert finish.usage.reasoning_tokens == len(">hm.</think>")

    text = f"<think>hm.</think>{CALL}"
    content, reasoning, calls, finish = await answer(tokenizer, text, Chat(raw_answer=True))
    assert (content, reasoning, calls) == (text, "", [])
    assert finish.usage.reasoning_tokens == 0


async def test_text_and_calls_that_nobody_asks_for_are_as_they_were_written(tokenizer, subtests):
    cluster = TalkingCluster(tokenizer, "<think>a")
    request = GenerateRequest(text="a")
    texts = [r.text async for r in generator_of(tokenizer, cluster).generate(request)]
    assert "".join(texts) == "<think>a"

    for text, chat in UNASKED:
        with subtests.test(text=text, chat=chat):
            content, _, calls, finish = await answer(tokenizer, text, chat)
            assert (content, calls, finish.reason) == (text, [], common_pb2.FINISH_REASON_STOP)


async def test_tools_are_refused_where_calls_could_not_be_told(tokenizer):
    generator = generator_of(tokenizer, TalkingCluster(tokenizer, ""), tools="none")
    chat = Chat(messages=[ChatMessage(role="user", content="a")], tools=[F])
    with pytest.raises(InvalidRequest, match=r"^chat\.tools "):
        await anext(generator.generate(GenerateRequest(chat=chat)))


async def test_an_answer_that_ends_behind_calls_says_so_unless_it_is_cut_off(tokenizer):
    text = f"<think>hm</think>Look. {CALL}{CALL}"
    content, reasoning, calls, finish = await answer(tokenizer, text, Chat(tools=[F]))
    assert (content, reasoning) == ("Look. ", "hm")
    assert calls == [(0, "f", '{"a": 1}'), (1, "f", '{"a": 1}')]
    assert finish.reason == common_pb2.FINISH_REASON_TOOL_CALLS

    cluster_ends = FinishReason.CAPACITY
    _, _, calls, finish = await answer(tokenizer, CALL, Chat(tools=[F]), cluster_ends)
    assert len(calls) == 1 and finish.reason == common_pb2.FINISH_REASON_CAPACITY


async def test_a_long_call_comes_in_pieces_and_is_none_if_it_breaks_off(tokenizer, subtests):
    for ends in [FinishReason.STOP, FinishReason.CAPACITY]:
        with subtests.test(ends=ends):
            arguments = json.dumps({"text": "word " * 100})
            text = f'<tool_call>{{"name": "f", "arguments": {arguments}'
            _, _, calls, finish = await answer(tokenizer, text + "}", Chat(tools=[F]), ends)
            assert len(calls) > 50 and {index for index, *_ in calls} == {0}
            assert [name for _, name, _ in calls if name] == ["f"]
            assert "".join(piece for *_, piece in calls) == arguments
            whole = common_pb2.FINISH_REASON_TOOL_CALLS
            assert finish.reason == (
                whole if ends is FinishReason.STOP else common_pb2.FINISH_REASON_CAPACITY
            )
            content, _, calls, finish = await answer(tokenizer, text[:-20], Chat(tools=[F]), ends)
            assert content == "" and "".join(piece for *_, piece in calls) == arguments[:-20]
            assert finish.reason != whole


async def test_one_call_ends_an_answer_that_may_have_no_more(tokenizer):
    chat = Chat(tools=[F], parallel_tool_calls=False)
    _, _, calls, finish = await answer(tokenizer, f"{CALL}{CALL}and more", chat)
    assert calls == [(0, "f", '{"a": 1}')]
    assert finish.reason == common_pb2.FINISH_REASON_TOOL_CALLS
    assert finish.usage.completion_tokens == len(CALL) - len("</tool_call>")


async def test_what_was_parsed_is_counted_and_traced(tokenizer):
    metrics, registry = MagicMock(), CollectorRegistry()
    cluster = TalkingCluster(tokenizer, f"<think>hm</think>{CALL}<tool_call>{{]")
    chat = Chat(messages=[ChatMessage(role="user", content="a")], tools=[F])
    async for _ in generator_of(tokenizer, cluster, metrics=metrics).generate(GenerateRequest(chat=chat)):
        pass
    progress, *_ = metrics.ended.call_args.args
    RouterMetrics(registry).ended(progress, "finished", 1.0)
    value, thought = registry.get_sample_value, len(">hm</think>")
    assert value("isthmus_reasoning_tokens_total") == thought
    assert value("isthmus_tool_calls_total", {"outcome": "read"}) == 1
    assert value("isthmus_tool_calls_total", {"outcome": "broken"}) == 1
    assert story.answer_attributes(progress, "m")["gen_ai.usage.reasoning.output_tokens"] == thought
    assert story.answer_attributes(progress, "m")["gen_ai.response.finish_reasons"] == ("tool_calls",)
