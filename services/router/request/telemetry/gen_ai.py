"""This reports a request in the words of OpenTelemetry's conventions for generative AI, beside our own.

https://github.com/open-telemetry/semantic-conventions-genai: attributes of the router's span, and a server's
histograms with the requested edges. The names are written out: they are about to leave the Python package. No
text of a prompt or an answer is recorded.
"""

from functools import partial

from prometheus_client import CollectorRegistry, Histogram

from services.observe import traces
from services.observe.children import Children
from services.router.request.progress import Progress
from services.router.request.telemetry.story import Attributes
from services.values.request import MAX_ID_CHARS
from services.wire.isthmus.v1 import generation_pb2

PROVIDER = "isthmus"
_SAMPLING = ("max_tokens", "temperature", "top_p", "top_k")
_PENALTIES = ("frequency_penalty", "presence_penalty")  # these are 0 where they are not set
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


def asked(request: generation_pb2.GenerateRequest, model: str) -> Attributes:
    """Return attributes of a request that may be refused yet; `model` is the one that is served."""
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


def answered(progress: Progress, model: str) -> Attributes:
    attributes: Attributes = {
        "gen_ai.response.id": progress.request.request_id,
        "gen_ai.response.model": model,
        "gen_ai.usage.output_tokens": progress.completion_tokens,
    }
    if reasoning_tokens := sum(answer.reasoning_tokens for answer in progress.answers):
        attributes["gen_ai.usage.reasoning.output_tokens"] = reasoning_tokens
    reasons = [answer.finish_reason for answer in progress.answers]
    if any(reasons):
        told = (reason.value for reason in reasons if reason is not None)
        attributes["gen_ai.response.finish_reasons"] = tuple(told)
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
