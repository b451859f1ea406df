"""A watcher gets what a request cost and where it ran, and nothing of what was said."""

from services.net.grpc_errors import status_named
from services.router.cluster_messages import few_candidates
from services.router.request.progress import Progress
from services.values.request import FinishReason
from services.wire import convert
from services.wire.isthmus.v1 import generation_pb2

_MOST_CANDIDATES = 16
# The first is a text of the client's own, and the second would put the answer in a prompt.
_CLIENTS_ALONE = ("matched_stop", "answer_id")


def running_request(progress: Progress, model: str, now: float) -> generation_pb2.RunningRequest:
    """`now` is on the clock of `began_s`."""
    placed = progress.placed
    chosen = placed.decision.chosen if placed is not None else None
    prefill = chosen.prefill if chosen is not None else None
    return generation_pb2.RunningRequest(
        request_id=progress.request.request_id,
        conversation_id=progress.request.conversation_id,
        tenant=progress.request.tenant,
        model=model,
        age_s=now - progress.began_s,
        prompt_tokens=progress.prompt_tokens,
        completion_tokens=progress.completion_tokens,
        answers=len(progress.answers),
        decode=None if chosen is None else convert.rank_id_to_proto(chosen.decode.id),
        prefill=None if prefill is None else convert.rank_id_to_proto(prefill.id),
    )


def finished_request(
    progress: Progress,
    outcome: str,
    model: str,
    *,
    duration_s: float,
    ended_at_s: float,
    with_candidates: bool = True,
) -> generation_pb2.FinishedRequest:
    """`outcome` is as Generator tells it, and `ended_at_s` counts from the epoch."""
    finished = generation_pb2.FinishedRequest(
        request_id=progress.request.request_id,
        conversation_id=progress.request.conversation_id,
        tenant=progress.request.tenant,
        model=model,
        outcome=_outcome(progress, outcome),
        ended_at_s=ended_at_s,
        duration_s=duration_s,
        finish=progress.finish,
        tool_calls=sum(answer.num_calls for answer in progress.answers),
        answers=len(progress.answers),
        completion_tokens=progress.completion_tokens,
        constraint=progress.request.constraint,
    )
    if progress.finish is not None:
        for name in _CLIENTS_ALONE:
            finished.finish.ClearField(name)
    if with_candidates and (placed := progress.first_placed) is not None:
        finished.candidates.extend(few_candidates(placed.decision, placed.pinned, _MOST_CANDIDATES))
    return finished


def _outcome(progress: Progress, outcome: str) -> str:
    if outcome == "finished":
        return "aborted" if progress.finish_reason is FinishReason.ABORTED else "ok"
    return "aborted" if outcome == "cancelled" else status_named(outcome).name
