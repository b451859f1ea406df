"""These are the last minutes' requests, as a router saw them: how long they were, what they took, and which
of them begin alike. Nothing here tells what they say.

A recorded request is 58 bytes and eight for each of its index blocks, which are named by their hashes. What
leaves the router names them by hashes of these with a salt that the asker draws, so that an answer cannot be
compared with a text, or with another answer.
"""

from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from struct import Struct

from xxhash import xxh3_64_intdigest

from services.values.rank import Plan

_RECORD = Struct("<d5I5f2?Q")
_ARRIVAL, _DURATION, _DURATION_AT = Struct("<d"), Struct("<f"), 32
_ID = Struct("<Q")
_OBJECT_BYTES = 48  # A bytes object and its place in the ring need so many beside what it holds.
MOST_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Observed:
    """One request. Of one that still runs `output_tokens` and `duration_s` are those so far, and `ttft_s`
    is 0 until its first token."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    computed_tokens: int
    reused_tokens: int
    moved_tokens: int  # Their KV was moved to the decode rank.
    ttft_s: float
    duration_s: float
    queue_s: float  # It waited so long for pages, and for others' prompts.
    compute_s: float  # Others' chunks may have been computed between its own.
    transfer_s: float
    is_remote: bool
    is_over: bool
    conversation: int  # 0 means that it named none.
    blocks: Sequence[int]

    @property
    def itl_s(self) -> float:
        """Return the mean time between two of its tokens."""
        return max(0.0, self.duration_s - self.ttft_s) / max(1, self.output_tokens - 1)

    @property
    def ended_s(self) -> float:
        return self.arrival_s + self.duration_s


def packed(seen: Observed) -> bytes:
    record = _RECORD.pack(
        *(seen.arrival_s, seen.prompt_tokens, seen.output_tokens, seen.computed_tokens),
        *(seen.reused_tokens, seen.moved_tokens, seen.ttft_s, seen.duration_s, seen.queue_s),
        *(seen.compute_s, seen.transfer_s, seen.is_remote, seen.is_over, seen.conversation),
    )
    return record + array("Q", seen.blocks).tobytes()


def unpacked(record: bytes) -> Observed:
    blocks = array("Q", record[_RECORD.size :])
    return Observed(*(*_RECORD.unpack_from(record), blocks))


def _ended_s(record: bytes) -> float:
    arrival_s, duration_s = _ARRIVAL.unpack_from(record), _DURATION.unpack_from(record, _DURATION_AT)
    return float(arrival_s[0] + duration_s[0])


class Recorder:
    """A ring of the requests that ended in the last `window_s`, in at most `most_bytes`."""

    def __init__(self, window_s: float, most_bytes: int = MOST_BYTES) -> None:
        self.window_s = window_s
        self._most_bytes = most_bytes
        self._records: deque[bytes] = deque()
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self._records)

    def add(self, seen: Observed) -> None:
        record = packed(seen)
        self._records.append(record)
        self.size_bytes += len(record) + _OBJECT_BYTES
        self._forget(seen.ended_s - self.window_s)
        while self.size_bytes > self._most_bytes:
            self._drop()

    def recent(self, now: float, most: int) -> list[Observed]:
        """Return the requests that came in the last `window_s`, and ended last: at most so many."""
        since_s = now - self.window_s
        self._forget(since_s)
        last = [unpacked(record) for record in islice(reversed(self._records), most)]
        return [seen for seen in reversed(last) if seen.arrival_s >= since_s]

    def _forget(self, before_s: float) -> None:
        while self._records and _ended_s(self._records[0]) < before_s:
            self._drop()

    def _drop(self) -> None:
        self.size_bytes -= len(self._records.popleft()) + _OBJECT_BYTES


def anonymous(requests: Iterable[Observed], salt: int, now: float) -> Iterator[Observed]:
    """Yield the requests with other names of their blocks and conversations, at times before `now`, which is
    0 from then on."""

    def name(known: int) -> int:
        return xxh3_64_intdigest(_ID.pack(known), salt)

    for seen in requests:
        blocks = array("Q", map(name, seen.blocks))
        conversation = name(seen.conversation) if seen.conversation else 0
        yield replace(seen, arrival_s=seen.arrival_s - now, blocks=blocks, conversation=conversation)


@dataclass(frozen=True, slots=True)
class Fleet:
    """The ranks of one model, as a router knows them. A speed of 0 was not measured."""

    model: str
    prefill: int
    decode: int
    routers: int
    block_tokens: int
    chunk_tokens: int
    prefill_pool_tokens: int  # of a rank
    decode_pool_tokens: int
    kv_bytes_per_token: float
    carried_bytes: int  # They cross with every prompt.
    plans: frozenset[Plan]
    window_s: float
    tokens_per_s: float = 0.0
    step_s: float = 0.0
    computes_in_order: bool = False  # No shorter prompt overtakes a longer one.


@dataclass(frozen=True, slots=True)
class Observation:
    """A planner is given the ranks of a model, and its requests by arrival, which `routers` routers saw."""

    fleet: Fleet
    requests: Sequence[Observed]
    routers: int = 1


def merged(each: Sequence[Observation]) -> Observation:
    """Return what several routers of one model saw, whose times are before the same moment."""
    requests = sorted((seen for one in each for seen in one.requests), key=lambda seen: seen.arrival_s)
    largest = max((one.fleet for one in each), key=lambda fleet: fleet.routers)
    return Observation(largest, requests, sum(one.routers for one in each))
