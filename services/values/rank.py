"""This module has the names of ranks and their incarnations, and the plan of a request over two of them."""

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, NewType

Generation = NewType("Generation", int)  # This is a random 64-bit id of one incarnation of a rank.
TransferId = NewType("TransferId", int)  # This is a random 64-bit id of one request's transfer.


class RankKey(NamedTuple):
    """This names a DP rank over all its incarnations.

    It is a tuple because of the tuple's fast hash: a router looks up ranks dozens of times to place one
    request.
    """

    worker: str
    rank: int

    def __str__(self) -> str:
        return f"{self.worker}/{self.rank}"


@dataclass(frozen=True, slots=True)
class RankId:
    worker: str
    rank: int
    generation: Generation
    # It is computed once, because it is used very often.
    key: RankKey = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", RankKey(self.worker, self.rank))

    def __str__(self) -> str:
        return f"{self.worker}/{self.rank}"


@dataclass(frozen=True, slots=True)
class RankAddress:
    """`endpoint` is HOST:PORT of the gRPC server of this incarnation."""

    id: RankId
    endpoint: str


@dataclass(frozen=True, slots=True)
class PullSource:
    """This rank is believed to hold `tokens` of a prompt; the rank that computes the prompt may pull them."""

    rank: RankAddress
    tokens: int


@dataclass(frozen=True, slots=True)
class TakeOver:
    """A rank that leaves asks a successor to pull a prefix by this; see rank.proto."""

    source: RankAddress
    cache_salt: str
    token_ids: tuple[int, ...]
    idle_s: float
    protected_tokens: int
    within_s: float


@dataclass(frozen=True, slots=True)
class TakenOver:
    """A successor answers this; see rank.proto."""

    held_tokens: int
    room_tokens: int
    pulled_tokens: int = 0
    pulled_bytes: int = 0
    refused: str = ""
    digested_pages: int = 0  # Who asked does not get it.


@dataclass(frozen=True, slots=True)
class Rendezvous:
    transfer_id: TransferId
    decode: RankId
    prefill: RankId


class Role(Enum):
    PREFILL = "prefill"
    DECODE = "decode"


class Plan(Enum):
    """A plan decides where a prompt is computed: REMOTE on a prefill rank, LOCAL on the decode rank."""

    REMOTE = "remote"
    LOCAL = "local"
