"""Each of several routers has a share of the ranks. Pure.

What another router has just sent is known only from the ranks' next reports. Two that are asked at the same
moment would both choose the rank with the shortest queue. So each prefers the ranks of its own share among
those that cost about the same. A share is no right: everyone may choose any rank, and shares that two routers
see differently for a moment do no harm.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Share:
    """This is the share of the `index`-th, from 0, of `of` routers."""

    index: int = 0
    of: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.of:
            raise ValueError(f"no share: {self}")

    def own(self, ranks: Iterable[_T]) -> frozenset[_T]:
        """Return this router's of all ranks of a role, in the order that all routers have them in. They are
        never none: where there are more routers than ranks, several share one."""
        every = list(ranks)
        step = max(1, min(self.of, len(every)))
        return frozenset(islice(every, self.index % step, None, step))
