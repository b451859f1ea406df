"""What a scheduler of SGLang's tells of its load, as routers want it (managers/load_snapshot.py). Pure."""

from collections.abc import Mapping
from typing import Any

from services.values.kv import PageBooks
from services.values.load import RankLoad
from services.values.rank import Role

Load = Mapping[str, Any]


def num_pages(load: Load, page_size: int) -> int:
    """Of the rank's pool; 0 before its scheduler has told anything."""
    return int(load.get("max_total_num_tokens", 0)) // page_size


def waiting(load: Load, role: Role) -> int:
    """Requests that wait for pages. On decode SGLang's own number has those as well that have theirs and
    wait for prefill: its time is not this rank's."""
    if role is Role.PREFILL:
        return int(load.get("num_waiting_reqs", 0))
    queues = load.get("disaggregation", {})
    names = ("decode_prealloc_queue_reqs", "decode_retracted_queue_reqs")
    return sum(int(queues.get(name, 0)) for name in names)


def rank_load(load: Load, role: Role, page_size: int, pool_pages: int) -> RankLoad:
    """`pool_pages` until the rank has told; pages that SGLang could evict count as free."""
    total = num_pages(load, page_size) or pool_pages
    used_tokens = int(load.get("num_used_tokens", 0))
    used = min(total, -(-used_tokens // page_size))
    waits = waiting(load, role)
    # What waits on a decode rank waits for room: it computes no prompts. SGLang counts whole prompts there,
    # also what its tree has of them.
    uncached = int(load.get("num_waiting_uncached_tokens", 0))
    without_pages = max(0, int(load.get("num_total_tokens", 0)) - used_tokens)
    with_pages = 0 if role is Role.PREFILL else int(load.get("num_waiting_reqs", 0)) - waits
    return RankLoad(
        running=int(load.get("num_running_reqs", 0)) + max(0, with_pages),
        waiting=waits,
        pending_tokens=uncached if role is Role.PREFILL else 0,
        waiting_tokens=uncached if role is Role.PREFILL else without_pages,
        books=PageBooks(total, total - used, 0, 0, used, 0),
        prefill_tokens_per_s=_prefill_rate(load),
    )


def _prefill_rate(load: Load) -> float:
    busy_us = int(load.get("total_prefill_busy_us", 0) or 0)
    return int(load.get("total_prefill_uncached_tokens", 0)) * 1e6 / busy_us if busy_us else 0.0
