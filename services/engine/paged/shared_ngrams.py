"""The texts of each salt on this rank are kept in bounded memory. Nobody finds those of another salt.

A ring holds the latest texts of one salt, found by their n-grams. The texts follow each other, each ended by
NO_ID. The ring begins small and doubles; when it is full the oldest texts are overwritten.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterator
from itertools import islice

from services.engine.paged.draft_sources import (
    LONGEST,
    NGRAM,
    NO_ID,
    Continuation,
    Ids,
    NgramChains,
    Trail,
    common_len,
)

_MOST_COMPARED = 8  # With 4 to 32 as many drafts are accepted, at a growing cost.


class TextRing:
    """A position counts all ids ever added, so it stays the same when the ring grows."""

    def __init__(self, min_ids: int = 1 << 12, max_ids: int = 1 << 17) -> None:
        """It has room for these numbers of ids, which are powers of two, at 20 bytes each."""
        self._max_ids = max_ids
        self._ids = array("i", [NO_ID]) * min_ids
        self._chains = NgramChains(min_ids, min_ids)

    def __repr__(self) -> str:
        return f"TextRing(ids={self._chains.end} room={len(self._ids)})"

    @property
    def size_bytes(self) -> int:
        return 4 * len(self._ids) + self._chains.size_bytes

    def add(self, text: Ids) -> None:
        text = [*text[-(self._max_ids // 4) :], NO_ID]
        while self._chains.end + len(text) > len(self._ids) < self._max_ids:
            self._grow()
        to_edge = -self._chains.end & self._mask
        if to_edge < len(text):
            self._put([NO_ID] * to_edge)
        self._put(text)

    def match(self, ids: Ids, trail: Trail, most: int) -> tuple[Continuation, Trail] | None:
        """Return up to `most` ids that mostly followed the places with the longest match of the end of
        `ids`."""
        if len(ids) < NGRAM:
            return None
        length, positions = self._longest(ids, trail, most)
        guess = self._likeliest(positions, most) if length >= NGRAM else []
        return (Continuation(guess, length), Trail(len(ids), positions[0])) if guess else None

    @property
    def _mask(self) -> int:
        return len(self._ids) - 1

    def _grow(self) -> None:
        self._ids += array("i", [NO_ID]) * len(self._ids)
        self._chains.double()

    def _put(self, ids: Ids) -> None:
        first = self._chains.end & self._mask
        self._ids[first : first + len(ids)] = array("i", ids)
        self._chains.add(ids)

    def _longest(self, ids: Ids, trail: Trail, most: int) -> tuple[int, list[int]]:
        """Return the length of the longest matches with the end of `ids`, and their positions, latest first.

        Nothing is searched where the last match still holds.
        """
        longest, positions = 0, list[int]()
        for position in self._places(ids, trail):
            length = common_len(ids, len(ids), self._ids, position & self._mask)
            if length > longest:
                longest, positions = length, [position]
            elif length == longest:
                positions.append(position)
            if (
                length == LONGEST
                and position == trail.position_at(len(ids))
                and self._goes_on(position, most)
            ):
                break
        return longest, positions

    def _places(self, ids: Ids, trail: Trail) -> Iterator[int]:
        yield trail.position_at(len(ids))
        yield from islice(self._chains.walk(ids[-3], ids[-2], ids[-1]), _MOST_COMPARED)

    def _goes_on(self, position: int, most: int) -> bool:
        first = position & self._mask
        return NO_ID not in self._ids[first : first + most]

    def _likeliest(self, positions: list[int], most: int) -> list[int]:
        """Return the next id of most positions, then that of most of these, and so on; the first wins a
        tie."""
        guess, places = list[int](), [position & self._mask for position in positions]
        while len(guess) < most:
            following = [self._ids[place] for place in places if place < len(self._ids)]
            said = [token_id for token_id in following if token_id != NO_ID]
            if not said:
                break
            guess.append(max(said, key=said.count))
            places = [p + 1 for p, token_id in zip(places, following, strict=True) if token_id == guess[-1]]
        return guess


_MAX_BYTES = 64 << 20  # It holds about 25 salts with 130,000 ids each, or 800 with 4,000.
# A text begins with so many known ids: as many as are compared, and as a guess may pass over.
_OVERLAP = LONGEST + 8


class SharedNgrams:
    """The salt that was not used for longest is dropped first."""

    def __init__(self, max_bytes: int = _MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._rings: OrderedDict[str, TextRing] = OrderedDict()
        self.size_bytes = 0

    def __repr__(self) -> str:
        return f"SharedNgrams(salts={len(self._rings)} size_bytes={self.size_bytes})"

    def of(self, salt: str) -> TextRing | None:
        """Return a salt's texts, which counts as a use; they are valid until the next `add`."""
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
    name = "ngrams"

    def __init__(self, ids: list[int], salt: str, shared: SharedNgrams, known: int) -> None:
        self._ids = ids
        self._salt = salt
        self._shared = shared
        self._known = known  # The salt's texts already have so many of its first ids.
        self._trail = Trail()

    @property
    def num_new(self) -> int:
        return len(self._ids) - self._known

    def add(self) -> None:
        self._shared.add(self._salt, self._ids[max(0, self._known - _OVERLAP) :])
        self._known = len(self._ids)

    def match(self, most: int) -> Continuation | None:
        ring = self._shared.of(self._salt)
        found = ring.match(self._ids, self._trail, most) if ring is not None else None
        if found is None:
            return None
        match, self._trail = found
        return match
