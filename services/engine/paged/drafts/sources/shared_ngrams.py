"""The texts of each salt on this rank are kept in bounded memory. Nobody finds those of another salt."""

from collections import OrderedDict

from services.engine.paged.drafts.sources.source import LONGEST, Continuation, Ids, Trail
from services.engine.paged.drafts.sources.text_ring import TextRing

_MAX_BYTES = 64 << 20  # It holds some 25 salts with 130,000 ids each, or 800 with 4,000.
# A text begins with so many ids though they are known: as many as are compared, and what a guess may reach
# over.
_OVERLAP = LONGEST + 8


class SharedNgrams:
    """The salt that was not used for longest goes first."""

    def __init__(self, max_bytes: int = _MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._rings: OrderedDict[str, TextRing] = OrderedDict()
        self.size_bytes = 0

    def __repr__(self) -> str:
        return f"SharedNgrams(salts={len(self._rings)} size_bytes={self.size_bytes})"

    def of(self, salt: str) -> TextRing | None:
        """Return a salt's texts, which counts as a use; they are good until the next `add`."""
        ring = self._rings.get(salt)
        if ring is not None:
            self._rings.move_to_end(salt)
        return ring

    def add(self, salt: str, text: Ids) -> None:
        ring = self._rings.pop(salt, None)
        self.size_bytes -= ring.size_bytes if ring is not None else 0
        ring = self._rings[salt] = ring or TextRing()
        ring.add(text)
        self.size_bytes += ring.size_bytes
        while self.size_bytes > self._max_bytes:
            _, forgotten = self._rings.popitem(last=False)
            self.size_bytes -= forgotten.size_bytes


class SaltNgrams:
    """It takes what one sequence, whose ids only ever grow, finds in its salt's texts, and adds to them. It
    implements Source."""

    name = "ngrams"

    def __init__(self, ids: list[int], salt: str, shared: SharedNgrams, known: int) -> None:
        """The others know its first `known` ids."""
        self._ids = ids
        self._salt = salt
        self._shared = shared
        self._known = known
        self._trail = Trail()

    @property
    def num_new(self) -> int:
        return len(self._ids) - self._known

    def add(self) -> None:
        """Add all that is new, and as much before it as it takes to find the beginning."""
        self._shared.add(self._salt, self._ids[max(0, self._known - _OVERLAP) :])
        self._known = len(self._ids)

    def match(self, most: int) -> Continuation | None:
        ring = self._shared.of(self._salt)
        found = ring.match(self._ids, self._trail, most) if ring is not None else None
        if found is None:
            return None
        match, self._trail = found
        return match
