"""This part of bench.engine measures what a constraint adds to a step of the torch engine: its masks, laying
them on the logits, following them.

Part of bench.engine. *free* and *constrained* are the same batch on the same runner, step by step in turn;
constrained, each sequence writes JSON by a schema with objects, enums, numbers and strings, greedily.
"""

from collections.abc import Sequence
from dataclasses import replace
from statistics import median

import torch

from bench.report import Row, spread
from services.engine.paged.model_runner import Chunk
from services.engine.torch.runner import TorchRunner
from services.engine.torch.sampling.step_masks import StepMasks
from services.engine.torch.sampling.torch_sampler import sample
from services.grammar.grammars import Grammars, open_tokenizer
from services.grammar.matcher import Matcher
from services.grammar.vocabulary import Vocabulary
from services.values.kv import PageId
from services.values.request import Constraint, ConstraintKind, SamplingParams

SCHEMA = """{"type": "array", "items": {"type": "object", "properties": {
  "name": {"type": "string", "maxLength": 12}, "kind": {"enum": ["red", "green", "blue"]},
  "sizes": {"type": "array", "items": {"type": "integer"}, "maxItems": 4}, "ok": {"type": "boolean"}},
  "required": ["name", "kind", "sizes", "ok"], "additionalProperties": false}}"""
CONSTRAINT = Constraint(ConstraintKind.JSON_SCHEMA, (SCHEMA,))
GREEDY = SamplingParams(temperature=0)
EOS_ID = 1  # of the checkpoint's
COST_GOAL, GOAL_BATCH = 0.05, 16


class ConstrainedBatch:
    """One token further with each step; whose answer is whole begins a new one."""

    def __init__(
        self, runner: TorchRunner, tables: Sequence[list[PageId]], context: int, grammars: Grammars
    ) -> None:
        self._runner = runner
        self._tables = tables
        self._grammars = grammars
        self._matchers = [self._begin() for _ in tables]
        self._ids = [EOS_ID] * len(tables)
        self._end = context

    def _begin(self) -> Matcher:
        return self._grammars.matcher(CONSTRAINT, ending_ids=(EOS_ID,))

    def step(self) -> None:
        chunks = [
            Chunk([token_id], self._end, pages, True, GREEDY, eos_token_ids=(EOS_ID,), matcher=matcher)
            for token_id, pages, matcher in zip(self._ids, self._tables, self._matchers, strict=True)
        ]
        self._ids = [sampled.token_id for (sampled,) in self._runner.run(chunks)]
        for index, token_id in enumerate(self._ids):
            if token_id == EOS_ID:
                self._matchers[index] = self._begin()
            else:
                self._matchers[index].advance((token_id,))
        self._end += 1


def cost_row(batch: int, context: int, samples: dict[str, list[float]]) -> Row:
    """`cost`: of a constrained step beyond a free one, as a share of that, within each round."""
    free, constrained = samples["free"], samples["constrained"]
    costs = [own / other - 1 for own, other in zip(constrained, free, strict=True)]
    return {
        "batch": batch,
        "context": context,
        "free_ms": 1e3 * median(free),
        "constrained_ms": 1e3 * median(constrained),
        "cost": median(costs),
        "free_spread": spread(free),
    }


def cost_goals(rows: Sequence[Row]) -> list[Row]:
    return [
        {"batch": row["batch"], "context": row["context"], "wanted": COST_GOAL, "got": cost}
        for row in rows
        if row["batch"] == GOAL_BATCH and isinstance(cost := row["cost"], float)
    ]


class LargeVocabulary:
    """The vocabulary has as many tokens as Qwen's, made of JSON's bytes and of numbered words."""

    def __init__(self, size: int) -> None:
        words = [f" word{number}".encode() for number in range(size - 256)]
        self._vocabulary = Vocabulary((*(bytes([octet]) for octet in range(256)), *words), frozenset())
        self.grammars = Grammars(None, size)
        self.grammars._tokenizer = open_tokenizer(self._vocabulary)
        self.masks = StepMasks(size)
        self.eos_id = size - 1

    def chunks(self, batch: int, params: SamplingParams) -> list[Chunk]:
        ids = list(b'[{"name":"a')
        return [
            Chunk(
                ids[-1:],
                len(ids) - 1,
                [],
                True,
                replace(params, seed=row),
                ids,
                len(ids),
                matcher=self.grammars.matcher(CONSTRAINT, ids, (self.eos_id,)),
            )
            for row in range(batch)
        ]

    def sample(self, logits: torch.Tensor, chunks: Sequence[Chunk]) -> None:
        masks = self.masks.begin(chunks)
        assert masks is not None
        sample(logits, chunks, masks.end())
