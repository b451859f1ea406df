"""Of many ranks the few that may be the best, by two parts of their price. Pure.

Under one bandwidth the price of a pair is

    T = fixed(P) + max(overlapped(P), overlapped(D)) + fixed(D)

with P's computation and D's transfer overlapped. So a rank can be left out when another one is no
worse in `fixed` and in `fixed + overlapped`: the best pair lies in what remains on both sides, a handful
of ranks.
"""

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import TypeVar

from services.router.candidates import Candidate

_T = TypeVar("_T")

_MAX_SHORTLIST = 32  # a side; the exact shortlist is shorter but for contrived fleets


def best_few(
    fixed_s: Sequence[float],
    overlapped_s: Sequence[float],
    ranks: Sequence[Candidate],
    crowds: Sequence[int],
    tie: float,
    spare_ranks: int,
) -> list[int]:
    """The shortlist of all, and that of this router's share where it has not all."""
    chosen = shortlist(fixed_s, overlapped_s, crowds, tie, spare_ranks)
    own = [index for index, rank in enumerate(ranks) if rank.own]
    if not own or len(own) == len(ranks):
        return chosen
    fixed, overlapped = ([side[index] for index in own] for side in (fixed_s, overlapped_s))
    of_own = [own[index] for index in shortlist(fixed, overlapped, [crowds[index] for index in own], tie, 1)]
    return chosen + [index for index in of_own if index not in chosen]


def shortlist(
    fixed_s: Sequence[float],
    overlapped_s: Sequence[float],
    crowds: Sequence[int],
    tie: float,
    spare_ranks: int,
) -> list[int]:
    """Indices of every rank that some other side can make the best, and of the cheapest few.

    Of ranks that cost the same, the least crowded come first.
    """
    keys = [(fixed + overlapped, fixed) for fixed, overlapped in zip(fixed_s, overlapped_s, strict=True)]
    lowest_fixed = min(fixed_s)
    chosen: list[int] = []
    front = float("inf")  # the lowest `fixed` so far; the walk is in ascending `fixed + overlapped`
    for (_, fixed), group in groupby(sorted(range(len(keys)), key=keys.__getitem__), key=keys.__getitem__):
        wanted = max(spare_ranks - len(chosen), 1 if fixed < front else 0)
        front = min(front, fixed)
        if wanted > 0:
            chosen += least_crowded_first(list(group), crowds.__getitem__, tie)[:wanted]
        if len(chosen) >= max(spare_ranks, _MAX_SHORTLIST) or (
            front == lowest_fixed and len(chosen) >= spare_ranks
        ):
            break
    return chosen


def least_crowded_first(members: list[_T], crowd: Callable[[_T], int], tie: float) -> list[_T]:
    """The least crowded first, those as `tie` goes round their circle."""
    fewest = min(map(crowd, members))
    least = [member for member in members if crowd(member) == fewest]
    others = sorted((member for member in members if crowd(member) > fewest), key=crowd)
    first = int(tie * len(least))
    return [*least[first:], *least[:first], *others]
