"""One memory, divided as each side needs it: pages of attention, and what is carried. Pure.

Everything is told in tokens of attention: a state weighs so many of them, and so does a window's page.

    least of all groups   a request has its own copy of its context, and one state or tail
    per group             a context is there once for all who share it; a request has its own question and
                          answer, and all that is set aside for it in the pools
"""

from dataclasses import dataclass

from bench.decode_cache.workload import Workload
from services.kv.tails import units_for, units_of_a_sequence
from services.values.kv import GroupKind, KvGroup


@dataclass(frozen=True, slots=True)
class Shape:
    context: int  # shared by a group
    own: int  # of each: question and answer
    groups_at_once: int
    concurrency: int

    @property
    def alone(self) -> int:
        return self.context + self.own


@dataclass(frozen=True, slots=True)
class Division:
    running: int  # requests that it is for
    num_pages: int
    num_slots: int | None
    num_window_pages: int | None


@dataclass(frozen=True, slots=True)
class Memory:
    group: KvGroup
    token_bytes: float  # of attention
    page_size: int
    chunk_size: int

    @property
    def carried_tokens(self) -> int:
        units = units_of_a_sequence(self.group, self.page_size)
        return round(units * self.group.unit_bytes / self.token_bytes)

    def units_for(self, running: int) -> int:
        return units_for(self.group, self.page_size, self.chunk_size, running)

    def set_aside(self, running: int) -> int:
        """Tokens, for so many that run."""
        return round(self.units_for(running) * self.group.unit_bytes / self.token_bytes)

    def total_tokens(self, shape: Shape, held: int) -> int:
        """The memory that holds so many requests where nothing is shared."""
        return held * (self._rounded(shape.alone) + self.carried_tokens)

    def unshared(self, shape: Shape, held: int) -> Division:
        """The pools have room for all clients; those that memory would not hold find no pages."""
        num_pages = held * self._rounded(shape.alone) // self.page_size
        return self._division(shape.concurrency, num_pages)

    def shared(self, shape: Shape, held: int) -> Division:
        """Divide the memory so that as many requests run as fit; pages have the rest."""
        total = self.total_tokens(shape, held)
        left = total - shape.groups_at_once * self._rounded(shape.context)
        counts = range(1, shape.concurrency + 1)
        fitting = [n for n in counts if n * self._rounded(shape.own) + self.set_aside(n) <= left]
        running = max(fitting, default=1)
        return self._division(running, (total - self.set_aside(running)) // self.page_size)

    def _division(self, running: int, num_pages: int) -> Division:
        units = self.units_for(running)
        is_state = self.group.kind is GroupKind.RECURRENT
        return Division(running, num_pages, units if is_state else None, None if is_state else units)

    def _rounded(self, tokens: int) -> int:
        return (-(-tokens // self.page_size) + 1) * self.page_size


def shape_of(workload: Workload, context: int, groups_at_once: int) -> Shape:
    longest = max(conversation.num_tokens for conversation in workload.conversations)
    return Shape(context, longest - context, groups_at_once, workload.concurrency)
