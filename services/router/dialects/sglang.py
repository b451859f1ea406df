"""SGLang's /generate takes texts or ids. Each event reports all of the text so far, and [DONE] is
the last."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf

from services.router.dialects.body_params import (
    NamedConstraint,
    check_number,
    one_for_each,
    read_constraint,
    read_n,
)
from services.router.dialects.choice_formats import finite
from services.router.dialects.dialect import PRIORITY, Call, Event, Json, read_addressee, traceparent_of
from services.router.dialects.http_errors import error_json
from services.router.dialects.json_body import (
    INT32_MAX,
    UINT32_MAX,
    Body,
    InvalidParameter,
    Refused,
    check_ids,
    check_text,
)
from services.router.dialects.sampling import read_sampling
from services.router.dialects.usage_json import isthmus_json, word_of
from services.wire.isthmus.v1 import common_pb2
from services.wire.isthmus.v1.common_pb2 import SamplingParams, TokenLogprob, TokenLogprobs
from services.wire.isthmus.v1.generation_pb2 import Finish, GenerateRequest, GenerateResponse

TokenText = Callable[[int], str]
_Entry = tuple[float | None, int, str | None]


@dataclass(frozen=True, slots=True)
class LogprobOptions:
    """`start` is the first position of the prompt that is reported, or None where none is."""

    start: int | None
    num_top: int
    with_text: bool


def read_logprobs(body: Body) -> LogprobOptions | None:
    start = body.integer("logprob_start_len", -1, INT32_MAX)
    num_top = body.integer("top_logprobs_num", 0, UINT32_MAX) or 0
    if not body.flag("return_logprob"):
        return None
    return LogprobOptions(
        None if start in (None, -1) else start, num_top, body.flag("return_text_in_logprobs")
    )


def request_logprobs(options: LogprobOptions | None, sampling: SamplingParams) -> None:
    """Request one more token of the prompt than is reported, as that token's id is needed."""
    if options is None:
        return
    sampling.logprobs = options.num_top
    if options.start is not None:
        sampling.prompt_logprobs, sampling.prompt_logprobs_start = options.num_top, options.start


@dataclass(slots=True)
class TokenLists:
    tokens: list[_Entry] = field(default_factory=list)
    top: list[list[_Entry] | None] = field(default_factory=list)

    def add(self, logprobs: Sequence[TokenLogprobs], words: "SglangWords") -> None:
        self.tokens += [words.entry(token.chosen) for token in logprobs]
        self.top += [[words.entry(other) for other in token.top] for token in logprobs]

    def add_unknown(self, token_id: int, words: "SglangWords") -> None:
        self.tokens.append((None, token_id, words.text(token_id)))
        self.top.append(None)


@dataclass(frozen=True, slots=True)
class SglangWords:
    token_text: TokenText
    options: LogprobOptions

    def text(self, token_id: int) -> str | None:
        return self.token_text(token_id) if self.options.with_text else None

    def entry(self, token: TokenLogprob) -> _Entry:
        return finite(token.logprob), token.token_id, self.text(token.token_id)

    def add_prompt(self, reported: TokenLists, response: GenerateResponse) -> None:
        logprobs = list(response.prompt_logprobs)
        if response.prompt_token_ids and self.options.start is not None:
            reported.add_unknown(response.prompt_token_ids[self.options.start], self)
            logprobs = logprobs if self.options.start == 0 else logprobs[1:]
        reported.add(logprobs, self)

    def meta(self, of_prompt: TokenLists, of_answer: TokenLists, most: float = inf) -> Json:
        lists = {"input": of_prompt, "output": of_answer}
        short = {
            name: reported for name, reported in lists.items() if len(reported.tokens) * self._each <= most
        }
        meta: Json = {f"{name}_token_logprobs": reported.tokens for name, reported in short.items()}
        if self.options.num_top:
            meta |= {f"{name}_top_logprobs": reported.top for name, reported in short.items()}
        return meta

    @property
    def _each(self) -> int:
        return 1 + self.options.num_top


_REFUSED: Refused = {
    "input_embeds": (),
    "image_data": ([], ""),
    "audio_data": ([], ""),
    "video_data": ([], ""),
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
    "structural_tag": (),
    "stop_regex": ([], ""),
    "skip_special_tokens": (True,),
    "custom_params": ({},),
    "max_tokens": (),
    "max_completion_tokens": (),
}
_SAMPLING_INSTEAD = dict.fromkeys(("max_tokens", "max_completion_tokens"), "use max_new_tokens")
_INSTEAD = {
    "extra_key": "use cache_salt",
    "session_params": "use conversation_id",
    "priority": f"use the header {PRIORITY}",
}
_DEFAULT_MAX_TOKENS = 128  # This default is SGLang's.
_MOST_LOGPROBS = 1024  # This limits each list in events before an answer's last.

_PutPrompt = Callable[[GenerateRequest], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateCall(Call):
    is_list: bool  # The answers are a list where the body has a list of prompts or requests several answers.
    logprobs: LogprobOptions | None = None


def read_generate_call(fields: Mapping[str, object], headers: Mapping[str, str]) -> GenerateCall:
    body = Body(fields)
    body.refuse(_REFUSED, _INSTEAD)
    param, prompts, is_list = _read_prompts(body)
    all_params = _params_of_each(body, len(prompts))
    request = GenerateRequest()
    read_addressee(body, headers, request)
    read_n(all_params[0], request)
    logprobs = read_logprobs(body)
    named = _put_sampling(all_params[0], logprobs, request)
    requests = one_for_each(len(prompts), request, param)
    for each, prompt, params in zip(requests, prompts, all_params, strict=True):
        if params is not all_params[0]:
            _check_n(params, request)
            named = _put_sampling(params, logprobs, each) or named
        prompt(each)
    return GenerateCall(
        request=request,
        more=tuple(requests[1:]),
        is_list=is_list or request.n > 1,
        stream=body.flag("stream"),
        traceparent=traceparent_of(headers),
        constraint_param="" if named is None else named.param,
        logprobs=logprobs,
    )


def _params_of_each(body: Body, num_prompts: int) -> list[Body]:
    if not isinstance(body.get("sampling_params"), list):
        return [body.inner("sampling_params")] * num_prompts
    listed = body.objects("sampling_params")
    if len(listed) != num_prompts:
        raise body.wrong("sampling_params", f"must be one object or {num_prompts}, got {len(listed)}")
    return listed


def _check_n(params: Body, request: GenerateRequest) -> None:
    own = GenerateRequest()
    read_n(params, own)
    if (own.n or 1) != (request.n or 1):
        raise params.wrong("n", "must be the same for all prompts")


def _put_sampling(
    params: Body, logprobs: LogprobOptions | None, request: GenerateRequest
) -> NamedConstraint | None:
    request.sampling.CopyFrom(_read_sampling(params))
    request_logprobs(logprobs, request.sampling)
    if (named := read_constraint(params)) is not None:
        request.sampling.constraint.CopyFrom(named.constraint)
    return named


def _read_sampling(body: Body) -> SamplingParams:
    body.refuse(_SAMPLING_REFUSED, _SAMPLING_INSTEAD)
    max_tokens = body.integer("max_new_tokens", 1, INT32_MAX)
    sampling = read_sampling(body, _DEFAULT_MAX_TOKENS if max_tokens is None else max_tokens, None)
    if body.get("min_new_tokens") is not None:
        sampling.min_tokens = body.integer("min_new_tokens", 0, INT32_MAX) or 0
    if body.get("sampling_seed") is not None:
        sampling.seed = body.integer("sampling_seed", 0, 2**64 - 1) or 0
    return sampling


def _read_prompts(body: Body) -> "tuple[str, list[_PutPrompt], bool]":
    text, ids = body.get("text"), body.get("input_ids")
    if (text is None) == (ids is None):
        raise InvalidParameter("text", "or input_ids must be set, and not both")
    param, value = ("text", text) if ids is None else ("input_ids", ids)
    is_list = isinstance(value, list) and (param == "text" or (bool(value) and isinstance(value[0], list)))
    put = _put_text if param == "text" else _put_ids
    if not is_list:
        return param, [partial(put, value, param)], False
    assert isinstance(value, list)
    if not value:
        raise InvalidParameter(param, "must be at least one")
    check_number(len(value), param)
    return param, [partial(put, each, f"{param}[{place}]") for place, each in enumerate(value)], True


def _put_text(value: object, name: str, request: GenerateRequest) -> None:
    request.text = check_text(value, name)


def _put_ids(value: object, name: str, request: GenerateRequest) -> None:
    request.token_ids.SetInParent()  # This sets an empty list, too.
    request.token_ids.ids.extend(check_ids(value, name))


class GenerateAnswer:
    """Each event has all of its answer's text so far, and the answer's index where the answers are a list."""

    ping = None

    def __init__(self, call: GenerateCall, token_text: TokenText) -> None:
        self.request = call.request
        self._call = call
        words = None if call.logprobs is None else SglangWords(token_text, call.logprobs)
        prompts = [TokenLists() for _ in call.requests]
        self._so_far = [_SoFar(words, prompt) for prompt in prompts for _ in range(call.answers_each)]
        self._num_finished = 0

    def whole(self, answers: Sequence[GenerateResponse]) -> Json | list[Json]:
        reported = [
            {**so_far.take(answer, most_logprobs=inf), "output_ids": list(answer.token_ids)}
            for so_far, answer in zip(self._so_far, answers, strict=True)
        ]
        return reported if self._call.is_list else reported[0]

    def events(self, response: GenerateResponse) -> list[Event]:
        most_logprobs = inf if response.HasField("finish") else _MOST_LOGPROBS
        reported = self._so_far[response.index].take(response, most_logprobs)
        if self._call.is_list:
            reported["index"] = response.index
        self._num_finished += response.HasField("finish")
        is_over = self._num_finished == self._call.num_answers
        return [Event(reported), Event("[DONE]")] if is_over else [Event(reported)]

    def failure(self, error: Exception) -> list[Event]:
        return [Event(error_json(error, "text"))]


class _SoFar:
    """This holds what one answer has reported so far. All answers to a prompt share `of_prompt`, the report
    on its tokens."""

    def __init__(self, words: SglangWords | None, of_prompt: TokenLists) -> None:
        self._words = words
        self._of_prompt, self._of_answer = of_prompt, TokenLists()
        self._text = ""
        self._num_tokens = 0

    def take(self, response: GenerateResponse, most_logprobs: float) -> Json:
        self._text += response.text
        self._num_tokens += len(response.token_ids)
        meta: Json = {"id": response.request_id, "completion_tokens": self._num_tokens, "finish_reason": None}
        if self._words is not None:
            self._words.add_prompt(self._of_prompt, response)
            self._of_answer.add(response.logprobs, self._words)
            meta |= self._words.meta(self._of_prompt, self._of_answer, most_logprobs)
        if response.HasField("finish"):
            meta |= _finished(response.finish)
        return {"text": self._text, "meta_info": meta}


def _finished(finish: Finish) -> Json:
    return {
        "finish_reason": _reason(finish),
        "completion_tokens": finish.usage.completion_tokens,
        "prompt_tokens": finish.usage.prompt_tokens,
        "cached_tokens": finish.usage.reused_tokens,
        "isthmus": isthmus_json(finish),
    }


_REASONS = {
    common_pb2.FINISH_REASON_STOP: "stop",
    common_pb2.FINISH_REASON_LENGTH: "length",
    common_pb2.FINISH_REASON_CAPACITY: "length",
}


def _reason(finish: Finish) -> Json:
    if word_of(finish, _REASONS) == "stop":
        return {"type": "stop", "matched": finish.matched_stop}
    return {"type": "length", "length": finish.usage.completion_tokens}
