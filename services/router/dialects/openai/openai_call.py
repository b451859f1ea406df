"""The bodies of chats and completions say this alike."""

from collections.abc import Mapping
from dataclasses import dataclass

from services.router.dialects.dialect_call import Call, read_addressee, traceparent_of
from services.router.dialects.json_body import Body, InvalidParameter
from services.router.dialects.openai.constraint_params import read_constraint
from services.router.dialects.openai.echo import NO_ECHO, Echo, read_prompt_logprobs
from services.wire.isthmus.v1.generation_pb2 import GenerateRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAiCall(Call):
    include_usage: bool
    usage_in_chunks: bool  # They report what has been used so far, as vLLM's do.
    return_token_ids: bool  # Those of prompts are returned, too.
    echo: Echo = NO_ECHO

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.request.sampling.HasField("logprobs"))

    @property
    def tells_text_alone(self) -> bool:
        """Return whether a chunk of text needs nothing beside it: no ids, log-probabilities or usage."""
        has_more = self.wants_logprobs or self.return_token_ids or self.usage_in_chunks
        return not (has_more or self.echo != NO_ECHO)


def make_call(
    body: Body, headers: Mapping[str, str], request: GenerateRequest, *, echoes: bool = False
) -> OpenAiCall:
    read_addressee(body, headers, request, body.text("prompt_cache_key"))
    stream, return_token_ids = body.flag("stream"), body.flag("return_token_ids")
    options = _read_stream_options(body.get("stream_options"), stream)
    include_usage = options.flag("include_usage")
    usage_in_chunks = options.flag("continuous_usage_stats") and include_usage
    named = read_constraint(body)
    if named is not None:
        request.sampling.constraint.CopyFrom(named.constraint)
    return OpenAiCall(
        request=request,
        stream=stream,
        traceparent=traceparent_of(headers),
        include_usage=include_usage,
        usage_in_chunks=usage_in_chunks,
        constraint_param=named.param if named is not None else "",
        return_token_ids=return_token_ids,
        tells_prompt=return_token_ids or usage_in_chunks,
        echo=read_prompt_logprobs(body, request, echoes=echoes),
    )


def _read_stream_options(stream_options: object, stream: bool) -> Body:
    if stream_options is None:
        return Body({})
    if not stream:
        raise InvalidParameter("stream_options", "needs stream to be true")
    if not isinstance(stream_options, dict):
        raise InvalidParameter("stream_options", "must be an object")
    return Body(stream_options, "stream_options.")
