"""This module sends traces to OpenTelemetry; it costs nothing until an OTLP endpoint is set.

One request is one trace; each service's span is the parent of the next one's, by the traceparent in its call:

    client's, if any --> router.generate --> decode.generate (one for each rank tried) --> prefill.prefill
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import metadata

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import (
    SERVICE_INSTANCE_ID,
    SERVICE_NAME,
    SERVICE_NAMESPACE,
    SERVICE_VERSION,
    Resource,
)
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.semconv.attributes.error_attributes import ERROR_TYPE
from opentelemetry.trace import SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from services.values.errors import Aborted

TRACEPARENT = "traceparent"  # This is also the metadata key: https://www.w3.org/TR/trace-context/.
# The exporter would retry an unreachable collector for longer than a process may take to end.
_LAST_SPANS_S = 2.0
_propagator = TraceContextTextMapPropagator()


@dataclass(frozen=True, slots=True)
class TracedProcess:
    """OpenTelemetry's names of these fields are service.name, service.instance.id and service.namespace."""

    service: str  # This is router, prefill or decode.
    instance: str  # This is the router's name, or the rank's as worker/rank.
    cluster: str

    def resource(self) -> Resource:
        names = {SERVICE_NAME: self.service, SERVICE_INSTANCE_ID: self.instance}
        version = metadata.version("isthmus")
        return Resource.create({**names, SERVICE_NAMESPACE: self.cluster, SERVICE_VERSION: version})


def setup_tracing(
    process: TracedProcess, otlp_endpoint: str | None, sample_ratio: float = 1.0
) -> Callable[[], None]:
    """Send spans to `otlp_endpoint` (http://HOST:PORT, gRPC); with None no spans are recorded.

    Of the traces that begin here the share `sample_ratio` is recorded; for other traces their first span
    decides. Call it once in a process: OpenTelemetry keeps its first provider. Returns a function that sends
    the remaining spans and stops, within a few seconds even if the collector does not answer.
    """
    if otlp_endpoint is None:
        return lambda: None
    sampler = ParentBased(TraceIdRatioBased(sample_ratio))
    provider = TracerProvider(sampler, process.resource(), shutdown_on_exit=False)
    exporter = OTLPSpanExporter(otlp_endpoint, insecure=not otlp_endpoint.startswith("https"))
    provider.add_span_processor(BatchSpanProcessor(exporter))
    trace.set_tracer_provider(provider)

    def stop() -> None:
        stopping = threading.Thread(target=provider.shutdown, name="last-spans", daemon=True)
        stopping.start()
        stopping.join(_LAST_SPANS_S)

    return stop


def tracer() -> trace.Tracer:
    return trace.get_tracer("isthmus")


@contextlib.contextmanager
def span(name: str, parent: str) -> Iterator[trace.Span]:
    """Yield a server's span with the parent `parent`, a traceparent; it ends with the block.

    An empty or malformed parent begins a new trace. The attribute `outcome` is finished, cancelled or the
    error's class; an error also is the span's status and its `error.type`, but a call that its client
    cancelled is no error. The span is never the current one: an async generator may hold it over a yield and
    be closed from another task.
    """
    held = tracer().start_span(name, _context_from(parent), SpanKind.SERVER)
    outcome = "finished"
    try:
        yield held
    except (asyncio.CancelledError, GeneratorExit, Aborted):
        outcome = "cancelled"
        raise
    except BaseException as error:
        outcome = type(error).__name__
        held.set_status(StatusCode.ERROR, f"{outcome}: {error}")
        held.set_attribute(ERROR_TYPE, outcome)
        raise
    finally:
        held.set_attribute("outcome", outcome)
        held.end()


def traceparent(span: trace.Span) -> str:
    if not span.get_span_context().is_valid:
        return ""
    carrier: dict[str, str] = {}
    _propagator.inject(carrier, trace.set_span_in_context(span, Context()))
    return carrier.get(TRACEPARENT, "")


def exemplar(span: trace.Span) -> dict[str, str] | None:
    """Return labels that link a metric to the request's trace; None if no trace is recorded."""
    context = span.get_span_context()
    return {"trace_id": f"{context.trace_id:032x}"} if context.trace_flags.sampled else None


def _context_from(traceparent: str) -> Context:
    return _propagator.extract({TRACEPARENT: traceparent}, Context()) if traceparent else Context()


def traceparent_in(metadata: Iterable[tuple[str, str | bytes]] | None) -> str:
    for key, value in metadata or ():
        if key == TRACEPARENT and isinstance(value, str):
            return value
    return ""
