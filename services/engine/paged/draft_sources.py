"""Sources of drafts compare the end of a text with earlier places in it; a guesser asks them. This is pure.

Hash chains tell where a text's last three ids occurred before, as in zlib's deflate (RFC 1951, section 4).

    heads[hash of three ids]  ->  latest position behind such three  ->  the one before it  ->  ...

Other ids may have the same hash, so whoever walks a chain compares the ids. Siblings continue after the very
same ids, as far as the radix tree has them; the tree is only read.

A guesser tells how one sequence may continue, and learns from the result: every guess is compared with what
followed, whether it was verified or not. A source that was wrong several times in a row is asked less often,
until it is right again.
"""

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from services.engine.paged.draft_chances import Acceptance, Kind, count_right
from services.kv.block_hash import TOKEN_BYTES, pack_tokens, unpack_tokens
from services.kv.radix_tree import Node

LONGEST = 16  # At most so many ids are compared: a match of that length is hardly ever wrong.

Ids = Sequence[int]


@dataclass(frozen=True, slots=True)
class Continuation:
    """`ids` followed an earlier place where the same `length` ids stood (LONGEST: those or more)."""

    ids: Ids
    length: int


@dataclass(frozen=True, slots=True)
class Trail:
    """It is a sequence's last match: its first `end` ids ended like the text before `position`."""

    end: int = 0
    position: int = 0  # It is 0 without a match.

    def position_at(self, end: int) -> int:
        return self.position + end - self.end if self.position else 0


def common_len(ids: Ids, end: int, others: Ids, position: int) -> int:
    most, length = min(LONGEST, end, position), 0
    while length < most and ids[end - 1 - length] == others[position - 1 - length]:
        length += 1
    return length


def first_longest(places: Iterable[tuple[int, int]]) -> tuple[int, int]:
    best = 0, 0
    for place in places:
        if place[0] > best[0]:
            best = place
        if place[0] >= LONGEST:
            break
    return best


class Source(Protocol):
    """It serves one sequence, and is called at most once a step; a call takes microseconds."""

    @property
    def name(self) -> str: ...

    def match(self, most: int) -> Continuation | None:
        """Return 1 to `most` ids that may come next, and the number of ids that matched."""


NGRAM = 3
NO_ID = -1  # It separates texts.
_FEW = 64  # From so many positions on numpy is faster.

# These are odd and below 2**32, so that a product with an id stays within 63 bits.
_FIRST, _SECOND, _THIRD, _SHIFT = 0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35, 13


class NgramChains:
    """Positions are counted from 0. A remembered position costs 8 bytes, and so does a head."""

    def __init__(self, num_heads: int, num_kept: int | None = None) -> None:
        """Both are powers of two. The last `num_kept` positions are remembered, or all with None."""
        self._head_mask = num_heads - 1
        self._heads = array("q", (0,)) * num_heads  # It has 1 + position, or 0 for none.
        self._earlier = array("q", (0,)) * (num_kept or 0)  # It has the same by position.
        self._num_kept = num_kept
        self._last = [NO_ID] * NGRAM
        self.end = 0  # It is the next position.

    @property
    def size_bytes(self) -> int:
        return 8 * (len(self._heads) + len(self._earlier))

    def double(self) -> None:
        """Double the numbers of heads and positions, before any position was forgotten.

        This is a copy: of the two heads that one becomes, each begins with its chain.
        """
        assert self._num_kept is not None and self.end <= self._num_kept
        self._heads += self._heads
        self._head_mask = len(self._heads) - 1
        self._earlier += array("q", (0,)) * self._num_kept
        self._num_kept *= 2

    def add(self, ids: Sequence[int]) -> None:
        """Append ids. With `num_kept` there are at most so many, and they do not cross a multiple of it."""
        text = [*self._last, *ids]
        earlier = self._chain_many(text) if len(ids) > _FEW else self._chain_few(text)
        if self._num_kept is None:
            self._earlier += earlier
        else:
            first = self.end & self._num_kept - 1
            self._earlier[first : first + len(ids)] = earlier
        self._last = text[-NGRAM:]
        self.end += len(ids)

    def walk(self, a: int, b: int, c: int) -> Iterator[int]:
        position = self._heads[_slot(a, b, c) & self._head_mask] - 1
        oldest, mask = 0, -1
        if self._num_kept is not None:
            oldest, mask = max(0, self.end - self._num_kept), self._num_kept - 1
        while position >= oldest:
            yield position
            position = self._earlier[position & mask] - 1

    def _chain_few(self, text: list[int]) -> "array[int]":
        earlier = array("q")
        heads, mask, position = self._heads, self._head_mask, self.end
        for a, b, c in zip(text, text[1:], text[2:-1], strict=False):
            slot = _slot(a, b, c) & mask
            position += 1
            earlier.append(heads[slot])
            heads[slot] = position
        return earlier

    def _chain_many(self, text: list[int]) -> "array[int]":
        """Chain as `_chain_few` does: a stable sort puts the positions of one slot together, in order."""
        ids = np.array(text, dtype=np.int64)
        slots = _slots(ids) & self._head_mask
        order = np.argsort(slots.astype(np.int32), kind="stable")
        slots, positions = slots[order], order + (self.end + 1)
        is_first = np.concatenate(([True], slots[1:] != slots[:-1]))
        heads = np.frombuffer(self._heads, dtype=np.int64)
        earlier = np.empty(len(order), dtype=np.int64)
        earlier[order] = np.where(is_first, heads[slots], np.concatenate(([0], positions[:-1])))
        is_last = np.concatenate((is_first[1:], [True]))
        heads[slots[is_last]] = positions[is_last]
        return array("q", earlier.tobytes())


def _slot(a: int, b: int, c: int) -> int:
    return (a * _FIRST ^ b * _SECOND ^ c * _THIRD) >> _SHIFT


def _slots(ids: NDArray[np.int64]) -> NDArray[np.int64]:
    mixed = ids[:-3] * _FIRST ^ ids[1:-2] * _SECOND ^ ids[2:-1] * _THIRD
    return mixed >> _SHIFT


# Where a file is copied with changes, 4 give 4.3 tokens a step, 16 give 4.6, and 64 give 4.7.
_MOST_COMPARED = 16
_MIN_HEADS, _MAX_HEADS = 1 << 10, 1 << 16


class OwnNgrams:
    """It finds matches in one sequence's own ids, which only grow and are read in place."""

    name = "lookup"

    def __init__(self, ids: list[int]) -> None:
        self._ids = ids
        self._chains = NgramChains(min(_MAX_HEADS, max(_MIN_HEADS, 1 << len(ids).bit_length())))
        self._trail = Trail()

    @property
    def backlog(self) -> int:
        return len(self._ids) - self._chains.end

    def index(self, most: int) -> int:
        first, count = self._chains.end, min(most, self.backlog)
        if count > 0:
            self._chains.add(self._ids[first : first + count])
        return count

    def match(self, most: int) -> Continuation | None:
        end = len(self._ids)
        if end <= NGRAM:
            return None
        length, position = first_longest(self._places(end))
        if length < NGRAM:
            return None
        self._trail = Trail(end, position)
        return Continuation(self._repeated(position, end, most), length)

    def _places(self, end: int) -> Iterator[tuple[int, int]]:
        ids, position = self._ids, self._trail.position_at(end)
        yield common_len(ids, end, ids, position), position
        for position in islice(self._chains.walk(ids[-3], ids[-2], ids[-1]), _MOST_COMPARED):
            yield common_len(ids, end, ids, position), position

    def _repeated(self, first: int, end: int, most: int) -> Ids:
        """Return ids[first:end], repeated: a text that occurs twice in a row may continue like this."""
        ids = self._ids[first : min(end, first + most)]
        return ids if len(ids) == most else (ids * (most // len(ids) + 1))[:most]


WHOLE_PREFIX = 32  # It is the length of such a match; no n-gram match is as long.
_MOST_SIBLINGS = 64  # A popular prompt has thousands of children.


class Siblings:
    """It finds continuations of one sequence, whose ids only grow, in the radix tree."""

    name = "tree"

    def __init__(self, ids: list[int], page_size: int, deepest: Callable[[], Node | None]) -> None:
        self._ids = ids
        self._deepest = deepest
        self._page_size = page_size
        self._page_bytes = page_size * TOKEN_BYTES
        self._under: Node | None = None
        self._followed: Node | None = None  # It is a child of `_under`.
        self._seen = 0  # So many children of `_under` continue differently.

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
        """Return the latest child that begins with `open_ids`.

        The child that matched before is tried first; all are tried only where there are new ones.
        """
        if self._followed is not None and self._followed.key.startswith(open_ids):
            return self._followed
        if self._followed is None and len(node.children) == self._seen:
            return None
        latest = islice(reversed(node.children.values()), _MOST_SIBLINGS)
        self._followed = next((child for child in latest if child.key.startswith(open_ids)), None)
        self._seen = len(node.children)
        return self._followed


def _descend(node: Node, open_ids: bytes, page_bytes: int) -> tuple[Node | None, bytes]:
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


_GOOD = 0.8  # The other sources are not asked if the chance is at least this.
_PATIENCE = 4  # After so many wrong guesses in a row each further one adds a step of rest.
_MOST_RESTS = 8  # It counts steps.


@dataclass(frozen=True, slots=True)
class Guess:
    kind: Kind
    ids: Ids
    chance: float  # It is the chance of each id, given that those before it are right.

    @property
    def source(self) -> str:
        return self.kind[0]


class Guesser:
    def __init__(self, ids: list[int], sources: Sequence[Source], rank: Acceptance) -> None:
        """`ids` are the sequence's, and only grow. Of sources that are equally good the first is used."""
        self._ids = ids
        self._sources = sources
        self._acceptance = Acceptance(rank)
        self._last: Guess | None = None
        self._guessed_at = 0  # There were so many ids at the last guess.
        self._wrong = 0  # It counts the guesses in a row of which nothing was right.
        self._rests = 0  # It counts the steps to rest.

    def guess(self, most: int) -> Guess | None:
        """Return 1 to `most` ids, or None. It is called once a step, even if the guess will not be used."""
        self._compare()
        if self._rests > 0:
            self._rests -= 1
            return None
        self._last, self._guessed_at = self._best(most), len(self._ids)
        return self._last

    def _compare(self) -> None:
        if self._last is None:
            return
        right, tried = count_right(self._last.ids, self._ids[self._guessed_at :])
        self._acceptance.note(self._last.kind, right, tried)
        self._last = None
        self._wrong = 0 if right else self._wrong + 1
        self._rests = min(_MOST_RESTS, max(0, self._wrong - _PATIENCE))

    def _best(self, most: int) -> Guess | None:
        best: Guess | None = None
        for source in self._sources:
            if best is not None and best.chance >= _GOOD:
                break
            if (match := source.match(most)) is not None:
                kind = source.name, match.length.bit_length()
                chance = self._acceptance.chance(kind)
                if best is None or chance > best.chance:
                    best = Guess(kind, match.ids, chance)
        return best
