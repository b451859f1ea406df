"""SGLang's radix tree events to ours. Pure.

    BlockStored(hashes, parent, token_ids) --> one node per page: its tokens, its parent
    node at the end of an index block -------> stored: the block's sequence hash, chained from the root
    BlockRemoved(hashes) --------------------> removed, where such a node goes
    AllBlocksCleared ------------------------> cleared

SGLang's hashes are names to us and nothing more; ours are computed anew from token ids and parents.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from services.errors import ProtocolError
from services.kv.block_hash import extend_hash, scope_seed
from services.kv.types import BlockHash, CacheEvents


@dataclass(frozen=True, slots=True)
class _Node:
    """A page in the tree."""

    block: BlockHash | None  # sequence hash of the last full index block up to here
    open_tokens: tuple[int, ...]  # since that block's end
    seed: int


class TreeEventRebuilder:
    """Of one DP rank. Memory: a node per page that the tree holds."""

    def __init__(self, model: str, page_size: int, index_block: int) -> None:
        if index_block % page_size:
            raise ValueError(f"index block {index_block} is no multiple of page size {page_size}")
        self._model = model
        self._page_size = page_size
        self._index_block = index_block
        self._nodes: dict[int, _Node] = {}

    def __repr__(self) -> str:
        return f"TreeEventRebuilder(pages={len(self._nodes)})"

    @property
    def num_pages(self) -> int:
        return len(self._nodes)

    def rebuild(self, events: Iterable[Mapping[str, Any]]) -> CacheEvents:
        """What one batch of SGLang's events means. Raises ProtocolError for one that we do not know."""
        stored: dict[BlockHash, None] = {}
        removed: dict[BlockHash, None] = {}
        cleared = False
        for event in events:
            match event["type"]:
                case "BlockStored":
                    for block in self._store(event):
                        if removed.pop(block, ...) is ...:
                            stored[block] = None
                case "BlockRemoved":
                    for block in self._remove(event["block_hashes"]):
                        if stored.pop(block, ...) is ...:
                            removed[block] = None
                case "AllBlocksCleared":
                    self._nodes.clear()
                    stored.clear()
                    removed.clear()
                    cleared = True
                case other:
                    raise ProtocolError(f"SGLang told of {other}, which this version does not know")
        return CacheEvents(tuple(stored), tuple(removed), cleared)

    def _store(self, event: Mapping[str, Any]) -> Iterable[BlockHash]:
        if event["block_size"] != self._page_size:
            raise ProtocolError(f"SGLang's pages have {event['block_size']} tokens, not {self._page_size}")
        node = self._parent(event)
        if node is None:
            return  # below a page that we were never told of: its hash cannot be known
        tokens = event["token_ids"]
        for number, name in enumerate(event["block_hashes"]):
            page = tokens[number * self._page_size : (number + 1) * self._page_size]
            node = self._child(node, page)
            is_news = name not in self._nodes
            self._nodes[name] = node
            if is_news and not node.open_tokens:
                assert node.block is not None
                yield node.block

    def _parent(self, event: Mapping[str, Any]) -> _Node | None:
        parent = event.get("parent_block_hash")
        if parent is not None:
            return self._nodes.get(parent)
        return _Node(None, (), scope_seed(self._model, event.get("cache_salt") or ""))

    def _child(self, parent: _Node, page: list[int]) -> _Node:
        tokens = (*parent.open_tokens, *page)
        if len(tokens) < self._index_block:
            return _Node(parent.block, tokens, parent.seed)
        return _Node(extend_hash(parent.block, tokens, parent.seed), (), parent.seed)

    def _remove(self, names: Iterable[int]) -> Iterable[BlockHash]:
        for name in names:
            node = self._nodes.pop(name, None)
            if node is not None and not node.open_tokens and node.block is not None:
                yield node.block
