"""SGLang's own page of metrics, shared out over the pages of its DP ranks."""

import http.server
import threading

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from services.engine.sglang.service import own_metrics
from services.rank.rank_metrics import EngineCollector

PAGE = """\
# HELP sglang:num_running_reqs The number of running requests.
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{dp_rank="0",engine_type="decode",model_name="m"} 3.0
sglang:num_running_reqs{dp_rank="1",engine_type="decode",model_name="m"} 5.0
# HELP sglang:prompt_tokens_total Prefill tokens.
# TYPE sglang:prompt_tokens_total counter
sglang:prompt_tokens_total{model_name="m",worker="theirs"} 70.0
# HELP sglang:e2e_request_latency_seconds Latency.
# TYPE sglang:e2e_request_latency_seconds histogram
sglang:e2e_request_latency_seconds_sum{model_name="m"} 2.5
sglang:e2e_request_latency_seconds_bucket{le="0.5",model_name="m"} 1.0
sglang:e2e_request_latency_seconds_bucket{le="+Inf",model_name="m"} 4.0
sglang:e2e_request_latency_seconds_count{model_name="m"} 4.0
# HELP process_open_fds Ours.
# TYPE process_open_fds gauge
process_open_fds 9.0
# HELP isthmus_kv_pages Ours.
# TYPE isthmus_kv_pages gauge
isthmus_kv_pages 1.0
"""


class Page(http.server.BaseHTTPRequestHandler):
    text = PAGE

    def do_GET(self):
        self.send_response(200 if self.path == "/metrics" else 404)
        self.end_headers()
        self.wfile.write(self.text.encode())

    def log_message(self, *_):
        pass


@pytest.fixture
def url():
    server = http.server.HTTPServer(("127.0.0.1", 0), Page)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/metrics"
    server.shutdown()
    thread.join()
    server.server_close()


def page_of(url, dp_rank):
    registry = CollectorRegistry()
    registry.register(EngineCollector(lambda: own_metrics.read(url, dp_rank)))
    return generate_latest(registry).decode()


def test_each_rank_has_its_own_and_the_first_what_is_nobody_s(url, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    first, second = page_of(url, 0), page_of(url, 1)
    assert 'sglang:num_running_reqs{dp_rank="0",engine_type="decode",model_name="m"} 3.0' in first
    assert 'sglang:num_running_reqs{dp_rank="1",engine_type="decode",model_name="m"} 5.0' in second
    assert 'sglang:prompt_tokens_total{exported_worker="theirs",model_name="m"} 70.0' in first
    assert 'sglang:e2e_request_latency_seconds_bucket{le="0.5",model_name="m"} 1.0' in first
    assert "sglang:e2e_request_latency_seconds_count" not in second
    for page in (first, second):
        assert "process_open_fds" not in page and "isthmus_kv_pages" not in page
        assert "isthmus_sglang_metrics_up 1.0" in page


def test_a_page_that_cannot_be_had_is_told_and_takes_no_other_metric_with_it(url, monkeypatch):
    assert page_of("http://127.0.0.1:1/metrics", 0).endswith("isthmus_sglang_metrics_up 0.0\n")
    assert page_of(url + "/nowhere", 0).endswith("isthmus_sglang_metrics_up 0.0\n")
    monkeypatch.setattr(Page, "text", "sglang:x{ not a page")
    assert page_of(url, 0).endswith("isthmus_sglang_metrics_up 0.0\n")
