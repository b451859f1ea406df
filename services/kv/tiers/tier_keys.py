"""A block below the pool is named by a 128-bit chain over all that its KV depends on.

    scope  = BLAKE2b(layout, handshake version, TIER_FORMAT, tokens a block has, salt)
    key(0) = BLAKE2b(ROOT + tokens of block 0, keyed by the scope)
    key(i) = BLAKE2b(key(i - 1) + tokens of block i, likewise)

The index's hashes have 64 bits and are guarded by the tree's own comparison of ids. Below the pool no ids are
kept, so there the key is all that tells one prefix from another, and has to be one that nobody can collide.
"""

from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b

from services.kv.block_hash import pack_tokens
from services.values.kv import KvLayout

TIER_FORMAT = 1  # Whoever changes what is in a slot, or how, counts it up.
KEY_BYTES = 16
ROOT = bytes(KEY_BYTES)  # It is the parent of a first block.

_KNOWN_SCOPES = 1024


@lru_cache
def layout_id(layout: KvLayout, block_tokens: int) -> bytes:
    """Return 8 bytes that differ where one rank's slots are of no use to the other."""
    groups = [
        (g.kind.value, g.layer_ids, g.num_kv_heads, g.head_dim, g.v_head_dim, g.dtype, g.window, g.unit_bytes)
        for g in layout.groups
    ]
    pages = (layout.page_size, layout.page_bytes, layout.tp_size, block_tokens)
    told = (TIER_FORMAT, layout.handshake_version, layout.model_fingerprint, pages, groups)
    return blake2b(repr(told).encode(), digest_size=8).digest()


@lru_cache(_KNOWN_SCOPES)
def scope(layout: KvLayout, block_tokens: int, salt: str) -> bytes:
    """Return what keys of this salt are made with; no two scopes share a key."""
    return blake2b(salt.encode(), key=layout_id(layout, block_tokens), digest_size=32).digest()


def next_key(scope_key: bytes, parent: bytes, packed_block: bytes) -> bytes:
    """Return the key of the block of packed tokens that follows `parent`."""
    return blake2b(parent + packed_block, key=scope_key, digest_size=KEY_BYTES).digest()


def keys_of(scope_key: bytes, ids: Sequence[int], block_tokens: int) -> list[bytes]:
    """Return the keys of the whole blocks of `ids`, in order."""
    keys, key = [], ROOT
    for start in range(0, len(ids) - block_tokens + 1, block_tokens):
        key = next_key(scope_key, key, pack_tokens(ids[start : start + block_tokens]))
        keys.append(key)
    return keys
