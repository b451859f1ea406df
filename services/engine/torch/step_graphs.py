"""Steps are captured in CUDA graphs when a runner starts, and replayed from then on.

A bucket has buffers of a number of rows, and the graph that computes a step from them: its logits, the most
probable token of each row, and K, V and states in their places. A step runs in the smallest bucket that has
its rows; a step that fits none is computed eagerly (PackedModel).

Some buckets are for steps of single tokens alone. Others are for prompts, with no single tokens or with as
many as may run; there, prompts attend together (prompts.py). A prompt's step launches as many kernels as any
other, and up to some hundred tokens the GPU waits for its host, too.

A bucket is checked before it is used: a random step over the pools' first pages, replayed, must give what the
same step gives when it is computed eagerly. A bucket that differs is dropped, and so is one that cannot be
captured: its definition waits for the device, or keeps a tensor, whose address a graph would go on reading.
"""

import gc
import logging
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from services.engine.paged.model_runner import Chunk
from services.engine.torch.attention.page_pieces import OnDevice
from services.engine.torch.attention.step_view import PagedLayers, Reach
from services.engine.torch.draft_tokens import single_tokens
from services.engine.torch.model.fused.residuals import Residuals
from services.engine.torch.model.mixers import require_slots
from services.engine.torch.model.packed_model import Computed, PackedModel
from services.engine.torch.pools import Pools
from services.engine.torch.step_buffers import StepBuffers
from services.engine.torch.step_rooms import PromptRoom, StepOutputs
from services.engine.torch.step_trial import StepTrial, rows_to_compare, worst_error

logger = logging.getLogger(__name__)

Replay = Callable[[], None]
# A capture computes what it is given once, and returns a function that computes it again in the same memory.
Capture = Callable[[Callable[[], None]], Replay]

_ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 320, 384, 448, 512)
_MOST_BUCKETS = 20
_PROMPT_TOKENS = (64, 128, 256, 384, 512, 768, 1024, 1536, 2048)
_MOST_PROMPTS = 16  # This is the limit for one step.
# The tokens that prompts see are copied out of their pages. There is room for so many times a step's tokens,
# and for this many at least.
_SEEN_TIMES, _LEAST_SEEN = 4, 8192
# Where latents are expanded, steps of so many single tokens have rooms for so many tokens of contexts, of
# which each head is taken for so many numbers. A step takes no room for more than _MOST_TIMES what it sees,
# unless that is one of the two least.
_LATENT_ROWS, _LATENT_SEEN, _HEAD_NUMBERS = (1, 4, 16, 64, 128, 256), (4096, 12288, 36864), 512
_LEAST_BYTES, _SHARE = 256 << 20, 64
# Logits may differ by so much: the root mean square error relative to theirs, in the median row. The same
# kernels compute both; a plan that is cut differently, and padding, change the order of sums.
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.06, torch.float16: 0.02}
# Prompts also have buckets with room for _FEW_ROWS single tokens. A step uses no bucket with more rows than
# _FEW_ROWS_IN_ALL, which cost no more than one, or than _MOST_TIMES its own rows, if that is more.
_FEW_ROWS, _FEW_ROWS_IN_ALL, _MOST_TIMES = 64, 128, 3


def bucket_rows(max_rows: int) -> tuple[int, ...]:
    """Return the bucket sizes for steps of up to `max_rows` rows, the largest first."""
    rows = [rows for rows in _ROWS if rows < max_rows][: _MOST_BUCKETS - 1]
    return tuple(reversed([*rows, max_rows])) if max_rows > 0 else ()


def prompt_rooms(max_tokens: int) -> tuple[PromptRoom, ...]:
    """Return the rooms for steps of up to `max_tokens` tokens of prompts, the largest first."""
    sizes = [size for size in _PROMPT_TOKENS if size < max_tokens]
    sizes += [max_tokens] if 1 < max_tokens <= _PROMPT_TOKENS[-1] else []
    return tuple(
        PromptRoom(size, _MOST_PROMPTS, max(_SEEN_TIMES * size, _LEAST_SEEN) + size) for size in sizes[::-1]
    )


def latent_rooms(max_rows: int, token_bytes: int, budget: int | None) -> Iterator[tuple[int, PromptRoom]]:
    """Yield the rooms for steps of single tokens over latents, the largest first.

    A layer's keys and values of one token take `token_bytes`; those of a room take half the budget at most.
    """
    fitting = [
        num_seen for num_seen in _LATENT_SEEN if budget is None or num_seen * token_bytes <= budget // 2
    ]
    rows = [rows for rows in _LATENT_ROWS if rows < max_rows]
    for num_seen in reversed(fitting):
        yield from ((num_rows, PromptRoom(0, 0, num_seen)) for num_rows in reversed([*rows, max_rows]))


def graph_budget(device: torch.device, mib: int | None) -> int:
    """Return the bytes that graphs may take: `mib` MiB, or a share of the card's memory; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    total_bytes = int(torch.cuda.get_device_properties(device).total_memory)
    return max(_LEAST_BYTES, total_bytes // _SHARE) if mib is None else mib << 20


def open_graphs(
    model: PackedModel, pools: Pools, max_rows: int, budget: int, max_prompt_tokens: int = 0
) -> "StepGraphs":
    """Capture CUDA graphs of steps of up to `max_rows` single and `max_prompt_tokens` prompt tokens.

    A `budget` of 0 bytes gives no graphs.
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
        """Raise RuntimeError where the computation waits for the device, or cannot be captured."""
        with torch.cuda.device(self._device):  # A capture waits for the current device.
            return self._captured(compute)

    def _captured(self, compute: Callable[[], None]) -> Replay:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            compute()  # The first call compiles kernels and lets libraries allocate their workspaces.
            with _no_waiting():
                compute()
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Threads of transports may call CUDA meanwhile.
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
        prompts = self.buffers.prompts
        return prompts.num_tokens if prompts is not None else 0, self.buffers.num_singles

    @property
    def num_seen(self) -> int:
        return self.buffers.prompts.num_seen if self.buffers.prompts is not None else 0


@dataclass(frozen=True, slots=True)
class _Step:
    """This has a step's chunks in the order of the buffers.

    Single tokens come first, each as a chunk of its own.
    """

    singles: Sequence[Chunk]
    prompts: Sequence[Chunk]
    starts: Sequence[int]  # These are the first rows of the chunks in the step.
    # These are the first rows of the chunks here, where prompts follow the single tokens.
    places: Sequence[int]

    @classmethod
    def of(cls, chunks: Sequence[Chunk]) -> "_Step":
        if all([len(chunk.token_ids) == 1 for chunk in chunks]):
            each = range(len(chunks))
            return cls(chunks, (), each, each)
        singles, prompts = list[Chunk](), list[Chunk]()
        starts = list(accumulate((len(chunk.token_ids) for chunk in chunks), initial=0))[:-1]
        for chunk in chunks:
            if _are_singles(chunk):
                singles.extend(single_tokens(chunk))
            else:
                prompts.append(chunk)
        places, next_single, next_other = list[int](), 0, len(singles)
        for chunk in chunks:
            if _are_singles(chunk):
                places.append(next_single)
                next_single += len(chunk.token_ids)
            else:
                places.append(next_other)
                next_other += len(chunk.token_ids)
        return cls(singles, prompts, starts, places)

    def places_of(self, rows: Sequence[int]) -> Sequence[int]:
        return rows if self.places == self.starts else [self._place_of(row) for row in rows]

    def _place_of(self, row: int) -> int:
        nth = bisect_right(self.starts, row) - 1
        return self.places[nth] + row - self.starts[nth]

    @property
    def size(self) -> tuple[int, int]:
        return sum(len(chunk.token_ids) for chunk in self.prompts), len(self.singles)

    @property
    def num_seen(self) -> int:
        return sum(chunk.end for chunk in (*self.singles, *self.prompts))


def _are_singles(chunk: Chunk) -> bool:
    return len(chunk.token_ids) == 1 + chunk.num_drafts


class StepGraphs:
    """This computes steps on the thread that created it.

    `counts` has the number of steps by how they were computed: "graph", or "eager" where no bucket fitted.
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
        """Capture steps of up to `max_rows` single tokens and up to `max_prompt_tokens` prompt tokens.

        They take no more than about `budget` bytes. Where a capture fails, this raises nothing and logs the
        reason.
        """
        self.counts: Counter[str] = Counter()
        self._model, self._pools = model, pools
        self.bytes = 0  # This is the memory of the graphs and their buffers.
        self._buckets: list[_Bucket] = []  # These are in order of size, the smallest first.
        self._outputs: StepOutputs | None = None
        self._logits: Tensor | None = None
        self._most_probable: Tensor | None = None
        rows, rooms = bucket_rows(max_rows), prompt_rooms(max_prompt_tokens)
        self._is_wanted = bool(rows or rooms)
        layers = pools.layers
        self._expands = any(kv.is_latent for kv in layers.pools)
        if not self._is_wanted or not all(_is_replayable(layers, reach) for reach in layers.reaches):
            return
        if pools.slots is not None or not all(map(layers.packing_of, layers.reaches)):
            rooms = ()  # Scans, and prompts that attend one by one, are computed eagerly.
        sizes: list[tuple[int, PromptRoom | None]] = [(num_rows, None) for num_rows in rows]
        if self._expands:
            heads = max(call.num_heads for call in pools.calls)
            token_bytes = heads * _HEAD_NUMBERS * layers.pools[0].compute_dtype.itemsize
            sizes = list(latent_rooms(max_rows, token_bytes, budget)) if max_rows else []
        beside = dict.fromkeys((max_rows, min(max_rows, _FEW_ROWS), 0))
        sizes += [(num_rows, room) for room in rooms for num_rows in beside]
        if sizes:
            self._capture_all(sizes, capture, budget)

    def _capture_all(
        self, sizes: Sequence[tuple[int, PromptRoom | None]], capture: Capture, budget: int | None
    ) -> None:
        began, device = time.monotonic(), self._model.device
        before = _reserved_bytes(device)
        most_singles = max(num_singles for num_singles, _ in sizes)
        most_kept = max(num + (room.num_prompts if room is not None else 0) for num, room in sizes)
        with torch.inference_mode(), _frozen(), torch.cuda.device_of(self._pools.layers.pools[0].numbers):
            try:
                self._outputs = StepOutputs(self._pools.layers, most_singles, device)
                self._most_probable = torch.zeros(most_kept, dtype=torch.int64, device=device)
            except RuntimeError as error:  # torch.OutOfMemoryError is a RuntimeError.
                logger.warning("graph_refused rows=all reason=%r", str(error))
                return
            for num_singles, room in sizes:
                had_sums = self._model.fused.adds
                goes_on = self._add(num_singles, room, capture)
                if had_sums and not self._model.fused.adds:  # They were at fault, perhaps.
                    goes_on = self._add(num_singles, room, capture)
                if not goes_on:
                    break
                if budget is not None and _reserved_bytes(device) - before > budget:
                    logger.info("graphs_budget_spent mib=%d", budget >> 20)
                    break
        self.bytes = max(0, _reserved_bytes(device) - before)
        took_s = time.monotonic() - began
        kept = [f"{singles}+{prompts}" for prompts, singles in (each.size for each in self._buckets)]
        logger.info("graphs_ready rows=%s mib=%d seconds=%.1f", ",".join(kept), self.bytes >> 20, took_s)

    def compute(self, chunks: Sequence[Chunk], rows: Sequence[int]) -> Computed | None:
        """Compute a step as PackedModel.compute does, or return None where no bucket fits it."""
        if not self._is_wanted:
            return None
        computed = self._compute(chunks, rows) if self._buckets else None
        self.counts["eager" if computed is None else "graph"] += 1
        return computed

    def close(self) -> None:
        self._buckets.clear()
        self._outputs = self._logits = self._most_probable = None

    def _compute(self, chunks: Sequence[Chunk], rows: Sequence[int]) -> Computed | None:
        if not self._takes(chunks):
            return None
        step = _Step.of(chunks)
        bucket = self._bucket_for(step)
        if bucket is None:
            return None
        if self._pools.slots is not None:
            require_slots([chunk.slot for chunk in step.singles], self._pools.slots.num_slots)
        shift = bucket.buffers.num_singles - len(step.singles)
        kept = step.places_of(rows)
        if step.prompts:
            kept = [row if row < len(step.singles) else row + shift for row in kept]
        if not bucket.buffers.fill(step.singles, step.prompts, kept):
            return None
        if self._pools.slots is not None:
            self._pools.slots.zero([c.slot for c in chunks if c.start == 0 and c.slot is not None])
        bucket.replay()
        return self._of_rows(range(len(kept)) if bucket.buffers.keeps_some else kept)

    def _takes(self, chunks: Sequence[Chunk]) -> bool:
        # States of drafts are stored only once it is known which drafts are accepted, so such a step runs
        # eagerly. A graph has no adapter in it.
        if self._pools.slots is not None and any([chunk.num_drafts for chunk in chunks]):
            return False
        return not any([chunk.scoring is not None or chunk.adapter is not None for chunk in chunks])

    def _bucket_for(self, step: _Step) -> _Bucket | None:
        """Return the smallest bucket that fits; it has prompts and single tokens exactly where the step does.

        A bucket with many times the step's rows would take longer than an eager step.
        """
        tokens, singles = step.size
        most_rows = max(_FEW_ROWS_IN_ALL, _MOST_TIMES * (tokens + singles))
        seen = step.num_seen if self._expands else 0
        most_seen = max(_LATENT_SEEN[1], _MOST_TIMES * seen)
        for bucket in self._buckets:
            most_tokens, most_singles = bucket.size
            has_room = most_tokens >= tokens and most_singles >= singles
            has_room = has_room and most_tokens + most_singles <= most_rows
            if self._expands:
                has_room = has_room and seen <= bucket.num_seen <= most_seen
            if has_room and bool(most_tokens) is bool(tokens) and bool(most_singles) is bool(singles):
                return bucket
        return None

    def _of_rows(self, rows: Sequence[int]) -> Computed:
        assert self._logits is not None and self._most_probable is not None
        if list(rows) == list(range(len(rows))):
            return Computed(self._logits[: len(rows)], most_probable=self._most_probable[: len(rows)])
        kept = torch.tensor(rows, dtype=torch.int64, device=self._model.device)
        return Computed(self._logits[kept], most_probable=self._most_probable[kept])

    def _add(self, num_singles: int, room: PromptRoom | None, capture: Capture) -> bool:
        """Capture and check a bucket, and return whether the next one may be tried.

        It may not where the definition is at fault. Where memory is short, smaller buckets may fit.
        """
        what = f"{num_singles}+{room.num_tokens if room is not None else 0}"
        bucket, trial = None, None
        try:
            assert self._outputs is not None
            buffers = StepBuffers(self._pools, num_singles, self._outputs, room)
            trial = StepTrial(self._model, self._pools, num_singles, room)
            step = _Step.of(trial.chunks)
            if not buffers.fill(step.singles, step.prompts):
                raise RuntimeError("a step for a trial does not fit")
            held = _held_tensors(self._model.model)
            residuals = Residuals(self._model.fused)
            replay = capture(partial(self._run, buffers, residuals))
            if _held_tensors(self._model.model) != held:
                raise RuntimeError("the definition keeps a tensor of a step")
            bucket = _Bucket(buffers, replay)
            self._buckets.append(bucket)
            self._buckets.sort(key=lambda each: (each.size, each.num_seen))
            fault = self._fault(trial)
        # A definition, torch or the device may raise anything, and steps work without graphs.
        except Exception as error:
            logger.warning("graph_refused rows=%s reason=%r", what, str(error))
            if bucket is not None:
                self._buckets.remove(bucket)
            if "out of memory" in str(error):
                return True
            self._give_up_sums()
            return False
        finally:
            if trial is not None:
                trial.clear()
        if fault is not None:
            logger.warning("graph_wrong rows=%s reason=%r", what, fault)
            self._buckets.remove(bucket)
            self._give_up_sums()
        return True

    def _give_up_sums(self) -> None:
        if self._model.fused.adds:
            self._model.fused.adds = False
            logger.warning("fused_kernels_unusable of=sums")

    def _run(self, buffers: StepBuffers, residuals: Residuals) -> None:
        with residuals.fusing():
            logits = self._model.logits_of(self._pools, buffers)
        assert self._most_probable is not None
        if self._logits is None:
            self._logits = logits.new_zeros(len(self._most_probable), logits.shape[1])
        self._logits[: buffers.num_kept].copy_(logits)
        torch.argmax(logits, 1, out=self._most_probable[: buffers.num_kept])

    def _fault(self, trial: StepTrial) -> str | None:
        """Replay random steps, full and padded, and return how they differ from eager ones, or None."""
        tolerance = _TOLERANCE.get(self._model.model.dtype, _TOLERANCE[torch.float16])
        for chunks in (trial.chunks, trial.chunks[:-1] or trial.chunks):
            groups = rows_to_compare(chunks)
            rows = [row for group in groups for row in group]
            trial.fill()
            anew = self._model.compute(self._pools, chunks, rows).logits.float().clone()
            trial.again()
            computed = self._compute(chunks, rows)
            if computed is None:  # A step with fewer kinds of rows belongs to another bucket.
                continue
            error = worst_error(computed.logits.float(), anew, groups)
            trial.again()
            trial.lose_a_page()
            lost = self._compute(chunks, rows)
            assert lost is not None, "the same step was computed before"
            control = worst_error(lost.logits.float(), anew, groups)
            if not error <= tolerance:  # NaN fails, too.
                return f"logits differ by {error:.1e} of their size, where rounding explains {tolerance:.0e}"
            if not control > error:
                logger.warning("graph_check_blind rows=%d error=%.1e lost=%.1e", len(rows), error, control)
        return None


def _is_replayable(layers: PagedLayers, reach: Reach) -> bool:
    if layers.pools[reach.pool].is_latent:
        return layers.packing_of(reach) is not None
    return isinstance(layers.in_place[reach.pool], OnDevice)


def _reserved_bytes(device: torch.device) -> int:
    """Return the GPU memory that this process holds, after torch has released its cached blocks."""
    if device.type != "cuda":
        return 0
    torch.cuda.empty_cache()
    return int(torch.cuda.memory_reserved(device))


def _held_tensors(model: torch.nn.Module) -> list[int]:
    return [each.data_ptr() for module in model.modules() for each in _tensors_in(vars(module))]


def _tensors_in(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors_in(each)


@contextmanager
def _frozen() -> Iterator[None]:
    """Keep captures from collecting garbage: each would first scan all objects of the process.

    Afterwards, objects that others froze before are no longer frozen.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
