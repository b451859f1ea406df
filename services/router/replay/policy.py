"""A policy is a router in the simulator: it chooses the ranks of each request."""

from typing import Protocol

from services.router.replay.ranks import Job, Rank
from services.router.replay.workload import TraceRequest
from services.values.kv import CacheEvents
from services.values.rank import RankId


class Policy(Protocol):
    def choose(self, request: TraceRequest) -> tuple[int, int | None]:
        """Index of the decode rank; of the prefill rank, or None where decode computes."""

    def sent(self, job: Job) -> None: ...

    def first_token(self, job: Job) -> None: ...

    def ended(self, job: Job) -> None: ...

    def loaded(self, rank: Rank) -> None:
        """A rank has reported."""

    def told(self, rank: RankId, taken: CacheEvents) -> None:
        """A rank's cache events have come."""
