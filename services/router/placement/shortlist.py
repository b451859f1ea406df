"""Of many ranks the few that may be the best, by their prices. Pure.

Under one bandwidth the price of a pair is

    T = fixed(P) + max(overlapped(P), overlapped(D)) + fixed(D)

with P's computation and D's transfer overlapped. So a prefill rank can be left out when another one is no
worse in `fixed` and in `fixed + overlapped`: with what remains, a handful, every decode rank is priced. Where
the waits of a pair are bounded together, it must be no worse in that too.
"""

from math import inf

import numpy as np

from services.router.placement.sides import Flags, Numbers, Rows, lowest


def cheapest(prices_s: Numbers, crowds: Numbers, tie: float, count: int = 1) -> list[int]:
    """Return the rows of the `count` lowest prices in ascending order, fewer where fewer are finite, and of
    the lowest price two if there are two.

    Of those that cost the same, the least crowded come first, and `tie` goes round them.
    """
    if count >= len(prices_s):
        most_s = inf
    else:
        most_s = lowest(prices_s) if count == 1 else np.partition(prices_s, count - 1)[count - 1]
    rows = (prices_s <= most_s).nonzero()[0]
    prices, chosen = prices_s[rows], list[int]()
    while len(rows) and len(chosen) < count and (lowest_s := lowest(prices)) < inf:
        if len(rows) == 1:
            return [*chosen, int(rows[0])]
        is_lowest = prices == lowest_s
        chosen += least_crowded_first(rows[is_lowest], crowds, tie)[: max(2, count) - len(chosen)]
        rows, prices = rows[~is_lowest], prices[~is_lowest]
    return chosen


def front(
    fixed_s: Numbers, overlapped_s: Numbers, waits_s: Numbers | None, crowds: Numbers, tie: float
) -> list[int]:
    """Return the rows of all ranks that some rank of the other side can make the best, two of equals, in
    ascending order of `fixed` and `overlapped` together.

    Of ranks that cost the same, the least crowded come first, and `tie` goes round them. What costs
    infinitely much is left out. `waits_s` is None where nobody waits too long; else one at which the wait is
    the shortest is there.
    """
    totals_s = fixed_s + overlapped_s
    lowest_s = lowest(totals_s)
    if lowest_s == inf:
        return []
    if waits_s is None:
        # Who is no worse in the sum is the first; of use beside it is only who has less of `fixed`.
        firsts = (totals_s == lowest_s).nonzero()[0]
        least_s = lowest(fixed_s[firsts])
        if lowest(fixed_s) == least_s:
            return least_crowded_first(firsts[fixed_s[firsts] == least_s], crowds, tie)[:2]
        rows = ((fixed_s < least_s) | (totals_s == lowest_s)).nonzero()[0]
    else:
        rows = (totals_s < inf).nonzero()[0]
    keys = [column[rows] for column in (totals_s, fixed_s, waits_s) if column is not None]
    order = np.lexsort(keys[::-1])
    rows, keys = rows[order], [column[order] for column in keys]
    is_first = np.ones(len(rows), np.bool_)  # of a group of equals
    is_first[1:] = np.logical_or.reduce([column[1:] != column[:-1] for column in keys])
    starts = is_first.nonzero()[0]
    of_each = [column[starts] for column in keys[1:]]
    of_use = _lowest_so_far(of_each[0]) if waits_s is None else _undominated(of_each[0], of_each[1])
    ends = [*starts[1:].tolist(), len(rows)]
    groups = zip(starts.tolist(), ends, of_use.tolist(), strict=True)
    return [
        row
        for start, end, is_used in groups
        if is_used
        for row in least_crowded_first(rows[start:end], crowds, tie)[:2]
    ]


def least_crowded_first(rows: Rows, crowds: Numbers, tie: float) -> list[int]:
    """Return the least crowded first, those as `tie` goes round their circle."""
    if len(rows) == 1:
        return [int(rows[0])]
    crowd = crowds[rows]
    is_least = crowd == lowest(crowd)
    least, others = rows[is_least].tolist(), rows[~is_least]
    first = int(tie * len(least))
    return [*least[first:], *least[:first], *others[np.argsort(crowd[~is_least], kind="stable")].tolist()]


def _lowest_so_far(fixed_s: Numbers) -> Flags:
    """Return which are lower than all before them."""
    of_use = np.ones(len(fixed_s), np.bool_)
    of_use[1:] = fixed_s[1:] < np.minimum.accumulate(fixed_s)[:-1]
    return of_use


def _undominated(fixed_s: Numbers, waits_s: Numbers) -> Flags:
    """Return which have none before them that is no worse in both."""
    of_use, seen = np.ones(len(fixed_s), np.bool_), list[tuple[float, float]]()
    for number, (fixed, wait) in enumerate(zip(fixed_s.tolist(), waits_s.tolist(), strict=True)):
        of_use[number] = all(fixed < other or wait < other_wait for other, other_wait in seen)
        if of_use[number]:
            seen.append((fixed, wait))
    return of_use
