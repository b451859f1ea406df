"""Prompts attend with torch's flash attention on a GPU: all chunks of a step with the same reach at once.

`pack_chunks` runs once per step and reach, and finds which rows belong to which chunk, and the pages that
they read. `attend_packed` runs in each layer:

1. It copies K and V that the chunks see out of their pages, one after the other. For whole prompts it uses
   the step's own, unless pages store them rounded.
2. It calls varlen_attn once: each row sees its chunk's tokens up to itself.
3. It subtracts the share of sinks, which follows from the log-sum-exps.

Where windows are chunks of the sequence, each window's tokens are a chunk of their own. Flash attention has
no soft caps, and one width for K and V: prompt_kernel.py computes layers with others. Both need half
precision. Everything else attends chunk by chunk (paged_attention.py). When the runner starts, it tries
whether the result is right on this device (kernel_choice.py).
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention.varlen import AuxRequest, varlen_attn
from torch.nn.functional import pad

from services.engine.torch.attention.page_pieces import Read
from services.engine.torch.attention.paged_kv import PagedKv, Scores
from services.engine.torch.device import send

# The K and V of a layer that chunks of one call see take no more than so many bytes, unless one chunk sees
# more.
_PACKED_BYTES = 256 << 20
# torch's flash attention supports these types.
_FLASH_DTYPES = (torch.bfloat16, torch.float16)
_MOST_FLASH_DIM, _FLASH_DIM_STEP = 256, 8
# It reads so many numbers of half precision at a time.
_FLASH_NUMBERS = 8
# Newer versions of torch need this option where K and V have fewer heads.
_FEWER_HEADS = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}

# The arguments are those of gather_kernel.gather_pages: reads, num_tokens, the pool, layer.
GatherPages = Callable[[Tensor, int, PagedKv, int], tuple[Tensor, Tensor]]
# The arguments are those of prompt_kernel.attend_rows: queries, keys, values, row_starts, seen_starts,
# longest, window, scores.
AttendRows = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, int, int, Scores], Tensor]


@dataclass(frozen=True, slots=True)
class Packing:
    """A pool's prompts may be packed; with `has_sinks`, also those of layers with sinks."""

    gather: GatherPages
    has_sinks: bool = True
    attend: AttendRows | None = None  # With None it is torch's flash attention, which has no soft caps.


class PlacedRead(NamedTuple):
    """A chunk is rows [offset, offset + length) of the step, and the last tokens of what it reads."""

    offset: int
    length: int
    read: Read


@dataclass(frozen=True, slots=True)
class PackedChunks:
    """One call computes these chunks, which are neighbours in the step; tables are int32, on the device.

    Chunk i has the rows [row_starts[i], row_starts[i + 1]) of `rows`, and sees [seen_starts[i], seen_starts[i
    + 1]) of the gathered tokens. A read is (page, first slot, end slot, target of the first slot).
    """

    rows: slice
    row_starts: Tensor
    seen_starts: Tensor
    reads: Tensor  # The shape is [num_reads, 4].
    longest: int
    most_seen: int
    num_seen: int
    are_whole: bool  # No chunk sees anything but itself.


@dataclass(frozen=True, slots=True)
class PackedView:
    calls: tuple[PackedChunks, ...]
    packing: Packing
    window: int  # A row sees so many tokens, itself included; 0 means all.
    sources: Tensor | None = None  # Each row gets the output of this one, int64 [total]; None: its own.

    def serves(self, scores: Scores) -> bool:
        by_flash = self.packing.attend is None
        return not (by_flash and scores.softcap) and (scores.sinks is None or self.packing.has_sinks)


def gather_plainly(reads: Tensor, num_tokens: int, kv: PagedKv, layer: int) -> tuple[Tensor, Tensor]:
    """Return what gather_kernel.gather_pages does, with torch alone and several launches."""
    pages, first_slots, end_slots, rows = reads.long().unbind(1)
    # With the number given, torch does not wait for the device.
    of_read = torch.repeat_interleave(end_slots - first_slots, output_size=num_tokens)
    slots = torch.arange(num_tokens, device=reads.device) + (first_slots - rows)[of_read]
    keys, values = (numbers[pages[of_read], :, slots].to(kv.compute_dtype) for numbers in kv.layer(layer))
    return keys, values


def is_half(kv: PagedKv) -> bool:
    return kv.compute_dtype in _FLASH_DTYPES


def is_for_flash(kv: PagedKv) -> bool:
    """Return whether flash attention supports the pool's layout, if the GPU is new enough."""
    _, _, _, head_dim, v_head_dim = kv.shape
    return is_half(kv) and v_head_dim == head_dim <= _MOST_FLASH_DIM and head_dim % _FLASH_DIM_STEP == 0


def pack_chunks(placed: Sequence[PlacedRead], kv: PagedKv, packing: Packing, window: int) -> PackedView:
    """Plan the calls; `placed` is in the order of the step. All tables go to the device in one copy."""
    layer_bytes = kv.shape.layer_numbers * kv.compute_dtype.itemsize
    most_tokens = _PACKED_BYTES * kv.shape.page_size // layer_bytes
    groups = list(_neighbours(placed, most_tokens))
    tables = [table for group in groups for table in tables_of(group, kv.shape.page_size)]
    on_device = iter(send(tables, kv.numbers.device))
    calls = tuple(_packed(*each) for each in zip(groups, on_device, on_device, on_device, strict=True))
    return PackedView(calls, packing, window)


def _neighbours(placed: Sequence[PlacedRead], most_tokens: int) -> Iterator[list[PlacedRead]]:
    group: list[PlacedRead] = []
    num_tokens = 0
    for each in placed:
        is_next = not group or each.offset == group[-1].offset + group[-1].length
        if group and (not is_next or num_tokens + each.read.num_tokens > most_tokens):
            yield group
            group, num_tokens = [], 0
        group.append(each)
        num_tokens += each.read.num_tokens
    yield group


def tables_of(group: Sequence[PlacedRead], page_size: int) -> tuple[NDArray[np.int32], ...]:
    starts = np.zeros((2, len(group) + 1), np.int32)
    np.cumsum([[each.length, each.read.num_tokens] for each in group], axis=0, out=starts.T[1:])
    reads = [_reads(each.read, at, page_size) for each, at in zip(group, starts[1].tolist(), strict=False)]
    return starts[0], starts[1], np.concatenate(reads).reshape(-1)


def _reads(read: Read, at: int, page_size: int) -> NDArray[np.int32]:
    num_pages, num_slots = len(read.pages), read.skip + read.num_tokens
    reads = np.empty((num_pages, 4), np.int32)
    first_slots = np.arange(0, num_pages * page_size, page_size)
    reads[:, 0] = read.pages
    reads[:, 1] = 0
    reads[:, 2] = np.minimum(page_size, num_slots - first_slots)
    reads[:, 3] = first_slots + (at - read.skip)
    reads[0, [1, 3]] = read.skip, at
    return reads


def _packed(
    group: Sequence[PlacedRead], row_starts: Tensor, seen_starts: Tensor, reads: Tensor
) -> PackedChunks:
    lengths, seen = [each.length for each in group], [each.read.num_tokens for each in group]
    return PackedChunks(
        rows=slice(group[0].offset, group[0].offset + sum(lengths)),
        row_starts=row_starts,
        seen_starts=seen_starts,
        reads=reads.view(-1, 4),
        longest=max(lengths),
        most_seen=max(seen),
        num_seen=sum(seen),
        are_whole=lengths == seen,
    )


def attend_packed(
    view: PackedView,
    queries: Tensor,
    own: tuple[Tensor, Tensor] | None,
    kv: PagedKv,
    layer: int,
    scores: Scores,
) -> Tensor:
    """Return the attention [total, num_heads, v_head_dim]; rows of no chunk are uninitialized.

    `queries` are [total, num_heads, head_dim]. `own` are the step's K and V [total, num_kv_heads, head_dim],
    where the layer has stored all of them.
    """
    if len(view.calls) == 1 and view.calls[0].rows == slice(0, len(queries)):
        return _attend(view.calls[0], view, queries, own, kv, layer, scores)
    output = queries.new_empty(*queries.shape[:2], kv.shape.v_head_dim)
    for chunks in view.calls:
        output[chunks.rows] = _attend(chunks, view, queries[chunks.rows], own, kv, layer, scores)
    return output


def _attend(
    chunks: PackedChunks,
    view: PackedView,
    queries: Tensor,
    own: tuple[Tensor, Tensor] | None,
    kv: PagedKv,
    layer: int,
    scores: Scores,
) -> Tensor:
    if own is not None and chunks.are_whole and kv.widened is None:
        keys, values = (numbers[chunks.rows] for numbers in own)
    else:
        keys, values = view.packing.gather(chunks.reads, chunks.num_seen, kv, layer)
    return attend_to(chunks, view, queries, keys, values, scores)


def attend_to(
    chunks: PackedChunks, view: PackedView, queries: Tensor, keys: Tensor, values: Tensor, scores: Scores
) -> Tensor:
    """Let the chunks' rows attend to the K and V that they see, [at least num_seen, num_kv_heads, ..]."""
    if view.packing.attend is not None:
        starts = chunks.row_starts, chunks.seen_starts
        return view.packing.attend(queries, keys, values, *starts, chunks.longest, view.window, scores)
    width = values.shape[2]
    if width < keys.shape[2]:  # Flash attention has one width for both.
        values = pad(values, (0, keys.shape[2] - width))
    attended = varlen_attn(
        _aligned(queries),
        _aligned(keys),
        _aligned(values),
        chunks.row_starts,
        chunks.seen_starts,
        chunks.longest,
        chunks.most_seen,
        return_aux=None if scores.sinks is None else AuxRequest(lse=True),
        scale=scores.scaling,
        window_size=(view.window - 1, 0),
        **_FEWER_HEADS,
    )
    if scores.sinks is None:
        output: Tensor = attended[..., :width]
        return output
    output, log_sums = attended
    # The log-sum-exps are [num_heads, total], although torch's documentation states otherwise.
    shares = torch.sigmoid(log_sums - scores.sinks[:, None])
    return output[..., :width].mul_(shares.transpose(0, 1)[..., None])


def _aligned(numbers: Tensor) -> Tensor:
    """Return the numbers in a layout that flash attention supports, which excludes some strides."""
    *strides, last = numbers.stride()
    if last == 1 and not any(at % _FLASH_NUMBERS for at in (*strides, numbers.storage_offset())):
        return numbers
    return numbers.clone(memory_format=torch.contiguous_format)
