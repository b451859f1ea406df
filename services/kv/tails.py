"""A tail is what a sequence needs of a group beside full attention to go on at a position. This is pure.

    group            at position p the next token sees            so it needs, at p
    sliding window   j > p - window                               the pages of [p - window + 1, p)
    chunked window   j // window == p // window                   the pages of [p // window * window, p)
    recurrent        all, through the state                       the state after p tokens: one slot

Windows' pages lie on the same borders as full attention's: page i holds [i * page_size, (i + 1) * page_size).
"""

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
