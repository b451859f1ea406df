"""A prefill rank shows these metrics beside its pool's."""

from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from services.engine.base import PrefillEngine
from services.rank.rank_metrics import SECONDS, PoolCollector, RequestMetrics
from services.values.request import PrefillResult


class PrefillMetrics(RequestMetrics):
    def __init__(
        self, registry: CollectorRegistry, engine: PrefillEngine, *, expects_rdma: bool = False
    ) -> None:
        super().__init__(registry)
        counter = partial(Counter, registry=registry)
        histogram = partial(Histogram, registry=registry)
        registry.register(PoolCollector(engine.load))
        Gauge(
            "isthmus_kv_rdma_expected",
            "1 where KV is to cross by RDMA: --expect-kv-path=rdma.",
            registry=registry,
        ).set(expects_rdma)
        self._prefix_tokens = counter(
            "isthmus_prefill_prefix_tokens",
            "Prompt tokens found in this rank's cache, of requests whose KV was sent.",
        )
        self._computed_tokens = counter(
            "isthmus_prefill_computed_tokens",
            "Prompt tokens computed for requests whose KV was sent; isthmus_rank_computed_tokens counts "
            "those of failed and left ones, too.",
        )
        self._sent = counter("isthmus_prefill_sent_bytes", "KV bytes written to decode ranks.")
        self._queue = histogram(
            "isthmus_prefill_queue_seconds", "Request received until its computing begins.", buckets=SECONDS
        )
        self._compute = histogram(
            "isthmus_prefill_compute_seconds", "Computing begun until the first token.", buckets=SECONDS
        )

    def prefilled(self, result: PrefillResult, exemplar: dict[str, str] | None) -> None:
        self._prefix_tokens.inc(result.prefill_prefix_len)
        self._computed_tokens.inc(result.computed_tokens)
        self._sent.inc(result.kv_bytes_moved)
        self._queue.observe(result.queue_s, exemplar)
        self._compute.observe(result.compute_s, exemplar)
