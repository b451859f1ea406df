"""Rows of logits score a prompt's tokens, however few of them are there at a time."""

import math
from dataclasses import replace

import pytest
import torch

from bench.families import FAMILIES
from engine.torch.sequences import Carried, PageTables, Sequence
from exactness.checkpoints import tiny_checkpoint
from exactness.prompt_scores import check_scores
from exactness.reference import random_prompt
from services.cli.model.make_model import ARCHITECTURES
from services.engine.paged.model_runner import ScoredPrompt
from services.engine.torch.runner import TorchRunner
from services.engine.torch.sampling import scored_rows
from services.engine.torch.sampling.scored_rows import scores_of
from services.kv.tails import PoolSizes
from services.values.prompt_logprobs import ScoredToken

# Whose layers have an unusual name, and one of the usual.
UNUSUAL = ("llama4",)


def test_rows_tell_of_tokens(subtests):
    for dtype in [torch.float32, torch.bfloat16]:
        with (
            subtests.test("rows tell of tokens what log softmax does", dtype=dtype),
            pytest.MonkeyPatch.context() as monkeypatch,
        ):
            monkeypatch.setattr(scored_rows, "_CPU_BLOCK", 200)
            logits = torch.randn(7, 100, generator=torch.Generator().manual_seed(0)).to(dtype)
            token_ids = [3, 99, 0, 50, 3, 7, 8]
            expected = logits.double().log_softmax(1)
            for token, row, told in zip(
                token_ids, expected, scores_of(logits, token_ids, 5).tokens(), strict=True
            ):
                assert told.logprob == pytest.approx(float(row[token]))
                assert told.rank == 1 + int((row > row[token]).sum())
                assert [token_id for token_id, _ in told.top] == row.argsort(descending=True, stable=True)[
                    :5
                ].tolist()
                assert [p for _, p in told.top] == pytest.approx(
                    row.sort(descending=True).values[:5].tolist()
                )
    with subtests.test("of a small vocabulary there are no more than it has"):
        [told] = scores_of(torch.tensor([[0.0, math.log(3)]]), [0], 5).tokens()
        assert told.logprob == pytest.approx(math.log(0.25))
        assert told.rank == 2
        assert [token_id for token_id, _ in told.top] == [1, 0]
    for broken in [math.nan, math.inf]:
        with subtests.test("where the model overflowed nothing is told", broken=broken):
            rows = torch.tensor([[1.0, broken, 0.0], [0.0, 1.0, 90.0]])
            overflowed, sound = scores_of(rows, [0, 2], 2).tokens()
            assert overflowed == ScoredToken(-math.inf, 0, ())
            assert sound.rank == 1


@pytest.mark.parametrize(
    "architecture",
    [
        pytest.param(name, marks=() if name in UNUSUAL else pytest.mark.exact)
        for name in (*ARCHITECTURES, *FAMILIES)
        if name != "jamba"  # which is not served: its pieces are another model
    ],
)
def test_pieces_of_chunks_are_as_the_definition_has_them(architecture, monkeypatch):
    """Two prompts are in the same steps, and one ends before the other."""
    monkeypatch.setattr(scored_rows, "_PIECE", 512 * 5)
    directory = tiny_checkpoint(architecture)
    sizes = PoolSizes(max_running_requests=2, chunk_size=64)
    runner = TorchRunner(directory, num_pages=32, page_size=16, sizes=sizes, self_check=False)
    tables, scored = PageTables(runner), []
    for length, first in ((40, 1), (33, 9)):
        prompt = random_prompt(length, length)
        sequence = Sequence(prompt, tables.take(length), 13, carried=Carried(tables))
        scored.append((sequence, ScoredPrompt(prompt, first, 3)))
    while any(not sequence.output_ids for sequence, _ in scored):
        going = [(sequence, scores) for sequence, scores in scored if not sequence.output_ids]
        chunks = [sequence.next_chunk() for sequence, _ in going]
        chunks = [
            replace(chunk, scoring=scores.asked_of(chunk.start, chunk.end))
            for chunk, (_, scores) in zip(chunks, going, strict=True)
        ]
        for (sequence, _), chunk, sampled in zip(going, chunks, runner.run(chunks), strict=True):
            sequence.take(chunk, sampled)
    for sequence, scores in scored:
        prompt, told = sequence.ids[: sequence.prompt_len], scores.whole()
        check_scores(directory, prompt, len(prompt) - len(told), told)
    runner.close()
