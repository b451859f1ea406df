"""Random conversations through small clusters of real torch ranks, every token checked against transformers.

    make fuzz MINUTES=5 SEED=1 JSON=FILE

Each round draws a cluster (checkpoint, page size, pool, chunks, plans, ranks, caches, transport) and asks it
for turns and branches of a tree of conversations, sampled in every way; some clients leave, in some rounds
ranks are killed all the while, in some the pools are so small that sequences are retracted, in some small
tiers keep what they evict, perhaps in files that all ranks read, and in some ranks pull all that others hold.
An answer is judged by teacher forcing: one forward pass of transformers over prompt and answer, and a plain
sampler that chooses from its logits (tests/exactness/plain_sampling.py). Log-probabilities, usage and the
reason of the end are checked too, and after each round the books.

All is in one process: etcd, router, ranks, gRPC between them. What is drawn follows from the seed; what meets
what does not. A round of seed N is drawn from N, the next one from N + 1.
"""

import argparse
import asyncio
import logging
import os
import random
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch

from bench.report import Row, table, verdict, write_json
from fuzz.round import Round
from fuzz.setup import draw_setup
from services.etcd.embedded import EmbeddedEtcd

GOALS = (
    ("answers", ">=", 1.0),
    ("wrong", "<=", 0.0),
    ("lost", "<=", 0.0),
    ("unbalanced", "<=", 0.0),
)
COUNTS = (
    *("rounds", "requests", "answers", "unfinished", "tokens", "remote", "local"),
    *(
        "pulled",
        "stored",
        "read",
        "shared",
        "kills",
        "moves",
        "retractions",
        "near_ties",
        "wrong",
        "lost",
        "unbalanced",
    ),
)
REQUESTS_A_ROUND = 60


async def fuzz(seed: int, minutes: float) -> tuple[Row, list[str]]:
    """Counts by name, and what went wrong in sentences."""
    counts: Counter[str] = Counter()
    faults: list[str] = []
    over = time.monotonic() + 60 * minutes
    with tempfile.TemporaryDirectory(prefix="isthmus-fuzz-") as folder:
        os.environ["ISTHMUS_TEST_CHECKPOINTS"] = f"{folder}/checkpoints"
        etcd = EmbeddedEtcd(Path(folder) / "etcd")
        await etcd.start()
        try:
            while time.monotonic() < over:
                played = await _play(etcd.endpoint, seed + counts["rounds"])
                counts += played.counts + Counter(rounds=1)
                faults += played.faults
        finally:
            await etcd.stop()
    return {name: counts[name] for name in COUNTS}, faults


async def _play(etcd: str, seed: int) -> Round:
    chance = random.Random(seed)
    played = Round(draw_setup(chance), chance, f"round of seed {seed}")
    began = time.monotonic()
    try:
        await played.play(etcd, f"fuzz-{seed}", REQUESTS_A_ROUND)
    except Exception as error:
        error.add_note(f"in the round of seed {seed}: {played.setup}")
        raise
    counts = " ".join(f"{name}={played.counts[name]}" for name in COUNTS if played.counts[name])
    print(f"seed {seed} {time.monotonic() - began:5.1f} s  {played.setup}\n    {counts}", flush=True)
    print("".join(f"    FAULT {fault}\n" for fault in played.faults), end="", flush=True)
    return played


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=5.0, help="rounds begin until these are over")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)  # of ranks that are killed
    torch.set_num_threads(1)
    row, faults = asyncio.run(fuzz(arguments.seed, arguments.minutes))
    judged = [verdict(goal, sign, wanted, row[goal]) for goal, sign, wanted in GOALS]
    print("\n".join(["", f"{'seed':>12}  {arguments.seed}", *(f"{n:>12}  {v}" for n, v in row.items()), ""]))
    print(table(judged))
    if arguments.json is not None:
        settings: Row = {"seed": arguments.seed, "minutes": arguments.minutes}
        write_json(arguments.json, "fuzz", settings, [row], {"faults": faults})
    if missed := [str(each["goal"]) for each in judged if not each["met"]]:
        raise SystemExit(f"the fuzz missed its goals: {', '.join(missed)}")


if __name__ == "__main__":
    main()
