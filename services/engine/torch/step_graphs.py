"""Steps are captured in CUDA graphs when a runner starts, and replayed from then on.

A bucket has buffers of a number of rows, and the graph that computes a step from them: its logits, the most
probable token of each row, and K, V and states in their places. A step runs in the smallest bucket that has
its rows; a step that fits none is computed eagerly (PackedModel).

Some buckets are for steps of single tokens alone. Others are for prompts, with no single tokens or with as
many as may run; there, prompts attend together (prompts.py). A prompt's step launches as many kernels as any
other, and up to some hundred tokens the GPU waits for its host, too. Recurrent layers have buckets for runs
of drafts, whose states a second graph updates once it is known which are accepted, and for one whole chunk of
a prompt. Where latents are expanded, buckets also differ in the tokens of contexts that they have room for.

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
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from services.engine.paged.model_runner import Chunk
from services.engine.torch.draft_tokens import single_tokens
from services.engine.torch.model.fused.residuals import Residuals
from services.engine.torch.model.mixers import require_slots
from services.engine.torch.model.packed_model import Computed, PackedModel
from services.engine.torch.pools import Pools
from services.engine.torch.step_buffers import StepBuffers
from services.engine.torch.step_rooms import StepOutputs, StepRoom
from services.engine.torch.step_sizes import StepLimits, has_room, is_for_contexts, is_for_step, rooms_for
from services.engine.torch.step_trial import StepTrial, accepted_of, rows_to_compare, worst_error, worst_state

logger = logging.getLogger(__name__)

Replay = Callable[[], None]
# A capture computes what it is given once, and returns a function that computes it again in the same memory.
Capture = Callable[[Callable[[], None]], Replay]

_LEAST_BYTES, _SHARE = 256 << 20, 64
# Logits may differ by so much: the root mean square error relative to theirs, in the median row. The same
# kernels compute both; a plan that is cut differently, and padding, change the order of sums.
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.06, torch.float16: 0.02}


def graph_budget(device: torch.device, mib: int | None) -> int:
    """Return the bytes that graphs may take: `mib` MiB, or a share of the card's memory; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    total_bytes = int(torch.cuda.get_device_properties(device).total_memory)
    return max(_LEAST_BYTES, total_bytes // _SHARE) if mib is None else mib << 20


def open_graphs(
    model: PackedModel,
    pools: Pools,
    max_rows: int,
    budget: int,
    max_prompt_tokens: int = 0,
    max_drafts: int = 0,
) -> "StepGraphs":
    """Capture CUDA graphs as StepGraphs does; a `budget` of 0 bytes gives none."""
    if not budget:
        return StepGraphs(model, pools, 0, lambda compute: compute)
    capture = CudaCapture(model.device)
    return StepGraphs(model, pools, max_rows, capture, budget, max_prompt_tokens, max_drafts)


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
        capturing = torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local")
        with self._leaving_nothing(), capturing:
            compute()
        replay: Replay = graph.replay
        return replay

    @contextmanager
    def _leaving_nothing(self) -> Iterator[None]:
        """Undo what torch leaves undone where the end of a capture fails, since a wait has broken it.

        Its stream stays the current one. Before torch 2.13 the allocator also takes it to be under way, and
        raises where its cache is to be emptied (pytorch/pytorch#180395).
        """
        with torch.cuda.stream(torch.cuda.current_stream(self._device)):
            try:
                yield
            except BaseException:
                with suppress(RuntimeError):  # It is raised where the capture was over.
                    torch._C._cuda_endAllocateToPool(self._device.index, self._pool)
                raise


@contextmanager
def _no_waiting() -> Iterator[None]:
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


class _Bucket:
    def __init__(self, buffers: StepBuffers, replay: Replay, take: Replay | None) -> None:
        """Make a bucket; `take` updates states with the accepted drafts, where there are runs."""
        self.buffers, self.replay, self.take = buffers, replay, take
        room = buffers.room
        # These are the tokens of prompts, the single tokens, and those that are seen, if that is limited.
        self.size = room.num_tokens, room.num_singles, room.num_seen


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
        return sum([chunk.end for chunk in (*self.singles, *self.prompts)])


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
        max_drafts: int = 0,
    ) -> None:
        """Capture steps of up to `max_rows` single tokens and up to `max_prompt_tokens` prompt tokens.

        Sequences have up to `max_drafts` drafts, which are among the single tokens.
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
        self._is_wanted = max_rows > 0 or max_prompt_tokens > 0
        self._expands = any(kv.is_latent for kv in pools.layers.pools)
        limits = StepLimits(max_rows, max_prompt_tokens, max_drafts)
        sizes = rooms_for(pools, limits, budget) if self._is_wanted else []
        if sizes:
            self._capture_all(sizes, capture, budget)

    def _capture_all(self, sizes: Sequence[StepRoom], capture: Capture, budget: int | None) -> None:
        began, device = time.monotonic(), self._model.device
        before = _reserved_bytes(device)
        most_singles, most_kept = (
            max(each) for each in zip(*((room.num_singles, room.num_kept) for room in sizes), strict=True)
        )
        with torch.inference_mode(), _frozen(), torch.cuda.device_of(self._pools.layers.pools[0].numbers):
            try:
                self._outputs = StepOutputs(self._pools.layers, most_singles, device)
                self._most_probable = torch.zeros(most_kept, dtype=torch.int64, device=device)
            except RuntimeError as error:  # torch.OutOfMemoryError is a RuntimeError.
                logger.warning("graph_refused rows=all reason=%r", str(error))
                return
            for room in sizes:
                left = None if budget is None else budget - (_reserved_bytes(device) - before)
                had_sums = self._model.fused.adds
                goes_on = self._add(room, capture, left)
                if had_sums and not self._model.fused.adds:  # They were at fault, perhaps.
                    goes_on = self._add(room, capture, left)
                if not goes_on:
                    break
                if budget is not None and _reserved_bytes(device) - before > budget:
                    logger.info("graphs_budget_spent mib=%d", budget >> 20)
                    break
        self.bytes = max(0, _reserved_bytes(device) - before)
        took_s = time.monotonic() - began
        kept = [_name_of(bucket.buffers.room) for bucket in self._buckets]
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

    def _compute(
        self, chunks: Sequence[Chunk], rows: Sequence[int], tried: _Bucket | None = None
    ) -> Computed | None:
        """Compute a step in the bucket that is tried, if it has room there, or in the one for such steps."""
        if not self._takes(chunks):
            return None
        step = _Step.of(chunks)
        has_runs = self._pools.slots is not None and any([chunk.num_drafts for chunk in chunks])
        runs = [len(chunk.token_ids) for chunk in chunks] if has_runs else []
        bucket = tried or self._bucket_for(step, runs)
        if bucket is None or (tried and not has_room(tried.buffers.room, *step.size, runs)):
            return None
        if self._pools.slots is not None:
            require_slots([chunk.slot for chunk in chunks], self._pools.slots.num_slots)
        shift = bucket.buffers.num_singles - len(step.singles)
        kept = step.places_of(rows)
        if step.prompts:
            kept = [row if row < len(step.singles) else row + shift for row in kept]
        if not bucket.buffers.fill(step.singles, step.prompts, kept, runs):
            return None
        if self._pools.slots is not None:
            self._pools.slots.zero([c.slot for c in chunks if c.start == 0 and c.slot is not None])
        bucket.replay()
        computed = self._of_rows(range(len(kept)) if bucket.buffers.keeps_some else kept)
        return replace(computed, take=partial(self._take, bucket, chunks)) if runs else computed

    def _take(self, bucket: _Bucket, chunks: Sequence[Chunk], counts: Sequence[int]) -> None:
        """Update the states of all sequences, those with drafts by the first `counts` of their tokens."""
        assert bucket.take is not None
        of_drafts = iter(counts)
        bucket.buffers.keep([next(of_drafts) if chunk.num_drafts else 1 for chunk in chunks])
        bucket.take()

    def _takes(self, chunks: Sequence[Chunk]) -> bool:
        # A graph has no adapter in it.
        return not any([chunk.scoring is not None or chunk.adapter is not None for chunk in chunks])

    def _bucket_for(self, step: _Step, runs: Sequence[int] = ()) -> _Bucket | None:
        tokens, singles = step.size
        num_seen = step.num_seen if self._expands else 0
        for bucket in self._buckets:
            most_tokens, most_singles, _ = bucket.size
            if most_singles < singles or most_tokens < tokens:  # Mostly there are others before it.
                continue
            room = bucket.buffers.room
            if is_for_step(room, tokens, singles, runs) and (
                not self._expands or is_for_contexts(room, num_seen)
            ):
                return bucket
        return None

    def _of_rows(self, rows: Sequence[int]) -> Computed:
        assert self._logits is not None and self._most_probable is not None
        if list(rows) == list(range(len(rows))):
            return Computed(self._logits[: len(rows)], most_probable=self._most_probable[: len(rows)])
        kept = torch.tensor(rows, dtype=torch.int64, device=self._model.device)
        return Computed(self._logits[kept], most_probable=self._most_probable[kept])

    def _add(self, room: StepRoom, capture: Capture, left: int | None) -> bool:
        """Capture and check a bucket, and return whether the next one may be tried.

        It may not where the definition is at fault. Where memory is short, smaller buckets may fit. A scan,
        which a definition may compute with a lot of memory, takes no more than `left` bytes.
        """
        bucket, trial, what = None, None, _name_of(room)
        try:
            assert self._outputs is not None
            buffers = StepBuffers(self._pools, room, self._outputs)
            trial = StepTrial(self._model, self._pools, room)
            step = _Step.of(trial.chunks)
            runs = [len(chunk.token_ids) for chunk in trial.chunks] if room.runs is not None else []
            has_drafts = room.runs is None or max(runs) > 1
            if not has_drafts or not buffers.fill(step.singles, step.prompts, runs=runs):
                raise RuntimeError("a step for a trial does not fit")
            if room.is_scan and left is not None:
                needed = _peak_bytes(
                    self._model.device, partial(self._run, buffers, Residuals(self._model.fused))
                )
                if needed > left:
                    raise RuntimeError(
                        f"out of memory: a scan takes {needed} bytes of the {left} left for graphs"
                    )
            held = _held_tensors(self._model.model)
            residuals = Residuals(self._model.fused)
            replay = capture(partial(self._run, buffers, residuals))
            take = capture(buffers.take) if room.runs is not None else None
            if _held_tensors(self._model.model) != held:
                raise RuntimeError("the definition keeps a tensor of a step")
            bucket = _Bucket(buffers, replay, take)
            self._buckets.append(bucket)
            self._buckets.sort(key=lambda each: each.size)
            fault = self._fault(trial, bucket)
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

    def _fault(self, trial: StepTrial, bucket: _Bucket) -> str | None:
        """Replay random steps, full and padded, and return how they differ from eager ones, or None."""
        tolerance = _TOLERANCE.get(self._model.model.dtype, _TOLERANCE[torch.float16])
        for chunks in (trial.chunks, trial.chunks[:-1] or trial.chunks):
            groups = rows_to_compare(chunks)
            rows = [row for group in groups for row in group]
            counts = accepted_of(chunks)
            trial.fill()
            eagerly = self._model.compute(self._pools, chunks, rows)
            anew = eagerly.logits.float().clone()
            eagerly.keep(counts)
            left = trial.states()
            trial.again()
            computed = self._compute(chunks, rows, bucket)
            if computed is None:  # A step with fewer kinds of rows belongs to another bucket.
                continue
            error = worst_error(computed.logits.float(), anew, groups)
            computed.keep(counts)
            if left:
                of_states = worst_state(trial.states(), left)
                if not of_states <= tolerance:
                    return _off_by("states", of_states, tolerance)
            trial.again()
            trial.lose_a_page()
            lost = self._compute(chunks, rows, bucket)
            assert lost is not None, "the same step was computed before"
            control = worst_error(lost.logits.float(), anew, groups)
            if not error <= tolerance:  # NaN fails, too.
                return _off_by("logits", error, tolerance)
            if not control > error:
                logger.warning("graph_check_blind rows=%d error=%.1e lost=%.1e", len(rows), error, control)
        return None


def _off_by(what: str, error: float, tolerance: float) -> str:
    return f"{what} differ by {error:.1e} of their size, where rounding explains {tolerance:.0e}"


def _name_of(room: StepRoom) -> str:
    runs = f" in {room.runs.num_runs} runs" if room.runs is not None else ""
    return f"{room.num_singles}+{room.num_tokens}{runs}"


def _reserved_bytes(device: torch.device) -> int:
    """Return the GPU memory that this process holds, after torch has released its cached blocks."""
    if device.type != "cuda":
        return 0
    torch.cuda.empty_cache()
    return int(torch.cuda.memory_reserved(device))


def _peak_bytes(device: torch.device, compute: Callable[[], None]) -> int:
    """Return the GPU memory that a computation takes for a moment."""
    if device.type != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    compute()
    return int(torch.cuda.max_memory_allocated(device) - before)


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
