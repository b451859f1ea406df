"""This benchmark measures what steps are made of, each alone.

    python -m bench.gpu.pieces --json FILE [--device cuda] [--cells draft sampling tiers]

    draft      a round of a draft model (draft_rounds.py)
    sampling   choosing tokens of a large vocabulary, as in bench.engine
    tiers      slots between a pool on the device and a tier in memory (tier_copies.py)

What matters most for a step comes first.
"""

from functools import partial

import torch

from bench import engine
from bench.device import CPU, device_named
from bench.gpu.cells import Cell, run_cells
from bench.gpu.draft_rounds import draft_rows
from bench.gpu.tier_copies import tier_rows
from bench.interrupts import end_as_by_ctrl_c
from bench.report import Row, parser_of

SAMPLING_ROUNDS = 7


def sampling(device: torch.device) -> list[Row]:
    if device.type == "cpu":
        engine.SAMPLING_VOCAB_SIZE, engine.SAMPLING_BATCHES = 2000, (2, 3)
    plan = engine.Plan((1,), (64,), (64,), SAMPLING_ROUNDS, 64, 64)
    return engine.sampling_rows(plan, 1, device)


def draft(device: torch.device) -> list[Row]:
    if device.type == "cpu":
        return draft_rows(device, (1, 2), 64)
    return draft_rows(device, (1, 16), 2048)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--device", type=device_named, default=CPU, help="cpu (default), cuda or cuda:N")
    parser.add_argument("--cells", nargs="+", help="these, by their names; default: all")
    parser.add_argument("--num-threads", type=int, default=4)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.num_threads)
    measures = {
        "draft": draft,
        "sampling": sampling,
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
