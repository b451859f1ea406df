"""Tokens of a prompt, and the text of tokens, as vLLM and SGLang are asked for them."""

from collections.abc import Mapping
from dataclasses import dataclass

from services.router.dialects.body import Body
from services.router.dialects.openai.chat.call import read_chat_call
from services.router.dialects.openai.completion_call import read_completion_call
from services.router.dialects.sampling_defaults import OPENAI
from services.wire.isthmus.v1.generation_pb2 import GenerateRequest


@dataclass(frozen=True, slots=True)
class TokenizeCall:
    request: GenerateRequest
    wants_texts: bool


@dataclass(frozen=True, slots=True)
class DetokenizeCall:
    model: str
    token_ids: list[int]


def read_tokenize_call(fields: Mapping[str, object], headers: Mapping[str, str]) -> TokenizeCall:
    """A prompt, or messages; with whatever changes them. Raises InvalidParameter."""
    body, read = Body(fields), read_completion_call
    if body.get("messages") is not None:
        read = read_chat_call
    call = read(fields, headers, OPENAI)
    if call.more:
        raise body.wrong("prompt", "must be one prompt; send a request for each of several")
    return TokenizeCall(call.request, body.flag("return_token_strs"))


def read_detokenize_call(fields: Mapping[str, object], headers: Mapping[str, str]) -> DetokenizeCall:
    """Raises InvalidParameter."""
    body = Body(fields)
    if body.get("tokens") is None:
        raise body.wrong("tokens", "must be set")
    return DetokenizeCall(body.text("model"), body.integers("tokens"))
