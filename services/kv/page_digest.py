"""Both sides take a digest of each page's bytes, which shows whether a page holds what its writer wrote.

    decode: is_sampled(transfer_id) --> the ticket asks for digests
    prefill: writes the pages, and digests its own copy of them --> LANDED brings the digests
    decode: digests what landed --> differing_pages: none --> the pages enter the tree
                                                    some --> the transfer has failed

XXH3 reads several times as fast as the CRC of the standard library.
"""

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Protocol

from xxhash import xxh3_64_intdigest

from services.values.kv import PageId
from services.values.rank import TransferId


class ReadPages(Protocol):
    """Such a callable yields the bytes of units of this rank's own pool of a group.

    Each view is valid until the next one is taken. Any thread may call it.
    """

    def __call__(self, pages: Sequence[PageId], group: int = 0) -> Iterator[memoryview]: ...


_TRANSFER_IDS = 2**64


def is_sampled(transfer_id: TransferId, share: float) -> bool:
    """Return whether a transfer is among the `share`, 0 to 1, that is checked. Its 64-bit name is random."""
    return transfer_id < share * _TRANSFER_IDS


def digest_of(page: memoryview) -> int:
    return xxh3_64_intdigest(page)


def differing_pages(
    digests: Sequence[int], groups: Sequence[Sequence[PageId]], read_pages: ReadPages
) -> tuple[tuple[int, PageId], ...]:
    """Return (group, unit) of each unit whose bytes do not have the digest at its place in `digests`.

    `groups` has the units of each group, in the layout's order; `digests` covers all of them in that order.
    """
    units = [(group, page) for group, pages in enumerate(groups) for page in pages]
    contents = chain.from_iterable(read_pages(pages, group) for group, pages in enumerate(groups))
    return tuple(
        unit
        for unit, digest, content in zip(units, digests, contents, strict=True)
        if digest_of(content) != digest
    )
