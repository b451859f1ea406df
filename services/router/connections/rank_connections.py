"""There is a stream to every rank: a decode rank's carries requests, a prefill rank's reports load.

    follow(the ranks that there are) --> opened; where that failed, again after _RETRY_S
                                     --> retired where the rank is gone or lives anew

What runs at a decode rank that is retired may end.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import TypeVar

from services.router.connections.decode_client import DecodeClient
from services.router.connections.prefill_watch import PrefillWatch
from services.values.errors import ConfigError
from services.values.rank import RankAddress, RankKey

log = logging.getLogger(__name__)

_Connection = TypeVar("_Connection", DecodeClient, PrefillWatch)

_RETRY_S = 1.0


class Connections:
    """They live on the router's loop. `open_client` and `open_watch` may raise ConfigError."""

    def __init__(
        self,
        open_client: Callable[[RankAddress], DecodeClient],
        open_watch: Callable[[RankAddress], PrefillWatch],
    ) -> None:
        self.clients: dict[RankKey, DecodeClient] = {}
        self.watches: dict[RankKey, PrefillWatch] = {}
        self._open_client = open_client
        self._open_watch = open_watch
        self._decodes: Mapping[RankKey, RankAddress] = {}
        self._prefills: Mapping[RankKey, RankAddress] = {}
        self._retry: asyncio.TimerHandle | None = None
        self._retiring: dict[asyncio.Task[None], DecodeClient | PrefillWatch] = {}

    def follow(self, decodes: Mapping[RankKey, RankAddress], prefills: Mapping[RankKey, RankAddress]) -> None:
        """Take these as the ranks from now on."""
        self._decodes, self._prefills = decodes, prefills
        self._connect(self.clients, decodes, self._open_client)
        self._connect(self.watches, prefills, self._open_watch)

    def is_connected(self, rank: RankKey) -> bool:
        """Return whether a decode rank's stream is up."""
        client = self.clients.get(rank)
        return client is not None and client.connected.is_set()

    async def close(self) -> None:
        """Close all streams: requests that run anywhere fail with DecodeRankLost."""
        if self._retry is not None:
            self._retry.cancel()
        for connection in (*self.clients.values(), *self.watches.values(), *self._retiring.values()):
            await connection.close()
        await asyncio.gather(*self._retiring)

    def _connect(
        self,
        connections: dict[RankKey, _Connection],
        wanted: Mapping[RankKey, RankAddress],
        open_one: Callable[[RankAddress], _Connection],
    ) -> None:
        for rank, connection in list(connections.items()):
            if wanted.get(rank) != connection.address:
                del connections[rank]
                self._retire(rank, connection)
        for rank, address in wanted.items():
            if rank in connections:
                continue
            try:
                connections[rank] = open_one(address)
            except ConfigError as error:  # a certificate that is being replaced, perhaps
                log.warning("rank_connect_failed rank=%s error=%s", rank, error)
                self._try_again()

    def _retire(self, rank: RankKey, connection: DecodeClient | PrefillWatch) -> None:
        task = asyncio.create_task(connection.retire(), name=f"retire-{rank}")
        self._retiring[task] = connection
        task.add_done_callback(self._retiring.pop)

    def _try_again(self) -> None:
        if self._retry is None:
            self._retry = asyncio.get_running_loop().call_later(_RETRY_S, self._connect_again)

    def _connect_again(self) -> None:
        self._retry = None
        self.follow(self._decodes, self._prefills)
