"""This module has what transformers and the fake engine say of a prompt's tokens, to compare engines with."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from exactness.reference import forced_logits
from services.engine.fake import VOCAB_SIZE, FakeModel, scores
from services.values.kv import KvGroup
from services.values.prompt_logprobs import PromptLogprobs

_TOLERANCE = 5e-4  # of float32, and experts that mix


def check_scores(
    directory: Path, prompt: Sequence[int], start: int, told: PromptLogprobs, *, ranks: bool = True
) -> None:
    """Raises AssertionError unless each of the prompt's tokens from `start` on, or from 1, is as probable."""
    first = max(1, start)
    logits = forced_logits(directory, prompt[:first], prompt[first:])
    rows = logits.float().log_softmax(-1)
    assert len(told) == len(prompt) - first
    for token, row, scored in zip(prompt[first:], rows, told.tokens(), strict=True):
        assert scored.logprob == pytest.approx(float(row[token]), abs=_TOLERANCE)
        if ranks:
            assert scored.rank == 1 + int((row > row[token]).sum())
        best = row.topk(told.num_top)
        assert [token_id for token_id, _ in scored.top] == best.indices.tolist()
        assert [logprob for _, logprob in scored.top] == pytest.approx(best.values.tolist(), abs=_TOLERANCE)


def prompt_scores(
    ids: Sequence[int], start: int, num_top: int, carried: Sequence[KvGroup] = ()
) -> PromptLogprobs:
    """Return what a FakeRunner must report of a prompt's tokens from `start` on, at least 1."""
    model, told = FakeModel(ids[:start], carried), []
    for token in ids[start:]:
        told.append(scores(model.total, len(model.values[0]), token, VOCAB_SIZE, num_top))
        model.take(token)
    return PromptLogprobs.joined(told, num_top)
