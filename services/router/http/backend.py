"""What the HTTP APIs need of the router."""

from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

from services.values.errors import IsthmusError
from services.wire.isthmus.v1.generation_pb2 import (
    GenerateRequest,
    GenerateResponse,
    ListModelsResponse,
    TokenizeResponse,
    WatchClusterRequest,
    WatchClusterResponse,
)


class GenerationBackend(Protocol):
    """The gRPC API serves the same."""

    def generate(
        self, request: GenerateRequest, timeout_s: float | None, traceparent: str, *, tells_prompt: bool
    ) -> AsyncGenerator[GenerateResponse, None]:
        """Responses as in generation.proto, the first one with the prompt's ids if it `tells_prompt`; the
        last one carries `finish`. Closing it aborts the request.

        `timeout_s` and `traceparent` are the client's, or None and "".

        Raises:
            IsthmusError: any of services/values/errors.py, at the first response or at a later one.
        """

    def time_limit_s(self, timeout_s: float | None) -> float:
        """In which a call with that `timeout_s` is over, with a moment for its last word."""

    def rejected(self, error: IsthmusError) -> None:
        """Told of each request that cannot be read, for it never comes to `generate`."""

    async def tokenize(self, request: GenerateRequest) -> TokenizeResponse:
        """Raises InvalidRequest, NotFound, Unavailable."""

    async def detokenize(self, model: str, token_ids: Sequence[int]) -> str:
        """Raises InvalidRequest, NotFound."""

    async def list_models(self) -> ListModelsResponse: ...

    def watch(self, request: WatchClusterRequest) -> AsyncGenerator[WatchClusterResponse, None]:
        """Responses as in generation.proto, until it is closed or the router stops.

        Raises InvalidRequest and Forbidden; at the first response NoCapacity, Unavailable.
        """

    def check_usable(self) -> None:
        """Raises Unavailable, saying why, while no rank could take any request."""

    def context_tokens(self) -> int | None:
        """Prompt and answer together; None while no rank is known."""

    def is_running(self, tenant: str, request_id: str) -> bool: ...

    def token_text(self, token_id: int) -> str:
        """The text of one token, for log-probabilities."""

    def token_bytes(self, token_id: int) -> bytes | None:
        """Of a token that is a part of a character, which its text cannot tell. None: not known."""
