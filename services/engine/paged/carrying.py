"""This module manages the per-request state of sequences: where they resume, and where they keep checkpoints.

begin --> (catch_up --> chunk_end, account)* --> [rest -->] release

A border is a position at which a sequence is to keep a checkpoint.
"""

from bisect import insort
from collections.abc import Iterable, Iterator

from services.engine.paged.chunks import computes_next_page_of, computes_towards
from services.engine.paged.core_events import Reserved, Wanted
from services.engine.paged.sequence import Phase, Sequence
from services.kv.carried_cache import CarriedCache
from services.kv.checkpoints import borders_to_keep, shared_border
from services.kv.prefix_cache import PrefixCache

# A long prompt keeps a checkpoint every so many chunks.
_STRIDE_CHUNKS = 8


class Carrying:
    def __init__(self, books: CarriedCache, cache: PrefixCache, chunk_size: int) -> None:
        self._books = books
        self._cache = cache
        self._stride = _STRIDE_CHUNKS * chunk_size

    def estimate(self, seq: Sequence) -> None:
        found = self._cache.look_up(seq.ids, seq.request.kv_scope, seq.scorable_from)
        matched = found.cached_pages * self._cache.page_size
        seq.uncached_tokens = len(seq.ids) - matched
        resumed = self._books.resumable(found.deepest, matched)
        if seq.source is not None:
            resumed = max(resumed, min(seq.source.tokens, len(seq.ids)))
        seq.uncomputed_tokens = 0 if seq.receives else len(seq.ids) - resumed

    def begin(self, seq: Sequence, active: Iterable[Sequence]) -> None:
        """Hold units for what somebody else writes, or resume from the deepest checkpoint.

        The sequence has its pages. Of two that compute the same beginning, the first keeps a checkpoint for
        the other.
        """
        assert seq.pages is not None
        seq.stored = seq.pages.num_published * self._cache.page_size
        if seq.receives:
            seq.carried, seq.computed = self._books.receive(len(seq.ids)), seq.stored
            return
        seq.carried = self._books.resume(seq.pages.node, seq.stored)
        seq.computed = seq.carried.position
        self._plan(seq, active)

    def begin_to_pull(self, seq: Sequence, expected_end: int, resumes_at: int) -> None:
        assert seq.pages is not None
        seq.stored, seq.computed = seq.pages.prefix_len, resumes_at
        seq.carried = self._books.receive(expected_end, computes=True)

    def reserved(self, seq: Sequence, wanted: Wanted | None, fills: bool) -> Reserved:
        """Return what the sequence has, apart from what was stored before."""
        assert seq.pages is not None and seq.carried is not None
        page_size = self._cache.page_size
        delta = tuple(seq.pages.pages[seq.stored // page_size : -(-len(seq.ids) // page_size)])
        computes = seq.phase in (Phase.COMPUTING, Phase.FILLING)
        carried = () if computes else self._books.units_of(seq.carried)
        return Reserved(seq.stored, delta, carried, wanted, fills)

    def pull_up_to(self, seq: Sequence, end: int) -> None:
        """Hold units for the state at `end` instead of those that it holds, which nobody writes."""
        assert seq.carried is not None
        self._books.close(seq.carried)
        seq.carried = self._books.receive(end, computes=True)

    def go_on(self, seq: Sequence, active: Iterable[Sequence]) -> None:
        """Resume from what a source has written, which is in the tree now, and keep a checkpoint there."""
        self.keep_pulled(seq)
        self._plan(seq, active)

    def keep_pulled(self, seq: Sequence) -> None:
        assert seq.carried is not None
        if not self._books.is_empty:
            self._books.note_border(seq.carried)
            self._keep_border(seq)

    def begin_anew(self, seq: Sequence, active: Iterable[Sequence]) -> None:
        """Resume from what is here: no source has written anything, and nobody writes the units."""
        assert seq.carried is not None
        self._books.close(seq.carried)
        self.begin(seq, active)

    def _plan(self, seq: Sequence, active: Iterable[Sequence]) -> None:
        assert seq.pages is not None
        if seq.pages.node is None or self._books.is_empty:
            return
        block = self._books.index_block
        seq.borders = borders_to_keep(seq.computed, seq.stored, len(seq.ids), block, self._stride)
        alike = [other for other in active if _begins_alike(other, seq)]
        for other, border in self._common_borders(seq, alike):
            seq.common[other] = other.common[seq] = border
            if border > max(seq.computed, other.computed):
                _add_border(seq, border)
                _add_border(other, border)

    def computes_for(self, other: Sequence, seq: Sequence) -> bool:
        if self._books.is_empty:
            return computes_next_page_of(other, seq, self._cache.page_size)
        return computes_towards(other, seq)

    def catch_up(self, seq: Sequence) -> None:
        """Resume from what others have computed of the prompt: from their pages or, where there are states,
        from a checkpoint. A sequence that receives takes pages alone."""
        assert seq.pages is not None and seq.carried is not None
        published = seq.pages.num_published * self._cache.page_size
        seq.stored = max(seq.stored, published)
        if self._books.is_empty or seq.phase is Phase.RECEIVING:
            seq.computed = max(seq.computed, published)
        elif self._books.advance(seq.carried, seq.pages.node):
            seq.computed = seq.carried.position
            seq.borders = [border for border in seq.borders if border > seq.computed]

    def prompt_end(self, seq: Sequence, budget: int, *, is_first: bool) -> int:
        """Return where the next chunk of about `budget` tokens ends: at `seq.computed` if that is too few.

        All chunks but the prompt's last consist of whole scans. This does not apply to tokens that the
        sequence has generated itself, because they were computed one by one. The first chunk of a step has at
        least one scan.
        """
        scan = self._books.scan_tokens
        if scan == 1 or seq.computed >= len(seq.request.prompt_ids):
            return self.chunk_end(seq, min(seq.computed + budget, len(seq.ids)))
        end = self._whole_scans(seq, seq.computed + (max(budget, scan) if is_first else budget))
        if end == seq.computed:
            return end
        reached = self.chunk_end(seq, end)
        if (end := self._whole_scans(seq, reached)) > seq.computed:
            return end
        if is_first:
            return reached  # The window has too few pages for a scan. Other bits are better than no progress.
        assert seq.carried is not None
        self._books.trim(seq.carried, seq.computed)
        return end

    def _whole_scans(self, seq: Sequence, end: int) -> int:
        prompt_len, scan = len(seq.request.prompt_ids), self._books.scan_tokens
        return prompt_len if end >= prompt_len else max(seq.computed, end // scan * scan)

    def chunk_end(self, seq: Sequence, end: int) -> int:
        """Return where a chunk up to `end` must stop: at a border, or where the pages of its tails end."""
        if self._books.is_empty:
            return end
        assert seq.carried is not None
        return self._books.extend(seq.carried, min([end, *seq.borders[:1]]))

    def most_ahead(self, seq: Sequence, most: int) -> int:
        """Return how many of `most` tokens behind the newest one a step may compute.

        A step that went past a border would lose the state that is to be kept there.
        """
        return most if self._books.is_empty else min(most, -len(seq.ids) % self._books.index_block)

    def account(self, seq: Sequence) -> None:
        if self._books.is_empty:
            return
        assert seq.carried is not None
        self._books.trim(seq.carried, seq.computed)
        self.note_border(seq)

    def note_border(self, seq: Sequence) -> None:
        """Keep a checkpoint if the sequence is at a border. While it decodes, note a possible border."""
        assert seq.pages is not None and seq.carried is not None
        if self._books.is_empty or seq.pages.node is None:
            return
        if seq.borders and seq.borders[0] == seq.computed:
            del seq.borders[0]
            self._books.note_border(seq.carried)
            self._keep_border(seq)
        elif seq.computed == len(seq.ids) and seq.computed % self._books.index_block == 0:
            self._books.note_border(seq.carried)

    def rest(self, seq: Sequence) -> None:
        assert seq.carried is not None
        self._keep_border(seq)
        self._books.rest(seq.carried)

    def release(self, seq: Sequence) -> None:
        """Make the border that was passed last a checkpoint, and give the units back; the pages follow."""
        for other in seq.common:
            del other.common[seq]
        seq.common.clear()
        if seq.carried is not None:
            self._keep_border(seq)
            self._books.close(seq.carried)
            seq.carried = None

    def _common_borders(self, seq: Sequence, others: list[Sequence]) -> Iterator[tuple[Sequence, int]]:
        """Yield each sequence that shares at least a block with `seq`, and how many tokens they share.

        A stretch that both are known to share with a third sequence is not compared again.
        """
        third, shared = None, 0
        for other in others:
            known = min(shared, third.common.get(other, 0)) if third is not None else 0
            border = shared_border(seq.ids, other.ids, self._books.index_block, known)
            if border > shared:
                third, shared = other, border
            if border > 0:
                yield other, border

    def _keep_border(self, seq: Sequence) -> None:
        assert seq.pages is not None and seq.carried is not None
        if (saved := seq.carried.saved) is not None:
            node = self._cache.node_at(seq.pages, saved.position)
            if node is not None:
                self._books.keep_border(seq.carried, node)


def _begins_alike(other: Sequence, seq: Sequence) -> bool:
    same_salt = other.request.kv_scope == seq.request.kv_scope
    return other is not seq and other.phase is Phase.COMPUTING and same_salt


def _add_border(seq: Sequence, border: int) -> None:
    if border not in seq.borders:
        insort(seq.borders, border)
