"""A tail is what a sequence needs of a group beside full attention to go on at a position. This is pure.

    group            at position p the next token sees            so it needs, at p
    sliding window   j > p - window                               the pages of [p - window + 1, p)
    chunked window   j // window == p // window                   the pages of [p // window * window, p)
    recurrent        all, through the state                       the state after p tokens: one slot

Windows' pages lie on the same borders as full attention's: page i holds [i * page_size, (i + 1) * page_size).
By what a sequence needs of it each pool beside full attention's has its size.
"""

from dataclasses import dataclass

from services.values.kv import GroupKind, KvGroup, KvLayout


def tail_start(group: KvGroup, position: int, page_size: int) -> int:
    """Return the first token of the tail's first page; `position` for a state, or where the tail is empty."""
    if group.kind is GroupKind.RECURRENT:
        return position
    if group.kind is GroupKind.CHUNKED_WINDOW:
        first = position // group.window * group.window
    else:
        first = max(0, position - group.window + 1)
    return first // page_size * page_size if first < position else position


def tail_pages(group: KvGroup, position: int, page_size: int) -> range:
    """Return the indices into the sequence's pages of those that hold its tail, in a windowed group."""
    start = tail_start(group, position, page_size)
    return range(start // page_size, -(-position // page_size)) if start < position else range(0)


def units_at(group: KvGroup, position: int, page_size: int) -> int:
    """Return how many units a sequence needs to go on at `position`."""
    if group.kind is GroupKind.RECURRENT:
        return 1
    return len(tail_pages(group, position, page_size))


def most_units(group: KvGroup, page_size: int, chunk_size: int) -> int:
    """Return the units of a sequence that computes up to `chunk_size` tokens in a step, wherever it is."""
    if group.kind is GroupKind.RECURRENT:
        return 1
    return (group.window - 1 + chunk_size + page_size - 2) // page_size + 1


def carried_bytes(layout: KvLayout, position: int) -> int:
    """Return the bytes of tails and state at `position`, of all groups beside full attention."""
    return sum(units_at(group, position, layout.page_size) * group.unit_bytes for group in layout.carried)


# There are so many states beside two for each that runs: as many as for a window would be gigabytes.
_POINTS = 32
_CHUNK_OF_EACH = 512  # tokens


def units_of_a_sequence(group: KvGroup, page_size: int) -> int:
    """Return the most that it takes to go on by a token, wherever it is."""
    return most_units(group, page_size, 1)


def units_of_a_chunk(group: KvGroup, page_size: int, chunk_size: int) -> int:
    """Return what a step's chunks take beyond that while they are computed, all together `chunk_size` tokens.

    Those of several sequences may take some more, by where they lie in pages: then the last is cut.
    """
    return most_units(group, page_size, chunk_size) - most_units(group, page_size, 1)


def units_for(group: KvGroup, page_size: int, chunk_size: int, num_sequences: int) -> int:
    """Return the least that so many open sequences need."""
    return num_sequences * units_of_a_sequence(group, page_size) + units_of_a_chunk(
        group, page_size, chunk_size
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSizes:
    """Sizes are set by kind of group; None leaves room for those that run, what they save, and
    checkpoints."""

    num_window_pages: int | None = None  # It is that of each windowed group.
    num_slots: int | None = None
    max_running_requests: int = 64
    chunk_size: int = 512  # It counts prompt tokens of a step.

    @property
    def num_states(self) -> int:
        return self.num_slots or 2 * self.max_running_requests + _POINTS

    def num_units(self, group: KvGroup, page_size: int, num_pages: int) -> int:
        """Return the units of a group beside full attention, which has `num_pages`.

        A window gets no more than that, unless one sequence needs more: each of its pages is one of a
        sequence that is there.
        """
        if group.kind is GroupKind.RECURRENT:
            return self.num_states
        of_one = units_for(group, page_size, self.chunk_size, 1)
        # A step has one chunk, however long it may be; so much of it is reckoned for each sequence.
        short = min(self.chunk_size, _CHUNK_OF_EACH)
        longer = of_one - units_for(group, page_size, short, 1)
        of_all = 2 * self.max_running_requests * (of_one - longer) + longer
        return self.num_window_pages or max(of_one, min(of_all, num_pages))
