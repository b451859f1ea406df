"""Simulated ranks: the real prefix cache and page allocator, and a model of what takes time.

    prefill:  submitted -> its turn: matched, pages taken -> chunks computed -> kept until all has landed
    decode:   submitted -> matched, pages taken -> (remote) landed -> decoding -> ended
                                                -> (local) its turn: chunks computed with the batch's steps

A page is one block. A prompt is matched when its turn to be computed comes, or, if
decode only receives it, as soon as there are pages. After each chunk the prompt goes on that is due first
(services/engine/paged/waiting_queue.py, ChunkTurns). Who computes it reads beforehand what its tier holds
beyond its pool, while others are computed. What is generated takes pages, and leaves behind those
of TraceRequest.answered; none for the trace, which does not say which blocks it becomes.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from heapq import heappop, heappush

from services.kv.block_hash import scope_seed
from services.kv.prefix_cache import PrefixCache, SequencePages
from services.router.replay.below import Tier
from services.router.replay.events import Events
from services.router.replay.pulls import SimulatedPulls
from services.router.replay.resuming import Resuming
from services.router.replay.setting import Timing
from services.router.replay.workload import Job, TraceRequest
from services.values.kv import CacheEvents
from services.values.rank import RankId
from services.values.rank_reports import RankLoad, overtaken_of

MODEL = "sim"
BESIDE_LAST = 8  # This is as in services/engine/paged/admitting.py.


class Rank(ABC):
    """Both roles have a pool, a queue of prompts to compute, reports, cache events."""

    def __init__(
        self,
        id: RankId,
        num_pages: int,
        timing: Timing,
        events: Events,
        num_states: int = 0,
        tier_blocks: int = 0,
    ) -> None:
        self.id = id
        self.tier = Tier(tier_blocks, scope_seed(MODEL)) if tier_blocks else None
        self.resuming = Resuming(num_states, timing.block_tokens)
        self.cache = PrefixCache(num_pages, 1, 1, MODEL, forget=self.resuming.forget)
        self.timing = timing
        self.block_tokens = timing.block_tokens
        self.events = events
        self.busy_s = 0.0
        self.link_free_s = 0.0  # It sends until then.
        self.pulls = SimulatedPulls(self)
        self.holds_all = False  # whether it is taken to hold all but the new part of every prompt
        self.report: Callable[[Rank], None] = _nobody
        self.publish: Callable[[Rank, CacheEvents], None] = _nobody
        self.publish_below: Callable[[Rank, CacheEvents], None] = _nobody
        self._queue: deque[Job] = deque()
        self._ready: list[Job] = []  # Their tier has been read, a pull is over, or they were overtaken.
        self._came_tokens = self._queued_tokens = self._common_tokens = self._computed_tokens = 0
        self._current: Job | None = None
        self._pages: dict[Job, SequencePages] = {}
        self._chunk_tokens = 0
        self._beside: tuple[Job, int] | None = None
        self._chunk_began_s = self._chunk_ends_s = 0.0
        self._reporting = self._flushing = False

    @property
    def pending_tokens(self) -> int:
        """These tokens are queued and uncached, or are being computed; the chunk under way counts whole."""
        current = 0 if self._current is None else self._current.left_tokens
        return self._queued_tokens + self._overtaken_tokens + current

    @property
    def exact_pending_tokens(self) -> int:
        return self._queued_tokens + self._overtaken_tokens + self.exact_current_tokens

    @property
    def _overtaken_tokens(self) -> int:
        return sum([job.left_tokens for job in self._ready if job.has_begun])

    @property
    def exact_current_tokens(self) -> int:
        """Return those of the prompt being computed that are left, to the token."""
        if self._current is None:
            return 0
        return self._current.left_tokens - self._exact_chunk_tokens

    @property
    def _exact_chunk_tokens(self) -> int:
        done = (self.events.now - self._chunk_began_s) * self.timing.tokens_per_s
        return int(min(done, self._chunk_tokens)) if self._current is not None else 0

    def matched_tokens(self, request: TraceRequest) -> int:
        return self.cache.match_len(request.blocks, "") * self.block_tokens

    def reused_tokens(self, request: TraceRequest) -> int:
        if self.holds_all:
            return request.prompt_tokens - request.new_tokens
        found, num_blocks = self.cache.look_up(request.blocks, ""), len(request.blocks)
        first = self.resuming.would_begin(found.deepest, found.cached_pages, num_blocks)
        return min(request.found_tokens(first, self.block_tokens), request.prompt_tokens - 1)

    def _submit(self, job: Job) -> None:
        job.queued_s = self.events.now
        job.rank_tokens = -self._computed_tokens - self._exact_chunk_tokens
        pulled_tokens = job.source_blocks * self.timing.block_tokens
        job.pending_tokens = job.request.prompt_tokens - max(self.reused_tokens(job.request), pulled_tokens)
        before = (*self._queue, *self._ready, *([self._current] if self._current else ()))
        job.bringer = max(before, key=lambda each: job.request.num_common(each.request), default=None)
        common = (
            0 if job.bringer is None else job.request.num_common(job.bringer.request)
        ) * self.block_tokens
        found_tokens = job.request.prompt_tokens - job.pending_tokens
        job.common_tokens = max(0, min(common, job.request.prompt_tokens - 1) - found_tokens)
        self._came_tokens += job.own_tokens
        job.came_tokens = self._came_tokens
        self._queued_tokens += job.pending_tokens
        self._common_tokens += job.common_tokens
        self._queue.append(job)
        self.pulls.begin(job)
        self._next()
        self.changed()

    def _next(self) -> None:
        """Begin, or go on, with the prompt that is due first of those that are ready or have room."""
        while self._current is None:
            ready, queued = min(self._ready, key=self._due, default=None), self._first_with_pages()
            if ready is not None and (queued is None or self._due(ready) <= self._due(queued)):
                self._ready.remove(ready)
                self._begin(ready)
            elif queued is None:
                return
            else:
                self._queue.remove(queued)
                if not self.pulls.awaits(queued) and not self._reads(queued):
                    self._begin(queued)

    def _first_with_pages(self) -> Job | None:
        """Return the first of the queue or, without room for that, the first one that has its pages."""
        queue = [job for job in self._queue if not (self.timing.shorter_first and job.awaits_bringer)]
        first = min(queue, key=self._due, default=None)
        if first is None or self.take_pages(first) is not None:
            return first
        return min((job for job in queue if job in self._pages), key=self._due, default=None)

    def _due(self, job: Job) -> float:
        return job.came_tokens + self.timing.shorter_first * job.own_tokens

    def take_pages(self, job: Job) -> SequencePages | None:
        return self._pages[job] if job in self._pages or self._open(job) else None

    def pull_ended(self, job: Job, followers: Sequence[Job], more_tokens: int) -> None:
        """Go on with the job, which computes so many more than was expected, and with those that waited."""
        job.pending_tokens += more_tokens
        self._queued_tokens += more_tokens
        self._came_tokens += more_tokens
        job.came_tokens += more_tokens
        self._ready += followers if job in self._queue else (job, *followers)
        self._next()
        self.changed()

    def step_left_s(self) -> float:
        """Return the time until it looks at what others ask of it, which is between two steps."""
        return self._chunk_ends_s - self.events.now if self._current is not None else 0.0

    def _reads(self, job: Job) -> bool:
        """Return whether it waits for its tier; what would take longer to read is computed."""
        if self.tier is None or job.pulled is not None:
            return False
        depth, held, timing = self.tier.depth(job.request.blocks), self._pages[job].prefix_len, self.timing
        read_s = (depth - held) * timing.block_bytes / timing.tier_bytes_per_s
        if depth <= held or read_s * timing.tokens_per_s >= (depth - held) * self.block_tokens:
            return False
        job.brought_blocks = depth - held
        self.events.after(read_s, self._has_read, job)
        return True

    def _has_read(self, job: Job) -> None:
        depth = self._pages[job].prefix_len + job.brought_blocks
        self.cache.publish(self._pages[job], job.request.blocks[:depth])
        self._ready.append(job)
        self._next()

    def _begin(self, job: Job) -> None:
        self._current = job
        if job.has_begun:
            self._begin_chunk()
            return
        self._queued_tokens -= job.pending_tokens
        self._common_tokens -= job.common_tokens
        job.began_s = self.events.now
        pulled_s = 0.0 if job.pulled is None else job.pulled.seconds
        job.prefill_queue_s = max(0.0, job.began_s - job.queued_s - pulled_s)
        pages, num_blocks = self._pages[job], len(job.request.blocks)
        job.resumed_blocks = self.resuming.begin(pages, num_blocks) + job.brought_blocks
        if job.source is not None:  # More of it may be here now than when it got its pages.
            self.cache.adopt(pages, job.request.blocks)
            job.resumed_blocks = pages.num_published
        job.borders = self.resuming.borders(job.resumed_blocks, pages.prefix_len, num_blocks)
        found = job.request.found_tokens(job.resumed_blocks, self.block_tokens)
        matched = min(found, job.request.prompt_tokens - 1)
        if self.holds_all:
            matched = job.request.prompt_tokens - job.request.new_tokens
        job.done_tokens = matched
        job.computed_tokens = job.request.prompt_tokens - matched
        self._begin_chunk()

    def _begin_chunk(self) -> None:
        assert self._current is not None
        left, done = self._current.left_tokens, self._current.done_tokens
        # To a block's end, so that whole blocks can be published, unless a block is larger than a chunk.
        aligned = (done + self.timing.chunk_tokens) // self.block_tokens * self.block_tokens
        self._chunk_tokens = min(left, max(0, aligned - done) or self.timing.chunk_tokens)
        self._beside = self._beside_last() if self._chunk_tokens == left else None
        self._chunk_began_s = self.events.now
        took_s = self._chunk_s()
        self._chunk_ends_s = self.events.now + took_s
        self.busy_s += took_s
        self.events.after(took_s, self._chunk_ended)

    def _beside_last(self) -> tuple[Job, int] | None:
        """Return the overtaken prompt that goes on beside the last chunk of another, with its tokens."""
        begun = [job for job in self._ready if job.has_begun]
        room = self.timing.chunk_tokens // BESIDE_LAST
        job = min(begun, key=self._due, default=None)
        return None if job is None or job.left_tokens <= room else (job, room)

    def _chunk_s(self) -> float:
        tokens = self._chunk_tokens + (0 if self._beside is None else self._beside[1])
        return self.timing.chunk_step_s + tokens / self.timing.tokens_per_s

    def _chunk_ended(self) -> None:
        job, self._current = self._current, None
        assert job is not None
        job.done_tokens += self._chunk_tokens
        self._computed_tokens += self._chunk_tokens
        if self._beside is not None:
            other, tokens = self._beside
            other.done_tokens += tokens
            self._computed_tokens += tokens
        whole = not job.left_tokens
        num_blocks = len(job.request.blocks) if whole else job.done_tokens // self.block_tokens
        pages = self._pages[job]
        self.cache.publish(pages, job.request.blocks[:num_blocks])
        for border in job.borders:
            if border <= num_blocks:
                self.resuming.keep(self.cache, pages, border)
        job.borders = [border for border in job.borders if border > num_blocks]
        self.changed()
        if whole:
            job.computed_s = self.events.now
            job.rank_tokens += self._computed_tokens
            self._computed(job)
        elif self.timing.shorter_first:
            self._ready.append(job)
        else:  # Nobody overtakes it, not even who came earlier and has pages by now.
            self._begin(job)
        self._next()

    @abstractmethod
    def _computed(self, job: Job) -> None:
        """Its prompt has been computed."""

    @abstractmethod
    def _num_pages(self, job: Job) -> int: ...

    def _open(self, job: Job, max_blocks: int | None = None) -> bool:
        pages = self.cache.open(job.request.blocks, "", max_blocks)
        if not self.cache.extend(pages, self._num_pages(job) - len(pages.pages)):
            self.cache.close(pages)
            return False
        self._pages[job] = pages
        return True

    def _close(self, job: Job) -> None:
        self.cache.close(self._pages.pop(job))
        if self.tier is not None:
            self.tier.store(job.request.answered or job.request.blocks)
        self.freed()

    def freed(self) -> None:
        self._next()
        self.changed()

    # -- what is told -----------------------------------------------------------------------------

    def changed(self) -> None:
        """A report and a flush follow, unless they are on their way already."""
        if not self._reporting:
            self._reporting = True
            self.events.after(self.timing.report_s, self._report)
        if not self._flushing:
            self._flushing = True
            self.events.after(self.timing.flush_s, self._flush)

    def _report(self) -> None:
        self._reporting = False
        self.report(self)

    def _flush(self) -> None:
        self._flushing = False
        stored, removed = self.resuming.take_events()
        taken = replace(self.cache.take_events(), resumable_stored=stored, resumable_removed=removed)
        if taken != CacheEvents():
            self.publish(self, taken)
        if self.tier is not None and (below := self.tier.take_events()) != CacheEvents():
            self.publish_below(self, below)

    def load(self) -> RankLoad:
        return RankLoad(
            running=0,
            waiting=len(self._queue),
            pending_tokens=self.pending_tokens,
            common_tokens=self._common_tokens,
            books=self.cache.books(),
            prefill_tokens_per_s=self.timing.reported_tokens_per_s,
            overtaken=overtaken_of(self._overtaken()) if self.timing.shorter_first else (),
            granted_pages=self.pulls.granted_pages,
            memory_tier_bytes_per_s=self.timing.tier_bytes_per_s if self.tier is not None else 0.0,
        )

    def _overtaken(self) -> Iterator[tuple[float, int]]:
        under_way = () if self._current is None else (self._current,)
        for job in (*self._queue, *self._ready, *under_way):
            chunk = self._chunk_tokens if job is self._current else 0
            below = (self._due(job) - self._came_tokens) / (1 + self.timing.shorter_first)
            yield below, job.own_tokens - chunk


class PrefillRank(Rank):
    def submit(self, job: Job) -> None:
        self._submit(job)

    def _num_pages(self, job: Job) -> int:
        return job.request.num_pages(self.block_tokens)

    def _computed(self, job: Job) -> None:
        """Chunks went out as they were final; the last one goes now."""
        timing = self.timing
        num_bytes = job.delta_tokens * timing.kv_bytes_per_token + timing.state_bytes
        last_tokens = min(job.delta_tokens, timing.chunk_tokens)
        last_bytes = last_tokens * timing.kv_bytes_per_token + timing.state_bytes
        all_but_last_s = max(job.began_s, self.link_free_s) + (num_bytes - last_bytes) / timing.bytes_per_s
        landed_s = max(self.events.now, all_but_last_s) + last_bytes / timing.bytes_per_s
        self.link_free_s = landed_s
        job.transfer_s = landed_s - self.events.now
        self.events.at(landed_s, self._landed, job)

    def _landed(self, job: Job) -> None:
        self._close(job)
        self.events.after(self.timing.hop_s, job.decode.landed, job)


class DecodeRank(Rank):
    """It is also the rank of an aggregated layout, which is never sent a prompt that another one computes."""

    def __init__(self, id: RankId, num_pages: int, timing: Timing, events: Events, *below: int) -> None:
        super().__init__(id, num_pages, timing, events, *below)
        self._receiving: deque[Job] = deque()  # without pages yet
        self._ends: list[tuple[float, int, Job]] = []  # step in which it ends, number, job
        self._steps = 0.0
        self._stepped_s = 0.0  # until when `_steps` counts
        self._version = 0

    @property
    def num_running(self) -> int:
        return len(self._pages)

    def submit(self, job: Job) -> None:
        if job.prefill is None:
            self._submit(job)
            return
        job.queued_s = self.events.now
        self._receiving.append(job)
        self._admit()
        self.changed()

    def landed(self, job: Job) -> None:
        self.cache.publish(self._pages[job], job.request.blocks)
        self._first_token(job)
        self.changed()

    def _admit(self) -> None:
        while self._receiving and self._open(self._receiving[0]):
            job = self._receiving.popleft()
            assert job.prefill is not None
            found = job.request.found_tokens(job.decode_blocks, self.block_tokens)
            job.delta_tokens = max(0, job.request.prompt_tokens - found)
            job.decode_queue_s = self.events.now - job.queued_s
            self.events.after(self.timing.hop_s, job.prefill.submit, job)

    def _open(self, job: Job, max_blocks: int | None = None) -> bool:
        if not super()._open(job, max_blocks):
            return False
        job.decode_blocks = self._pages[job].prefix_len
        return True

    def _num_pages(self, job: Job) -> int:
        request = job.request
        tokens = max(len(request.blocks) * self.block_tokens, request.prompt_tokens) + request.output_tokens
        return -(-tokens // self.block_tokens)

    def freed(self) -> None:
        super().freed()
        self._admit()

    # -- steps ------------------------------------------------------------------------------------

    def batch_step_s(self) -> float:
        return self.timing.step_s + self.timing.step_s_per_sequence * len(self._ends)

    def _chunk_s(self) -> float:
        # One step: the chunk, and a token of every sequence. The weights are read for both at once.
        self._catch_up()
        self._version += 1
        return super()._chunk_s() + self.timing.step_s_per_sequence * len(self._ends)

    def _chunk_ended(self) -> None:
        self._steps += 1
        self._stepped_s = self.events.now
        super()._chunk_ended()
        self._end_those_due()

    def _computed(self, job: Job) -> None:
        if job.source is not None:
            job.decode_blocks = job.resumed_blocks - job.brought_blocks - job.pulled_blocks
        self._first_token(job)

    def _first_token(self, job: Job) -> None:
        job.first_token_s = self.events.now
        job.on_first_token(job)
        self._catch_up()
        heappush(self._ends, (self._steps + job.request.output_tokens - 1, job.request.number, job))
        self._wake_for_next_end()

    def step_left_s(self) -> float:
        return super().step_left_s() or self.batch_step_s() / 2

    def _catch_up(self) -> None:
        """Count the steps made since last looked at. A step with a chunk is counted when it ends."""
        if self._current is None or self._chunk_began_s == self.events.now:
            if self._ends:
                self._steps += (self.events.now - self._stepped_s) / self.batch_step_s()
            self._stepped_s = self.events.now

    def _wake_for_next_end(self) -> None:
        self._version += 1
        if self._ends and self._current is None:
            due_s = self.events.now + (self._ends[0][0] - self._steps) * self.batch_step_s()
            self.events.at(due_s, self._woken, self._version)

    def _woken(self, version: int) -> None:
        if version == self._version:
            self._catch_up()
            self._end_those_due()

    def _end_those_due(self) -> None:
        while self._ends and self._ends[0][0] <= self._steps + 1e-6:
            _, _, job = heappop(self._ends)
            job.ended_s = self.events.now
            request = job.request
            if request.answered:
                self.cache.publish(self._pages[job], request.answered)
            self.resuming.keep_for_answer(
                self.cache, self._pages[job], request.prompt_tokens, request.output_tokens
            )
            self._close(job)
            job.on_end(job)
        self._wake_for_next_end()

    def load(self) -> RankLoad:
        return replace(
            super().load(),
            running=self.num_running,
            waiting=len(self._queue) + len(self._receiving),
            waiting_tokens=sum(job.request.prompt_tokens for job in self._receiving),
            step_s=self.batch_step_s(),
        )


def _nobody(*news: object) -> None:
    """Nobody listens yet."""
