"""A tail is what a sequence needs of a group beside full attention to go on at a position.

This module is pure: it computes sizes and positions, and holds nothing.

    group            at position p the next token sees            so it needs, at p
    sliding window   j > p - window                               the pages of [p - window + 1, p)
    chunked window   j // window == p // window                   the pages of [p // window * window, p)
    recurrent        all, through the state                       the state after p tokens: one slot

Pages of a window have the same borders as those of full attention: page i holds the positions
[i * page_size, (i + 1) * page_size). Each pool beside full attention's is sized by what one sequence needs.
"""

from dataclasses import dataclass

from services.values.kv import GroupKind, KvGroup, KvLayout


def tail_start(group: KvGroup, position: int, page_size: int) -> int:
    """Return the first token of the tail's first page, or `position` for a state or an empty tail."""
    if group.kind is GroupKind.RECURRENT:
        return position
    if group.kind is GroupKind.CHUNKED_WINDOW:
        first = position // group.window * group.window
    else:
        first = max(0, position - group.window + 1)
    return first // page_size * page_size if first < position else position


def tail_pages(group: KvGroup, position: int, page_size: int) -> range:
    """Return which pages of the sequence, as indices, hold its tail in a windowed group."""
    start = tail_start(group, position, page_size)
    return range(start // page_size, -(-position // page_size)) if start < position else range(0)


def units_at(group: KvGroup, position: int, page_size: int) -> int:
    """Return how many units (pages of a window, or one slot) a sequence needs to go on at `position`."""
    if group.kind is GroupKind.RECURRENT:
        return 1
    return len(tail_pages(group, position, page_size))


def most_units(group: KvGroup, page_size: int, chunk_size: int) -> int:
    """Return the most units of a sequence that computes up to `chunk_size` tokens in a step."""
    if group.kind is GroupKind.RECURRENT:
        return 1
    return (group.window - 1 + chunk_size + page_size - 2) // page_size + 1


def carried_bytes(layout: KvLayout, position: int) -> int:
    """Return the bytes of the per-request state (tails and states) at `position`, over all groups."""
    return sum(units_at(group, position, layout.page_size) * group.unit_bytes for group in layout.carried)


# This many states are for checkpoints, beside two for each running request. As many as a window has would
# be gigabytes.
_POINTS = 32
_CHUNK_OF_EACH = 512  # tokens


def units_of_a_sequence(group: KvGroup, page_size: int) -> int:
    return most_units(group, page_size, 1)


def units_of_a_chunk(group: KvGroup, page_size: int, chunk_size: int) -> int:
    """Return how many units the chunks of a step need on top, for `chunk_size` tokens in total.

    Chunks of several sequences may need a few more, depending on page borders; then the last one is cut.
    """
    return most_units(group, page_size, chunk_size) - most_units(group, page_size, 1)


def units_for(group: KvGroup, page_size: int, chunk_size: int, num_sequences: int) -> int:
    return num_sequences * units_of_a_sequence(group, page_size) + units_of_a_chunk(
        group, page_size, chunk_size
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSizes:
    """Sizes are given by kind of group. None leaves room for running sequences, their saved borders, and
    checkpoints.
    """

    num_window_pages: int | None = None  # Each windowed group has so many.
    num_slots: int | None = None
    max_running_requests: int = 64
    chunk_size: int = 512  # This is the most prompt tokens in a step.

    @property
    def num_states(self) -> int:
        return self.num_slots or 2 * self.max_running_requests + _POINTS

    def num_units(self, group: KvGroup, page_size: int, num_pages: int) -> int:
        """Return the number of units for a group beside full attention, which has `num_pages` pages.

        A window gets no more than `num_pages` unless one sequence needs more: each of its pages belongs to a
        cached page of a sequence.
        """
        if group.kind is GroupKind.RECURRENT:
            return self.num_states
        of_one = units_for(group, page_size, self.chunk_size, 1)
        # All chunks of a step together have chunk_size tokens; only this part of it is counted per sequence.
        short = min(self.chunk_size, _CHUNK_OF_EACH)
        longer = of_one - units_for(group, page_size, short, 1)
        of_all = 2 * self.max_running_requests * (of_one - longer) + longer
        return self.num_window_pages or max(of_one, min(of_all, num_pages))
