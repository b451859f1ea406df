"""This module says what ranks hold of a prompt, in tokens, and how much of that counts.

Of 4,096 tokens that the index says a rank holds (`matched`) some count (`worth`): as far as its word is
trusted, or was sent there and is to be there soon. A rank that reports its checkpoints goes on computing at
one of them, though it hold more (`matched_resume`, `resume`: the index's word, and how much of it counts).
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from services.index.read.prefix_index import PrefixIndex
from services.index.read.resumable_blocks import deepest
from services.router.placement.rank_snapshot import RankSnapshot
from services.router.ranks.balance import Balance
from services.values.rank import RankKey
from services.values.registration import Registration

Found = tuple[RankKey, Registration, int]  # and how many blocks of the prompt the index says it holds


class Hit(NamedTuple):
    matched: int
    worth: int
    matched_resume: int | None = None
    resume: int | None = None


class Hits:
    """These are the hits as one router knows them. `index_block` is in tokens."""

    def __init__(self, index: PrefixIndex, balance: Balance, index_block: int) -> None:
        self.telling: frozenset[RankKey] = frozenset()  # ranks that tell their resume points
        self._index = index
        self._balance = balance
        self._block = index_block

    def of(self, found: Sequence[Found], snapshot: RankSnapshot) -> list[Hit]:
        """One of each rank."""
        asked, now, block, telling = snapshot.asked, self._balance.clock(), self._block, self.telling
        resumed = self._resumed({key: blocks for key, _, blocks in found if key in telling}, snapshot, now)
        trusted, limited = self._balance.trust.worth, asked.reusable_tokens != math.inf
        guessed = snapshot.guessed()
        hits = []
        for key, _, blocks in found:
            matched, soon = blocks * block, guessed.depth(key) * block
            worth = trusted(key, matched, now) if blocks else 0
            if soon > worth:
                worth = soon
            if key in resumed:
                points, point = resumed[key]
                hits.append(Hit(matched, worth, points, min(worth, point)))
            elif limited:
                hits.append(Hit(matched, worth, resume=min(worth, asked.most_reused)))
            else:
                hits.append(Hit(matched, worth))
        return hits

    def _resumed(
        self, telling: dict[RankKey, int], snapshot: RankSnapshot, now: float
    ) -> dict[RankKey, tuple[int, int]]:
        """Tokens after which they can go on, who hold so many blocks: what the index says, and its worth."""
        if not telling:
            return {}
        asked, balance, block = snapshot.asked, self._balance, self._block
        furthest = asked.most_reused // block
        most = {key: min(blocks, furthest) for key, blocks in telling.items()}
        matched = self._index.resume_points.deepest(asked.hashes, most)
        guessed = deepest(snapshot.guessed().resumable(), dict.fromkeys(telling, furthest))
        resumed = {}
        for key in telling:
            tokens = matched.get(key, 0) * block
            trusted = balance.resume_trust.worth(key, tokens, now)
            resumed[key] = tokens, max(trusted, guessed.get(key, 0) * block)
        return resumed
