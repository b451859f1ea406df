"""The price of the router's own placement, with nothing hidden from it."""

from bisect import bisect_right, insort
from collections import Counter, defaultdict
from collections.abc import Callable
from random import Random

from services.router.placement.candidates import DecodeCandidate, PlacementRequest, PrefillCandidate
from services.router.placement.decision import Decision, place
from services.router.replay.ours import SimulatedFleet, ranks_of
from services.router.replay.ranks import DecodeRank, Rank
from services.router.replay.workload import BLOCK_TOKENS, Job, TraceRequest
from services.values.kv import CacheEvents
from services.values.rank import RankId


class Outlook:
    """The oracle sees this beside caches and queues: what was sent and is not computed yet, with the blocks
    that it will leave, and when requests come back whose answers have been given."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._returns: defaultdict[Rank, list[float]] = defaultdict(list)  # to where the answer was
        self._sent: defaultdict[Rank, dict[Job, int]] = defaultdict(dict)  # tokens that each will compute
        self._blocks: defaultdict[Rank, Counter[int]] = defaultdict(Counter)

    def will_return(self, at_s: float, rank: Rank) -> None:
        insort(self._returns[rank], at_s)

    def returning(self, rank: Rank, seconds: float) -> int:
        """Return how many come back in so many seconds."""
        known, now = self._returns[rank], self._clock()
        del known[: bisect_right(known, now)]
        return bisect_right(known, now + seconds)

    def sent(self, job: Job) -> None:
        rank, request = job.prefill or job.decode, job.request
        self._sent[rank][job] = request.prompt_tokens - self.reused_tokens(rank, request)
        self._blocks[rank].update(request.blocks)

    def computed(self, job: Job) -> None:
        rank = job.prefill or job.decode
        del self._sent[rank][job]
        blocks = self._blocks[rank]
        blocks.subtract(job.request.blocks)
        for block in job.request.blocks:
            if not blocks[block]:
                del blocks[block]

    def pending_tokens(self, rank: Rank) -> int:
        """Return those that will be computed before the next prompt's."""
        queued = sum(tokens for job, tokens in self._sent[rank].items() if not job.began_s)
        return queued + rank.exact_current_tokens

    def reused_tokens(self, rank: Rank, request: TraceRequest) -> int:
        """Return the tokens that need not be computed when its turn comes; prompts are computed in order."""
        if rank.resuming.num_states:
            return rank.reused_tokens(request)
        held, blocks = rank.matched_tokens(request) // BLOCK_TOKENS, self._blocks[rank]
        while held < len(request.blocks) and request.blocks[held] in blocks:
            held += 1
        return min(held * BLOCK_TOKENS, request.prompt_tokens - 1)


class Oracle:
    """The same price of every cache and queue as it is at this moment, and with the outlook. It is near the
    best and no bound: it takes one request at a time, and the next sessions are as new to it as to ours."""

    def __init__(self, fleet: SimulatedFleet, seed: int, outlook: Outlook) -> None:
        self._fleet = fleet
        self._outlook = outlook
        self._random = Random(seed)

    def choose(self, request: TraceRequest) -> tuple[int, int | None]:
        return ranks_of(self._decide(request))

    def _decide(self, request: TraceRequest) -> Decision:
        fleet, timing = self._fleet, self._fleet.timing
        asked = PlacementRequest(
            request.prompt_tokens,
            timing.kv_bytes_per_token,
            timing.chunk_tokens,
            None,
            fleet.plans,
            carried_bytes=timing.state_bytes,
        )
        return place(
            asked,
            [self._decode_candidate(rank, request) for rank in fleet.decodes],
            [self._prefill_candidate(rank, request) for rank in fleet.prefills],
            lambda _sender, _receiver: timing.bytes_per_s,
            fleet.weights,
            self._random.random(),
        )

    def _decode_candidate(self, rank: DecodeRank, request: TraceRequest) -> DecodeCandidate:
        books, pending = rank.cache.books(), self._outlook.pending_tokens(rank)
        # Those that come back before this one is computed will wait for it: that counts as its own wait.
        reused = self._outlook.reused_tokens(rank, request)
        uncached = request.prompt_tokens - reused
        pending += uncached * self._outlook.returning(rank, (pending + uncached) / rank.timing.tokens_per_s)
        return DecodeCandidate(
            id=rank.id,
            hit_tokens=rank.matched_tokens(request),
            pending_tokens=pending,
            queued=len(rank._queue),
            prefill_tokens_per_s=rank.timing.tokens_per_s,
            running=rank.num_running,
            token_s=rank.batch_step_s(),
            free_tokens=books.free * BLOCK_TOKENS,
            evictable_tokens=books.cached * BLOCK_TOKENS,
            resume_tokens=reused,
        )

    def _prefill_candidate(self, rank: Rank, request: TraceRequest) -> PrefillCandidate:
        books = rank.cache.books()
        return PrefillCandidate(
            id=rank.id,
            hit_tokens=rank.matched_tokens(request),
            pending_tokens=self._outlook.pending_tokens(rank),
            queued=len(rank._queue),
            prefill_tokens_per_s=rank.timing.tokens_per_s,
            free_tokens=books.free * BLOCK_TOKENS,
            evictable_tokens=books.cached * BLOCK_TOKENS,
            resume_tokens=self._outlook.reused_tokens(rank, request),
        )

    def sent(self, job: Job) -> None:
        self._outlook.sent(job)

    def first_token(self, job: Job) -> None:
        self._outlook.computed(job)

    def ended(self, job: Job) -> None:
        """An end is seen at once."""

    def loaded(self, rank: Rank) -> None:
        """It needs no reports."""

    def told(self, rank: RankId, taken: CacheEvents) -> None:
        """It needs no events."""
