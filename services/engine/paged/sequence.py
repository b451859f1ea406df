"""One request inside the engine core.

    NEW --submitted--> WAITING
    WAITING --admitted, plan local or prefill role--> COMPUTING --last chunk--> DECODING --> ENDED
       |                                                  ^                        |
       |--admitted, plan remote--> RECEIVING --landed-----|--------> DECODING      |
       ^                            |      |              |           ^            |
       |                            |      +--the batch is full--> LANDED          |
       +<--renegotiated (the delta must start earlier)    |           |            |
       +------------------------retracted (pages were short)----------+------------+

Who only receives takes no place in the batch: it may take for ever. One that has landed and finds no place is
the next to get one, before all that are new.

Retraction keeps the full pages in the tree, unlocked: whoever is retracted matches its own prefix when it
comes in again, and computes what was evicted meanwhile. In the prefill role nobody is retracted: a room
may be reading the pages.

ENDED can follow any phase (cancelled, failed). In the prefill role a sequence ends after its first
token; its pages stay until the room has let go of them (`room_open`).
"""

from dataclasses import dataclass, field
from enum import Enum, auto

from services.engine.paged.core_events import Token
from services.engine.paged.drafts.proposal import Proposal
from services.engine.paged.runner import NO_TOKEN, Sampled
from services.engine.paged.scored_prompt import ScoredPrompt
from services.grammar.matcher import Matcher
from services.kv.carried.carried_cache import SequenceCarried
from services.kv.prefix_cache import SequencePages
from services.kv.radix_tree import Lookup
from services.values.errors import InvalidRequest
from services.values.rank import Room
from services.values.request import FinishReason, GenerationRequest


class Phase(Enum):
    NEW = auto()  # not submitted, or refused
    WAITING = auto()  # queued, holds nothing
    RECEIVING = auto()  # pages reserved; prefill writes them
    LANDED = auto()  # written, its first token is known and not said; there is no place in the batch yet
    COMPUTING = auto()  # prompt chunks are computed here
    DECODING = auto()  # one token a step
    ENDED = auto()


RUNNING = (Phase.COMPUTING, Phase.DECODING)  # in the batch


@dataclass(slots=True, eq=False)
class Sequence:
    """Mutable state of one request, touched by the engine's thread only.

    Invariants: `computed <= len(ids)`; while COMPUTING the KV of ids[:max(computed, stored)] is in the pages;
    while DECODING computed == len(ids) - 1: the newest token's KV is stored by the next step.
    """

    request: GenerationRequest
    arrival: int  # order of submission; a retracted sequence keeps it
    receives: bool = False  # admitted into RECEIVING instead of COMPUTING, the first time
    room: Room | None = None  # prefill role: pages are offered to this room as they are computed
    single_token: bool = False  # prefill role: end after the first token
    ids: list[int] = field(default_factory=list)
    phase: Phase = Phase.NEW
    pages: SequencePages | None = None
    carried: SequenceCarried | None = None  # while it has pages
    computed: int = 0  # tokens
    stored: int = 0  # tokens whose K and V were in its pages before it computed them: it must not write those
    borders: list[int] = field(default_factory=list)  # ascending: where it is to keep resume points
    # With whoever computed when it began to, or the other way round: their last common border.
    common: "dict[Sequence, int]" = field(default_factory=dict)
    offered: int = 0  # prefill role: tokens whose pages the room has been given
    room_open: bool = False
    submitted_s: float = 0.0
    admitted_s: float | None = None
    # Estimated at submission, for the load report:
    uncached_tokens: int = 0  # whose K and V are not here
    uncomputed_tokens: int = 0  # to be computed here
    first_token: Sampled | None = None  # while LANDED
    proposal: Proposal | None = None  # that the step which runs verifies
    prefix_limit: int | None = None  # tokens of its prompt that may be matched; None: all
    reused_tokens: int = 0  # of its prompt, that others had computed
    retractions: int = 0
    # While it waits, for the gate:
    overtaken: int = 0
    overtaken_since_s: float | None = None
    lookup: Lookup | None = None
    looked_up_at: int = -1  # the gate's count of news
    ending_ids: frozenset[int] = frozenset()  # the request's
    matcher: Matcher | None = None  # of its constraint, as far as its output ids
    scores: ScoredPrompt | None = (
        None  # where its prompt's are asked for and computed here, until they are said
    )

    def __post_init__(self) -> None:
        self.ids = list(self.request.all_ids)
        self.ending_ids = self.request.ending_ids

    @property
    def num_output(self) -> int:
        """Tokens generated for the client so far, here or elsewhere."""
        return len(self.ids) - len(self.request.prompt_ids)

    @property
    def remaining_tokens(self) -> int:
        """Prompt tokens still to be computed here."""
        return len(self.ids) - self.computed if self.phase is Phase.COMPUTING else 0

    @property
    def matchable_tokens(self) -> int | None:
        """How many of its ids may be matched; None: all.

        Where the next token is computed here, its logits need the last id to be computed too; and what is
        asked of the prompt's tokens those before each of them.
        """
        if self.receives:
            return self.prefix_limit
        return min(len(self.ids) - 1, self.scorable_from)

    @property
    def scorable_from(self) -> int:
        """Where it must begin to compute to tell of its prompt's tokens; all its ids where nobody asks."""
        return len(self.ids) if self.scores is None else self.scores.matchable_tokens

    def __repr__(self) -> str:
        return (
            f"<Sequence {self.request.request_id} {self.phase.name} ids={len(self.ids)} "
            f"computed={self.computed} pages={self.pages!r}>"
        )


def token_said(
    seq: Sequence,
    sampled: Sampled,
    finished: FinishReason | None,
    drafts: tuple[int, int],
    compute_s: float,
) -> Token:
    """Its newest token, and once what was told of its prompt's. `drafts` of its step: verified, accepted."""
    told, seq.scores = None if seq.scores is None else seq.scores.whole(), None
    return Token(sampled.token_id, sampled.logprobs, finished, *drafts, compute_s, seq.reused_tokens, told)


def finish_reason(seq: Sequence, max_context_tokens: int) -> FinishReason | None:
    """Whether the newest token of `seq` ends it."""
    sampling, num_output = seq.request.sampling, seq.num_output
    if seq.ids[-1] in seq.ending_ids and num_output >= sampling.min_tokens:
        return FinishReason.STOP
    if seq.matcher is not None and seq.matcher.ends_here:
        return FinishReason.STOP
    if sampling.max_tokens is not None and num_output >= sampling.max_tokens:
        return FinishReason.LENGTH
    return FinishReason.LENGTH if len(seq.ids) >= max_context_tokens else None


def follow_choice(seq: Sequence, token_id: int) -> InvalidRequest | None:
    """Take what was chosen into its matcher, where it has one. An error: there is no way to go on."""
    if token_id == NO_TOKEN:
        return InvalidRequest(_dead_end(seq))
    if seq.matcher is None or token_id in seq.ending_ids:
        return None
    try:
        seq.matcher.advance((token_id,))
    except InvalidRequest as error:  # a limit of the matcher's: what is chosen is what it allows
        return error
    return None


def _dead_end(seq: Sequence) -> str:
    if not seq.request.sampling.bad_token_ids:
        assert seq.matcher is not None
        return f"sampling.constraint: {seq.matcher.problem}"
    beside = " beside sampling.constraint" if seq.matcher is not None else ""
    return f"sampling.bad_words leaves no token that could come next{beside}"
