"""The rank that computes a prompt may pull a part of it from a source, another rank that holds it. Pure.

    pull = time until the source begins + bytes that the computing rank lacks, at the pair's bandwidth

A source holds more of the prompt than the computing rank can go on from, has the same layout and lends. It
may have either role, may drain, and may be the decode rank of the same request. At most two sources are
priced (price.py), and none where a pull would take more than half the time of computing what it brings,
because a rank does not wait longer for one.

What was sent to a rank does not count here, since a rank cannot send what it has yet to compute. What it has
computed counts, even if its own events have not reported it yet.
"""

from collections.abc import Callable, Container, Iterable, Sequence
from typing import NamedTuple

from services.index.read.prefix_index import PrefixIndex
from services.index.read.prefix_index import deepest as resumable_depths
from services.kv.tails import carried_bytes
from services.router.placement.candidates import Candidate, SourceCandidate
from services.router.placement.rank_snapshot import Found, RankSnapshot, what_must_agree
from services.router.ranks.balance import Balance
from services.router.ranks.learned import PullPace
from services.router.ranks.predictions import Guessed
from services.values.kv import KvLayout
from services.values.rank import RankId, RankKey, Role
from services.values.rank_reports import LENDS, PULLS, Registration

_LOOKED_AT = 8  # So many of the ranks that hold the most are checked.
_LEAST_SHARE = 0.5  # A rank that holds less than this share of what the first one holds is left out.
_MOST_HOLDERS = 3  # It is one more than the sources, as the computing rank may be one of them.
_MOST_SOURCES = 2  # A computing rank has so many sources at most.
_TIME_SHARE = 0.5  # A pull may take this share of the time to compute what it brings.

# It returns the pace of a pull by the second rank from the first.
Pace = Callable[[RankKey, RankKey], PullPace]


class Holder(NamedTuple):
    id: RankId
    layout: KvLayout  # the same object where pages may cross
    tokens: int  # another rank could go on after these, as far as the index is trusted about this one
    matched_tokens: int  # the same by the index alone
    running: int


def deepest(holders: Iterable[Holder]) -> list[Holder]:
    """Return the few holders that are worth pricing: those that hold the most, the least busy first among
    equals."""
    found = sorted(holders, key=lambda holder: (-holder.tokens, holder.running))
    return [holder for holder in found if holder.tokens][:_MOST_HOLDERS]


def sources_of(
    candidate: Candidate, layout: KvLayout, holders: Iterable[Holder], pace: Pace
) -> tuple[SourceCandidate, ...]:
    """Return the first holders from which a pull can pay. `layout` is the candidate's."""
    key, reused_tokens, found = candidate.id.key, candidate.reused_tokens, list[SourceCandidate]()
    for rank, its_layout, tokens, matched_tokens, running in holders:
        if tokens <= reused_tokens or rank.key == key or its_layout is not layout:
            continue
        begins_s, bytes_per_s = pace(rank.key, key)
        pull_s = begins_s + _pulled_bytes(layout, candidate.hit_tokens, tokens) / bytes_per_s
        if pull_s <= _TIME_SHARE * (tokens - reused_tokens) / candidate.prefill_tokens_per_s:
            found.append(SourceCandidate(rank, tokens, matched_tokens, running, pull_s))
            if len(found) == _MOST_SOURCES:
                break
    return tuple(found)


def _pulled_bytes(layout: KvLayout, held: int, end: int) -> float:
    attention = (end - held) * layout.page_bytes / layout.page_size if end > held else 0.0
    return attention + carried_bytes(layout, end) if layout.groups else attention


class PullSources:
    def __init__(
        self,
        index: PrefixIndex,
        balance: Balance,
        index_block: int,
        is_connected: Callable[[RankKey], bool],
    ) -> None:
        self._index = index
        self._balance = balance
        self._block = index_block
        self._is_connected = is_connected
        self._lending: dict[RankKey, Registration] = {}
        self._pulling: set[RankKey] = set()
        self._layouts: dict[RankKey, KvLayout] = {}

    def set_ranks(self, ranks: Iterable[Registration]) -> Container[RankKey]:
        """Take these as the ranks that there are, and return those that others may pull from."""
        ranks = list(ranks)
        self._lending = {rank.id.key: rank for rank in ranks if LENDS in rank.capabilities}
        self._pulling = {rank.id.key for rank in ranks if PULLS in rank.capabilities}
        known: dict[KvLayout, KvLayout] = {}
        alike = ((rank.id.key, what_must_agree(rank.layout)) for rank in ranks)
        self._layouts = {key: known.setdefault(layout, layout) for key, layout in alike}
        return self._lending if self._pulling else ()

    def holders(self, snapshot: RankSnapshot) -> Sequence[Holder]:
        if not self._lending or not self._pulling:
            return ()
        held, there = snapshot.held(), self._balance.there.of(snapshot.asked.hashes, self._balance.clock())
        found: list[Found] = []
        for key in there.deepest()[:_LOOKED_AT]:
            if (rank := self._lending.get(key)) is not None and self._may_lend(rank, snapshot):
                found.append((key, rank, max(there.depth(key), held.depth(key))))
        untold, most = {key for key, _, _ in found}, max((blocks for _, _, blocks in found), default=0)
        for key, blocks in held.deepest():
            if len(found) >= _LOOKED_AT or blocks < _LEAST_SHARE * most:
                break
            rank = self._lending.get(key)
            if rank is not None and key not in untold and self._may_lend(rank, snapshot):
                found.append((key, rank, blocks))
                most = max(most, blocks)
        return deepest(self._holders(found, snapshot, there))

    def of(
        self, candidates: Sequence[Candidate], holders: Sequence[Holder]
    ) -> list[tuple[SourceCandidate, ...]]:
        pulling, pace, most = self._pulling, self._balance.pull_paces(), holders[0].tokens
        return [
            sources_of(rank, self._layouts[rank.id.key], holders, pace)
            if rank.id.key in pulling and not rank.excluded and rank.reused_tokens < most
            else ()
            for rank in candidates
        ]

    def _may_lend(self, rank: Registration, snapshot: RankSnapshot) -> bool:
        key = rank.id.key
        if rank.id in snapshot.asked.tried or not self._balance.may_lend(key):
            return False
        return rank.role is Role.PREFILL or self._is_connected(key)

    def _holders(self, found: Sequence[Found], snapshot: RankSnapshot, there: Guessed) -> Iterable[Holder]:
        asked, balance, now, block = snapshot.asked, self._balance, self._balance.clock(), self._block
        held, most = snapshot.held(), asked.most_reused
        furthest = most // block
        telling = {key: min(blocks, furthest) for key, rank, blocks in found if rank.reports_checkpoints}
        points = self._index.checkpoints.deepest(asked.hashes, telling) if telling else {}
        untold = resumable_depths(there.resumable(), telling) if telling else {}
        for key, rank, _ in found:
            if key in telling:
                indexed, computed, trust = points.get(key, 0), untold.get(key, 0), balance.resume_trust
            else:
                indexed, computed, trust = held.depth(key), there.depth(key), balance.trust
            matched = min(indexed * block, most)
            tokens = max(trust.worth(key, matched, now), min(computed * block, most))
            yield Holder(rank.id, self._layouts[key], tokens, matched, snapshot.now(key).running)
