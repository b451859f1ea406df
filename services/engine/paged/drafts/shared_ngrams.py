"""The texts of each salt on this rank, in bounded memory. Nobody finds those of another salt."""

from collections import OrderedDict

from services.engine.paged.drafts.match import Ids
from services.engine.paged.drafts.text_ring import TextRing

_MAX_BYTES = 64 << 20  # some 25 salts with 130,000 ids each, or 800 with 4,000


class SharedNgrams:
    """Whoever was not used for longest goes first."""

    def __init__(self, max_bytes: int = _MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._rings: OrderedDict[str, TextRing] = OrderedDict()
        self.size_bytes = 0

    def __repr__(self) -> str:
        return f"SharedNgrams(salts={len(self._rings)} size_bytes={self.size_bytes})"

    def of(self, salt: str) -> TextRing | None:
        """Counts as a use; it is good until the next `add`."""
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
