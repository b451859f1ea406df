"""This module holds what was asked, what came and how it ended: values that the clients make and the verdict
reads."""

from dataclasses import dataclass
from enum import StrEnum


class Front(StrEnum):
    GRPC = "grpc"
    HTTP = "http"


class Ended(StrEnum):
    FINISHED = "finished"
    CANCELLED = "cancelled"  # by its client
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class Asked:
    """`temperature` 0 is greedy. `again`: the number of the answer whose request this one repeats."""

    number: int
    prompt_ids: tuple[int, ...]
    max_tokens: int
    temperature: float
    seed: int
    front: Front
    conversation: str = ""
    tenant: str = ""
    cancel_after: int | None = None  # tokens
    again: int | None = None

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


@dataclass(frozen=True, slots=True)
class Failure:
    """An error that a client saw. `router_died`: its router was killed meanwhile, so it asks another one."""

    status: str
    router: str
    text: str
    at_s: float
    router_died: bool


@dataclass(frozen=True, slots=True)
class Answer:
    """`arrivals_s`: when something new came, over all the times that it was asked; times are on one clock.
    `contradicts`: asked once more after its router died, it began with other tokens than before."""

    asked: Asked
    tokens: tuple[int, ...]
    ended: Ended
    began_s: float
    arrivals_s: tuple[float, ...]
    failures: tuple[Failure, ...] = ()
    routers: frozenset[str] = frozenset()  # that were asked
    decode_rank: str = ""  # of the last placement
    contradicts: bool = False
    pulled_tokens: int = 0  # over gRPC, which says so

    @property
    def ttft(self) -> "Span | None":
        return Span(self.began_s, self.arrivals_s[0]) if self.arrivals_s else None

    @property
    def gaps(self) -> "list[Span]":
        return [Span(a, b) for a, b in zip(self.arrivals_s, self.arrivals_s[1:], strict=False)]


@dataclass(frozen=True, slots=True)
class Span:
    begin_s: float
    end_s: float

    @property
    def lasts_s(self) -> float:
        return self.end_s - self.begin_s

    def overlaps(self, other: "Span") -> bool:
        return self.begin_s <= other.end_s and other.begin_s <= self.end_s
