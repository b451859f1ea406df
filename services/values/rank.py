"""Ranks, their incarnations, and the plan of a request over two of them are named here."""

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, NewType

Generation = NewType("Generation", int)  # It is a 64-bit random id of one incarnation of a rank.
Room = NewType("Room", int)  # It is a 64-bit random name of one request's transfer between two ranks.


class RankKey(NamedTuple):
    """A DP rank is named over all its incarnations by its worker's name and its number.

    It is a tuple, for its hash: a router looks ranks up dozens of times to place one request.
    """

    worker: str
    rank: int

    def __str__(self) -> str:
        return f"{self.worker}/{self.rank}"


@dataclass(frozen=True, slots=True)
class RankId:
    """One incarnation of a DP rank has this id."""

    worker: str
    rank: int
    generation: Generation
    # It is made once: it is looked up very often.
    key: RankKey = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", RankKey(self.worker, self.rank))

    def __str__(self) -> str:
        return f"{self.worker}/{self.rank}"


@dataclass(frozen=True, slots=True)
class RankAddress:
    """One incarnation of a rank is reached here: `endpoint` is HOST:PORT of its gRPC server."""

    id: RankId
    endpoint: str


@dataclass(frozen=True, slots=True)
class PullSource:
    """A rank is said to hold `tokens` of a prompt: whoever is to compute it may have it write them."""

    rank: RankAddress
    tokens: int


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Lets two ranks meet for one request."""

    room: Room
    decode: RankId
    prefill: RankId


class Role(Enum):
    PREFILL = "prefill"
    DECODE = "decode"


class Plan(Enum):
    """The prompt's KV gets to the decode rank by a plan."""

    REMOTE = "remote"
    LOCAL = "local"
