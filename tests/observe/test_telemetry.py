"""Log lines as they appear, metrics as Prometheus reads them, traces as a collector gets them."""

import asyncio
import contextlib
import json
import logging
import math
import re
import threading
import urllib.request
from importlib import metadata
from pathlib import Path

import prometheus_client
import pytest
from opentelemetry import trace
from opentelemetry.trace import StatusCode
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from net.ipv6 import LOOPBACKS, needs_ipv6
from observe.otlp_collector import running_collector
from services.observe import telemetry
from services.values.errors import ConfigError, NoCapacity

logger = logging.getLogger("services.somewhere")
ROUTER = telemetry.Process("router", "router-0", "default")
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture(autouse=True)
def root_logger():
    """What a test sets up on the root logger ends with the test."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:], root.level = handlers, level


def test_a_line_tells_when_who_and_what(capsys):
    telemetry.setup_logging("decode-0/1", "info", color=False)
    telemetry.event(logger, "request_finished", cached_len=128, ttft_ms=12.3456789, reason="stop")
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z INFO decode-0/1 services\.somewhere "
        r"request_finished cached_len=128 ttft_ms=12\.3457 reason=stop\n",
        capsys.readouterr().err,
    )


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("plain", "value=plain\n"),
        ("two words", 'value="two words"\n'),
        ("a=b", 'value="a=b"\n'),
        ("", 'value=""\n'),
        ("line\nline", 'value="line\\nline"\n'),
        ("\x1b[31m", 'value="\\u001b[31m"\n'),
        (None, "value=None\n"),
        (True, "value=True\n"),
    ],
)
def test_a_value_can_neither_break_the_line_nor_pass_for_another_key(capsys, value, text):
    telemetry.setup_logging("s", color=False)
    telemetry.event(logger, "said", value=value)
    assert capsys.readouterr().err.endswith("said " + text)


def test_the_level_holds_back(capsys):
    telemetry.setup_logging("s", "WARNING", color=False)
    telemetry.event(logger, "quiet")
    telemetry.event(logger, "loud", level=logging.WARNING)
    assert "quiet" not in (err := capsys.readouterr().err)
    assert "loud" in err


def test_setting_up_twice_does_not_log_twice(capsys):
    telemetry.setup_logging("s", color=False)
    telemetry.setup_logging("s", color=False)
    logger.info("once")
    assert capsys.readouterr().err.count("once") == 1


def test_colors_only_when_told(capsys):
    telemetry.setup_logging("s", color=True)
    logger.warning("careful")
    assert "\x1b[33m" in capsys.readouterr().err
    telemetry.setup_logging("s")  # stderr is no terminal here
    logger.warning("careful")
    assert "\x1b" not in capsys.readouterr().err


async def test_each_task_logs_its_own_request_id(capsys):
    telemetry.setup_logging("s", color=False)
    both = asyncio.Barrier(2)

    async def serve(request_id):
        with telemetry.request_context(request_id):
            await both.wait()
            logger.info("served %s", request_id)

    await asyncio.gather(serve("a"), serve("b c"))
    logger.info("after")
    lines = capsys.readouterr().err.splitlines()
    assert {line.split("somewhere ")[1] for line in lines} == {
        "served a request_id=a",
        'served b c request_id="b c"',
        "after",
    }


def test_as_json_a_line_has_an_event_s_fields_by_their_names(capsys):
    telemetry.setup_logging("decode-0/1", "info", "json")
    with telemetry.request_context("r"):
        telemetry.event(logger, "said", tokens=3, share=1 / 3, worst=math.nan, who=Path("/a"), service="x")
        logger.info("plain %s", "words")
    event, plain = map(json.loads, capsys.readouterr().err.splitlines())
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", event.pop("time"))
    assert event == {
        "level": "INFO",
        "service": "decode-0/1",
        "logger": "services.somewhere",
        "event": "said",
        "tokens": 3,
        "share": 0.333333,
        "worst": "nan",
        "who": "/a",
        "service_": "x",  # the line's own stays
        "request_id": "r",
    }
    assert (plain["message"], plain["request_id"]) == ("plain words", "r")


def test_as_json_a_traceback_stays_in_its_line(capsys):
    telemetry.setup_logging("s", "info", "json")
    try:
        raise KeyError("lost")
    except KeyError:
        logger.exception("failed")
    said = json.loads(capsys.readouterr().err)
    assert said["message"] == "failed" and said["exception"].endswith("KeyError: 'lost'")


def test_a_traceback_follows_its_line(capsys):
    telemetry.setup_logging("s", color=False)
    try:
        raise KeyError("lost")
    except KeyError:
        with telemetry.request_context("r"):
            logger.exception("failed")
    err = capsys.readouterr().err
    assert "failed request_id=r\nTraceback" in err
    assert "KeyError: 'lost'" in err


def metrics_page(url, accept):
    request = urllib.request.Request(url, headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=10) as response:
        return response.read().decode()


def test_metrics_are_served_until_stopped():
    registry = prometheus_client.CollectorRegistry()
    prometheus_client.Counter("moved_bytes", "Bytes.", registry=registry).inc(7)
    by_tenth = prometheus_client.Histogram("took", "Seconds.", ["role"], registry=registry)
    by_tenth.labels("theirs").observe(0.1, {"trace_id": "ab"})
    labels = {"role": "decode", "rank": "1"}
    port, stop = telemetry.serve_metrics("127.0.0.1", 0, registry, labels)
    url = f"http://127.0.0.1:{port}/metrics"
    plain = metrics_page(url, "text/plain")
    assert 'moved_bytes_total{rank="1",role="decode"} 7.0' in plain
    # What a sample says itself holds: a router speaks of other ranks.
    assert 'took_count{rank="1",role="theirs"} 1.0' in plain
    assert "_created" not in plain and "trace_id" not in plain
    assert '# {trace_id="ab"} 0.1' in metrics_page(url, "application/openmetrics-text")
    with pytest.raises(ConfigError, match=str(port)):
        telemetry.serve_metrics("127.0.0.1", port, registry, labels)
    stop()
    with pytest.raises(OSError):
        urllib.request.urlopen(url, timeout=10)


@needs_ipv6
@pytest.mark.parametrize(("host", "heard"), [("::", LOOPBACKS), ("::1", LOOPBACKS[1:])])
def test_metrics_are_served_over_ipv6_too(host, heard):
    port, stop = telemetry.serve_metrics(host, 0, prometheus_client.CollectorRegistry(), {})
    for address in heard:
        assert metrics_page(f"http://{address}:{port}/metrics", "text/plain") == ""
    stop()
    with pytest.raises(OSError):
        urllib.request.urlopen(f"http://[::1]:{port}/metrics", timeout=10)


async def test_what_a_loop_owns_is_collected_on_that_loop():
    class Owned(Collector):
        def collect(self):
            threads.append(threading.get_ident())
            yield GaugeMetricFamily("owned", "Of the loop.", asyncio.get_running_loop() is loop)

    loop, threads, registry = asyncio.get_running_loop(), [], prometheus_client.CollectorRegistry()
    registry.register(telemetry.OnLoop(Owned()))
    port, stop = telemetry.serve_metrics("127.0.0.1", 0, registry, {})
    plain = await asyncio.to_thread(metrics_page, f"http://127.0.0.1:{port}/metrics", "text/plain")
    assert "owned 1.0" in plain
    assert [metric.name for metric in registry.collect()] == ["owned"]
    assert threads == [threading.get_ident()] * 2
    await asyncio.to_thread(stop)


def test_without_an_endpoint_nothing_is_recorded_but_the_trace_goes_on():
    shutdown = telemetry.setup_tracing(ROUTER, None)
    with telemetry.span("route", PARENT) as span:
        assert not span.is_recording()
        assert telemetry.traceparent(span) == PARENT
        assert not trace.get_current_span().get_span_context().is_valid
    shutdown()


@pytest.mark.parametrize("text", ["", "nonsense", "00-0-0-0"])
def test_a_malformed_traceparent_begins_a_new_trace(text, spans):
    with telemetry.span("route", text) as span:
        assert telemetry.traceparent(span).startswith("00-")
    (recorded,) = spans.get_finished_spans()
    assert recorded.parent is None


@pytest.mark.parametrize(
    ("error", "outcome", "status"),
    [
        (None, "finished", StatusCode.UNSET),
        (NoCapacity("full"), "NoCapacity", StatusCode.ERROR),
        (TimeoutError(), "TimeoutError", StatusCode.ERROR),
        (asyncio.CancelledError(), "cancelled", StatusCode.UNSET),
        (GeneratorExit(), "cancelled", StatusCode.UNSET),
    ],
)
def test_a_span_ends_with_its_block_and_says_how(error, outcome, status, spans):
    with contextlib.suppress(BaseException), telemetry.span("route", PARENT):
        if error is not None:
            raise error
    (recorded,) = spans.get_finished_spans()
    assert (recorded.attributes["outcome"], recorded.status.status_code) == (outcome, status)
    assert recorded.attributes.get("error.type") == (outcome if status is StatusCode.ERROR else None)
    assert f"{recorded.parent.span_id:016x}" == PARENT.split("-")[2]


async def test_a_span_outlives_the_yields_of_a_generator_that_another_task_closes(spans):
    async def answers():
        with telemetry.span("route", PARENT):
            yield 1

    generator = answers()
    await anext(generator)
    assert not spans.get_finished_spans()
    await asyncio.create_task(generator.aclose())
    (recorded,) = spans.get_finished_spans()
    assert recorded.attributes["outcome"] == "cancelled"


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ((("user-agent", "x"), ("traceparent", PARENT)), PARENT),
        ((("traceparent", b"bytes"),), ""),
        ((), ""),
        (None, ""),
    ],
)
def test_the_traceparent_of_a_call(metadata, expected):
    assert telemetry.traceparent_in(metadata) == expected


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
    shutdown = telemetry.setup_tracing(ROUTER, collector.endpoint)
    with telemetry.span("route", PARENT) as span:
        carried = telemetry.traceparent(span)
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
    monkeypatch.setattr(telemetry.TracerProvider, "shutdown", lambda provider: taken.wait())
    monkeypatch.setattr(telemetry, "_LAST_SPANS_S", 0.01)
    telemetry.setup_tracing(ROUTER, "http://127.0.0.1:1")()
    taken.set()


def test_of_traces_that_begin_here_a_share_is_recorded_and_callers_decide_for_theirs(
    collector, tracer_provider
):
    shutdown = telemetry.setup_tracing(ROUTER, collector.endpoint, 0.25)
    kept = 0
    for _ in range(400):
        with telemetry.span("ours", "") as span:
            kept += telemetry.exemplar(span) is not None
    with telemetry.span("theirs", PARENT) as span:
        assert telemetry.exemplar(span) == {"trace_id": PARENT.split("-")[1]}
    with telemetry.span("theirs", PARENT.removesuffix("01") + "00") as span:
        assert telemetry.exemplar(span) is None
    shutdown()
    assert 40 < kept < 160
    assert [span.name for _, span, _ in collector.spans()].count("ours") == kept
    assert [span.name for _, span, _ in collector.spans()].count("theirs") == 1
