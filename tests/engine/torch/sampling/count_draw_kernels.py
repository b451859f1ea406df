"""Draw from rows that differ in all that can differ, compiling what each launch would on a GPU.

    python count_draw_kernels.py 90

Prints how many kernels there are after each launch, by dtypes of logits.
"""

import sys

import torch
from triton import JITFunction
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from services.engine.torch.sampling import draw_kernels
from services.engine.torch.sampling.draw_kernels import FIELDS, Scratch, launch

VOCAB_SIZE = 50_257
KERNELS = [each for each in vars(draw_kernels).values() if isinstance(each, JITFunction)]


class AbsentDriver:
    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", int(sys.argv[1]), 32)


def main():
    run = JITFunction.run
    JITFunction.run = lambda kernel, *arguments, warmup, **named: run(
        kernel, *arguments, warmup=True, **named
    )
    driver.set_active(AbsentDriver())
    table, chosen = torch.zeros(40, FIELDS, dtype=torch.float64), torch.zeros(40, dtype=torch.int64)
    scratch = Scratch.of(40, VOCAB_SIZE, table.device)
    for dtype in (torch.bfloat16, torch.float64):
        logits = torch.zeros(40, VOCAB_SIZE, dtype=dtype)
        for first, end, cuts in [(0, 40, True), (0, 1, True), (1, 2, False), (3, 19, True), (16, 32, False)]:
            launch(logits[: 1 + end], table[first:end], chosen[first:end], scratch, cuts=cuts)
            print(sum(len(kernel.device_caches[0][0]) for kernel in KERNELS))


if __name__ == "__main__":
    main()
