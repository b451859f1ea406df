"""Who is who: ranks, their lives, and the plan of a request over two of them. Pure."""

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, NewType

Generation = NewType("Generation", int)  # 64-bit random id of one life of a rank
Room = NewType("Room", int)  # 64-bit random name of one request between two ranks


class RankKey(NamedTuple):
    """A DP rank over all its lives: worker name and rank number.

    A tuple, for its hash: a router looks ranks up dozens of times to place one request.
    """

    worker: str
    rank: int

    def __str__(self) -> str:
        return f"{self.worker}/{self.rank}"


@dataclass(frozen=True, slots=True)
class RankId:
    """One life of a DP rank."""

    worker: str
    rank: int
    generation: Generation
    key: RankKey = field(init=False, repr=False, compare=False)  # made once: it is asked for very often

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", RankKey(self.worker, self.rank))

    def __str__(self) -> str:
        return f"{self.worker}/{self.rank}"


@dataclass(frozen=True, slots=True)
class RankAddress:
    """Where one life of a rank is reached: `endpoint` is HOST:PORT of its gRPC server."""

    id: RankId
    endpoint: str


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
    """How the prompt's KV gets to the decode rank."""

    REMOTE = "remote"
    LOCAL = "local"
