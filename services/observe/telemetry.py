"""What a process says about itself: log lines, metrics for Prometheus, traces for OpenTelemetry.

A log line is `time level service logger event key=value ...`, or with --log-format=json an object of these;
inside `request_context(id)` every line of the same task also carries `request_id=...`. Traces cost nothing
until an OTLP endpoint is set.

One request is one trace; each service's span is the parent of the next one's, by the traceparent in its call:

    client's, if any --> router.generate --> decode.generate (one for each rank tried) --> prefill.prefill
"""

import asyncio
import contextlib
import json
import logging
import math
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from importlib import metadata
from types import TracebackType

import prometheus_client
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
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from services.host.ports import bindable, host_port
from services.observe import json_lines
from services.values.errors import Aborted, ConfigError

# Not `cluster`: by that many a Prometheus tells Kubernetes clusters apart (external_labels, relabelings), and
# with honor_labels a label of ours would take its place.
CLUSTER_LABEL = "isthmus_cluster"
TRACEPARENT = "traceparent"  # https://www.w3.org/TR/trace-context/, also the metadata key

_request_id: ContextVar[str] = ContextVar("request_id", default="")
_propagator = TraceContextTextMapPropagator()


@contextlib.contextmanager
def request_context(request_id: str) -> Iterator[None]:
    """Log lines of this task, and of tasks started in it, carry the id."""
    token = _request_id.set(request_id)
    try:
        yield
    finally:
        _request_id.reset(token)


def event(logger: logging.Logger, name: str, level: int = logging.INFO, **fields: object) -> None:
    """Log `name key=value ...`; a value with spaces, quotes or control characters is quoted as JSON."""
    if logger.isEnabledFor(level):
        text = " ".join([name, *(f"{key}={_text(value)}" for key, value in fields.items())])
        logger.log(level, "%s", text, extra={"event": name, "fields": fields})


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    is_plain = text.isprintable() and not any(character in text for character in ' "=')
    return text if text and is_plain else json.dumps(text)


class _RequestIdFilter(logging.Filter):
    """Runs in the task that logs, so that it sees the task's request id."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.request_id = _request_id.get()
        return True


_SCRAPE_TIMEOUT_S = 10.0  # Prometheus's own
_LAST_SPANS_S = 2.0  # a collector that cannot be reached is tried again for longer than a process may take
_COLORS = {logging.WARNING: "\x1b[33m", logging.ERROR: "\x1b[31m", logging.CRITICAL: "\x1b[31;1m"}


class _LineFormatter(logging.Formatter):
    def __init__(self, service: str, color: bool) -> None:
        super().__init__(
            f"%(asctime)s.%(msecs)03dZ %(levelname)s {service.replace('%', '%%')} %(name)s %(message)s",
            datefmt="%Y-%m-%dT%H:%M:%S",
        )
        self.converter = time.gmtime
        self._color = color

    def formatMessage(self, record: logging.LogRecord) -> str:
        line = super().formatMessage(record)
        if request_id := getattr(record, "request_id", ""):
            line += f" request_id={_text(request_id)}"
        color = _COLORS.get(record.levelno) if self._color else None
        return f"{color}{line}\x1b[0m" if color else line


class _JsonFormatter(logging.Formatter):
    """One object a line: an event's fields are its own, by their names."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        said: dict[str, object] = {
            "time": json_lines.timestamp(record.created),
            "level": record.levelname,
            "service": self._service,
            "logger": record.name,
        }
        if (name := getattr(record, "event", None)) is not None:
            said["event"] = name
            fields: Mapping[str, object] = getattr(record, "fields", {})
            said |= {f"{key}_" if key in said else key: _plain(value) for key, value in fields.items()}
        else:
            said["message"] = record.getMessage()
        if request_id := getattr(record, "request_id", ""):
            said.setdefault("request_id", request_id)
        if record.exc_info:
            said["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            said["stack"] = record.stack_info
        return json.dumps(said)


def _plain(value: object) -> str | int | float | bool | None:
    """As JSON has it, which knows neither infinity nor our types."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else str(value)
    return value if value is None or type(value) in (str, int, bool) else str(value)  # type: ignore[return-value]


def setup_logging(
    service: str, level: str = "INFO", log_format: str = "text", color: bool | None = None
) -> None:
    """Send every log line to stderr; replaces what was set up before.

    `service` names the process in each line ("decode-0/1"); `log_format` is text or json; `color` None means:
    on a terminal. Of what others write there json_lines.lay_pipe makes JSON.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(_RequestIdFilter())
    colors = sys.stderr.isatty() if color is None else color
    handler.setFormatter(_JsonFormatter(service) if log_format == "json" else _LineFormatter(service, colors))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(log_format == "json")


def log_service(service: str, level: str, log_format: str) -> None:
    """Set logging up for the whole of a service's process, its libraries and its children."""
    setup_logging(service, level, log_format)
    if log_format == "json":
        json_lines.lay_pipe(service)
        sys.excepthook = _log_uncaught


def _log_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """A traceback is one object, too."""
    logging.getLogger("uncaught").critical("%s: %s", kind.__name__, error, exc_info=(kind, error, trace))


class OnLoop(Collector):
    """What another collector has, collected on the event loop that makes it: /metrics is served by a thread,
    and what the loop owns must not change while it is read, nor by being read."""

    def __init__(self, collector: Collector) -> None:
        self._collector = collector
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()

    def collect(self) -> Iterable[Metric]:
        """Raises TimeoutError where the loop does not answer."""
        if threading.get_ident() == self._thread:
            return list(self._collector.collect())
        return asyncio.run_coroutine_threadsafe(self._collect(), self._loop).result(_SCRAPE_TIMEOUT_S)

    async def _collect(self) -> list[Metric]:
        return list(self._collector.collect())


class _Labelled(Collector):
    """What another registry has, with the process's labels on every sample."""

    def __init__(self, registry: prometheus_client.CollectorRegistry, labels: Mapping[str, str]) -> None:
        self._registry = registry
        self._labels = dict(labels)

    def collect(self) -> Iterator[Metric]:
        for metric in self._registry.collect():
            # When a counter began helps nobody, and would be a third of all series.
            metric.samples = [
                sample._replace(labels={**self._labels, **sample.labels})
                for sample in metric.samples
                if not sample.name.endswith("_created")
            ]
            yield metric


def serve_metrics(
    host: str, port: int, registry: prometheus_client.CollectorRegistry, labels: Mapping[str, str]
) -> tuple[int, Callable[[], None]]:
    """Serve `registry` on http://host:port/metrics from a thread of its own; port 0: a free one.

    `labels` tell whose metrics they are: every sample has them, unless it has one of that name itself.
    Returns the port, and a function that stops the server and returns when it has.
    Raises ConfigError when the address cannot be bound.
    """
    served = prometheus_client.CollectorRegistry()
    served.register(_Labelled(registry, labels))
    try:
        server, thread = prometheus_client.start_http_server(port, bindable(host), served)
    except OSError as error:
        raise ConfigError(f"cannot serve metrics on {host_port(host, port)}: {error}") from error

    here = (bindable(host), server.server_port)

    def stop() -> None:
        stopping = threading.Thread(target=server.shutdown)
        stopping.start()
        # The server looks for that twice a second, and whenever somebody calls.
        with contextlib.suppress(OSError), socket.create_connection(here, 1.0):
            stopping.join()
        stopping.join()
        server.server_close()
        thread.join()

    return server.server_port, stop


@dataclass(frozen=True, slots=True)
class Process:
    """Whose spans they are: in OpenTelemetry's words service.name, service.instance.id, service.namespace."""

    service: str  # router, prefill, decode
    instance: str  # the router's name or the rank's, worker/rank
    cluster: str

    def resource(self) -> Resource:
        names = {SERVICE_NAME: self.service, SERVICE_INSTANCE_ID: self.instance}
        version = metadata.version("isthmus")
        return Resource.create({**names, SERVICE_NAMESPACE: self.cluster, SERVICE_VERSION: version})


def setup_tracing(
    process: Process, otlp_endpoint: str | None, sample_ratio: float = 1.0
) -> Callable[[], None]:
    """Send spans to `otlp_endpoint` (http://HOST:PORT, gRPC); None: spans are not recorded.

    Of the traces that begin here `sample_ratio` are recorded. Of others their beginning has decided.
    Called once in a process: OpenTelemetry keeps its first provider. Returns a function that sends what is
    left and stops, within a few seconds also where nobody takes it.
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
    """A server's span under the traceparent `parent`, ended with the block, whichever way that ends.

    An empty or malformed parent begins a new trace. The attribute `outcome` is finished, cancelled or the
    error's class; an error is the span's status and its `error.type` as well, a call that its client gave up
    is none. The span is never the current one: an async generator may hold it over a yield and be closed
    from another task.
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
    """The W3C traceparent for calls made under the span; "" outside any trace."""
    carrier: dict[str, str] = {}
    _propagator.inject(carrier, trace.set_span_in_context(span, Context()))
    return carrier.get(TRACEPARENT, "")


def exemplar(span: trace.Span) -> dict[str, str] | None:
    """What leads from a metric to the request's trace; None where no trace is recorded."""
    context = span.get_span_context()
    return {"trace_id": f"{context.trace_id:032x}"} if context.trace_flags.sampled else None


def _context_from(traceparent: str) -> Context:
    return _propagator.extract({TRACEPARENT: traceparent}, Context())


def traceparent_in(metadata: Iterable[tuple[str, str | bytes]] | None) -> str:
    """From a call's metadata; "" when it has none."""
    for key, value in metadata or ():
        if key == TRACEPARENT and isinstance(value, str):
            return value
    return ""
