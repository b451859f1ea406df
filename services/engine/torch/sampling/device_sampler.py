"""Triton kernels choose tokens on a GPU (draw_kernels.py); those of a step are copied to the host at once.

Raw logits, masked copies, and adjusted float64 copies share one table of parameters. Each of the three has
its launches, and the ids of all rows are copied once.

It chooses as torch_sampler.py does, which is used where the kernels do not work: when the runner starts, it
compares the two.
"""

import logging
import math
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from services.engine.paged.model_runner import NO_TOKEN, Chunk, Sampled
from services.engine.torch.sampling.adjusting import Histories, adjust_on_device, always_adjusts, must_go_on
from services.engine.torch.sampling.step_masks import NO_MASKS, RowMasks
from services.engine.torch.sampling.torch_sampler import logprobs_of, sample, stream_of, uniform_in
from services.values.request import SamplingParams, TokenLogprobs

if TYPE_CHECKING:
    from services.engine.torch.sampling.draw_kernels import Scratch

logger = logging.getLogger(__name__)

_Fields = tuple[float, ...]

_BLOCK = 1 << 24  # This counts logits (see torch_sampler.py) of float64 copies, and of the kernels' scratch.
_MOST_ROWS = 4096  # This limits a block, so that a small vocabulary's scratch is small, too.
_FIELDS = 8  # This is as in draw_kernels.py, which can only be imported with a GPU.
_COLDEST = 1e-30  # Lower temperatures are raised to this, which leaves only logits within 3e-29 of the peak.

_KNOWN = 1024  # So many requests' parameters are kept.
_FEWEST_ROWS = 64  # Buffers have room for at least so many, so that they seldom grow.
_LOG2_E = math.log2(math.e)

_TRIED_ROWS = 32
_NEAR = 1e-5  # A point that differs by so little may lead to another id where sums are rounded.


class SamplerWrong(Exception):
    pass


@dataclass(frozen=True, slots=True)
class _Asked:
    """This is what follows from a request's parameters, whatever the token."""

    params: SamplingParams
    is_adjusted: bool
    is_plain: bool  # The highest logit is chosen, if no mask or minimum length applies.
    stream: int
    fields: _Fields  # These are those of the table, with 0 for `place` and `point`.

    @classmethod
    def of(cls, params: SamplingParams, vocab_size: int) -> "_Asked":
        is_adjusted = always_adjusts(params)
        is_plain = params.greedy and params.logprobs is None and not is_adjusted
        fields = fields_of(0, 0.0, 1.0, 0.0, 0.0, 0)
        if not params.greedy:
            top_k = params.top_k if params.top_k < vocab_size else 0
            fields = fields_of(0, params.temperature, params.top_p, params.min_p, 0.0, top_k)
        return cls(params, is_adjusted, is_plain, stream_of(params.seed), fields)


@dataclass(frozen=True, slots=True)
class _Group:
    """These rows choose from one tensor; `places` are their rows in it."""

    values: Tensor
    rows: Sequence[int]
    places: Sequence[int]


@dataclass(slots=True)
class _Buffers:
    num_rows: int
    table: Tensor
    table_on_device: Tensor
    ids: Tensor
    ids_on_device: Tensor
    others: Tensor  # These are ids, too.

    @classmethod
    def of(cls, num_rows: int, device: torch.device) -> "_Buffers":
        is_pinned = device.type == "cuda"
        with torch.inference_mode(False):
            table = torch.zeros(num_rows, _FIELDS, dtype=torch.float64, pin_memory=is_pinned)
            ids = torch.zeros(2, num_rows, dtype=torch.int64, pin_memory=is_pinned)
            on_device = torch.zeros(num_rows, dtype=torch.int64, device=device)
            return cls(num_rows, table, torch.zeros_like(table, device=device), ids[0], on_device, ids[1])


def open_sampler(device: torch.device, vocab_size: int, dtype: torch.dtype) -> "DeviceSampler | None":
    """Return a sampler that replaces sample() for logits of `dtype` on a GPU, or None where none works.

    It takes some seconds there.
    """
    if device.type != "cuda":
        return None
    sampler = _tried(partial(DeviceSampler, device, vocab_size), dtype)
    if sampler is not None:
        logger.info("sampling_kernels_ready kernel=triton")
    return sampler


def also_for(sampler: "DeviceSampler | None", dtype: torch.dtype) -> "DeviceSampler | None":
    """Return the sampler if it also works for logits of `dtype`, so that no step compiles for them."""
    if sampler is None or dtype in sampler.tried:
        return sampler
    return _tried(lambda: sampler, dtype)


def _tried(made: "Callable[[], DeviceSampler]", dtype: torch.dtype) -> "DeviceSampler | None":
    try:
        sampler = made()
        require_same_choices(sampler, dtype)
    except Exception as error:  # Triton, a compiler or torch may raise anything, and sample() works without.
        logger.warning("sampling_kernels_unusable error=%r", error)
        return None
    finally:
        torch.cuda.empty_cache()  # This frees the trial's memory for the pool.
    return sampler


@dataclass(slots=True)
class DeviceSampler:
    """It is called as sample() is, from one thread. A call returns when the device is done."""

    device: torch.device
    vocab_size: int
    tried: set[torch.dtype] = field(default_factory=set)  # These are the types of logits that were tried.
    _buffers: _Buffers | None = None
    _scratch: "Scratch" = field(init=False)
    _histories: Histories = field(init=False)
    _known: dict[int, _Asked] = field(default_factory=dict)  # The keys are the ids of parameters.
    _launch: Callable[..., None] = field(init=False)

    def __post_init__(self) -> None:
        # Only torch for CUDA includes Triton, which takes a second to import.
        from services.engine.torch.sampling.draw_kernels import FIELDS, MAX_VOCAB_SIZE, Scratch, launch

        if not 1 < self.vocab_size <= MAX_VOCAB_SIZE:
            raise ValueError(f"a vocabulary of {self.vocab_size}")
        assert FIELDS == _FIELDS
        self._launch = launch
        # All of it is allocated at the start, so that no step fails for lack of memory.
        self._scratch = Scratch.of(_rows_of_block(self.vocab_size), self.vocab_size, self.device)
        self._histories = Histories(self.vocab_size)

    def __call__(
        self,
        logits: Tensor,
        chunks: Sequence[Chunk],
        masks: RowMasks = NO_MASKS,
        most_probable: Tensor | None = None,
    ) -> list[Sampled]:
        """Choose as sample() does. `most_probable` are the ids of each row's highest logit, on the device."""
        if logits.shape[1] != self.vocab_size:  # The kernels were tried for this vocabulary only.
            return sample(logits, chunks, masks)
        asked = self.asked(chunks)
        adjusted = {
            row
            for row, (chunk, own) in enumerate(zip(chunks, asked, strict=True))
            if own.is_adjusted or must_go_on(chunk)
        }
        others = adjusted.union(masks.rows)
        plain = [own.is_plain and row not in others for row, own in enumerate(asked)]
        if most_probable is None and all(plain):
            most_probable = logits.argmax(1)
        rest = [row for row in range(len(chunks)) if most_probable is None or not plain[row]]
        groups = self._groups(logits, chunks, masks, rest, adjusted) if rest else []
        token_ids = self._token_ids(groups, chunks, asked, most_probable)
        if not masks.rows and all(plain):
            return [Sampled(token_id) for token_id in token_ids]
        logprobs = _logprobs(logits, token_ids, chunks)
        return [
            Sampled(token_id, logprobs.get(row))
            if token_id != NO_TOKEN and masks.allows(row, token_id)
            else Sampled(NO_TOKEN)
            for row, token_id in enumerate(token_ids)
        ]

    def asked(self, chunks: Sequence[Chunk]) -> list[_Asked]:
        asked, known = list[_Asked](), self._known
        for chunk in chunks:
            own = known.get(id(chunk.sampling))
            if own is None or own.params is not chunk.sampling:
                if len(known) >= _KNOWN:
                    known.clear()
                own = known[id(chunk.sampling)] = _Asked.of(chunk.sampling, self.vocab_size)
            asked.append(own)
        return asked

    def _groups(
        self,
        logits: Tensor,
        chunks: Sequence[Chunk],
        masks: RowMasks,
        rest: Sequence[int],
        are_adjusted: Set[int],
    ) -> list[_Group]:
        adjusted = [row for row in rest if row in are_adjusted]
        masked = [row for row in rest if row in masks.rows and row not in are_adjusted]
        raw = [row for row in rest if row not in masks.rows and row not in are_adjusted]
        groups = [_Group(logits, raw, raw)] if raw else []
        for own in _blocks(masked, logits.shape[1]):
            values = masks.applied(_selected(logits, own), own)
            groups.append(_Group(values, own, range(len(own))))
        for own in _blocks(adjusted, logits.shape[1]):
            selected = _selected(logits, own)
            exact = selected.to(torch.float64, copy=True, memory_format=torch.contiguous_format)
            adjust_on_device(exact, [chunks[row] for row in own], self._histories)
            groups.append(_Group(masks.applied(exact, own), own, range(len(own))))
        return groups

    def _token_ids(
        self,
        groups: Sequence[_Group],
        chunks: Sequence[Chunk],
        asked: Sequence[_Asked],
        most_probable: Tensor | None,
    ) -> list[int]:
        buffers = self._buffers_for(len(chunks))
        drawn = [row for group in groups for row in group.rows]
        if drawn:
            fields = [
                _fields(chunks[row], asked[row], place)
                for group in groups
                for row, place in zip(group.rows, group.places, strict=True)
            ]
            self._draw(groups, fields, buffers)
            buffers.ids[: len(drawn)].copy_(buffers.ids_on_device[: len(drawn)], non_blocking=True)
        if most_probable is not None and len(drawn) < len(chunks):
            buffers.others[: len(chunks)].copy_(most_probable[: len(chunks)], non_blocking=True)
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        token_ids: list[int] = buffers.others[: len(chunks)].tolist()
        for row, token_id in zip(drawn, buffers.ids[: len(drawn)].tolist(), strict=True):
            # The id is -1 where all logits are -inf. Then the first id is as high as any, unless bans made
            # them so.
            is_banned = token_id < 0 and chunks[row].sampling.bad_token_ids
            token_ids[row] = NO_TOKEN if is_banned else max(0, token_id)
        return token_ids

    def drawn(self, logits: Tensor, table: Sequence[_Fields]) -> list[int]:
        """Return what these rows choose; the trial uses it with points of its own."""
        rows, buffers = range(len(table)), self._buffers_for(len(table))
        self._draw([_Group(logits, rows, rows)], table, buffers)
        ids: list[int] = buffers.ids_on_device[: len(table)].tolist()
        return ids

    def _draw(self, groups: Sequence[_Group], table: Sequence[_Fields], buffers: _Buffers) -> None:
        flat = np.fromiter(chain.from_iterable(table), np.float64, _FIELDS * len(table))
        buffers.table.numpy()[: len(table)] = flat.reshape(-1, _FIELDS)
        on_device = buffers.table_on_device[: len(table)]
        on_device.copy_(buffers.table[: len(table)], non_blocking=True)
        start = 0
        for group in groups:
            for own in _blocks(range(start, start + len(group.rows)), self.vocab_size):
                rows = slice(own.start, own.stop)
                cuts = any(top_k > 0 or top_p < 1 for _, _, top_p, _, _, top_k, *_ in table[rows])
                chosen = buffers.ids_on_device[rows]
                self._launch(group.values, on_device[rows], chosen, self._scratch, cuts=cuts)
            start += len(group.rows)

    def _buffers_for(self, num_rows: int) -> _Buffers:
        if self._buffers is None or self._buffers.num_rows < num_rows:
            self._buffers = _Buffers.of(_room_for(num_rows), self.device)
        return self._buffers


def _room_for(num_rows: int) -> int:
    return max(_FEWEST_ROWS, 1 << (num_rows - 1).bit_length())


def _rows_of_block(vocab_size: int) -> int:
    return max(1, min(_MOST_ROWS, _BLOCK // vocab_size))


def _blocks(rows: Sequence[int], vocab_size: int) -> Iterator[Any]:
    num_rows = _rows_of_block(vocab_size)
    for start in range(0, len(rows), num_rows):
        yield rows[start : start + num_rows]


def _selected(values: Tensor, rows: Sequence[int]) -> Tensor:
    """Return these rows, which ascend, without a copy if they are contiguous."""
    if rows[-1] - rows[0] == len(rows) - 1:
        return values[rows[0] : rows[-1] + 1]
    selected = torch.tensor(rows, pin_memory=values.is_cuda).to(values.device, non_blocking=True)
    return values.index_select(0, selected)


def fields_of(
    place: int, temperature: float, top_p: float, min_p: float, point: float, top_k: int
) -> _Fields:
    """Return the row's part of the table, in the order of draw_kernels.py."""
    if temperature == 0:
        return (place, 0.0, top_p, min_p, point, top_k, 0.0, 0.0)
    inverse = 1 / max(temperature, _COLDEST)
    factor = inverse * _LOG2_E
    high = float(np.float32(factor))
    return (place, inverse, top_p, min_p, point, top_k, high, float(np.float32(factor - high)))


def _fields(chunk: Chunk, asked: _Asked, place: int) -> _Fields:
    _, inverse, top_p, min_p, _, *others = asked.fields
    point = uniform_in(asked.stream, len(chunk.history)) if inverse else 0.0
    return (place, inverse, top_p, min_p, point, *others)


def _logprobs(logits: Tensor, token_ids: Sequence[int], chunks: Sequence[Chunk]) -> dict[int, TokenLogprobs]:
    rows = [row for row, chunk in enumerate(chunks) if chunk.sampling.logprobs is not None]
    found = dict[int, TokenLogprobs]()
    for own in _blocks(rows, logits.shape[1]):
        chosen = [max(0, token_ids[row]) for row in own]
        logprobs = logprobs_of(_selected(logits, own).double(), chosen, [chunks[row] for row in own])
        found |= {own[nth]: each for nth, each in logprobs.items()}
    return found


def require_same_choices(sampler: "DeviceSampler", dtype: torch.dtype) -> None:
    """Compile for logits of `dtype` and for adjusted ones, and compare with sample() on the same device.

    Types that were tried before are skipped. Raises SamplerWrong, and any exception of Triton, its compiler
    or a launch.
    """
    generator = torch.Generator(sampler.device).manual_seed(0)
    size = (_TRIED_ROWS, sampler.vocab_size)
    chunks = [Chunk([0], 0, (), True, params, [0]) for params in _tried_params()]
    for tried_dtype in [each for each in dict.fromkeys((dtype, torch.float64)) if each not in sampler.tried]:
        for scale, grain in ((1.0, 0.0), (4.0, 0.0), (3.0, 0.25), (8.0, 0.0)):
            options = {"dtype": torch.float64, "device": sampler.device}
            logits = scale * torch.randn(size, generator=generator, **options)
            if grain:  # Then many are equal.
                logits = (logits / grain).round() * grain
            logits[1, 3], logits[2, 5], logits[3, 2:] = torch.inf, torch.nan, -torch.inf
            _require_same(sampler, logits.to(tried_dtype), chunks)
        sampler.tried.add(tried_dtype)


def _tried_params() -> list[SamplingParams]:
    cuts = [
        SamplingParams(top_p=top_p, top_k=top_k, min_p=min_p)
        for top_p in (1.0, 0.95, 0.5, 1e-3)
        for top_k in (0, 1, 20, 1000)
        for min_p in (0.0, 0.02)
    ]
    temperatures = (1.0, 0.0, 0.3, 0.7, 1.5, 5.0, 0.02)
    return [
        replace(cuts[row % len(cuts)], temperature=temperatures[row % len(temperatures)], seed=row)
        for row in range(_TRIED_ROWS)
    ]


def _require_same(sampler: "DeviceSampler", logits: Tensor, chunks: Sequence[Chunk]) -> None:
    """Allow a different id only if the ids of a slightly lower and a slightly higher point enclose it."""
    expected = [sampled.token_id for sampled in sample(logits, chunks)]
    found = [sampled.token_id for sampled in sampler(logits, chunks)]
    different = [row for row, ids in enumerate(zip(expected, found, strict=True)) if ids[0] != ids[1]]
    if not different:
        return
    asked = sampler.asked(chunks)
    table = [_fields(*each, row) for row, each in enumerate(zip(chunks, asked, strict=True))]
    lowest, highest = (
        sampler.drawn(logits, [(*row[:4], min(max(0.0, row[4] + off), 1.0), *row[5:]) for row in table])
        for off in (-_NEAR, _NEAR)
    )
    far = [row for row in different if not lowest[row] <= expected[row] <= highest[row]]
    if far or len(different) > len(chunks) // 8:
        raise SamplerWrong(f"{logits.dtype}: of {len(chunks)} rows {different} differ, {far} widely")
