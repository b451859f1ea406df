"""The policies are the placement under test, one that sees everything, and those of other routers.

Each router has a policy of its own. The others choose the two ranks one after the other and know only the
requests that they sent themselves.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

from services.router.replay.ranks import Rank
from services.router.replay.workload import BLOCK_TOKENS, Job, TraceRequest
from services.values.kv import CacheEvents
from services.values.rank import RankId

# sglang's router and SMG: matched above this share, unless the loads differ by both.
_MATCH_RATIO = 0.5
_IMBALANCE_REQUESTS, _IMBALANCE_RATIO = 32, 1.1
_REMEMBERED_BLOCKS = 2**26 // 4 // BLOCK_TOKENS


class Picker(Protocol):
    """Chooses one rank of a role by what the router itself has in flight there."""

    def pick(self, request: TraceRequest, in_flight: Sequence[int]) -> int: ...


class RoundRobin:
    def __init__(self) -> None:
        self._next = 0

    def pick(self, request: TraceRequest, in_flight: Sequence[int]) -> int:
        self._next += 1
        return (self._next - 1) % len(in_flight)


class LeastLoaded:
    """Fewest requests in flight; of equals the one after the last chosen."""

    def __init__(self) -> None:
        self._next = 0

    def pick(self, request: TraceRequest, in_flight: Sequence[int]) -> int:
        num_ranks = len(in_flight)
        order = range(self._next, self._next + num_ranks)
        chosen = min(order, key=lambda index: in_flight[index % num_ranks]) % num_ranks
        self._next = chosen + 1
        return chosen


class StickySession:
    """A conversation stays where its first turn went, which was the least loaded rank."""

    def __init__(self) -> None:
        self._homes: dict[str, int] = {}
        self._least = LeastLoaded()

    def pick(self, request: TraceRequest, in_flight: Sequence[int]) -> int:
        home = self._homes.get(request.session)
        if home is None:
            home = self._homes[request.session] = self._least.pick(request, in_flight)
        return home


class Memory:
    """A router remembers the last blocks that it has sent to each rank, so many of each."""

    def __init__(self, num_ranks: int, num_blocks: int) -> None:
        self._sent: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(num_ranks)]
        self._num_blocks = num_blocks

    def sent(self, rank: int, blocks: Sequence[int]) -> None:
        held = self._sent[rank]
        for block in reversed(blocks):
            held[block] = None
            held.move_to_end(block)
        while len(held) > self._num_blocks:
            held.popitem(last=False)

    def held(self, blocks: Sequence[int]) -> list[int]:
        """Return how many of the first blocks each rank holds."""
        return [_depth(blocks, held) if blocks and blocks[0] in held else 0 for held in self._sent]


def _depth(blocks: Sequence[int], held: OrderedDict[int, None]) -> int:
    for depth, block in enumerate(blocks):
        if block not in held:
            return depth
    return len(blocks)


class CacheAware:
    """This policy is that of sglang's router: it chooses the rank to which the router itself has sent the
    longest part of the prompt, if that is more than half of it and request counts are in balance; else the
    least loaded.

    Its memory of each rank is an LRU of 2**26 characters, as theirs by default, at four to a token.
    """

    def __init__(self, num_ranks: int) -> None:
        self._memory = Memory(num_ranks, _REMEMBERED_BLOCKS)
        self._least = LeastLoaded()

    def pick(self, request: TraceRequest, in_flight: Sequence[int]) -> int:
        chosen = self._choose(request, in_flight)
        self._memory.sent(chosen, request.blocks)
        return chosen

    def _choose(self, request: TraceRequest, in_flight: Sequence[int]) -> int:
        most, fewest = max(in_flight), min(in_flight)
        if most - fewest > _IMBALANCE_REQUESTS and most > _IMBALANCE_RATIO * fewest:
            return self._least.pick(request, in_flight)
        held = self._memory.held(request.blocks)
        longest = max(held)
        if longest <= _MATCH_RATIO * len(request.blocks):
            return self._least.pick(request, in_flight)
        return min((i for i, depth in enumerate(held) if depth == longest), key=in_flight.__getitem__)


class Separate:
    """Prefill and decode chosen one after the other, each by a picker of its own; requests as they come."""

    def __init__(
        self, decodes: Sequence[Rank], prefills: Sequence[Rank], decode: Picker, prefill: Picker
    ) -> None:
        self._pickers = decode, prefill
        self._decodes, self._prefills = decodes, prefills
        self._in_flight = [0] * len(decodes), [0] * len(prefills)
        self._index = {rank: i for ranks in (decodes, prefills) for i, rank in enumerate(ranks)}

    def choose(self, request: TraceRequest) -> tuple[int, int | None]:
        prefill = self._pickers[1].pick(request, self._in_flight[1]) if self._prefills else None
        return self._pickers[0].pick(request, self._in_flight[0]), prefill

    def sent(self, job: Job) -> None:
        self._in_flight[0][self._index[job.decode]] += 1
        if job.prefill is not None:
            self._in_flight[1][self._index[job.prefill]] += 1

    def first_token(self, job: Job) -> None:
        if job.prefill is not None:
            self._in_flight[1][self._index[job.prefill]] -= 1

    def ended(self, job: Job) -> None:
        self._in_flight[0][self._index[job.decode]] -= 1

    def loaded(self, rank: Rank) -> None:
        """They look at nobody's reports."""

    def told(self, rank: RankId, taken: CacheEvents) -> None:
        """They know what they sent."""


class Everywhere:
    """This takes the rank with the least left to compute, and each rank to hold all but the new part of every
    prompt: what others lose beside it, caches and late news cost them."""

    def __init__(self, ranks: Sequence[Rank]) -> None:
        self._ranks = ranks
        for rank in ranks:
            rank.holds_all = True

    def choose(self, request: TraceRequest) -> tuple[int, int | None]:
        return min(range(len(self._ranks)), key=lambda i: self._ranks[i].exact_pending_tokens), None

    def sent(self, job: Job) -> None:
        """It looks at the ranks themselves."""

    first_token = ended = sent

    def loaded(self, rank: Rank) -> None:
        """Likewise."""

    def told(self, rank: RankId, taken: CacheEvents) -> None:
        """Likewise."""
