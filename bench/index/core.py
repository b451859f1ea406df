"""The index without etcd: matching, hashing, taking in, memory. Everything in this process.

Times are the thread's own CPU time, so that other work on the machine counts only through the caches;
of several passes the best is reported. Few prompts are matched again and again, so the caches have what is
looked at; "cold" is how long it takes when between two matches other memory went through them all.
"""

import asyncio
import gc
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.report import Row
from services.etcd.etcd_client import Etcd
from services.etcd.watch import KeyChange
from services.index.codec import encode_delta, encode_head, encode_snapshot
from services.index.keys import ClusterKeys
from services.index.read.block_mirror import BlockMirror
from services.index.read.prefix_index import PrefixIndex
from services.index.records import PrefixDelta, PrefixHead, PrefixSnapshot, hashes_of
from services.kv.block_hash import pack_tokens, packed_sequence_hashes
from services.values.rank import Generation, RankId, RankKey

INDEX_BLOCK = 64
NUM_RANKS = 64
ENTRIES = 1_000_000
RESUMABLE = 200_000
BELOW_A_RANK = 125_000  # So many blocks of 8 MiB are in a tier of 1 TB.
KEYS = ClusterKeys("bench")
_PASSES, _MATCHES, _COLD_MATCHES = 5, 1000, 100
_FLUSHING_BYTES = 128 << 20  # more than caches hold


def life(number: int) -> RankId:
    return RankId(f"w{number}", 0, Generation(number + 1))


def draw_hashes(rng: np.random.Generator, count: int) -> list[int]:
    drawn: list[int] = rng.integers(0, 2**64, count, dtype=np.uint64).tolist()
    return drawn


def percentile(samples: Sequence[float], percent: float) -> float:
    return float(np.percentile(samples, percent))


@dataclass(frozen=True)
class Asked:
    """Prompts of so many blocks, each held by some of the ranks, each to a depth of its own.

    The first `shared` blocks are the same in all of them, and every rank holds those.
    """

    blocks: int
    shared: int
    holders: int
    prompts: list[list[int]]


def match_rows(rng: np.random.Generator) -> list[Row]:
    """A conversation is mostly held by few ranks, a system prompt by all of them. Held by every rank to a
    depth of its own is the most look-ups that there can be."""
    asked = [
        _asked(rng, *case)
        for case in (
            (128, 16, 4, 200),
            (128, 0, 4, 200),
            (128, 0, NUM_RANKS, 40),
            (128, 0, 0, 200),
            (8192, 16, 4, 4),
            (8192, 0, NUM_RANKS, 1),
        )
    ]
    index = _filled(rng, asked)
    flushing = np.ones(_FLUSHING_BYTES // 8, dtype=np.uint64)
    return [_match_row(index, one, flushing) for one in asked]


def _asked(rng: np.random.Generator, blocks: int, shared: int, holders: int, count: int) -> Asked:
    start = draw_hashes(rng, shared)
    prompts = [start + draw_hashes(rng, blocks - shared) for _ in range(count)]
    return Asked(blocks, shared, holders, prompts)


def _filled(rng: np.random.Generator, asked: list[Asked]) -> PrefixIndex:
    held: list[set[int]] = [set() for _ in range(NUM_RANKS)]
    for one in asked:
        for prompt in one.prompts:
            for number in rng.choice(NUM_RANKS, one.holders, replace=False):
                held[number].update(prompt[: int(rng.integers(1, len(prompt) + 1))])
        for blocks in held:
            blocks.update(one.prompts[0][: one.shared])
    index = PrefixIndex()
    for number, blocks in enumerate(held):
        blocks.update(draw_hashes(rng, max(0, ENTRIES // NUM_RANKS - len(blocks))))
        index.take_snapshot(life(number), blocks)
    return index


def _match_row(index: PrefixIndex, asked: Asked, flushing: NDArray[np.uint64]) -> Row:
    passes = [_match_us(index, asked.prompts, _MATCHES, lambda: None) for _ in range(_PASSES)]
    best = min(passes, key=lambda took_us: percentile(took_us, 50))
    cold = _match_us(index, asked.prompts, _COLD_MATCHES, flushing.sum)
    return {
        "prompt blocks": asked.blocks,
        "shared": asked.shared,
        "held by ranks": asked.holders,
        "entries": index.total_blocks,
        "p50 us": percentile(best, 50),
        "p99 us": percentile(best, 99),
        "cold p50 us": percentile(cold, 50),
        "cold p99 us": percentile(cold, 99),
    }


def _match_us(
    index: PrefixIndex, prompts: list[list[int]], matches: int, before_each: Callable[[], object]
) -> list[float]:
    took_us = []
    for number in range(matches):
        before_each()
        started = time.thread_time()
        index.match_all(prompts[number % len(prompts)])
        took_us.append((time.thread_time() - started) * 1e6)
    return took_us


def hashing_row() -> Row:
    """A prompt of 8,192 index blocks, as little-endian u32 and as Python ints."""
    num_tokens = 8192 * INDEX_BLOCK
    ids = tuple(random.Random(1).choices(range(150_000), k=num_tokens))
    packed = pack_tokens(ids)
    packed_s = _best_s(lambda: packed_sequence_hashes(packed, INDEX_BLOCK, 1), 9)
    ids_s = _best_s(lambda: packed_sequence_hashes(pack_tokens(ids), INDEX_BLOCK, 1), 9)
    return {
        "tokens": num_tokens,
        "packed M tokens/s": num_tokens / packed_s / 1e6,
        "from ints M tokens/s": num_tokens / ids_s / 1e6,
    }


def _best_s(action: Callable[[], object], rounds: int) -> float:
    took_s = []
    for _ in range(rounds):
        started = time.thread_time()
        action()
        took_s.append(time.thread_time() - started)
    return min(took_s)


def apply_rows(rng: np.random.Generator) -> list[Row]:
    rows = [_delta_row(rng, half) for half in (30, 300, 3000)]
    return [*rows, _snapshot_row(rng)]


def _delta_row(rng: np.random.Generator, half: int) -> Row:
    """Deltas of all ranks in turn, each with `half` blocks added and `half` removed."""
    num_deltas = max(NUM_RANKS * 8, 1_000_000 // (2 * half))
    per_rank = -(-num_deltas // NUM_RANKS)
    held = {number: draw_hashes(rng, ENTRIES // NUM_RANKS) for number in range(NUM_RANKS)}
    changes = [change for number in held for change in _records_of(life(number), held[number])]
    deltas = []
    for seq in range(per_rank):
        for number in range(NUM_RANKS):
            added = draw_hashes(rng, half)
            gone, held[number] = held[number][:half], held[number][half:] + added
            rank = life(number)
            delta = PrefixDelta(rank.generation, 1, seq, hashes_of(added), hashes_of(gone))
            deltas.append(KeyChange(KEYS.log(rank.key, seq), encode_delta(delta), 100 + seq))
    took_s = min(asyncio.run(_take_in(changes, deltas)) for _ in range(3))
    return _applied(f"deltas of {half} + {half}", len(deltas) * 2 * half, took_s)


def _records_of(rank: RankId, blocks: list[int]) -> list[KeyChange]:
    snapshot = PrefixSnapshot(rank.generation, 1, 0, hashes_of(blocks))
    head = PrefixHead(rank.generation, 1, 0, 1)
    return [
        KeyChange(KEYS.snapshot(rank.key, 1, 0), encode_snapshot(snapshot), 1),
        KeyChange(KEYS.head(rank.key), encode_head(head), 1),
    ]


def _snapshot_row(rng: np.random.Generator) -> Row:
    ranks = [life(number) for number in range(NUM_RANKS)]
    blocks = [draw_hashes(rng, ENTRIES // NUM_RANKS) for _ in ranks]
    changes = [change for rank, held in zip(ranks, blocks, strict=True) for change in _records_of(rank, held)]
    took_s = min(asyncio.run(_take_in([], changes)) for _ in range(3))
    return _applied("snapshots", sum(map(len, blocks)), took_s)


def _applied(what: str, blocks: int, took_s: float) -> Row:
    return {"records": what, "blocks": blocks, "M blocks/s": blocks / took_s / 1e6}


async def _take_in(before: list[KeyChange], changes: list[KeyChange]) -> float:
    mirror = BlockMirror(_no_etcd(), KEYS, lambda rank, age_s: None)

    async def apply(several: list[KeyChange]) -> None:
        for change in several:
            key = KEYS.parse(change.key)
            await mirror.apply(key, change)  # type: ignore[arg-type]
        mirror.look_for_gaps()

    await apply(before)
    started = time.thread_time()
    await apply(changes)
    took_s = time.thread_time() - started
    assert mirror.gaps == 0 and all(mirror.progress(RankKey(f"w{n}", 0)).current for n in range(NUM_RANKS))
    return took_s


def _no_etcd() -> Etcd:
    """No record is missing here, so nothing is ever read again."""
    return None  # type: ignore[return-value]


def memory_rows(rng: np.random.Generator) -> list[Row]:
    """Growth of the resident set, from snapshots as a mirror takes them in. Resumable blocks are each one
    rank's, which is the most that an entry takes."""
    index = PrefixIndex()
    before_bytes = _resident_bytes()
    for number in range(NUM_RANKS):
        index.take_snapshot(life(number), hashes_of(draw_hashes(rng, ENTRIES // NUM_RANKS)))
    blocks_row = _memory_row("blocks", index.total_blocks, before_bytes)
    before_bytes = _resident_bytes()
    for number in range(NUM_RANKS):
        index.checkpoints.add(life(number).key, hashes_of(draw_hashes(rng, RESUMABLE // NUM_RANKS)))
    resumable_row = _memory_row("resumable blocks", len(index.checkpoints), before_bytes)
    return [blocks_row, resumable_row, _below_row(rng)]


def _below_row(rng: np.random.Generator) -> Row:
    """No two ranks keep the same below their pools, which is the most entries; half of it is in files."""
    index = PrefixIndex()
    before_bytes = _resident_bytes()
    for number in range(NUM_RANKS):
        kept = hashes_of(draw_hashes(rng, BELOW_A_RANK))
        index.take_snapshot(life(number), kept, kept[::2])
    return _memory_row("blocks below", index.total_blocks, before_bytes)


def _memory_row(what: str, entries: int, before_bytes: int) -> Row:
    gc.collect()
    grown_bytes = _resident_bytes() - before_bytes
    return {"of": what, "entries": entries, "bytes per entry": grown_bytes / entries, "MB": grown_bytes / 1e6}


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
