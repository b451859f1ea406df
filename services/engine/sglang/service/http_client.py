"""SGLang's own HTTP API, on loopback: token ids in, token ids out.

Leaving the iterator of `stream` closes the connection, upon which SGLang aborts the request.
"""

import json
from collections.abc import AsyncGenerator
from typing import Any

import aiohttp

from services.engine.sglang.service.launch.settings import IDLE_CONNECTION_S
from services.values.errors import InvalidRequest, IsthmusError, PeerFailed, Unavailable

_CLIENT_ERRORS = (aiohttp.ClientError, ConnectionError, TimeoutError)
_SHORT_S = 5.0


class SglangHttp:
    """Made and used on one loop."""

    def __init__(self, port: int) -> None:
        self.base = f"http://127.0.0.1:{port}"
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_CONNECTION_S),
            timeout=aiohttp.ClientTimeout(total=None),
            read_bufsize=1 << 22,
        )

    async def close(self) -> None:
        await self._session.close()

    async def healthy(self) -> bool:
        try:
            async with self._session.get(f"{self.base}/health", timeout=_timeout()) as response:
                return bool(response.status == 200)
        except _CLIENT_ERRORS:
            return False

    async def get(self, path: str) -> Any:
        """Raises Unavailable."""
        try:
            async with self._session.get(f"{self.base}{path}", timeout=_timeout()) as response:
                response.raise_for_status()
                return await response.json()
        except _CLIENT_ERRORS as error:
            raise Unavailable(f"SGLang does not answer {path}: {error}") from error

    async def stream(self, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """The chunks of one request.

        Raises:
            InvalidRequest, PeerFailed: SGLang gives it up; a transfer that failed is among the reasons.
            Unavailable: SGLang itself is gone.
        """
        url = f"{self.base}/generate"
        try:
            async with self._session.post(url, json={**body, "stream": True}) as response:
                if response.status != 200:
                    raise _failure(response.status, await response.text())
                async for line in response.content:
                    chunk = _chunk(line)
                    if chunk is not None:
                        yield chunk
        except _CLIENT_ERRORS as error:
            raise Unavailable(f"SGLang broke off: {error!r}") from error

    async def abort(self, rid: str) -> None:
        """No error when there is no such request, or no SGLang any more."""
        await self._abort({"rid": rid})

    async def abort_all(self) -> None:
        """Likewise."""
        await self._abort({"abort_all": True})

    async def _abort(self, which: dict[str, Any]) -> None:
        try:
            await self._session.post(f"{self.base}/abort_request", json=which, timeout=_timeout())
        except _CLIENT_ERRORS:
            return


def _chunk(line: bytes) -> dict[str, Any] | None:
    text = line.strip()
    if not text.startswith(b"data:") or text == b"data: [DONE]":
        return None
    chunk: dict[str, Any] = json.loads(text[len(b"data:") :])
    if "error" in chunk:
        raise _failure(int(chunk["error"].get("code") or 500), str(chunk["error"].get("message")))
    reason = chunk["meta_info"].get("finish_reason") or {}
    if reason.get("type") == "abort":
        raise _failure(int(reason.get("status_code") or 500), str(reason.get("message")))
    return chunk


def _failure(status: int, message: str) -> IsthmusError:
    if status == 400:
        return InvalidRequest(f"SGLang refuses the request: {message}")
    return PeerFailed(f"SGLang failed the request: {message}")


def _timeout() -> aiohttp.ClientTimeout:
    return aiohttp.ClientTimeout(total=_SHORT_S)
