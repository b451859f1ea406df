"""The line of the log that tells a whole request."""

import logging

from services.observe import log_lines
from services.router.request.progress import Progress

log = logging.getLogger(__name__)


def tell(progress: Progress, outcome: str) -> None:
    admitted, placed = progress.admitted, progress.first_placed
    log_lines.event(
        log,
        "request_finished",
        request_id=progress.request_id,
        outcome=outcome,
        decode=placed.decision.chosen.decode.id if placed else "-",
        prefill=placed.prefill_name if placed else "-",
        plan=placed.plan.value if placed else "-",
        reason=placed.decision.reason if placed else "-",
        terms_ms=placed.decision.chosen.terms_ms if placed else "-",
        prompt_tokens=admitted.prompt_tokens if admitted else 0,
        decode_prefix_len=admitted.decode_prefix_len if admitted else 0,
        prefill_prefix_len=admitted.prefill_prefix_len if admitted else 0,
        completion_tokens=len(progress.output_ids),
        reasoning_tokens=progress.reasoning_tokens,
        tool_calls=progress.num_calls,
        constraint=progress.constraint or "-",
        finish=progress.finish_reason.value if progress.finish_reason else "-",
        kv_bytes_moved=admitted.kv_bytes_moved if admitted else 0,
        ttft_ms=round(1e3 * progress.first_token_s, 1) if progress.first_token_s else "-",
        past_answers=",".join(f"{what}:{n}" for what, n in progress.past_answers.items()) or "-",
        transfer_ms=round(1e3 * admitted.transfer_s, 1) if admitted else "-",
        attempts=progress.attempts,
        moved_to=",".join(str(later.placed.decision.chosen.decode.id) for later in progress.served[1:])
        or "-",
    )
