"""A Triton kernel copies the K and V that prompts see out of their pages and packs them, on a GPU.

Each program copies K and V of one page and one KV head; a latent has no V. It only widens numbers of pages
whose type is smaller than the model's, which is exact. Values that change from step to step do not specialize
the kernel, as in gpu_attention_kernel.py.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.engine.torch.attention.paged_kv import PagedKv, PageShape

# A program holds so many numbers of K, or of V, at a time.
_TILE_NUMBERS = 4096
_NUM_WARPS = 4


@triton.jit(do_not_specialize=["layer", "num_layers"], do_not_specialize_on_alignment=["reads"])
def _gather_page(
    kv,
    reads,
    keys,
    values,
    layer,
    num_layers,
    NUM_KV_HEADS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    V_COLUMNS: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Program (i, k) copies reads[i] = (page, first, end, row) of KV head k.

    Slots [first, end) go to the rows from row on.
    """
    read = reads + tl.program_id(0) * 4
    kv_head = tl.program_id(1)
    page = tl.load(read).to(tl.int64)
    first, end = tl.load(read + 1), tl.load(read + 2)
    first_row = tl.load(read + 3).to(tl.int64)
    columns, v_columns = tl.arange(0, COLUMNS), tl.arange(0, V_COLUMNS)
    of_layer = (page * num_layers + layer) * (NUM_KV_HEADS * PAGE_SIZE * (HEAD_DIM + V_HEAD_DIM))
    keys_from = kv + of_layer + kv_head * PAGE_SIZE * HEAD_DIM
    values_from = kv + of_layer + NUM_KV_HEADS * PAGE_SIZE * HEAD_DIM + kv_head * PAGE_SIZE * V_HEAD_DIM
    for start in range(first, end, SLOTS):
        slots = start + tl.arange(0, SLOTS)
        places = (first_row + slots - first) * NUM_KV_HEADS + kv_head
        is_slot = slots[:, None] < end
        is_key = is_slot & (columns[None, :] < HEAD_DIM)
        of_keys = tl.load(keys_from + slots[:, None] * HEAD_DIM + columns[None, :], mask=is_key)
        keys_to = keys + places[:, None] * HEAD_DIM + columns[None, :]
        tl.store(keys_to, of_keys.to(keys.dtype.element_ty), mask=is_key)
        if V_HEAD_DIM:
            is_value = is_slot & (v_columns[None, :] < V_HEAD_DIM)
            of_values = tl.load(values_from + slots[:, None] * V_HEAD_DIM + v_columns[None, :], mask=is_value)
            values_to = values + places[:, None] * V_HEAD_DIM + v_columns[None, :]
            tl.store(values_to, of_values.to(values.dtype.element_ty), mask=is_value)


def gather_pages(reads: Tensor, num_tokens: int, kv: PagedKv, layer: int) -> tuple[Tensor, Tensor]:
    """Return K and V, [num_tokens, num_kv_heads, ..], of `reads`, int32 [num_reads, 4] (see PackedChunks)."""
    num_layers, num_kv_heads, _, head_dim, v_head_dim = kv.shape
    keys = kv.numbers.new_empty(num_tokens, num_kv_heads, head_dim, dtype=kv.compute_dtype)
    values = kv.numbers.new_empty(num_tokens, num_kv_heads, v_head_dim, dtype=kv.compute_dtype)
    constants = page_constants(kv.shape)
    with torch.cuda.device_of(kv.numbers):  # Triton launches on the current device.
        _gather_page[len(reads), num_kv_heads](
            kv.numbers, reads, keys, values, layer, num_layers, **constants, num_warps=_NUM_WARPS
        )
    return keys, values


@cache
def page_constants(shape: PageShape) -> dict[str, int]:
    _, num_kv_heads, page_size, head_dim, v_head_dim = shape
    columns, v_columns = triton.next_power_of_2(head_dim), triton.next_power_of_2(max(1, v_head_dim))
    return {
        "NUM_KV_HEADS": num_kv_heads,
        "PAGE_SIZE": page_size,
        "HEAD_DIM": head_dim,
        "V_HEAD_DIM": v_head_dim,
        "COLUMNS": columns,
        "V_COLUMNS": v_columns,
        "SLOTS": min(triton.next_power_of_2(page_size), max(1, _TILE_NUMBERS // max(columns, v_columns))),
    }
