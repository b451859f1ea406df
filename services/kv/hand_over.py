"""A rank that leaves hands over its cached prefixes: this decides which, in which order, and to whom.

    prefix:   listed --offered to a successor--> taken
                ^  |                          |--> refused, failed: listed again, for a second successor
                |  |                          |--> busy: listed again, and its successor rests for a while
                |  |                          |--> taken in part: listed again, for one with more room
                +--|--------------------------+
                   |--no successor is left, two have refused, the time is over--> left
                   `--it was evicted, or is in use--> dropped

Prefixes that were requested twice are offered first, then those that were used last. A prefix goes to the
successor that got another one with which it shares at least half of its tokens, so that the shared part
crosses once. (Without "half" a system prompt that all share would bring everything to one successor.)
Otherwise it goes to the successor with the most room. A prefix that is offered later may displace less, so a
successor that had no room once, or no room for all of a prefix, is not asked again. A prefix that was offered
and not taken is listed in its old place: if an older one came first, the younger one would displace it.
"""

from bisect import insort_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from services.kv.block_hash import unpack_tokens
from services.kv.radix_tree import Node

_MOST_TRIES = 2
_MOST_AT_A_TIME = 2  # This is per successor: one prefix crosses while the next is offered.

Successor = TypeVar("Successor")


@dataclass(frozen=True, slots=True, eq=False)
class IdlePrefix:
    """A path of the radix tree, from the root to a leaf, is cached and not in use."""

    node: Node = field(repr=False)
    salt: str
    tokens: int
    protected_tokens: int  # So many tokens at its beginning were requested twice.
    idle_s: float
    # Other prefixes branch off here: (name of the node, tokens down to it), from the root on.
    forks: tuple[tuple[int, int], ...] = ()

    @property
    def is_protected(self) -> bool:
        return 2 * self.protected_tokens >= self.tokens


def idle_prefix(leaf: Node, page_size: int, idle_s: float) -> IdlePrefix:
    """Return the prefix that ends at `leaf`. By Rule 3 of the tree the protected part is its beginning."""
    forks: list[tuple[int, int]] = []
    protected_pages, node = 0, leaf
    while node.parent is not None:
        if node.protected and not protected_pages:
            protected_pages = node.depth
        if len(node.children) > 1:
            forks.append((node.page, node.depth * page_size))
        node = node.parent
    tokens, protected = leaf.depth * page_size, protected_pages * page_size
    return IdlePrefix(leaf, leaf.scope.salt, tokens, protected, idle_s, tuple(reversed(forks)))


def spell(node: Node) -> tuple[int, ...] | None:
    """Return the token ids of the prefix that ends at `node`; None if it was evicted or is in use."""
    keys: list[bytes] = []
    if node.locked:
        return None
    while node.parent is not None:
        if node.parent.children.get(node.key) is not node:
            return None
        keys.append(node.key)
        node = node.parent
    return tuple(unpack_tokens(b"".join(reversed(keys))))


@dataclass(slots=True)
class _Asked:
    room_tokens: float = float("inf")  # It is unknown before the first answer.
    offered: int = 0  # So many offers have no answer yet.
    given_tokens: int = 0
    is_out: bool = False  # It has no room, or cannot be reached.
    rests: bool = False  # It was busy.

    @property
    def may_be_asked(self) -> bool:
        return not (self.is_out or self.rests) and self.offered < _MOST_AT_A_TIME


@dataclass(slots=True)
class HandOverOutcome:
    handed_tokens: int = 0
    left_tokens: int = 0  # These are lost when the rank ends.


class HandOver(Generic[Successor]):
    """`next` returns what to offer to whom; the method that fits the successor's answer is called then."""

    def __init__(self, prefixes: Sequence[IdlePrefix], successors: Sequence[Successor]) -> None:
        self.outcome = HandOverOutcome()
        self._listed = sorted(prefixes, key=_turn)
        self._successors = {successor: _Asked() for successor in successors}
        self._tried: dict[IdlePrefix, set[Successor]] = {}
        self._offered: dict[IdlePrefix, Successor] = {}
        self._taken_tokens: dict[IdlePrefix, int] = {}
        self._went: dict[int, Successor] = {}  # The key is the name of a fork.

    def __repr__(self) -> str:
        return f"HandOver(listed={len(self._listed)} offered={len(self._offered)} {self.outcome})"

    def next(self) -> tuple[IdlePrefix, Successor] | None:
        """Return a prefix and its successor; None if nothing is left to offer or an answer is due first."""
        place = 0
        if self._offered and not any(asked.may_be_asked for asked in self._successors.values()):
            return None
        while place < len(self._listed):
            prefix = self._listed[place]
            left = [successor for successor in self._successors if self._may_take(prefix, successor)]
            if not left:
                del self._listed[place]
                self._leave(prefix)
                continue
            successor = self._choose(prefix, left)
            if self._successors[successor].may_be_asked:
                del self._listed[place]
                return self._offer(prefix, successor)
            place += 1  # This successor is busy; the next prefix's may not be.
        return None

    def taken(self, prefix: IdlePrefix, held_tokens: int, room_tokens: int) -> int:
        """Return how many tokens more are handed over. `room_tokens` is 0 where it had room for no more."""
        successor, asked = self._answered(prefix)
        before, held_tokens = self._taken_tokens.get(prefix, 0), min(held_tokens, prefix.tokens)
        more = max(0, held_tokens - before)
        self._taken_tokens[prefix] = before + more
        asked.room_tokens = room_tokens
        asked.given_tokens += held_tokens
        self.outcome.handed_tokens += more
        for fork, _ in prefix.forks:
            self._went[fork] = successor
        asked.is_out |= room_tokens == 0
        if asked.is_out and held_tokens < prefix.tokens:
            self._list_again(prefix)
        else:
            self._leave(prefix)
        return more

    def no_room(self, prefix: IdlePrefix) -> None:
        _, asked = self._answered(prefix)
        asked.is_out = True
        self._list_again(prefix)

    def failed(self, prefix: IdlePrefix, *, is_out: bool) -> None:
        """Note that the successor did not pull it; with `is_out` the successor cannot be asked any more."""
        successor, asked = self._answered(prefix)
        asked.is_out |= is_out
        self._tried.setdefault(prefix, set()).add(successor)
        self._list_again(prefix)

    def busy(self, prefix: IdlePrefix) -> None:
        """Ask its successor again only after `rested`. Meanwhile another one may be asked."""
        _, asked = self._answered(prefix)
        asked.rests = True
        self._list_again(prefix)

    def rested(self, successor: Successor) -> None:
        self._successors[successor].rests = False

    def dropped(self, prefix: IdlePrefix) -> int:
        """Return how many of its tokens nobody took."""
        self._answered(prefix)
        return prefix.tokens - self._taken_tokens.get(prefix, 0)

    def end(self) -> None:
        for prefix in (*self._listed, *self._offered):
            self._leave(prefix)
        self._listed.clear()
        self._offered.clear()

    def _leave(self, prefix: IdlePrefix) -> None:
        taken_tokens = self._taken_tokens.get(prefix, 0)
        self.outcome.left_tokens += prefix.tokens - taken_tokens

    def _may_take(self, prefix: IdlePrefix, successor: Successor) -> bool:
        tried = self._tried.get(prefix, set())
        return not self._successors[successor].is_out and len(tried) < _MOST_TRIES and successor not in tried

    def _choose(self, prefix: IdlePrefix, left: Sequence[Successor]) -> Successor:
        for fork, tokens in reversed(prefix.forks):
            went = self._went.get(fork)
            if 2 * tokens >= prefix.tokens and went is not None and went in left:
                return went

        def room(successor: Successor) -> tuple[bool, float, int]:
            asked = self._successors[successor]
            return asked.may_be_asked, asked.room_tokens, -asked.given_tokens - asked.offered

        return max(left, key=room)

    def _offer(self, prefix: IdlePrefix, successor: Successor) -> tuple[IdlePrefix, Successor]:
        self._offered[prefix] = successor
        self._successors[successor].offered += 1
        for fork, _ in prefix.forks:  # Prefixes that share much with it wait for the same successor.
            self._went.setdefault(fork, successor)
        return prefix, successor

    def _answered(self, prefix: IdlePrefix) -> tuple[Successor, _Asked]:
        successor = self._offered.pop(prefix)
        asked = self._successors[successor]
        asked.offered -= 1
        return successor, asked

    def _list_again(self, prefix: IdlePrefix) -> None:
        insort_left(self._listed, prefix, key=_turn)


def _turn(prefix: IdlePrefix) -> tuple[bool, float]:
    return not prefix.is_protected, prefix.idle_s
