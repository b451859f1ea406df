"""This module limits the bytes of clients' messages that a process holds, for all of its servers together.

    nothing has come        the size is unknown, and nothing is counted
    still incomplete after  it counts as a large message on its way, of which only a number are read at a
      EARLY_S                 time: one more ends the one that has been read for longest, if that is
                              OLD_S at least, and is refused otherwise
    it is complete          its length is counted until its call ends; above the limit it is refused

If calls have owners, and more than half of the limit is in use, a message is refused only if its owner would
hold more than an equal share. One share is kept for the next owner, so that nobody alone can fill the limit.
Each owner may have one message.

A client may leave a stream of messages idle: a message on its way there has no time limit, and uses one of
STREAMS separate places, which are not within the limit.

gRPC reports the length of a message only when it is complete, so a message on its way counts as the largest
one. Over HTTP a body is counted piece by piece as it arrives, and nothing else is.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from services.values.errors import ConfigError, DeadlineExceeded, NoCapacity

EARLY_S = 0.2  # A message sent together with its call's head arrives within this time, on a busy machine too.
OLD_S = 1.0  # A message on its way may be read for this long, whatever else comes.
SLOW_S = 60.0  # A message must be complete within this time, as an HTTP body must.
STREAMS = 16  # At most this many streams of messages may be idle.
_RETRY_AFTER_S = 1.0
_SHARE_ON_THE_WAY = 2  # Half of the limit is for large messages on their way.


class BytesInFlight:
    def __init__(
        self,
        most: int,
        largest: int,
        refused: Callable[[], None] = lambda: None,
        owner: Callable[[], str | None] = lambda: None,
    ) -> None:
        """Limit all calls of a process to `most` bytes, in messages of at most `largest` bytes. Raises
        ConfigError if `most` cannot hold two of those.

        `refused` is called for each message that is refused. `owner` returns the owner of the call that
        begins, or None for a call without a share.
        """
        if most < 2 * largest:
            raise ConfigError(
                f"--max-bytes-in-flight must hold two of the largest messages, {2 * largest} bytes, "
                f"got {most}"
            )
        num_places = max(1, most // _SHARE_ON_THE_WAY // largest)
        self.places = Places(num_places)
        self.streams = Places(STREAMS)
        self._total = most
        self._most = most - num_places * largest
        self._largest = largest
        self._refused = refused
        self._owner = owner
        self._held_by = Counter[str]()  # Every owner here holds more than 0 bytes.
        self.held = 0

    def admit_larger(self, num_bytes: int) -> int:
        """Let each owner have one message of this size from now on, as far as two fit. Return the size.

        It is for messages that are counted piece by piece: one on its way over gRPC counts as before.
        """
        self._largest = max(self._largest, min(num_bytes, self._total // 2))
        return self._largest

    @contextmanager
    def call(self) -> Iterator["HeldBytes"]:
        held = HeldBytes(self, self._owner())
        try:
            yield held
        finally:
            held.let_go()

    def take(self, num_bytes: int, owner: str | None = None) -> None:
        if num_bytes > 0 and not self._has_room(num_bytes, owner):
            raise self.no_room()
        self.held += num_bytes
        if owner is not None:
            self._held_by[owner] += num_bytes
            if not self._held_by[owner]:
                del self._held_by[owner]

    def _has_room(self, num_bytes: int, owner: str | None) -> bool:
        held = self.held + num_bytes
        if owner is None or 2 * held <= self._most:
            return held <= self._most
        share = self._most // (len(self._held_by.keys() | {owner}) + 1)
        return held <= self._most and self._held_by[owner] + num_bytes <= max(share, self._largest)

    def no_room(self) -> NoCapacity:
        self._refused()
        return NoCapacity(
            "this server holds as many bytes of messages as it may (--max-bytes-in-flight)", _RETRY_AFTER_S
        )


class Places:
    def __init__(self, most: int) -> None:
        self._most = most
        self._taken: dict[object, tuple[float, Callable[[], None]]] = {}  # The oldest is first.

    def __len__(self) -> int:
        return len(self._taken)

    def begin(self, place: object, end: Callable[[], None], now_s: float) -> None:
        """Use a place; `end` is called once if there is none, or if the place is lost later."""
        ended = None
        if len(self._taken) >= self._most:
            oldest, (since_s, ended) = next(iter(self._taken.items()))
            if now_s - since_s < OLD_S:
                end()
                return
            del self._taken[oldest]
        self._taken[place] = now_s, end
        if ended is not None:
            ended()

    def end(self, place: object) -> None:
        self._taken.pop(place, None)


class HeldBytes:
    def __init__(self, in_flight: BytesInFlight, owner: str | None) -> None:
        self._in_flight = in_flight
        self._owner = owner
        self._num_bytes = 0

    def add(self, num_bytes: int) -> None:
        self._in_flight.take(num_bytes, self._owner)
        self._num_bytes += num_bytes

    def let_go(self) -> None:
        self._in_flight.take(-self._num_bytes, self._owner)
        self._num_bytes = 0

    async def read(self, read: Callable[[], Awaitable[Any]]) -> Any:
        """Return what `read` returns, a message or the mark of the stream's end. Raises NoCapacity where
        there is no room for the message, or to go on reading it, and DeadlineExceeded after SLOW_S."""
        return self._counted(await self._read_at_a_place(read, self._in_flight.places, SLOW_S))

    async def read_next(self, read: Callable[[], Awaitable[Any]]) -> Any:
        """Do the same for a stream of messages, each of which replaces the one before."""
        self.let_go()
        return self._counted(await self._read_at_a_place(read, self._in_flight.streams, None))

    def _counted(self, message: Any) -> Any:
        if isinstance(message, bytes):
            self.add(len(message))
        return message

    async def _read_at_a_place(
        self, read: Callable[[], Awaitable[Any]], places: Places, limit_s: float | None
    ) -> Any:
        loop = asyncio.get_running_loop()
        is_ended = False

        def end() -> None:
            nonlocal is_ended
            if limit.expired():  # The timeout has ended it already, but its task has not run since.
                return
            is_ended = True
            limit.reschedule(loop.time())

        early = loop.call_later(EARLY_S, lambda: places.begin(self, end, loop.time()))
        try:
            async with asyncio.timeout(limit_s) as limit:
                return await read()
        except TimeoutError:
            if is_ended:
                raise self._in_flight.no_room() from None
            raise DeadlineExceeded(f"the message did not come within {limit_s:g} s") from None
        finally:
            early.cancel()
            places.end(self)
