"""Graphs are captured for steps of these sizes, and a step finds the smallest one that fits it.

Rooms are few, since each takes memory and time at the start, and none has many times the rows of its steps.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from services.engine.torch.attention.page_pieces import OnDevice
from services.engine.torch.attention.step_view import PagedLayers, Reach
from services.engine.torch.pools import Pools
from services.engine.torch.step_rooms import PromptRoom, RunRoom, StepRoom

logger = logging.getLogger(__name__)

_ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 320, 384, 448, 512)
_MOST_BUCKETS = 20
_PROMPT_TOKENS = (64, 128, 256, 384, 512, 768, 1024, 1536, 2048)
_MOST_PROMPTS = 16  # This is the limit for one step.
# The tokens that prompts see are copied out of their pages. There is room for so many times a step's tokens,
# and for this many at least.
_SEEN_TIMES, _LEAST_SEEN = 4, 8192
# Where latents are expanded, steps of so many single tokens have rooms for so many tokens of contexts, of
# which each head is taken for so many numbers. A step takes no room for more than _MOST_TIMES what it sees,
# unless that is one of the two least.
_LATENT_ROWS, _LATENT_SEEN, _HEAD_NUMBERS = (1, 4, 16, 64, 128, 256), (4096, 12288, 36864), 512
# Prompts have buckets with room for _FEW_ROWS single tokens. A step uses no bucket with more rows than
# _FEW_ROWS_IN_ALL, which cost no more than one, or than _MOST_TIMES its own rows, if that is more.
_FEW_ROWS, _FEW_ROWS_IN_ALL, _MOST_TIMES = 64, 128, 3
# With drafts, each number of runs has rooms for a few tokens, and for as many as a step has at most.
_RUN_TOKENS = (2, 4)


def bucket_rows(max_rows: int) -> tuple[int, ...]:
    """Return the bucket sizes for steps of up to `max_rows` rows, the largest first."""
    rows = [rows for rows in _ROWS if rows < max_rows][: _MOST_BUCKETS - 1]
    return tuple(reversed([*rows, max_rows])) if max_rows > 0 else ()


def prompt_rooms(max_tokens: int) -> tuple[PromptRoom, ...]:
    """Return the rooms for steps of up to `max_tokens` tokens of prompts, the largest first."""
    sizes = [size for size in _PROMPT_TOKENS if size < max_tokens]
    sizes += [max_tokens] if 1 < max_tokens <= _PROMPT_TOKENS[-1] else []
    return tuple(
        PromptRoom(size, _MOST_PROMPTS, max(_SEEN_TIMES * size, _LEAST_SEEN) + size) for size in sizes[::-1]
    )


def latent_steps(max_rows: int, num_heads: int, itemsize: int, budget: int | None) -> Iterator[StepRoom]:
    """Yield the rooms for steps of single tokens over latents, the largest first.

    A layer's keys and values of a room take half the budget at most.
    """
    token_bytes = num_heads * _HEAD_NUMBERS * itemsize
    fitting = [
        num_seen for num_seen in _LATENT_SEEN if budget is None or num_seen * token_bytes <= budget // 2
    ]
    rows = [*(rows for rows in _LATENT_ROWS if rows < max_rows), max_rows] if max_rows else []
    for num_seen in reversed(fitting):
        yield from (StepRoom(num_rows, PromptRoom(0, 0, num_seen)) for num_rows in reversed(rows))


@dataclass(frozen=True, slots=True)
class StepLimits:
    max_rows: int  # These are single tokens, drafts included.
    max_prompt_tokens: int
    max_drafts: int = 0  # This is for one sequence.


def rooms_for(pools: Pools, limits: StepLimits, budget: int | None) -> list[StepRoom]:
    """Return the rooms of all graphs for this model, and log which steps none is for.

    Graphs may take `budget` bytes. Those of the first rooms are worth most, and the larger of a kind come
    first.
    """
    layers, rooms = pools.layers, list[StepRoom]()
    if not all(_is_replayable(layers, reach) for reach in layers.reaches):
        logger.info("graphs_left_out steps=all reason=%r", "single tokens attend without a kernel")
        return rooms
    expands = any(kv.is_latent for kv in layers.pools)
    if expands:
        num_heads = max(call.num_heads for call in pools.calls)
        itemsize = layers.pools[0].compute_dtype.itemsize
        rooms += latent_steps(limits.max_rows, num_heads, itemsize, budget)
    else:
        rooms += [StepRoom(num_rows) for num_rows in bucket_rows(limits.max_rows)]
    if pools.slots is not None and not expands:
        rooms += run_steps(limits.max_rows, limits.max_drafts)
    if not all(map(layers.packing_of, layers.reaches)):
        logger.info("graphs_left_out steps=prompts reason=%r", "they attend one by one")
    elif pools.slots is None:
        rooms += prompt_steps(limits.max_rows, limits.max_prompt_tokens)
    else:
        rooms += scan_steps(limits.max_prompt_tokens)
        logger.info(
            "graphs_left_out steps=%r reason=%r",
            "prompts that are not one whole chunk",
            "a scan that is padded leaves another state",
        )
    return rooms


def _is_replayable(layers: PagedLayers, reach: Reach) -> bool:
    if layers.pools[reach.pool].is_latent:
        return layers.packing_of(reach) is not None
    return isinstance(layers.in_place[reach.pool], OnDevice)


def prompt_steps(max_rows: int, max_tokens: int) -> Iterator[StepRoom]:
    beside = dict.fromkeys((max_rows, min(max_rows, _FEW_ROWS), 0))
    yield from (StepRoom(num_rows, room) for room in prompt_rooms(max_tokens) for num_rows in beside)


def run_steps(max_rows: int, max_drafts: int) -> Iterator[StepRoom]:
    """Yield the rooms for steps of up to `max_rows` tokens in which sequences have up to `max_drafts` drafts.

    The largest come first.
    """
    longest = 1 + max_drafts
    if longest == 1 or max_rows < longest:
        return
    most_runs = max_rows // longest
    nums_runs = [1 << power for power in range(most_runs.bit_length()) if 1 << power < most_runs]
    for num_runs in reversed([*nums_runs, most_runs]):
        for num_tokens in reversed([*(each for each in _RUN_TOKENS if each < longest), longest]):
            yield StepRoom(num_runs * num_tokens, runs=RunRoom(num_runs, num_tokens))


def scan_steps(max_tokens: int) -> Iterator[StepRoom]:
    """Yield the room for a whole chunk of a long prompt, which recurrent layers scan."""
    if 1 < max_tokens <= _PROMPT_TOKENS[-1]:
        (room,) = prompt_rooms(max_tokens)[:1]
        yield StepRoom(0, replace(room, num_prompts=1), is_scan=True)


def is_for_step(room: StepRoom, tokens: int, singles: int, runs: Sequence[int]) -> bool:
    """Return whether the room is for such a step, and not for one of many times its rows."""
    most_rows = max(_FEW_ROWS_IN_ALL, _MOST_TIMES * (tokens + singles))
    return room.num_tokens + room.num_singles <= most_rows and has_room(room, tokens, singles, runs)


def has_room(room: StepRoom, tokens: int, singles: int, runs: Sequence[int]) -> bool:
    """Return whether such a step can be computed there.

    The room has prompts and single tokens exactly where the step does. `runs` are the numbers of tokens of
    sequences where recurrent layers compute drafts, and empty elsewhere.
    """
    most_tokens, most_singles = room.num_tokens, room.num_singles
    if bool(most_tokens) is not bool(tokens) or bool(most_singles) is not bool(singles):
        return False
    if not tokens <= most_tokens or not singles <= most_singles:
        return False
    if room.runs is None:
        return not runs and (not room.is_scan or most_tokens == tokens)
    return bool(runs) and len(runs) <= room.runs.num_runs and max(runs) <= room.runs.num_tokens


def is_for_contexts(room: StepRoom, num_seen: int) -> bool:
    """Return whether the room is for contexts of so many tokens, where latents are expanded."""
    return num_seen <= room.num_seen <= max(_LATENT_SEEN[1], _MOST_TIMES * num_seen)
