"""A TenantLru is a router's memory for its tenants: its size is limited, and the tenants share it. It is
pure.

    memory is full -> the tenant that uses the most loses its least recently used entry

So no tenant loses anything to another while it uses no more than an equal share, and a single tenant has all
of it.
"""

import heapq
import math
from collections import OrderedDict, defaultdict
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

_FEW = 64  # A heap with this few extra entries need not be cleaned.


class TenantLru(Generic[K, V]):
    """`max_size` limits the sum of the values' sizes, in the caller's unit; `max_entries` their number."""

    def __init__(self, max_size: int, max_entries: float = math.inf) -> None:
        if max_size < 1 or max_entries < 1:
            raise ValueError(f"max_size and max_entries must be 1 or more, got {max_size} and {max_entries}")
        self.size = 0
        self._max_size = max_size
        self._max_entries = max_entries
        self._num_entries = 0
        self._entries: dict[str, OrderedDict[K, tuple[V, int]]] = {}  # The last one was used last.
        self._sizes: defaultdict[str, int] = defaultdict(int)
        # This holds the use of each tenant after each of its puts; a use that has become less is corrected
        # when it is on top.
        self._fullest: list[tuple[float, str]] = []

    def __len__(self) -> int:
        return self._num_entries

    def put(self, tenant: str, key: K, value: V, size: int) -> list[tuple[K, V]]:
        """Store the value instead of the key's old one, and return the entries that were dropped. The
        new value may be one of them: where it is larger than the whole memory, or than what any other
        tenant uses."""
        self.pop(tenant, key)
        if size > self._max_size:
            return [(key, value)]
        self._entries.setdefault(tenant, OrderedDict())[key] = (value, size)
        self._add(tenant, 1, size)
        self._note(tenant)
        gone = []
        while self.size > self._max_size or self._num_entries > self._max_entries:
            gone.append(self._give_up())
        return gone

    def get(self, tenant: str, key: K) -> V | None:
        """Return the value and mark it as used."""
        if (value := self.peek(tenant, key)) is not None:
            self._entries[tenant].move_to_end(key)
        return value

    def peek(self, tenant: str, key: K) -> V | None:
        """Return the value without marking it as used."""
        entries = self._entries.get(tenant)
        return None if entries is None or key not in entries else entries[key][0]

    def pop(self, tenant: str, key: K) -> None:
        entries = self._entries.get(tenant)
        if entries is not None and key in entries:
            _, size = entries.pop(key)
            self._add(tenant, -1, -size)

    def _give_up(self) -> tuple[K, V]:
        tenant = self._fullest_tenant()
        key, (value, size) = self._entries[tenant].popitem(last=False)
        self._add(tenant, -1, -size)
        return key, value

    def _add(self, tenant: str, entries: int, size: int) -> None:
        self._num_entries += entries
        self.size += size
        self._sizes[tenant] += size
        if not self._entries[tenant]:
            del self._entries[tenant], self._sizes[tenant]

    def _use(self, tenant: str) -> float:
        """Return the tenant's share of the memory, by size or by entries, whichever is larger."""
        num_entries = len(self._entries.get(tenant, ()))
        return max(self._sizes.get(tenant, 0) / self._max_size, num_entries / self._max_entries)

    def _note(self, tenant: str) -> None:
        heapq.heappush(self._fullest, (-self._use(tenant), tenant))
        if len(self._fullest) > 2 * len(self._entries) + _FEW:
            self._fullest = [(-self._use(each), each) for each in self._entries]
            heapq.heapify(self._fullest)

    def _fullest_tenant(self) -> str:
        while True:
            noted, tenant = self._fullest[0]
            use = self._use(tenant)
            if noted == -use:
                return tenant
            if tenant in self._entries:
                heapq.heapreplace(self._fullest, (-use, tenant))
            else:
                heapq.heappop(self._fullest)
