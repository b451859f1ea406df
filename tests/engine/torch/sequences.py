"""Sequences that a test drives over a runner step by step, as an engine would."""

import random
from dataclasses import replace

from engine.torch.attention.paging import alike
from services.engine.paged.model_runner import Chunk, TailPages
from services.kv.tails import tail_pages, tail_start
from services.values.kv import GroupKind
from services.values.request import SamplingParams

GREEDY = SamplingParams(temperature=0)


class Sequence:
    """A prompt that is prefilled in chunks, then decoded, as an engine would."""

    def __init__(self, prompt_ids, pages, chunk_size, *, start=0, sampling=GREEDY, carried=None):
        self.ids = list(prompt_ids)
        self.prompt_len = len(prompt_ids)
        self.pages = pages
        self.chunk_size = chunk_size
        self.start = start  # KV before it is there
        self.store_from = 0
        self.sampling = sampling
        self.carried = carried

    @property
    def output_ids(self):
        return self.ids[self.prompt_len :]

    def next_chunk(self):
        token_ids = self.ids[self.start : self.start + self.chunk_size]
        end = self.start + len(token_ids)
        return Chunk(
            token_ids,
            self.start,
            self.pages,
            end == len(self.ids),
            self.sampling,
            self.ids[:],
            len(self.output_ids),
            store_from=self.store_from,
            tails=self.carried.tails(self.start, end) if self.carried else (),
            slot=self.carried.slot if self.carried else None,
        )

    def take(self, chunk, sampled):
        assert bool(sampled) == chunk.sample
        self.start = chunk.end - chunk.num_drafts + max(0, len(sampled) - 1)
        self.ids.extend(choice.token_id for choice in sampled)


class Guessing(Sequence):
    """Decodes with drafts; `guess` gives those to come after so many output tokens."""

    def __init__(self, *args, guess=lambda num_output: [], **kwargs):
        super().__init__(*args, **kwargs)
        self.guess, self.choices, self.states, self.step_sizes = guess, [], {}, []

    def next_chunk(self):
        chunk = super().next_chunk()
        drafts = self.guess(len(self.output_ids)) if self.output_ids else []
        if not drafts:
            return chunk
        return replace(
            chunk,
            token_ids=[*chunk.token_ids, *drafts],
            num_drafts=len(drafts),
            tails=self.carried.tails(chunk.start, chunk.end + len(drafts)),
        )

    def take(self, chunk, sampled):
        super().take(chunk, sampled)
        self.choices += sampled
        self.step_sizes.append(len(sampled))


class Carried:
    """This is one sequence's in the groups beside full attention: its window pages and its slot.

    Pages that have left a window go back at once, for others to write in; with `keeps` they stay. It may
    begin with the `tails` that another one has had at a border.
    """

    def __init__(self, tables, *, keeps=False, tails=None, slot=None):
        self._tables = tables
        self._keeps = keeps
        self.pages = [dict(own) for own in tails or [{}] * len(tables.windowed)]  # by index in the sequence
        self.slot = tables.slots.pop() if tables.slots is not None and slot is None else slot

    def tails(self, start, end):
        page_size, tails = self._tables.page_size, []
        for group, free, own in zip(self._tables.windowed, self._tables.free_tails, self.pages, strict=True):
            first, last = tail_start(group, start, page_size) // page_size, (end - 1) // page_size
            if not self._keeps:
                free[:0] = [own.pop(index) for index in list(own) if index < first]
            for index in range(first, last + 1):
                if index not in own:
                    own[index] = free.pop()
            tails.append(TailPages(first, [own[index] for index in range(first, last + 1)]))
        return tuple(tails)

    def kept_at(self, position):
        """The tails at a border of pages, by windowed group: {index: page}."""
        page_size = self._tables.page_size
        return [
            {i: own[i] for i in tail_pages(group, position, page_size)}
            for group, own in zip(self._tables.windowed, self.pages, strict=True)
        ]


def step(runner, sequences):
    chunks = [sequence.next_chunk() for sequence in sequences]
    for sequence, chunk, sampled in zip(sequences, chunks, runner.run(chunks), strict=True):
        sequence.take(chunk, sampled)


def generate(runner, sequences, max_tokens):
    """Sequences join one step after another, so that prefill chunks and single tokens mix."""
    joined = 0
    while any(len(sequence.output_ids) < max_tokens for sequence in sequences):
        joined += 1
        step(runner, [s for s in sequences[:joined] if len(s.output_ids) < max_tokens])


def kv_of(runner):
    """Its pool of full attention, page by page: what a test damages, or looks at, behind its back."""
    return alike(runner._pools.layers.pools[0])


class PageTables:
    """Hands out pages and slots in shuffled order."""

    def __init__(self, runner, seed=0):
        self.page_size = runner.layout.page_size
        self.chance = random.Random(seed)
        self.free = list(range(runner.memory.num_pages))
        self.chance.shuffle(self.free)
        carried = list(zip(runner.layout.carried, runner.carried_memory, strict=True))
        self.windowed = [group for group, _ in carried if group.kind.is_windowed]
        self.free_tails = [
            self._shuffled(memory.num_pages) for group, memory in carried if group.kind.is_windowed
        ]
        slots = [memory for group, memory in carried if group.kind is GroupKind.RECURRENT]
        self.slots = self._shuffled(slots[0].num_pages) if slots else None

    def _shuffled(self, count):
        return self.chance.sample(range(count), count)

    def take(self, num_tokens):
        num_pages = -(-num_tokens // self.page_size)
        taken, self.free = self.free[:num_pages], self.free[num_pages:]
        return taken
