"""Compile the kernel that gathers prompts for GPUs, down to their machine code.

    python compile_gather_kernel.py '[[90, "bf16", "bf16", 64, 128, 128], ...]'
    compute capability, dtypes of the pool and of the model, page size, dimensions of K and of V

Prints the shared memory of each, as JSON.
"""

import json
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from services.engine.torch.attention.gather_kernel import _gather_page, page_constants
from services.engine.torch.attention.paged_kv import PageShape


def compiled(capability, dtype, wide_dtype, page_size, head_dim, v_head_dim):
    constants = page_constants(PageShape(1, 2, page_size, head_dim, v_head_dim))
    types = {"kv": f"*{dtype}", "reads": "*i32"} | dict.fromkeys(("keys", "values"), f"*{wide_dtype}")
    types |= {"layer": "i32", "num_layers": "i32"} | dict.fromkeys(constants, "constexpr")
    names = _gather_page.arg_names
    aligned = {
        (i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name in ("kv", "keys", "values")
    }
    source = ASTSource(_gather_page, {name: types[name] for name in names}, constants, aligned)
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 4})
    assert made.asm["cubin"]
    return made.metadata.shared


if __name__ == "__main__":
    print(json.dumps([compiled(*case) for case in json.loads(sys.argv[1])]))
