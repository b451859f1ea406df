"""The log and the trace report a request that has ended: where it went, at what price, and what came of it.

Words are the API's. The stages add up to `first_token_s`. All is of the first placement that generated, as in
the usage; `placements` is how many did. Of several answers that is the first one's, and tokens and calls are
those of all.
"""

import logging
from typing import Any

from services.observe import log_lines
from services.router.cluster import Placed
from services.router.request.progress import Progress
from services.values.request import Admitted

Attributes = dict[str, str | int | float | tuple[str, ...]]

log = logging.getLogger(__name__)


def tell(progress: Progress, outcome: str) -> None:
    if not log.isEnabledFor(logging.INFO):
        return
    log_lines.event(
        log,
        "request_finished",
        request_id=progress.request.request_id,
        answers=len(progress.answers),
        outcome=outcome,
        **_placing(progress),
        completion_tokens=progress.completion_tokens,
        reasoning_tokens=sum(answer.reasoning_tokens for answer in progress.answers),
        tool_calls=sum(answer.num_calls for answer in progress.answers),
        constraint=progress.request.constraint or "-",
        past_answers=",".join(f"{what}:{n}" for what, n in progress.past_answers.items()) or "-",
        **_ending(progress),
    )


def tell_answer(progress: Progress, outcome: str) -> None:
    if not log.isEnabledFor(logging.INFO):
        return
    log_lines.event(
        log,
        "answer_finished",
        request_id=progress.request.request_id,
        answer=progress.request.index,
        outcome=outcome,
        **_placing(progress),
        completion_tokens=len(progress.output_ids),
        **_ending(progress),
    )


def _placing(progress: Progress) -> dict[str, Any]:
    admitted, placed = progress.admitted, progress.first_placed
    return dict(
        decode=placed.decision.chosen.decode.id if placed else "-",
        prefill=placed.prefill_name if placed else "-",
        plan=placed.plan.value if placed else "-",
        reason=placed.decision.reason if placed else "-",
        terms_ms=placed.decision.chosen.terms_ms if placed else "-",
        prompt_tokens=admitted.prompt_tokens if admitted else 0,
        decode_prefix_len=admitted.decode_prefix_len if admitted else 0,
        prefill_prefix_len=admitted.prefill_prefix_len if admitted else 0,
        kv_bytes_moved=admitted.kv_bytes_moved if admitted else 0,
    )


def _ending(progress: Progress) -> dict[str, Any]:
    admitted = progress.admitted
    return dict(
        finish=progress.finish_reason.value if progress.finish_reason else "-",
        ttft_ms=round(1e3 * progress.first_token_s, 1) if progress.first_token_s else "-",
        transfer_ms=round(1e3 * admitted.transfer_s, 1) if admitted else "-",
        attempts=progress.attempts,
        moved_to=",".join(str(later.placed.decision.chosen.decode.id) for later in progress.served[1:])
        or "-",
    )


def attributes_of(progress: Progress) -> Attributes:
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
