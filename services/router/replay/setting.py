"""The ranks that are replayed, and what is known of them."""

from dataclasses import dataclass, field, replace

from services.router.placement.price import PriceWeights
from services.router.replay.workload import BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class Timing:
    """The KV is that of an 8B model with grouped queries in 16 bits."""

    block_tokens: int = BLOCK_TOKENS  # a page of the pools, and an index block
    tokens_per_s: float = 8_000.0  # prompt tokens a rank computes, of either role
    chunk_tokens: int = 2_048
    shorter_first: float = 2.0  # as --shorter-first
    kv_bytes_per_token: int = 131_072
    state_bytes: int = 0  # that crosses with every prompt
    bytes_per_s: float = 12.5e9  # out of one prefill rank
    tier_bytes_per_s: float = 5e9  # into a pool from the tier below it
    hop_s: float = 0.001  # between two services
    step_s: float = 0.015  # of a batch of one
    step_s_per_sequence: float = 0.0004
    chunk_step_s: float = 0.0  # that a chunk takes beyond its tokens, however few they are
    report_s: float = 0.05  # between two reports of a rank's load
    flush_s: float = 0.05  # a publisher gathers cache events for so long

    @property
    def block_bytes(self) -> int:
        return self.block_tokens * self.kv_bytes_per_token

    @property
    def reported_tokens_per_s(self) -> float:
        """Return the speed with which whole chunks are computed."""
        if not self.chunk_step_s:
            return self.tokens_per_s
        return self.chunk_tokens / (self.chunk_step_s + self.chunk_tokens / self.tokens_per_s)


@dataclass(frozen=True, slots=True)
class Setting:
    """`prefill` 0: an aggregated layout, in which every rank does both. `copies` of the trace at once, of
    which the first `duration_s` seconds are replayed."""

    prefill: int
    decode: int
    blocks: int = 2_500  # per rank
    tier_blocks: int = 0  # per rank, below its pool
    states: int = 0  # per rank, to go on from; 0: a model without, which goes on wherever blocks are held
    staleness_s: float = 0.25  # of the index, beyond the publisher's gathering
    routers: int = 1
    draw: int = 0  # Each other one has ties and, beyond 0, the requests of each router drawn otherwise.
    workload: str = "trace"
    copies: int = 1
    duration_s: float | None = None
    timing: Timing = field(default_factory=Timing)
    weights: PriceWeights = field(default_factory=PriceWeights)
    prefill_timing: Timing | None = None  # where prefill ranks are others than decode ranks
    prefill_blocks: int | None = None  # likewise
    slow_share: float = 1.0  # of the usual speed, that the first rank that computes prompts has

    def timings(self, num_ranks: int, num_slow: int, of_prefill: bool = False) -> list[Timing]:
        timing, share = self.timing, self.slow_share
        if of_prefill and self.prefill_timing is not None:
            timing = self.prefill_timing
        slow = replace(
            timing,
            tokens_per_s=timing.tokens_per_s * share,
            step_s=timing.step_s / share,
            step_s_per_sequence=timing.step_s_per_sequence / share,
        )
        return [slow if index < num_slow else timing for index in range(num_ranks)]

    @property
    def layout(self) -> str:
        return f"{self.prefill}+{self.decode}" if self.prefill else f"{self.decode} aggregated"

    def columns(self) -> dict[str, object]:
        return {
            "workload": self.workload,
            "layout": self.layout,
            "blocks": self.blocks,
            "tier": self.tier_blocks,
            "tokens/s": int(self.timing.tokens_per_s),
            "stale_s": self.staleness_s,
            "routers": self.routers,
        }
