"""What a decode rank shows Prometheus."""

from prometheus_client import CollectorRegistry, Counter, Histogram

from services.engine.base import DecodeEngine
from services.pool_metrics import PoolCollector
from services.request import Admitted


class DecodeMetrics:
    def __init__(self, registry: CollectorRegistry, engine: DecodeEngine) -> None:
        registry.register(PoolCollector(engine.load))
        self._prompt_tokens = Counter(
            "isthmus_decode_prompt_tokens", "Prompt tokens of admitted requests.", registry=registry
        )
        self._prefix_tokens = Counter(
            "isthmus_decode_prefix_tokens", "Of those, tokens found in this rank's cache.", registry=registry
        )
        self._kv_bytes = Counter(
            "isthmus_decode_kv_bytes_moved", "KV bytes written into this rank's pages.", registry=registry
        )
        self._transfer = Histogram(
            "isthmus_decode_transfer_seconds",
            "Last chunk computed until the last page landed.",
            registry=registry,
        )

    def admitted(self, admitted: Admitted) -> None:
        self._prompt_tokens.inc(admitted.prompt_tokens)
        self._prefix_tokens.inc(admitted.decode_prefix_len)
        self._kv_bytes.inc(admitted.kv_bytes_moved)
        self._transfer.observe(admitted.transfer_s)
