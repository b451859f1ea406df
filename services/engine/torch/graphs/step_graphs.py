"""Steps of single tokens are captured once, when a runner starts, and replayed from then on.

    bucket     buffers of so many rows, and the graph that computes a step from them: its logits, the most
               probable token of each row, and K, V and states in their places
    a step     takes the least bucket that has its rows; what none can take is computed anew (PackedModel)

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
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from services.engine.paged.runner import Chunk, TailPages
from services.engine.torch.attention.kernels.piece_parts import OnDevice
from services.engine.torch.device import finish_step, free_bytes
from services.engine.torch.draft_tokens import single_tokens
from services.engine.torch.graphs.step_buffers import Outputs, StepBuffers
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
_LEAST_BYTES, _SHARE = 256 << 20, 64
# Logits may be off by so much: root mean square, as a share of theirs, in the median row. Replayed or not,
# the same kernels compute; a plan that is cut otherwise, and padding, change the order of sums.
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.06, torch.float16: 0.02}
_CONTEXT_PAGES = 2  # before a row's own page


def bucket_rows(max_rows: int) -> tuple[int, ...]:
    """Return the buckets for steps of up to `max_rows` rows, the largest first."""
    rows = [rows for rows in _ROWS if rows < max_rows][: _MOST_BUCKETS - 1]
    return tuple(reversed([*rows, max_rows])) if max_rows > 0 else ()


def graph_budget(device: torch.device, mib: int | None) -> int:
    """Return how many bytes graphs may take: `mib` MiB, or a share of the card's memory; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    total_bytes = int(torch.cuda.get_device_properties(device).total_memory)
    return max(_LEAST_BYTES, total_bytes // _SHARE) if mib is None else mib << 20


def open_graphs(model: PackedModel, pools: Pools, max_rows: int, budget: int) -> "StepGraphs":
    """Capture CUDA graphs of steps of up to `max_rows` rows; none with a `budget` of 0 bytes."""
    if not budget or max_rows < 1:
        return StepGraphs(model, pools, 0, lambda compute: compute)
    return StepGraphs(model, pools, max_rows, CudaCapture(model.device), budget)


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


class StepGraphs:
    """Steps are computed on the thread that made this.

    `counts` says how many have been, by their way: "graph", or "eager" where none could take one.
    """

    def __init__(
        self, model: PackedModel, pools: Pools, max_rows: int, capture: Capture, budget: int | None = None
    ) -> None:
        """Capture steps of up to `max_rows` rows while they take no more than `budget` bytes.

        Nothing is raised where that cannot be done; the log says why.
        """
        self.counts: Counter[str] = Counter()
        self._model, self._pools = model, pools
        self._buckets: list[_Bucket] = []  # the least one first
        rows = bucket_rows(max_rows)
        self._is_wanted = bool(rows)
        if not rows or not all(isinstance(each, OnDevice) for each in pools.layers.in_place):
            return
        began, device = time.monotonic(), model.device
        free_before = free_bytes(device)
        with torch.inference_mode(), _frozen():
            self._outputs = Outputs(pools.layers, rows[0], device)
            self._logits: Tensor | None = None
            self._most_probable = torch.zeros(rows[0], dtype=torch.int64, device=device)
            for num_rows in rows:
                if not self._add(num_rows, capture):
                    break
                if budget is not None and free_before - free_bytes(device) > budget:
                    logger.info("graphs_budget_spent rows=%d mib=%d", num_rows, budget >> 20)
                    break
        taken = max(0, free_before - free_bytes(device))
        rows_kept = [bucket.buffers.num_rows for bucket in self._buckets]
        took_s = time.monotonic() - began
        logger.info("graphs_ready rows=%s mib=%d seconds=%.1f", rows_kept, taken >> 20, took_s)

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
        num_rows = sum(len(chunk.token_ids) for chunk in chunks)
        if num_rows > self._buckets[-1].buffers.num_rows or not all(map(self._takes, chunks)):
            return None
        bucket = next(each for each in self._buckets if each.buffers.num_rows >= num_rows)
        singles = [each for chunk in chunks for each in single_tokens(chunk)]
        if not bucket.buffers.fill(singles):
            return None
        if self._pools.slots is not None:
            self._pools.slots.zero([c.slot for c in chunks if c.start == 0 and c.slot is not None])
        bucket.replay()
        return self._of_rows(rows, num_rows)

    def _takes(self, chunk: Chunk) -> bool:
        are_singles = len(chunk.token_ids) == 1 + chunk.num_drafts
        # States of drafts are taken in when it is known which stay: that is computed anew.
        return are_singles and chunk.scoring is None and not (chunk.num_drafts and self._pools.slots)

    def _of_rows(self, rows: Sequence[int], num_rows: int) -> Computed:
        assert self._logits is not None
        if len(rows) == num_rows:
            return Computed(self._logits[:num_rows], most_probable=self._most_probable[:num_rows])
        kept = torch.tensor(rows, dtype=torch.int64, device=self._model.device)
        return Computed(self._logits[kept], most_probable=self._most_probable[kept])

    def _add(self, num_rows: int, capture: Capture) -> bool:
        """Return whether the next bucket may be tried."""
        try:
            buffers = StepBuffers(self._pools, num_rows, self._outputs)
            trial = _Trial(self._model, self._pools, num_rows)
            if not buffers.fill(trial.chunks[:1]):
                raise RuntimeError("a step of one row does not fit")
            held = _held_tensors(self._model.model)
            replay = capture(partial(self._run, buffers))
            if _held_tensors(self._model.model) != held:
                raise RuntimeError("the definition keeps a tensor of a step")
        except Exception as error:  # whatever a definition, torch or the device raises: we can do without
            logger.warning("graph_refused rows=%d reason=%r", num_rows, str(error))
            return "out of memory" in str(error)
        bucket = _Bucket(buffers, replay)
        self._buckets.insert(0, bucket)
        if (fault := self._fault(trial)) is not None:
            logger.warning("graph_wrong rows=%d reason=%r", num_rows, fault)
            self._buckets.remove(bucket)
        return True

    def _run(self, buffers: StepBuffers) -> None:
        logits = self._model.logits_of(self._pools, buffers)
        if self._logits is None:
            self._logits = logits.new_zeros(len(self._most_probable), logits.shape[1])
        self._logits[: buffers.num_rows].copy_(logits)
        torch.argmax(logits, 1, out=self._most_probable[: buffers.num_rows])

    def _fault(self, trial: "_Trial") -> str | None:
        """Replay random steps, whole and padded, and return how they differ from steps computed anew."""
        tolerance = _TOLERANCE.get(self._model.model.dtype, _TOLERANCE[torch.float16])
        for chunks in (trial.chunks, trial.chunks[: max(1, len(trial.chunks) - 1)]):
            rows = range(len(chunks))
            with trial.pages():
                anew = self._model.compute(self._pools, chunks, rows).logits.float().clone()
                trial.again()
                computed = self._compute(chunks, rows)
                assert computed is not None, "the bucket was made for it"
                error = _error(computed.logits.float(), anew)
                trial.again()
                trial.lose_a_page()
                lost = self._compute(chunks, rows)
                assert lost is not None, "the bucket was made for it"
                control = _error(lost.logits.float(), anew)
            if not error <= tolerance:  # NaN fails, too
                return f"logits differ by {error:.1e} of their size, where rounding explains {tolerance:.0e}"
            if not control > error:
                logger.warning("graph_check_blind rows=%d error=%.1e lost=%.1e", len(rows), error, control)
        return None


class _Trial:
    """Rows share a first page, and each has pages of its own; they are the pools' first ones."""

    def __init__(self, model: PackedModel, pools: Pools, num_rows: int) -> None:
        self._pools, self._device = pools, model.device
        chance = random.Random(num_rows)
        sizes = [kv.num_pages for kv in pools.layers.pools]
        self._num_pages = (
            min(*sizes, 1 + _CONTEXT_PAGES * num_rows)
            if len(sizes) > 1
            else min(sizes[0], 1 + _CONTEXT_PAGES * num_rows)
        )
        page_size = pools.layout.page_size
        vocab_size = model.model.config.get_text_config().vocab_size
        num_slots = pools.slots.num_slots if pools.slots is not None else num_rows
        num_chunks = max(1, min(num_rows, self._num_pages - 1, num_slots))
        of_each = max(1, min(_CONTEXT_PAGES, (self._num_pages - 1) // num_chunks))
        self.chunks = []
        for nth in range(num_chunks):
            own = range(1 + nth * of_each, 1 + (nth + 1) * of_each)
            pages = [PageId(page) for page in ((0, *own) if self._num_pages > 1 else (0,))]
            start = chance.randrange((len(pages) - 1) * page_size, len(pages) * page_size)
            self.chunks.append(
                Chunk(
                    [chance.randrange(vocab_size)],
                    start,
                    pages,
                    True,
                    SamplingParams(temperature=0),
                    tails=(TailPages(0, pages),) * (len(sizes) - 1),
                    slot=nth if pools.slots is not None else None,
                )
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
