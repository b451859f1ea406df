"""What a router shows Prometheus."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from services.kv.types import Plan
from services.router.progress import Progress

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class RouterMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self._ttft = Histogram(
            "isthmus_ttft_seconds",
            "Request received until its first token.",
            buckets=_SECONDS,
            registry=registry,
        )
        self._duration = Histogram(
            "isthmus_request_seconds", "Request received until its end.", buckets=_SECONDS, registry=registry
        )
        self._requests = Counter("isthmus_requests", "Requests by outcome.", ["outcome"], registry=registry)
        self._placements = Counter(
            "isthmus_placements", "Placements by plan and reason.", ["plan", "reason"], registry=registry
        )
        self._prompt = self._tokens("prompt", "Prompt tokens of admitted requests.", registry)
        self._reused = self._tokens("reused", "Prompt tokens that no rank had to compute.", registry)
        self._prefix = self._tokens("decode_prefix", "Prompt tokens that the decode rank held.", registry)
        self._predicted = self._tokens("predicted_prefix", "The same, as the index predicted.", registry)
        self._completion = self._tokens("completion", "Generated tokens.", registry)
        self._moved = Counter("isthmus_kv_bytes_moved", "KV bytes that crossed.", registry=registry)
        self._saved = Counter("isthmus_kv_bytes_saved", "KV bytes that needed not cross.", registry=registry)
        self.retries = Counter(
            "isthmus_request_moves", "Times a request left a failed rank for another.", registry=registry
        )
        self.running = Gauge("isthmus_router_running_requests", "Requests in flight.", registry=registry)

    def observe(self, progress: Progress, outcome: str, took_s: float) -> None:
        """Account for a request that has ended, however it ended."""
        self._requests.labels(outcome).inc()
        self._duration.observe(took_s)
        if progress.first_token_s is not None:
            self._ttft.observe(progress.first_token_s)
        self._completion.inc(len(progress.output_ids))
        admitted, placed = progress.admitted, progress.placed
        if admitted is None or placed is None:
            return
        self._placements.labels(placed.plan.value, placed.decision.reason).inc()
        self._prompt.inc(admitted.prompt_tokens)
        self._prefix.inc(admitted.decode_prefix_len)
        self._predicted.inc(placed.decision.chosen.decode.hit_tokens)
        local = admitted.plan is Plan.LOCAL
        self._reused.inc(admitted.decode_prefix_len if local else admitted.prefill_prefix_len)
        self._moved.inc(admitted.kv_bytes_moved)
        self._saved.inc(admitted.kv_bytes_prompt - admitted.kv_bytes_moved)

    def _tokens(self, name: str, documentation: str, registry: CollectorRegistry) -> Counter:
        return Counter(f"isthmus_{name}_tokens", documentation, registry=registry)
