"""SGLang's report of a prompt's tokens becomes ours. All is pure.

asked from token 3 on: logprob_start_len 2     SGLang matches 2 tokens at most, and tells from there on:
input_token_logprobs   [null, id 2, null], [logprob, id 3, null], ... input_top_logprobs     null,
[[logprob, id, null], ...], ...
"""

import math
from collections.abc import Mapping, Sequence
from struct import pack
from typing import Any

from services.values.errors import InvalidRequest
from services.values.prompt_logprobs import PromptLogprobs
from services.values.request import GenerationRequest

# One prompt's come as one line of JSON, some 30 bytes each, and SGLang's scheduler stands while it
# is written.
_MOST = 200_000


def check_scored(request: GenerationRequest) -> None:
    """Raise InvalidRequest where they are not in the prompt, or too many."""
    scored, num_top = request.scored, request.sampling.prompt_logprobs or 0
    if (number := len(scored) * (1 + num_top)) > _MOST:
        raise InvalidRequest(
            f"sampling.prompt_logprobs: engine sglang tells {_MOST} at most of a prompt, got {number}"
        )


def scoring_arguments(request: GenerationRequest) -> dict[str, Any]:
    """Return a prefill rank's arguments; none where nothing is requested."""
    if (num_top := request.sampling.prompt_logprobs) is None:
        return {}
    start = request.scored.start - 1
    return {"return_logprob": True, "logprob_start_len": start, "top_logprobs_num": num_top}


def told_of_prompt(request: GenerationRequest, meta_info: Mapping[str, Any]) -> PromptLogprobs | None:
    """Return the scores, or None where none were requested.

    Of a stream that moved what is reported of its output is left out.
    """
    if (num_top := request.sampling.prompt_logprobs) is None:
        return None
    num_tokens = len(request.scored)
    told = meta_info["input_token_logprobs"][1 : 1 + num_tokens]
    tops = meta_info["input_top_logprobs"][1 : 1 + num_tokens] if num_top else [()] * len(told)
    ids = [entry[1] for top in tops for entry in _filled(top, num_top)]
    logprobs = [entry[0] for top in tops for entry in _filled(top, num_top)]
    ranks = [_rank(token_id, top) for (_, token_id, *_), top in zip(told, tops, strict=True)]
    return PromptLogprobs(
        num_top,
        pack(f"<{len(told)}f", *(entry[0] for entry in told)),
        pack(f"<{len(told)}I", *ranks),
        pack(f"<{len(ids)}I", *ids),
        pack(f"<{len(logprobs)}f", *logprobs),
    )


def _filled(top: Sequence[Any], num_top: int) -> list[Any]:
    return [*top, *[(math.nan, 0)] * (num_top - len(top))]


def _rank(token_id: int, top: Sequence[Any]) -> int:
    """Return the rank: SGLang tells none, so where it is not among the most probable ones it is not known."""
    return next((rank for rank, entry in enumerate(top, start=1) if entry[1] == token_id), 0)
