"""A conversation remembers messages, builds the request for the next turn, and shows what turns cost."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from services.cli.look.cluster_picture import found_at_decode
from services.cli.table import format_bytes, format_plan, format_rank, format_table
from services.wire.isthmus.v1 import common_pb2, generation_pb2


@dataclass(slots=True)
class StreamedAnswer:
    clock: Callable[[], float]
    text: str = ""
    reasoning: str = ""
    token_ids: list[int] = field(default_factory=list)
    calls: dict[int, generation_pb2.ToolCall] = field(default_factory=dict)
    finish: generation_pb2.Finish | None = None
    _first_s: float | None = None
    _last_s: float = 0.0
    _after_first: int = 0  # These are tokens after the first response.

    def take(self, response: generation_pb2.GenerateResponse) -> None:
        self.text += response.text
        self.reasoning += response.reasoning
        for piece in response.tool_calls:
            call = self.calls.setdefault(piece.index, generation_pb2.ToolCall(id=piece.id, name=piece.name))
            call.arguments += piece.arguments
        if response.HasField("finish"):
            self.finish = response.finish
        if response.token_ids:
            self._time(len(response.token_ids))
            self.token_ids.extend(response.token_ids)

    def _time(self, num_tokens: int) -> None:
        self._last_s = self.clock()
        if self._first_s is None:
            self._first_s = self._last_s
        else:
            self._after_first += num_tokens

    @property
    def tokens_per_s(self) -> float | None:
        if self._first_s is None or self._last_s <= self._first_s:
            return None
        return self._after_first / (self._last_s - self._first_s)

    def message(self) -> generation_pb2.ChatMessage | None:
        """Return the message that the next request contains for this answer, or None if the answer is empty.

        Token ids go into the prompt as they are, at any router. An answer with thinking or tool calls is sent
        by its id instead: the template decides how much of it is shown again, and the router has its token
        ids.
        """
        if not self.token_ids:
            return None
        message = generation_pb2.ChatMessage(role="assistant", content=self.text)
        if not self.reasoning and not self.calls:
            message.token_ids.extend(self.token_ids)
            return message
        message.reasoning = self.reasoning
        message.tool_calls.extend(call for _, call in sorted(self.calls.items()))
        message.answer_id = self.finish.answer_id if self.finish else ""
        return message


@dataclass(frozen=True, slots=True)
class ChatTurn:
    question: str
    answer: StreamedAnswer


@dataclass(slots=True)
class Conversation:
    new_id: Callable[[], str]
    system: str = ""
    model: str = ""
    sampling: common_pb2.SamplingParams = field(default_factory=common_pb2.SamplingParams)
    tenant: str = ""
    turns: list[ChatTurn] = field(default_factory=list)
    id: str = ""

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.id = self.new_id()
        self.turns.clear()

    def messages(self) -> list[generation_pb2.ChatMessage]:
        """Return the messages. The question of an empty answer is left out, too."""
        messages = [generation_pb2.ChatMessage(role="system", content=self.system)] if self.system else []
        for turn in self.turns:
            if (message := turn.answer.message()) is not None:
                messages += [generation_pb2.ChatMessage(role="user", content=turn.question), message]
        return messages

    def request(self, question: str, request_id: str = "") -> generation_pb2.GenerateRequest:
        new = generation_pb2.ChatMessage(role="user", content=question)
        return generation_pb2.GenerateRequest(
            request_id=request_id,
            model=self.model,
            chat=generation_pb2.Chat(messages=[*self.messages(), new]),
            sampling=self.sampling,
            conversation_id=self.id,
            tenant=self.tenant,
        )


# A request goes through the stages in this order; each is a sum of fields of StageTimes. TTFT is the total.
_STAGES = {
    "tokenize": ("tokenize_s",),
    "route": ("route_s", "router_queue_s"),
    "decode queue": ("decode_queue_s",),
    "prefill queue": ("prefill_queue_s",),
    "pull": ("pull_s",),
    "prefill compute": ("prefill_compute_s",),
    "transfer": ("transfer_s",),
    "decode step": ("first_decode_step_s",),
    "relay": ("relay_s",),
    "TTFT": ("first_token_s",),
}
_MOVED = ("#", "decode rank", "plan", "prompt", "found", "delta", "KV moved", "answer", "TTFT ms", "tokens/s")
_LEAST_MS = 0.05  # Anything below this is shown as 0.0.
_ENDS = {
    common_pb2.FINISH_REASON_ABORTED: "stopped",
    common_pb2.FINISH_REASON_LENGTH: "cut",
    common_pb2.FINISH_REASON_CAPACITY: "cut, for no rank has room for more",
}


def summary(answer: StreamedAnswer) -> str:
    finish = answer.finish
    if finish is None or not finish.usage.prompt_tokens:
        return _end(answer)
    usage, rate = finish.usage, answer.tokens_per_s
    where = format_rank(finish.placement.decode)
    found = f"{found_at_decode(finish)} of {usage.prompt_tokens} found on {where}"
    moved = f"{format_bytes(usage.kv_bytes_moved) if usage.delta_tokens else 'nothing'} moved"
    if usage.pulled_tokens:
        moved += f", {usage.pulled_tokens} pulled from {format_rank(finish.placement.source)}"
    first = f"TTFT {1e3 * finish.stages.first_token_s:.0f} ms"
    parts = (found, moved, first, "" if rate is None else f"{rate:.0f} tokens/s", _end(answer))
    return ", ".join(filter(None, parts))


def _end(answer: StreamedAnswer) -> str:
    return _ENDS.get(answer.finish.reason, "") if answer.finish else "no end came"


def statistics(turns: Sequence[ChatTurn], width: int | None) -> str:
    finished = [(number, turn.answer) for number, turn in enumerate(turns, start=1) if turn.answer.finish]
    if not finished:
        return "nothing has been answered yet"
    moved = format_table(_MOVED, [tuple(_row(number, answer)) for number, answer in finished], width)
    return f"{moved}\n\ntime to the first token, ms\n{_stages(finished, width)}"


def _row(number: int, answer: StreamedAnswer) -> Iterator[object]:
    finish = answer.finish or generation_pb2.Finish()
    usage, rate = finish.usage, answer.tokens_per_s
    yield from (number, format_rank(finish.placement.decode), format_plan(finish.placement))
    yield from (usage.prompt_tokens, usage.decode_prefix_len)
    yield from (usage.delta_tokens, format_bytes(usage.kv_bytes_moved), usage.completion_tokens)
    yield f"{1e3 * finish.stages.first_token_s:.1f}"
    yield "" if rate is None else f"{rate:.1f}"


def _stages(finished: Sequence[tuple[int, StreamedAnswer]], width: int | None) -> str:
    times = {stage: [_stage_ms(answer, stage) for _, answer in finished] for stage in _STAGES}
    shown = {stage: row for stage, row in times.items() if max(row) >= _LEAST_MS}
    rows = zip(*([f"{ms:.1f}" for ms in row] for row in shown.values()), strict=True)
    cells = [(number, *row) for (number, _), row in zip(finished, rows, strict=True)]
    return format_table(["#", *shown], cells, width)


def _stage_ms(answer: StreamedAnswer, stage: str) -> float:
    stages = answer.finish.stages if answer.finish else generation_pb2.StageTimes()
    return 1e3 * sum(float(getattr(stages, name)) for name in _STAGES[stage])


def placed(answer: StreamedAnswer) -> str:
    if answer.finish is None:
        return ""
    finish, placement = answer.finish, answer.finish.placement
    by = f", computed by {format_rank(placement.prefill)}" if placement.HasField("prefill") else ""
    where = f"{format_rank(placement.decode)}{by}, plan {format_plan(placement)}"
    expected = (
        f"expected {placement.predicted_prefix_len} tokens there, found {finish.usage.decode_prefix_len}"
    )
    return f"last turn: {where} ({placement.reason}); {expected}"
