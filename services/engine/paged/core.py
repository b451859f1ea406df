"""The engine core: queue, batches, pages and radix tree around a model runner. No thread, no clock.

A step is: admit what fits -> build a batch of chunks -> run it -> account for it. Everything that
happened comes back as events, in order, for the shell to hand on.

The core owns every page through its PrefixCache; `check()` proves that each is in exactly one place.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from services.engine.paged.runner import Chunk, ModelRunner, Sampled
from services.engine.paged.sequence import Phase, Sequence, finish_reason
from services.errors import InvalidRequest, NoCapacity
from services.kv.prefix_cache import PrefixCache
from services.kv.types import PageBooks, PageId, RankLoad, Room
from services.request import FinishReason, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds a step."""

    max_running_requests: int = 64
    chunk_size: int = 512  # prompt tokens per step


@dataclass(frozen=True, slots=True)
class Reserved:
    """The sequence has its pages; `delta_pages` lie past the locked prefix, in token order."""

    prefix_len: int
    delta_pages: tuple[PageId, ...]
    queue_s: float


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token; `finished` when it is the last."""

    token_id: int
    logprobs: TokenLogprobs | None
    finished: FinishReason | None
    compute_s: float = 0.0  # admission until now, on the first token only


@dataclass(frozen=True, slots=True)
class Offered:
    """Prefill role: the KV of [start_token, end_token) is final, in these pages, in token order."""

    room: Room
    start_token: int
    end_token: int
    pages: tuple[PageId, ...]


Event = Reserved | Token | Offered
Clock = Callable[[], float]


class EngineCore:
    """Single-threaded; every method is called by the engine's thread."""

    def __init__(self, runner: ModelRunner, cache: PrefixCache, limits: Limits, clock: Clock) -> None:
        self.runner = runner
        self.cache = cache
        self._limits = limits
        self._clock = clock
        self._waiting: list[Sequence] = []
        self._active: list[Sequence] = []  # RECEIVING, COMPUTING, DECODING, in order of admission
        self._kept: set[Sequence] = set()  # ENDED, but a room may still read the pages
        self._quarantined: set[Sequence] = set()
        # The head of the queue, and how many pages were available when they were too few for it.
        self._refused: tuple[Sequence, int] | None = None
        self._events: list[tuple[Sequence, Event]] = []
        self._step_s = 0.0
        self._prefill_tokens_per_s = 0.0
        self.retractions = 0

    @property
    def page_size(self) -> int:
        return self.runner.layout.page_size

    @property
    def max_context_tokens(self) -> int:
        """Bounded by the pool too, so that a sequence alone always fits."""
        return min(self.runner.max_context_tokens, self.runner.memory.num_pages * self.page_size)

    # -- commands ---------------------------------------------------------------------------------

    def submit(self, seq: Sequence) -> None:
        """Queue a sequence.

        Raises:
            InvalidRequest: an id is out of the vocabulary, or there are none.
            NoCapacity: the context or the pool can never hold it.
        """
        if not seq.ids:
            raise InvalidRequest("prompt must not be empty")
        if max(seq.ids) >= self.runner.vocab_size or min(seq.ids) < 0:
            raise InvalidRequest(f"prompt has a token id outside the vocabulary of {self.runner.vocab_size}")
        if len(seq.ids) >= self.max_context_tokens + seq.single_token:
            raise NoCapacity(
                f"prompt has {len(seq.ids)} tokens; this rank holds {self.max_context_tokens} with the answer"
            )
        seq.submitted_s = self._clock()
        seq.uncached_tokens = len(seq.ids) - self.cache.match_len(seq.ids, seq.request.cache_salt)
        self._queue(seq)

    def landed(self, seq: Sequence, first_token: Sampled) -> None:
        """Every page of a RECEIVING sequence is there and its first token is known."""
        if seq.phase is not Phase.RECEIVING:
            return  # cancelled meanwhile
        seq.computed = len(seq.ids)
        self._publish(seq)
        self._append(seq, first_token)

    def cancel(self, seq: Sequence, *, quarantine: bool = False) -> None:
        """End a sequence in whatever phase it is. With `quarantine` a writer may still write its
        pages: they come back by `end_quarantine` only."""
        if seq.phase in (Phase.NEW, Phase.ENDED):
            return
        if seq.phase is Phase.WAITING:
            self._waiting.remove(seq)
        else:
            self._active.remove(seq)
        self._end(seq, quarantine=quarantine)

    def end_quarantine(self, seq: Sequence) -> None:
        """The writer of a quarantined sequence has stopped."""
        if seq in self._quarantined:
            self._quarantined.remove(seq)
            assert seq.pages is not None
            self.cache.end_quarantine(seq.pages)
            seq.pages = None

    def room_ended(self, seq: Sequence) -> None:
        """Prefill role: nothing reads the sequence's pages on behalf of its room any more."""
        seq.room_open = False
        if seq in self._kept:
            self._kept.remove(seq)
            self._release(seq)

    # -- a step -----------------------------------------------------------------------------------

    def step(self) -> bool:
        """Admit, run one batch, account for it. See `take_outputs`.

        False: nothing changed, and nothing will until the next command.
        """
        retractions = self.retractions
        admitted = self._admit()
        batch = list(self._decode_chunks()) + list(self._prompt_chunks())
        if not batch:
            return admitted or self.retractions > retractions
        began = self._clock()
        sampled = self.runner.run([chunk for _, chunk in batch])
        self._measure(batch, self._clock() - began)
        for (seq, chunk), token in zip(batch, sampled, strict=True):
            self._account(seq, chunk, token)
        return True

    def take_outputs(self) -> list[tuple[Sequence, Event]]:
        """What happened since the last call, in order."""
        events, self._events = self._events, []
        return events

    def fail_active(self) -> list[Sequence]:
        """End every computing sequence: the runner failed and their KV cannot be trusted."""
        failed = [s for s in self._active if s.phase is not Phase.RECEIVING]
        for seq in failed:
            self.cancel(seq)
        return failed

    # -- reports ----------------------------------------------------------------------------------

    def load(self) -> RankLoad:
        pending = sum(s.uncached_tokens for s in self._waiting)
        pending += sum(s.remaining_tokens for s in self._active)
        return RankLoad(
            running=len(self._active),
            waiting=len(self._waiting),
            pending_tokens=pending,
            books=self.cache.books(),
            step_s=self._step_s,
            prefill_tokens_per_s=self._prefill_tokens_per_s,
        )

    def check(self) -> PageBooks:
        """Walk the books.

        Raises:
            AssertionError: they do not balance, or pages are held by no sequence.
        """
        books = self.cache.check()
        holders = len(self._active) + len(self._kept)
        assert self.cache.num_open == holders, f"{self.cache.num_open} open, {holders} sequences hold pages"
        return books

    # -- internals --------------------------------------------------------------------------------

    def _queue(self, seq: Sequence) -> None:
        seq.phase = Phase.WAITING
        self._waiting.append(seq)
        self._waiting.sort(key=_rank_in_queue)

    def _admit(self) -> bool:
        """True when a sequence came in."""
        before = len(self._waiting)
        while self._waiting and len(self._active) < self._limits.max_running_requests:
            if self._lacks_pages(self._waiting[0]) or not self._reserve(self._waiting[0]):
                break
            self._enter(self._waiting.pop(0))
        return len(self._waiting) < before

    def _lacks_pages(self, seq: Sequence) -> bool:
        """Known without matching its prompt again, which for a long one takes as long as a step."""
        if self._refused is None or self._refused[0] is not seq:
            return False
        return self.cache.available_pages <= self._refused[1]

    def _reserve(self, seq: Sequence) -> bool:
        """Lock the cached prefix and take pages for the rest and one more token."""
        # Where the next token is computed here, its logits need the last id to be computed too.
        limit = None if seq.receives else len(seq.ids) - 1
        pages = self.cache.open(seq.ids, seq.request.cache_salt, limit)
        growth = 0 if seq.single_token else 1
        needed = -(-(len(seq.ids) + growth) // self.page_size) - len(pages.pages)
        if not self.cache.extend(pages, needed):
            self.cache.close(pages)
            self._refused = seq, self.cache.available_pages
            return False
        self._refused = None
        seq.pages = pages
        return True

    def _enter(self, seq: Sequence) -> None:
        assert seq.pages is not None
        seq.phase = Phase.RECEIVING if seq.receives else Phase.COMPUTING
        seq.computed = seq.pages.prefix_len
        self._active.append(seq)
        if seq.admitted_s is None:
            seq.admitted_s = self._clock()
            first = seq.pages.prefix_len // self.page_size
            last = -(-len(seq.ids) // self.page_size)
            delta = tuple(seq.pages.pages[first:last])
            self._emit(seq, Reserved(seq.pages.prefix_len, delta, seq.admitted_s - seq.submitted_s))
        self._offer(seq)
        seq.receives = False  # after a retraction the tail is computed here

    def _decode_chunks(self) -> Iterator[tuple[Sequence, Chunk]]:
        # Growing may retract sequences, earlier ones included, so the batch is read off afterwards.
        decoding = [s for s in self._active if s.phase is Phase.DECODING]
        grown = [s for s in decoding if s.phase is Phase.DECODING and self._grow(s)]
        for seq in grown:
            if seq.phase is Phase.DECODING:
                yield seq, self._chunk(seq, 1)

    def _prompt_chunks(self) -> Iterator[tuple[Sequence, Chunk]]:
        budget = self._limits.chunk_size
        for seq in self._active:
            if seq.phase is Phase.COMPUTING and budget > 0:
                size = min(budget, seq.remaining_tokens)
                budget -= size
                yield seq, self._chunk(seq, size)

    def _chunk(self, seq: Sequence, size: int) -> Chunk:
        assert seq.pages is not None
        end = seq.computed + size
        last = end == len(seq.ids)
        return Chunk(
            token_ids=seq.ids[seq.computed : end],
            start=seq.computed,
            pages=seq.pages.pages[: -(-end // self.page_size)],
            sample=last,
            sampling=seq.request.sampling,
            history=seq.ids if last else (),
            num_output_ids=seq.num_output if last else 0,
            eos_token_ids=seq.request.eos_token_ids,
        )

    def _grow(self, seq: Sequence) -> bool:
        """Make sure that the newest token has a slot; False when it cannot have one this step."""
        assert seq.pages is not None
        while len(seq.pages.pages) * self.page_size < len(seq.ids):
            if self.cache.extend(seq.pages, 1):
                return True
            victim = self._retraction_victim()
            if victim is None:
                return False  # the rest of the pool is being received into or quarantined: wait
            self._retract(victim)
            if victim is seq:
                return False
        return True

    def _retraction_victim(self) -> Sequence | None:
        """The last in the queue's order whose pages can be had, unless it is the only one."""
        candidates = [s for s in self._active if s.phase in (Phase.DECODING, Phase.COMPUTING)]
        return max(candidates, key=_rank_in_queue) if len(candidates) > 1 else None

    def _retract(self, seq: Sequence) -> None:
        """Give the pages back, keeping full ones cached; the sequence recomputes what is evicted."""
        self._publish(seq)
        self._active.remove(seq)
        self._release(seq)
        self.retractions += 1
        self._queue(seq)

    def _account(self, seq: Sequence, chunk: Chunk, sampled: Sampled | None) -> None:
        seq.computed = chunk.end
        self._publish(seq)
        self._offer(seq)
        if sampled is not None:
            self._append(seq, sampled)

    def _publish(self, seq: Sequence) -> None:
        assert seq.pages is not None
        # Only full pages go to the tree; publishing is skipped while the last one is filling.
        if seq.computed // self.page_size > seq.pages.num_published:
            self.cache.publish(seq.pages, seq.ids[: seq.computed])

    def _offer(self, seq: Sequence) -> None:
        """Tell the room of every page that is final: full ones, and at the end of the prompt the last."""
        if seq.room is None or not seq.room_open:
            return
        assert seq.pages is not None
        whole = seq.computed == len(seq.ids)
        end = seq.computed if whole else seq.computed // self.page_size * self.page_size
        if end > seq.offered:
            first, last = seq.offered // self.page_size, -(-end // self.page_size)
            self._emit(seq, Offered(seq.room, seq.offered, end, tuple(seq.pages.pages[first:last])))
            seq.offered = end

    def _append(self, seq: Sequence, sampled: Sampled) -> None:
        first = seq.phase is not Phase.DECODING
        seq.ids.append(sampled.token_id)
        seq.phase = Phase.DECODING
        assert seq.admitted_s is not None
        finished = finish_reason(seq, self.max_context_tokens)
        if seq.single_token and finished is None:
            finished = FinishReason.LENGTH
        compute_s = self._clock() - seq.admitted_s if first else 0.0
        self._emit(seq, Token(sampled.token_id, sampled.logprobs, finished, compute_s))
        if finished is not None:
            self._active.remove(seq)
            self._end(seq)

    def _end(self, seq: Sequence, *, quarantine: bool = False) -> None:
        held = seq.pages is not None
        seq.phase = Phase.ENDED
        if not held:
            return
        if quarantine:
            assert seq.pages is not None
            self.cache.quarantine(seq.pages)
            self._quarantined.add(seq)
        elif seq.room_open:
            self._kept.add(seq)
        else:
            self._release(seq)

    def _release(self, seq: Sequence) -> None:
        assert seq.pages is not None
        self.cache.close(seq.pages)
        seq.pages = None

    def _emit(self, seq: Sequence, event: Event) -> None:
        self._events.append((seq, event))

    def _measure(self, batch: list[tuple[Sequence, Chunk]], took_s: float) -> None:
        self._step_s = _average(self._step_s, took_s)
        tokens = sum(len(chunk.token_ids) for _, chunk in batch)
        # Steps of single tokens say nothing of the rate at which prompts are computed.
        if tokens >= 2 * len(batch) and took_s > 0:
            self._prefill_tokens_per_s = _average(self._prefill_tokens_per_s, tokens / took_s)


def _rank_in_queue(seq: Sequence) -> tuple[int, int]:
    """Who waits first, and who keeps its pages longest: larger priority, then earlier arrival."""
    return -seq.request.priority, seq.arrival


def _average(old: float, new: float, weight: float = 0.1) -> float:
    return new if old == 0.0 else old + weight * (new - old)
