"""What all bodies and headers say beside the prompt and the sampling."""

from collections.abc import Mapping
from dataclasses import dataclass

from services.observe import traces
from services.router.dialects.body import Body, InvalidParameter
from services.values.request import MAX_ID_CHARS, is_id
from services.wire.isthmus.v1.generation_pb2 import GenerateRequest

REQUEST_ID = "x-request-id"


@dataclass(frozen=True, slots=True)
class GenerationCall:
    """What the client asks for, and how it wants the answer."""

    request: GenerateRequest
    stream: bool
    include_usage: bool
    return_token_ids: bool
    traceparent: str  # "": the client sent none

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.request.sampling.HasField("logprobs"))


def make_call(body: Body, headers: Mapping[str, str], request: GenerateRequest) -> GenerationCall:
    request.model = body.text("model")
    request.request_id = headers.get(REQUEST_ID, "")
    request.tenant = _read_tenant(body.text("cache_salt"), headers.get("x-isthmus-tenant", ""))
    request.conversation_id = headers.get("x-isthmus-conversation") or body.text("conversation_id")
    stream = body.flag("stream")
    return GenerationCall(
        request,
        stream,
        _read_include_usage(body.get("stream_options"), stream),
        body.flag("return_token_ids"),
        headers.get(traces.TRACEPARENT, ""),
    )


def _read_tenant(cache_salt: str, of_header: str) -> str:
    """vLLM's cache_salt is what a tenant is here; where both are given they must be the same, for neither may
    be left out: who set the header keeps tenants apart, and so does who set the salt."""
    if cache_salt and of_header and cache_salt != of_header:
        raise InvalidParameter(
            "cache_salt", "differs from the header x-isthmus-tenant; leave one of them out"
        )
    if not is_id(cache_salt):
        raise InvalidParameter("cache_salt", f"must be at most {MAX_ID_CHARS} printable characters")
    return of_header or cache_salt


def _read_include_usage(stream_options: object, stream: bool) -> bool:
    if stream_options is None:
        return False
    if not stream:
        raise InvalidParameter("stream_options", "needs stream to be true")
    if not isinstance(stream_options, dict):
        raise InvalidParameter("stream_options", "must be an object")
    return Body(stream_options).flag("include_usage")
