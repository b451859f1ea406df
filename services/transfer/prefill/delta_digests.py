"""The digests of one room's delta, taken on the prefill rank while its pages are on their way.

They are read from the pages by position, not from what was posted: pages that went to each other's place
are noticed too. A piece at a time, for the sender's thread has other rooms' posts to make.
"""

from collections.abc import Sequence

from services.kv.page_digest import ReadPages, digest_of
from services.kv.transfer_plan import pages_covering
from services.values.kv import KvTicket, PageId


class DeltaDigests:
    """`sources` as a DeltaWrite has them: its owner appends what is computed."""

    def __init__(self, ticket: KvTicket, page_size: int, sources: Sequence[PageId]) -> None:
        delta = pages_covering(ticket.decode_prefix_len, ticket.prompt_len, page_size)
        self._next, self._end = delta.start, delta.stop
        self._sources = sources
        self.values: list[int] = []  # of the delta's pages, in token order

    @property
    def complete(self) -> bool:
        return self._next == self._end

    def advance(self, read_pages: ReadPages, max_pages: int) -> bool:
        """Digest the next pages, as far as they are computed. False: there were none."""
        last = min(self._next + max_pages, len(self._sources), self._end)
        pages = self._sources[self._next : last]
        self.values += [digest_of(content) for content in read_pages(pages)]
        self._next += len(pages)
        return bool(pages)
