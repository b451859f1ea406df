"""Launch the kernels as a model does, compiling what each would launch on a GPU: steps of all sizes.

    python compile_fused_kernels.py 90

Prints how many kernels there are after each step, then how often those that rotate multiply and add at once.
"""

import sys

import torch
from triton import JITFunction
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from services.engine.torch.model.fused import fused_kernel
from services.engine.torch.model.fused.plain_kernels import NormForm, RotaryForm

NUM_HEADS, NUM_KV_HEADS, DIM, WIDTH, INNER_WIDTH = 20, 10, 128, 2560, 6912
DTYPE = torch.bfloat16


class AbsentDriver:
    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", int(sys.argv[1]), 32)


def step(total):
    numbers = torch.zeros(1, total, WIDTH, dtype=DTYPE)
    for form in (NormForm(1e-6, False, True), NormForm(1.0, False, True)):
        fused_kernel.normalize(numbers, numbers[0, 0], form)
        fused_kernel.add_and_normalize(numbers, numbers, numbers, numbers[0, 0], form)
    product = torch.zeros(1, total, (NUM_HEADS + 2 * NUM_KV_HEADS) * DIM, dtype=DTYPE)
    heads = product[..., : NUM_HEADS * DIM].view(1, total, NUM_HEADS, DIM)
    kv_heads = product[..., NUM_HEADS * DIM : (NUM_HEADS + NUM_KV_HEADS) * DIM]
    kv_heads = kv_heads.view(1, total, NUM_KV_HEADS, DIM)
    weight = torch.zeros(DIM, dtype=DTYPE)
    # Qwen3 norms heads of a token one after another, Gemma 3 tokens of a head.
    for each in (heads, kv_heads, heads.transpose(1, 2), kv_heads.transpose(1, 2)):
        fused_kernel.normalize(each, weight, NormForm(1e-6, True, False))
    fused_kernel.normalize(kv_heads, None, NormForm(1e-6, False, True))
    cos = torch.zeros(1, total, DIM, dtype=DTYPE)
    pairs = [(heads, kv_heads), (heads.contiguous(), kv_heads.contiguous())]
    for query, key in pairs:
        fused_kernel.rotate(query.transpose(1, 2), key.transpose(1, 2), cos, cos, RotaryForm(DIM // 2, True))
    few = torch.zeros(1, total, DIM // 4, dtype=DTYPE)
    fused_kernel.rotate(heads.transpose(1, 2), kv_heads.transpose(1, 2), few, few, RotaryForm(DIM // 8, True))
    none = heads.transpose(1, 2)[:, :0]
    fused_kernel.rotate(heads.transpose(1, 2), none, cos, cos, RotaryForm(DIM // 2, True))
    gate, up = torch.zeros(1, total, 2 * INNER_WIDTH, dtype=DTYPE).split(INNER_WIDTH, -1)
    for activation in ("silu", "gelu_tanh"):
        fused_kernel.activate(gate, up, activation)


def main():
    launch = JITFunction.run
    JITFunction.run = lambda kernel, *arguments, warmup, **named: launch(
        kernel, *arguments, warmup=True, **named
    )
    driver.set_active(AbsentDriver())
    for total in (1, 2, 3, 16, 17, 512):
        step(total)
        names = ("_normalize", "_rotate", "_activate", "_add_and_normalize")
        kernels = [getattr(fused_kernel, name) for name in names]
        print(*(len(kernel.device_caches[0][0]) for kernel in kernels))
    rotations = fused_kernel._rotate.device_caches[0][0].values()
    print(sum(each.asm["ptx"].count("fma.") for each in rotations))


if __name__ == "__main__":
    main()
