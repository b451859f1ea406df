"""These pure functions reckon the most bytes that a sequence needs beside full attention's pages."""

from dataclasses import dataclass

from services.kv.carried.pool_sizes import PoolSizes, units_for
from services.kv.tails import units_at
from services.model.layer_groups import AttentionGroup, LayerGroups

_CHUNK_SIZE = PoolSizes().chunk_size


def most_tail_pages(window: AttentionGroup, page_size: int) -> int:
    """Count the pages of a windowed group that a sequence needs to go on, at whatever position."""
    group = window.in_layout("float32", page_size)
    # From `window` on tails are full, and they are alike every `window` and every `page_size` tokens.
    positions = range(window.window, window.window + max(window.window, page_size))
    return max(units_at(group, position, page_size) for position in positions)


def running_pages(window: AttentionGroup, page_size: int, running: int) -> int:
    """Count the pages of a windowed group that so many sequences take, with the default --chunk-size."""
    return units_for(window.in_layout("float32", page_size), page_size, _CHUNK_SIZE, running)


def tail_bytes(window: AttentionGroup, dtype: str, page_size: int, tp_size: int = 1) -> int:
    return most_tail_pages(window, page_size) * page_size * window.token_bytes(dtype, tp_size)


def carried_bytes(groups: LayerGroups, dtype: str, page_size: int, tp_size: int = 1) -> int:
    """Reckon what crosses with each request beside its delta, and what a
    checkpoint holds: tails and a state.
    """
    tails = sum(tail_bytes(window, dtype, page_size, tp_size) for window in groups.windows)
    return tails + (groups.recurrent.state_bytes(dtype, tp_size) if groups.recurrent else 0)


@dataclass(frozen=True, slots=True)
class CarriedPools:
    """`running` sequences and `resume_points` take so much of one decode rank, on each of its GPUs."""

    groups: LayerGroups
    dtype: str
    page_size: int
    tp_size: int
    running: int
    resume_points: int

    def window_pages(self, window: AttentionGroup) -> int:
        running = running_pages(window, self.page_size, self.running)
        return running + self.resume_points * most_tail_pages(window, self.page_size)

    def window_bytes(self, window: AttentionGroup) -> int:
        return self.window_pages(window) * self.page_size * window.token_bytes(self.dtype, self.tp_size)

    @property
    def slots(self) -> int:
        """Count one slot a sequence: what it leaves at the last border is one of the checkpoints."""
        return self.running + self.resume_points if self.groups.recurrent else 0

    @property
    def slot_bytes(self) -> int:
        recurrent = self.groups.recurrent
        return self.slots * recurrent.state_bytes(self.dtype, self.tp_size) if recurrent else 0

    @property
    def size_bytes(self) -> int:
        return self.slot_bytes + sum(self.window_bytes(window) for window in self.groups.windows)
