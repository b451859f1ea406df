"""A ClientRequest is what one client requested, checked at the door."""

from dataclasses import dataclass, field, replace
from math import inf
from typing import Self

from services.router.request.tools import ChatTools
from services.router.text.chats.past_answers import PastAnswers
from services.values.request import SamplingParams
from services.wire.packed_ids import PackedIds

_NO_IDS = PackedIds.of(())
_64_BITS = 2**64 - 1
_STEP = 0x9E3779B97F4A7C15


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """A request has no prompt at the door; `encoded` makes the one that goes on."""

    request_id: str
    sampling: SamplingParams
    conversation_id: str = ""
    tenant: str = ""
    priority: int = 0
    runs_few: bool = False  # its tenant ran few beside a crowd of others' when it came
    operation: str = "text_completion"  # or chat
    constraint: str = ""  # the kind that the client requested; empty: none
    tools: ChatTools = field(default_factory=ChatTools)
    answers: int = 1  # so many are generated
    answered: int = 1  # the client gets so many of them, the best
    index: int = 0  # this answer's
    tells_logprobs: bool = True  # False: they are requested to rank the answers
    deadline: float = inf  # on the router's clock
    prompt: PackedIds = _NO_IDS
    past: PastAnswers | None = None  # of a chat

    @property
    def answer_name(self) -> str:
        """Ranks and log lines call the answer so."""
        return f"{self.request_id}#{self.index}" if self.index else self.request_id

    @property
    def answer_key(self) -> str:
        """This names the answer among all that are in flight: tenants choose their ids apart, and none of
        them has a NUL."""
        return f"{self.tenant}\0{self.request_id}\0{self.index}"

    @property
    def memory_key(self) -> str:
        """This names the conversation, for tenants may choose the same ids; empty where none was named."""
        return f"{self.tenant}\0{self.conversation_id}" if self.conversation_id else ""

    def encoded(self, prompt: PackedIds, past: PastAnswers | None, sampling: SamplingParams) -> Self:
        """Return the request with its prompt; `sampling` has what its tools ask of the answer."""
        return replace(self, prompt=prompt, past=past, sampling=sampling)

    def of_answer(self, index: int) -> Self:
        """Return the request of one of the answers, which has a seed of its own. The first alone asks about
        the prompt."""
        sampling = replace(self.sampling, seed=seed_of(self.sampling.seed, index))
        if index:
            sampling = sampling.without_prompt_logprobs
        return replace(self, sampling=sampling, index=index)


def seed_of(seed: int, index: int) -> int:
    """Return the seed of an answer. The first one's is the request's own, so that it is the answer to n = 1;
    that of answer i is the i-th number of SplitMix64 from there, and no two of them are the same.

    https://prng.di.unimi.it/splitmix64.c
    """
    if index == 0:
        return seed
    mixed = (seed + index * _STEP) & _64_BITS
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & _64_BITS
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & _64_BITS
    return mixed ^ mixed >> 31
