"""A rank finds in its tiers, and in files of other ranks, what its pool lacks of a prompt.

Pages save some computing each. Where the layout has per-request state, a sequence that computes needs a
checkpoint as well, so it looks for the deepest one; a sequence that receives needs pages alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from services.engine.paged.sequence import Phase
from services.engine.paged.sequence import Sequence as EngineSequence
from services.engine.paged.tier_health import TierHealth
from services.engine.paged.tiered_pool import TieredPool
from services.kv.tiers.block import Block, Place, SlotState
from services.kv.tiers.books import TierBooks
from services.kv.tiers.records import SlotKind
from services.kv.tiers.tier_keys import keys_of
from services.kv.tiers.wait_or_cut import Left
from services.tier.shared import SharedFiles


@dataclass(frozen=True, slots=True)
class Found:
    first: int = 0  # `blocks` begin with this one of the prompt's.
    blocks: Sequence[Block] = ()
    parts: Sequence[Block] = ()  # These are of the checkpoint at `end`, if there is to be one.
    end: int = 0  # It is in tokens.
    wanted_end: int = 0  # So many tokens were looked for.
    saved_tokens: int = 0  # The sequence need not compute them once all is read.

    @property
    def slots(self) -> Sequence[Block]:
        return (*self.blocks, *self.parts)


NOTHING = Found()


class Finding:
    def __init__(
        self,
        books: TierBooks,
        pool: TieredPool,
        health: TierHealth,
        shared: SharedFiles | None,
        shared_tier: int,
    ) -> None:
        self._books = books
        self._pool = pool
        self._health = health
        self._shared = shared
        self._shared_tier = shared_tier

    def find(self, seq: EngineSequence, resumes_at: int, stored: int) -> Found | None:
        """Return what to read for a sequence that would compute from `resumes_at`, with the first `stored`
        tokens in its pages; None where there is nothing to look for."""
        block_tokens, keys = self._pool.block_tokens, self.wanted(seq)
        first, resumed = max(resumes_at, stored) // block_tokens, resumes_at // block_tokens
        wanted_end = len(keys) * block_tokens
        if len(keys) <= (first if self._takes_pages_alone(seq) else resumed):
            return None
        blocks = self.held(keys)
        blocks = [*blocks[:first], *self._trusted(blocks[first:])]
        if self._takes_pages_alone(seq):
            new = blocks[first:]
            end, saved_tokens = len(blocks) * block_tokens, len(new) * block_tokens
            return Found(first, new, (), end, wanted_end, saved_tokens)
        for num_blocks in range(len(blocks), resumed, -1):
            end = num_blocks * block_tokens
            if parts := self._parts(seq.request.kv_scope, blocks[num_blocks - 1], end):
                return Found(first, blocks[first:num_blocks], parts, end, wanted_end, end - resumes_at)
        return Found(wanted_end=wanted_end)

    def wanted(self, seq: EngineSequence) -> list[bytes]:
        limit = seq.matchable_tokens
        ids = seq.ids if limit is None else seq.ids[:limit]
        return keys_of(self._pool.scope(seq.request.kv_scope), ids, self._pool.block_tokens)

    def held(self, keys: Sequence[bytes], *, of_point: bool = False) -> list[Block]:
        """Return the slots of these keys that its own tiers hold, and those behind that others keep."""
        found = self._books.find(keys)
        if self._shared is None:
            return found
        for key in keys[len(found) :]:
            if (seen := self._shared.find(key)) is None:
                break
            place, kind = Place(self._shared_tier, seen.slot), SlotKind.PART if of_point else SlotKind.BLOCK
            found.append(
                Block(key, None, 0, place, 0, kind, seen.with_draft, SlotState.HELD, seen.digest),
            )
        return found

    def worth_reading(self, found: Found, computed_tokens_per_s: float) -> Found:
        """Leave out what takes longer to read than to compute.

        Before the first block whose tier reads too slowly we stop, and turn that tier off. A checkpoint saves
        all or nothing.
        """
        if found.parts:
            return found if self.left(found, computed_tokens_per_s).is_worth_reading else NOTHING
        for index, block in enumerate(found.blocks):
            alone = Found(blocks=(block,), saved_tokens=self._pool.block_tokens)
            if not self.left(alone, computed_tokens_per_s).is_worth_reading:
                self._health.turn_off(block.place.tier, "it reads slower than we compute")
                saved_tokens = index * self._pool.block_tokens
                return Found(found.first, found.blocks[:index], saved_tokens=saved_tokens)
        return found

    def left(self, found: Found, computed_tokens_per_s: float) -> Left:
        slot_bytes, trust = self._pool.slot_bytes, self._health.trust
        read_s = sum(trust[block.place.tier].seconds(slot_bytes) for block in found.slots)
        return Left(read_s, found.saved_tokens, computed_tokens_per_s)

    def _parts(self, salt: str, block: Block, position: int) -> Sequence[Block]:
        """Return all parts of the checkpoint at `position`, where this block ends; none if one is missing."""
        keys = self._pool.part_keys(salt, block.key, position)
        if not self.held([first := next(keys)], of_point=True):
            return ()  # Most blocks have none, and to name all parts takes longer.
        all_keys = [first, *keys]
        parts = self._trusted(self.held(all_keys, of_point=True))
        return parts if len(parts) == len(all_keys) else ()

    def _takes_pages_alone(self, seq: EngineSequence) -> bool:
        return self._pool.carried.is_empty or seq.receives or seq.phase is Phase.RECEIVING

    def _trusted(self, blocks: Sequence[Block]) -> Sequence[Block]:
        for index, block in enumerate(blocks):
            if self._health.is_off(block.place.tier):
                return blocks[:index]
        return blocks
