#!/usr/bin/env bash
# Triton's interpreter (TRITON_INTERPRET=1), in which kernels are tested without a GPU, converts float32 to smaller
# types otherwise than a GPU and PyTorch, which round to the nearest: to bfloat16 it cuts the lower bits off, and to
# float8_e4m3fn a number that rounds up to a power of two loses the carry and comes out half as large. So a kernel's
# rounding cannot be tested there against PyTorch; float16 is right.
#
# Seen on 2026-11-27:
#   triton 3.7.1, torch 2.13.0
#   bfloat16: 1.01171875 becomes 1.0078125, and 1.015625 in torch
#   float8_e4m3fn: 127.5 becomes 64.0, and 128.0 in torch
#   float16: 2049.5 becomes 2050.0, and 2050.0 in torch
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3.11}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.3.5 2>/dev/null
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps triton==3.7.1 2>/dev/null
cd "$folder"
cat > kernel.py <<'PY'
import sys

import torch
import triton
import triton.language as tl


@triton.jit
def convert(numbers, out):
    i = tl.arange(0, 16)
    tl.store(out + i, tl.load(numbers + i).to(out.dtype.element_ty))


print(f"triton {triton.__version__}, torch {torch.__version__.split('+')[0]}")
seen = []
for dtype, number in ((torch.bfloat16, 1.01171875), (torch.float8_e4m3fn, 127.5), (torch.float16, 2049.5)):
    numbers = torch.full((16,), number)
    out = torch.zeros(16, dtype=dtype)
    convert[(1,)](numbers, out)
    got, right = out[0].item(), numbers.to(dtype)[0].item()
    print(f"{str(dtype).removeprefix('torch.')}: {number} becomes {got}, and {right} in torch")
    seen.append(got == right)
sys.exit(seen != [False, False, True])
PY
TRITON_INTERPRET=1 "$folder/venv/bin/python" kernel.py
