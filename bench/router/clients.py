"""A request comes to the router as token ids over gRPC, or as text over HTTP. Both stream."""

import json
import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import grpc
import httpx

from bench.router.sizes import VOCAB_SIZE
from bench.router.text import Corpus
from services.wire.isthmus.v1 import common_pb2, generation_pb2, generation_pb2_grpc

_TIMEOUT_S = 60.0
_KNOWN_SHARE = 0.9  # of a prompt, that a conversation had before
_CONVERSATIONS = 4


@dataclass(frozen=True, slots=True)
class Answered:
    tokens: int
    responses: int  # messages or events that brought them


class Front(Protocol):
    """One of the router's two, asked for prompts of one length."""

    def prepare(self, count: int, max_tokens: int) -> Sequence[object]:
        """Requests that are yet to be sent: turns of a few conversations, each with a new end."""

    async def ask(self, request: object) -> Answered: ...


class GrpcFront:
    def __init__(self, channel: grpc.aio.Channel, prompt_tokens: int, rng: random.Random) -> None:
        self._stub = generation_pb2_grpc.GenerationStub(channel)
        self._prompt_tokens, self._rng = prompt_tokens, rng
        self._known = [self._ids(int(_KNOWN_SHARE * prompt_tokens)) for _ in range(_CONVERSATIONS)]

    def _ids(self, count: int) -> "array[int]":
        return array("I", [self._rng.randrange(1, VOCAB_SIZE) for _ in range(count)])

    def prepare(self, count: int, max_tokens: int) -> list[generation_pb2.GenerateRequest]:
        return [self._request(max_tokens) for _ in range(count)]

    def _request(self, max_tokens: int) -> generation_pb2.GenerateRequest:
        number = self._rng.randrange(_CONVERSATIONS)
        known = self._known[number]
        return generation_pb2.GenerateRequest(
            token_ids=generation_pb2.TokenIds(ids=known + self._ids(self._prompt_tokens - len(known))),
            sampling=common_pb2.SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True),
            conversation_id=f"grpc-{self._prompt_tokens}-{number}",
        )

    async def ask(self, request: object) -> Answered:
        tokens = responses = 0
        async for response in self._stub.Generate(request, timeout=_TIMEOUT_S):
            tokens += len(response.token_ids)
            responses += bool(response.token_ids)
        return Answered(tokens, responses)


class HttpFront:
    def __init__(
        self, client: httpx.AsyncClient, prompt_tokens: int, rng: random.Random, corpus: Corpus
    ) -> None:
        self._client, self._corpus = client, corpus
        self._prompt_tokens, self._rng = prompt_tokens, rng
        self._known = [corpus.piece(rng, int(_KNOWN_SHARE * prompt_tokens)) for _ in range(_CONVERSATIONS)]

    def prepare(self, count: int, max_tokens: int) -> list[bytes]:
        return [self._body(max_tokens) for _ in range(count)]

    def _body(self, max_tokens: int) -> bytes:
        number = self._rng.randrange(_CONVERSATIONS)
        new_tokens = self._prompt_tokens - int(_KNOWN_SHARE * self._prompt_tokens)
        body = {
            "prompt": self._known[number] + self._corpus.piece(self._rng, new_tokens),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "conversation_id": f"http-{self._prompt_tokens}-{number}",
        }
        return json.dumps(body).encode()

    async def ask(self, request: object) -> Answered:
        assert isinstance(request, bytes)
        responses, usage = 0, dict[str, int]()
        async with self._client.stream("POST", "/v1/completions", content=request) as answer:
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    responses += 1
                    usage = json.loads(line[6:]).get("usage") or usage
        return Answered(usage["completion_tokens"], responses)
