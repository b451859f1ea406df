"""This module tells in figures what the cluster did for a turn."""

from collections.abc import Iterator, Sequence

from services.cli.chat.conversation import ChatTurn
from services.cli.chat.streamed_answer import StreamedAnswer
from services.cli.table import format_bytes, format_table
from services.wire.isthmus.v1 import common_pb2, generation_pb2

# A request meets them in this order: the fields of StageTimes in each; the last is their sum.
_STAGES = {
    "tokenize": ("tokenize_s",),
    "route": ("route_s", "router_queue_s"),
    "decode queue": ("decode_queue_s",),
    "prefill queue": ("prefill_queue_s",),
    "prefill compute": ("prefill_compute_s",),
    "transfer": ("transfer_s",),
    "decode step": ("first_decode_step_s",),
    "relay": ("relay_s",),
    "TTFT": ("first_token_s",),
}
_MOVED = ("#", "decode rank", "plan", "prompt", "found", "delta", "KV moved", "answer", "TTFT ms", "tokens/s")
_LEAST_MS = 0.05  # Less than this is shown as 0.0.
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
    found = f"{usage.decode_prefix_len} of {usage.prompt_tokens} found on {_rank(finish)}"
    moved = f"{format_bytes(usage.kv_bytes_moved) if usage.delta_tokens else 'nothing'} moved"
    first = f"TTFT {1e3 * finish.stages.first_token_s:.0f} ms"
    parts = (found, moved, first, "" if rate is None else f"{rate:.0f} tokens/s", _end(answer))
    return ", ".join(filter(None, parts))


def _end(answer: StreamedAnswer) -> str:
    return _ENDS.get(answer.finish.reason, "") if answer.finish else "no end came"


def statistics(turns: Sequence[ChatTurn], width: int | None) -> str:
    """Tell per turn what was found, what moved and how fast; then where the time to the first token went."""
    finished = [(number, turn.answer) for number, turn in enumerate(turns, start=1) if turn.answer.finish]
    if not finished:
        return "nothing has been answered yet"
    moved = format_table(_MOVED, [tuple(_row(number, answer)) for number, answer in finished], width)
    return f"{moved}\n\ntime to the first token, ms\n{_stages(finished, width)}"


def _row(number: int, answer: StreamedAnswer) -> Iterator[object]:
    finish = answer.finish or generation_pb2.Finish()
    usage, rate = finish.usage, answer.tokens_per_s
    yield from (number, _rank(finish), _plan(finish), usage.prompt_tokens, usage.decode_prefix_len)
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


def _plan(finish: generation_pb2.Finish) -> str:
    return str(common_pb2.Plan.Name(finish.placement.plan)).removeprefix("PLAN_").lower()


def _rank(finish: generation_pb2.Finish) -> str:
    return f"{finish.placement.decode.worker}/{finish.placement.decode.rank}"


def placed(answer: StreamedAnswer) -> str:
    """Say where a turn went and what was thought of it, beside what was true."""
    if answer.finish is None:
        return ""
    finish, placement = answer.finish, answer.finish.placement
    by = f", computed by {placement.prefill.worker}/{placement.prefill.rank}"
    where = f"{_rank(finish)}{by if placement.HasField('prefill') else ''}, plan {_plan(finish)}"
    expected = (
        f"expected {placement.predicted_prefix_len} tokens there, found {finish.usage.decode_prefix_len}"
    )
    return f"last turn: {where} ({placement.reason}); {expected}"
