"""These are the rules of other routers that look at caches and loads, as published, with their defaults.

    llm-d-approximate  Scores are added: 2 for the queue, 2 for room, 3 for the share of the prompt that this
                       router has sent there, 2 for the rank that got a cold prompt longest ago (a guide's
                       weights).
    llm-d-precise      4 for requests in flight, 2 for room, 2 for the share that the ranks' events tell, or
                       that was sent there in the last two seconds, 2 as above.
    llm-d-work         Remaining work (llm-d-router#2540): the rank with the fewest uncached tokens, those in
                       flight there and the request's own. Its classes of ranks and its pulls are left out.
    dynamo             The lowest of (blocks to prefill there, less those held) + blocks decoding there.
    preble             E2: where a prompt has more held than new, the least loaded of those that hold the
                       most; else the rank with the least of load in three minutes, what it evicts and what it
                       computes. What would go to the heaviest rank goes to the lightest where it has 1.5
                       times its load.
    dlpm               D2LPM: of the ranks at which a client has a deficit left, the one that holds the most.
                       Tokens computed and generated are taken from it, and all get a quantum when none is
                       left. DLPM's order within a rank's queue is left out: ranks here serve in order.

Where there are prefill ranks, llm-d chooses the decode rank and then, if 16 tokens or more are uncached
there, the prefill rank. Dynamo chooses by the decode ranks' hits and computes there what is below 2,048
tokens and 70 % of the prompt; else it takes the prefill rank by its cost and the decode rank by load. Preble
and DLPM know no prefill ranks; each leg is chosen by their rule. All are told as late as ours is.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Protocol

from bench.placement.policies import Memory
from services.index.read.prefix_index import PrefixIndex
from services.kv.block_hash import scope_seed, sequence_hashes
from services.router.ranks.predictions import Predictions
from services.router.replay.ranks import MODEL, Rank
from services.router.replay.workload import BLOCK_TOKENS, Job, TraceRequest
from services.values.kv import BlockHash, CacheEvents
from services.values.rank import RankId
from services.values.rank_reports import RankLoad

_SEED = scope_seed(MODEL)
_SPECULATIVE_S = 2.0
_LLM_D_LRU_BLOCKS, _LLM_D_MATCHED_BLOCKS = 31_250 * 64 // BLOCK_TOKENS, 131_072 // BLOCK_TOKENS
_LLM_D_REMOTE_TOKENS = 16
_DYNAMO_LOCAL_TOKENS, _DYNAMO_LOCAL_SHARE = 2_048, 0.7
_PREBLE_WINDOW_S, _PREBLE_UNEVEN = 180.0, 1.5
_DLPM_QUANTUM, _DLPM_OUTPUT_WEIGHT = 16_384.0, 2.0


@dataclass(slots=True)
class Standing:
    """A router knows this of a rank: what it has in flight there, what the rank last reported, and what that
    holds of the request which is being placed."""

    load: RankLoad
    pool_blocks: int
    requests: int = 0
    uncached: int = 0  # tokens, until the first token comes
    blocks: int = 0  # of prompts, until they end
    held: int = 0  # blocks

    def lacks(self, request: TraceRequest) -> int:
        """Return the tokens that the rank would compute."""
        return max(1, request.prompt_tokens - self.held * BLOCK_TOKENS)

    @property
    def used_share(self) -> float:
        books = self.load.books
        return (books.locked + books.private) / max(1, books.total)


class Rule(Protocol):
    """It chooses one rank of a role."""

    remembered: int  # blocks a rank that were sent there; 0: the ranks' events tell what they hold

    def choose(self, request: TraceRequest, ranks: Sequence[Standing], now: float) -> int: ...

    def sent(self, chosen: int, request: TraceRequest, lacks: int, ranks: Sequence[Standing]) -> None: ...

    def ended(self, chosen: int, request: TraceRequest) -> None: ...


class _Rule:
    remembered = 0

    def __init__(self) -> None:
        self._random = Random(7)

    def sent(self, chosen: int, request: TraceRequest, lacks: int, ranks: Sequence[Standing]) -> None:
        """Most rules go by standings alone."""

    def ended(self, chosen: int, request: TraceRequest) -> None:
        """Likewise."""

    def _lowest(self, costs: Sequence[Any]) -> int:
        lowest = min(costs)
        return self._random.choice([index for index, cost in enumerate(costs) if cost == lowest])


class LlmdScores(_Rule):
    def __init__(
        self, queue: float, active: float, room: float, prefix: float, lru: float, exact: bool
    ) -> None:
        super().__init__()
        self.remembered = 0 if exact else _LLM_D_LRU_BLOCKS
        self._weights = queue, active, room, prefix, lru
        self._cold: dict[int, int] = {}  # when a rank last got a cold prompt, by their number
        self._num_cold = 0

    def choose(self, request: TraceRequest, ranks: Sequence[Standing], now: float) -> int:
        blocks = min(_LLM_D_MATCHED_BLOCKS, max(1, len(request.blocks)))
        waiting, active = [rank.load.waiting for rank in ranks], [rank.requests for rank in ranks]
        most, fewest, busiest = max(waiting), min(waiting), max(1, *active)
        is_cold = not any(rank.held for rank in ranks)
        if is_cold:
            order = sorted(range(len(ranks)), key=lambda index: self._cold.get(index, -1))
            recency = {index: 1 - place / max(1, len(ranks) - 1) for place, index in enumerate(order)}
        costs = []
        for index, rank in enumerate(ranks):
            scores = (
                (most - waiting[index]) / (most - fewest) if most > fewest else 1.0,
                1 - active[index] / busiest,
                1 - rank.used_share,
                min(1.0, rank.held / blocks),
                recency[index] if is_cold else 0.5,
            )
            costs.append(-sum(weight * score for weight, score in zip(self._weights, scores, strict=True)))
        return self._lowest(costs)

    def sent(self, chosen: int, request: TraceRequest, lacks: int, ranks: Sequence[Standing]) -> None:
        if not any(rank.held for rank in ranks):
            self._num_cold += 1
            self._cold[chosen] = self._num_cold


class LlmdRemainingWork(_Rule):
    def choose(self, request: TraceRequest, ranks: Sequence[Standing], now: float) -> int:
        return self._lowest([rank.uncached + rank.lacks(request) for rank in ranks])


class DynamoCost(_Rule):
    def choose(self, request: TraceRequest, ranks: Sequence[Standing], now: float) -> int:
        return self._lowest(
            [(rank.uncached + rank.lacks(request)) / BLOCK_TOKENS + rank.blocks for rank in ranks]
        )

    def receiver(self, ranks: Sequence[Standing]) -> int:
        return self._lowest([rank.blocks for rank in ranks])


class PrebleE2(_Rule):
    def __init__(self, pool_blocks: int, num_ranks: int) -> None:
        super().__init__()
        self.remembered = pool_blocks
        self._window: deque[tuple[float, int, float]] = deque()  # when, rank, seconds
        self._load_s = [0.0] * num_ranks
        self._asked, self._hit = [1.0] * num_ranks, [0.0] * num_ranks  # blocks
        self._sent_blocks = [0] * num_ranks
        self._outputs, self._ended = 200.0, 1
        self._now = 0.0

    def choose(self, request: TraceRequest, ranks: Sequence[Standing], now: float) -> int:
        self._forget(now)
        longest = max(rank.held for rank in ranks)
        if 2 * longest * BLOCK_TOKENS <= request.prompt_tokens:
            return self._lowest([self._explore_s(i, request, rank) for i, rank in enumerate(ranks)])
        holders = [index for index, rank in enumerate(ranks) if rank.held == longest]
        chosen = min(holders, key=self._load_s.__getitem__)
        heaviest, lightest = max(self._load_s), min(self._load_s)
        if self._load_s[chosen] == heaviest and heaviest > _PREBLE_UNEVEN * lightest:
            return self._load_s.index(lightest)
        return chosen

    def _explore_s(self, index: int, request: TraceRequest, rank: Standing) -> float:
        compute_s = rank.lacks(request) / rank.load.prefill_tokens_per_s
        is_full = self._sent_blocks[index] >= rank.pool_blocks
        evict_s = compute_s * self._hit[index] / self._asked[index] if is_full else 0.0
        return self._load_s[index] + evict_s + compute_s

    def sent(self, chosen: int, request: TraceRequest, lacks: int, ranks: Sequence[Standing]) -> None:
        rank = ranks[chosen]
        seconds = lacks / rank.load.prefill_tokens_per_s + self._outputs / self._ended * rank.load.step_s
        self._window.append((self._now, chosen, seconds))
        self._load_s[chosen] += seconds
        self._asked[chosen] += len(request.blocks)
        self._hit[chosen] += rank.held
        self._sent_blocks[chosen] += len(request.blocks) - rank.held

    def ended(self, chosen: int, request: TraceRequest) -> None:
        self._outputs += request.output_tokens
        self._ended += 1

    def _forget(self, now: float) -> None:
        self._now = now
        while self._window and self._window[0][0] < now - _PREBLE_WINDOW_S:
            _, index, seconds = self._window.popleft()
            self._load_s[index] = max(0.0, self._load_s[index] - seconds)


class D2lpm(_Rule):
    def __init__(self, num_ranks: int) -> None:
        super().__init__()
        self._left: defaultdict[int, list[float]] = defaultdict(lambda: [_DLPM_QUANTUM] * num_ranks)

    def choose(self, request: TraceRequest, ranks: Sequence[Standing], now: float) -> int:
        left = self._left[request.client]
        while max(left) <= 0:
            left[:] = [deficit + _DLPM_QUANTUM for deficit in left]
        return self._lowest(
            [(-rank.held, rank.requests) if left[i] > 0 else (1, 0) for i, rank in enumerate(ranks)]
        )

    def sent(self, chosen: int, request: TraceRequest, lacks: int, ranks: Sequence[Standing]) -> None:
        self._left[request.client][chosen] -= lacks

    def ended(self, chosen: int, request: TraceRequest) -> None:
        self._left[request.client][chosen] -= _DLPM_OUTPUT_WEIGHT * request.output_tokens


class _Side:
    """The ranks of one role, and the rule that chooses among them."""

    def __init__(self, ranks: Sequence[Rank], rule: Rule, clock: Callable[[], float]) -> None:
        self.rule, self.clock = rule, clock
        self.standings = [Standing(rank.load(), rank.cache.num_pages) for rank in ranks]
        self._ids = [rank.id for rank in ranks]
        self._index, self._sent = PrefixIndex(), Predictions()
        self._memory = Memory(len(ranks), rule.remembered)
        for rank in ranks:
            self._index.apply_snapshot(rank.id, ())

    def look(self, request: TraceRequest, hashes: Sequence[BlockHash]) -> None:
        """Note what each rank holds of the prompt."""
        if self.rule.remembered:
            depths = self._memory.held(request.blocks)
        else:
            held, guessed = self._index.held(hashes), self._sent.of(hashes, self.clock())
            depths = [max(held.depth(rank.key), guessed.depth(rank.key)) for rank in self._ids]
        for standing, depth in zip(self.standings, depths, strict=True):
            standing.held = depth

    def choose(self, request: TraceRequest) -> int:
        return self.rule.choose(request, self.standings, self.clock())

    def sent(self, chosen: int, request: TraceRequest, hashes: Sequence[BlockHash], computes: bool) -> int:
        """Return the uncached tokens that it takes on."""
        standing = self.standings[chosen]
        lacks = standing.lacks(request)
        self.rule.sent(chosen, request, lacks, self.standings)
        if self.rule.remembered:
            self._memory.sent(chosen, request.blocks)
        else:
            self._sent.add(self._ids[chosen].key, hashes, self.clock(), _SPECULATIVE_S)
        standing.requests += 1
        standing.blocks += len(request.blocks)
        standing.uncached += lacks if computes else 0
        return lacks if computes else 0

    def ended(self, chosen: int, request: TraceRequest) -> None:
        standing = self.standings[chosen]
        standing.requests -= 1
        standing.blocks -= len(request.blocks)
        self.rule.ended(chosen, request)

    def told(self, rank: RankId, taken: CacheEvents) -> None:
        if not self.rule.remembered:
            self._index.apply_delta(rank, taken.stored, taken.removed)


class Peer:
    """One router of another kind. `is_local` decides of the tokens that the decode rank lacks, and those of
    the prompt, whether it computes them itself."""

    def __init__(
        self,
        decodes: Sequence[Rank],
        prefills: Sequence[Rank],
        rule: Callable[[int], Rule],
        is_local: Callable[[int, int], bool],
        clock: Callable[[], float],
    ) -> None:
        self._decode = _Side(decodes, rule(len(decodes)), clock)
        self._prefill = _Side(prefills, rule(len(prefills)), clock) if prefills else None
        self._is_local = is_local
        self._sides = {rank.id.key: (self._decode, i) for i, rank in enumerate(decodes)}
        if self._prefill is not None:
            self._sides |= {rank.id.key: (self._prefill, i) for i, rank in enumerate(prefills)}
        self._hashes: list[BlockHash] = []
        self._pending: dict[int, int] = {}  # uncached tokens of a request

    def choose(self, request: TraceRequest) -> tuple[int, int | None]:
        self._hashes = list(sequence_hashes(request.blocks, 1, _SEED))
        self._decode.look(request, self._hashes)
        decode = self._decode.choose(request)
        if self._prefill is None:
            return decode, None
        if self._is_local(self._decode.standings[decode].lacks(request), request.prompt_tokens):
            return decode, None
        self._prefill.look(request, self._hashes)
        if isinstance(self._decode.rule, DynamoCost):
            decode = self._decode.rule.receiver(self._decode.standings)
        return decode, self._prefill.choose(request)

    def sent(self, job: Job) -> None:
        request, ranks = job.request, [rank for rank in (job.prefill, job.decode) if rank is not None]
        for rank in ranks:
            side, index = self._sides[rank.id.key]
            pending = side.sent(index, request, self._hashes, rank is ranks[0])
            if rank is ranks[0]:
                self._pending[request.number] = pending

    def first_token(self, job: Job) -> None:
        side, index = self._sides[(job.prefill or job.decode).id.key]
        side.standings[index].uncached -= self._pending.pop(job.request.number)
        if job.prefill is not None:
            side.ended(index, job.request)

    def ended(self, job: Job) -> None:
        side, index = self._sides[job.decode.id.key]
        side.ended(index, job.request)

    def loaded(self, rank: Rank) -> None:
        side, index = self._sides[rank.id.key]
        side.standings[index].load = rank.load()

    def told(self, rank: RankId, taken: CacheEvents) -> None:
        self._sides[rank.key][0].told(rank, taken)


def _never(lacks: int, prompt_tokens: int) -> bool:
    return False


def _below_llm_d(lacks: int, prompt_tokens: int) -> bool:
    return lacks < _LLM_D_REMOTE_TOKENS


def _below_dynamo(lacks: int, prompt_tokens: int) -> bool:
    return lacks < _DYNAMO_LOCAL_TOKENS and lacks < _DYNAMO_LOCAL_SHARE * prompt_tokens


Rules = Callable[[int, int], Rule]  # of a number of ranks and the blocks of a pool

PEERS: dict[str, tuple[Rules, Callable[[int, int], bool]]] = {
    "llm-d-approximate": (lambda n, blocks: LlmdScores(2, 0, 2, 3, 2, exact=False), _below_llm_d),
    "llm-d-precise": (lambda n, blocks: LlmdScores(0, 4, 2, 2, 2, exact=True), _below_llm_d),
    "llm-d-work": (lambda n, blocks: LlmdRemainingWork(), _below_llm_d),
    "dynamo": (lambda n, blocks: DynamoCost(), _below_dynamo),
    "preble": (lambda n, blocks: PrebleE2(blocks, n), _never),
    "dlpm": (lambda n, blocks: D2lpm(n), _never),
}
