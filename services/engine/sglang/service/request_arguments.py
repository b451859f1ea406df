"""This module converts our requests to SGLang's arguments, and its report of a prompt's tokens to ours.

It is pure. To score a prompt from token 3 on, logprob_start_len is 2: SGLang then reuses at most 2 cached
tokens, and reports from there on.

    input_token_logprobs   [null, id 2, null], [logprob, id 3, null], ...
    input_top_logprobs     null, [[logprob, id, null], ...], ...
"""

import json
import math
from collections.abc import Mapping, Sequence
from struct import pack
from typing import Any

from services.grammar.json_schema import fitted_text
from services.values.errors import InvalidRequest, Unavailable
from services.values.prompt_logprobs import PromptLogprobs
from services.values.request import Constraint, ConstraintKind, GenerationRequest, SamplingParams

_BAN = -1e30


def check_sampling(sampling: SamplingParams) -> None:
    """Raise InvalidRequest for options that this engine does not support."""
    if sampling.logprobs is not None:
        raise InvalidRequest("sampling.logprobs: engine sglang returns none")
    if sampling.min_tokens:
        raise InvalidRequest("sampling.min_tokens: engine sglang, which has no tokenizer, offers none")
    if any(len(ids) > 1 for ids in sampling.bad_token_ids):
        raise InvalidRequest("sampling.bad_words: engine sglang bans words of one token alone")
    if sampling.bad_token_ids and sampling.constraint is not None:
        raise InvalidRequest("sampling.bad_words: engine sglang bans none beside a constraint")


def check_resumption(request: GenerationRequest) -> None:
    """Raise Unavailable where continuing would change the output.

    SGLang counts penalties over the tokens that it has generated itself, and begins a constraint with them;
    earlier output is prompt to it. Routers that know this end such a request.
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
    """Return the biases; a banned token's outweighs any logit. SGLang adds biases after penalties."""
    biases = dict(sampling.logit_bias) | {ids[0]: _BAN for ids in sampling.bad_token_ids}
    return {"logit_bias": {str(token_id): bias for token_id, bias in biases.items()}} if biases else {}


def _grammar(constraint: Constraint | None) -> dict[str, str]:
    """Return the constraint as SGLang's llguidance backend reads it, which accepts Lark as `ebnf`, too."""
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


# One prompt's scores are one line of JSON, some 30 bytes each, and SGLang's scheduler stops while it is
# written.
_MOST = 200_000


def check_scored(request: GenerationRequest) -> None:
    """Raise InvalidRequest where too many tokens of the prompt are to be scored."""
    scored, num_top = request.scored, request.sampling.prompt_logprobs or 0
    if (number := len(scored) * (1 + num_top)) > _MOST:
        raise InvalidRequest(
            f"sampling.prompt_logprobs: engine sglang tells {_MOST} at most of a prompt, got {number}"
        )


def scoring_arguments(request: GenerationRequest) -> dict[str, Any]:
    """Return a prefill rank's arguments; none where no scores are requested."""
    if (num_top := request.sampling.prompt_logprobs) is None:
        return {}
    start = request.scored.start - 1
    return {"return_logprob": True, "logprob_start_len": start, "top_logprobs_num": num_top}


def prompt_logprobs_of(request: GenerationRequest, meta_info: Mapping[str, Any]) -> PromptLogprobs | None:
    """Return the scores, or None where none were requested.

    For a stream that moved, this leaves out what SGLang reports of its output.
    """
    if (num_top := request.sampling.prompt_logprobs) is None:
        return None
    num_tokens = len(request.scored)
    scored = meta_info["input_token_logprobs"][1 : 1 + num_tokens]
    tops = meta_info["input_top_logprobs"][1 : 1 + num_tokens] if num_top else [()] * len(scored)
    ids = [entry[1] for top in tops for entry in _filled(top, num_top)]
    logprobs = [entry[0] for top in tops for entry in _filled(top, num_top)]
    ranks = [_rank(token_id, top) for (_, token_id, *_), top in zip(scored, tops, strict=True)]
    return PromptLogprobs(
        num_top,
        pack(f"<{len(scored)}f", *(entry[0] for entry in scored)),
        pack(f"<{len(scored)}I", *ranks),
        pack(f"<{len(ids)}I", *ids),
        pack(f"<{len(logprobs)}f", *logprobs),
    )


def _filled(top: Sequence[Any], num_top: int) -> list[Any]:
    return [*top, *[(math.nan, 0)] * (num_top - len(top))]


def _rank(token_id: int, top: Sequence[Any]) -> int:
    """Return the rank, or 0: SGLang reports none, so only those of the most probable tokens are known."""
    return next((rank for rank, entry in enumerate(top, start=1) if entry[1] == token_id), 0)
