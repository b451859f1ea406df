"""One room's delta on its way: which pages are computed, which are posted, which have landed.

    source pages, by position:   [ held by decode | posted ............ | computed | not yet computed )
                                 0                ^ decode_prefix_len              ^ len(sources)

Every page of the delta is posted exactly once, in token order. Few posts are in flight at a time: after the
last one, a write lease and the fence's margin must cover no more than those, however long the delta is. What
is computed meanwhile goes out in one post.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from services.kv.transfer_plan import merge_moves, pages_covering, pages_of
from services.transfer.base import PeerName, Transport, Unsettled, Write
from services.values.kv import KvTicket, PageId

MAX_POSTS_IN_FLIGHT = 2  # with one alone the path is idle from its end until that is seen


class DeltaWrite:
    """`sources` are the prompt's pages in the writer's pool, from position 0 on; its owner appends to it."""

    def __init__(self, ticket: KvTicket, page_size: int, sources: Sequence[PageId]) -> None:
        delta = pages_covering(ticket.decode_prefix_len, ticket.prompt_len, page_size)
        self._first, self._next, self._end = delta.start, delta.start, delta.stop
        self._targets = pages_of(ticket.runs)
        self._sources = sources
        self._posted: list[tuple[Write, float]] = []  # and when
        self._stopped = False
        self.unsettled = False  # a write has failed, and bytes of it may land still
        self.bytes_moved = 0  # of the writes that have landed
        self.descriptors = 0

    @property
    def writes_in_flight(self) -> int:
        return len(self._posted)

    @property
    def can_post(self) -> bool:
        due = self._next < min(len(self._sources), self._end)
        return due and not self._stopped and len(self._posted) < MAX_POSTS_IN_FLIGHT

    @property
    def stopped(self) -> bool:
        """After `stop`: nothing is in flight any more."""
        return self._stopped and not self._posted

    @property
    def landed(self) -> bool:
        """Every page of the delta has landed."""
        return self._next == self._end and not self._posted

    @property
    def oldest_post_s(self) -> float | None:
        """When the oldest write in flight was posted; None: there is none."""
        return self._posted[0][1] if self._posted else None

    def stop(self) -> None:
        """Post nothing any more."""
        self._stopped = True

    def post(self, transport: Transport, peer: PeerName, max_pages: int, now_s: float) -> None:
        """Post the next pages, where `can_post`. Raises as Transport.write; they are not posted again."""
        first = self._next
        self._next = min(first + max_pages, len(self._sources), self._end)
        targets = self._targets[first - self._first : self._next - self._first]
        moves = merge_moves(self._sources[first : self._next], targets)
        with self._noting_unsettled():
            self._posted.append((transport.write(peer, moves), now_s))
        self.descriptors += len(moves)

    def poll(self) -> bool:
        """True when a write has landed since the last call.

        Raises:
            PeerFailed: a write failed; it is polled no more. Others are in flight, perhaps.
        """
        before = len(self._posted)
        with self._noting_unsettled():
            for post in tuple(self._posted):
                self._poll(post)
        return len(self._posted) < before

    def _poll(self, post: tuple[Write, float]) -> None:
        write, landed = post[0], True
        try:
            landed = write.poll()
        finally:  # landed or failed
            if landed:
                self._posted.remove(post)
                write.release()
        if landed:
            self.bytes_moved += write.size_bytes

    @contextmanager
    def _noting_unsettled(self) -> Iterator[None]:
        try:
            yield
        except Unsettled:
            self.unsettled = True
            raise
