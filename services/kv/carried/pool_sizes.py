"""How many units the pools beside full attention's need. Pure."""

from services.kv.tails import most_units
from services.values.kv import GroupKind, KvGroup

_SLOTS = 2  # of a sequence: the state it is at, and the one at the last border that it has passed


def units_of_a_sequence(group: KvGroup, page_size: int, chunk_size: int, index_block: int) -> int:
    """The most that one holds: while it computes a chunk, or decodes on from the border it has passed."""
    if group.kind is GroupKind.RECURRENT:
        return _SLOTS
    return most_units(group, page_size, max(chunk_size, index_block + 1))


def default_units(
    group: KvGroup, page_size: int, chunk_size: int, index_block: int, max_running: int, num_pages: int
) -> int:
    """For those that run, and as much again for resume points.

    Of a window no more than full attention's `num_pages`, unless one sequence needs more: each of its pages
    is one of a sequence that is there.
    """
    of_one = units_of_a_sequence(group, page_size, chunk_size, index_block)
    wanted = 2 * of_one * max_running
    return wanted if group.kind is GroupKind.RECURRENT else max(of_one, min(wanted, num_pages))
