"""Launch the kernels for stored weights as layers do, compiling what each would launch on a GPU.

    python compile_stored_kernels.py 90

Prints, for each kernel, how many variants there are and the most shared memory of one, as JSON.
"""

import json
import sys

import torch
from triton import JITFunction
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from services.engine.torch.quantized import stored_kernel
from services.engine.torch.quantized.dequantize import Grouped
from services.engine.torch.quantized.stored_products import Int4Weight

CAPABILITY = int(sys.argv[1])
HAS_FLOAT8 = CAPABILITY >= 89  # Triton has these floats from there on.
NAMES = ("_round_row", "_round_groups", "_multiply", "_join", "_dequantize")


class AbsentDriver:
    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", CAPABILITY, 32)


def weight_of(num_rows, depth, size):
    points, scale = (
        torch.zeros(num_rows, depth // size, dtype=torch.int32),
        torch.ones(num_rows, depth // size),
    )
    own = Grouped(torch.zeros(num_rows, depth, dtype=torch.int32), points, scale, 4, None)
    return Int4Weight.of([(0, own)], num_rows, depth)


def main():
    launch = JITFunction.run
    JITFunction.run = lambda kernel, *arguments, warmup, **named: launch(
        kernel, *arguments, warmup=True, **named
    )
    driver.set_active(AbsentDriver())
    # A tile's steps are shared among programs, or not.
    weights = [weight_of(64, 2560, 128), weight_of(200, 1280, 64), weight_of(6400, 2560, 128)]
    for num_rows in (1, 2, 16, 17, 33, 64):
        rows = torch.zeros(num_rows, 2560, dtype=torch.bfloat16)
        if HAS_FLOAT8:
            stored_kernel.round_rows(rows)
            stored_kernel.round_groups(rows)
        for weight in weights:
            stored_kernel.multiply(rows[:, : weight.depth].contiguous(), weight)
    for weight in weights:
        stored_kernel.dequantize(weight, torch.bfloat16)
    kernels = {}
    for name in NAMES:
        made = getattr(stored_kernel, name).device_caches[0][0].values()
        kernels[name] = (len(made), max((each.metadata.shared for each in made), default=0))
    print(json.dumps(kernels))


if __name__ == "__main__":
    main()
