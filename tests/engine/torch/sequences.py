"""Sequences that a test drives over a runner step by step, as an engine would."""

import random

from engine.torch.attention.paging import alike
from services.engine.paged.runner import Chunk
from services.values.request import SamplingParams

GREEDY = SamplingParams(temperature=0)


class Sequence:
    """A prompt that is prefilled in chunks, then decoded, as an engine would."""

    def __init__(self, prompt_ids, pages, chunk_size, *, start=0, sampling=GREEDY):
        self.ids = list(prompt_ids)
        self.prompt_len = len(prompt_ids)
        self.pages = pages
        self.chunk_size = chunk_size
        self.start = start  # KV before it is there
        self.sampling = sampling

    @property
    def output_ids(self):
        return self.ids[self.prompt_len :]

    def next_chunk(self):
        token_ids = self.ids[self.start : self.start + self.chunk_size]
        sample = self.start + len(token_ids) == len(self.ids)
        num_output_ids = len(self.output_ids)
        return Chunk(token_ids, self.start, self.pages, sample, self.sampling, self.ids[:], num_output_ids)

    def take(self, chunk, sampled):
        assert (sampled is not None) == chunk.sample
        self.start = chunk.end
        if sampled is not None:
            self.ids.append(sampled.token_id)


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
    return alike(runner._pool.kv)


class PageTables:
    """Hands out pages in shuffled order."""

    def __init__(self, runner, seed=0):
        self.page_size = runner.layout.page_size
        self.free = list(range(runner.memory.num_pages))
        random.Random(seed).shuffle(self.free)

    def take(self, num_tokens):
        num_pages = -(-num_tokens // self.page_size)
        taken, self.free = self.free[:num_pages], self.free[num_pages:]
        return taken
