"""The workloads are requests of index blocks, from a trace or made up."""

import json
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

from services.router.replay.workload import BLOCK_TOKENS, TraceRequest

TICK_S = 3.0  # between two arrival times of the trace


def read_trace(path: Path, duration_s: float | None = None, copies: int = 1) -> list[TraceRequest]:
    """`copies` of the trace at once, each shifted in time (round the clock) and with blocks of its own but
    for the first, which all requests of a trace may share. Ordered by arrival."""
    raw = [json.loads(line) for line in path.read_text().splitlines()]
    length_s = max(entry["timestamp"] for entry in raw) / 1e3 + 1e-3
    stride = 1 + max(max(entry["hash_ids"]) for entry in raw)
    entries: list[tuple[float, tuple[int, ...], int, int]] = []
    for copy in range(copies):
        for entry in raw:
            arrival_s = (entry["timestamp"] / 1e3 + copy * length_s / copies) % length_s
            ids = entry["hash_ids"]
            blocks = (ids[0], *(block + copy * stride for block in ids[1:]))
            entries.append((arrival_s, blocks, entry["input_length"], max(1, entry["output_length"])))
    entries.sort(key=lambda entry: entry[0])
    return list(_numbered(entry for entry in entries if duration_s is None or entry[0] < duration_s))


def spread(requests: Sequence[TraceRequest]) -> list[TraceRequest]:
    """The trace's clock ticks every three seconds: about ten requests come at once, and then none. The same
    with each at a random moment up to the next tick."""
    random = Random(3_000)
    arrivals = [request.arrival_s + random.uniform(0.0, TICK_S) for request in requests]
    order = sorted(range(len(requests)), key=arrivals.__getitem__)
    return [replace(requests[i], number=n, arrival_s=arrivals[i]) for n, i in enumerate(order)]


def shared_prefix(requests_per_s: float, duration_s: float) -> list[TraceRequest]:
    """One prefix of 6,144 tokens in all prompts, then 512 to 4,096 of their own; arrivals at random. Nobody
    comes twice: each is a conversation of its own."""
    random, now, next_block = Random(19746), 0.0, 12
    requests: list[TraceRequest] = []
    while (now := now + random.expovariate(requests_per_s)) < duration_s:
        num_own = random.randint(1, 8)
        blocks = (*range(12), *range(next_block, next_block + num_own))
        next_block += num_own
        number, prompt_tokens, output_tokens = (
            len(requests),
            len(blocks) * BLOCK_TOKENS,
            random.randint(32, 256),
        )
        requests.append(TraceRequest(number, now, blocks, prompt_tokens, output_tokens, f"s{number}"))
    return requests


def pooled_lru_hits(requests: Sequence[TraceRequest], num_blocks: int) -> float:
    """Share of blocks that one LRU of so many blocks, seeing every request, would hit."""
    held: OrderedDict[int, None] = OrderedDict()
    hits = total = 0
    for request in requests:
        total += len(request.blocks)
        for block in request.blocks:
            if block not in held:
                break
            hits += 1
        for block in reversed(request.blocks):  # the front of a prompt goes last
            held[block] = None
            held.move_to_end(block)
        while len(held) > num_blocks:
            held.popitem(last=False)
    return hits / total


def _numbered(entries: Iterable[tuple[float, tuple[int, ...], int, int]]) -> Iterator[TraceRequest]:
    sessions = _Sessions()
    for number, (arrival_s, blocks, prompt_tokens, output_tokens) in enumerate(entries):
        session = sessions.of(blocks, number)
        yield TraceRequest(number, arrival_s, blocks, prompt_tokens, output_tokens, session)


class _Sessions:
    """The trace names no conversations. A prompt that begins with all full blocks of an earlier one, more
    than the one block that all share, is that one's next turn."""

    def __init__(self) -> None:
        self._by_last_block: dict[int, str] = {}

    def of(self, blocks: Sequence[int], number: int) -> str:
        session = f"s{number}"
        for block in reversed(blocks[1:]):
            if block in self._by_last_block:
                session = self._by_last_block[block]
                break
        if len(blocks) > 2:
            self._by_last_block[blocks[-2]] = session
        return session
