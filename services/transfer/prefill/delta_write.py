"""One room's write: which units are final, which are posted, which have landed. lanes.py draws it.

Each is posted exactly once: the delta's pages in token order as they are computed, and what is carried when
the prompt is, with the last pages as far as it fits. Few posts are in flight at a time: after the last one, a
write lease and the fence's margin must cover no more than those, however long the delta is. What is computed
meanwhile goes out in one post.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from services.kv.transfer_plan import PageMove, merge_moves, pages_of
from services.transfer.base import PeerName, Transport, Unsettled, Write
from services.transfer.prefill.lanes import Lane, Sources, lanes_of
from services.values.kv import KvLayout, KvTicket

MAX_POSTS_IN_FLIGHT = 2  # with one alone the path is idle from its end until that is seen


class DeltaWrite:
    def __init__(self, ticket: KvTicket, layout: KvLayout, sources: Sources) -> None:
        """`layout` is of what both sides have."""
        self._lanes = lanes_of(ticket, layout)
        self._targets = [pages_of(runs) for runs in (ticket.runs, *(t.runs for t in ticket.targets))]
        self._unit_bytes = layout.unit_bytes
        self._sources = sources
        self._posted: list[tuple[Write, float]] = []  # and when
        self._stopped = False
        self.unsettled = False  # a write has failed, and bytes of it may land still
        self.group_bytes = (0,) * len(self._unit_bytes)  # by pool, of the writes that have landed
        self.descriptors = 0

    @property
    def bytes_moved(self) -> int:
        """By the writes that have landed."""
        return sum(self.group_bytes)

    @property
    def writes_in_flight(self) -> int:
        return len(self._posted)

    @property
    def can_post(self) -> bool:
        if self._stopped or len(self._posted) >= MAX_POSTS_IN_FLIGHT:
            return False
        return any(lane.has_due(self._sources) for lane in self._lanes)

    @property
    def stopped(self) -> bool:
        """After `stop`: nothing is in flight any more."""
        return self._stopped and not self._posted

    @property
    def landed(self) -> bool:
        """Every page of the delta has landed, and all that is carried."""
        return not self._posted and all(lane.done for lane in self._lanes)

    @property
    def oldest_post_s(self) -> float | None:
        """When the oldest write in flight was posted; None: there is none."""
        return self._posted[0][1] if self._posted else None

    def stop(self) -> None:
        """Post nothing any more."""
        self._stopped = True

    def post(self, transport: Transport, peer: PeerName, max_bytes: int, now_s: float) -> None:
        """Post what comes next, one unit at least, where `can_post`. Raises as Transport.write; it is not
        posted again."""
        moves: list[PageMove] = []
        for lane in self._lanes:
            most = max(0, max_bytes) // self._unit_bytes[lane.pool]  # one unit may be more than it all
            taken = self._take(lane, most if moves else max(1, most))
            max_bytes -= sum(move.num_pages for move in taken) * self._unit_bytes[lane.pool]
            moves += taken
        with self._noting_unsettled():
            self._posted.append((transport.write(peer, moves), now_s))
        self.descriptors += len(moves)

    def _take(self, lane: Lane, most: int) -> list[PageMove]:
        offset = lane.next - lane.first
        units = lane.take(self._sources, most)
        targets = self._targets[lane.group][offset : offset + len(units)]
        return merge_moves(units, targets, lane.pool)

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
            moved = zip(self.group_bytes, write.group_bytes, strict=True)
            self.group_bytes = tuple(before + more for before, more in moved)

    @contextmanager
    def _noting_unsettled(self) -> Iterator[None]:
        try:
            yield
        except Unsettled:
            self.unsettled = True
            raise
