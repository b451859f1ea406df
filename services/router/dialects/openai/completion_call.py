"""Bodies of OpenAI's completions are read into GenerateRequest.

Parameters that we do not know are ignored, but for those of refused.py.
"""

from collections.abc import Mapping
from dataclasses import replace

from services.router.dialects.answer_counts import check_number, one_for_each, read_best_of, read_n
from services.router.dialects.json_body import UINT32_MAX, Body, InvalidParameter, check_ids, check_text
from services.router.dialects.openai import refused
from services.router.dialects.openai.openai_call import OpenAiCall, make_call
from services.router.dialects.sampling import read_sampling
from services.router.dialects.sampling_defaults import SamplingDefaults
from services.wire.isthmus.v1.generation_pb2 import GenerateRequest

_DEFAULT_MAX_TOKENS = 16  # This is OpenAI's own; chats run until they end.


def read_completion_call(
    fields: Mapping[str, object], headers: Mapping[str, str], defaults: SamplingDefaults
) -> OpenAiCall:
    body = Body(fields)
    body.refuse(refused.IN_COMPLETIONS, refused.INSTEAD)
    max_tokens = body.max_tokens("max_tokens")
    if max_tokens is None:
        max_tokens = _DEFAULT_MAX_TOKENS
    echoes = body.flag("echo")
    only_prompt = echoes and max_tokens == 0
    max_tokens = 1 if only_prompt else max_tokens
    sampling = read_sampling(body, max_tokens, body.integer("logprobs", 0, UINT32_MAX), defaults)
    request = GenerateRequest(sampling=sampling)
    if body.get("add_special_tokens") is not None:
        request.add_special_tokens = body.flag("add_special_tokens")
    read_n(body, request)
    read_best_of(body, request, body.flag("stream"))
    call = make_call(body, headers, request, echoes=echoes)
    first, *others = _read_prompts(fields.get("prompt"), call.request)
    return replace(call, request=first, more=tuple(others), echo=replace(call.echo, only=only_prompt))


def _read_prompts(value: object, request: GenerateRequest) -> list[GenerateRequest]:
    prompts = {"prompt": value}
    if isinstance(value, list) and _is_of_prompts(value):
        check_number(len(value), "prompt")
        prompts = {f"prompt[{place}]": each for place, each in enumerate(value)}
    requests = one_for_each(len(prompts), request, "prompt")
    for each, (name, prompt) in zip(requests, prompts.items(), strict=True):
        _put_prompt(prompt, name, each)
    return requests


def _is_of_prompts(values: list[object]) -> bool:
    """Return whether these are prompts. There may be very many ids: the first tells that they are none."""
    return isinstance(next(iter(values), None), str | list) and set(map(type, values)) in ({str}, {list})


def _put_prompt(value: object, name: str, request: GenerateRequest) -> None:
    if isinstance(value, str):
        request.text = check_text(value, name)
        return
    request.token_ids.SetInParent()  # An empty one is set, too.
    request.token_ids.ids.extend(_ids_of(value, name))


def _ids_of(value: object, name: str) -> list[int]:
    try:
        return check_ids(value, name)
    except InvalidParameter:
        if isinstance(value, list) and {str, list}.isdisjoint(map(type, value)):
            raise
        problem = "must be a string, a list of token ids, or a list of either"
        raise InvalidParameter(name, problem) from None
