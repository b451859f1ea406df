"""The ranks as one decision sees them: each is looked up once, though several steps ask for it. Pure."""

from collections.abc import Callable, Mapping
from math import inf

from services.index.read.prefix_index import Held, PrefixIndex
from services.router.placement import exclusion
from services.router.placement.candidates import Asked
from services.router.ranks.balance import Balance, RankNow
from services.router.ranks.predictions import Guessed
from services.values.rank import RankKey, Role
from services.values.registration import Registration


class RankSnapshot:
    """A snapshot is of what is `asked`, for as long as nothing changes.

    `apart` are ranks of another layout, and in what.
    """

    __slots__ = (
        "_apart",
        "_balance",
        "_excluded",
        "_guessed",
        "_held",
        "_index",
        "_is_connected",
        "_now",
        "asked",
    )

    def __init__(
        self,
        asked: Asked,
        balance: Balance,
        index: PrefixIndex,
        is_connected: Callable[[RankKey], bool],
        apart: Mapping[RankKey, str],
    ) -> None:
        self.asked = asked
        self._balance = balance
        self._index = index
        self._is_connected = is_connected
        self._apart = apart
        self._now: dict[RankKey, RankNow] = {}
        self._excluded: dict[RankKey, str] = {}
        self._held: Held | None = None
        self._guessed: Guessed | None = None

    def now(self, key: RankKey) -> RankNow:
        now = self._now.get(key)
        if now is None:
            now = self._now[key] = self._balance.now(key)
        return now

    def held(self) -> Held:
        """The index says so who holds how much of the prompt."""
        if self._held is None:
            self._held = self._index.held(self.asked.hashes)
        return self._held

    def guessed(self) -> Guessed:
        """These ranks will soon hold so much of the prompt."""
        if self._guessed is None:
            balance = self._balance
            self._guessed = balance.predictions.of(self.asked.hashes, balance.clock())
        return self._guessed

    def exclusion(self, key: RankKey, rank: Registration) -> str:
        """Return why the rank alone cannot be chosen, or an empty text."""
        excluded = self._excluded.get(key)
        if excluded is None:
            liveness, differs_in = self._balance.liveness(key), self._apart.get(key, "")
            standing = exclusion.Standing(liveness, self._is_connected(key), differs_in)
            excluded = self._excluded[key] = exclusion.of_rank(rank, standing, self.asked)
        return excluded

    def receives(self, key: RankKey) -> bool:
        """The prefill ranks' KV."""
        return key not in self._apart

    def queue_wait_s(self, key: RankKey) -> float:
        """Return the wait for all that is asked for, at a decode rank."""
        return self._balance.queue_wait_s(key, self.asked.answers - 1)

    def may_serve(self, key: RankKey, rank: Registration) -> bool:
        """Return whether it may serve, as far as can be told of it alone: its own part of the wait comes
        whatever the other rank adds."""
        if self.exclusion(key, rank):
            return False
        if self.asked.max_wait_s == inf:
            return True
        wait_s = self.queue_wait_s(key) if rank.role is Role.DECODE else self.now(key).compute_wait_s
        return wait_s <= self.asked.max_wait_s


class Queue:
    """A rank's waits, looked up when they are asked for: where all are full, a thousand are."""

    __slots__ = ("_rank", "_snapshot")

    def __init__(self, snapshot: RankSnapshot, rank: RankKey) -> None:
        self._snapshot, self._rank = snapshot, rank

    @property
    def receives(self) -> bool:
        return self._snapshot.receives(self._rank)

    @property
    def queue_wait_s(self) -> float:
        return self._snapshot.queue_wait_s(self._rank)

    @property
    def compute_wait_s(self) -> float:
        return self._snapshot.now(self._rank).compute_wait_s
