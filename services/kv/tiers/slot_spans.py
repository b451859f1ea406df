"""A slot's bytes are spans of units: the pages of one block, or a part of a checkpoint.

    block 0 -- block 1 -- block 2 -- ...       one slot each: its pages, then the draft model's
                  |
                  +-- part -- part -- end      the checkpoint at the end of block 1: tails, then the state

A checkpoint may be larger than a slot, so its bytes are cut into parts. Each part is the parent of the next
one. So by the books' closure whoever finds the end has the whole checkpoint, and the blocks before it.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from services.kv.tails import carried_bytes, units_of_a_sequence
from services.kv.tiers.tier_keys import next_key
from services.values.kv import KvLayout, PageId

_PART = b"state"  # No block has five bytes of tokens, so a part never has the key of a block.


class SlotSpan(NamedTuple):
    """It is a piece of one unit, and where that lies in the slot; all but the pool and the unit is in bytes.

    Pools are counted as in `KvLayout.unit_bytes`.
    """

    at: int
    pool: int
    unit: PageId
    start: int
    num_bytes: int


def slot_bytes(layout: KvLayout, block_tokens: int) -> int:
    page_bytes = layout.page_bytes + sum(group.unit_bytes for group in layout.draft_group)
    return block_tokens // layout.page_size * page_bytes


def block_spans(
    layout: KvLayout, block_tokens: int, pages: Sequence[PageId], first: int = 0
) -> tuple[SlotSpan, ...]:
    """Return the spans of a block's pages from its page `first` on."""
    spans, at = list[SlotSpan](), 0
    pools = (0, len(layout.unit_bytes) - 1) if layout.draft is not None else (0,)
    for pool in pools:
        size = layout.unit_bytes[pool]
        spans += [SlotSpan(at + i * size, pool, page, 0, size) for i, page in enumerate(pages, start=first)]
        at += block_tokens // layout.page_size * size
    return tuple(spans)


def part_spans(
    layout: KvLayout, units: Iterable[Sequence[PageId]], bytes_of_slot: int
) -> list[tuple[SlotSpan, ...]]:
    """Return the spans of each part of a checkpoint, whose units are given by group of per-request state."""
    parts: list[list[SlotSpan]] = [[]]
    at = 0
    for pool, of_group in enumerate(units, start=1):
        for unit in of_group:
            start, size = 0, layout.unit_bytes[pool]
            while start < size:
                if at == bytes_of_slot:
                    parts.append([])
                    at = 0
                num_bytes = min(size - start, bytes_of_slot - at)
                parts[-1].append(SlotSpan(at, pool, unit, start, num_bytes))
                at, start = at + num_bytes, start + num_bytes
    return [tuple(part) for part in parts]


def num_parts(layout: KvLayout, position: int, bytes_of_slot: int) -> int:
    """Return the number of parts: at least one, even if no bytes are needed to go on at `position`."""
    return max(1, -(-carried_bytes(layout, position) // bytes_of_slot))


def most_parts(layout: KvLayout, bytes_of_slot: int) -> int:
    """Return the most parts that a checkpoint has; 0 where there are none."""
    sizes = [units_of_a_sequence(group, layout.page_size) * group.unit_bytes for group in layout.carried]
    return -(-sum(sizes) // bytes_of_slot)


def part_keys(scope_key: bytes, block_key: bytes, count: int) -> Iterator[bytes]:
    key = block_key
    for _ in range(count):
        key = next_key(scope_key, key, _PART)
        yield key
