"""A decode rank shows these metrics beside its pool's."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Histogram

from services.engine.base import DecodeEngine
from services.rank.rank_metrics import SECONDS, PoolCollector, RequestMetrics
from services.values.errors import KvCorrupt
from services.values.rank import Plan
from services.values.request import Admitted


class DecodeMetrics(RequestMetrics):
    def __init__(self, registry: CollectorRegistry, engine: DecodeEngine) -> None:
        super().__init__(registry)
        counter = partial(Counter, registry=registry)
        histogram = partial(Histogram, registry=registry)
        registry.register(PoolCollector(engine.load))
        self._prompt_tokens = counter("isthmus_decode_prompt_tokens", "Prompt tokens of admitted requests.")
        self._prefix_tokens = counter(
            "isthmus_decode_prefix_tokens", "Of those, tokens found in this rank's cache."
        )
        self._generated = counter("isthmus_decode_generated_tokens", "Tokens generated.")
        self._received = counter("isthmus_decode_received_bytes", "KV bytes written into this rank's pools.")
        self._carried = counter(
            "isthmus_decode_carried_bytes",
            "Of received bytes, tails of windows and recurrent states, which come with every transfer.",
            ["kind"],
        )
        self._digested = counter(
            "isthmus_kv_digested_pages",
            "Received pages that were compared with the digests of what prefill wrote.",
        )
        self._mismatches = counter(
            "isthmus_kv_digest_mismatches",
            "Transfers that were given up because pages differed from what prefill wrote.",
        )
        self._queue = histogram(
            "isthmus_decode_queue_seconds",
            "Request received until its pages are reserved and its prefill rank is connected.",
            buckets=SECONDS,
        )
        self._transfer = histogram(
            "isthmus_decode_transfer_seconds",
            "What is left of the prefill leg beside queue and computing: its calls, and writes not hidden.",
            buckets=SECONDS,
        )

    @contextmanager
    def counted(self) -> Iterator[None]:
        try:
            with super().counted():
                yield
        except KvCorrupt:
            self._mismatches.inc()
            raise

    def admitted(self, admitted: Admitted, exemplar: dict[str, str] | None) -> None:
        self._prompt_tokens.inc(admitted.prompt_tokens)
        self._prefix_tokens.inc(admitted.decode_prefix_len)
        self._received.inc(admitted.kv_bytes_moved)
        for kind, size_bytes in admitted.carried_bytes.items():
            self._carried.labels(kind).inc(size_bytes)
        self._digested.inc(admitted.digested_pages)
        self._queue.observe(admitted.decode_queue_s, exemplar)
        if admitted.plan is Plan.REMOTE:
            self._transfer.observe(admitted.transfer_s, exemplar)

    def generated(self, num_tokens: int) -> None:
        self._generated.inc(num_tokens)
