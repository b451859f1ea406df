"""Siblings go on after the very same ids, as far as the radix tree has them; it is only read."""

from collections.abc import Callable, Sequence
from itertools import islice

from services.engine.paged.drafts.sources.source import Continuation
from services.kv.block_hash import TOKEN_BYTES, pack_tokens, unpack_tokens
from services.kv.radix_tree import Node

WHOLE_PREFIX = 32  # It is the length of such a match, beside those of n-grams.
_MOST_COMPARED = 64  # A popular prompt has thousands of children.


class Siblings:
    """It has one sequence, whose ids only ever grow. It implements Source."""

    name = "tree"

    def __init__(self, ids: list[int], page_size: int, deepest: Callable[[], Node | None]) -> None:
        """`deepest` returns the node of the sequence's last page in the tree, if there is one."""
        self._ids = ids
        self._deepest = deepest
        self._page_size = page_size
        self._page_bytes = page_size * TOKEN_BYTES
        self._under: Node | None = None
        self._followed: Node | None = None  # It is a child of `_under`.
        self._seen = 0  # So many children of `_under` do not go on alike.

    def match(self, most: int) -> Continuation | None:
        if (deepest := self._deepest()) is None:
            return None
        open_ids = pack_tokens(self._ids[deepest.depth * self._page_size :])
        node, open_ids = _descend(deepest, open_ids, self._page_bytes)
        if node is not self._under:
            self._under, self._followed, self._seen = node, None, 0
        child = self._find(node, open_ids) if node is not None else None
        return Continuation(_read(child, len(open_ids), most), WHOLE_PREFIX) if child is not None else None

    def _find(self, node: Node, open_ids: bytes) -> Node | None:
        """Return the latest child that begins like that.

        The one that was followed so far is asked first, and all are asked anew only where there are others.
        """
        if self._followed is not None and self._followed.key.startswith(open_ids):
            return self._followed
        if self._followed is None and len(node.children) == self._seen:
            return None
        latest = islice(reversed(node.children.values()), _MOST_COMPARED)
        self._followed = next((child for child in latest if child.key.startswith(open_ids)), None)
        self._seen = len(node.children)
        return self._followed


def _descend(node: Node, open_ids: bytes, page_bytes: int) -> tuple[Node | None, bytes]:
    """Go down by whole pages that the sequence has not published yet; None where the tree does not have
    them."""
    below: Node | None = node
    while below is not None and len(open_ids) >= page_bytes:
        below, open_ids = below.children.get(open_ids[:page_bytes]), open_ids[page_bytes:]
    return below, open_ids


def _read(child: Node, offset: int, most: int) -> Sequence[int]:
    packed, end = child.key[offset:], most * TOKEN_BYTES
    while len(packed) < end and child.children:
        child = next(reversed(child.children.values()))
        packed += child.key
    return unpack_tokens(packed[:end])
