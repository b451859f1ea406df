"""SGLang's /generate: a text or ids in, the text so far out with each event, and [DONE]."""

from collections.abc import Mapping

from services.router.dialects.answer import Event, Json
from services.router.dialects.body import INT32_MAX, Body, InvalidParameter, Refused
from services.router.dialects.call import Call, read_addressee, traceparent_of
from services.router.dialects.dialect import Envelope
from services.router.dialects.openai.constraint import read_constraint
from services.router.dialects.openai.errors import error_json
from services.router.dialects.openai.usage import isthmus_json
from services.router.dialects.sampling import read_sampling
from services.router.dialects.sampling_defaults import SamplingDefaults
from services.values.errors import Aborted
from services.wire.isthmus.v1 import common_pb2
from services.wire.isthmus.v1.common_pb2 import SamplingParams
from services.wire.isthmus.v1.generation_pb2 import Finish, GenerateRequest, GenerateResponse

_REFUSED: Refused = {
    "input_embeds": (),
    "image_data": ([], ""),
    "audio_data": ([], ""),
    "video_data": ([], ""),
    "return_logprob": (False,),
    "logprob_start_len": (-1,),
    "top_logprobs_num": (0,),
    "token_ids_logprob": ([],),
    "return_hidden_states": (False,),
    "return_routed_experts": (False,),
    "lora_path": ("",),
    "session_params": ({},),
    "custom_logit_processor": (),
    "priority": (0,),
    "extra_key": ("",),
}
_SAMPLING_REFUSED: Refused = {
    "n": (1,),
    "structural_tag": (),
    "stop_regex": ([], ""),
    "skip_special_tokens": (True,),
    "custom_params": ({},),
}
_INSTEAD = {"extra_key": "use cache_salt", "session_params": "use conversation_id"}
_DEFAULT_MAX_TOKENS = 128  # SGLang's own


def read_generate_call(
    fields: Mapping[str, object], headers: Mapping[str, str], defaults: SamplingDefaults
) -> Call:
    """Raises InvalidParameter."""
    body = Body(fields)
    body.refuse(_REFUSED, _INSTEAD)
    params = body.inner("sampling_params")
    request = GenerateRequest(sampling=_read_sampling(params, defaults))
    if (named := read_constraint(params)) is not None:
        request.sampling.constraint.CopyFrom(named.constraint)
    _read_prompt(body, request)
    read_addressee(body, headers, request)
    return Call(
        request=request,
        stream=body.flag("stream"),
        traceparent=traceparent_of(headers),
        constraint_param="" if named is None else named.param,
    )


def _read_sampling(body: Body, defaults: SamplingDefaults) -> SamplingParams:
    body.refuse(_SAMPLING_REFUSED, {})
    max_tokens = body.integer("max_new_tokens", 1, INT32_MAX)
    sampling = read_sampling(body, _DEFAULT_MAX_TOKENS if max_tokens is None else max_tokens, None, defaults)
    if body.get("min_new_tokens") is not None:
        sampling.min_tokens = body.integer("min_new_tokens", 0, INT32_MAX) or 0
    if body.get("sampling_seed") is not None:
        sampling.seed = body.integer("sampling_seed", 0, 2**64 - 1) or 0
    return sampling


def _read_prompt(body: Body, request: GenerateRequest) -> None:
    text, ids = body.get("text"), body.get("input_ids")
    if (text is None) == (ids is None):
        raise InvalidParameter("text", "or input_ids must be set, and not both")
    if text is not None:
        if isinstance(text, list):
            raise InvalidParameter("text", "must be one string; send a request for each of several")
        request.text = body.text("text")
    else:
        request.token_ids.SetInParent()  # an empty one too
        request.token_ids.ids.extend(body.integers("input_ids"))


class SglangDialect:
    name = "sglang"

    def __init__(self, defaults: SamplingDefaults) -> None:
        self._defaults = defaults

    def read(self, fields: Mapping[str, object], headers: Mapping[str, str]) -> Call:
        return read_generate_call(fields, headers, self._defaults)

    def answer(self, call: Call, envelope: Envelope) -> "GenerateAnswer":
        return GenerateAnswer(call)


class GenerateAnswer:
    def __init__(self, call: Call) -> None:
        self.request = call.request
        self._text = ""
        self._num_tokens = 0

    def whole(self, joined: GenerateResponse) -> Json:
        self._take(joined)
        return {**self._so_far(joined), "output_ids": list(joined.token_ids)}

    def events(self, response: GenerateResponse) -> list[Event]:
        self._take(response)
        event = Event(self._so_far(response))
        return [event, Event("[DONE]")] if response.HasField("finish") else [event]

    def failure(self, error: Exception) -> list[Event]:
        return [Event(error_json(error, "text"))]

    def _take(self, response: GenerateResponse) -> None:
        self._text += response.text
        self._num_tokens += len(response.token_ids)

    def _so_far(self, response: GenerateResponse) -> Json:
        meta: Json = {"id": response.request_id, "completion_tokens": self._num_tokens, "finish_reason": None}
        if response.HasField("finish"):
            meta |= _finished(response.finish)
        return {"text": self._text, "meta_info": meta}


def _finished(finish: Finish) -> Json:
    """What is known at the end alone, the prompt's length among it."""
    return {
        "finish_reason": _reason(finish),
        "completion_tokens": finish.usage.completion_tokens,
        "prompt_tokens": finish.usage.prompt_tokens,
        "cached_tokens": finish.usage.reused_tokens,
        "isthmus": isthmus_json(finish),
    }


def _reason(finish: Finish) -> Json:
    """Raises Aborted for an answer that somebody stopped."""
    if finish.reason == common_pb2.FINISH_REASON_STOP:
        return {"type": "stop", "matched": finish.matched_stop}
    if finish.reason in (common_pb2.FINISH_REASON_LENGTH, common_pb2.FINISH_REASON_CAPACITY):
        return {"type": "length", "length": finish.usage.completion_tokens}
    raise Aborted("the request was aborted before its answer was complete")
