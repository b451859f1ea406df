"""The queue keeps waiting sequences in order, and tells which running one goes back to it.

admitting.py decides which one comes in next.

The order is by priority, then by turns of the tenants, then by arrival. Requests with the same cache salt
belong to one tenant:

    A runs 2          waiting, by arrival    A  A  A  B  B
                      its turn               2  3  4  0  1        counted from those that run
                      in turn                B  B  A  A  A

So within one tenant only arrival counts, and nobody waits for more of another tenant's requests than of its
own tenant's.
"""

from bisect import insort
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import islice
from types import MappingProxyType

from services.engine.paged.admitting import Newcomer, Patience, next_admission
from services.engine.paged.sequence import RUNNING, Phase, Sequence


class WaitingQueue:
    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        self._sequences: list[Sequence] = []
        self._tenants = Counter[str]()  # It counts how many of each wait.
        # `_sequences` is ordered by these numbers of running sequences of each tenant. The dict is empty for
        # one tenant, and None stands for no order.
        self._ordered_by: dict[str, int] | None = {}

    @property
    def is_of_one_tenant(self) -> bool:
        return len(self._tenants) <= 1

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def add(self, seq: Sequence) -> None:
        seq.overtaken, seq.overtaken_since_s, seq.lookup = 0, None, None
        self._tenants[tenant_of(seq)] += 1
        if self.is_of_one_tenant and self._ordered_by == {}:
            insort(self._sequences, seq, key=place_in_line)
        else:
            self._sequences.append(seq)
            self._ordered_by = None

    def remove(self, seq: Sequence) -> None:
        self._sequences.remove(seq)
        self._leave(seq)
        if self._ordered_by:
            self._ordered_by = None

    def order(self, running: Mapping[str, int]) -> None:
        """Order the queue by turns; each tenant has had as many turns as it has running sequences.

        Call it before the order matters; it costs almost nothing where these numbers have not changed.
        """
        ordered_by = {} if self.is_of_one_tenant else {tenant: running[tenant] for tenant in self._tenants}
        if ordered_by != self._ordered_by:
            self._sequences = in_turn(self._sequences, running)
            self._ordered_by = ordered_by

    def next(
        self,
        weigh: Callable[[Sequence], Newcomer],
        fits: Callable[[Sequence, Newcomer], bool],
        looks_small: Callable[[Sequence], bool],
        now_s: float,
    ) -> Sequence | None:
        """Return the sequence that would come in now, or None where no sequence fits.

        Those behind the window are weighed only if they look small enough, which costs almost nothing to find
        out.
        """
        window = self._sequences[: self._patience.window]
        weighed = [weigh(seq) for seq in window]
        index = next_admission(weighed, lambda index: fits(window[index], weighed[index]), self._patience)
        if index is not None:
            return window[index]
        behind = islice(filter(looks_small, self._behind_window(now_s)), self._patience.window)
        return next((seq for seq in behind if fits(seq, weigh(seq))), None)

    def _behind_window(self, now_s: float) -> Iterator[Sequence]:
        for place, seq in enumerate(self._sequences):
            if place >= self._patience.window:
                yield seq
            since_s = seq.overtaken_since_s
            if self._patience.is_over(seq.overtaken, 0.0 if since_s is None else now_s - since_s):
                return

    def take(self, seq: Sequence, now_s: float) -> int:
        index = self._sequences.index(seq)
        self._note_turn_taken(seq, index)
        for passed in self._sequences[:index]:
            passed.overtaken += 1
            if passed.overtaken_since_s is None:
                passed.overtaken_since_s = now_s
        del self._sequences[index]
        self._leave(seq)
        return index

    def _note_turn_taken(self, seq: Sequence, index: int) -> None:
        """Keep the turns of those behind valid, if `seq` is the first of its tenant.

        Then one fewer of the tenant waits before them, and one more runs.
        """
        if self._ordered_by:
            tenant = tenant_of(seq)
            if any(tenant_of(passed) == tenant for passed in self._sequences[:index]):
                self._ordered_by = None
            elif self._tenants[tenant] > 1:
                self._ordered_by[tenant] += 1
            else:
                del self._ordered_by[tenant]

    def _leave(self, seq: Sequence) -> None:
        tenant = tenant_of(seq)
        self._tenants[tenant] -= 1
        if not self._tenants[tenant]:
            del self._tenants[tenant]


def tenant_of(seq: Sequence) -> str:
    return seq.request.cache_salt


def in_turn(
    sequences: Iterable[Sequence],
    had: Mapping[str, int] = MappingProxyType({}),
    served_at: Mapping[str, int] = MappingProxyType({}),
) -> list[Sequence]:
    """Order sequences by turns of their tenants.

    `had` has the number of turns that tenants have had. Tenants in the same turn are ordered by `served_at`,
    which has when each was last served: the longest ago goes first.
    """
    turns = Counter(had)
    keys: dict[Sequence, tuple[int, int, int, int]] = {}
    for seq in sorted(sequences, key=place_in_line):
        tenant = tenant_of(seq)
        keys[seq] = -seq.request.priority, turns[tenant], served_at.get(tenant, -1), seq.arrival
        turns[tenant] += 1
    return sorted(keys, key=keys.__getitem__)


def place_in_line(seq: Sequence) -> tuple[int, int]:
    return -seq.request.priority, seq.arrival


def retraction_victim(active: Iterable[Sequence]) -> Sequence | None:
    """Return the last sequence in turn whose pages can be freed, unless it is the only one.

    So the first in line is never retracted and ends at some time; then the next is the first.
    """
    candidates = _with_pages_to_give(active)
    return in_turn(candidates)[-1] if len(candidates) > 1 else None


def gives_way(seq: Sequence, active: Collection[Sequence]) -> Sequence | None:
    """Return the one of `active` that is to go back so that `seq` gets a slot, or None.

    It is the last in turn of those that have no higher priority, and whose tenants will still run no fewer
    sequences than the tenant of `seq`.
    """
    running = Counter(map(tenant_of, active))
    enough = running[tenant_of(seq)] + 2
    if max(running.values(), default=0) < enough:
        return None
    line = in_turn(_with_pages_to_give(active))
    for each in reversed(line[1:]):
        if each.request.priority > seq.request.priority:
            return None
        if running[tenant_of(each)] >= enough:
            return each
    return None


def _with_pages_to_give(active: Iterable[Sequence]) -> list[Sequence]:
    return [seq for seq in active if seq.transfer_id is None and seq.phase in (*RUNNING, Phase.LANDED)]
