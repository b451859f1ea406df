"""Masks on the logits of a step: each row by its own, whoever shares its batch."""

import random
from dataclasses import replace

import numpy as np
import torch

from services.engine.paged.model_runner import NO_TOKEN, Chunk, Sampled
from services.engine.torch.sampling.step_masks import RowMasks
from services.engine.torch.sampling.torch_sampler import sample
from services.grammar.matcher import Masks
from services.values.request import SamplingParams

VOCAB_SIZE = 300
SAMPLINGS = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=0, logprobs=3),
    SamplingParams(temperature=0, repetition_penalty=1.5),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=2.0, top_p=0.7),
    SamplingParams(temperature=2.0, top_k=40, logprobs=1),
    SamplingParams(temperature=1.5, min_p=0.2, presence_penalty=1.0),
]


def chunk_of(params: SamplingParams, row: int) -> Chunk:
    history = [row, 5, 7, 9]
    return Chunk(history[-1:], 3, [0], True, replace(params, seed=row), history, 2)


def masks_of(allowed: list[set[int]]) -> Masks:
    bits = np.zeros((len(allowed), (VOCAB_SIZE // 32 + 1) * 32), np.uint8)
    for row, ids in enumerate(allowed):
        bits[row, sorted(ids)] = 1
    return Masks(np.packbits(bits, axis=1, bitorder="little").view(np.int32), VOCAB_SIZE)


def test_masks_are_each_rows_own(subtests):
    with subtests.test("rows with a mask and without are each as alone"):
        chance = random.Random(3)
        logits = 3 * torch.randn(28, VOCAB_SIZE, generator=torch.Generator().manual_seed(1))
        chunks = [chunk_of(SAMPLINGS[row % len(SAMPLINGS)], row) for row in range(28)]
        masked = [row for row in range(28) if row // 7 in (1, 3)]
        allowed = [set(chance.sample(range(VOCAB_SIZE), chance.choice([1, 2, 50]))) for _ in masked]
        masks = RowMasks(masks_of(allowed), {row: index for index, row in enumerate(masked)})
        together = sample(logits, chunks, masks)
        for row, (chunk, got) in enumerate(zip(chunks, together, strict=True)):
            own = logits[row : row + 1]
            if row not in masked:
                assert got == sample(own, [chunk])[0]
                continue
            ids = allowed[masked.index(row)]
            assert got == sample(own, [chunk], RowMasks(masks_of([ids]), {0: 0}))[0]
            forbidden = own.clone()
            forbidden[0, [i for i in range(VOCAB_SIZE) if i not in ids]] = -torch.inf
            [expected] = sample(forbidden, [replace(chunk, sampling=replace(chunk.sampling, logprobs=None))])
            assert got.token_id == expected.token_id in ids
            if chunk.sampling.logprobs is not None:  # of the raw logits
                raw = own[0].double().log_softmax(0)
                assert abs(got.logprobs.logprob - raw[got.token_id].item()) < 1e-9
    with subtests.test("where nothing is allowed no token is chosen"):
        logits = torch.randn(7, VOCAB_SIZE)
        chunks = [chunk_of(params, row) for row, params in enumerate(SAMPLINGS)]
        masks = RowMasks(masks_of([set()] * 7), {row: row for row in range(7)})
        assert sample(logits, chunks, masks) == [Sampled(NO_TOKEN)] * 7
    with subtests.test("an overflow chooses what is allowed all the same"):
        logits = torch.full((2, VOCAB_SIZE), torch.nan)
        chunks = [chunk_of(SAMPLINGS[0], 0), chunk_of(SAMPLINGS[3], 1)]
        masks = RowMasks(masks_of([{17, 40}, {299}]), {0: 0, 1: 1})
        assert [sampled.token_id for sampled in sample(logits, chunks, masks)] == [17, 299]
