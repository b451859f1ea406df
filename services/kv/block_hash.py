"""Index blocks are named by a 64-bit XXH3 chain over token ids, equal in every process of the cluster.

    local[i] = xxh3_64(tokens of block i, packed as little-endian u32, seed)
    seq[0]   = local[0]
    seq[i]   = xxh3_64(seq[i-1] and local[i], each as 8 bytes little-endian, seed)

So seq[i] names the block together with all that comes before it, within the seed's scope. SCHEME names this
format: whoever changes the bytes that are hashed must change that name.

A BlockLedger keeps the blocks that were stored or removed since it was read last. A store and a removal of
the same block cancel each other out. A radix tree has a ledger, a rank's checkpoints have one, and so has
SGLang's tree as its engine reports it.
"""

import sys
from array import array
from collections.abc import Sequence
from functools import lru_cache
from struct import Struct
from typing import cast

from xxhash import xxh3_64_intdigest

from services.values.kv import BlockHash

SCHEME = "xxh3-64/1"
TOKEN_BYTES = 4

_LINK = Struct("<QQ")
_LENGTH = Struct("<Q")
_KNOWN_SCOPES = 1024


@lru_cache(_KNOWN_SCOPES)
def scope_seed(model: str, cache_salt: str = "") -> int:
    """Return the 64-bit seed of one (model, salt). Sequences of two scopes share no hash."""
    # The lengths in front tell ("ab", "c") from ("a", "bc"). SCHEME has a third field, which is unused.
    fields = (text.encode() for text in (model, cache_salt, ""))
    return xxh3_64_intdigest(b"".join(_LENGTH.pack(len(field)) + field for field in fields))


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Return the ids as little-endian u32, TOKEN_BYTES each.

    Raises:
        OverflowError: an id does not fit in 32 bits.
    """
    packed = array("I", token_ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_tokens(packed: bytes) -> list[int]:
    token_ids = array("I", packed)
    if sys.byteorder == "big":
        token_ids.byteswap()
    return token_ids.tolist()


def extend_packed(parent: BlockHash | None, packed_block: bytes | memoryview, seed: int) -> BlockHash:
    """Return the sequence hash of the block of packed tokens that follows `parent`, or of a first one."""
    local = xxh3_64_intdigest(packed_block, seed)
    if parent is None:
        return BlockHash(local)
    return BlockHash(xxh3_64_intdigest(_LINK.pack(parent, local), seed))


def extend_hash(parent: BlockHash | None, block_token_ids: Sequence[int], seed: int) -> BlockHash:
    """Return the sequence hash of the block that follows `parent`, or of a first block where that is None."""
    return extend_packed(parent, pack_tokens(block_token_ids), seed)


def sequence_hashes(token_ids: Sequence[int], index_block: int, seed: int) -> list[BlockHash]:
    """Return one sequence hash for each full block of `index_block` tokens; a part of a block gets none."""
    num_tokens = len(token_ids) // index_block * index_block
    return packed_sequence_hashes(pack_tokens(token_ids[:num_tokens]), index_block, seed)


def packed_sequence_hashes(packed: bytes, index_block: int, seed: int) -> list[BlockHash]:
    block_bytes = index_block * TOKEN_BYTES
    whole_bytes = len(packed) // block_bytes * block_bytes
    # A prompt may have thousands of blocks with two calls of xxhash each, so the loop does nothing else.
    digest, link = xxh3_64_intdigest, _LINK.pack
    hashes = [
        digest(packed[start : start + block_bytes], seed) for start in range(0, whole_bytes, block_bytes)
    ]
    for position in range(1, len(hashes)):
        hashes[position] = digest(link(hashes[position - 1], hashes[position]), seed)
    return cast(list[BlockHash], hashes)


class BlockLedger:
    def __init__(self) -> None:
        self._changes: dict[BlockHash, bool] = {}  # True means stored, False removed.

    def __bool__(self) -> bool:
        return bool(self._changes)

    def note(self, block: BlockHash, *, stored: bool) -> None:
        if self._changes.get(block, stored) != stored:
            del self._changes[block]  # The opposite change was not read yet: both cancel out.
        else:
            self._changes[block] = stored

    def take(self) -> tuple[tuple[BlockHash, ...], tuple[BlockHash, ...]]:
        """Return (stored, removed) since the last call, each in the order in which it happened."""
        if not self._changes:  # Most steps change nothing.
            return (), ()
        changes, self._changes = self._changes, {}
        stored = tuple(block for block, is_stored in changes.items() if is_stored)
        return stored, tuple(block for block, is_stored in changes.items() if not is_stored)
