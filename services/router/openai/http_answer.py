"""An answer in the making, and on its way to a client that may leave, or stop reading.

responses of the router --> one JSON object, or server-sent events --> sent until the client leaves
"""

import asyncio
import json
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from services.router.openai.answer import (
    AnswerFormat,
    Json,
    Piece,
    finish_reason,
    isthmus_json,
    usage_json,
)
from services.router.openai.errors import error_json
from services.router.openai.request import GenerationCall
from services.values.errors import Aborted, DeadlineExceeded, IsthmusError, ProtocolError
from services.wire.isthmus.v1.generation_pb2 import GenerateResponse

_T = TypeVar("_T")

# Next line, line separator, paragraph separator: JSON leaves them as they are, and a client that splits a
# stream as Python's splitlines does (httpx) would cut an event there.
_LINE_SEPARATORS = "\x85\u2028\u2029"


class HttpAnswer:
    """One answer in the making."""

    def __init__(self, call: GenerationCall, answer_format: AnswerFormat, model: str, created: int) -> None:
        self._call = call
        self._format = answer_format
        self._model = model
        self._created = created

    async def whole(self, responses: AsyncGenerator[GenerateResponse, None]) -> Json:
        """Closes `responses`."""
        joined = GenerateResponse()
        texts = []
        async with aclosing(responses):
            async for response in responses:
                texts.append(response.text)
                joined.MergeFrom(response)  # the lists grow; text and finish are replaced
        _check_finished(joined)
        joined.text = "".join(texts)
        return {
            **self._envelope(self._format.object_name, joined, [self._format.whole(self._piece(joined))]),
            "usage": usage_json(joined.finish.usage),
            "isthmus": isthmus_json(joined.finish),
        }

    async def events(self, responses: AsyncGenerator[GenerateResponse, None]) -> AsyncGenerator[bytes, None]:
        """Server-sent events; an error before the first of them is raised. Closes `responses`."""
        started = False
        response = GenerateResponse()
        try:
            async with aclosing(responses):
                async for response in responses:
                    for chunk in self._chunks(response, is_first=not started):
                        started = True
                        yield _event(chunk)
            _check_finished(response)
        except Exception as error:
            if not started:
                raise
            yield _event(error_json(error))
            if not isinstance(error, IsthmusError):
                raise
        else:
            yield b"data: [DONE]\n\n"

    def _chunks(self, response: GenerateResponse, is_first: bool) -> list[Json]:
        piece = self._piece(response)
        choices = [self._format.opening()] if is_first else []
        if piece.text or piece.logprobs or piece.token_ids or piece.finish_reason:
            choices.append(self._format.delta(piece))
        chunks = [self._chunk(response, [choice]) for choice in choices if choice is not None]
        if response.HasField("finish"):
            chunks[-1]["isthmus"] = isthmus_json(response.finish)
            if self._call.include_usage:
                chunks.append({**self._chunk(response, []), "usage": usage_json(response.finish.usage)})
        return chunks

    def _chunk(self, response: GenerateResponse, choices: list[Json]) -> Json:
        chunk = self._envelope(self._format.chunk_object_name, response, choices)
        return {**chunk, "usage": None} if self._call.include_usage else chunk

    def _envelope(self, object_name: str, response: GenerateResponse, choices: list[Json]) -> Json:
        return {
            "id": self._format.id_prefix + response.request_id,
            "object": object_name,
            "created": self._created,
            "model": self._model,
            "choices": choices,
        }

    def _piece(self, response: GenerateResponse) -> Piece:
        return Piece(
            response.text,
            token_ids=response.token_ids if self._call.return_token_ids else None,
            logprobs=response.logprobs if self._call.wants_logprobs else None,
            finish_reason=finish_reason(response.finish) if response.HasField("finish") else None,
        )


def _check_finished(last: GenerateResponse) -> None:
    if not last.HasField("finish"):
        raise ProtocolError("the generation ended without a finish")


def _event(value: Json) -> bytes:
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    for separator in _LINE_SEPARATORS:
        text = text.replace(separator, f"\\u{ord(separator):04x}")
    return b"data: " + text.encode() + b"\n\n"


class EventStream(Response):
    """Sends server-sent events as they come, until the client leaves or the time is over: it may have stopped
    reading. Closes `events`."""

    def __init__(self, events: AsyncGenerator[bytes, None], time_limit_s: float) -> None:
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(headers=headers, media_type="text/event-stream")
        del self.headers["content-length"]
        self._events = events
        self._time_limit_s = time_limit_s
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.timeout(self._time_limit_s):
                await until_disconnect(receive, self._send_events(send))
        except ClientLeft:
            return  # nobody to answer, and a stream that has begun cannot change its status
        except TimeoutError:
            if not self._started:
                raise DeadlineExceeded("the deadline has passed") from None

    async def _send_events(self, send: Send) -> None:
        async with aclosing(self._events) as events:
            event = await anext(events)  # what it raises can still have a status of its own
            self._started = True
            await send(
                {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
            )
            await send({"type": "http.response.body", "body": event, "more_body": True})
            async for event in events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


class ClientLeft(Aborted):
    """Nobody is there to be answered."""


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, _T]) -> _T:
    """What `work` returns; when the client leaves first, `work` is cancelled and has ended.

    Raises:
        ClientLeft: nothing can be sent any more.
    """
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientLeft("the client closed the connection")
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
