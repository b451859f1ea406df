"""Replays tell decode's hits beside attention's alone, and what prefill computes with few points."""

from bench.decode_cache.workload import Workload
from bench.hybrid.models import Model
from bench.hybrid.replay import Books, DecodeRank, PrefillRank, replay
from bench.hybrid.workload import points_in_use
from bench.report import Row
from services.kv.tails import units_at, units_for

_RUNNING = 16
_UNLIMITED = 1 << 16  # units: none is ever short
_CHUNK = 512


def hit_row(model: Model, workload: Workload, num_pages: int, page_size: int, seed: int) -> Row:
    """Decode ranks that differ by what they carry, with as many pages and the least of units."""
    units = units_for(model.group, page_size, _CHUNK, _RUNNING)
    ours = DecodeRank(Books((model.group,), (units,), num_pages, page_size, _CHUNK, _RUNNING))
    attention = DecodeRank(Books((), (), num_pages, page_size, _CHUNK, _RUNNING))
    for rank in (ours, attention):
        replay(workload, rank, seed)
    return {
        "model": model.name,
        "workload": workload.name,
        "prompt_tokens": ours.prompt_tokens,
        "attention_alone": attention.hit_tokens,
        "per_group": ours.hit_tokens,
        "least_of_all": ours.least_tokens,
        "of_attention": ours.hit_tokens / attention.hit_tokens,
    }


def computed_rows(model: Model, workload: Workload, num_pages: int, page_size: int, seed: int) -> list[Row]:
    """Prefill ranks that differ by how many checkpoints they keep beside what runs."""
    wanted = points_in_use(workload)
    unlimited = _computed(model, workload, _UNLIMITED, num_pages, page_size, seed)
    attention = PrefillRank(Books((), (), num_pages, page_size, _CHUNK, _RUNNING))
    replay(workload, attention, seed)
    rows: list[Row] = []
    for points in sorted({wanted // 4, wanted // 2, wanted, 2 * wanted}):
        computed = _computed(model, workload, points, num_pages, page_size, seed)
        rows.append(
            {
                "model": model.name,
                "workload": workload.name,
                "points": points,
                "come_back": wanted,
                "enough": points >= wanted,
                "computed_tokens": computed,
                "unlimited": unlimited,
                "of_unlimited": computed / unlimited,
                "of_full_attention": computed / attention.computed_tokens,
            }
        )
    return rows


def _computed(
    model: Model, workload: Workload, points: int, num_pages: int, page_size: int, seed: int
) -> int:
    of_a_point = units_at(model.group, 4 * max(model.group.window, page_size), page_size)
    units = units_for(model.group, page_size, _CHUNK, 2 * _RUNNING) + points * of_a_point
    rank = PrefillRank(Books((model.group,), (units,), num_pages, page_size, _CHUNK, _RUNNING))
    replay(workload, rank, seed)
    return rank.computed_tokens


def pages_for(workload: Workload, page_size: int) -> int:
    return sum(-(-conversation.num_tokens // page_size) + 1 for conversation in workload.conversations)
