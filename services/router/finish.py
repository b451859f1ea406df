"""The last response of a request: why it ended, what it cost, where it ran, where the time went."""

from services.kv.types import Plan
from services.request import FinishReason
from services.router.cluster import Placed
from services.router.progress import Progress
from services.wire import convert, convert_request
from services.wire.isthmus.v1 import generation_pb2


def finish_of(
    progress: Progress, reason: FinishReason, matched_stop: str, prompt_tokens: int, drift_tokens: int | None
) -> generation_pb2.Finish:
    """`drift_tokens` None: this router has not seen the conversation's last turn."""
    return generation_pb2.Finish(
        reason=convert_request.finish_reason_to_proto(reason),
        matched_stop=matched_stop,
        usage=_usage(progress, prompt_tokens, drift_tokens),
        # Unset for a request that was aborted before it was placed.
        placement=None if progress.placed is None else _placement(progress.placed),
        stages=_stages(progress),
    )


def _usage(progress: Progress, prompt_tokens: int, drift_tokens: int | None) -> generation_pb2.Usage:
    usage = generation_pb2.Usage(
        completion_tokens=len(progress.output_ids), prompt_tokens=prompt_tokens, drift_tokens=drift_tokens
    )
    admitted = progress.admitted
    if admitted is None:
        return usage
    remote = admitted.plan is Plan.REMOTE
    usage.reused_tokens = admitted.prefill_prefix_len if remote else admitted.decode_prefix_len
    usage.computed_tokens = admitted.computed_tokens
    usage.decode_prefix_len = admitted.decode_prefix_len
    usage.prefill_prefix_len = admitted.prefill_prefix_len
    usage.delta_tokens = admitted.prompt_tokens - admitted.decode_prefix_len if remote else 0
    usage.kv_bytes_moved = admitted.kv_bytes_moved
    usage.kv_bytes_saved = admitted.kv_bytes_prompt - admitted.kv_bytes_moved
    return usage


def _placement(placed: Placed) -> generation_pb2.Placement:
    chosen = placed.decision.chosen
    return generation_pb2.Placement(
        decode=convert.rank_id_to_proto(chosen.decode.id),
        prefill=None if chosen.prefill is None else convert.rank_id_to_proto(chosen.prefill.id),
        plan=convert.plan_to_proto(placed.plan),
        predicted_prefix_len=chosen.decode.hit_tokens,
        reason=placed.decision.reason,
    )


def _stages(progress: Progress) -> generation_pb2.StageTimes:
    stages = generation_pb2.StageTimes(
        tokenize_s=progress.tokenize_s,
        route_s=progress.route_s,
        first_token_s=progress.first_token_s or 0.0,
    )
    if progress.stages is not None:
        for name, seconds in progress.stages.seconds():
            setattr(stages, f"{name}_s", seconds)
    return stages
