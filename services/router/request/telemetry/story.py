"""The line of the log that tells a whole request, and those that tell each of several answers."""

import logging
from typing import Any

from services.observe import log_lines
from services.router.request.progress import Progress

log = logging.getLogger(__name__)


def tell(progress: Progress, outcome: str) -> None:
    """Where it went is the first answer's; tokens and calls are those of all."""
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
    """Of one of several; the request's own line comes behind."""
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
