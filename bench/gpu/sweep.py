"""The Triton kernel for single tokens is measured under other constants than those it has.

A measure is the attention of all layers of a pool, in one CUDA graph, so nothing is still in the L2 cache.
Rows have no page in common.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from itertools import product
from statistics import median
from typing import Any

import numpy as np
import torch

from bench.engine import FIRST_ID, GREEDY, seconds
from bench.gpu.captured import Captured, finish
from bench.report import Row
from services.engine.paged.model_runner import Chunk
from services.engine.torch.attention.page_pieces import AttendParts, OnDevice, pieces_of, view_parts
from services.engine.torch.attention.paged_kv import PagedKv, PageShape, Scores
from services.engine.torch.attention.step_view import Reach, read_of
from services.values.kv import PageId

_KERNEL = "services.engine.torch.attention.gpu_attention_kernel"
_TIMED = 5


@dataclass(frozen=True, slots=True)
class Constants:
    """None is what the kernel has by itself."""

    stages: int | None = None
    warps: int | None = None
    slots: int | None = None


@dataclass(frozen=True, slots=True)
class Heads:
    query: int
    kv: int
    dim: int = 128


GRID = [Constants(*each) for each in product((2, 3, 4), (4, 8), (64, 128))]
FLOAT8_GRID = [Constants(*each) for each in product((2, 3, 4, 5), (4, 8), (64, 128))]
OWN = Constants()


def sweep_rows(
    heads: Heads,
    batches: Sequence[int],
    context: int,
    settings: Sequence[Constants],
    programs: Sequence[int],
    device: torch.device,
    num_layers: int = 18,
    page_size: int = 64,
    in_float8: bool = False,
) -> list[Row]:
    """Return a row for each batch, setting and number of programs a processor; K and V may be `in_float8`."""
    room = context // page_size + 1
    shape = PageShape(num_layers, heads.kv, page_size, heads.dim, heads.dim)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    numbers = torch.empty(max(batches) * room * shape.page_numbers, dtype=dtype, device=device)
    kv = PagedKv(numbers.normal_(), shape)
    if in_float8:
        kv = PagedKv(numbers.to(torch.float8_e4m3fn), shape, dtype)
    rows = []
    for setting, batch, per_processor in product(settings, batches, programs):
        rows.append(_row(heads, kv, batch, context, setting, per_processor))
    return rows


def best_of(rows: Sequence[Row], num_best: int) -> list[Row]:
    """Return for each batch the kernel's own constants, and those that were fastest."""
    kept: list[Row] = []
    for batch in dict.fromkeys(row["rows"] for row in rows):
        own = sorted(
            (row for row in rows if row["rows"] == batch and isinstance(row["us a layer"], float)),
            key=lambda row: float(str(row["us a layer"])),
        )
        best = own[:num_best]
        kept += best + [row for row in own if row["constants"] == "own" and row not in best]
    return kept


def best_constants(rows: Sequence[Row], num_best: int) -> list[Constants]:
    """Return those that lose least against the fastest of each batch, over all batches."""
    fastest: dict[object, float] = {}
    of_setting: dict[Any, dict[object, float]] = {}
    for row in rows:
        if isinstance(took := row["us a layer"], float):
            batch = row["rows"]
            fastest[batch] = min(took, fastest.get(batch, took))
            own = of_setting.setdefault(row["setting"], {})
            own[batch] = min(took, own.get(batch, took))
    losses = {
        setting: sum(took / fastest[batch] for batch, took in own.items())
        for setting, own in of_setting.items()
        if len(own) == len(fastest) and setting != OWN
    }
    return sorted(losses, key=lambda setting: losses[setting])[:num_best]


def attending(setting: Constants) -> AttendParts:
    """Return the kernel that is launched with these constants."""
    kernel = import_module(_KERNEL)
    tile_bytes = None if setting.slots is None else 256 * setting.slots
    changed = {
        "num_stages": setting.stages,
        "num_warps": setting.warps,
        "max_slots": setting.slots,
        "tile_bytes": tile_bytes,
    }
    tuning = replace(kernel.TUNING, **{name: value for name, value in changed.items() if value is not None})
    return partial(kernel.attend_parts, tuning=tuning)


def _row(heads: Heads, kv: PagedKv, batch: int, context: int, setting: Constants, per_processor: int) -> Row:
    row: Row = {
        "heads": f"{heads.query}/{heads.kv}" + " fp8" * (kv.widened is not None),
        "rows": batch,
        "constants": "own" if setting == OWN else f"{setting.stages} {setting.warps} {setting.slots}",
        "programs": per_processor,
    }
    try:
        took_s = _layer_s(heads, kv, batch, context, attending(setting), per_processor)
    except Exception as error:  # there may be too little shared memory, say
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:60]
        return row | {"us a layer": reason, "GB/s": 0.0, "setting": setting}
    moved = batch * (context + 1) * heads.kv * 2 * heads.dim * kv.numbers.itemsize
    return row | {"us a layer": 1e6 * took_s, "GB/s": moved / took_s / 1e9, "setting": setting}


@torch.inference_mode()
def _layer_s(
    heads: Heads, kv: PagedKv, batch: int, context: int, attend_parts: AttendParts, per_processor: int
) -> float:
    device, page_size, num_layers = kv.numbers.device, kv.shape.page_size, kv.shape.num_layers
    on_cuda = device.type == "cuda"
    processors = torch.cuda.get_device_properties(device).multi_processor_count if on_cuda else 4
    room = context // page_size + 1
    # Pages of different rows lie between each other, as in a pool that has been used for a while.
    tables = [[PageId(nth * batch + row) for nth in range(room)] for row in range(batch)]
    chunks = [Chunk([FIRST_ID], context, table, True, GREEDY) for table in tables]
    pieces = pieces_of([read_of(chunk, Reach(0), page_size) for chunk in chunks], page_size)
    chosen = OnDevice(attend_parts, heads.query, per_processor * processors)
    view = view_parts(kv, np.arange(batch), pieces, chosen)
    query = torch.randn(batch, heads.query, heads.dim, dtype=kv.numbers.dtype, device=device)
    output, scores = torch.empty_like(query), Scores(heads.dim**-0.5, None, None)

    def attend() -> None:
        for layer in range(num_layers):
            attend_parts(view, query, kv, layer, scores, output)

    captured = Captured(attend, device)

    def run() -> None:
        captured.replay()
        finish(device)

    run()
    return median(seconds(run) for _ in range(_TIMED)) / num_layers
