"""Compile the kernel by which prompts attend for GPUs of one compute capability, down to their machine code.

    python compile_prompt_kernel.py 90 '[["bf16", 128, 128], ...]'
    dtype, dimensions of K and of V

Prints the shared memory of each, as JSON.
"""

import json
import sys

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from services.engine.torch.attention.prompt_kernel import _NUM_STAGES, _attend_rows, row_constants, warps_of

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
NUMBERS = ("query", "keys", "values", "output")
TABLES = {"row_starts": "*i32", "seen_starts": "*i32", "sinks": "*fp32", "scaling": "fp32", "softcap": "fp32"}


def compiled(capability, dtype, head_dim, v_head_dim):
    constants = row_constants(8, 4, head_dim, v_head_dim, DTYPES[dtype])
    names = _attend_rows.arg_names
    types = dict.fromkeys(names, "i32") | dict.fromkeys(NUMBERS, f"*{dtype}") | TABLES
    types |= dict.fromkeys(constants, "constexpr")
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name in NUMBERS}
    source = ASTSource(_attend_rows, {name: types[name] for name in names}, constants, aligned)
    options = {"num_warps": warps_of(head_dim, v_head_dim), "num_stages": _NUM_STAGES}
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    assert made.asm["cubin"]
    return made.metadata.shared


if __name__ == "__main__":
    print(json.dumps([compiled(int(sys.argv[1]), *case) for case in json.loads(sys.argv[2])]))
