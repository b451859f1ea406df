"""A transfer plan lists the pages that cross, in as few pieces as the pools allow."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from services.kv.tails import units_at
from services.values.errors import ProtocolError
from services.values.kv import DRAFT, KvLayout, PageId, PageRun


class PageMove(NamedTuple):
    """The units (pages or slots of one group) are neighbours on both sides, so one copy moves them all."""

    source_page: int
    target_page: int
    num_pages: int
    group: int = 0  # This is the group's index in the layout.


def merge_moves(
    source_pages: Sequence[PageId], target_pages: Sequence[PageId], group: int = 0
) -> list[PageMove]:
    """Return moves in token order; page i of the source goes to page i of the target, in the group's pools.

    Raises:
        ProtocolError: the two differ in length.
    """
    if len(source_pages) != len(target_pages):
        raise ProtocolError(f"{len(source_pages)} pages cannot go to {len(target_pages)} pages")
    moves: list[PageMove] = []
    num_pages = source = target = 0  # These describe the move that is growing, and where it would go on.
    for source_page, target_page in zip(source_pages, target_pages, strict=True):
        if num_pages and (source_page != source or target_page != target):
            moves.append(PageMove(source - num_pages, target - num_pages, num_pages, group))
            num_pages = 0
        source, target, num_pages = source_page + 1, target_page + 1, num_pages + 1
    if num_pages:
        moves.append(PageMove(source - num_pages, target - num_pages, num_pages, group))
    return moves


def runs_of(pages: Sequence[PageId]) -> tuple[PageRun, ...]:
    """Return the pages as runs, in the order given. Only pages that directly follow each other are merged."""
    return tuple(PageRun(move.source_page, move.num_pages) for move in merge_moves(pages, pages))


def pages_of(runs: Iterable[PageRun]) -> list[PageId]:
    return [PageId(page) for run in runs for page in range(run.first_page, run.end)]


def pages_covering(start_token: int, end_token: int, page_size: int) -> range:
    """Return the pages, as indices into a page table, that hold tokens [start_token, end_token).

    Raises:
        ProtocolError: the start is not a page's first token, or the range is not valid.
    """
    if start_token % page_size:
        raise ProtocolError(f"token {start_token} does not begin a page of {page_size} tokens")
    if not 0 <= start_token <= end_token:
        raise ProtocolError(f"[{start_token}, {end_token}) is not a range of tokens")
    return range(start_token // page_size, -(-end_token // page_size))


def moved_bytes(decode_prefix_len: int, prompt_len: int, layout: KvLayout) -> tuple[int, ...]:
    """Return the bytes that a transfer moves in each pool: delta, per-request state, then the draft's delta.

    `layout` is the part of the layout that both ranks have.
    """
    carried = (units_at(group, prompt_len, layout.page_size) * group.unit_bytes for group in layout.carried)
    num_pages = len(pages_covering(decode_prefix_len, prompt_len, layout.page_size))
    draft = (num_pages * group.unit_bytes for group in layout.draft_group)
    return (num_pages * layout.page_bytes, *carried, *draft)


def carried_by_kind(layout: KvLayout, moved: Sequence[int]) -> dict[str, int]:
    """Return the bytes moved beside full attention's, by the value of the GroupKind, and by DRAFT.

    `moved` has the bytes by pool. A kind that moved no bytes is absent.
    """
    by_kind: dict[str, int] = {}
    kinds = [group.kind.value for group in layout.carried] + [DRAFT] * len(layout.draft_group)
    for kind, size_bytes in zip(kinds, moved[1:], strict=True):
        if size_bytes:
            by_kind[kind] = by_kind.get(kind, 0) + size_bytes
    return by_kind
