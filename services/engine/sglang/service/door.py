"""Requests into SGLang's schedulers: token ids in, token ids out.

stream --Generate--> scheduler --Outputs--> chunks --a finish reason--> end
   +--left before its end: Abort          +--SGLang ends: Unavailable
"""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from services.engine.sglang.reports import Abort, Generate, Outputs
from services.engine.sglang.service.report_server import Say
from services.values.errors import InvalidRequest, IsthmusError, PeerFailed, Unavailable

Chunk = dict[str, Any]


class Door:
    """Of all DP ranks of a worker; on one loop."""

    def __init__(self) -> None:
        self._schedulers: dict[int, Say] = {}  # by DP rank
        self._open: dict[str, asyncio.Queue[Chunk | IsthmusError]] = {}  # by rid

    def __repr__(self) -> str:
        return f"Door(ranks={sorted(self._schedulers)} open={len(self._open)})"

    def connect(self, dp_rank: int, say: Say) -> None:
        """To the process that takes the rank's requests."""
        self._schedulers[dp_rank] = say

    def is_open(self, dp_rank: int) -> bool:
        return dp_rank in self._schedulers

    async def stream(self, body: dict[str, Any]) -> AsyncGenerator[Chunk, None]:
        """The chunks of one request; leaving them before the end aborts it.

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
        chunks = self._open[rid] = asyncio.Queue()
        try:
            say(Generate(body))
            while not ended:
                chunk = await chunks.get()
                ended = isinstance(chunk, IsthmusError) or chunk["meta_info"]["finish_reason"] is not None
                yield _read(chunk)
        finally:
            del self._open[rid]
            if not ended:
                say(Abort(rid))

    def take(self, outputs: Outputs) -> None:
        """Those of requests that were left are dropped."""
        for chunk in outputs.chunks:
            if (chunks := self._open.get(chunk["rid"])) is not None:
                chunks.put_nowait(chunk)

    def close(self, reason: str) -> None:
        """All requests end with Unavailable, and new ones begin no more."""
        self._schedulers.clear()
        for chunks in self._open.values():
            chunks.put_nowait(Unavailable(reason))


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
