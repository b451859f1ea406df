"""Our sampling parameters become SGLang's. All is pure."""

import json
from typing import Any

from services.grammar.json_schema import fitted_text
from services.values.constraint import Constraint, ConstraintKind
from services.values.errors import InvalidRequest, Unavailable
from services.values.request import GenerationRequest, SamplingParams

_BAN = -1e30


def check_sampling(sampling: SamplingParams) -> None:
    """Raise InvalidRequest for what this engine does not offer."""
    if sampling.logprobs is not None:
        raise InvalidRequest("sampling.logprobs: engine sglang returns none")
    if sampling.min_tokens:
        raise InvalidRequest("sampling.min_tokens: engine sglang, which has no tokenizer, offers none")
    if any(len(ids) > 1 for ids in sampling.bad_token_ids):
        raise InvalidRequest("sampling.bad_words: engine sglang bans words of one token alone")
    if sampling.bad_token_ids and sampling.constraint is not None:
        raise InvalidRequest("sampling.bad_words: engine sglang bans none beside a constraint")


def check_resumption(request: GenerationRequest) -> None:
    """Raise Unavailable where the output would be another one.

    SGLang counts penalties over the tokens that it has generated itself, begins a constraint with them, and
    those so far are prompt to it. Routers that know of this end such a request.
    """
    if request.output_ids_so_far and request.sampling.heeds_output:
        raise Unavailable(
            "engine sglang cannot go on with a request that has penalties or a constraint; send it anew"
        )


def sampling_arguments(request: GenerationRequest, max_context_tokens: int) -> dict[str, Any]:
    """Return SGLang's `sampling_params`, without the seed.

    SGLang's random numbers are not a function of (seed, position), so only greedy output is the same wherever
    a request runs.
    """
    sampling, so_far = request.sampling, len(request.output_ids_so_far)
    left = max_context_tokens - len(request.all_ids)
    if sampling.max_tokens is not None:
        left = min(left, sampling.max_tokens - so_far)
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": sampling.min_p,
        "max_new_tokens": max(1, left),
        "stop_token_ids": _stop_ids(request),
        "ignore_eos": sampling.ignore_eos,
        "frequency_penalty": sampling.frequency_penalty,
        "presence_penalty": sampling.presence_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        **_logit_bias(sampling),
        **_grammar(sampling.constraint),
    }


def _logit_bias(sampling: SamplingParams) -> dict[str, dict[str, float]]:
    """Return the biases: a banned token's is one that no logit outweighs. SGLang adds them after
    penalties."""
    biases = dict(sampling.logit_bias) | {ids[0]: _BAN for ids in sampling.bad_token_ids}
    return {"logit_bias": {str(token_id): bias for token_id, bias in biases.items()}} if biases else {}


def _grammar(constraint: Constraint | None) -> dict[str, str]:
    """Return the constraint in the words of its llguidance backend, which takes Lark as `ebnf`, too."""
    if constraint is None:
        return {}
    match constraint.kind:
        case ConstraintKind.JSON_OBJECT:
            return {"json_schema": '{"type":"object"}'}
        case ConstraintKind.CHOICE:
            alternatives = " | ".join(map(json.dumps, dict.fromkeys(constraint.texts)))
            return {"ebnf": f"start: {alternatives}"}
        case ConstraintKind.GRAMMAR:
            return {"ebnf": fitted_text(constraint)}
        case ConstraintKind.JSON_SCHEMA:
            return {"json_schema": fitted_text(constraint)}
        case kind:
            return {kind.value: constraint.text}


def _stop_ids(request: GenerationRequest) -> list[int]:
    stops = set(request.sampling.stop_token_ids)
    if not request.sampling.ignore_eos:
        stops |= set(request.eos_token_ids)
    return sorted(stops)
