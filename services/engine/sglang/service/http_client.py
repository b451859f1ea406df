"""SGLang's own HTTP API, on loopback: whether it is up, and its end. Requests and loads go by the door."""

import aiohttp

from services.engine.sglang.service.launch.settings import IDLE_CONNECTION_S

_CLIENT_ERRORS = (aiohttp.ClientError, ConnectionError, TimeoutError)
_SHORT_S = 5.0


class SglangHttp:
    """Made and used on one loop."""

    def __init__(self, port: int) -> None:
        self.base = f"http://127.0.0.1:{port}"
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(keepalive_timeout=IDLE_CONNECTION_S)
        )

    async def close(self) -> None:
        await self._session.close()

    async def healthy(self) -> bool:
        try:
            async with self._session.get(f"{self.base}/health", timeout=_timeout()) as response:
                return bool(response.status == 200)
        except _CLIENT_ERRORS:
            return False

    async def abort_all(self) -> None:
        """No error when there is no SGLang any more."""
        try:
            url, everything = f"{self.base}/abort_request", {"abort_all": True}
            await self._session.post(url, json=everything, timeout=_timeout())
        except _CLIENT_ERRORS:
            return


def _timeout() -> aiohttp.ClientTimeout:
    return aiohttp.ClientTimeout(total=_SHORT_S)
