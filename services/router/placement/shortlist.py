"""Many ranks are cut down to the few that may be the best, by two parts of their price. This is pure.

Under one bandwidth the price of a pair is

    T = fixed(P) + max(overlapped(P), overlapped(D)) + fixed(D)

with P's computation and D's transfer overlapped. So a rank can be left out when another one is no
worse in `fixed` and in `fixed + overlapped`: the best pair lies in what remains on both sides, a handful
of ranks. Where the waits of a pair are bounded together, it must be no worse in that too.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from services.router.placement.candidates import Candidate

_T = TypeVar("_T")

_MAX_SHORTLIST = 32  # a side; the exact shortlist is shorter but for contrived fleets


def best_few(
    fixed_s: Sequence[float],
    overlapped_s: Sequence[float],
    waits_s: Sequence[float],
    ranks: Sequence[Candidate],
    crowds: Sequence[int],
    tie: float,
    spare_ranks: int,
) -> list[int]:
    """The shortlist of all, and that of this router's share where it has not all."""
    chosen = shortlist(fixed_s, overlapped_s, waits_s, crowds, tie, spare_ranks)
    own = [index for index, rank in enumerate(ranks) if rank.own]
    if not own or len(own) == len(ranks):
        return chosen
    fixed, overlapped, waits = ([of[index] for index in own] for of in (fixed_s, overlapped_s, waits_s))
    of_own = shortlist(fixed, overlapped, waits, [crowds[index] for index in own], tie, 1)
    return chosen + [own[index] for index in of_own if own[index] not in chosen]


def shortlist(
    fixed_s: Sequence[float],
    overlapped_s: Sequence[float],
    waits_s: Sequence[float],
    crowds: Sequence[int],
    tie: float,
    spare_ranks: int,
) -> list[int]:
    """Indices of every rank that some other side can make the best, and of the cheapest few.

    Of ranks that cost the same, the least crowded come first. One at which the wait is the shortest is among
    them.
    """
    if len(fixed_s) == 1:
        return [0]
    columns = zip(fixed_s, overlapped_s, waits_s, strict=True)
    keys = [(fixed + overlapped, fixed, wait) for fixed, overlapped, wait in columns]
    lowest = min(fixed_s), min(waits_s)
    chosen: list[int] = []
    front: list[tuple[float, float]] = []  # `fixed` and wait of those of use; the walk is in ascending price
    for group in _equal(keys):
        _, fixed, wait = keys[group[0]]
        is_of_use = all(fixed < other_fixed or wait < other_wait for other_fixed, other_wait in front)
        if is_of_use:
            front.append((fixed, wait))
        wanted = max(spare_ranks - len(chosen), int(is_of_use))
        if wanted > 0:
            chosen += least_crowded_first(group, crowds.__getitem__, tie)[:wanted]
        if len(chosen) >= spare_ranks and (front[-1] == lowest or _is_long(chosen, front, lowest)):
            break
    return chosen


def _equal(keys: Sequence[tuple[float, float, float]]) -> Iterator[list[int]]:
    """The indices of equal keys together, in ascending order."""
    group: list[int] = []
    for index in sorted(range(len(keys)), key=keys.__getitem__):
        if group and keys[index] != keys[group[0]]:
            yield group
            group = []
        group.append(index)
    yield group


def _is_long(chosen: list[int], front: list[tuple[float, float]], lowest: tuple[float, float]) -> bool:
    return len(chosen) >= _MAX_SHORTLIST and any(wait == lowest[1] for _, wait in front)


def least_crowded_first(members: list[_T], crowd: Callable[[_T], int], tie: float) -> list[_T]:
    """The least crowded first, those as `tie` goes round their circle."""
    if len(members) == 1:
        return members
    fewest = min(map(crowd, members))
    least = [member for member in members if crowd(member) == fewest]
    others = sorted((member for member in members if crowd(member) > fewest), key=crowd)
    first = int(tie * len(least))
    return [*least[first:], *least[:first], *others]
