"""This module formats an answer's usage, as OpenAI does and as our own `isthmus` object."""

from collections.abc import Mapping, Sequence

from services.router.dialects.dialect import Json
from services.values.errors import Aborted
from services.wire.isthmus.v1 import common_pb2, generation_pb2

_PLANS = {common_pb2.PLAN_REMOTE: "remote", common_pb2.PLAN_LOCAL: "local"}


def usage_json(finishes: Sequence[generation_pb2.Finish], answers_each: int) -> Json:
    """Return the usage of a call. A prompt counts once, with the reused tokens of its first answer; all
    generated tokens count."""
    prompts = [finish.usage for finish in finishes[::answers_each]]
    prompt_tokens = sum(usage.prompt_tokens for usage in prompts)
    completion_tokens = sum(
        finish.usage.completion_tokens + finish.left_out.completion_tokens for finish in finishes
    )
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(usage.reused_tokens for usage in prompts)},
        "completion_tokens_details": {
            "reasoning_tokens": sum(finish.usage.reasoning_tokens for finish in finishes)
        },
    }


def word_of(finish: generation_pb2.Finish, words: Mapping[common_pb2.FinishReason, str]) -> str:
    """Return an API's word for why the answer ended. Raises Aborted for an abort, which has none."""
    if finish.reason not in words:
        raise Aborted("the request was aborted before its answer was complete")
    return words[finish.reason]


def answers_json(finishes: Sequence[generation_pb2.Finish]) -> Json:
    answers = [isthmus_json(finish) for finish in finishes]
    return answers[0] if len(answers) == 1 else {**answers[0], "answers": answers}


def isthmus_json(finish: generation_pb2.Finish) -> Json:
    """Return what OpenAI has no place for: where the request ran and how much KV was moved. The members
    outside `placements` and `totals` are of the first placement, as OpenAI's usage is."""
    usage = finish.usage
    return {
        "finish_reason": common_pb2.FinishReason.Name(finish.reason).removeprefix("FINISH_REASON_").lower(),
        **_where(finish.placement),
        **_kv_json(usage),
        "computed_tokens": usage.computed_tokens,
        "drift_tokens": usage.drift_tokens if usage.HasField("drift_tokens") else None,
        "matched_stop": finish.matched_stop or None,
        "placements": [_placement_json(placement) for placement in finish.placements],
        "totals": _numbers(finish.totals),
        "stages": _numbers(finish.stages),
        **({"left_out": _numbers(finish.left_out)} if finish.HasField("left_out") else {}),
    }


def _where(placement: generation_pb2.Placement) -> Json:
    return {
        "plan": _PLANS.get(placement.plan),
        "decode_rank": _rank_name(placement.decode) if placement.HasField("decode") else None,
        "prefill_rank": _rank_name(placement.prefill) if placement.HasField("prefill") else None,
        "reason": placement.reason,
        "predicted_prefix_len": placement.predicted_prefix_len,
        "predicted_reused_tokens": placement.predicted_reused_tokens,
        "source_rank": _rank_name(placement.source) if placement.HasField("source") else None,
        "pull_refused": placement.pull_refused or None,
    }


def _placement_json(placement: generation_pb2.Placement) -> Json:
    usage = placement.usage
    names = ("prompt_tokens", "completion_tokens", "reused_tokens", "computed_tokens")
    return {**_where(placement), **{name: getattr(usage, name) for name in names}, **_kv_json(usage)}


def _kv_json(usage: generation_pb2.Usage) -> Json:
    moved = ("decode_prefix_len", "delta_tokens", "prefill_prefix_len", "kv_bytes_moved", "kv_bytes_saved")
    pulled = ("pulled_tokens", "pulled_bytes", "brought_tokens")
    names = (*moved, *pulled, "drafted_tokens", "accepted_draft_tokens", "constraint_s")
    return {**{name: getattr(usage, name) for name in names}, "carried_bytes": dict(usage.carried_bytes)}


def _numbers(message: generation_pb2.Totals | generation_pb2.StageTimes) -> Json:
    return {field.name: getattr(message, field.name) for field in message.DESCRIPTOR.fields}


def _rank_name(rank: common_pb2.RankId) -> str:
    return f"{rank.worker}/{rank.rank}"
