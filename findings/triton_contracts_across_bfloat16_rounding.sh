#!/usr/bin/env bash
# A Triton kernel that rounds each of two products to bfloat16 before it adds them is compiled into a fused
# multiply-add of bfloat16 pairs, and so one of the products is never rounded: the rounding that the source states is
# gone, and with it the bits of a definition that rounds there (rotary embeddings in PyTorch do).
# enable_fp_fusion=False keeps both. Nothing is launched here: the kernel is compiled to PTX, which needs no GPU.
#
# Seen on 2026-11-27:
#   triton 3.7.1
#   capability 80: fused bfloat16 multiply-adds some
#   capability 90: fused bfloat16 multiply-adds some
#   capability 90, enable_fp_fusion=False: fused bfloat16 multiply-adds 0
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3.11}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps triton==3.7.1 2>/dev/null
cd "$folder"
export TRITON_CACHE_DIR="$folder/cache"
cat > kernel.py <<'PY'
import sys

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def two_products(a, b, c, d, out):
    i = tl.arange(0, 128)
    first = (tl.load(a + i).to(tl.float32) * tl.load(b + i).to(tl.float32)).to(tl.bfloat16).to(tl.float32)
    second = (tl.load(c + i).to(tl.float32) * tl.load(d + i).to(tl.float32)).to(tl.bfloat16).to(tl.float32)
    tl.store(out + i, (first + second).to(tl.bfloat16))


def fused(capability, **options):
    source = ASTSource(two_products, signature=dict.fromkeys("abcd", "*bf16") | {"out": "*bf16"})
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return compiled.asm["ptx"].count("fma.rn.bf16")


print("triton", triton.__version__)
seen = [fused(80), fused(90), fused(90, enable_fp_fusion=False)]
for what, count in zip(("80", "90", "90, enable_fp_fusion=False"), seen, strict=True):
    print(f"capability {what}: fused bfloat16 multiply-adds {'some' if count else 0}")
sys.exit([bool(count) for count in seen] != [True, True, False])
PY
"$folder/venv/bin/python" kernel.py
