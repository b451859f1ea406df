"""This benchmark measures what steps are made of, each alone.

    python -m bench.gpu.pieces --json FILE [--device cuda] [--cells matmuls draft sampling attention tiers]

    matmuls    the model's products, and a copy: what the device can do at most (products.py)
    draft      a round of a draft model (draft_rounds.py)
    sampling   choosing tokens of a large vocabulary, as in bench.engine
    attention  the kernel for single tokens under other constants (sweep.py)
    tiers      slots between a pool on the device and a tier in memory (tier_copies.py)

What matters most for a step comes first.
"""

from functools import partial

import torch

from bench import engine
from bench.device import CPU, device_named
from bench.gpu.cells import Cell, run_cells
from bench.gpu.draft_rounds import draft_rows
from bench.gpu.model import dtype_on, size_on
from bench.gpu.products import ROWS, copy_row, product_rows
from bench.gpu.sweep import FLOAT8_GRID, GRID, OWN, Heads, best_constants, best_of, sweep_rows
from bench.gpu.tier_copies import tier_rows
from bench.interrupts import end_as_by_ctrl_c
from bench.report import Row, parser_of

SAMPLING_ROUNDS = 7


def matmuls(device: torch.device) -> list[Row]:
    rows = ROWS if device.type == "cuda" else ROWS[:1]
    products = product_rows(rows, size_on(device).hidden, device, dtype_on(device))
    return [copy_row(device), *products]


def sampling(device: torch.device) -> list[Row]:
    if device.type == "cpu":
        engine.SAMPLING_VOCAB_SIZE, engine.SAMPLING_BATCHES = 2000, (2, 3)
    plan = engine.Plan((1,), (64,), (64,), SAMPLING_ROUNDS, 64, 64)
    return engine.sampling_rows(plan, 1, device)


def draft(device: torch.device) -> list[Row]:
    if device.type == "cpu":
        return draft_rows(device, (1, 2), 64)
    return draft_rows(device, (1, 16), 2048)


def attention(device: torch.device) -> list[Row]:
    if device.type == "cpu":
        return told(sweep_rows(Heads(4, 2, 16), (1, 2), 40, [OWN, GRID[0]], (2,), device, 2, 16), 2)
    batches, programs = (1, 16, 64), (2, 4, 6)
    model = sweep_rows(Heads(20, 10), batches, 2048, [OWN, *GRID], programs, device)
    torch.cuda.empty_cache()
    best = best_constants(model, 3)
    other = sweep_rows(Heads(32, 8), batches, 2048, [OWN, *best], programs, device)
    torch.cuda.empty_cache()
    float8 = sweep_rows(Heads(20, 10), batches, 2048, [OWN, *FLOAT8_GRID], (2, 4), device, in_float8=True)
    return told(model, 2) + told(other, 2) + told(float8, 5)


def told(rows: list[Row], num_best: int) -> list[Row]:
    """Return what is to be printed: the fastest, the kernel's own, and what could not run."""
    failed = [row for row in rows if not isinstance(row["us a layer"], float)]
    return [
        {name: value for name, value in row.items() if name != "setting"}
        for row in [*best_of(rows, num_best), *failed[:3]]
    ]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--device", type=device_named, default=CPU, help="cpu (default), cuda or cuda:N")
    parser.add_argument("--cells", nargs="+", help="these, by their names; default: all")
    parser.add_argument("--num-threads", type=int, default=4)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.num_threads)
    measures = {
        **{"matmuls": matmuls, "draft": draft, "sampling": sampling, "attention": attention},
        "tiers": tier_rows,
    }
    cells = [
        Cell(name, name, partial(measure, arguments.device))
        for name, measure in measures.items()
        if not arguments.cells or name in arguments.cells
    ]
    run_cells("pieces", cells, arguments.json, arguments.device, {"cells": arguments.cells})


if __name__ == "__main__":
    end_as_by_ctrl_c()
    main()
