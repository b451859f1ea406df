"""The rows of a step score the prompt tokens that follow them: log-probabilities from raw logits.

The logits of requested rows are computed one piece at a time, and become float64 one block at a time. A
prompt has as many rows as tokens, and a row is as long as the vocabulary, so not all of them exist at once.
"""

import math
from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from services.engine.paged.model_runner import Chunk
from services.engine.torch.sampling.torch_sampler import at_least, floors, highest, log_sums_of
from services.values.prompt_logprobs import PromptLogprobs

# It returns the logits [len(rows), vocab_size] of rows of the step.
LogitsOf = Callable[[Sequence[int]], Tensor]

# A piece has so many logits that reading the output weights for its rows is efficient. A block is as in
# torch_sampler.py.
_PIECE = 1 << 24
_CPU_BLOCK = 1 << 18


def report_scores(chunks: Sequence[Chunk], logits_of: LogitsOf, vocab_size: int) -> None:
    num_rows = max(1, _PIECE // vocab_size)
    ends = accumulate(len(chunk.token_ids) for chunk in chunks)
    for chunk, end in zip(chunks, ends, strict=True):
        if (scoring := chunk.scoring) is None:
            continue
        rows = [row - chunk.end + end for row in scoring.rows]
        pieces = []
        for at in range(0, len(rows), num_rows):
            piece = slice(at, at + num_rows)
            pieces.append(scores_of(logits_of(rows[piece]), scoring.token_ids[piece], scoring.num_top))
        scoring.tell(PromptLogprobs.joined(pieces, scoring.num_top))


def scores_of(logits: Tensor, token_ids: Sequence[int], num_top: int) -> PromptLogprobs:
    """Score the token that follows each row of `logits`.

    These are [len(token_ids), vocab_size], of any dtype and device.
    """
    num_rows = max(1, _CPU_BLOCK // logits.shape[1]) if logits.device.type == "cpu" else len(logits)
    blocks = [
        _of_block(logits[at : at + num_rows].double(), token_ids[at : at + num_rows], num_top)
        for at in range(0, len(token_ids), num_rows)
    ]
    return PromptLogprobs.joined(blocks, num_top)


def _of_block(logits: Tensor, token_ids: Sequence[int], num_top: int) -> PromptLogprobs:
    log_sums = log_sums_of(logits)
    own = logits.gather(1, torch.tensor(token_ids, device=logits.device)[:, None])
    ranks = 1 + (logits > own).sum(1)
    # Where the model has overflowed, no token has a probability.
    known = log_sums[:, 0].isfinite()
    logprobs = torch.where(known, (own - log_sums)[:, 0], -math.inf)
    top_ids, top_logprobs = _top(logits, log_sums[:, 0].tolist(), num_top)
    return PromptLogprobs(
        num_top,
        logprobs.cpu().numpy().astype("<f4").tobytes(),
        torch.where(known, ranks, 0).cpu().numpy().astype("<u4").tobytes(),
        top_ids.tobytes(),
        top_logprobs.tobytes(),
    )


def _top(logits: Tensor, log_sums: Sequence[float], num_top: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the most probable ids and their log-probabilities, [num_rows, num_top].

    Missing ones are NaN.
    """
    ids = np.zeros((len(logits), num_top), "<u4")
    logprobs = np.full((len(logits), num_top), math.nan, "<f4")
    if num_top:
        candidates = at_least(floors(logits, [num_top] * len(logits)), logits)
        for row, (log_sum, (row_ids, high)) in enumerate(zip(log_sums, candidates, strict=True)):
            top = highest(high, num_top) if math.isfinite(log_sum) else np.empty(0, np.int64)
            ids[row, : len(top)] = row_ids[top]
            logprobs[row, : len(top)] = high[top] - log_sum
    return ids, logprobs
