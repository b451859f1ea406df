"""This module reads a body's sampling parameters and fills in the defaults. SamplingParams checks
their ranges."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from services.router.dialects.json_body import INT32_MAX, UINT32_MAX, Body, InvalidParameter, check_text
from services.values.errors import ConfigError, InvalidRequest
from services.values.request import MAX_BAD_WORDS, MAX_STOP_STRINGS, SamplingParams
from services.wire.isthmus.v1 import common_pb2


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """A None means OpenAI's default, which constrains nothing."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


OPENAI = SamplingDefaults()


def defaults_of(generation_config: Mapping[str, Any]) -> SamplingDefaults:
    """Return the defaults in a model's generation_config.json. As in vLLM and SGLang, do_sample is ignored.
    Raises ConfigError where a default is not a number, or is out of its range."""
    stated = {field.name: generation_config.get(field.name) for field in fields(SamplingDefaults)}
    values = {name: value for name, value in stated.items() if value is not None}
    for name, value in values.items():
        allowed = int if name == "top_k" else int | float
        if isinstance(value, bool) or not isinstance(value, allowed):
            raise _unusable(f"{name} is {value!r}")
    if values.get("top_k") == -1:
        values["top_k"] = 0  # Other servers write -1 for "all".
    try:
        SamplingParams(**values)
    except InvalidRequest as error:
        raise _unusable(str(error)) from error
    return SamplingDefaults(**values)


def fill_in(sampling: common_pb2.SamplingParams, defaults: SamplingDefaults) -> None:
    """Set what the client has left open, and the model states."""
    for field in fields(SamplingDefaults):
        value = getattr(defaults, field.name)
        if value is not None and not sampling.HasField(field.name):
            setattr(sampling, field.name, value)


def _unusable(problem: str) -> ConfigError:
    return ConfigError(
        f"generation_config.json cannot be sampled by: {problem}; --sampling-defaults=openai leaves it aside"
    )


def read_sampling(body: Body, max_tokens: int | None, logprobs: int | None) -> common_pb2.SamplingParams:
    """Return what the body states; `fill_in` adds the model's defaults, once the model is known."""
    top_k = body.integer("top_k", -1, UINT32_MAX)
    seed = body.integer("seed", -(2**63), 2**64 - 1)
    return common_pb2.SamplingParams(
        temperature=body.number("temperature"),
        top_p=body.number("top_p"),
        top_k=0 if top_k == -1 else top_k,  # Other servers write -1 for "all".
        min_p=body.number("min_p"),
        seed=None if seed is None else seed % 2**64,
        max_tokens=max_tokens,
        min_tokens=body.integer("min_tokens", -INT32_MAX, INT32_MAX),
        stop=read_stop(body.get("stop")),
        stop_token_ids=body.integers("stop_token_ids"),
        ignore_eos=body.flag("ignore_eos"),
        frequency_penalty=body.number("frequency_penalty"),
        presence_penalty=body.number("presence_penalty"),
        repetition_penalty=body.number("repetition_penalty"),
        logprobs=logprobs,
        logit_bias=_read_logit_bias(body),
        bad_words=_read_bad_words(body),
        # vLLM uses the first name, and SGLang the second.
        include_stop_str_in_output=body.flag("include_stop_str_in_output") or body.flag("no_stop_trim"),
    )


def _read_logit_bias(body: Body) -> dict[int, float]:
    """Return the biases by token id; in JSON the keys are texts. Some clients send an empty list for none."""
    name = "logit_bias"
    if body.get(name) == []:
        return {}
    biases = body.inner(name)
    return {_token_id(key, body.name_of(name)): biases.number(key) or 0.0 for key in biases.fields}


def _token_id(key: str, name: str) -> int:
    if not (key.isascii() and key.isdecimal() and len(key) <= 10 and int(key) <= UINT32_MAX):
        raise InvalidParameter(name, f"must have token ids as its keys, got {key[:40]!r}")
    return int(key)


def _read_bad_words(body: Body) -> list[str]:
    name = "bad_words"
    words = body.get(name)
    if not isinstance(words, list | None):
        raise body.wrong(name, "must be a list of strings")
    if len(words or ()) > MAX_BAD_WORDS:
        raise body.wrong(name, f"must be at most {MAX_BAD_WORDS} strings")
    return [check_text(word, f"{body.name_of(name)}[{index}]") for index, word in enumerate(words or ())]


def read_stop(value: object, name: str = "stop") -> list[str]:
    if value is None:
        return []
    if isinstance(value, list):
        if len(value) > MAX_STOP_STRINGS:
            raise InvalidParameter(name, f"must be at most {MAX_STOP_STRINGS} strings")
        return [check_text(item, f"{name}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, str):
        return [check_text(value, name)]
    raise InvalidParameter(name, "must be a string or a list of strings")
