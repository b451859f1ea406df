"""A request's last response says why it ended, what it cost, where it ran and where the time went."""

from collections.abc import Iterator, Sequence

from services.router.cluster import Placed
from services.router.request.progress import Progress, Served
from services.values.request import FinishReason
from services.wire import convert, convert_request
from services.wire.fields import message_of
from services.wire.isthmus.v1 import generation_pb2

_TOTALS = tuple(field.name for field in generation_pb2.Totals.DESCRIPTOR.fields)


def finish_of(
    progress: Progress, reason: FinishReason, matched_stop: str, drift_tokens: int | None
) -> generation_pb2.Finish:
    """Write the end of an answer. `drift_tokens` is None where this router has not seen the conversation's
    last turn."""
    placements = list(_placements(progress))
    placement = placements[0] if placements else None
    if placement is None and progress.placed is not None:  # else it was aborted before that
        placement = _placement(progress.placed)
    usage = generation_pb2.Usage(drift_tokens=drift_tokens)
    if placements:
        usage.MergeFrom(placements[0].usage)
    usage.completion_tokens = len(progress.output_ids)
    usage.reasoning_tokens = progress.reasoning_tokens
    return generation_pb2.Finish(
        reason=convert_request.finish_reason_to_proto(reason),
        matched_stop=matched_stop,
        usage=usage,
        placement=placement,
        placements=placements,
        totals=_totals(placements),
        stages=_stages(progress),
    )


def _placements(progress: Progress) -> Iterator[generation_pb2.Placement]:
    bounds = [*(each.first_output for each in progress.served), len(progress.output_ids)]
    for each, end in zip(progress.served, bounds[1:], strict=True):
        yield _placement(each.placed, _usage(each, end - each.first_output))


def _placement(placed: Placed, usage: generation_pb2.Usage | None = None) -> generation_pb2.Placement:
    chosen = placed.decision.chosen
    return generation_pb2.Placement(
        decode=convert.rank_id_to_proto(chosen.decode.id),
        prefill=None if chosen.prefill is None else convert.rank_id_to_proto(chosen.prefill.id),
        plan=convert.plan_to_proto(placed.plan),
        predicted_prefix_len=chosen.decode.hit_tokens,
        predicted_reused_tokens=(chosen.prefill or chosen.decode).reused_tokens,
        reason=placed.decision.reason,
        usage=usage,
    )


def _usage(served: Served, completion_tokens: int) -> generation_pb2.Usage:
    admitted = served.admitted
    return message_of(
        generation_pb2.Usage,
        admitted,
        completion_tokens=completion_tokens,
        reused_tokens=admitted.reused_tokens,
        delta_tokens=admitted.delta_tokens,
        kv_bytes_saved=admitted.kv_bytes_saved,
        carried_bytes=admitted.carried_bytes,
        drafted_tokens=served.drafted_tokens,
        accepted_draft_tokens=served.accepted_draft_tokens,
    )


def _totals(placements: Sequence[generation_pb2.Placement]) -> generation_pb2.Totals:
    usages = [placement.usage for placement in placements]
    if len(usages) == 1:
        [usage] = usages
        return generation_pb2.Totals(**{name: getattr(usage, name) for name in _TOTALS})
    return generation_pb2.Totals(**{name: sum(getattr(each, name) for each in usages) for name in _TOTALS})


def _stages(progress: Progress) -> generation_pb2.StageTimes:
    first_token_s = progress.first_token_s or 0.0
    if progress.stages is not None:
        return generation_pb2.StageTimes(**progress.stages._asdict(), first_token_s=first_token_s)
    return generation_pb2.StageTimes(
        tokenize_s=progress.tokenize_s, route_s=progress.route_s, first_token_s=first_token_s
    )
