"""How many units each pool has. Pure."""

from dataclasses import dataclass

from services.kv.tails import most_units
from services.values.kv import GroupKind, KvGroup

# What a running sequence holds: the state that it computes in, and the one it left at the last border.
_SLOTS_OF_A_SEQUENCE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSizes:
    """Of the pools beside full attention's; None: what the running sequences need, and as much again for
    resume points."""

    num_window_pages: int | None = None  # of each windowed group
    num_slots: int | None = None
    max_running_requests: int = 64
    chunk_size: int = 512  # tokens of a sequence in a step

    def num_units(self, group: KvGroup, page_size: int, num_pages: int) -> int:
        """Of a group beside full attention, which has `num_pages`."""
        if group.kind is GroupKind.RECURRENT:
            return self.num_slots or 2 * _SLOTS_OF_A_SEQUENCE * self.max_running_requests
        return self.num_window_pages or self._window_pages(group, page_size, num_pages)

    def _window_pages(self, group: KvGroup, page_size: int, num_pages: int) -> int:
        """In a small pool no more than it has: a page of a window is one of a sequence that is there."""
        of_one = most_units(group, page_size, self.chunk_size)
        return max(of_one, min(2 * of_one * self.max_running_requests, num_pages))
