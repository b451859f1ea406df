"""Ranks on a CPU take of its memory by their flags and config.json; this says how large a pool may be.

    a rank    Python and its libraries, the weights, windows and states, pages of KV
    pages     the requested ones, if all fits; else 2,048, or as many as half of what is free then holds

A pool is not taken at once: the kernel gives memory as pages are written. But it fills up with what was
computed, so all of it has to be there. All is pure but `read_config`.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.engine.engine_config import DEFAULT_KV_PAGES, EngineConfig
from services.kv.tails import PoolSizes
from services.model.layer_groups import LayerGroups, draft_groups, layer_groups
from services.model.model_config import ITEM_BYTES, kv_dtype
from services.model.weights import weights
from services.values.errors import ConfigError, Unavailable

_GIB = 1 << 30
# Python, torch, transformers, NIXL and a step took 0.5 to 0.7 GiB beside weights and pools.
_PROCESS_BYTES = int(0.75 * _GIB)
# This is a share of what processes and weights leave free. The rest is for what fills up beside a pool:
# files in the page cache, routers, etcd, and whoever else works on the machine.
_POOL_SHARE = 0.5
_FEWEST_TOKENS = 1024  # A pool that nobody asked for has no fewer.


@dataclass(frozen=True, slots=True)
class RanksMemory:
    """Each of `count` ranks takes the same, beside pages and for a page."""

    count: int
    weights_bytes: int
    beside_bytes: int  # Windows and states take these.
    page_bytes: int
    page_size: int  # It counts tokens.
    kv_pages: int | None  # It is None where nobody has said.

    @property
    def fixed_bytes(self) -> int:
        return self.count * (_PROCESS_BYTES + self.weights_bytes + self.beside_bytes)

    def pool_bytes(self, pages: int) -> int:
        return self.count * pages * self.page_bytes


def ranks_memory(settings: EngineConfig, config: Mapping[str, Any]) -> RanksMemory | None:
    """Return what a worker's ranks take, or None where nobody reckons it.

    That is where memory is a GPU's or SGLang's business, or the model's size is not known.
    """
    if settings.engine != "torch" or settings.device != "cpu":
        return None
    try:
        return _ranks_memory(settings, config, read_config(settings.draft_model))
    except ConfigError:
        return None


def read_config(model: str) -> Mapping[str, Any]:
    """Return a checkpoint's config.json, or nothing where none can be read: whoever loads it says why."""
    try:
        content = json.loads(Path(model, "config.json").read_text()) if model else {}
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def free_beside_tiers(workers: Sequence[EngineConfig], free_bytes: int, total_bytes: int) -> int:
    """Return what is free once all ranks have their tiers in memory, which are allocated at the start.

    Raises:
        Unavailable: they do not fit into what is free now.
        ConfigError: they do not fit into all the memory there is.
    """
    tier_bytes = sum(worker.tiers.memory_bytes * worker.dp_size for worker in workers)
    if tier_bytes and tier_bytes >= free_bytes:  # The process would be killed while it allocates them.
        message = f"--kv-tier: {tier_bytes} bytes of memory do not fit into {free_bytes} that are free"
        raise (ConfigError if tier_bytes >= total_bytes else Unavailable)(message)
    return free_bytes - tier_bytes


def pool_pages(ranks: Sequence[RanksMemory], free_bytes: int, total_bytes: int) -> int:
    """Return how many pages each of the ranks is to have that were not given a number.

    Raises:
        Unavailable: what is requested, or the least there can be, does not fit into what is free now.
        ConfigError: it does not fit into all the memory there is.
    """
    fixed_bytes = sum(each.fixed_bytes for each in ranks)
    asked_bytes = sum(each.pool_bytes(each.kv_pages) for each in ranks if each.kv_pages is not None)
    unasked = [each for each in ranks if each.kv_pages is None]
    left_bytes = free_bytes - fixed_bytes - asked_bytes
    fewest = max((-(-_FEWEST_TOKENS // each.page_size) for each in unasked), default=0)
    needed_bytes = fixed_bytes + asked_bytes + sum(each.pool_bytes(fewest) for each in unasked)
    if needed_bytes > free_bytes:
        message = _refusal(ranks, needed_bytes, free_bytes)
        raise (ConfigError if needed_bytes > total_bytes else Unavailable)(message)
    page_bytes = sum(each.pool_bytes(1) for each in unasked)
    fitting = int(_POOL_SHARE * left_bytes) // page_bytes if page_bytes else DEFAULT_KV_PAGES
    return max(fewest, min(fitting, DEFAULT_KV_PAGES))


def _ranks_memory(settings: EngineConfig, config: Mapping[str, Any], draft: Mapping[str, Any]) -> RanksMemory:
    own_dtype, groups = kv_dtype(config), layer_groups(config)
    dtype = settings.dtype or own_dtype
    own_bytes = weights(config, dequantized=True).bytes_per_gpu()  # as a rank on a CPU has them
    weights_bytes = own_bytes / ITEM_BYTES[own_dtype] * ITEM_BYTES[dtype]
    of_pages = "fp8" if settings.kv_dtype else dtype
    token_bytes = groups.full.token_bytes(of_pages)
    if draft:
        weights_bytes += weights(draft, dequantized=True).bytes_per_gpu()
        own = "fp8" if settings.kv_dtype else kv_dtype(draft)
        token_bytes += draft_groups(draft, config).whole_token_bytes(own)
    most_pages = settings.kv_pages or DEFAULT_KV_PAGES
    return RanksMemory(
        count=settings.dp_size,
        weights_bytes=int(weights_bytes),
        beside_bytes=_beside_bytes(
            settings.pool_sizes, groups, dtype, of_pages, settings.page_size, most_pages
        ),
        page_bytes=settings.page_size * token_bytes,
        page_size=settings.page_size,
        kv_pages=settings.kv_pages,
    )


def _beside_bytes(
    sizes: PoolSizes, groups: LayerGroups, dtype: str, of_pages: str, page_size: int, num_pages: int
) -> int:
    """Return what windows, whose pages are of another type than states, and states take."""
    windows = [window.in_layout(of_pages, page_size) for window in groups.windows]
    tails = sum(group.unit_bytes * sizes.num_units(group, page_size, num_pages) for group in windows)
    return tails + (sizes.num_states * groups.recurrent.state_bytes(dtype) if groups.recurrent else 0)


def _refusal(ranks: Sequence[RanksMemory], needed_bytes: int, free_bytes: int) -> str:
    count = sum(each.count for each in ranks)
    weights_bytes = sum(each.count * each.weights_bytes for each in ranks)
    asked = max((each.kv_pages or 0 for each in ranks), default=0)
    page_bytes = sum(each.pool_bytes(1) for each in ranks)
    room_bytes = free_bytes - sum(each.fixed_bytes for each in ranks)
    of_weights = f"{_gib(weights_bytes)} of it weights"
    fitting = room_bytes // page_bytes if page_bytes else 0
    if asked and fitting > 0:
        advice = f"--kv-pages={min(asked, fitting)} would fit"
    else:
        advice = "take a smaller model, or fewer ranks"
    whose = "a rank takes" if count == 1 else f"{count} ranks take"
    return f"{whose} {_gib(needed_bytes)}, {of_weights}, and {_gib(free_bytes)} of memory are free: {advice}"


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / _GIB:.1f} GiB"
