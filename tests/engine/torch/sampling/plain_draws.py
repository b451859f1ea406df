"""This module has what the kernels that draw must choose, row by row in numpy, and what they may choose where
sums round."""

import math

import numpy as np
import torch

from services.engine.paged.model_runner import Chunk
from services.values.request import SamplingParams

NEAR = 1e-6  # of all that weighs


def plain_choice(logits, place, inverse, top_p, min_p, point, top_k, *_):
    """Choose from `logits` [any number, vocab_size] as the row of a table says."""
    row = logits[int(place)].double().numpy()
    if inverse == 0 or not np.isfinite(row.max()):
        return -1 if row.max() == -math.inf else int(row.argmax())
    weights = np.exp((row - row.max()) * inverse)
    ranked = np.argsort(-row, kind="stable")
    ranked = ranked[: int(top_k) or None]
    if top_p < 1:
        before = np.concatenate(([0.0], weights[ranked].cumsum()[:-1]))
        ranked = ranked[before < top_p * weights[ranked].sum()]
    kept = np.sort(ranked[weights[ranked] >= min_p])
    cumulative = weights[kept].cumsum()
    at = np.searchsorted(cumulative, point * cumulative[-1], side="right")
    return int(kept[min(at, np.flatnonzero(weights[kept])[-1])])


def is_near(logits, fields, chosen):
    """Tell whether what is chosen where numbers of the row are a little lower, or higher, encloses it."""
    place, inverse, top_p, min_p, point, *rest = fields
    choices = [
        plain_choice(logits, place, inverse, own_top_p, own_min_p, own_point, *rest)
        for own_top_p in (top_p * (1 - NEAR), top_p, min(1.0, top_p * (1 + NEAR)))
        for own_min_p in (min_p * (1 - NEAR), min_p, min(1.0, min_p * (1 + NEAR)))
        for own_point in (max(0.0, point - NEAR), point, min(1.0, point + NEAR))
    ]
    return min(choices) <= chosen <= max(choices)


def launch_plainly(logits, table, chosen, scratch, *, cuts):
    """It stands for draw_kernels.launch where there is no Triton."""
    assert len(table) == len(chosen) <= scratch.num_rows
    assert cuts == any(fields[5] > 0 or fields[2] < 1 for fields in table.tolist())
    ids = [plain_choice(logits, *fields) for fields in table.tolist()]
    chosen.copy_(torch.tensor(ids, dtype=torch.int64))


def chunk_of(history, num_output_ids=0, **params):
    return Chunk([0], 0, [0], True, SamplingParams(**params), history, num_output_ids, (7,))
