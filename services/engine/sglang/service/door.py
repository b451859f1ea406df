"""Requests go into SGLang's schedulers: token ids in, token ids out.

stream --Generate--> scheduler --Outputs--> chunks --a finish reason--> end
   |                                 +-----> tokens, to who is told them
   +--left before its end: Abort     +--SGLang ends: Unavailable
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Set
from typing import Any

from services.engine.sglang.reports import Abort, Generate, Outputs
from services.engine.sglang.service.report_server import Say
from services.values.errors import InvalidRequest, IsthmusError, PeerFailed, Unavailable

Chunk = dict[str, Any]


class Telling:
    """It is told tokens that nothing else is said with, in the place of a chunk; not those of `stops`."""

    def __init__(self, tell: Callable[[int], None], stops: Set[int]) -> None:
        self._tell = tell
        self._stops = stops
        self._is_on = False

    def begin(self) -> None:
        """Tell from now on: all that has come so far has been passed on."""
        self._is_on = True

    def take(self, ids: list[int]) -> bool:
        if not self._stops.isdisjoint(ids):
            self._is_on = False  # With a stop the request ends, for us.
        if self._is_on:
            for token_id in ids:
                self._tell(token_id)
        return self._is_on


class _Open:
    def __init__(self, telling: Telling | None) -> None:
        self.chunks: asyncio.Queue[Chunk | IsthmusError] = asyncio.Queue()
        self._telling = telling

    def put_tokens(self, rid: str, ids: list[int]) -> None:
        if self._telling is None or not self.chunks.empty() or not self._telling.take(ids):
            self.chunks.put_nowait({"rid": rid, "output_ids": ids, "meta_info": {"finish_reason": None}})


class Door:
    def __init__(self) -> None:
        self._schedulers: dict[int, Say] = {}  # They go by DP rank.
        self._open: dict[str, _Open] = {}  # They go by rid.

    def __repr__(self) -> str:
        return f"Door(ranks={sorted(self._schedulers)} open={len(self._open)})"

    def connect(self, dp_rank: int, say: Say) -> None:
        self._schedulers[dp_rank] = say

    def is_open(self, dp_rank: int) -> bool:
        return dp_rank in self._schedulers

    async def stream(
        self, body: dict[str, Any], telling: Telling | None = None
    ) -> AsyncGenerator[Chunk, None]:
        """Yield the chunks of one request, but for what `telling` takes; leaving them before the end aborts
        it.

        Raises:
            InvalidRequest, PeerFailed: SGLang gives it up; a transfer that failed is among the reasons.
            InvalidRequest: it is larger than what a scheduler reads, or there is one of that name.
            Unavailable: SGLang itself is gone.
        """
        say = self._schedulers.get(body["routed_dp_rank"])
        if say is None:
            raise Unavailable("SGLang is not connected")
        rid, ended = body["rid"], False
        if rid in self._open:
            raise InvalidRequest(f"request {rid} is under way already")
        opened = self._open[rid] = _Open(telling)
        try:
            say(Generate(body))
            while not ended:
                chunk = await opened.chunks.get()
                ended = isinstance(chunk, IsthmusError) or chunk["meta_info"]["finish_reason"] is not None
                yield _read(chunk)
        finally:
            del self._open[rid]
            if not ended:
                say(Abort(rid))

    def take(self, outputs: Outputs) -> None:
        """Pass outputs on; those of requests that were left are dropped."""
        for chunk in outputs.chunks:
            if (opened := self._open.get(chunk["rid"])) is not None:
                opened.chunks.put_nowait(chunk)
        for rid, ids in outputs.tokens.items():
            if (opened := self._open.get(rid)) is not None:
                opened.put_tokens(rid, ids)

    def close(self, reason: str) -> None:
        """End all requests with Unavailable, and let no new ones begin."""
        self._schedulers.clear()
        for opened in self._open.values():
            opened.chunks.put_nowait(Unavailable(reason))


def _read(chunk: Chunk | IsthmusError) -> Chunk:
    if isinstance(chunk, IsthmusError):
        raise chunk
    reason = chunk["meta_info"]["finish_reason"] or {}
    if reason.get("type") == "abort":
        raise _failure(int(reason.get("status_code") or 500), str(reason.get("message")))
    return chunk


def _failure(status: int, message: str) -> IsthmusError:
    if status == 400:
        return InvalidRequest(f"SGLang refuses the request: {message}")
    return PeerFailed(f"SGLang failed the request: {message}")
