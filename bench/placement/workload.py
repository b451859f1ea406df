"""A trace becomes requests of index blocks."""

import json
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from services.router.replay.workload import TraceRequest


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
