"""A snapshot shows the ranks as one decision sees them: each is looked up once and kept. Pure.

A hit tells how many tokens of the prompt a rank holds. `matched` is what the index says, and `worth` is how
much of that counts: as far as the index is trusted, or as much as was sent there and will soon be cached. A
rank that reports its checkpoints can go on computing only at one of them, even if it holds more:
`matched_resume` is that checkpoint by the index, and `resume` is how much of it counts. Plan remote uses one
of the KV layouts in a cluster (`common_layout`).
"""

from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, islice
from math import inf
from typing import NamedTuple

from services.index.read.prefix_index import Held, HeldBelow, PrefixIndex, deepest
from services.kv.tails import carried_bytes
from services.router.placement import exclusion
from services.router.placement.candidates import Asked, Brought, DecodeCandidate, PrefillCandidate
from services.router.ranks.balance import Balance, RankNow
from services.router.ranks.predictions import Guessed
from services.router.ranks.rank_order import LoadOrder
from services.values.adapter import Adapter
from services.values.kv import KvLayout
from services.values.rank import RankKey, Role
from services.values.rank_reports import RankLoad, Registration

# A tier of which nothing was read yet is assumed to be read so fast.
_MEMORY_BYTES_PER_S, _FILE_BYTES_PER_S = 4e9, 5e8
_LOOK_S = 0.01  # A rank may first have to look what others' files hold.


def what_must_agree(layout: KvLayout) -> KvLayout:
    """Return the layout without the parts that may differ between ranks that send KV to each other."""
    return replace(layout, tp_size=1, draft=None)


def common_layout(
    decodes: Iterable[Registration], prefills: Iterable[Registration], draining: Container[RankKey] = ()
) -> KvLayout | None:
    """Return the layout that the most pairs of a decode and a prefill rank have, or None without a decode
    rank.

    Without pairs it is that of the most decode ranks. So the first ranks that a roll-out changes stay out of
    plan remote, until more pairs have their layout than the old one. Ranks that are `draining` do not count,
    unless all decode ranks drain. TP degrees and draft models do not count.
    """
    staying = [rank for rank in decodes if rank.id.key not in draining]
    if staying:
        decodes, prefills = staying, [rank for rank in prefills if rank.id.key not in draining]
    receivers, senders = (
        Counter(what_must_agree(rank.layout) for rank in ranks) for ranks in (decodes, prefills)
    )

    def pairs(layout: KvLayout) -> tuple[int, int]:
        return receivers[layout] * senders[layout], receivers[layout]

    return max(receivers, key=pairs, default=None)


def staying(ranks: Sequence[Registration]) -> Sequence[Registration]:
    """Return the ranks that are not draining, or all of them where none stays."""
    return [rank for rank in ranks if not rank.draining] or ranks


def common_adapters(decodes: Sequence[Registration], prefills: Sequence[Registration]) -> dict[str, Adapter]:
    """Return by name the adapter that the most pairs of a decode and a prefill rank have, or without such
    pairs the most decode ranks. So while another one of that name is rolled out, all requests get one."""
    receivers, senders = (Counter(chain(*(rank.adapters for rank in ranks))) for ranks in (decodes, prefills))

    def pairs(adapter: Adapter) -> tuple[int, int, str]:
        return receivers[adapter] * senders[adapter], receivers[adapter], adapter.digest

    return {adapter.name: adapter for adapter in sorted(receivers, key=pairs)}


class RankSnapshot:
    """A snapshot belongs to one request and is valid as long as nothing changes.

    `apart` names the ranks of another layout, and in what theirs differs.
    """

    __slots__ = (
        "_apart",
        "_balance",
        "_below",
        "_excluded",
        "_guessed",
        "_has_looked_below",
        "_held",
        "_index",
        "_is_connected",
        "_now",
        "_shared",
        "asked",
        "tiers",
    )

    def __init__(
        self,
        asked: Asked,
        balance: Balance,
        index: PrefixIndex,
        is_connected: Callable[[RankKey], bool],
        apart: Mapping[RankKey, str],
        below: PrefixIndex | None = None,
    ) -> None:
        self.asked = asked
        self._balance = balance
        self._index = index
        self._is_connected = is_connected
        self._apart = apart
        self._now: dict[RankKey, RankNow] = {}
        self._excluded: dict[RankKey, str] = {}
        # None means that no rank has records of its tiers.
        self.tiers = below if below is not None and not below.is_empty else None
        self._has_looked_below = False
        self._held: Held | None = None
        self._below: HeldBelow | None = None
        self._guessed: Guessed | None = None
        self._shared: FilesInReach | None = None

    def now(self, key: RankKey) -> RankNow:
        now = self._now.get(key)
        if now is None:
            now = self._now[key] = self._balance.now(key)
        return now

    def held(self) -> Held:
        if self._held is None:
            self._held = self._index.held(self.asked.hashes)
        return self._held

    def below(self) -> HeldBelow | None:
        """Return who holds anything of the prompt below its pool; None where nobody does."""
        if not self._has_looked_below and self.tiers is not None:
            self._has_looked_below, below = True, self.tiers.held_below(self.asked.hashes)
            self._below = below if below.has_holders else None
        return self._below

    def shared(self, groups: Mapping[RankKey, str]) -> "FilesInReach | None":
        """Return what ranks that share files may bring up; None where none do, or nobody holds anything."""
        if self._shared is None and groups and (below := self.below()) is not None:
            self._shared = FilesInReach(below, groups, self.asked)
        return self._shared

    def guessed(self) -> Guessed:
        if self._guessed is None:
            balance = self._balance
            self._guessed = balance.predictions.of(self.asked.hashes, balance.clock())
        return self._guessed

    def exclusion(self, key: RankKey, rank: Registration) -> str:
        excluded = self._excluded.get(key)
        if excluded is None:
            liveness, differs_in = self._balance.liveness(key), self._apart.get(key, "")
            standing = exclusion.WELL
            if liveness or differs_in or not self._is_connected(key):
                standing = exclusion.Standing(liveness, self._is_connected(key), differs_in)
            excluded = self._excluded[key] = exclusion.of_rank(rank, standing, self.asked)
        return excluded

    def receives(self, key: RankKey) -> bool:
        return key not in self._apart

    def queue_wait_s(self, key: RankKey) -> float:
        """Return the wait at a decode rank for pages for all the answers that are requested."""
        return self._balance.queue_wait_s(key, self.asked.answers - 1)

    def may_serve(self, key: RankKey, rank: Registration) -> bool:
        """Return whether the rank may serve, judged by its own part of the wait, to which the other rank can
        only add."""
        if self.exclusion(key, rank):
            return False
        if self.asked.max_wait_s == inf:
            return True
        wait_s = self.queue_wait_s(key) if rank.role is Role.DECODE else self.now(key).compute_wait_s
        return wait_s <= self.asked.max_wait_s


class Queue:
    """These are a rank's waits, which are looked up only when read, since there may be a thousand ranks."""

    __slots__ = ("_rank", "_snapshot")

    def __init__(self, snapshot: RankSnapshot, rank: RankKey) -> None:
        self._snapshot, self._rank = snapshot, rank

    @property
    def receives(self) -> bool:
        return self._snapshot.receives(self._rank)

    @property
    def queue_wait_s(self) -> float:
        return self._snapshot.queue_wait_s(self._rank)

    @property
    def compute_wait_s(self) -> float:
        return self._snapshot.now(self._rank).compute_wait_s


Found = tuple[RankKey, Registration, int]  # The last is the blocks of the prompt that it holds by the index.


class Hit(NamedTuple):
    matched: int
    worth: int
    matched_resume: int | None = None
    resume: int | None = None
    brought: Brought | None = None


def _bring_s(load: RankLoad, layout: KvLayout, num_tokens: int, file_tokens: int) -> float:
    """Return the time to bring up so many tokens, of which so many lie in files."""
    in_memory_s = (num_tokens - file_tokens) / (load.memory_tier_bytes_per_s or _MEMORY_BYTES_PER_S)
    in_files_s = file_tokens / (load.file_tier_bytes_per_s or _FILE_BYTES_PER_S)
    return (in_memory_s + in_files_s) * layout.page_bytes / layout.page_size


def _shared_s(load: RankLoad, layout: KvLayout, num_tokens: int) -> float:
    """Return the time to bring up so many tokens from other ranks' files."""
    bytes_per_s = load.shared_tier_bytes_per_s or load.file_tier_bytes_per_s or _FILE_BYTES_PER_S
    return _LOOK_S + num_tokens * layout.page_bytes / layout.page_size / bytes_per_s


def _point_s(load: RankLoad, layout: KvLayout, position: int) -> float:
    """Return the time to bring up the checkpoint at `position`, if the layout has such, from the nearest
    tier."""
    bytes_per_s = load.memory_tier_bytes_per_s or load.file_tier_bytes_per_s or _FILE_BYTES_PER_S
    return carried_bytes(layout, position) / bytes_per_s


def back_s(tiers: PrefixIndex | None, rank: Registration, load: RankLoad) -> float:
    """Return the time to bring a token back up that the rank evicts, or infinity where no tier keeps it.

    A rank with anything below its pool stores what it may have to evict, in its nearest tier.
    """
    if tiers is None or load.tiers_off or not tiers.num_blocks(rank.id.key):
        return inf
    bytes_per_s = load.memory_tier_bytes_per_s or load.file_tier_bytes_per_s or _FILE_BYTES_PER_S
    return rank.layout.page_bytes / rank.layout.page_size / bytes_per_s


class FilesInReach:
    """Ranks that read the same directory bring up what any of their files holds. Depths are in blocks."""

    __slots__ = ("_asked", "_below", "_files", "_groups", "_points")

    def __init__(self, below: HeldBelow, groups: Mapping[RankKey, str], asked: Asked) -> None:
        """`groups` have the same value for ranks that share files."""
        self._below, self._groups, self._asked = below, groups, asked
        self._files = below.files_by_group(groups)
        self._points: list[tuple[int, frozenset[RankKey]]] | None = None

    def end(self, key: RankKey, own: int) -> int:
        """Return how much the rank finds, if its own tiers hold the first `own` blocks."""
        files = self._files.get(self._groups.get(key, ""))
        return own if files is None else self._below.reach(files, own)

    def readers(self, order: LoadOrder, may_serve: Callable[[RankKey], bool]) -> Iterator[RankKey]:
        """Yield of each group whose files hold anything the first rank in the order that may serve."""
        for group in self._files:
            members = (key for key in order if self._groups.get(key) == group)
            yield from islice(filter(may_serve, members), 1)

    def checkpoint(self, key: RankKey, end: int) -> int:
        """Return the depth of the deepest checkpoint of ranks that share files with this one, up to `end`; 0
        without any."""
        if self._points is None:
            self._points = list(self._below.checkpoints.along(self._asked.hashes))
        group = self._groups[key]
        for depth, ranks in self._points:
            if depth <= end and any(self._groups.get(rank) == group for rank in ranks):
                return depth
        return 0


def _before(now: RankNow, hit: Hit, prompt_tokens: int) -> tuple[int, int, int]:
    """Return what `RankNow.before` does of a prompt with that hit, if nothing is pulled."""
    if not now.load.overtaken:
        return now.pending_tokens, 0, 0
    found = hit.worth if hit.resume is None else hit.resume
    if hit.brought is not None:
        found = max(found, hit.brought.tokens)
    return now.before(max(1, prompt_tokens - found))


# It is a rank that was found, with its hit, its load, and how fast it is taken to be.
Seen = tuple[Found, Hit, RankNow, float]


def as_decodes(
    seen: Iterable[Seen], snapshot: RankSnapshot, own: Container[RankKey]
) -> list[DecodeCandidate]:
    excluded, receives = snapshot.exclusion, snapshot.receives
    tiers, prompt_tokens = snapshot.tiers, snapshot.asked.prompt_tokens
    # The arguments are positional, because keywords take twice as long and there are twenty of them.
    return [
        DecodeCandidate(
            rank.address.id,
            worth,  # hit_tokens
            pending_tokens,
            rate,
            running,
            load.token_s,
            (free := load.books.free * rank.layout.page_size),
            load.books.cached * rank.layout.page_size,  # evictable_tokens
            excluded(key, rank),
            queued,
            matched,
            load.waiting_tokens,
            key in own,
            snapshot.queue_wait_s(key) if load.waiting else 0.0,
            pending_tokens / tokens_per_s if is_measured else 0.0,  # compute_wait_s
            rank.max_context_tokens,
            receives(key),
            resume,
            matched_resume,
            load.tokens_per_step,
            (),  # sources
            brought,
            # Where all of it fits in free pages nothing is evicted.
            inf if tiers is None or prompt_tokens <= free else back_s(tiers, rank, load),
            passed_tokens,
            passed_prompts,
        )
        for (key, rank, _), hit, now, rate in seen
        for matched, worth, matched_resume, resume, brought in (hit,)
        for load, _, queued, running, tokens_per_s, is_measured in (now,)
        for pending_tokens, passed_tokens, passed_prompts in (_before(now, hit, prompt_tokens),)
    ]


def as_prefills(
    seen: Iterable[Seen], snapshot: RankSnapshot, own: Container[RankKey]
) -> list[PrefillCandidate]:
    excluded, tiers, prompt_tokens = snapshot.exclusion, snapshot.tiers, snapshot.asked.prompt_tokens
    return [
        PrefillCandidate(
            rank.address.id,
            worth,  # hit_tokens
            pending_tokens,
            rate,  # prefill_tokens_per_s
            (free := load.books.free * rank.layout.page_size),
            load.books.cached * rank.layout.page_size,  # evictable_tokens
            excluded(key, rank),
            queued,
            matched,
            key in own,
            pending_tokens / tokens_per_s if is_measured else 0.0,  # compute_wait_s
            rank.max_context_tokens,
            resume,
            matched_resume,
            (),  # sources
            brought,
            # Where all of it fits in free pages nothing is evicted.
            inf if tiers is None or prompt_tokens <= free else back_s(tiers, rank, load),
            passed_tokens,
            passed_prompts,
        )
        for (key, rank, _), hit, now, rate in seen
        for matched, worth, matched_resume, resume, brought in (hit,)
        for load, _, queued, _, tokens_per_s, is_measured in (now,)
        for pending_tokens, passed_tokens, passed_prompts in (_before(now, hit, prompt_tokens),)
    ]


class Hits:
    def __init__(self, index: PrefixIndex, balance: Balance, index_block: int) -> None:
        self.telling: frozenset[RankKey] = frozenset()  # ranks that report their checkpoints
        self.sharing: Mapping[RankKey, str] = {}  # ranks that share files, by the directory's name
        self._index = index
        self._balance = balance
        self._block = index_block

    def of(self, found: Sequence[Found], snapshot: RankSnapshot) -> list[Hit]:
        asked, now, block, telling = snapshot.asked, self._balance.clock(), self._block, self.telling
        resumed = self._resumed({key: blocks for key, _, blocks in found if key in telling}, snapshot, now)
        trusted, limited = self._balance.trust.worth, asked.reusable_tokens != inf
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
        if (below := snapshot.below()) is not None:
            few, rest, depth = below.few, below.rest * block, below.depth
            furthest = {key: asked.most_reused // block for key, _, _ in found if key in telling}
            deepest_below = below.checkpoints.deepest(asked.hashes, furthest) if furthest else {}
            shared = snapshot.shared(self.sharing)
            for at, (key, rank, _) in enumerate(found):
                hit = hits[at]
                if key in telling:
                    kept, has = deepest_below.get(key, 0) * block, hit.resume or 0
                else:
                    has = hit.worth
                    kept = few[key] * block if key in few else depth(key) * block if rest > has else 0
                brought = None
                if shared is not None and key in self.sharing:
                    brought = self._brought_shared(rank, hit, kept, has, snapshot, below, shared)
                if brought is None and kept > has:
                    brought = self._brought(rank, hit, kept, has, kept, snapshot, below)
                if brought is not None:
                    hits[at] = hit._replace(brought=brought)
        return hits

    def _brought_shared(
        self,
        rank: Registration,
        hit: Hit,
        kept: int,
        has: int,
        snapshot: RankSnapshot,
        below: HeldBelow,
        shared: FilesInReach,
    ) -> Brought | None:
        """Return what it would bring up from its own tiers and others' files together, where that is more
        than the `kept` tokens."""
        key, block = rank.id.key, self._block
        own = below.depth(key)
        if (end := shared.end(key, own)) > own and key in self.telling:
            end = shared.checkpoint(key, min(end, snapshot.asked.most_reused // block))
        if end * block <= max(kept, has, own * block):
            return None
        return self._brought(rank, hit, end * block, has, own * block, snapshot, below)

    def _brought(
        self,
        rank: Registration,
        hit: Hit,
        kept: int,
        has: int,
        own: int,
        snapshot: RankSnapshot,
        below: HeldBelow,
    ) -> Brought | None:
        """Return what the rank would bring up of the `kept` tokens, where it `has` so many without that; None
        if it would take no less time than computing, for then it computes.

        Behind the first `own` tokens they are in others' files. Up to a checkpoint below, some pages may be
        in its pool.
        """
        key, matched = rank.id.key, min(kept, snapshot.asked.most_reused)
        now = snapshot.now(key)
        if now.load.tiers_off or matched <= has:
            return None
        is_shared = matched > max(own, has, hit.worth)
        trust = self._balance.shared_trust if is_shared else self._balance.tier_trust
        tokens = has + trust.worth(key, matched - has, self._balance.clock())
        in_pool = min(max(has, hit.worth), tokens)
        own_end = max(in_pool, min(own, tokens))
        file_tokens = below.in_files(key, in_pool // self._block, -(-own_end // self._block)) * self._block
        bring_s = _bring_s(now.load, rank.layout, own_end - in_pool, min(file_tokens, own_end - in_pool))
        bring_s += _point_s(now.load, rank.layout, tokens)
        if tokens > own_end:
            shared_s = _shared_s(now.load, rank.layout, tokens - own_end)
            if shared_s * now.tokens_per_s >= tokens - own_end:
                return None
            bring_s += shared_s
        if bring_s * now.tokens_per_s >= tokens - has:
            return None
        return Brought(tokens, matched, bring_s, tokens - own_end)

    def _resumed(
        self, telling: dict[RankKey, int], snapshot: RankSnapshot, now: float
    ) -> dict[RankKey, tuple[int, int]]:
        """Return for each rank the tokens before its last checkpoint: by the index, and how much of it
        counts.

        `telling` has the blocks that each rank holds, of ranks that report their checkpoints.
        """
        if not telling:
            return {}
        asked, balance, block = snapshot.asked, self._balance, self._block
        furthest = asked.most_reused // block
        most = {key: min(blocks, furthest) for key, blocks in telling.items()}
        matched = self._index.checkpoints.deepest(asked.hashes, most)
        guessed = deepest(snapshot.guessed().resumable(), dict.fromkeys(telling, furthest))
        resumed = {}
        for key in telling:
            tokens = matched.get(key, 0) * block
            trusted = balance.resume_trust.worth(key, tokens, now)
            resumed[key] = tokens, max(trusted, guessed.get(key, 0) * block)
        return resumed
