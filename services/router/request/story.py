"""The log and the trace report a finished request: its ranks, its usage and its outcome.

The names are the API's. The stages add up to `first_token_s`. All is about the first placement that
generated, as in the usage; `placements` is their number. With several answers it is about the first one, but
tokens and calls are those of all.

The trace and the metrics also follow OpenTelemetry's conventions for generative AI:

https://github.com/open-telemetry/semantic-conventions-genai: attributes of the router's span, and a server's
histograms with the required buckets. The names are written out, as the Python package is about to drop them.
No text of a prompt or an answer is recorded.
"""

import logging
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry, Histogram

from services.observe import log_lines, traces
from services.observe.prometheus import Children
from services.router.cluster import Placed
from services.router.request.progress import Progress
from services.values.request import MAX_ID_CHARS, Admitted
from services.wire.isthmus.v1 import generation_pb2

Attributes = dict[str, str | int | float | tuple[str, ...]]

log = logging.getLogger(__name__)


def log_request(progress: Progress, outcome: str) -> None:
    if not log.isEnabledFor(logging.INFO):
        return
    log_lines.event(
        log,
        "request_finished",
        request_id=progress.request.request_id,
        answers=len(progress.answers),
        outcome=outcome,
        tenant=progress.request.tenant or "-",
        **_placing(progress),
        completion_tokens=progress.completion_tokens,
        reasoning_tokens=sum(answer.reasoning_tokens for answer in progress.answers),
        tool_calls=sum(answer.num_calls for answer in progress.answers),
        constraint=progress.request.constraint or "-",
        past_answers=",".join(f"{what}:{n}" for what, n in progress.past_answers.items()) or "-",
        **_ending(progress),
    )


def log_answer(progress: Progress, outcome: str) -> None:
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
        computed_tokens=admitted.computed_tokens if admitted else 0,
        kv_bytes_moved=admitted.kv_bytes_moved if admitted else 0,
        source=placed.decision.chosen.source.id if placed and placed.decision.chosen.source else "-",
        pulled_tokens=admitted.pulled_tokens if admitted else 0,
        pull_refused=admitted.pulled.refused or "-" if admitted and admitted.pulled else "-",
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
        "predicted_reused_tokens": chosen.reused_tokens,
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
    if chosen.source is not None:
        attributes["source"] = str(chosen.source.id)
        attributes["predicted_source_tokens"] = chosen.source.tokens
    return attributes | {f"route.{name}_s": seconds for name, seconds in chosen.terms}


def _admitted(admitted: Admitted) -> Attributes:
    attributes: Attributes = {
        "prompt_tokens": admitted.prompt_tokens,
        "decode_prefix_len": admitted.decode_prefix_len,
        "prefill_prefix_len": admitted.prefill_prefix_len,
        "kv_bytes_moved": admitted.kv_bytes_moved,
    }
    if (pulled := admitted.pulled) is not None:
        attributes |= {
            "pulled_tokens": pulled.tokens,
            "pulled_bytes": pulled.bytes,
            "pull_refused": pulled.refused,
        }
    return attributes


PROVIDER = "isthmus"
_SAMPLING = ("max_tokens", "temperature", "top_p", "top_k")
_PENALTIES = ("frequency_penalty", "presence_penalty")  # These are 0 where they are not set.
_ENDED_WELL = ("finished", "cancelled")

_FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1),
    *(0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
)
_PER_TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_DURATION_S = tuple(0.01 * 2**power for power in range(14))
_LABELS = ("gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model")


def operation_of(request: generation_pb2.GenerateRequest) -> str:
    return "chat" if request.WhichOneof("prompt") == "chat" else "text_completion"


def request_attributes(request: generation_pb2.GenerateRequest, model: str) -> Attributes:
    attributes: Attributes = {
        "gen_ai.operation.name": operation_of(request),
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": (request.model or model)[:MAX_ID_CHARS],
    }
    if request.conversation_id:
        attributes["gen_ai.conversation.id"] = request.conversation_id[:MAX_ID_CHARS]
    if request.n > 1:
        attributes["gen_ai.request.choice.count"] = request.n
    sampling = request.sampling
    if sampling.constraint.WhichOneof("kind") in ("json_object", "json_schema"):
        attributes["gen_ai.output.type"] = "json"
    names = [name for name in _SAMPLING if sampling.HasField(name)]
    names += [name for name in _PENALTIES if getattr(sampling, name)]
    return attributes | {f"gen_ai.request.{name}": getattr(sampling, name) for name in names}


def answer_attributes(progress: Progress, model: str) -> Attributes:
    attributes: Attributes = {
        "gen_ai.response.id": progress.request.request_id,
        "gen_ai.response.model": model,
        "gen_ai.usage.output_tokens": progress.completion_tokens,
    }
    if reasoning_tokens := sum(answer.reasoning_tokens for answer in progress.answers):
        attributes["gen_ai.usage.reasoning.output_tokens"] = reasoning_tokens
    reasons = [answer.finish_reason for answer in progress.answers]
    if any(reasons):
        values = (reason.value for reason in reasons if reason is not None)
        attributes["gen_ai.response.finish_reasons"] = tuple(values)
    if progress.first_token_s is not None:
        attributes["gen_ai.response.time_to_first_chunk"] = progress.first_token_s
    if (admitted := progress.admitted) is not None:
        attributes["gen_ai.usage.input_tokens"] = admitted.prompt_tokens
        attributes["gen_ai.usage.cache_read.input_tokens"] = admitted.reused_tokens
    return attributes


class GenAiMetrics:
    def __init__(self, registry: CollectorRegistry, model: str) -> None:
        histogram = partial(Histogram, registry=registry)
        self._model = model
        first_token = histogram(
            "gen_ai_server_time_to_first_token_seconds",
            "OpenTelemetry's gen_ai.server.time_to_first_token: as isthmus_ttft_seconds.",
            _LABELS,
            buckets=_FIRST_TOKEN_S,
        )
        per_token = histogram(
            "gen_ai_server_time_per_output_token_seconds",
            "OpenTelemetry's gen_ai.server.time_per_output_token: a finished request's mean after its first.",
            _LABELS,
            buckets=_PER_TOKEN_S,
        )
        duration = histogram(
            "gen_ai_server_request_duration_seconds",
            "OpenTelemetry's gen_ai.server.request.duration: as isthmus_request_seconds; error_type is the "
            "error's name, or empty.",
            (*_LABELS, "error_type"),
            buckets=_DURATION_S,
        )
        self._first_token, self._per_token, self._duration = map(Children, (first_token, per_token, duration))

    def first_token(self, progress: Progress) -> None:
        if progress.first_token_s is not None:
            self._first_token[self._labels(progress)].observe(progress.first_token_s)

    def ended(self, progress: Progress, outcome: str, took_s: float) -> None:
        labels = self._labels(progress)
        error_type = "" if outcome in _ENDED_WELL else outcome
        self._duration[*labels, error_type].observe(took_s, traces.exemplar(progress.span))
        later_tokens = max(len(answer.output_ids) for answer in progress.answers) - 1
        if outcome == "finished" and later_tokens > 0 and progress.first_token_s is not None:
            self._per_token[labels].observe((took_s - progress.first_token_s) / later_tokens)

    def _labels(self, progress: Progress) -> tuple[str, str, str]:
        return progress.request.operation, PROVIDER, self._model
