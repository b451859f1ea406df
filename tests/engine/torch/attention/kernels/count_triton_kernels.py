"""Attend to steps that differ in all that can differ, compiling what each would launch on a GPU.

Prints how many kernels there are after each step.
"""

import torch
from triton import JITFunction
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from engine.torch.attention.paging import paged, reach_view_of
from services.engine.paged.model_runner import Chunk
from services.engine.torch.attention import gpu_attention_kernel
from services.engine.torch.attention.page_pieces import OnDevice
from services.engine.torch.attention.paged_kv import Scores
from services.values.request import SamplingParams

NUM_HEADS = 8
SCORES = (
    Scores(0.125),
    Scores(1.0, softcap=50.0),
    Scores(0.125, sinks=torch.zeros(NUM_HEADS)),
    Scores(1.0, 1.0),
)


class AbsentDriver:
    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)


def single_token(end, pages):
    return Chunk([0], end - 1, pages, sample=False, sampling=SamplingParams())


def attend(kv, chunks, layer, scores):
    pool = paged(kv)
    on_device = OnDevice(gpu_attention_kernel.attend_parts, NUM_HEADS, num_programs=264)
    view = reach_view_of(pool, chunks, on_device).decode
    query = torch.zeros(len(chunks), NUM_HEADS, kv.shape[5], dtype=kv.dtype)
    gpu_attention_kernel.attend_parts(view, query, pool, layer, scores, torch.empty_like(query))
    keys = torch.zeros(1, len(chunks), kv.shape[3], kv.shape[5], dtype=kv.dtype)
    for ids in (torch.int64, torch.int32):
        rows = torch.zeros(len(chunks), dtype=ids)
        for numbers in (keys[0], keys.transpose(1, 2).contiguous()[0].transpose(0, 1)):
            gpu_attention_kernel.store_kv(numbers, numbers, pool, layer, rows, rows, rows)


def main():
    launch = JITFunction.run
    JITFunction.run = lambda kernel, *arguments, warmup, **named: launch(
        kernel, *arguments, warmup=True, **named
    )
    driver.set_active(AbsentDriver())
    kv = torch.zeros(64, 16, 2, 2, 16, 64, dtype=torch.bfloat16)
    first = [single_token(17 + i % 16, [0, 1 + i]) for i in range(20)]
    steps = [
        # The layer, the number of narrow parts, and lengths of tables: 0, 1, many, and multiples of 16.
        *((kv, first, layer) for layer in (0, 1, 15, 16)),
        *((kv, first[:count], 0) for count in (1, 2, 7, 16)),
        *((kv, [single_token(16 * i + 1, list(range(i + 1)))], 1) for i in (0, 1, 31)),
        *((kv[:, :num_layers].contiguous(), first, 0) for num_layers in (1, 3)),
    ]
    for i, (pool, chunks, layer) in enumerate(steps):
        attend(pool, chunks, layer, SCORES[i % len(SCORES)])
        kernels = (
            gpu_attention_kernel._attend_part,
            gpu_attention_kernel._join_parts,
            gpu_attention_kernel._store_kv,
        )
        print(sum(len(kernel.device_caches[0][0]) for kernel in kernels))


if __name__ == "__main__":
    main()
