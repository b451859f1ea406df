#!/usr/bin/env bash
# num_stages of a Triton loop asks for tiles to be fetched ahead. Where the loop first loads a page's number and then
# the tile of that page, the page number takes the stages for itself: with 2, 3 and 4 stages the compiled kernel has
# one tile in shared memory, and 4 bytes of page numbers from 3 stages on. So the next tile is asked for only when that
# one is read. A loop that loads the next round's page
# number, and carries it along, gets a tile more for each stage. Paged attention is such a loop. Nothing is launched
# here: the kernels are compiled for compute capability 9.0, which needs no GPU.
#
# Seen on 2026-11-27:
#   triton 3.7.1
#   page number loaded in its own round: shared memory 10240, 10244, 10244 bytes with 2, 3, 4 stages
#   page number carried from the round before: shared memory 10240, 18432, 26624 bytes with 2, 3, 4 stages
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
def own_round(query, pool, pages, out, num_pages):
    rows, columns, slots = tl.arange(0, 16), tl.arange(0, 64), tl.arange(0, 64)
    queries = tl.load(query + rows[:, None] * 64 + columns[None, :])
    total = tl.zeros([16, 64], tl.float32)
    for nth in range(0, num_pages):
        page = tl.load(pages + nth).to(tl.int64)
        tile = tl.load(pool + page * 4096 + slots[None, :] * 64 + columns[:, None])
        total += tl.dot(queries, tile)
    tl.store(out + rows[:, None] * 64 + slots[None, :], total)


@triton.jit
def round_before(query, pool, pages, out, num_pages):
    rows, columns, slots = tl.arange(0, 16), tl.arange(0, 64), tl.arange(0, 64)
    queries = tl.load(query + rows[:, None] * 64 + columns[None, :])
    total = tl.zeros([16, 64], tl.float32)
    following = tl.load(pages)
    for nth in range(0, num_pages):
        page = following.to(tl.int64)
        following = tl.load(pages + tl.minimum(nth + 1, num_pages - 1))
        tile = tl.load(pool + page * 4096 + slots[None, :] * 64 + columns[:, None])
        total += tl.dot(queries, tile)
    tl.store(out + rows[:, None] * 64 + slots[None, :], total)


def shared(kernel, stages):
    types = {"query": "*bf16", "pool": "*bf16", "pages": "*i32", "out": "*fp32", "num_pages": "i32"}
    aligned = {(nth,): [["tt.divisibility", 16]] for nth in range(4)}
    source = ASTSource(kernel, signature=types, attrs=aligned)
    options = {"num_stages": stages, "num_warps": 4}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).metadata.shared


print("triton", triton.__version__)
seen = {}
for what, kernel in {"loaded in its own round": own_round, "carried from the round before": round_before}.items():
    seen[what] = own = [shared(kernel, stages) for stages in (2, 3, 4)]
    print(f"page number {what}: shared memory {', '.join(map(str, own))} bytes with 2, 3, 4 stages")
own, before = seen.values()
sys.exit(not (own[2] - own[0] < 64 and before[0] + 8192 == before[1] == before[2] - 8192))
PY
"$folder/venv/bin/python" kernel.py
