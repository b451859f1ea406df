"""Agents in tool loops against a whole cluster, whose fake engine says what a script has for it."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cluster.harness import FakeCluster
from router.templates.agents import LOOK_UP, RESULT, Client, answers
from router.templates.formats import Format
from services.engine.fake import FakeRunner
from services.engine.paged.model_runner import Sampled
from services.router.text.tokenizer import Tokenizer
from services.wire.isthmus.v1.common_pb2 import SamplingParams
from services.wire.isthmus.v1.generation_pb2 import Chat, ChatMessage, Finish, GenerateRequest, ToolCall


class Script:
    """In the place of FakeRunner's choice, for one request at a time."""

    def __init__(self) -> None:
        self._ids: Sequence[int] = ()
        self._begin: int | None = None

    def says(self, ids: Sequence[int]) -> None:
        self._ids, self._begin = ids, None

    def install(self, patch: Callable[[object, str, object], None]) -> None:
        patch(FakeRunner, "_choose", lambda runner, chunk, end, *masks: Sampled(self._next(end), None))

    def _next(self, end: int) -> int:
        if not self._ids:
            return 0  # while a rank warms up
        self._begin = end if self._begin is None else self._begin
        return self._ids[end - self._begin]


@dataclass(frozen=True)
class Step:
    """A request of a loop. `held` are the tokens of the one before it: its prompt and its answer, but for the
    last, of which nothing is stored yet."""

    prompt_tokens: int
    held: int
    decode_prefix_len: int


async def play(
    cluster: FakeCluster, script: Script, format_: Format, client: Client, num_calls: int, tenant: str
) -> list[Step]:
    """The requests behind the first. Parsed messages are checked against what was to be said."""
    tokenizer = Tokenizer(cluster.router_config.model)
    messages = [ChatMessage(role="user", content="What is it?")]
    steps, held = list[Step](), 0
    for said in answers(format_, num_calls):
        ids = tokenizer.encode(format_.written(said), special_tokens=False)
        script.says(ids)
        answer, finish = await generate(cluster, messages, tenant)
        usage = finish.usage
        assert [(call.name, json.loads(call.arguments)) for call in answer.tool_calls] == [
            (call.name, call.arguments) for call in said.calls
        ]
        assert (answer.content, answer.reasoning) == (said.content, said.reasoning)
        if held:
            steps.append(Step(usage.prompt_tokens, held, usage.decode_prefix_len))
        held = usage.prompt_tokens + len(ids) - 1
        sent = client.sends(answer)
        messages.append(sent)
        messages += [
            ChatMessage(role="tool", content=RESULT, tool_call_id=call.id, name=call.name)
            for call in sent.tool_calls
        ]
    return steps


async def generate(
    cluster: FakeCluster, messages: Sequence[ChatMessage], tenant: str = "", **sampling: object
) -> tuple[ChatMessage, Finish]:
    """What was said, with its answer_id, and how it ended."""
    request = GenerateRequest(
        chat=Chat(messages=messages, tools=[LOOK_UP]),
        sampling=SamplingParams(temperature=0, max_tokens=1000, **sampling),
        tenant=tenant,
    )
    answer, calls = ChatMessage(role="assistant"), dict[int, ToolCall]()
    async for response in cluster.stubs[0].Generate(request, timeout=60):
        answer.answer_id = answer.answer_id or response.answer_id
        answer.content += response.text
        answer.reasoning += response.reasoning
        for delta in response.tool_calls:
            call = calls.setdefault(delta.index, ToolCall(id=delta.id, name=delta.name))
            call.arguments += delta.arguments
    answer.tool_calls.extend(calls[index] for index in sorted(calls))
    return answer, response.finish
