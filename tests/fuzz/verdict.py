"""This module tells whether an answer is right, by the logits that transformers has for it. Pure."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from exactness.plain_sampling import sample_row
from services.engine.paged.model_runner import Chunk
from services.values.request import SamplingParams
from services.wire.isthmus.v1 import common_pb2, generation_pb2

# Of a logit, in standard deviations of its row: what float32 may be off (services/cli/model/make_model.py).
_ROUNDING_STD = 3e-5
_TRIES = 200
_LOGPROB_OFF = 2e-3

Floats = NDArray[np.float64]


@dataclass
class Answer:
    """`finish` None: its client left."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    finish: generation_pb2.Finish | None = None


@dataclass(frozen=True)
class Text:
    """A prompt, what it was asked with, and `logits` [tokens, vocab_size]: those from which transformers
    chooses after the prompt and each token of the answer but the last. `context` is the model's, `capacity`
    what the largest pool holds of one sequence."""

    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    eos_token_ids: tuple[int, ...]
    context: int
    capacity: int
    logits: Floats

    def ends(self, token_id: int, num_tokens: int) -> bool:
        """Tell whether a token that came as so-manieth stops the answer."""
        ending = token_id in self.sampling.stop_token_ids or (
            not self.sampling.ignore_eos and token_id in self.eos_token_ids
        )
        return ending and num_tokens >= self.sampling.min_tokens

    def chunk(self, answered: list[int]) -> Chunk:
        history = [*self.prompt_ids, *answered]
        return Chunk([0], 0, [0], True, self.sampling, history, len(answered), self.eos_token_ids)


def find_faults(text: Text, answer: Answer) -> tuple[list[str], int]:
    """What is wrong, in sentences, and how many tokens rounding has chosen. Past a wrong token nothing is
    looked at, for nothing that follows was to be expected."""
    near_ties = 0
    for i, token_id in enumerate(answer.token_ids):
        chunk = text.chunk(answer.token_ids[:i])
        expected = sample_row(text.logits[i], chunk).token_id
        if expected != token_id:
            if not _rounding_chooses(text.logits[i], chunk, token_id):
                return [f"wrong token: {i} is {token_id}, not {expected}"], near_ties
            near_ties += 1
        if text.ends(token_id, i + 1) and i + 1 < len(answer.token_ids):
            return [f"went on after token {i}, which stops it"], near_ties
    return [*_wrong_logprobs(text, answer), *_wrong_end(text, answer), *_wrong_usage(text, answer)], near_ties


def _rounding_chooses(row: Floats, chunk: Chunk, token_id: int) -> bool:
    rng = np.random.default_rng(len(chunk.history))
    off = _ROUNDING_STD * row.std()
    return any(
        sample_row(row + rng.normal(0, off, row.shape), chunk).token_id == token_id for _ in range(_TRIES)
    )


def _wrong_logprobs(text: Text, answer: Answer) -> list[str]:
    wanted = text.sampling.logprobs
    if wanted is None or not answer.token_ids:
        return []
    if len(answer.logprobs) != len(answer.token_ids):
        return [f"{len(answer.logprobs)} log-probabilities of {len(answer.token_ids)} tokens"]
    highest = text.logits.max(-1, keepdims=True)
    rows = text.logits - highest - np.log(np.exp(text.logits - highest).sum(-1, keepdims=True))
    return [
        f"wrong log-probability of token {i}: {told.chosen.logprob}, not {row[token_id]}"
        for i, (token_id, told, row) in enumerate(zip(answer.token_ids, answer.logprobs, rows, strict=True))
        if told.chosen.token_id != token_id
        or len(told.top) != wanted
        or abs(told.chosen.logprob - row[token_id]) > _LOGPROB_OFF
    ]


def _wrong_end(text: Text, answer: Answer) -> list[str]:
    if answer.finish is None:
        return []
    name = common_pb2.FinishReason.Name(answer.finish.reason)
    if name == f"FINISH_REASON_{_end(text, answer.token_ids)}":
        return []
    return [f"wrong end: {name} after {len(answer.token_ids)} tokens"]


def _end(text: Text, token_ids: list[int]) -> str:
    length = len(text.prompt_ids) + len(token_ids)
    if token_ids and text.ends(token_ids[-1], len(token_ids)):
        return "STOP"
    if len(token_ids) == text.sampling.max_tokens or length >= text.context:
        return "LENGTH"
    return "CAPACITY" if length >= text.capacity else "not yet"


def _wrong_usage(text: Text, answer: Answer) -> list[str]:
    """Of the whole, of which the client is told, and of each placement that it came to be by."""
    if answer.finish is None:
        return []
    finish, num_tokens = answer.finish, len(answer.token_ids)
    wrong = _wrong_identities(finish.usage, finish.placement.plan, len(text.prompt_ids), num_tokens)
    length = len(text.prompt_ids)
    for placement in finish.placements:
        usage = placement.usage
        wrong += _wrong_identities(usage, placement.plan, length, usage.completion_tokens)
        length += usage.completion_tokens
    if finish.placements and length != len(text.prompt_ids) + num_tokens:
        wrong.append(f"placements of {length - len(text.prompt_ids)} tokens")
    return [f"wrong usage, {what}: {' '.join(str(finish).split())}" for what in wrong]


def _wrong_identities(
    usage: generation_pb2.Usage, plan: common_pb2.Plan, prompt_tokens: int, completion_tokens: int
) -> list[str]:
    remote = plan == common_pb2.PLAN_REMOTE
    identities = {
        "prompt_tokens": usage.prompt_tokens == prompt_tokens,
        "completion_tokens": usage.completion_tokens == completion_tokens,
        "reused + computed": usage.prompt_tokens == usage.reused_tokens + usage.computed_tokens,
        "prefix + delta": not remote or usage.prompt_tokens == usage.decode_prefix_len + usage.delta_tokens,
    }
    return [name for name, holds in identities.items() if not holds]
