"""What the cluster did for a turn, in figures."""

from collections.abc import Iterator, Sequence

from services.cli.chat.answer import Answer
from services.cli.chat.conversation import Turn
from services.cli.table import format_bytes, format_table
from services.wire.isthmus.v1 import common_pb2, generation_pb2

# As a request meets them; the rest of StageTimes' fields is their sum.
_STAGES = (
    *("tokenize", "route", "router_queue", "decode_queue", "prefill_queue", "prefill_compute"),
    *("transfer", "first_decode_step", "relay", "first_token"),
)
_MOVED = ("#", "decode rank", "plan", "prompt", "found", "delta", "KV moved", "answer", "TTFT ms", "tokens/s")
_LEAST_MS = 0.05  # less is 0.0
_ENDS = {
    common_pb2.FINISH_REASON_ABORTED: "stopped",
    common_pb2.FINISH_REASON_LENGTH: "cut by its length",
    common_pb2.FINISH_REASON_CAPACITY: "cut: no rank has room for more",
}


def summary(answer: Answer) -> str:
    """One line on a turn."""
    finish = answer.finish
    if finish is None or not finish.usage.prompt_tokens:
        return _end(answer)
    usage, rate = finish.usage, answer.tokens_per_s
    found = f"{usage.decode_prefix_len} of {usage.prompt_tokens} tokens found on {_rank(finish)}"
    moved = f"{format_bytes(usage.kv_bytes_moved) if usage.delta_tokens else 'nothing'} moved"
    first = f"TTFT {1e3 * finish.stages.first_token_s:.0f} ms"
    parts = (found, moved, first, "" if rate is None else f"{rate:.0f} tokens/s", _end(answer))
    return ", ".join(filter(None, parts))


def _end(answer: Answer) -> str:
    return _ENDS.get(answer.finish.reason, "") if answer.finish else "no end came"


def statistics(turns: Sequence[Turn], width: int | None) -> str:
    """Per turn: what was found, what moved, how fast; then where the time to the first token went."""
    finished = [(number, turn.answer) for number, turn in enumerate(turns, start=1) if turn.answer.finish]
    if not finished:
        return "nothing has been answered yet"
    moved = format_table(_MOVED, [tuple(_row(number, answer)) for number, answer in finished], width)
    return f"{moved}\n\ntime to the first token, ms\n{_stages(finished, width)}"


def _row(number: int, answer: Answer) -> Iterator[object]:
    finish = answer.finish or generation_pb2.Finish()
    usage, rate = finish.usage, answer.tokens_per_s
    yield from (number, _rank(finish), _plan(finish), usage.prompt_tokens, usage.decode_prefix_len)
    yield from (usage.delta_tokens, format_bytes(usage.kv_bytes_moved), usage.completion_tokens)
    yield f"{1e3 * finish.stages.first_token_s:.1f}"
    yield "" if rate is None else f"{rate:.1f}"


def _stages(finished: Sequence[tuple[int, Answer]], width: int | None) -> str:
    """Stages that took nothing in any turn are left out."""
    rows = [[1e3 * _stage(answer, stage) for stage in _STAGES] for _, answer in finished]
    shown = [i for i in range(len(_STAGES)) if any(row[i] >= _LEAST_MS for row in rows)]
    headings = ["#", *(_STAGES[i].replace("_", " ") for i in shown)]
    numbers = [number for number, _ in finished]
    cells = [[n, *(f"{row[i]:.1f}" for i in shown)] for n, row in zip(numbers, rows, strict=True)]
    return format_table(headings, cells, width)


def _stage(answer: Answer, stage: str) -> float:
    return float(getattr(answer.finish.stages, f"{stage}_s")) if answer.finish else 0.0


def _plan(finish: generation_pb2.Finish) -> str:
    return str(common_pb2.Plan.Name(finish.placement.plan)).removeprefix("PLAN_").lower()


def _rank(finish: generation_pb2.Finish) -> str:
    return f"{finish.placement.decode.worker}/{finish.placement.decode.rank}"


def placed(answer: Answer) -> str:
    """Where a turn went and what was thought of it, beside what was true."""
    if answer.finish is None:
        return ""
    finish, placement = answer.finish, answer.finish.placement
    by = f", computed by {placement.prefill.worker}/{placement.prefill.rank}"
    where = f"{_rank(finish)}{by if placement.HasField('prefill') else ''}, plan {_plan(finish)}"
    expected = (
        f"expected {placement.predicted_prefix_len} tokens there, found {finish.usage.decode_prefix_len}"
    )
    return f"last turn: {where} ({placement.reason}); {expected}"
