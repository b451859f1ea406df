"""The write of one transfer tracks which units are final, posted or landed, and takes their digests.

full attention   [ held by decode | taken .......... | final | not yet computed )      by position
                 0                ^ first            ^ next                     ^ end
the others       [ taken | final once the prompt is computed )                   a tail, a state
                 0 = first                                   ^ end
the draft model  as full attention: the same pages, of its own pool

Each unit is posted exactly once: the delta's pages in token order as they are computed, and the per-request
state once the prompt is computed, in one post with the last pages if it fits. Few posts are in flight at a
time, so that the write lease and the fence margin have to cover only those, however long the delta is. What
is computed meanwhile goes out in one post.

Digests are computed from the units by position, not from what was posted, so that two pages that went to each
other's place are noticed too. They are computed a piece at a time, because the sender's thread also has the
posts of other transfers to make.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from services.kv.page_digest import ReadPages, digest_of
from services.kv.transfer_plan import PageMove, merge_moves, pages_covering, pages_of
from services.transfer.transport import PeerName, Transport, Unsettled, Write
from services.values.kv import KvLayout, KvTicket, PageId


@dataclass(slots=True)
class Sources:
    """This has the final units of a prompt in the writer's pools. The transfer's owner adds to them."""

    pages: list[PageId] = field(default_factory=list)  # These are full attention's, from position 0 on.
    # These are by group beside full attention, in the layout's order. It is empty until all are final.
    carried: tuple[Sequence[PageId], ...] = ()

    def of(self, group: int) -> Sequence[PageId]:
        if group == 0:
            return self.pages
        return self.carried[group - 1] if self.carried else ()


@dataclass(slots=True)
class Lane:
    """The units [next, end) of a group's sources are still to be taken, each once and in token order."""

    group: int  # Sources and targets are those of this group.
    first: int
    end: int
    next: int
    pool: int  # The units are in this pool on both sides.

    @property
    def done(self) -> bool:
        return self.next == self.end

    def has_due(self, sources: Sources) -> bool:
        return self.next < min(len(sources.of(self.group)), self.end)

    def take(self, sources: Sources, most: int) -> Sequence[PageId]:
        units = sources.of(self.group)[self.next : min(self.next + most, self.end)]
        self.next += len(units)
        return units


def lanes_of(ticket: KvTicket, layout: KvLayout) -> list[Lane]:
    delta = pages_covering(ticket.decode_prefix_len, ticket.prompt_len, layout.page_size)
    lanes = [Lane(0, delta.start, delta.stop, next=delta.start, pool=0)]
    for target in ticket.targets:
        num_units = sum(run.num_pages for run in target.runs)
        lanes.append(Lane(target.group, 0, num_units, next=0, pool=target.group))
    if layout.draft is not None:
        lanes.append(replace(lanes[0], pool=len(lanes)))
    return lanes


MAX_POSTS_IN_FLIGHT = 2  # With one alone the path would be idle between its end and the next poll.


class DeltaWrite:
    def __init__(self, ticket: KvTicket, layout: KvLayout, sources: Sources) -> None:
        """`layout` is the part of the layout that both sides have."""
        self._lanes = lanes_of(ticket, layout)
        self._targets = [pages_of(runs) for runs in (ticket.runs, *(t.runs for t in ticket.targets))]
        self._unit_bytes = layout.unit_bytes
        self._sources = sources
        self._posted: list[tuple[Write, float]] = []  # These are (write, time of its post), the oldest first.
        self._stopped = False
        self.unsettled = False  # A write has failed, and bytes of it may still land.
        self.group_bytes = (0,) * len(self._unit_bytes)  # These count, by pool, the writes that have landed.
        self.descriptors = 0

    @property
    def bytes_moved(self) -> int:
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
        return self._stopped and not self._posted

    @property
    def landed(self) -> bool:
        return not self._posted and all(lane.done for lane in self._lanes)

    @property
    def oldest_post_s(self) -> float | None:
        return self._posted[0][1] if self._posted else None

    def stop(self) -> None:
        self._stopped = True

    def post(self, transport: Transport, peer: PeerName, max_bytes: int, now_s: float) -> None:
        """Post the next units, at least one; `can_post` must be true.

        It raises as `Transport.write` does. Units whose post failed are not posted again.
        """
        moves: list[PageMove] = []
        for lane in self._lanes:
            most = max(0, max_bytes) // self._unit_bytes[lane.pool]  # One unit may be larger than max_bytes.
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
        """Return True if a write has landed since the last call.

        Raises:
            PeerFailed: a write failed and is polled no more. Others may still be in flight.
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
        finally:  # It has landed or failed.
            if landed:
                self._posted.remove(post)
                write.release()
        if landed:
            # A write has both sides' pools, of which the draft model's is the last: this may leave it out.
            moved = zip(self.group_bytes, write.group_bytes, strict=False)
            self.group_bytes = tuple(before + more for before, more in moved)

    @contextmanager
    def _noting_unsettled(self) -> Iterator[None]:
        try:
            yield
        except Unsettled:
            self.unsettled = True
            raise


class DeltaDigests:
    def __init__(self, ticket: KvTicket, layout: KvLayout, sources: Sources) -> None:
        self._lanes = lanes_of(ticket, layout)
        self._unit_bytes = layout.unit_bytes
        self._sources = sources
        # The order is: the delta's pages in token order, the per-request state, the delta's pages in the
        # draft's pool.
        self.values: list[int] = []

    @property
    def complete(self) -> bool:
        return all(lane.done for lane in self._lanes)

    def advance(self, read_pages: ReadPages, max_bytes: int) -> bool:
        """Digest the next final units, up to `max_bytes` but at least one. Return False if none is final."""
        lane = next((lane for lane in self._lanes if not lane.done), None)
        if lane is None:
            return False
        units = lane.take(self._sources, max(1, max_bytes // self._unit_bytes[lane.pool]))
        self.values += [digest_of(content) for content in read_pages(units, lane.pool)]
        return bool(units)
