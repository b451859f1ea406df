"""This passes SGLang's page of metrics on, divided over the pages of its DP ranks.

SGLang listens on loopback only and for this service alone, so nobody else can read it.
"""

import logging
import urllib.request
from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families

from services.observe.log_lines import event

log = logging.getLogger(__name__)

_PREFIX = "sglang:"  # All of SGLang's own metrics have it; our page already has those of a Python process.
_TIMEOUT_S = 5.0
# Every sample of a page has these labels of ours. SGLang's are renamed, as Prometheus does.
_OURS = ("isthmus_cluster", "role", "worker", "rank", "model")


def read(url: str, dp_rank: int) -> Iterator[Metric]:
    """Yield one DP rank's metrics; this blocks. Where SGLang does not answer, only that is reported."""
    try:
        # SGLang is on this host, so no proxy of the environment is used.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(url, timeout=_TIMEOUT_S) as response:
            found = list(of_rank(response.read().decode(), dp_rank))
    except (OSError, ValueError) as error:
        event(log, "sglang_metrics_unreadable", level=logging.WARNING, error=error)
        yield _answers(0)
        return
    yield _answers(1)
    yield from found


def of_rank(page: str, dp_rank: int) -> Iterator[Metric]:
    """Yield the metrics of one DP rank; those of no rank belong to the first one.

    Raises ValueError where the page is not in Prometheus's format.
    """
    for metric in text_string_to_metric_families(page):
        if metric.name.startswith(_PREFIX):
            mine = [s for s in metric.samples if _rank_of(s.labels) == dp_rank]
            metric.samples = [s._replace(labels=_renamed(s.labels)) for s in mine]
            if metric.samples:
                yield metric


def _rank_of(labels: dict[str, str]) -> int:
    text = labels.get("dp_rank", "")
    return int(text) if text.isdecimal() else 0


def _renamed(labels: dict[str, str]) -> dict[str, str]:
    return {f"exported_{name}" if name in _OURS else name: value for name, value in labels.items()}


def _answers(value: int) -> Metric:
    return GaugeMetricFamily(
        "isthmus_sglang_metrics_up", "1 where SGLang's own metrics could be read.", value
    )
