"""A radix tree holds what is cached in a pool, as one tree of token pages per cache salt.

A node is one page: its key is the page's tokens, and its path from the root is the whole prefix. These are
the states of a cached page:

    insert --> cached <==> locked          sequences that read it lock and unlock it
                 |
               evict --> given back        least recently used leaf first, never a locked one

A page that was requested twice, by the sequence that inserted it and by a match, is protected: other leaves
are evicted first, as long as the unlocked protected pages are no more than their share. Above that share age
alone decides. So prompts that come once do not displace those that come again, and a prefix that was popular
once does not stay for ever (a segmented LRU, after Karedla, Love and Wherry 1994, without their demotion).

Rule 1: a locked node's ancestors are locked. So an unlocked node has no locked descendant, and every
        unlocked page can be evicted, leaf upward.
Rule 2: a use of a node is a use of its ancestors, but only the deepest node of a path is stamped. A leaf that
        is evicted hands its stamp to its parent, which is early enough: only leaves are compared.
Rule 3: a match through a node goes through its ancestors. So a protected node's ancestors are protected.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import chain

from services.kv.block_hash import BlockLedger, extend_packed, pack_tokens, scope_seed
from services.values.errors import ConfigError, ProtocolError
from services.values.kv import BlockHash, CacheEvents, PageId

_NO_PAGE = PageId(-1)


@dataclass(frozen=True, slots=True)
class Scope:
    """Sequences of one scope may share pages."""

    salt: str
    seed: int  # This is the seed of the block hashes.


@dataclass(slots=True, eq=False, repr=False)
class Node:
    """This is one page of a prefix, or the root of a scope (no parent, no page). Only RadixTree writes it."""

    scope: Scope
    parent: "Node | None" = None
    key: bytes = b""  # These are the page's tokens, packed.
    page: PageId = _NO_PAGE
    depth: int = 0  # This counts the pages from the root to here, this one included.
    children: "dict[bytes, Node]" = field(default_factory=dict)
    holders: int = 0  # This counts the locks whose deepest node this is.
    locked_children: int = 0
    last_use: float = 0  # This is its last use as the deepest node of a path (Rule 2).
    protected: bool = False  # The page was requested twice.
    queued: bool = False  # It stands in one of the eviction heaps.
    resumable: bool = False  # It has a checkpoint (checkpoints.py).
    block_hash: BlockHash | None = None  # This is set where an index block ends.
    tier_key: bytes = b""  # The tiers know the block that ends here by it; it is set at its first use.

    @property
    def locked(self) -> bool:
        return self.holders > 0 or self.locked_children > 0

    def __repr__(self) -> str:
        return f"Node(page={self.page} depth={self.depth} holders={self.holders} last_use={self.last_use})"


@dataclass(frozen=True, slots=True)
class Match:
    """`node` is the deepest node that matched (the root if none did), and `pages` lead down to it."""

    node: Node
    pages: list[PageId]


@dataclass(frozen=True, slots=True)
class Inserted:
    """The tree owns `taken` now. It already had the content of `duplicates`, which stay with the caller.

    `pages` are the tree's pages of all inserted tokens.
    """

    node: Node
    pages: list[PageId]
    taken: list[PageId]
    duplicates: list[PageId]


@dataclass(frozen=True, slots=True)
class Lookup:
    cached_pages: int
    locked_pages: int
    deepest: Node | None = field(default=None, compare=False, repr=False)  # A later look-up begins there.


_LEAST_BETWEEN_S = 0.1
_MOST_NOTED = 4096
# So many uses are assumed before the start, for prefixes that come from a rank which is older: the first one
# 460 days ago, and each next one a fiftieth closer.
_USES_BEFORE = 1000
_CLOSER = 1.02
_MOST_SHARE = 1 - 2**-20


class UseTimes:
    """This maps the numbers of a tree's uses to times: to a tenth of a second, and less exactly long ago.

    A number between those of two uses stands for a moment between them.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.number = float(_USES_BEFORE)  # This is the number of the newest use.
        # Both ascend. A use with one of these numbers was at the second of the same index; the uses after it,
        # up to the next entry, followed right away.
        self._numbers = [float(number) for number in range(_USES_BEFORE + 1)]
        start_s = clock()
        before = (_LEAST_BETWEEN_S * _CLOSER**place for place in range(_USES_BEFORE, 0, -1))
        self._seconds = [*(start_s - idle_s for idle_s in before), start_s]

    def count(self) -> float:
        self.number += 1
        now_s = self._clock()
        if now_s - self._seconds[-1] >= _LEAST_BETWEEN_S:
            self._numbers.append(self.number)
            self._seconds.append(now_s)
            if len(self._numbers) > _MOST_NOTED:
                half = _MOST_NOTED // 2
                del self._numbers[1:half:2], self._seconds[1:half:2]
        return self.number

    def idle_s(self, number: float) -> float:
        """Return how many seconds ago the use with this number was, rounded up."""
        at = bisect_right(self._numbers, number) - 1
        second, share = self._seconds[at], number % 1
        if share and at + 1 < len(self._seconds):
            second += share * (self._seconds[at + 1] - second)
        return self._clock() - second

    def number_at(self, idle_s: float) -> float:
        # What it returns stands for that moment, or one a little earlier.
        self.count()
        second = self._clock() - idle_s
        at = max(0, bisect_right(self._seconds, second) - 1)
        since_s = second - self._seconds[at]
        if since_s < _LEAST_BETWEEN_S or at + 1 == len(self._seconds):
            return self._numbers[at]
        share = since_s / (self._seconds[at + 1] - self._seconds[at])
        return self._numbers[at + 1] - 1 + min(share, _MOST_SHARE)


# An entry is (last use when pushed, page, node). It is outdated if the node was used, locked, protected or
# given children since; this is corrected when the entry comes to the front.
_Heap = list[tuple[float, PageId, Node]]


class RadixTree:
    def __init__(
        self,
        page_size: int,
        index_block: int,
        model: str,
        protected_share_pages: int = 0,
        forget: Callable[[Node], None] = lambda node: None,
        clock: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """`forget` is called with each evicted node that has a checkpoint.

        With `protected_share_pages` 0 age alone decides on evictions. `clock`, in seconds, serves to report
        ages to other ranks.
        """
        if page_size < 1 or index_block < 1 or index_block % page_size:
            raise ConfigError(f"index block {index_block} must be a multiple of page size {page_size}")
        self.page_size = page_size
        self._pages_per_block = index_block // page_size
        self._model = model
        self._roots: dict[str, Node] = {}  # Each of these roots has children or is locked.
        self.use_times = UseTimes(clock)
        self._cached_pages = 0  # This counts unlocked pages, all of which can be evicted.
        self._locked_pages = 0
        self._protected_share_pages = protected_share_pages
        self._protected_pages = 0  # This counts unlocked ones.
        # Every unlocked leaf is once in one of the two.
        self._leaves: _Heap = []
        self._protected_leaves: _Heap = []
        self._forget = forget
        self._events = BlockLedger()

    def __repr__(self) -> str:
        return f"RadixTree(cached={self._cached_pages} locked={self._locked_pages} salts={len(self._roots)})"

    @property
    def cached_pages(self) -> int:
        return self._cached_pages

    @property
    def locked_pages(self) -> int:
        return self._locked_pages

    def root(self, salt: str) -> Node:
        """Return the scope's root. The tree may forget it while it has neither children nor a lock."""
        root = self._roots.get(salt)
        if root is None:
            root = self._roots[salt] = Node(Scope(salt, scope_seed(self._model, salt)))
        return root

    def match(self, ids: Sequence[int], salt: str, max_pages: int | None = None) -> Match:
        """Return the longest cached prefix of `ids` in whole pages. This counts as a use and protects it."""
        match = self.match_below(self.root(salt), ids, 0, max_pages)
        self.protect(match.node)
        return match

    def protect(self, node: Node) -> None:
        while node.parent is not None and not node.protected:
            node.protected = True
            self._protected_pages += not node.locked
            node = node.parent

    def match_below(
        self,
        node: Node,
        ids: Sequence[int],
        start: int,
        max_pages: int | None = None,
        used_at: float | None = None,
    ) -> Match:
        """Return the longest cached continuation of `node` by ids[start:].

        This counts as a use, now or with the number `used_at`, but not as a second request: the one who asks
        came while it was being computed.
        """
        path = list(self._descend(node, ids, max_pages, start))
        deepest = path[-1] if path else node
        self._use(deepest, used_at)
        return Match(deepest, [hit.page for hit in path])

    def look_up(
        self, ids: Sequence[int], salt: str, max_pages: int | None = None, before: Lookup | None = None
    ) -> Lookup:
        """Return what `match` would find, without counting a use.

        With `before`, an earlier answer to the same question, only what has changed since then is compared.
        """
        node = self._roots.get(salt)
        if before is not None:
            node = _nearest_cached(before.deepest) or node
        if node is None:
            return Lookup(0, 0)
        left = None if max_pages is None else max_pages - node.depth
        for deeper in self._descend(node, ids, left, node.depth * self.page_size):
            node = deeper
        return Lookup(node.depth, _locked_depth(node), node)

    def insert(
        self, under: Node, ids: Sequence[int], pages: Sequence[PageId], used_at: float | None = None
    ) -> Inserted:
        """Add the pages that hold `ids`, the tokens that follow `under`. This is a use, as in `match_below`.

        Raises:
            ProtocolError: `ids` do not fill `pages` exactly.
        """
        if len(ids) != len(pages) * self.page_size:
            raise ProtocolError(f"{len(ids)} tokens do not fill {len(pages)} pages of {self.page_size}")
        node, in_tree, taken, duplicates = under, [], [], []
        for key, page in zip(self._keys(ids), pages, strict=True):
            child = node.children.get(key)
            if child is None:
                node = self._add(node, key, page)
                taken.append(page)
            else:
                node = child
                duplicates.append(page)
            in_tree.append(node.page)
        self._use(node, used_at)
        self._queue_if_evictable(node)
        return Inserted(node, in_tree, taken, duplicates)

    def lock(self, node: Node) -> None:
        """Lock the path down to `node`. This costs O(1) below a locked path, and otherwise O(depth)."""
        newly_locked = not node.locked
        node.holders += 1
        while newly_locked and node.parent is not None:
            self._cached_pages -= 1
            self._locked_pages += 1
            self._protected_pages -= node.protected
            node = node.parent
            newly_locked = not node.locked
            node.locked_children += 1

    def unlock(self, node: Node, used_at: float | None = None) -> None:
        """Undo one `lock(node)`. This is a use, as in `match_below`.

        Raises:
            ProtocolError: `node` is not locked.
        """
        if node.holders == 0:
            raise ProtocolError(f"{node} is unlocked more often than locked")
        node.holders -= 1
        self._use(node, used_at)
        while not node.locked and node.parent is not None:
            self._cached_pages += 1
            self._locked_pages -= 1
            self._protected_pages += node.protected
            self._queue_if_evictable(node)
            node = node.parent
            node.locked_children -= 1
        self._forget_idle_root(node)

    def evict(self, num_pages: int) -> list[PageId]:
        pages: list[PageId] = []
        while len(pages) < num_pages and (leaf := self._pop_next_leaf()) is not None:
            self._remove(leaf)
            pages.append(leaf.page)
        return pages

    def evict_older(self, num_pages: int, used_at: float, *, protected: bool) -> list[PageId]:
        """Remove up to `num_pages` unlocked pages that were last used before the use `used_at`; return them.

        Protected pages go only with `protected`, and after all others.
        """
        pages: list[PageId] = []
        for heap in (self._leaves, self._protected_leaves)[: 1 + protected]:
            while len(pages) < num_pages and (leaf := self._front(heap)) and leaf.last_use < used_at:
                heappop(heap)
                leaf.queued = False
                self._remove(leaf)
                pages.append(leaf.page)
        return pages

    def leaves(self) -> Iterator[Node]:
        queued = chain(self._leaves, self._protected_leaves)  # All unlocked leaves are in one of the two.
        return (node for _, _, node in queued if not (node.children or node.locked))

    def take_events(self) -> CacheEvents:
        """Return what was stored and removed since the last call; parents are stored before children."""
        return CacheEvents(*self._events.take())

    def nodes(self) -> Iterator[Node]:
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            if node.parent is not None:
                yield node
            stack.extend(node.children.values())

    def check(self, holders: Mapping[Node, int]) -> None:
        """Walk everything; `holders` has the number of locks that each node should have.

        Raises:
            AssertionError: something is wrong; the message names the node.
        """
        entries = [*self._leaves, *self._protected_leaves]
        queued = {node for _, _, node in entries}
        assert len(queued) == len(entries), "a node stands in the eviction heaps twice"
        num_locked = num_cached = num_protected = 0
        for node in self.nodes():
            num_locked += node.locked
            num_cached += not node.locked
            num_protected += node.protected and not node.locked
            assert node.queued == (node in queued), f"{node} is wrong about standing in a heap"
            assert node.queued or node.locked or node.children, f"{node} can never be evicted"
            self._check_node(node, holders.get(node, 0))
        for salt, root in self._roots.items():
            assert root.children or root.locked, f"the root of salt {salt!r} is idle"
            self._check_node(root, holders.get(root, 0))
        walked = num_cached, num_locked, num_protected
        counted = self._cached_pages, self._locked_pages, self._protected_pages
        assert walked == counted, f"cached, locked, protected: walked {walked}, counted {counted}"

    def _check_node(self, node: Node, holders: int) -> None:
        locked_children = sum(child.locked for child in node.children.values())
        assert node.holders == holders, f"{node} should have {holders} holders"
        assert node.locked_children == locked_children, f"{node} has {locked_children} locked children"
        below_plain = node.parent is not None and node.parent.parent is not None and not node.parent.protected
        assert not (node.protected and below_plain), f"{node} is protected, but not what leads to it"

    def _keys(self, ids: Sequence[int], max_pages: int | None = None, start: int = 0) -> Iterator[bytes]:
        num_pages = (len(ids) - start) // self.page_size
        if max_pages is not None:
            num_pages = min(num_pages, max_pages)
        # Packing page by page keeps a match that ends early cheap.
        for first in range(start, start + num_pages * self.page_size, self.page_size):
            yield pack_tokens(ids[first : first + self.page_size])

    def _descend(
        self, node: Node, ids: Sequence[int], max_pages: int | None, start: int = 0
    ) -> Iterator[Node]:
        for key in self._keys(ids, max_pages, start):
            child = node.children.get(key)
            if child is None:
                return
            yield child
            node = child

    def _add(self, parent: Node, key: bytes, page: PageId) -> Node:
        node = Node(parent.scope, parent, key, page, parent.depth + 1)
        parent.children[key] = node
        self._cached_pages += 1
        if node.depth % self._pages_per_block == 0:
            node.block_hash = self._hash_block_ending_at(node)
            self._events.note(node.block_hash, stored=True)
        return node

    def _hash_block_ending_at(self, node: Node) -> BlockHash:
        keys: list[bytes] = []
        last_of_parent_block: Node | None = node
        while last_of_parent_block is not None and len(keys) < self._pages_per_block:
            keys.append(last_of_parent_block.key)
            last_of_parent_block = last_of_parent_block.parent
        assert last_of_parent_block is not None, "a complete block lies below the root"
        packed_block = b"".join(reversed(keys))
        return extend_packed(last_of_parent_block.block_hash, packed_block, node.scope.seed)

    def _remove(self, leaf: Node) -> None:
        parent = leaf.parent
        assert parent is not None, "a root is never evicted"
        del parent.children[leaf.key]
        parent.last_use = max(parent.last_use, leaf.last_use)
        self._cached_pages -= 1
        self._protected_pages -= leaf.protected
        if leaf.resumable:
            self._forget(leaf)
        if leaf.block_hash is not None:
            self._events.note(leaf.block_hash, stored=False)
        self._queue_if_evictable(parent)
        self._forget_idle_root(parent)

    def _use(self, node: Node, used_at: float | None = None) -> None:
        if used_at is not None:
            node.last_use = max(node.last_use, used_at)
            return
        node.last_use = self.use_times.count()

    def _queue_if_evictable(self, node: Node) -> None:
        if node.parent is not None and not (node.queued or node.locked or node.children):
            node.queued = True
            heappush(self._heap_of(node), (node.last_use, node.page, node))

    def _heap_of(self, node: Node) -> _Heap:
        return self._protected_leaves if node.protected else self._leaves

    def _pop_next_leaf(self) -> Node | None:
        plain = self._front(self._leaves)  # This comes first, because it may move entries to the other heap.
        protected = self._front(self._protected_leaves)
        if plain is None or (protected is not None and self._competes(protected, plain)):
            leaf = protected
        else:
            leaf = plain
        if leaf is not None:
            heappop(self._heap_of(leaf))
            leaf.queued = False
        return leaf

    def _competes(self, protected: Node, plain: Node) -> bool:
        """Return whether a protected leaf goes first: the share is exceeded, and it is the older one."""
        return self._protected_pages > self._protected_share_pages and protected.last_use < plain.last_use

    def _front(self, heap: _Heap) -> Node | None:
        while heap:
            last_use, _, node = heap[0]
            in_place = self._heap_of(node) is heap and last_use == node.last_use
            if in_place and not node.locked and not node.children:
                return node
            heappop(heap)
            node.queued = False
            self._queue_if_evictable(node)
        return None

    def _forget_idle_root(self, node: Node) -> None:
        if node.parent is None and not node.children and not node.locked:
            self._roots.pop(node.scope.salt, None)


def _nearest_cached(node: Node | None) -> Node | None:
    while node is not None and node.parent is not None:
        if node.parent.children.get(node.key) is node:
            return node
        node = node.parent  # An evicted node had no children, so nothing below it is cached.
    return None


def _locked_depth(node: Node) -> int:
    """Count the locked pages on the path down to `node`. By Rule 1 these are the first ones."""
    while node.parent is not None and not node.locked:
        node = node.parent
    return node.depth
