"""Two ranks of each role, what was observed of them, and a clock of ours."""

from dataclasses import replace

from services.router.ranks.balance import Balance
from services.values.kv import BlockHash
from services.values.rank import Plan, RankKey
from services.values.request import Admitted, Pulled

D0, D1 = RankKey("decode", 0), RankKey("decode", 1)
P0, P1 = RankKey("prefill", 0), RankKey("prefill", 1)
PRIOR_RATE, PRIOR_BANDWIDTH = 10_000.0, 1e9
MIB = 1 << 20


class Clock:
    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


def took(**changes) -> Admitted:
    """2000 tokens computed at 4000 tokens/s by a prefill rank; nothing moved."""
    usual = Admitted(
        prompt_tokens=2_000,
        decode_prefix_len=0,
        prefill_prefix_len=0,
        computed_tokens=2_000,
        kv_bytes_moved=0,
        kv_bytes_prompt=0,
        decode_queue_s=0.0,
        prefill_queue_s=0.0,
        prefill_compute_s=0.5,
        transfer_s=0.0,
        plan=Plan.REMOTE,
    )
    return replace(usual, **changes)


def moved(bandwidth: float, compute_s: float = 0.5, size_bytes: float = 64 * MIB) -> Admitted:
    """What placement foretells for 2000 tokens in two chunks: half the bytes are in the last one."""
    took_s = max(compute_s, size_bytes / bandwidth) + size_bytes / 2 / bandwidth
    return took(kv_bytes_moved=int(size_bytes), prefill_compute_s=compute_s, transfer_s=took_s - compute_s)


def pulled(seconds: float, size_bytes: int = 64 * MIB) -> Pulled:
    return Pulled(tokens=1_000, bytes=size_bytes, seconds=seconds)


def hashes(*numbers: int) -> list[BlockHash]:
    return [BlockHash(number) for number in numbers]


def predicted(balance, rank: RankKey, blocks) -> int:
    """Return how many of them, from the first on, are guessed to be there."""
    return balance.predictions.of(blocks, balance.clock()).depth(rank)


def known() -> tuple[Clock, Balance]:
    """What a router knows that has seen nothing yet, and the clock that it goes by."""
    clock = Clock()
    balance = Balance(
        clock, prior_tokens_per_s=PRIOR_RATE, prior_bandwidth=PRIOR_BANDWIDTH, chunk_tokens=1_000
    )
    return clock, balance
