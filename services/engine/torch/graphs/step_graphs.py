"""Steps are captured once, when a runner starts, and replayed from then on.

    bucket     buffers of so many rows, and the graph that computes a step from them: its logits, the most
               probable token of each row, and K, V and states in their places
    a step     takes the least bucket that has its rows; what none can take is computed anew (PackedModel)

There are buckets for steps of single tokens alone, and for prompts beside none or as many as may run, where
prompts attend together (prompts.py). A prompt's step launches as much as any other: up to some hundred tokens
it waits for its host, too.

A bucket is tried before it serves: a random step over the pools' first pages, replayed, must give what the
same step gives when it is computed anew. One that differs is dropped, and so is what cannot be captured: a
definition that waits for the device, or that keeps a tensor, whose place a graph would go on reading.
"""

import gc
import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from services.engine.paged.runner import Chunk, TailPages
from services.engine.torch.attention.kernels.piece_parts import OnDevice
from services.engine.torch.device import finish_step, free_bytes
from services.engine.torch.draft_tokens import single_tokens
from services.engine.torch.graphs.step_buffers import Outputs, PromptRoom, StepBuffers
from services.engine.torch.model.packed_model import Computed, PackedModel
from services.engine.torch.pools import Pools
from services.values.kv import PageId
from services.values.request import SamplingParams

logger = logging.getLogger(__name__)

Replay = Callable[[], None]
# It computes once what it is given, and returns what computes it again from the same memory.
Capture = Callable[[Callable[[], None]], Replay]

_ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 320, 384, 448, 512)
_MOST_BUCKETS = 20
_PROMPT_TOKENS = (64, 128, 256, 384, 512, 768, 1024, 1536, 2048)
_MOST_PROMPTS = 16  # in one step
# What prompts see is copied out of its pages: so many times a step's tokens, or this many at least.
_SEEN_TIMES, _LEAST_SEEN = 4, 8192
_LEAST_BYTES, _SHARE = 256 << 20, 64
# Logits may be off by so much: root mean square, as a share of theirs, in the median row. Replayed or not,
# the same kernels compute; a plan that is cut otherwise, and padding, change the order of sums.
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.06, torch.float16: 0.02}
_CONTEXT_PAGES = 2  # before a row's own page


def bucket_rows(max_rows: int) -> tuple[int, ...]:
    """Return the buckets for steps of up to `max_rows` rows, the largest first."""
    rows = [rows for rows in _ROWS if rows < max_rows][: _MOST_BUCKETS - 1]
    return tuple(reversed([*rows, max_rows])) if max_rows > 0 else ()


def prompt_rooms(max_tokens: int) -> tuple[PromptRoom, ...]:
    """Return the rooms for steps of up to `max_tokens` tokens of prompts, the largest first."""
    sizes = [size for size in _PROMPT_TOKENS if size < max_tokens]
    sizes += [max_tokens] if 1 < max_tokens <= _PROMPT_TOKENS[-1] else []
    return tuple(
        PromptRoom(size, _MOST_PROMPTS, max(_SEEN_TIMES * size, _LEAST_SEEN) + size) for size in sizes[::-1]
    )


def graph_budget(device: torch.device, mib: int | None) -> int:
    """Return how many bytes graphs may take: `mib` MiB, or a share of the card's memory; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    total_bytes = int(torch.cuda.get_device_properties(device).total_memory)
    return max(_LEAST_BYTES, total_bytes // _SHARE) if mib is None else mib << 20


def open_graphs(
    model: PackedModel, pools: Pools, max_rows: int, budget: int, max_prompt_tokens: int = 0
) -> "StepGraphs":
    """Capture CUDA graphs of steps of up to `max_rows` single tokens, and of up to `max_prompt_tokens`.

    There are none with a `budget` of 0 bytes.
    """
    if not budget:
        return StepGraphs(model, pools, 0, lambda compute: compute)
    return StepGraphs(model, pools, max_rows, CudaCapture(model.device), budget, max_prompt_tokens)


class CudaCapture:
    """This captures CUDA graphs that share one pool of memory, on one stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def __call__(self, compute: Callable[[], None]) -> Replay:
        """Raise RuntimeError where something waits for the device, or cannot be captured."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            compute()  # kernels are compiled and libraries open their workspaces
            with _no_waiting():
                compute()
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Transports' threads may call CUDA meanwhile.
        with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
            compute()
        replay: Replay = graph.replay
        return replay


@contextmanager
def _no_waiting() -> Iterator[None]:
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@dataclass(frozen=True, slots=True)
class _Bucket:
    buffers: StepBuffers
    replay: Replay

    @property
    def size(self) -> tuple[int, int]:
        """Return how many tokens of prompts, and how many single tokens, there is room for."""
        prompts = self.buffers.prompts
        return prompts.num_tokens if prompts is not None else 0, self.buffers.num_singles


@dataclass(frozen=True, slots=True)
class _Step:
    """A step's chunks are put in the order of the buffers: single tokens first, each a chunk of its own."""

    singles: list[Chunk]
    prompts: list[Chunk]
    rows: dict[int, int]  # by a row's place in the step, its place here, prompts behind the single tokens

    @classmethod
    def of(cls, chunks: Sequence[Chunk]) -> "_Step":
        singles, prompts = list[Chunk](), list[Chunk]()
        own, others, end = list[int](), list[int](), 0
        for chunk in chunks:
            are_singles = len(chunk.token_ids) == 1 + chunk.num_drafts
            (own if are_singles else others).extend(range(end, end + len(chunk.token_ids)))
            end += len(chunk.token_ids)
            if are_singles:
                singles.extend(single_tokens(chunk))
            else:
                prompts.append(chunk)
        return cls(singles, prompts, {row: nth for nth, row in enumerate([*own, *others])})

    @property
    def size(self) -> tuple[int, int]:
        return sum(len(chunk.token_ids) for chunk in self.prompts), len(self.singles)


class StepGraphs:
    """Steps are computed on the thread that made this.

    `counts` says how many have been, by their way: "graph", or "eager" where none could take one.
    """

    def __init__(
        self,
        model: PackedModel,
        pools: Pools,
        max_rows: int,
        capture: Capture,
        budget: int | None = None,
        max_prompt_tokens: int = 0,
    ) -> None:
        """Capture steps of up to `max_rows` single tokens, and of up to `max_prompt_tokens` beside them.

        They take no more than about `budget` bytes. Nothing is raised where it cannot be done; the log says
        why.
        """
        self.counts: Counter[str] = Counter()
        self._model, self._pools = model, pools
        self._buckets: list[_Bucket] = []  # the least one first
        rows, rooms = bucket_rows(max_rows), prompt_rooms(max_prompt_tokens)
        self._is_wanted = bool(rows or rooms)
        if not self._is_wanted or not all(isinstance(each, OnDevice) for each in pools.layers.in_place):
            return
        if pools.slots is not None or not all(map(pools.layers.packing_of, pools.layers.reaches)):
            rooms = ()  # scans, and prompts that attend one by one, are computed anew
        sizes: list[tuple[int, PromptRoom | None]] = [(num_rows, None) for num_rows in rows]
        sizes += [(num_rows, room) for room in rooms for num_rows in dict.fromkeys((max_rows, 0))]
        self._capture_all(sizes, capture, budget)

    def _capture_all(
        self, sizes: Sequence[tuple[int, PromptRoom | None]], capture: Capture, budget: int | None
    ) -> None:
        began, device = time.monotonic(), self._model.device
        free_before = free_bytes(device)
        most_singles = max(num_singles for num_singles, _ in sizes)
        most_kept = max(num + (room.num_prompts if room is not None else 0) for num, room in sizes)
        with torch.inference_mode(), _frozen():
            self._outputs = Outputs(self._pools.layers, most_singles, device)
            self._logits: Tensor | None = None
            self._most_probable = torch.zeros(most_kept, dtype=torch.int64, device=device)
            for num_singles, room in sizes:
                if not self._add(num_singles, room, capture):
                    break
                if budget is not None and free_before - free_bytes(device) > budget:
                    logger.info("graphs_budget_spent mib=%d", budget >> 20)
                    break
        if device.type == "cuda":
            torch.cuda.empty_cache()  # what was computed before each capture
        taken, took_s = max(0, free_before - free_bytes(device)), time.monotonic() - began
        kept = [f"{singles}+{prompts}" for prompts, singles in (each.size for each in self._buckets)]
        logger.info("graphs_ready rows=%s mib=%d seconds=%.1f", ",".join(kept), taken >> 20, took_s)

    def compute(self, chunks: Sequence[Chunk], rows: Sequence[int]) -> Computed | None:
        """Compute a step as PackedModel.compute does; None where no bucket takes it."""
        if not self._is_wanted:
            return None
        computed = self._compute(chunks, rows) if self._buckets else None
        self.counts["eager" if computed is None else "graph"] += 1
        return computed

    def close(self) -> None:
        self._buckets.clear()

    def _compute(self, chunks: Sequence[Chunk], rows: Sequence[int]) -> Computed | None:
        if not all(map(self._takes, chunks)):
            return None
        step = _Step.of(chunks)
        bucket = self._bucket_for(step)
        if bucket is None:
            return None
        shift = bucket.buffers.num_singles - len(step.singles)
        kept = [row if row < len(step.singles) else row + shift for row in (step.rows[row] for row in rows)]
        if not bucket.buffers.fill(step.singles, step.prompts, kept):
            return None
        if self._pools.slots is not None:
            self._pools.slots.zero([c.slot for c in chunks if c.start == 0 and c.slot is not None])
        bucket.replay()
        return self._of_rows(kept if bucket.buffers.prompts is None else range(len(kept)), len(step.singles))

    def _takes(self, chunk: Chunk) -> bool:
        # States of drafts are taken in when it is known which stay: that is computed anew.
        return chunk.scoring is None and not (chunk.num_drafts and self._pools.slots)

    def _bucket_for(self, step: _Step) -> _Bucket | None:
        """Return the least bucket with room, and with prompts and single tokens where the step has some."""
        tokens, singles = step.size
        for bucket in self._buckets:
            most_tokens, most_singles = bucket.size
            has_room = most_tokens >= tokens and most_singles >= singles
            if has_room and bool(most_tokens) is bool(tokens) and bool(most_singles) is bool(singles):
                return bucket
        return None

    def _of_rows(self, rows: Sequence[int], num_singles: int) -> Computed:
        assert self._logits is not None
        if list(rows) == list(range(len(rows))):
            return Computed(self._logits[: len(rows)], most_probable=self._most_probable[: len(rows)])
        kept = torch.tensor(rows, dtype=torch.int64, device=self._model.device)
        return Computed(self._logits[kept], most_probable=self._most_probable[kept])

    def _add(self, num_singles: int, room: PromptRoom | None, capture: Capture) -> bool:
        """Return whether the next bucket may be tried."""
        what = f"{num_singles}+{room.num_tokens if room is not None else 0}"
        try:
            buffers = StepBuffers(self._pools, num_singles, self._outputs, room)
            trial = _Trial(self._model, self._pools, num_singles, room)
            step = _Step.of(trial.chunks)
            if not buffers.fill(step.singles, step.prompts):
                raise RuntimeError("a step for a trial does not fit")
            held = _held_tensors(self._model.model)
            replay = capture(partial(self._run, buffers))
            if _held_tensors(self._model.model) != held:
                raise RuntimeError("the definition keeps a tensor of a step")
        except Exception as error:  # whatever a definition, torch or the device raises: we can do without
            logger.warning("graph_refused rows=%s reason=%r", what, str(error))
            return "out of memory" in str(error)
        bucket = _Bucket(buffers, replay)
        self._buckets.append(bucket)
        self._buckets.sort(key=lambda each: each.size)
        if (fault := self._fault(trial)) is not None:
            logger.warning("graph_wrong rows=%s reason=%r", what, fault)
            self._buckets.remove(bucket)
        return True

    def _run(self, buffers: StepBuffers) -> None:
        logits = self._model.logits_of(self._pools, buffers)
        if self._logits is None:
            self._logits = logits.new_zeros(len(self._most_probable), logits.shape[1])
        self._logits[: buffers.num_kept].copy_(logits)
        torch.argmax(logits, 1, out=self._most_probable[: buffers.num_kept])

    def _fault(self, trial: "_Trial") -> str | None:
        """Replay random steps, whole and padded, and return how they differ from steps computed anew."""
        tolerance = _TOLERANCE.get(self._model.model.dtype, _TOLERANCE[torch.float16])
        for chunks in (trial.chunks, trial.chunks[:-1] or trial.chunks):
            ends = list(accumulate(len(chunk.token_ids) for chunk in chunks))
            rows = [end - 1 for end in ends]
            with trial.pages():
                anew = self._model.compute(self._pools, chunks, rows).logits.float().clone()
                trial.again()
                computed = self._compute(chunks, rows)
                if computed is None:  # a step with fewer kinds of rows is another bucket's
                    continue
                error = _error(computed.logits.float(), anew)
                trial.again()
                trial.lose_a_page()
                lost = self._compute(chunks, rows)
                assert lost is not None, "the same step was computed before"
                control = _error(lost.logits.float(), anew)
            if not error <= tolerance:  # NaN fails, too
                return f"logits differ by {error:.1e} of their size, where rounding explains {tolerance:.0e}"
            if not control > error:
                logger.warning("graph_check_blind rows=%d error=%.1e lost=%.1e", ends[-1], error, control)
        return None


class _Trial:
    """Rows share a first page, and each single token, and each of two prompts, has pages of its own."""

    def __init__(self, model: PackedModel, pools: Pools, num_singles: int, room: PromptRoom | None) -> None:
        self._pools, self._device = pools, model.device
        self._chance = random.Random(num_singles)
        self._page_size, self._num_tails = pools.layout.page_size, len(pools.layers.pools) - 1
        self._vocab_size = model.model.config.get_text_config().vocab_size
        smallest = min(kv.num_pages for kv in pools.layers.pools)
        self._num_pages = 1
        self.chunks = []
        for length in self._prompts(room, smallest):
            self.chunks.append(self._chunk(range(length), -(-length // self._page_size)))
        num_slots = pools.slots.num_slots if pools.slots is not None else num_singles
        num_rows = min(num_singles, num_slots, max(1, smallest - self._num_pages))
        of_each = max(1, min(_CONTEXT_PAGES, (smallest - self._num_pages) // max(1, num_rows)))
        singles = []
        for _ in range(num_rows):
            start = self._chance.randrange(of_each * self._page_size)
            singles.append(self._chunk(range(start, start + 1), of_each))
        self.chunks = [*singles, *self.chunks]
        if pools.slots is not None:
            self.chunks = [replace(chunk, slot=nth) for nth, chunk in enumerate(self.chunks)]

    def _prompts(self, room: PromptRoom | None, num_pages: int) -> list[int]:
        """Return the lengths of prompts that fill the room, and the pages but one for each single token, by
        two thirds and a quarter."""
        if room is None:
            return []
        tokens = min(room.num_tokens, (num_pages // 2) * self._page_size)
        return [max(2, 2 * tokens // 3), max(2, tokens // 4)]

    def _chunk(self, positions: range, num_pages: int) -> Chunk:
        """Return tokens behind the first page, which all share, and in pages of their own."""
        own = range(self._num_pages, self._num_pages + num_pages)
        smallest = min(kv.num_pages for kv in self._pools.layers.pools)
        pages = [PageId(page) for page in ((0, *own) if own.stop <= smallest else (0,))]
        start = positions.start + (len(pages) - num_pages) * self._page_size
        self._num_pages = max(self._num_pages, own.stop) if own.stop <= smallest else self._num_pages
        return Chunk(
            [self._chance.randrange(self._vocab_size) for _ in positions],
            start,
            pages,
            True,
            SamplingParams(temperature=0),
            tails=(TailPages(0, pages),) * self._num_tails,
        )

    @contextmanager
    def pages(self) -> Iterator[None]:
        """Random numbers are in the pages and states meanwhile, and zeros afterwards."""
        generator = torch.Generator(self._device).manual_seed(0)
        for kv in self._pools.layers.pools:
            own = kv.numbers[: self._num_pages * kv.shape.page_numbers]
            own.copy_(torch.randn(own.shape, generator=generator, device=self._device))
        if self._pools.slots is not None:
            for states in self._pools.slots.of_state.values():
                own = states[: len(self.chunks)]
                own.copy_(torch.randn(own.shape, generator=generator, device=self._device) / 8)
            self._states = {
                name: s[: len(self.chunks)].clone() for name, s in self._pools.slots.of_state.items()
            }
        try:
            yield
        finally:
            for kv in self._pools.layers.pools:
                kv.numbers[: self._num_pages * kv.shape.page_numbers].zero_()
            if self._pools.slots is not None:
                self._pools.slots.zero(range(len(self.chunks)))
            finish_step(self._device)

    def again(self) -> None:
        """Put the states back to what they were before the step."""
        if self._pools.slots is not None:
            for name, states in self._states.items():
                self._pools.slots.of_state[name][: len(self.chunks)] = states
        finish_step(self._device)

    def lose_a_page(self) -> None:
        for kv in self._pools.layers.pools:
            kv.numbers[: kv.shape.page_numbers].zero_()


def _error(got: Tensor, expected: Tensor) -> float:
    """Return how far the median row is off, as a share of its size."""
    errors = (got - expected).square().mean(1) / expected.square().mean(1)
    return float(errors.sqrt().median())


def _held_tensors(model: torch.nn.Module) -> dict[tuple[int, str], int]:
    """Return which tensors the model's modules hold, by their addresses."""
    return {
        (nth, name): value.data_ptr()
        for nth, module in enumerate(model.modules())
        for name, value in {**vars(module), **module._parameters, **module._buffers}.items()
        if isinstance(value, Tensor)
    }


@contextmanager
def _frozen() -> Iterator[None]:
    """A graph's capture collects garbage first: with all that a process holds it takes a while each time."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
