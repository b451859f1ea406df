"""The runner tries the ways to attend at its start, on random pages of the pool's own layout.

require_causal compares the gather path with a plain softmax on the host, require_agreement compares a kernel
with the gather path, and require_packed compares prompts packed together with the plain softmax. The runner
works without a kernel and without packing if they are wrong, but not without the gather path.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace

import torch
from torch import Tensor

from services.engine.paged.model_runner import Chunk
from services.engine.start_fault import start_fault
from services.engine.torch.attention.page_pieces import AttendParts, OnDevice, PartsView, StoreKv
from services.engine.torch.attention.paged_attention import paged_attention, put
from services.engine.torch.attention.paged_kv import PagedKv, Scores
from services.engine.torch.attention.prompts import GatherPages, Packing, gather_plainly
from services.engine.torch.attention.step_view import LayerPlace, PagedLayers, Reach, StepView, view_step
from services.values.errors import ConfigError
from services.values.kv import GroupKind, PageId
from services.values.request import SamplingParams

# Two computations of the same may differ by so much: relative, and absolute for numbers below 1.
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.03, torch.float16: 0.004}
# A token too many or too few changes the result by ten times that; rounding stays far below it.
_CAUSAL_TOLERANCE = 0.1
_NUM_LAYERS, _LAYER = 2, 1
# A kernel is also tried with room for so many more parts of either kind, and with as many more rows.
_ROOM = 2
# The chunks (start, length) end within, at and one past what kernels process at a time; short ones start
# late.
_SPANS = ((0, 150), (0, 64), (200, 185), (64, 64), (63, 2), (96, 1), (177, 3), (100, 21), (90, 5))
_WHOLE_SPANS = ((0, 150), (0, 64), (0, 3))  # The step has all K and V of these.


_ALL = Reach(0)


class KernelWrong(Exception):
    pass


@dataclass(frozen=True, slots=True)
class _Way:
    reach: Reach = _ALL
    softcap: float | None = None
    has_sinks: bool = False


# Windows begin within pages, and cut both shared and unshared ones. Scores are about 4 and more.
_WAYS = (
    _Way(),
    _Way(Reach(0, GroupKind.SLIDING_WINDOW, 77)),
    _Way(Reach(0, GroupKind.SLIDING_WINDOW, 77), has_sinks=True),
    _Way(Reach(0, GroupKind.CHUNKED_WINDOW, 90), softcap=3.0),
    _Way(softcap=5.0, has_sinks=True),
)

_CAPPED_WAYS = tuple(way for way in _WAYS if way.softcap is not None)
_PACKED_WAYS = (_WAYS[0], _WAYS[1], _Way(Reach(0, GroupKind.CHUNKED_WINDOW, 90)))


@dataclass(frozen=True, slots=True)
class _Example:
    """This is a step over a pool of random pages, in which slots that nobody reads hold NaN."""

    pool: PagedKv
    chunks: Sequence[Chunk]
    query: Tensor  # The shape is [1, num_heads, total, head_dim].
    key: Tensor  # The shape is [1, num_kv_heads, total, head_dim].
    value: Tensor
    reach: Reach
    softcap: float | None
    sinks: Tensor | None


class _OneLayer:
    def take(self) -> tuple[int, bool]:
        return _LAYER, True


def require_agreement(on_device: OnDevice, kv: PagedKv) -> None:
    """Compile the kernel for the layout of `kv` and compare it with the gather path, without changing `kv`.

    Raises KernelWrong, and any exception of the compiler and the kernel.
    """
    with_room = replace(on_device, attend=_with_room(on_device.attend))
    for way in _WAYS:
        example = _example(kv, on_device.num_heads, _tree_of_readers(kv.shape.page_size), way)
        expected = _attend(example, None)
        for tried in (on_device, with_room):
            excess = _excess(_attend(example, tried), expected)
            if not excess <= _TOLERANCE[kv.compute_dtype]:  # NaN fails, too.
                allowed, tables = _TOLERANCE[kv.compute_dtype], " and room" if tried is with_room else ""
                raise KernelWrong(
                    f"differs from the gather path by {excess:.2g} of {allowed:.2g}, with {way}{tables}"
                )


def _with_room(attend: AttendParts) -> AttendParts:
    def attend_with_room(
        view: PartsView, query: Tensor, kv: PagedKv, layer: int, scores: Scores, output: Tensor
    ) -> None:
        total, first, rows = len(query), view.offsets[:1].long(), view.offsets.long()
        queries = torch.cat([query, query[first].expand(_ROOM, -1, -1)])
        outputs = output.new_full((len(queries), *output.shape[1:]), torch.nan)
        attend(_roomy(view, total), queries, kv, layer, scores, outputs)
        if not torch.equal(outputs[total:], outputs[first].expand(_ROOM, -1, -1)):
            raise KernelWrong("differs between a row and its echoes")
        output[rows] = outputs[rows]

    return attend_with_room


def _roomy(view: PartsView, total: int) -> PartsView:
    """Add rows after the step's `total` that repeat its first query, and parts that must not be computed.

    Such a part has no token, so its result would be NaN, in the place of the first part's.
    """
    spare = view.parts[:1].clone()
    spare[:, 1] = spare[:, 0] + 1
    spare[:, 5:] = 0
    num_parts = len(view.parts)

    def echoed(of_queries: Tensor) -> Tensor:
        return torch.cat([of_queries, of_queries[:1].expand(_ROOM)])

    return replace(
        view,
        parts=torch.cat([view.parts, spare.expand(num_parts + _ROOM, -1)]),
        grid=(num_parts + _ROOM, num_parts + _ROOM),
        starts=echoed(view.starts),
        ends=echoed(view.ends),
        offsets=torch.cat([view.offsets, torch.arange(total, total + _ROOM).to(view.offsets)]),
        outputs=view.outputs.new_full((len(view.outputs) + _ROOM, *view.outputs.shape[1:]), torch.nan),
        log_sums=view.log_sums.new_full((len(view.log_sums) + _ROOM, *view.log_sums.shape[1:]), torch.nan),
    )


def require_stored(store: StoreKv, kv: PagedKv) -> None:
    """Compare what a kernel stores in pages of the layout of `kv` with what torch stores, to the bit.

    Raises KernelWrong, and any exception of the compiler and the kernel.
    """
    shape, device = kv.shape._replace(num_layers=_NUM_LAYERS), kv.numbers.device
    generator = torch.Generator(device).manual_seed(0)

    def random(*size: int) -> Tensor:
        return 200 * torch.randn(size, generator=generator, device=device).to(kv.compute_dtype)

    total = 12
    numbers = random(total * shape.page_numbers).to(kv.numbers.dtype)
    keys, values = (random(total, shape.num_kv_heads, dim) for dim in (shape.head_dim, shape.v_head_dim))
    # Two rows occur twice, and the last one is not stored.
    rows = torch.tensor([0, 2, 11, 7, 7, 0, 10, 3], device=device)
    pages, slots = torch.where(rows == rows[-1], -1, rows), (5 * rows + 3) % shape.page_size
    expected = PagedKv(numbers.clone(), shape, kv.widened)
    for of_layer, stored in zip(expected.layer(_LAYER), (keys, values), strict=True):
        put(expected.rounded(stored[rows[:-1]]), of_layer, pages[:-1], slots[:-1])
    # V lies in memory in another order than K.
    orders = zip(_in_orders(keys), reversed(_in_orders(values)), strict=True)
    for (key, value), ids in itertools.product(orders, (torch.int64, torch.int32)):
        got = PagedKv(numbers.clone(), shape, kv.widened)
        store(key, value, got, _LAYER, rows.to(ids), pages.to(ids), slots.to(ids))
        if not torch.equal(*(each.numbers.view(torch.uint8) for each in (got, expected))):
            strides = key.stride(), value.stride()
            raise KernelWrong(f"stores otherwise than torch, with strides {strides} and {ids}")


def _in_orders(numbers: Tensor) -> list[Tensor]:
    """Return numbers of [total, num_heads, dim] in the orders that memory may have."""
    by_head = numbers.transpose(0, 1).contiguous().transpose(0, 1)
    in_one_product = torch.cat([numbers, numbers], dim=1)[:, numbers.shape[1] :]
    unaligned = numbers.new_empty(numbers.numel() + 1)[1:].view_as(numbers).copy_(numbers)
    by_column = numbers.transpose(1, 2).contiguous().transpose(1, 2)
    return [numbers, by_head, in_one_product, unaligned, by_column]


def require_causal(kv: PagedKv, num_heads: int, spans: Sequence[tuple[int, int]] = _SPANS) -> None:
    """Compare the gather path, which serves prompts, with a plain softmax, without changing `kv`.

    `spans` are the chunks that are tried, (start, length) each. Raises ConfigError where the results differ
    or torch cannot compute, and Unavailable where memory is short or the device is lost.
    """
    for way in _WAYS:
        try:
            example = _example(kv, num_heads, _prompts(kv.shape.page_size, spans), way)
            got = _attend(example, None).cpu()
        except RuntimeError as error:
            raise start_fault(f"this torch cannot attend on {kv.numbers.device}: {error}", error) from error
        excess = _excess(got, _attend_plainly(example))
        if not excess <= _CAUSAL_TOLERANCE:  # NaN fails, too.
            raise ConfigError(
                f"this torch does not attend as it should on {kv.numbers.device}: prompts differ from a "
                f"plain softmax by {excess:.2g}, with {way}"
            )


def require_gathered(gather: GatherPages, kv: PagedKv) -> None:
    """Compare what a kernel gathers from pages of the layout of `kv` with what torch gathers, to the bit.

    Raises KernelWrong, and any exception of the compiler and the kernel.
    """
    way = _PACKED_WAYS[1]
    example = _example(kv, kv.shape.num_kv_heads, _prompts(kv.shape.page_size, _SPANS), way)
    packed = _view(example, None, Packing(gather)).by_reach[way.reach].packed
    assert packed is not None
    for call, layer in itertools.product(packed.calls, range(_NUM_LAYERS)):
        expected = gather_plainly(call.reads, call.num_seen, example.pool, layer)
        got = gather(call.reads, call.num_seen, example.pool, layer)
        if not all(map(torch.equal, got, expected)):
            raise KernelWrong("gathers otherwise than torch")


def require_packed(packing: Packing, kv: PagedKv, num_heads: int) -> None:
    """Compare prompts that attend together with a plain softmax, without changing `kv`.

    Layers have sinks where `packing` supports those. Raises KernelWrong, and any exception of the compiler
    and the kernel.
    """
    ways = _PACKED_WAYS if packing.attend is None else (*_PACKED_WAYS, *_CAPPED_WAYS)
    for way, spans in itertools.product(ways, (_SPANS, _WHOLE_SPANS)):
        tried = replace(way, has_sinks=packing.has_sinks)
        example = _example(kv, num_heads, _prompts(kv.shape.page_size, spans), tried)
        excess = _excess(_attend(example, None, packing).cpu(), _attend_plainly(example))
        if not excess <= _CAUSAL_TOLERANCE:  # NaN fails, too.
            raise KernelWrong(f"prompts together differ from a plain softmax by {excess:.2g}, with {tried}")


def _example(kv: PagedKv, num_heads: int, chunks: Sequence[Chunk], way: _Way) -> _Example:
    shape = kv.shape._replace(num_layers=_NUM_LAYERS)
    device = kv.numbers.device
    generator = torch.Generator(device).manual_seed(0)

    def random(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=device).to(kv.compute_dtype)

    is_unread = torch.ones(1 + max(max(chunk.pages) for chunk in chunks), shape.page_size, dtype=torch.bool)
    for chunk in chunks:
        for position in range(max(0, way.reach.first_seen(chunk.start)), chunk.end):
            is_unread[chunk.pages[position // shape.page_size], position % shape.page_size] = False
    pool = PagedKv(random(len(is_unread) * shape.page_numbers), shape)
    for index in range(_NUM_LAYERS):
        for numbers in pool.layer(index):
            numbers.masked_fill_(is_unread[:, None, :, None].to(device), torch.nan)
    pool = PagedKv(pool.numbers.to(kv.numbers.dtype), shape, kv.widened)
    total = sum(len(chunk.token_ids) for chunk in chunks)
    # The scores are large, so that few tokens decide and a missing one shows.
    query = 4 * random(1, num_heads, total, shape.head_dim)
    key = random(1, shape.num_kv_heads, total, shape.head_dim)
    value = random(1, shape.num_kv_heads, total, shape.v_head_dim)
    sinks = 4 * random(num_heads) if way.has_sinks else None
    return _Example(pool, chunks, query, key, value, way.reach, way.softcap, sinks)


def _attend(example: _Example, in_place: OnDevice | None, packing: Packing | None = None) -> Tensor:
    """Return the attention, float32 [total, num_heads, v_head_dim].

    The step's keys and values are stored in the example's pool.
    """
    output, _ = paged_attention(
        SimpleNamespace(),
        example.query,
        example.key,
        example.value,
        None,
        scaling=_scaling(example),
        paged=_view(example, in_place, packing),
        s_aux=example.sinks,
        softcap=example.softcap,
    )
    return output[0].float()


def _view(example: _Example, in_place: OnDevice | None, packing: Packing | None) -> StepView:
    places = {_LAYER: LayerPlace(example.reach, _LAYER)}
    layers = PagedLayers((example.pool,), (in_place,), places, (packing,))
    return view_step(layers, example.chunks, _OneLayer())


def _attend_plainly(example: _Example) -> Tensor:
    outputs: list[Tensor] = []
    offset = 0
    for chunk in example.chunks:
        rows = slice(offset, offset + len(chunk.token_ids))
        offset = rows.stop
        keys, values = (
            numbers.float()[list(chunk.pages)].cpu().transpose(0, 1).flatten(1, 2)[:, : chunk.end]
            for numbers in example.pool.layer(_LAYER)
        )
        queries = example.query[0, :, rows].cpu().float().unflatten(0, (len(keys), -1))
        weights = _plain_weights(torch.einsum("hgqd,hkd->hgqk", queries, keys), chunk, example)
        # A weight of 0 times the NaN of an unread slot is not 0.
        outputs.append(torch.einsum("hgqk,hkd->qhgd", weights, values.nan_to_num()).flatten(1, 2))
    return torch.cat(outputs)


def _plain_weights(products: Tensor, chunk: Chunk, example: _Example) -> Tensor:
    scores = products * _scaling(example)
    if example.softcap is not None:
        scores = torch.tanh(scores / example.softcap) * example.softcap
    positions = torch.arange(chunk.end)
    own = positions[chunk.start :, None]
    is_hidden = (positions > own) | (positions < example.reach.first_seen(own))
    exponentials = scores.masked_fill(is_hidden, -torch.inf).exp()
    total = exponentials.sum(-1, keepdim=True)
    if example.sinks is not None:
        total = total + example.sinks.cpu().float().exp().view(*products.shape[:2], 1, 1)
    return exponentials / total


def _scaling(example: _Example) -> float:
    return 1 / math.sqrt(example.query.shape[3])


def _excess(got: Tensor, expected: Tensor) -> float:
    excess: float = ((got - expected).abs() / expected.abs().clamp(min=1)).max().item()
    return excess


def _prompts(page_size: int, spans: Sequence[tuple[int, int]]) -> list[Chunk]:
    chunks, next_page = [], 0
    for start, length in spans:
        end_page = next_page - (-(start + length) // page_size)
        chunks.append(_chunk(length, start, range(next_page, end_page)[::-1]))
        next_page = end_page
    return chunks


def _tree_of_readers(page_size: int) -> list[Chunk]:
    outer, inner = (list(range(-(-num_tokens // page_size))) for num_tokens in (300, 40))
    next_page = len(outer) + len(inner)
    inner = [len(outer) + page for page in inner]
    chunks = []

    def add(prefix: list[int], num_tokens: int, length: int = 1) -> None:
        nonlocal next_page
        end_page = next_page - (-num_tokens // page_size)
        pages, next_page = [*prefix, *range(next_page, end_page)], end_page
        chunks.append(_chunk(length, len(prefix) * page_size + num_tokens - length, pages))

    for i in range(17):
        add(outer, 1 + 7 * i % (2 * page_size))
    add([], page_size + 3, length=3)  # This chunk belongs to a prompt.
    for i in range(3):
        add(outer + inner, 1 + i % page_size)
    for num_tokens in (1, page_size, page_size + 1, 333):
        add([], num_tokens)
    return chunks


def _chunk(length: int, start: int, pages: Sequence[int]) -> Chunk:
    return Chunk(range(length), start, list(map(PageId, pages)), sample=False, sampling=SamplingParams())
