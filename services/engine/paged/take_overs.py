"""A rank takes over prefixes from a rank that leaves: it pulls and caches them, and computes nothing on them.

Rule 1: a take-over evicts nothing younger and takes no page that a request here needs: while requests wait,
        no take-over begins.
Rule 2: in the tree the prefix is as old as it was on the rank that leaves.
Rule 3: a prefix that is being pulled has pages like a sequence that pulls (paged/pulls.py), takes no slot in
        the batch, and ends when its source has finished, whether the pull succeeded or not.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from services.engine.paged import sequence
from services.engine.paged.carrying import Carrying
from services.engine.paged.core_events import Reserved, Wanted
from services.engine.paged.gate import Gate
from services.engine.paged.sequence import Phase
from services.kv.carried_cache import CarriedCache
from services.kv.hand_over import IdlePrefix, spell
from services.kv.prefix_cache import PrefixCache
from services.values.kv import PageId

_MOST = 4  # Two ranks may leave at once, and each may have two prefixes taken over.


@dataclass(frozen=True, slots=True)
class Declined:
    word: str  # It is one of the words in rank.proto, or empty where everything that can be here is here.
    held_tokens: int


class TakeOvers:
    def __init__(
        self,
        cache: PrefixCache,
        carried: CarriedCache,
        carrying: Carrying,
        gate: Gate,
        clock: Callable[[], float],
        active: Collection[sequence.Sequence],
    ) -> None:
        self._cache = cache
        self._carried = carried
        self._carrying = carrying
        self._gate = gate
        self._clock = clock
        self._active = active
        # It has how many tokens of each prefix are to be protected.
        self._protected: dict[sequence.Sequence, int] = {}

    def __repr__(self) -> str:
        return f"TakeOvers({len(self)})"

    def __len__(self) -> int:
        return len(self._protected)

    def room_tokens(self, seq: sequence.Sequence) -> int:
        """Return what there is room for at most after this sequence, which is nothing if it was cut off."""
        was_cut = 0 < seq.pulls_to < self._whole(len(seq.ids))
        return 0 if was_cut else self._cache.available_pages * self._cache.page_size

    def begin(self, seq: sequence.Sequence, idle_s: float, protected_tokens: int) -> Reserved | Declined:
        end, held = self._whole(len(seq.ids)), self.held_tokens(seq)
        if held >= end:
            return Declined("", held)
        if not self._cache.enabled:
            return Declined("no_room", held)
        if len(self) >= _MOST or len(self._gate) or not self._carried.may_open(computes=True):
            return Declined("busy", held)
        salt = seq.request.kv_scope
        pages = seq.pages = self._cache.open(seq.ids, salt, end, protect=False, idle_s=idle_s)
        prefix_pages = len(pages.pages)
        spare = self._cache.available_pages - self._gate.growth_pages(self._active)
        wanted = max(0, min(end // self._cache.page_size - prefix_pages, spare))
        self._cache.extend_idle(pages, wanted, protected=2 * protected_tokens >= len(seq.ids))
        end = self._whole(len(pages.pages) * self._cache.page_size)
        if end <= held:
            self._cache.close(pages)
            seq.pages = None
            return Declined("no_room", held)
        self._cache.shorten(pages, max(prefix_pages, end // self._cache.page_size))
        seq.only_pulls, seq.phase, seq.admitted_s = True, Phase.PULLING, self._clock()
        seq.pulls_to = end
        self._carrying.begin_to_pull(seq, end, held)
        self._protected[seq] = protected_tokens
        return self._reserved(seq, prefix_pages, Wanted(end, end, held))

    def landed(self, seq: sequence.Sequence) -> None:
        assert seq.pages is not None
        self._carrying.keep_pulled(seq)
        self._cache.protect(seq.pages, self._protected[seq])
        self.end(seq)

    def end(self, seq: sequence.Sequence) -> None:
        """Give the pages back, which nobody writes any more; do nothing where the sequence has ended."""
        if self._protected.pop(seq, None) is None:
            return
        assert seq.pages is not None
        seq.phase = Phase.ENDED
        self._carrying.release(seq)
        self._cache.close(seq.pages)
        seq.pages = None
        self._gate.note_news()

    # -- what is taken over from here -------------------------------------------------------------

    def list_idle(self) -> list[IdlePrefix]:
        return self._cache.idle_prefixes()

    def spell(self, prefix: IdlePrefix) -> tuple[int, ...] | None:
        return spell(prefix.node)

    def held_tokens(self, seq: sequence.Sequence) -> int:
        found = self._cache.look_up(seq.ids, seq.request.kv_scope)
        return self._carried.resumable(found.deepest, found.cached_pages * self._cache.page_size)

    def _whole(self, tokens: int) -> int:
        unit = self._cache.page_size if self._carried.is_empty else self._carried.index_block
        return tokens // unit * unit

    def _reserved(self, seq: sequence.Sequence, prefix_pages: int, wanted: Wanted) -> Reserved:
        assert seq.pages is not None and seq.carried is not None
        delta: Sequence[PageId] = seq.pages.pages[prefix_pages:]
        carried = self._carried.units_of(seq.carried)
        return Reserved(seq.pages.prefix_len, tuple(delta), carried, wanted)
