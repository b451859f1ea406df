"""What the router's span of a request tells: where it went, at what price, and what came of it.

Words are the log's and the API's. The stages add up to `first_token_s`. All is of the first placement that
generated, as in the usage; `placements` is how many did. Of several answers that is the first one's, and
tokens and calls are those of all.
"""

from services.router.cluster import Placed
from services.router.request.progress import Progress
from services.values.request import Admitted

Attributes = dict[str, str | int | float | tuple[str, ...]]


def attributes_of(progress: Progress) -> Attributes:
    """Of a request that has ended, however it ended."""
    attributes: Attributes = {
        "request_id": progress.request.request_id,
        "answers": len(progress.answers),
        "completion_tokens": progress.completion_tokens,
        "reasoning_tokens": sum(answer.reasoning_tokens for answer in progress.answers),
        "tool_calls": sum(answer.num_calls for answer in progress.answers),
        "broken_tool_calls": sum(answer.num_broken_calls for answer in progress.answers),
        "attempts": progress.attempts,
        "placements": len(progress.served),
    }
    attributes |= {f"past_answers.{what}": number for what, number in progress.past_answers.items()}
    if progress.request.constraint:
        attributes["constraint"] = progress.request.constraint
    if progress.first_token_s is not None:
        attributes["first_token_s"] = progress.first_token_s
    if progress.stages is not None:
        attributes |= {f"stage.{name}_s": seconds for name, seconds in progress.stages.seconds()}
    if progress.first_placed is not None:
        attributes |= _placed(progress.first_placed)
    if progress.admitted is not None:
        attributes |= _admitted(progress.admitted)
    return attributes


def _placed(placed: Placed) -> Attributes:
    chosen = placed.decision.chosen
    attributes: Attributes = {
        "decode": str(chosen.decode.id),
        "plan": placed.plan.value,
        "reason": placed.decision.reason,
        "predicted_decode_prefix_len": chosen.decode.hit_tokens,
        "indexed_decode_prefix_len": chosen.decode.matched_tokens,
        "predicted_reused_tokens": (chosen.prefill or chosen.decode).reused_tokens,
        "route.total_s": chosen.total_s,
    }
    if placed.pinned is not None:
        attributes["pinned"] = str(placed.pinned)
    if placed.degraded is not None:
        attributes["degraded"] = placed.degraded
    if chosen.prefill is not None:
        attributes["prefill"] = str(chosen.prefill.id)
        attributes["predicted_prefill_prefix_len"] = chosen.prefill.hit_tokens
        attributes["indexed_prefill_prefix_len"] = chosen.prefill.matched_tokens
    return attributes | {f"route.{name}_s": seconds for name, seconds in chosen.terms}


def _admitted(admitted: Admitted) -> Attributes:
    return {
        "prompt_tokens": admitted.prompt_tokens,
        "decode_prefix_len": admitted.decode_prefix_len,
        "prefill_prefix_len": admitted.prefill_prefix_len,
        "kv_bytes_moved": admitted.kv_bytes_moved,
    }
