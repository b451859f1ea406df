"""What a client gets of an answer that is told apart."""

from unittest.mock import MagicMock

import pytest

from router.request.test_generation import LosingCluster
from services.router.links.decode_client import OutputStream
from services.router.parsing.choice import choose
from services.router.request.generation import Generator
from services.values.errors import InvalidRequest
from services.values.rank import Plan
from services.values.request import Admitted, FinishReason, Output
from services.wire.isthmus.v1 import common_pb2
from services.wire.isthmus.v1.generation_pb2 import Chat, ChatMessage, GenerateRequest, Tool

CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
F = Tool(name="f")


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

    def _start(self, command, prompt):
        self.eos = command.request.eos_token_ids
        stream = OutputStream(MagicMock(), "r")
        admitted = Admitted(1, 0, 0, 1, 0, 0, 0.0, 0.0, 0.0, 0.0, Plan.LOCAL)
        for begin in range(0, len(self.ids), 3):
            ids = tuple(self.ids[begin : begin + 3])
            finished = self.ends if begin + 3 >= len(self.ids) else None
            stream.put(Output(ids, admitted=None if begin else admitted, finished=finished))
        return stream

    def finished(self, placed, all_ids):
        pass


def generator_of(tokenizer, cluster, tools="hermes", reasoning="think"):
    return Generator(
        "m",
        tokenizer,
        cluster,
        MagicMock(),
        max_attempts=1,
        max_wait_s=1.0,
        request_timeout_s=60.0,
        parsers=choose(tools, reasoning, "", None),
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


async def test_thinking_is_apart_and_counted(character_tokenizer):
    content, reasoning, calls, finish = await answer(character_tokenizer, "<think>hm.</think>Yes.")
    assert (content, reasoning, calls) == ("Yes.", "hm.", [])
    assert finish.reason == common_pb2.FINISH_REASON_STOP
    assert finish.usage.completion_tokens == len("<think>hm.</think>Yes.") + 1
    assert finish.usage.reasoning_tokens == len(">hm.</think>")


async def test_a_raw_answer_is_as_it_was_written(character_tokenizer):
    text = f"<think>hm.</think>{CALL}"
    content, reasoning, calls, finish = await answer(character_tokenizer, text, Chat(raw_answer=True))
    assert (content, reasoning, calls) == (text, "", [])
    assert finish.usage.reasoning_tokens == 0


async def test_text_is_never_told_apart(character_tokenizer):
    cluster = TalkingCluster(character_tokenizer, "<think>a")
    request = GenerateRequest(text="a")
    texts = [r.text async for r in generator_of(character_tokenizer, cluster).generate(request)]
    assert "".join(texts) == "<think>a"


@pytest.mark.parametrize("text", ["no", f"{CALL}"])
async def test_without_tools_a_call_is_text(character_tokenizer, text):
    content, _, calls, finish = await answer(character_tokenizer, text)
    assert (content, calls, finish.reason) == (text, [], common_pb2.FINISH_REASON_STOP)


async def test_tools_are_refused_where_calls_could_not_be_told(character_tokenizer):
    generator = generator_of(character_tokenizer, TalkingCluster(character_tokenizer, ""), tools="none")
    chat = Chat(messages=[ChatMessage(role="user", content="a")], tools=[F])
    with pytest.raises(InvalidRequest, match=r"^chat\.tools "):
        await anext(generator.generate(GenerateRequest(chat=chat)))
