"""Traces as a collector gets them."""

import asyncio
import contextlib
import threading
from importlib import metadata

import pytest
from opentelemetry import trace
from opentelemetry.trace import StatusCode

from observe.otlp_collector import running_collector
from services.observe import traces
from services.values.errors import NoCapacity

pytestmark = pytest.mark.long

ROUTER = traces.TracedProcess("router", "router-0", "default")
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_a_malformed_traceparent_begins_a_new_trace(subtests, spans):
    for text in ["", "nonsense", "00-0-0-0"]:
        with subtests.test(text=text):
            spans.clear()
            with traces.span("route", text) as span:
                assert traces.traceparent(span).startswith("00-")
            (recorded,) = spans.get_finished_spans()
            assert recorded.parent is None


def test_a_span_ends_with_its_block_and_says_how(spans, subtests):
    for error, outcome, status in (
        (None, "finished", StatusCode.UNSET),
        (NoCapacity("full"), "NoCapacity", StatusCode.ERROR),
        (TimeoutError(), "TimeoutError", StatusCode.ERROR),
        (asyncio.CancelledError(), "cancelled", StatusCode.UNSET),
        (GeneratorExit(), "cancelled", StatusCode.UNSET),
    ):
        with subtests.test(error=repr(error)):
            spans.clear()
            with contextlib.suppress(BaseException), traces.span("route", PARENT):
                if error is not None:
                    raise error
            (recorded,) = spans.get_finished_spans()
            assert (recorded.attributes["outcome"], recorded.status.status_code) == (outcome, status)
            assert recorded.attributes.get("error.type") == (outcome if status is StatusCode.ERROR else None)
            assert f"{recorded.parent.span_id:016x}" == PARENT.split("-")[2]


async def test_a_span_outlives_the_yields_of_a_generator_that_another_task_closes(spans):
    async def answers():
        with traces.span("route", PARENT):
            yield 1

    generator = answers()
    await anext(generator)
    assert not spans.get_finished_spans()
    await asyncio.create_task(generator.aclose())
    (recorded,) = spans.get_finished_spans()
    assert recorded.attributes["outcome"] == "cancelled"


def test_traceparents(subtests):
    with subtests.test("without an endpoint nothing is recorded but the trace goes on"):
        shutdown = traces.setup_tracing(ROUTER, None)
        with traces.span("route", PARENT) as span:
            assert not span.is_recording()
            assert traces.traceparent(span) == PARENT
            assert not trace.get_current_span().get_span_context().is_valid
        shutdown()
    for given, expected in [
        ((("user-agent", "x"), ("traceparent", PARENT)), PARENT),
        ((("traceparent", b"bytes"),), ""),
        ((), ""),
        (None, ""),
    ]:
        with subtests.test("the traceparent of a call", given=given, expected=expected):
            assert traces.traceparent_in(given) == expected


@pytest.fixture
def collector():
    with running_collector() as servicer:
        yield servicer


@pytest.fixture
def tracer_provider(monkeypatch):
    """OpenTelemetry takes one provider for good; the test's own goes with the test."""
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", None)
    monkeypatch.setattr(trace, "_TRACER_PROVIDER_SET_ONCE", type(trace._TRACER_PROVIDER_SET_ONCE)())
    monkeypatch.setattr(trace, "_PROXY_TRACER_PROVIDER", trace.ProxyTracerProvider())


def test_spans_reach_the_collector_under_the_callers_trace(collector, tracer_provider):
    shutdown = traces.setup_tracing(ROUTER, collector.endpoint)
    with traces.span("route", PARENT) as span:
        carried = traces.traceparent(span)
    shutdown()
    [(service, sent, _)] = collector.spans()
    assert (service, sent.name) == ("router", "route")
    (resource,) = collector.resources()
    assert {name: value for name, value in resource.items() if name.startswith("service.")} == {
        "service.name": "router",
        "service.instance.id": "router-0",
        "service.namespace": "default",
        "service.version": metadata.version("isthmus"),
    }
    assert sent.trace_id.hex() == PARENT.split("-")[1] == carried.split("-")[1]
    assert sent.span_id.hex() == carried.split("-")[2]
    assert sent.parent_span_id.hex() == PARENT.split("-")[2]


def test_a_collector_that_takes_nothing_keeps_nobody_from_ending(tracer_provider, monkeypatch):
    taken = threading.Event()
    monkeypatch.setattr(traces.TracerProvider, "shutdown", lambda provider: taken.wait())
    monkeypatch.setattr(traces, "_LAST_SPANS_S", 0.01)
    traces.setup_tracing(ROUTER, "http://127.0.0.1:1")()
    taken.set()


def test_of_traces_that_begin_here_a_share_is_recorded_and_callers_decide_for_theirs(
    collector, tracer_provider
):
    shutdown = traces.setup_tracing(ROUTER, collector.endpoint, 0.25)
    kept = 0
    for _ in range(400):
        with traces.span("ours", "") as span:
            kept += traces.exemplar(span) is not None
    with traces.span("theirs", PARENT) as span:
        assert traces.exemplar(span) == {"trace_id": PARENT.split("-")[1]}
    with traces.span("theirs", PARENT.removesuffix("01") + "00") as span:
        assert traces.exemplar(span) is None
    shutdown()
    assert 40 < kept < 160
    assert [span.name for _, span, _ in collector.spans()].count("ours") == kept
    assert [span.name for _, span, _ in collector.spans()].count("theirs") == 1
