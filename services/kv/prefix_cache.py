"""The prefix cache owns all pages of a rank, and records which of them each sequence holds.

    page:      free --extend--> private --publish--> locked --close--> cached --evicted--> free
                                  |  \\                  \\<--open (matched)--/
                            close |   \\--quarantine, set_aside--> quarantined --end_quarantine--> free
                                  v
                                free

    sequence:  open --> extend, publish, adopt, set_aside (any number of times) --> close
                                                              \\-> quarantine --> end_quarantine

Rule 1: every page is in exactly one of these places; `check` walks them all.
Rule 2: a published page is never written again; a page still written to is never published.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from services.kv.hand_over import IdlePrefix, idle_prefix
from services.kv.page_allocator import PageAllocator
from services.kv.radix_tree import Lookup, Node, RadixTree
from services.kv.transfer_plan import pages_of, runs_of
from services.values.errors import ProtocolError
from services.values.kv import CacheEvents, PageBooks, PageId


class Hold(Enum):
    OPEN = "open"
    QUARANTINED = "quarantined"
    CLOSED = "closed"


@dataclass(slots=True, eq=False, repr=False)
class SequencePages:
    """This is what one sequence holds of the pool. All may read it; only PrefixCache writes it.

    Page i of `pages` holds positions [i * page_size, (i + 1) * page_size). The table is empty once the
    sequence is no longer open.
    """

    pages: list[PageId]
    prefix_len: int  # So many tokens were matched when it was opened, a multiple of page_size.
    node: Node | None  # This is the deepest tree node that it holds; None if there is no cache.
    num_published: int  # So many leading pages have their content in the tree, on the path to `node`.
    # These are private pages among the published ones: the tree had the same content on other pages already.
    duplicates: list[PageId] = field(default_factory=list)
    hold: Hold = Hold.OPEN
    quarantined: list[PageId] = field(default_factory=list)
    # All that it does counts as this use of the tree; with None each action counts as a new use.
    used_at: float | None = None
    # As long as this is the same object, pages are only appended.
    table: object = field(default_factory=object)

    @property
    def num_private(self) -> int:
        return len(self.duplicates) + len(self.pages) - self.num_published

    @property
    def private_pages(self) -> list[PageId]:
        return self.duplicates + self.pages[self.num_published :]

    def __repr__(self) -> str:
        return (
            f"SequencePages({self.hold.value} pages={len(self.pages)} prefix_len={self.prefix_len} "
            f"published={self.num_published} private={self.num_private} quarantined={len(self.quarantined)})"
        )


class PrefixCache:
    """This has the allocator, the radix tree and the quarantine of one pool.

    With `enabled` False nothing is matched or published, but pages are allocated all the same.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        index_block: int,
        model: str,
        enabled: bool = True,
        protected_share: float = 0.3,
        evict_ahead_pages: int = 0,
        forget: Callable[[Node], None] = lambda node: None,
        lent: Callable[[Sequence[PageId]], None] = lambda pages: None,
        clock: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """`protected_share` of the pool, at most, is kept for prefixes that were requested more than once.

        Each eviction frees `evict_ahead_pages` more than it must: they merge with their neighbours, so that
        what is allocated next lies in fewer runs. `forget` is called with each evicted node that has a
        checkpoint, `lent` with pages that are allocated. `clock`, in seconds, serves to report ages to other
        ranks.
        """
        self.num_pages = num_pages
        self.page_size = page_size
        self.enabled = enabled
        self._evict_ahead_pages = evict_ahead_pages
        self._note_lent = lent
        self._allocator = PageAllocator(num_pages)
        self._tree = RadixTree(page_size, index_block, model, int(protected_share * num_pages), forget, clock)
        self._sequences: set[SequencePages] = set()  # These are open or quarantined.
        self._private_pages = 0
        self._quarantined_pages = 0
        # These count pages that were allocated several at a time, and their runs, which are a delta's pieces.
        self.lent_pages = 0
        self.lent_runs = 0

    def __repr__(self) -> str:
        return f"PrefixCache({self.books()} open={self.num_open})"

    @property
    def num_open(self) -> int:
        return sum(sequence.hold is Hold.OPEN for sequence in self._sequences)

    @property
    def available_pages(self) -> int:
        return self._allocator.free_pages + self._tree.cached_pages

    @property
    def free_runs(self) -> int:
        return self._allocator.num_free_runs

    def open(
        self,
        ids: Sequence[int],
        salt: str,
        max_prefix_tokens: int | None = None,
        *,
        protect: bool = True,
        idle_s: float | None = None,
    ) -> SequencePages:
        """Begin a sequence on the longest cached prefix of `ids`, in whole pages, and lock that.

        At most `max_prefix_tokens` tokens are matched, rounded down to whole pages. Without `protect` this
        does not count as a second request for them, until `protect` is called. With `idle_s` the use of the
        tree counts as so many seconds ago.
        """
        used_at = None if idle_s is None else self._tree.use_times.number_at(idle_s)
        if self.enabled:
            sequence = self._open_matched(ids, salt, max_prefix_tokens, used_at)
        else:
            sequence = SequencePages(pages=[], prefix_len=0, node=None, num_published=0)
        self._sequences.add(sequence)
        if protect:
            self.protect(sequence)
        return sequence

    def protect(self, sequence: SequencePages, num_tokens: int | None = None) -> None:
        """Note a repeated request for what the sequence has matched or published, or for its first tokens."""
        self._require(sequence, Hold.OPEN, "protect the prefix of")
        node = sequence.node
        if num_tokens is not None:
            position = min(num_tokens, sequence.num_published * self.page_size)
            node = self.node_at(sequence, position // self.page_size * self.page_size)
        if node is not None:
            self._tree.protect(node)

    def look_up(
        self,
        ids: Sequence[int],
        salt: str,
        max_prefix_tokens: int | None = None,
        before: Lookup | None = None,
    ) -> Lookup:
        """Return what `open` would find; it does not lock, and does not count as a use.

        With `before`, an earlier answer to the same question, only what has changed since then is compared.
        """
        return self._tree.look_up(ids, salt, self._whole_pages(max_prefix_tokens), before)

    def match_len(self, ids: Sequence[int], salt: str) -> int:
        return self.look_up(ids, salt).cached_pages * self.page_size

    def own_pages(self, sequence: SequencePages) -> int:
        """Return how many pages only this sequence holds; they are available again when it ends.

        The cost is proportional to that number.
        """
        num_pages, node = sequence.num_private, sequence.node
        while node is not None and node.parent is not None and node.holders + node.locked_children == 1:
            num_pages += 1
            node = node.parent
        return num_pages

    def adopt(
        self, sequence: SequencePages, ids: Sequence[int], max_prefix_tokens: int | None = None
    ) -> None:
        """Continue the published pages by pages that others have published since, as far as those reach.

        The private pages in their place are freed, so nobody may be writing or reading these. It costs one
        look-up if there is nothing new.
        """
        self._require(sequence, Hold.OPEN, "adopt for")
        if sequence.node is None:
            return
        first = sequence.num_published
        limit = self._whole_pages(max_prefix_tokens)
        max_pages = None if limit is None else max(0, limit - first)
        match = self._tree.match_below(sequence.node, ids, first * self.page_size, max_pages)
        self._tree.lock(match.node)
        self._tree.unlock(sequence.node)
        sequence.node = match.node
        sequence.num_published = first + len(match.pages)
        self._free_private(_exchange(sequence, first, match.pages))

    def node_at(self, sequence: SequencePages, position: int) -> Node | None:
        """Return the tree's node of the page that ends at `position`; None if that is not published."""
        depth, node = position // self.page_size, sequence.node
        if node is None or not 0 < depth <= sequence.num_published:
            return None
        while node.depth > depth:
            assert node.parent is not None
            node = node.parent
        return node

    def make_room(self, num_pages: int) -> bool:
        """Evict until `num_pages` are free. Return False if so many are not available."""
        missing = min(num_pages, self.available_pages) - self._allocator.free_pages
        if missing > 0:
            self._evict(missing + self._evict_ahead_pages)
        return self._allocator.free_pages >= num_pages

    def extend(self, sequence: SequencePages, num_pages: int) -> bool:
        """Append private pages to the table, and evict as needed.

        Returns:
            False, with nothing changed, if fewer pages are available.
        """
        self._require(sequence, Hold.OPEN, "extend")
        if num_pages > self.available_pages:
            return False
        self.make_room(num_pages)
        self._append(sequence, num_pages)
        return True

    def extend_idle(self, sequence: SequencePages, num_pages: int, *, protected: bool) -> int:
        """Append up to `num_pages` private pages to the table of a sequence that was opened with `idle_s`.

        Only pages that were used before that time are evicted, and protected ones only with `protected`.

        Returns:
            The number of pages appended.
        """
        self._require(sequence, Hold.OPEN, "extend")
        assert sequence.used_at is not None
        if (missing := num_pages - self._allocator.free_pages) > 0:
            evicted = self._tree.evict_older(missing, sequence.used_at, protected=protected)
            self._allocator.free(evicted)
        num_pages = min(num_pages, self._allocator.free_pages)
        self._append(sequence, num_pages)
        return num_pages

    def _append(self, sequence: SequencePages, num_pages: int) -> None:
        lent = self._allocator.allocate(num_pages)
        self._note_lent(lent)
        sequence.pages.extend(lent)
        self._private_pages += num_pages
        if num_pages > 1:
            self.lent_pages += num_pages
            self.lent_runs += len(runs_of(lent))

    def shorten(self, sequence: SequencePages, num_pages: int) -> None:
        """Free its private pages behind the first `num_pages`, whose content nobody needs.

        Raises:
            ProtocolError: the sequence is not open, or has published one of them.
        """
        self._require(sequence, Hold.OPEN, "shorten")
        if num_pages < sequence.num_published:
            raise ProtocolError(f"page {num_pages} of {sequence} is published")
        self._free_private(_cut(sequence, num_pages))

    def publish(self, sequence: SequencePages, ids: Sequence[int], *, keep_duplicates: bool = True) -> None:
        """Put the full pages of `ids` into the tree, held by the sequence.

        `ids` are all tokens whose KV is in the sequence's pages so far, from position 0. Calls may repeat
        with growing ids; each costs only what is new. If the tree had a page's content already, the sequence
        keeps its own page until its end, because that may be the source of a transfer. Without
        `keep_duplicates` it goes on with the tree's page, and its own is freed.

        Raises:
            ProtocolError: there are more tokens than its pages can hold.
        """
        self._require(sequence, Hold.OPEN, "publish")
        if len(ids) > len(sequence.pages) * self.page_size:
            raise ProtocolError(f"{len(ids)} tokens cannot be in the pages of {sequence}")
        first, end = sequence.num_published, len(ids) // self.page_size
        if sequence.node is None or end <= first:
            return
        tail = ids[first * self.page_size : end * self.page_size]
        inserted = self._tree.insert(sequence.node, tail, sequence.pages[first:end], sequence.used_at)
        self._tree.lock(inserted.node)
        self._tree.unlock(sequence.node, sequence.used_at)
        sequence.node = inserted.node
        sequence.num_published = end
        self._private_pages -= len(inserted.taken)
        if keep_duplicates:
            sequence.duplicates += inserted.duplicates
        else:
            _exchange(sequence, first, inserted.pages)
            self._free_private(inserted.duplicates)

    def close(self, sequence: SequencePages) -> None:
        """Give everything back: published pages stay cached, private ones are freed.

        Raises:
            ProtocolError: the sequence is not open.
        """
        self._require(sequence, Hold.OPEN, "close")
        self._allocator.free(self._let_go(sequence))
        self._end(sequence)

    def quarantine(self, sequence: SequencePages) -> None:
        """End the sequence while another rank may still write its private pages, and keep those from reuse.

        Raises:
            ProtocolError: the sequence is not open.
        """
        self._require(sequence, Hold.OPEN, "quarantine")
        sequence.quarantined = self._let_go(sequence)
        sequence.hold = Hold.QUARANTINED
        self._quarantined_pages += len(sequence.quarantined)

    def set_aside(self, sequence: SequencePages, num_pages: int) -> SequencePages:
        """Move its private pages behind the first `num_pages` into quarantine: a writer may still write them.

        The sequence goes on without them. `end_quarantine` of the returned object frees them.

        Raises:
            ProtocolError: the sequence is not open, or has published one of them.
        """
        self._require(sequence, Hold.OPEN, "set pages aside of")
        if num_pages < sequence.num_published:
            raise ProtocolError(f"page {num_pages} of {sequence} is published")
        cut = _cut(sequence, num_pages)
        self._private_pages -= len(cut)
        self._quarantined_pages += len(cut)
        aside = SequencePages([], 0, None, 0, hold=Hold.QUARANTINED, quarantined=cut)
        self._sequences.add(aside)
        return aside

    def end_quarantine(self, sequence: SequencePages) -> None:
        """Free the quarantined pages, once the writer is known to have stopped.

        Raises:
            ProtocolError: the sequence is not in quarantine.
        """
        self._require(sequence, Hold.QUARANTINED, "end the quarantine of")
        self._allocator.free(sequence.quarantined)
        self._quarantined_pages -= len(sequence.quarantined)
        sequence.quarantined = []
        self._end(sequence)

    def next_to_go(self) -> list[Node]:
        """Return the unlocked leaves in about the order of their eviction. This does not count as a use."""
        return sorted(self._tree.leaves(), key=lambda leaf: (leaf.protected, leaf.last_use))

    def clear(self) -> None:
        self._evict(self._tree.cached_pages)

    def idle_prefixes(self) -> list[IdlePrefix]:
        page_size, times = self.page_size, self._tree.use_times
        return [idle_prefix(leaf, page_size, times.idle_s(leaf.last_use)) for leaf in self._tree.leaves()]

    def take_events(self) -> CacheEvents:
        return self._tree.take_events()

    def books(self) -> PageBooks:
        return PageBooks(
            total=self.num_pages,
            free=self._allocator.free_pages,
            cached=self._tree.cached_pages,
            locked=self._tree.locked_pages,
            private=self._private_pages,
            quarantined=self._quarantined_pages,
        )

    def check(self) -> PageBooks:
        """Walk every page, node and sequence, and return the books.

        Raises:
            AssertionError: a page is in two places or in none, or a lock or a count is wrong.
        """
        self._tree.check(
            Counter(
                sequence.node for sequence in self._sequences if sequence.node and sequence.hold is Hold.OPEN
            )
        )
        free = pages_of(self._allocator.free_runs())
        in_tree = [node.page for node in self._tree.nodes()]
        private = [page for sequence in self._sequences for page in sequence.private_pages]
        quarantined = [page for sequence in self._sequences for page in sequence.quarantined]
        self._check_places(free + in_tree + private + quarantined)
        for sequence in self._sequences:
            _check_table(sequence)
        books = self.books()
        walked = (len(free), len(private), len(quarantined))
        counted = (books.free, books.private, books.quarantined)
        assert walked == counted, f"free, private, quarantined: walked {walked}, counted {counted}"
        assert books.balanced, f"the books do not balance: {books}"
        return books

    def _open_matched(
        self, ids: Sequence[int], salt: str, max_tokens: int | None, used_at: float | None
    ) -> SequencePages:
        root, max_pages = self._tree.root(salt), self._whole_pages(max_tokens)
        match = self._tree.match_below(root, ids, 0, max_pages, used_at)
        self._tree.lock(match.node)
        return SequencePages(
            pages=match.pages,
            prefix_len=len(match.pages) * self.page_size,
            node=match.node,
            num_published=len(match.pages),
            used_at=used_at,
        )

    def _whole_pages(self, num_tokens: int | None) -> int | None:
        return None if num_tokens is None else num_tokens // self.page_size

    def _let_go(self, sequence: SequencePages) -> list[PageId]:
        if sequence.node is not None:
            self._tree.unlock(sequence.node, sequence.used_at)
        private = sequence.private_pages
        self._private_pages -= len(private)
        sequence.node = None
        sequence.num_published = 0
        sequence.pages.clear()
        sequence.table = object()
        sequence.duplicates.clear()
        return private

    def _free_private(self, pages: list[PageId]) -> None:
        self._allocator.free(pages)
        self._private_pages -= len(pages)

    def _end(self, sequence: SequencePages) -> None:
        sequence.hold = Hold.CLOSED
        self._sequences.remove(sequence)

    def _evict(self, num_pages: int) -> None:
        self._allocator.free(self._tree.evict(num_pages))

    def _require(self, sequence: SequencePages, hold: Hold, verb: str) -> None:
        if sequence not in self._sequences or sequence.hold is not hold:
            raise ProtocolError(f"cannot {verb} {sequence}")

    def _check_places(self, pages: list[PageId]) -> None:
        places = Counter(pages)
        lost = [page for page in range(self.num_pages) if places[PageId(page)] == 0]
        doubled = [page for page, count in places.items() if count > 1]
        foreign = [page for page in places if not 0 <= page < self.num_pages]
        assert not (lost or doubled or foreign), (
            f"pages lost {lost}, in two places {doubled}, foreign {foreign}"
        )


def _exchange(sequence: SequencePages, first: int, pages: list[PageId]) -> list[PageId]:
    """Put other pages into the places from `first` on, and return those that were there."""
    end = first + len(pages)
    before, sequence.pages[first:end] = sequence.pages[first:end], pages
    if before != pages:
        sequence.table = object()
    return before


def _cut(sequence: SequencePages, num_pages: int) -> list[PageId]:
    cut = sequence.pages[num_pages:]
    del sequence.pages[num_pages:]
    sequence.table = object()
    return cut


def _check_table(sequence: SequencePages) -> None:
    duplicates = set(sequence.duplicates)
    node = sequence.node
    for page in reversed(sequence.pages[: sequence.num_published]):
        assert node is not None, f"{sequence} published more than it holds"
        assert page == node.page or page in duplicates, f"{sequence}: page {page} is not held"
        node = node.parent
    assert node is None or node.parent is None, f"{sequence} holds more than it published"
