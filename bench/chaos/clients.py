"""Clients of a chaos run: conversations over gRPC and HTTP, and what each does when its router dies.

ask a router --tokens--> finished
     ^  |--we have had enough--> cancelled
     |  |--error, and the router was killed meanwhile--+
     +---------------- the same, of another router <---+
        |--any other error--> lost
"""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol

import grpc
import httpx

from bench.chaos.answers import Answer, Asked, Ended, Failure, Front
from bench.chaos.processes import Router
from services.net import channels
from services.wire.isthmus.v1 import common_pb2, generation_pb2, generation_pb2_grpc

DEADLINE_S = 300.0  # of one try: no fault lasts for so long
_LOOK_S = 0.05
_NOTICED_S = 1.0  # that a connection is gone may be known before its process has been buried


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens, or the last word: where they were generated, and how many of the prompt's were pulled."""

    tokens: tuple[int, ...] = ()
    decode_rank: str = ""
    pulled_tokens: int = 0


class ClientError(Exception):
    """A client raises this; `status` is gRPC's name, HTTP's number or the exception's name."""

    def __init__(self, status: str, text: str) -> None:
        super().__init__(f"{status}: {text}")
        self.status = status


class Balancer(Protocol):
    @property
    def ready_routers(self) -> list[Router]: ...

    def died(self, router: Router) -> bool: ...

    def clock(self) -> float: ...


@dataclass
class Clients:
    """All clients share connections to every life of a router."""

    balancer: Balancer
    _channels: dict[Router, grpc.aio.Channel] = field(default_factory=dict)
    _https: dict[Router, httpx.AsyncClient] = field(default_factory=dict)

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close()
        for client in self._https.values():
            await client.aclose()

    async def ask(self, asked: Asked) -> Answer:
        asking = _Asking(asked, self.balancer)
        while asking.ended is None:
            router = await self._router(asked.number + len(asking.failures))
            asking.begin(router)
            try:
                async with asyncio.timeout(DEADLINE_S), aclosing(self._pieces(router, asked)) as pieces:
                    await asking.read(pieces)
            except (ClientError, TimeoutError) as error:
                await asking.failed(router, error)
        return asking.answer

    async def _router(self, number: int) -> Router:
        """Round robin. Waits until there is one: a run spares one of them at any time."""
        while not (routers := self.balancer.ready_routers):
            await asyncio.sleep(_LOOK_S)
        return routers[number % len(routers)]

    def _pieces(self, router: Router, asked: Asked) -> AsyncGenerator[Piece, None]:
        return self._over_grpc(router, asked) if asked.front is Front.GRPC else self._over_http(router, asked)

    async def _over_grpc(self, router: Router, asked: Asked) -> AsyncGenerator[Piece, None]:
        if router not in self._channels:
            self._channels[router] = channels.open_channel(router.endpoint)
        call = generation_pb2_grpc.GenerationStub(self._channels[router]).Generate(_request(asked))
        try:
            async for response in call:
                yield Piece(tuple(response.token_ids), "", response.finish.usage.pulled_tokens)
                for placement in response.finish.placements[-1:]:
                    yield Piece(decode_rank=f"{placement.decode.worker}/{placement.decode.rank}")
        except grpc.aio.AioRpcError as error:
            raise ClientError(error.code().name, error.details() or "") from error
        finally:
            call.cancel()

    async def _over_http(self, router: Router, asked: Asked) -> AsyncGenerator[Piece, None]:
        if router not in self._https:
            limits = httpx.Limits(max_connections=None)
            self._https[router] = httpx.AsyncClient(
                base_url=f"http://{router.http}", timeout=None, limits=limits, trust_env=False
            )
        call = self._https[router].stream(
            "POST", "/v1/completions", json=_body(asked), headers=_headers(asked)
        )
        try:
            async with call as response:
                if response.status_code != 200:
                    raise ClientError(f"HTTP {response.status_code}", (await response.aread()).decode())
                async for piece in _pieces_of(response):
                    yield piece
        except httpx.HTTPError as error:
            raise ClientError(type(error).__name__, str(error)) from error


class _Asking:
    """One request, however often it has to be sent."""

    def __init__(self, asked: Asked, balancer: Balancer) -> None:
        self.asked, self.failures = asked, list[Failure]()
        self.ended: Ended | None = None
        self._balancer, self._began_s = balancer, balancer.clock()
        self._tokens: list[int] = []  # that have ever come
        self._num_again = 0  # of those that come now
        self._arrivals_s: list[float] = []
        self._contradicts = False
        self._routers: set[str] = set()
        self._decode_rank = ""
        self._pulled_tokens = 0

    def begin(self, router: Router) -> None:
        self._routers.add(router.name)
        self._num_again = 0

    async def read(self, pieces: AsyncGenerator[Piece, None]) -> None:
        async for piece in pieces:
            self._decode_rank = piece.decode_rank or self._decode_rank
            self._pulled_tokens += piece.pulled_tokens
            self._take(piece.tokens)
            enough = self.asked.cancel_after
            if enough is not None and self._num_again >= enough:
                self.ended = Ended.CANCELLED
                return
        self.ended = Ended.FINISHED

    def _take(self, tokens: tuple[int, ...]) -> None:
        known = self._tokens[self._num_again : self._num_again + len(tokens)]
        self._contradicts |= tuple(known) != tokens[: len(known)]
        if new := tokens[len(known) :]:
            self._tokens.extend(new)
            self._arrivals_s.append(self._balancer.clock())
        self._num_again += len(tokens)

    async def failed(self, router: Router, error: Exception) -> None:
        status = error.status if isinstance(error, ClientError) else type(error).__name__
        await asyncio.sleep(0 if self._balancer.died(router) else _NOTICED_S)
        died = self._balancer.died(router)
        now = self._balancer.clock()
        self.failures.append(Failure(status, router.name, str(error), now, died))
        if not died:
            self.ended = Ended.LOST

    @property
    def answer(self) -> Answer:
        assert self.ended is not None
        return Answer(
            self.asked,
            tuple(self._tokens),
            self.ended,
            self._began_s,
            tuple(self._arrivals_s),
            tuple(self.failures),
            frozenset(self._routers),
            self._decode_rank,
            self._contradicts or (self.ended is Ended.FINISHED and self._num_again < len(self._tokens)),
            self._pulled_tokens,
        )


def _request(asked: Asked) -> generation_pb2.GenerateRequest:
    sampling = common_pb2.SamplingParams(
        temperature=asked.temperature, seed=asked.seed, max_tokens=asked.max_tokens, ignore_eos=True
    )
    return generation_pb2.GenerateRequest(
        token_ids=generation_pb2.TokenIds(ids=asked.prompt_ids),
        sampling=sampling,
        conversation_id=asked.conversation,
        tenant=asked.tenant,
    )


def _body(asked: Asked) -> dict[str, Any]:
    return {
        "prompt": list(asked.prompt_ids),
        "temperature": asked.temperature,
        "top_p": 1,
        "seed": asked.seed,
        "max_tokens": asked.max_tokens,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }


def _headers(asked: Asked) -> dict[str, str]:
    named = {"x-isthmus-conversation": asked.conversation, "x-isthmus-tenant": asked.tenant}
    return {name: value for name, value in named.items() if value}


async def _pieces_of(response: httpx.Response) -> AsyncGenerator[Piece, None]:
    """Yield the pieces of the server-sent events. Raises ClientError for one that says so, and where the end
    is missing."""
    async for line in response.aiter_lines():
        if line == "data: [DONE]":
            return
        if line.startswith("data: "):
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise ClientError(
                    f"HTTP event {event['error'].get('type')}", event["error"].get("message", "")
                )
            for choice in event["choices"]:
                yield Piece(tuple(choice.get("token_ids") or ()))
            for placement in event.get("isthmus", {"placements": ()})["placements"][-1:]:
                yield Piece(decode_rank=placement["decode_rank"])
    raise ClientError("HTTP cut off", "the stream ended without [DONE]")
