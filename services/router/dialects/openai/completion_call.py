"""Bodies of OpenAI's completions, read into GenerateRequest.

Parameters that we do not know are ignored, but for those of refused.py.
"""

from collections.abc import Mapping

from services.router.dialects.body import UINT32_MAX, Body, InvalidParameter, check_ids, check_text
from services.router.dialects.openai import refused
from services.router.dialects.openai.openai_call import OpenAiCall, make_call
from services.router.dialects.sampling import read_sampling
from services.router.dialects.sampling_defaults import SamplingDefaults
from services.wire.isthmus.v1.generation_pb2 import GenerateRequest

_DEFAULT_MAX_TOKENS = 16  # OpenAI's own; chats run until they end


def read_completion_call(
    fields: Mapping[str, object], headers: Mapping[str, str], defaults: SamplingDefaults
) -> OpenAiCall:
    """Raises InvalidParameter."""
    body = Body(fields)
    body.refuse(refused.IN_COMPLETIONS, refused.INSTEAD)
    max_tokens = body.max_tokens("max_tokens")
    if max_tokens is None:
        max_tokens = _DEFAULT_MAX_TOKENS
    sampling = read_sampling(body, max_tokens, body.integer("logprobs", 0, UINT32_MAX), defaults)
    request = GenerateRequest(sampling=sampling)
    _read_prompt(fields.get("prompt"), request)
    if body.get("add_special_tokens") is not None:
        request.add_special_tokens = body.flag("add_special_tokens")
    return make_call(body, headers, request)


def _read_prompt(value: object, request: GenerateRequest) -> None:
    name = "prompt"
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        name, value = "prompt[0]", value[0]  # a batch of one
    if isinstance(value, str):
        request.text = check_text(value, name)
        return
    if not isinstance(value, list) or not {str, list}.isdisjoint(map(type, value)):
        raise InvalidParameter(
            name, "must be one string or one list of token ids; send a request for each of several"
        )
    request.token_ids.SetInParent()  # an empty one too
    request.token_ids.ids.extend(check_ids(value, name))
