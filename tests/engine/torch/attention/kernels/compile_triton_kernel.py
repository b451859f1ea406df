"""Compile the attention kernels for GPUs, down to their machine code.

    python compile_triton_kernel.py '[[90, "bfloat16", 128, 128, 4, 64], ...]'
    compute capability, the pool's dtype, dimensions of K and of V, heads to a KV head, tokens of a page

Prints what became of each kernel, as JSON.
"""

import json
import sys

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from services.engine.torch.attention import gpu_attention_kernel
from services.engine.torch.attention.page_pieces import TUNING, rows_of
from services.engine.torch.attention.paged_kv import PagedKv, PageShape

NUM_KV_HEADS = 2
NUMBER_POINTERS = ("query", "joined", "keys", "values")
POINTERS = {"outputs": "*fp32", "log_sums": "*fp32"}  # aligned
STRIDES = ("key_row", "key_head", "value_row", "value_head")
NUMBERS = dict.fromkeys(("layer", "num_layers", *STRIDES), "i32") | {"scaling": "fp32", "softcap": "fp32"}
SHORT = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float8_e4m3fn: "*fp8e4nv",
}


def compiled(kernel, capability, kv, constants, **options):
    """Compile as at a launch with torch's own tensors, which start at multiples of 16 bytes."""
    numbers = dict.fromkeys(NUMBER_POINTERS, SHORT[kv.compute_dtype]) | {"kv": SHORT[kv.numbers.dtype]}
    signature = {name: "*i32" for name in kernel.arg_names} | numbers
    signature |= POINTERS | {"sinks": "*fp32"} | NUMBERS | dict.fromkeys(constants, "constexpr")
    signature = {name: signature[name] for name in kernel.arg_names}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(kernel.arg_names)
        if name in ("kv", "keys", "values", *POINTERS)
    }
    source = ASTSource(kernel, signature, constants, aligned)
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return {
        "constants": str(constants),
        "cubin_bytes": len(made.asm["cubin"]),
        "shared_bytes": made.metadata.shared,
    }


def all_kernels(cases):
    for capability, dtype, head_dim, v_head_dim, group, page_size in cases:
        shape = PageShape(1, NUM_KV_HEADS, page_size, head_dim, v_head_dim)
        widened = torch.bfloat16 if dtype == "float8_e4m3fn" else None
        kv = PagedKv(torch.empty(shape.page_numbers, dtype=getattr(torch, dtype)), shape, widened)
        for is_wide, rows in enumerate(rows_of(kv, NUM_KV_HEADS * group)):
            heads = NUM_KV_HEADS * group
            constants = gpu_attention_kernel.part_constants(
                shape, gpu_attention_kernel._factor(kv), heads, rows, is_wide
            )
            num_stages = TUNING.wide_stages if is_wide else TUNING.num_stages
            options = {"num_warps": TUNING.num_warps, "num_stages": num_stages}
            yield compiled(gpu_attention_kernel._attend_part, capability, kv, constants, **options)
        constants = {name: constants[name] for name in ("V_HEAD_DIM", "V_COLUMNS")}
        yield compiled(gpu_attention_kernel._join_parts, capability, kv, constants)
        constants = gpu_attention_kernel.store_constants(shape) | {"ROUNDS": widened is not None}
        yield compiled(gpu_attention_kernel._store_kv, capability, kv, constants)


if __name__ == "__main__":
    print(json.dumps(list(all_kernels(json.loads(sys.argv[1])))))
