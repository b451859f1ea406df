"""What the bodies of chats and completions say alike."""

from collections.abc import Mapping
from dataclasses import dataclass

from services.router.dialects.body import Body, InvalidParameter
from services.router.dialects.call import Call, read_addressee, traceparent_of
from services.router.dialects.openai.constraint import read_constraint
from services.router.dialects.openai.echo import NO_ECHO, Echo, read_prompt_logprobs
from services.wire.isthmus.v1.generation_pb2 import GenerateRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAiCall(Call):
    include_usage: bool
    return_token_ids: bool  # those of prompts, too
    echo: Echo = NO_ECHO

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.request.sampling.HasField("logprobs"))

    @property
    def tells_text_alone(self) -> bool:
        """Of tokens that come, neither ids nor log-probabilities."""
        return not (self.wants_logprobs or self.return_token_ids or self.echo != NO_ECHO)


def make_call(
    body: Body, headers: Mapping[str, str], request: GenerateRequest, *, echoes: bool = False
) -> OpenAiCall:
    read_addressee(body, headers, request, body.text("prompt_cache_key"))
    stream, return_token_ids = body.flag("stream"), body.flag("return_token_ids")
    named = read_constraint(body)
    if named is not None:
        request.sampling.constraint.CopyFrom(named.constraint)
    return OpenAiCall(
        request=request,
        stream=stream,
        traceparent=traceparent_of(headers),
        include_usage=_read_include_usage(body.get("stream_options"), stream),
        constraint_param=named.param if named is not None else "",
        return_token_ids=return_token_ids,
        tells_prompt=return_token_ids,
        echo=read_prompt_logprobs(body, request, echoes=echoes),
    )


def _read_include_usage(stream_options: object, stream: bool) -> bool:
    if stream_options is None:
        return False
    if not stream:
        raise InvalidParameter("stream_options", "needs stream to be true")
    if not isinstance(stream_options, dict):
        raise InvalidParameter("stream_options", "must be an object")
    return Body(stream_options).flag("include_usage")
