"""Names of index blocks: a 64-bit XXH3 chain over token ids, equal in every process of the cluster.

    local[i] = xxh3_64(tokens of block i, packed as little-endian u32, seed)
    seq[0]   = local[0]
    seq[i]   = xxh3_64(seq[i-1] as 8 bytes little-endian + local[i] likewise, seed)

So seq[i] names the block together with all that comes before it, within the seed's scope. The bytes
are fixed by SCHEME: whoever changes them changes its name.

Trees whose keys are pairs of neighbours, (t[0], t[1]), (t[1], t[2]), ..., have blocks of so many pairs. The
second elements and t[0] say all of them, so a second chain names those:

    tokens   seed                  block i: t[i * B], ..., t[i * B + B - 1]
    pairs    pair_seed(t[0], ..)   block i: t[i * B + 1], ..., t[i * B + B]

A block of either is worth the KV of the same B tokens; the last pair needs one token more.
"""

import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
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
_PAIRS = b"pairs"  # before a first token: a seed is no block's hash


@dataclass(frozen=True, slots=True)
class BlockChains:
    """The names of a sequence's full index blocks; `pairs` stays empty where no rank has blocks of pairs."""

    tokens: Sequence[BlockHash]
    pairs: Sequence[BlockHash] = ()

    def of(self, paired: bool) -> Sequence[BlockHash]:
        return self.pairs if paired else self.tokens


@lru_cache(_KNOWN_SCOPES)
def scope_seed(model: str, cache_salt: str = "") -> int:
    """The 64-bit seed of one (model, salt); sequences of two scopes share no hash."""
    # With lengths in front, ("ab", "c") and ("a", "bc") differ. SCHEME has a third field, of no use so far.
    fields = (text.encode() for text in (model, cache_salt, ""))
    return xxh3_64_intdigest(b"".join(_LENGTH.pack(len(field)) + field for field in fields))


def pair_seed(first_token: int, seed: int) -> int:
    """The seed of blocks of pairs, of sequences that begin so. Raises OverflowError as `pack_tokens`."""
    return xxh3_64_intdigest(_PAIRS + pack_tokens((first_token,)), seed)


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Little-endian u32, TOKEN_BYTES each. Raises OverflowError for an id outside of 32 bits."""
    packed = array("I", token_ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_tokens(packed: bytes) -> list[int]:
    """What was packed."""
    token_ids = array("I", packed)
    if sys.byteorder == "big":
        token_ids.byteswap()
    return token_ids.tolist()


def extend_packed(parent: BlockHash | None, packed_block: bytes | memoryview, seed: int) -> BlockHash:
    """The sequence hash of the block of packed tokens that follows `parent` (None: the first one)."""
    local = xxh3_64_intdigest(packed_block, seed)
    if parent is None:
        return BlockHash(local)
    return BlockHash(xxh3_64_intdigest(_LINK.pack(parent, local), seed))


def extend_hash(parent: BlockHash | None, block_token_ids: Sequence[int], seed: int) -> BlockHash:
    """The sequence hash of the block that follows `parent` (None: the first block)."""
    return extend_packed(parent, pack_tokens(block_token_ids), seed)


def sequence_hashes(token_ids: Sequence[int], index_block: int, seed: int) -> list[BlockHash]:
    """One sequence hash per full block of `index_block` tokens; a partly filled last block has none."""
    num_tokens = len(token_ids) // index_block * index_block
    return packed_sequence_hashes(pack_tokens(token_ids[:num_tokens]), index_block, seed)


def pair_hashes(token_ids: Sequence[int], index_block: int, seed: int) -> list[BlockHash]:
    """One per full block of `index_block` pairs of neighbours, with the `seed` of the tokens' own chain."""
    if len(token_ids) <= index_block:
        return []
    return sequence_hashes(token_ids[1:], index_block, pair_seed(token_ids[0], seed))


def packed_sequence_hashes(packed: bytes, index_block: int, seed: int) -> list[BlockHash]:
    """The same of packed tokens."""
    block_bytes = index_block * TOKEN_BYTES
    whole_bytes = len(packed) // block_bytes * block_bytes
    # A prompt may have thousands of blocks, and each is two calls into xxhash: nothing else is done here.
    digest, link = xxh3_64_intdigest, _LINK.pack
    hashes = [
        digest(packed[start : start + block_bytes], seed) for start in range(0, whole_bytes, block_bytes)
    ]
    for position in range(1, len(hashes)):
        hashes[position] = digest(link(hashes[position - 1], hashes[position]), seed)
    return cast(list[BlockHash], hashes)
