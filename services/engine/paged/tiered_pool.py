"""A rank's tiers keep what its pools have cached: pages, with the draft model's KV, and checkpoints."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from services.engine.paged.model_runner import DraftModel
from services.kv.carried_cache import CarriedCache
from services.kv.prefix_cache import PrefixCache
from services.kv.tiers import slot_spans
from services.kv.tiers.slot_spans import SlotSpan
from services.kv.tiers.tier_keys import scope
from services.values.kv import KvLayout, PageId


@dataclass(frozen=True, slots=True)
class TieredPool:
    cache: PrefixCache
    carried: CarriedCache
    draft: DraftModel | None
    layout: KvLayout
    block_tokens: int

    @property
    def block_pages(self) -> int:
        return self.block_tokens // self.layout.page_size

    @property
    def slot_bytes(self) -> int:
        return slot_spans.slot_bytes(self.layout, self.block_tokens)

    def scope(self, salt: str) -> bytes:
        return scope(self.layout, self.block_tokens, salt)

    def block_spans(self, pages: Sequence[PageId], first: int = 0) -> tuple[SlotSpan, ...]:
        return slot_spans.block_spans(self.layout, self.block_tokens, pages, first)

    def part_spans(self, units: Sequence[Sequence[PageId]]) -> list[tuple[SlotSpan, ...]]:
        return slot_spans.part_spans(self.layout, units, self.slot_bytes)

    def num_parts(self, position: int) -> int:
        return slot_spans.num_parts(self.layout, position, self.slot_bytes)

    def part_keys(self, salt: str, block_key: bytes, position: int) -> Iterator[bytes]:
        """Yield the keys of the parts of the checkpoint at `position`, where this block ends."""
        return slot_spans.part_keys(self.scope(salt), block_key, self.num_parts(position))

    def has_draft(self, pages: Sequence[PageId]) -> bool:
        """Return whether the draft model's KV of all tokens of these pages is there."""
        num_tokens = len(pages) * self.layout.page_size
        return self.draft is not None and self.draft.held_tokens(pages) == num_tokens
