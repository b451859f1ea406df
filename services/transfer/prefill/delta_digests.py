"""The digests of what one room writes, taken on the prefill rank while it is on its way.

They are read from the units by position, not from what was posted: pages that went to each other's place
are noticed too. A piece at a time, for the sender's thread has other rooms' posts to make.
"""

from services.kv.page_digest import ReadPages, digest_of
from services.transfer.prefill.lanes import Sources, lanes_of
from services.values.kv import KvLayout, KvTicket


class DeltaDigests:
    """`sources` as a DeltaWrite has them."""

    def __init__(self, ticket: KvTicket, layout: KvLayout, sources: Sources) -> None:
        self._lanes = lanes_of(ticket, layout)
        self._unit_bytes = layout.unit_bytes
        self._sources = sources
        # Of the delta's pages in token order, of what is carried, of the delta's in the draft's pool.
        self.values: list[int] = []

    @property
    def complete(self) -> bool:
        return all(lane.done for lane in self._lanes)

    def advance(self, read_pages: ReadPages, max_bytes: int) -> bool:
        """Digest what comes next, one unit at least, as far as it is final. False: nothing is."""
        lane = next((lane for lane in self._lanes if not lane.done), None)
        if lane is None:
            return False
        units = lane.take(self._sources, max(1, max_bytes // self._unit_bytes[lane.pool]))
        self.values += [digest_of(content) for content in read_pages(units, lane.pool)]
        return bool(units)
