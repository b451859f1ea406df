"""How many units each pool beside full attention's has. Pure."""

from dataclasses import dataclass

from services.kv.tails import most_units
from services.values.kv import GroupKind, KvGroup

_SLOTS = 2  # of a sequence: the state it is at, and the one at the last border that it has passed
_POINTS = 32  # resume points beside those that run: as many as for a window would be gigabytes of states


def units_of_a_sequence(group: KvGroup, page_size: int, chunk_size: int, index_block: int) -> int:
    """The most that one holds: while it computes a chunk, or decodes on from the border it has passed."""
    if group.kind is GroupKind.RECURRENT:
        return _SLOTS
    return most_units(group, page_size, max(chunk_size, index_block + 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSizes:
    """Those set, by kind of group; None: what the running sequences need, and more for resume points."""

    num_window_pages: int | None = None  # of each windowed group
    num_slots: int | None = None
    max_running_requests: int = 64
    chunk_size: int = 512  # tokens of a sequence in a step
    index_block: int = 64

    def num_units(self, group: KvGroup, page_size: int, num_pages: int) -> int:
        """Of a group beside full attention, which has `num_pages`.

        Of a window no more than that, unless one sequence needs more: each of its pages is one of a sequence
        that is there.
        """
        of_one = units_of_a_sequence(group, page_size, self.chunk_size, self.index_block)
        running = of_one * self.max_running_requests
        if group.kind is GroupKind.RECURRENT:
            return self.num_slots or running + _POINTS
        return self.num_window_pages or max(of_one, min(2 * running, num_pages))
