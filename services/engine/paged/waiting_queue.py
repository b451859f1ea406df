"""The queue keeps waiting sequences in order, and tells which running one goes back to it.

admitting.py decides which one comes in next.

The order is by priority, then by turns of the tenants, then by arrival. Requests with the same cache salt
belong to one tenant:

    A runs 2          waiting, by arrival    A  A  A  B  B
                      its turn               2  3  4  0  1        counted from those that run
                      in turn                B  B  A  A  A

So within one tenant only arrival counts, and nobody waits for more of another tenant's requests than of its
own tenant's. Of one tenant's requests of one priority those whose clients have set deadlines may go earlier
(`earliest_first`).

Where a router tells whose a request is, and the tenant's weight, tenants are ordered by the tokens that they
have had (fair_share.py), and turns are counted by weight.
"""

import math
from bisect import insort
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Set
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from functools import partial
from itertools import islice
from types import MappingProxyType

from services.engine.paged.admitting import Newcomer, Patience, next_admission
from services.engine.paged.fair_share import FairShare
from services.engine.paged.sequence import RUNNING, Phase, Sequence
from services.values.rank_reports import Overtaken, overtaken_of


class WaitingQueue:
    def __init__(self, patience: Patience, shares: FairShare) -> None:
        self._patience = patience
        self._shares = shares
        self._sequences: list[Sequence] = []
        self._tenants = Counter[str]()  # It counts how many of each wait.
        # `_sequences` is ordered by these numbers of running sequences of each tenant, or by these places of
        # the tenants. The dict is empty for one tenant, and None stands for no order.
        self._ordered_by: dict[str, int] | None = {}
        self._num_due = 0  # So many have a deadline that counts.

    @property
    def is_of_one_tenant(self) -> bool:
        return len(self._tenants) <= 1

    @property
    def tenants(self) -> Set[str]:
        return self._tenants.keys()

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def add(self, seq: Sequence) -> None:
        seq.overtaken, seq.overtaken_since_s, seq.lookup = 0, None, None
        self._tenants[tenant_of(seq)] += 1
        self._num_due += self._is_due(seq)
        in_line = self.is_of_one_tenant and self._ordered_by == {}
        if in_line and not self._num_due:
            insort(self._sequences, seq, key=place_in_line)
        elif in_line and not self._shares.is_on:  # They came in order, so nobody's deadline moves another.
            insort(self._sequences, seq, key=self._place_by_deadline)
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
        by_share = self._shares.is_on and not self.is_of_one_tenant
        if by_share:
            ordered_by = self._places(running)
        else:
            tenants = () if self.is_of_one_tenant else self._tenants
            ordered_by = {tenant: running[tenant] for tenant in tenants}
        if ordered_by != self._ordered_by:
            if self._num_due:
                self._sequences = self._by_deadlines()
            if by_share:
                line = self._sequences if self._num_due else sorted(self._sequences, key=place_in_line)
                self._sequences = sorted(line, key=lambda seq: _place_by_share(seq, ordered_by))
            elif self._num_due:
                self._sequences = _turns(self._sequences, running)
            else:
                self._sequences = in_turn(self._sequences, running)
            self._ordered_by = ordered_by

    def _by_deadlines(self) -> list[Sequence]:
        line = sorted(self._sequences, key=place_in_line)
        own: dict[tuple[int, str], list[Sequence]] = {}
        for seq in line:
            own.setdefault((seq.request.priority, tenant_of(seq)), []).append(seq)
        turns = {group: iter(self._earliest_first(sequences)) for group, sequences in own.items()}
        return [next(turns[seq.request.priority, tenant_of(seq)]) for seq in line]

    def _earliest_first(self, line: list[Sequence]) -> list[Sequence]:
        until_s = [seq.submitted_s + self._patience.deadline_s for seq in line]
        return [line[place] for place in earliest_first([seq.due_s for seq in line], until_s)]

    def _place_by_deadline(self, seq: Sequence) -> tuple[int, float, int]:
        until_s = seq.submitted_s + self._patience.deadline_s
        due_s = seq.due_s
        return -seq.request.priority, until_s if due_s is None else min(due_s, until_s), seq.arrival

    def _is_due(self, seq: Sequence) -> bool:
        left_s = seq.request.left_s
        return left_s is not None and left_s < self._patience.deadline_s

    def _places(self, running: Mapping[str, int]) -> dict[str, int]:
        shares = self._shares
        tenants = sorted(
            self._tenants, key=lambda each: (shares.rank(each), running[each] / shares.weight(each))
        )
        return {tenant: place for place, tenant in enumerate(tenants)}

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
        if self._shares.is_on:
            weighed = [
                self._by_cache(seq, each, window[0]) for seq, each in zip(window, weighed, strict=True)
            ]
        index = next_admission(weighed, lambda index: fits(window[index], weighed[index]), self._patience)
        if index is not None:
            return window[index]
        behind = islice(filter(looks_small, self._behind_window(now_s)), self._patience.window)
        return next((seq for seq in behind if fits(seq, weigh(seq))), None)

    def _by_cache(self, seq: Sequence, weighed: Newcomer, first: Sequence) -> Newcomer:
        """Prefer what is cached, as far as its tenant may be ahead of the first one's."""
        if not self._shares.may_pass(tenant_of(seq), tenant_of(first)):
            return replace(weighed, shares=False)
        assert seq.lookup is not None
        return replace(weighed, preferred_pages=seq.lookup.cached_pages)

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
        if self._shares.is_on:
            self._ordered_by = None  # It is about to be charged.
        elif self._ordered_by:
            tenant = tenant_of(seq)
            if any(tenant_of(passed) == tenant for passed in self._sequences[:index]):
                self._ordered_by = None
            elif self._tenants[tenant] > 1:
                self._ordered_by[tenant] += 1
            else:
                del self._ordered_by[tenant]

    def _leave(self, seq: Sequence) -> None:
        tenant = tenant_of(seq)
        if self._num_due:
            if self._shares.is_on:
                self._ordered_by = None
            self._num_due -= self._is_due(seq)
        self._tenants[tenant] -= 1
        if not self._tenants[tenant]:
            del self._tenants[tenant]


def tenant_of(seq: Sequence) -> str:
    share = seq.request.share
    return seq.request.cache_salt if share is None else share.tenant


def weight_of(seq: Sequence) -> float:
    share = seq.request.share
    return 1.0 if share is None else share.weight


def _place_by_share(seq: Sequence, places: Mapping[str, int]) -> tuple[int, int]:
    return -seq.request.priority, places[tenant_of(seq)]


def earliest_first(due_s: SequenceOf[float | None], until_s: SequenceOf[float]) -> list[int]:
    """Return the places of one tenant's line in the order of deadlines.

    Who has none, or a later one, counts as due at its `until_s`, so that nobody who comes after that goes
    before it, and a deadline sends nobody back. Nobody is due later than one behind it that has no earlier
    deadline than its `until_s`; so those keep their order.
    """
    keys, least = list(until_s), math.inf
    for place in reversed(range(len(keys))):
        due = due_s[place]
        if due is not None and due < until_s[place]:
            keys[place] = min(due, least)
        else:
            keys[place] = least = min(until_s[place], least)
    return sorted(range(len(keys)), key=keys.__getitem__)


def in_turn(
    sequences: Iterable[Sequence],
    had: Mapping[str, int] = MappingProxyType({}),
    served_at: Mapping[str, int] = MappingProxyType({}),
) -> list[Sequence]:
    """Order sequences by turns of their tenants, of which one with a weight of 2 has twice as many.

    `had` has the number of turns that tenants have had. Tenants in the same turn are ordered by `served_at`,
    which has when each was last served: the longest ago goes first.
    """
    return _turns(sorted(sequences, key=place_in_line), had, served_at)


def _turns(
    line: list[Sequence], had: Mapping[str, int], served_at: Mapping[str, int] = MappingProxyType({})
) -> list[Sequence]:
    """Order a line by turns, in which each tenant's own keep their order."""
    turns = Counter(had)
    keys: dict[Sequence, tuple[int, float, int, float, int]] = {}
    for seq in line:
        tenant = tenant_of(seq)
        turn = turns[tenant] / weight_of(seq)
        keys[seq] = -seq.request.priority, turn, served_at.get(tenant, -1), seq.place, seq.arrival
        turns[tenant] += 1
    return sorted(keys, key=keys.__getitem__)


def place_in_line(seq: Sequence) -> tuple[int, float, int]:
    return -seq.request.priority, seq.place, seq.arrival


class ChunkTurns:
    """It orders the sequences whose prompts are computed: the first one's chunk comes first in a step.

    Tenants take turns. Among a tenant's own of one priority, those that are due first go first:

        due  =  tokens to compute of all prompts that came until then, it included
                  +  shorter_first * those that it lacks now

    So a prompt goes before longer ones, but not for ever: a later one goes before it only if all that came
    since, that one included, have fewer than `shorter_first` times the tokens that it lacks. What a prompt
    that came before brings counts as that one's alone. What one lacks beyond what was expected when it came,
    as a source has failed or pages were evicted, counts from when it begins.
    """

    def __init__(self, shares: FairShare) -> None:
        self._shares = shares
        self._served_at: dict[str, int] = {}  # It has the step number by the tenant that was first in it.
        self._came_tokens = self._unexpected_tokens = 0

    def came(self, seq: Sequence) -> None:
        self._came_tokens += seq.own_tokens
        seq.came_tokens, seq.expected_tokens = self._came_tokens, seq.own_tokens

    def line(self, computing: Collection[Sequence], shorter_first: float) -> list[Sequence]:
        for seq in computing:
            if seq.expected_tokens is not None:
                self._unexpected_tokens += max(0, seq.own_tokens - seq.expected_tokens)
                seq.came_tokens, seq.expected_tokens = seq.came_tokens + self._unexpected_tokens, None
        if not self._shares.is_on:
            line = in_turn(computing, {}, self._served_at)
        else:
            line = sorted(computing, key=self._place)
            self._shares.serves(line[0].started_at if line else None)
        self._note_served(line)
        return _by_due(line, shorter_first) if shorter_first else line

    def overtaken(
        self, computing: Collection[Sequence], shorter_first: float, chunk_size: int
    ) -> tuple[Overtaken, ...]:
        """Return the prompts that a newcomer goes before, if it has few enough tokens.

        The first chunk of the one that is due first is left out: it is computed at once.
        """
        if not shorter_first or not computing:
            return ()
        due = {seq: _due_tokens(shorter_first, seq) for seq in computing}
        first = min(due, key=due.__getitem__)
        now = self._came_tokens + self._unexpected_tokens
        return overtaken_of(
            (
                (due_tokens - now) / (1 + shorter_first),
                seq.own_tokens - (chunk_size if seq is first else 0),
            )
            for seq, due_tokens in due.items()
        )

    def _place(self, seq: Sequence) -> tuple[int, float, int, float, int]:
        """A prompt that has begun goes on before those that were let in later, but for a tenant that came
        when it began."""
        served_at = self._served_at.get(tenant_of(seq), -1)
        return -seq.request.priority, seq.started_at, served_at, seq.place, seq.arrival

    def _note_served(self, line: list[Sequence]) -> None:
        tenants = set(map(tenant_of, line))
        self._served_at = {tenant: at for tenant, at in self._served_at.items() if tenant in tenants}
        if len(tenants) > 1:
            self._served_at[tenant_of(line[0])] = max(self._served_at.values(), default=0) + 1


def _by_due(line: list[Sequence], shorter_first: float) -> list[Sequence]:
    """Give each tenant's places in the line to its own in the order in which they are due."""
    own: dict[tuple[int, str], list[Sequence]] = {}
    for seq in line:
        own.setdefault((seq.request.priority, tenant_of(seq)), []).append(seq)
    due = partial(_due_tokens, shorter_first)
    turns = {group: iter(sorted(sequences, key=due)) for group, sequences in own.items()}
    return [next(turns[seq.request.priority, tenant_of(seq)]) for seq in line]


def _due_tokens(shorter_first: float, seq: Sequence) -> float:
    return seq.came_tokens + shorter_first * seq.own_tokens


def retraction_victim(active: Iterable[Sequence]) -> Sequence | None:
    """Return the last sequence in turn whose pages can be freed, unless it is the only one.

    So the first in line is never retracted and ends at some time; then the next is the first.
    """
    candidates = _with_pages_to_give(active)
    return in_turn(candidates)[-1] if len(candidates) > 1 else None


def gives_way(seq: Sequence, active: Collection[Sequence], shares: FairShare) -> Sequence | None:
    """Return the one of `active` that is to go back so that `seq` gets a slot, or None.

    It is the last in turn of those that have no higher priority, and whose tenants will still run no fewer
    sequences, for their weight, than the tenant of `seq`. Where shares are known that tenant must lag, too,
    as what is sent back may have to be computed again.
    """
    running = Counter(map(tenant_of, active))
    wanted = (running[tenant_of(seq)] + 1) / weight_of(seq)
    can_spare = {tenant_of(e): (running[tenant_of(e)] - 1) / weight_of(e) >= wanted for e in active}
    if shares.is_on:
        comes = tenant_of(seq)
        can_spare = {each: can and shares.lags(comes, each) for each, can in can_spare.items()}
    if not any(can_spare.values()):
        return None
    line = in_turn(_with_pages_to_give(active))[1:]
    if shares.is_on:  # Who was let in last has computed least.
        line.sort(key=lambda each: (-each.request.priority, each.started_at))
    for each in reversed(line):
        if each.request.priority > seq.request.priority:
            return None
        if can_spare[tenant_of(each)]:
            return each
    return None


def _with_pages_to_give(active: Iterable[Sequence]) -> list[Sequence]:
    return [seq for seq in active if seq.transfer_id is None and seq.phase in (*RUNNING, Phase.LANDED)]
