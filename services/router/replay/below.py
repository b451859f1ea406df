"""A simulated rank's tier: the real books of what lies below a pool, in slots of a block each.

What a request has computed is stored when it ends, before its pages can be evicted. So a tier has what its
pool has, and what the pool had before, as far as there are slots.
"""

from collections.abc import Sequence

from services.kv.block_hash import sequence_hashes
from services.kv.tiers.books import TierBooks
from services.kv.tiers.tier_keys import KEY_BYTES, ROOT
from services.values.kv import CacheEvents


class Tier:
    """A block's number is its key: in a trace it stands for all that comes before it, too."""

    def __init__(self, num_blocks: int, seed: int) -> None:
        self._books = TierBooks([num_blocks])
        self._seed = seed

    def depth(self, blocks: Sequence[int]) -> int:
        """Return how many of the first blocks it holds."""
        return len(self._books.find(map(_key, blocks)))

    def store(self, blocks: Sequence[int]) -> None:
        parent, last = ROOT, None
        for block, block_hash in zip(blocks, sequence_hashes(blocks, 1, self._seed), strict=True):
            claimed = self._books.claim(_key(block), parent, block_hash)
            if claimed is not None:
                self._books.written(claimed, 0)
            elif _key(block) not in self._books:
                break
            parent, last = _key(block), block
        if last is not None:
            self._books.use(self._books.find([_key(last)])[0])

    def take_events(self) -> CacheEvents:
        return self._books.take_events()


def _key(block: int) -> bytes:
    return (block + 1).to_bytes(KEY_BYTES, "little")  # Number 0 would be ROOT.
