"""The self-check compares packed steps with one plain pass of the definition before a model serves.

The plain run computes each sequence in one pass, with transformers' own attention and no cache. The packed
run computes the same in chunks and single tokens, several sequences per step (check_trial.py), and resumes
one from a copied state. A control is like that resumed one, but lacks the state, or the first page that its
attention sees: the change of its result shows whether the check would have found such a fault.

The check uses float32 where memory allows, since rounding is small there: at most 1e-5 of the logits. Half
precision shows only large faults. Two right computations may choose different experts at a tie, so the check
compares medians, and tries other tokens before it refuses a model.
"""

import logging
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, eager_mask

from services.engine.paged.model_runner import Chunk, TailPages
from services.engine.start_fault import start_fault
from services.engine.torch.attention.paged_kv import PagedKv, PageShape
from services.engine.torch.device import free_bytes
from services.engine.torch.model.check_trial import (
    OF_ALSO_HALF,
    OF_FLOAT8_KV,
    OF_HALF,
    ROWS,
    CheckedRow,
    Cut,
    Findings,
    plan_trial,
)
from services.engine.torch.model.model_probe import attending_by, probe
from services.engine.torch.model.packed_model import PackedModel
from services.engine.torch.pools import KvDtype, Pools
from services.kv.checkpoints import scans
from services.kv.tails import PoolSizes
from services.values.errors import ConfigError, Unavailable
from services.values.kv import GroupKind, KvGroup, PageId
from services.values.request import SamplingParams

logger = logging.getLogger(__name__)

_DRAWS = 3
ROUNDING = "isthmus_rounding"  # This attention rounds K and V as float8 pages do.
# So many tokens of a sequence take a second or two. On a CPU, models with more than so many parameters get
# fewer.
_MOST_TOKENS, _MOST_TOKENS_OF_LARGE, _LARGE = 1400, 320, 500_000_000
_HALF = (torch.bfloat16, torch.float16)


def check(model: PackedModel, page_size: int, name: str, kv_dtype: KvDtype | None = None) -> None:
    """Check the model, log the result, and leave the model as it was. `kv_dtype` adds a check with that type.

    If the model fails with fused operations or an in-place recurrence, this turns them off and checks again.

    Raises ConfigError where the results differ or the model cannot compute; the message has the error or the
    reason. Raises Unavailable where memory is short or the device is lost.
    """
    try:
        _check_as_it_is(model, page_size, name, kv_dtype)
    except ConfigError as error:
        left_out = _leave_out(model)
        if left_out is None:
            raise
        check(model, page_size, name, kv_dtype)
        logger.warning("%s model=%s error=%r", left_out, name, str(error))


def _leave_out(model: PackedModel) -> str | None:
    if model.fused:
        model.fused.undo()
        return "fused_kernels_unusable"
    if model.in_place:
        model.in_place = False
        return "recurrence_kernel_unusable"
    return None


def _check_as_it_is(model: PackedModel, page_size: int, name: str, kv_dtype: KvDtype | None) -> None:
    half = [tensor for tensor in (*model.model.parameters(), *model.model.buffers()) if tensor.dtype in _HALF]
    widens = bool(half) and _fit_in_float32(half, model.device)
    try:
        with torch.inference_mode():
            if widens:
                with _widened(half):
                    _check(_Settings(model, page_size, by_kernels=False), name)
                    if kv_dtype is not None:
                        _check(_Settings(model, page_size, OF_FLOAT8_KV, kv_dtype, by_kernels=False), name)
            elif kv_dtype is not None:
                rounds = OF_HALF if half else OF_FLOAT8_KV
                _check(_Settings(model, page_size, rounds, kv_dtype, by_kernels=not half), name)
            tolerance = None if not half else OF_ALSO_HALF if widens else OF_HALF
            _check(_Settings(model, page_size, tolerance, by_kernels=not half), name)
    except (ConfigError, Unavailable):
        raise
    except Exception as error:  # A model's definition may raise any exception.
        raise start_fault(f"{name} fails its check at start: {error!r}", error) from error


@dataclass(frozen=True, slots=True)
class _Settings:
    model: PackedModel
    page_size: int
    half_tolerance: float | None = None
    kv_dtype: KvDtype | None = None
    by_kernels: bool = True  # Compiling them takes seconds for each type of numbers.


def _check(settings: _Settings, name: str) -> None:
    for seed in range(_DRAWS):
        findings = _Check(settings, seed).run()
        if not findings.fault:
            break
    if findings.fault:
        raise ConfigError(f"{name} cannot be served: {findings.fault}")
    dtype = settings.kv_dtype or ("half" if settings.half_tolerance else "float32")
    controls = {lost: f"{error:.1e}" for lost, error in findings.controls.items()}
    logger.info(
        "self_check_passed model=%s dtype=%s error=%.1e after_singles=%.1e lost=%s",
        *(name, dtype, findings.error, findings.error_after_singles, controls),
    )
    if findings.blind_to:
        logger.warning("self_check_blind model=%s dtype=%s lost=%s", name, dtype, findings.blind_to)


@dataclass(slots=True)
class _Sequence:
    cut: Cut
    ids: list[int]
    pages: list[PageId]  # These are its pages in full attention's pool and in each windowed pool.
    slot: int
    # The keys are positions, and the values the logits after them, for the compared ones.
    plain: dict[int, Tensor]


class _Check:
    def __init__(self, settings: _Settings, seed: int) -> None:
        self._model, self._page_size = settings.model, settings.page_size
        self._kv_dtype = settings.kv_dtype
        self._remembered = probe(self._model.model)
        self._chance = random.Random(seed)
        self._findings = Findings(settings.half_tolerance)
        window, most_tokens = self._remembered.longest_window, _most_tokens(self._model.model)
        self._trial = trial = plan_trial(self._page_size, window, most_tokens)
        num_pages = sum(-(-cut.end // self._page_size) for cut in (*trial.together.values(), trial.again))
        self._pools = Pools(
            self._remembered,
            num_pages=num_pages,
            page_size=self._page_size,
            sizes=PoolSizes(num_window_pages=num_pages, num_slots=len(trial.together) + 2),
            model_fingerprint=0,
            device=self._model.device,
            by_kernels=settings.by_kernels,
            kv_dtype=settings.kv_dtype,
        )
        # Pages are shuffled, so that neighbours in a sequence are not neighbours in the pool.
        self._free_pages = self._chance.sample(range(num_pages), num_pages)
        self._free_slots = list(range(len(trial.together) + 2))

    def run(self) -> Findings:
        try:
            self._warn_of_long_windows()
            sequences = {what: self._sequence(cut) for what, cut in self._trial.together.items()}
            sequences["second"].slot = sequences["first"].slot
            self._compute_together(sequences)
            self._resume(sequences["a"])
        finally:
            self._pools.close()
        return self._findings

    def _warn_of_long_windows(self) -> None:
        window, tokens = self._remembered.longest_window, self._trial.together["a"].end
        if tokens <= window:
            logger.warning("self_check_short window=%d tokens=%d", window, tokens)

    def _sequence(self, cut: Cut) -> _Sequence:
        vocab_size = self._model.model.config.get_text_config().vocab_size
        ids = [self._chance.randrange(vocab_size) for _ in range(cut.end)]
        also = self._trial.again if cut is self._trial.together["a"] else cut
        compared = sorted({row for each in (cut, also) for chunk in each.chunks() for row in chunk[:ROWS]})
        return _Sequence(cut, ids, self._take(cut.end), self._free_slots.pop(), self._plain(ids, compared))

    def _take(self, num_tokens: int) -> list[PageId]:
        return [PageId(self._free_pages.pop()) for _ in range(-(-num_tokens // self._page_size))]

    def _plain(self, ids: Sequence[int], rows: Sequence[int]) -> dict[int, Tensor]:
        model, device = self._model.model, self._model.device
        implementation = "eager" if self._kv_dtype is None else ROUNDING
        with attending_by(model, implementation), self._model.fused.as_defined():
            logits = model(
                input_ids=torch.tensor([ids], device=device),
                position_ids=torch.arange(len(ids), device=device)[None],  # Bamba creates wrong ones itself.
                use_cache=False,
                logits_to_keep=torch.tensor(rows, device=device),
            ).logits[0]
        if len(logits) != len(rows):
            logits = logits[list(rows)]
        return dict(zip(rows, logits.float(), strict=True))

    def _compute_together(self, sequences: Mapping[str, _Sequence]) -> None:
        """Compute the sequences, and copy a's state at the border to the last free slot."""
        rows: dict[str, list[CheckedRow]] = {what: [] for what in sequences}
        for step in range(max(sequence.cut.last_step for sequence in sequences.values()) + 1):
            if step == self._trial.step_after_border and self._pools.slots is not None:
                self._pools.slots.copy([(sequences["a"].slot, self._free_slots[0])])
            chunks = {what: chunk for what, each in sequences.items() if (chunk := each.cut.at(step))}
            shuffled = self._chance.sample(list(chunks), len(chunks))
            errors = self._step([(sequences[what], chunks[what]) for what in shuffled])
            for what, of_chunk in zip(shuffled, errors, strict=True):
                rows[what] += self._rows(chunks[what], of_chunk, rows[what])
        for what, of_sequence in rows.items():
            self._findings.add(f"sequence {what!r}", of_sequence)

    def _resume(self, a: _Sequence) -> None:
        """Continue at a's border: once with everything, then once without each state or page in turn."""
        border, cut = self._trial.border, self._trial.again
        kept = self._free_slots.pop(0)
        own = self._take(cut.end - border)
        again = replace(
            a, cut=cut, pages=[*a.pages[: border // self._page_size], *own], slot=self._free_slots.pop()
        )
        for lost in (None, *self._losses()):
            if self._pools.slots is not None:
                self._pools.slots.copy([(kept, again.slot)])
            rows: list[CheckedRow] = []
            with self._lose(lost, again):
                for chunk in cut.chunks():
                    rows += self._rows(chunk, self._step([(again, chunk)])[0], rows)
            if lost is None:
                self._findings.add("one that is resumed", rows)
            else:
                self._findings.lose(lost, rows)

    def _losses(self) -> list[str]:
        return [_STATE if group.kind is GroupKind.RECURRENT else _page_of(i) for i, group in self._groups]

    @property
    def _groups(self) -> list[tuple[int, KvGroup]]:
        return list(enumerate(self._pools.layout.groups))

    @contextmanager
    def _lose(self, lost: str | None, sequence: _Sequence) -> Iterator[None]:
        slots, border = self._pools.slots, sequence.cut.start
        if lost == _STATE and slots is not None:
            slots.zero([sequence.slot])
        pool = next((i for i, _ in self._groups if lost == _page_of(i)), None)
        if pool is None:
            yield
            return
        reaches = [reach for reach in self._pools.layers.reaches if reach.pool == pool]
        first = max(0, min(reach.first_seen(border) for reach in reaches))
        kv = self._pools.layers.pools[pool]
        page = kv.numbers.view(kv.num_pages, -1)[sequence.pages[first // self._page_size]]
        before = page.clone()
        page.zero_()
        yield
        page.copy_(before)

    def _step(self, parts: Sequence[tuple[_Sequence, range]]) -> list[list[float]]:
        chunks = [self._chunk(sequence, positions) for sequence, positions in parts]
        rows: list[int] = []
        end = 0
        for _, positions in parts:
            rows += range(end, end + len(positions[:ROWS]))
            end += len(positions)
        logits = iter(self._model.compute(self._pools, chunks, rows).logits.float())
        return [
            [_error(next(logits), sequence.plain[position]) for position in positions[:ROWS]]
            for sequence, positions in parts
        ]

    def _rows(self, chunk: range, errors: Sequence[float], before: Sequence[CheckedRow]) -> list[CheckedRow]:
        scanned = scans(chunk.start, chunk.stop, self._model.scan_tokens or chunk.stop)
        after_singles = any(len(scan) == 1 for scan in scanned) or any(row.after_singles for row in before)
        return [
            CheckedRow(position, error, position == chunk.start, after_singles)
            for position, error in zip(chunk, errors, strict=False)
        ]

    def _chunk(self, sequence: _Sequence, positions: range) -> Chunk:
        return Chunk(
            sequence.ids[positions.start : positions.stop],
            positions.start,
            sequence.pages,
            sample=False,
            sampling=SamplingParams(),
            tails=(TailPages(0, sequence.pages),) * sum(group.kind.is_windowed for _, group in self._groups),
            slot=None if self._pools.slots is None else sequence.slot,
        )


_STATE = "state"


def _page_of(group: int) -> str:
    return f"first page of group {group}"


def _error(got: Tensor, plain: Tensor) -> float:
    error: float = ((got - plain).square().mean() / plain.square().mean()).sqrt().item()
    return error


def _attend_rounded(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, *others: Any, **named: Any
) -> Any:
    """Attend as the definition's own eager function does, with K and V rounded to float8 as pages do."""
    attend = sys.modules[type(module).__module__].eager_attention_forward  # Each definition's file has one.
    return attend(module, query, _as_float8(key), _as_float8(value), *others, **named)


def _as_float8(numbers: Tensor) -> Tensor:
    pages = PagedKv(numbers.new_empty(0, dtype=torch.float8_e4m3fn), PageShape(0, 0, 0, 0, 0), numbers.dtype)
    return pages.rounded(numbers).to(numbers.dtype)


AttentionInterface.register(ROUNDING, _attend_rounded)
AttentionMaskInterface.register(ROUNDING, eager_mask)


def _most_tokens(model: PreTrainedModel) -> int:
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    is_large = num_parameters > _LARGE and model.device.type == "cpu"
    return _MOST_TOKENS_OF_LARGE if is_large else _MOST_TOKENS


def _fit_in_float32(half: Sequence[Tensor], device: torch.device) -> bool:
    return 2 * sum(int(tensor.numel()) for tensor in half) < 0.9 * free_bytes(device)


@contextmanager
def _widened(half: Sequence[Tensor]) -> Iterator[None]:
    dtypes = [tensor.dtype for tensor in half]
    try:
        for tensor in half:
            tensor.data = tensor.data.float()
        yield
    finally:
        for tensor, dtype in zip(half, dtypes, strict=True):
            tensor.data = tensor.data.to(dtype)
