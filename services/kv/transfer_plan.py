"""Which pages cross, in as few pieces as the pools allow."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from services.values.errors import ProtocolError
from services.values.kv import KvLayout, PageId, PageRun


@dataclass(frozen=True, slots=True)
class PageMove:
    """Pages that are neighbours on both sides: one copy of num_pages * page_bytes bytes."""

    source_page: int
    target_page: int
    num_pages: int


def merge_moves(source_pages: Sequence[PageId], target_pages: Sequence[PageId]) -> list[PageMove]:
    """Moves in token order; page i of the source goes to page i of the target.

    Raises:
        ProtocolError: the two differ in length.
    """
    if len(source_pages) != len(target_pages):
        raise ProtocolError(f"{len(source_pages)} pages cannot go to {len(target_pages)} pages")
    moves: list[PageMove] = []
    first = 0
    for index in range(1, len(source_pages) + 1):
        if index < len(source_pages):
            offset = index - first
            source_goes_on = source_pages[index] == source_pages[first] + offset
            if source_goes_on and target_pages[index] == target_pages[first] + offset:
                continue
        moves.append(PageMove(source_pages[first], target_pages[first], index - first))
        first = index
    return moves


def runs_of(pages: Sequence[PageId]) -> tuple[PageRun, ...]:
    """The pages as runs, in the order given; only pages that follow each other are merged."""
    return tuple(PageRun(move.source_page, move.num_pages) for move in merge_moves(pages, pages))


def pages_of(runs: Iterable[PageRun]) -> list[PageId]:
    return [PageId(page) for run in runs for page in range(run.first_page, run.end)]


def pages_covering(start_token: int, end_token: int, page_size: int) -> range:
    """Indices into a sequence's page table of the pages that hold tokens [start_token, end_token).

    Raises:
        ProtocolError: the start is not a page's first token, or the range is not one.
    """
    if start_token % page_size:
        raise ProtocolError(f"token {start_token} does not begin a page of {page_size} tokens")
    if not 0 <= start_token <= end_token:
        raise ProtocolError(f"[{start_token}, {end_token}) is not a range of tokens")
    return range(start_token // page_size, -(-end_token // page_size))


def delta_bytes(decode_prefix_len: int, prompt_len: int, layout: KvLayout) -> int:
    """Bytes of the whole pages that hold the delta [decode_prefix_len, prompt_len)."""
    return len(pages_covering(decode_prefix_len, prompt_len, layout.page_size)) * layout.page_bytes
