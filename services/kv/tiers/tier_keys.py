"""Below the pool a block is named by a chain of 128-bit hashes over all that its KV depends on.

    scope  = BLAKE2b(layout, handshake version, TIER_FORMAT, tokens a block has, salt)
    key(0) = BLAKE2b(ROOT + tokens of block 0, keyed by the scope)
    key(i) = BLAKE2b(key(i - 1) + tokens of block i, keyed by the scope)

The index's hashes have only 64 bits, because the radix tree also compares the token ids. Below the pool no
ids are kept: the key alone tells one prefix from another, so nobody may be able to make two prefixes collide.
"""

from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b

from services.kv.block_hash import pack_tokens
from services.values.kv import KvGroup, KvLayout

TIER_FORMAT = 1  # Whoever changes what is in a slot, or how, must raise it.
KEY_BYTES = 16
ROOT = bytes(KEY_BYTES)  # This stands for the parent of a first block.

_KNOWN_SCOPES = 1024


@lru_cache
def layout_id(layout: KvLayout, block_tokens: int) -> bytes:
    """Return 8 bytes that differ between two ranks if neither can use the other's slots."""
    groups = [_told(group) for group in layout.groups]
    pages = (layout.page_size, layout.page_bytes, layout.tp_size, block_tokens)
    told = (TIER_FORMAT, layout.handshake_version, layout.model_fingerprint, pages, groups, *_draft(layout))
    return blake2b(repr(told).encode(), digest_size=8).digest()


def _draft(layout: KvLayout) -> tuple[object, ...]:
    draft = layout.draft
    return () if draft is None else (draft.model_fingerprint, _told(draft.group))


def _told(g: KvGroup) -> tuple[object, ...]:
    shape = (g.kind.value, g.layer_ids, g.num_kv_heads, g.head_dim, g.v_head_dim)
    return (*shape, g.dtype, g.window, g.unit_bytes)


@lru_cache(_KNOWN_SCOPES)
def scope(layout: KvLayout, block_tokens: int, salt: str) -> bytes:
    """Return the BLAKE2b key for the blocks of this cache salt; no two scopes share a block's key."""
    return blake2b(salt.encode(), key=layout_id(layout, block_tokens), digest_size=32).digest()


def next_key(scope_key: bytes, parent: bytes, packed_block: bytes) -> bytes:
    return blake2b(parent + packed_block, key=scope_key, digest_size=KEY_BYTES).digest()


def keys_of(scope_key: bytes, ids: Sequence[int], block_tokens: int) -> list[bytes]:
    """Return the keys of the whole blocks of `ids`, in order."""
    keys, key = [], ROOT
    for start in range(0, len(ids) - block_tokens + 1, block_tokens):
        key = next_key(scope_key, key, pack_tokens(ids[start : start + block_tokens]))
        keys.append(key)
    return keys
