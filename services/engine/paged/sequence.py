"""A sequence is one request inside the engine core.

    NEW --submitted--> WAITING
       |--admitted, a source holds more--> PULLING --landed, failed--v
    WAITING --admitted, plan local or prefill role--> COMPUTING --last chunk--> DECODING --> ENDED
       |--admitted, a tier holds more--> FILLING --ended--^                        |
       |--admitted, plan remote--> RECEIVING --landed-----|--------> DECODING      |
       ^                            |      |              |           ^            |
       |                            |      +--the batch is full--> LANDED          |
       +<--renegotiated (the delta must start earlier)    |           |            |
       +------------------------retracted (pages were short)----------+------------+

A sequence that fills or pulls has a slot in the batch, because reads and sources are waited for within bounds
(paged/tiering.py, paged/pulls.py). A sequence that only receives has no slot, because it may take for ever.
One that has landed and finds no slot gets the next one, before all new sequences.

Retraction keeps the full pages in the tree, unlocked: a retracted sequence matches its own prefix when it is
admitted again, and computes what was evicted since. In the prefill role no sequence is retracted, because a
transfer may be reading its pages.

ENDED can follow any phase (cancelled, failed). In the prefill role a sequence ends after its first token; its
pages stay until its transfer has ended (`transfer_open`).
"""

import sys
from dataclasses import dataclass, field
from enum import Enum, auto

from services.engine.paged.core_events import NO_TIME, PromptTime, Token
from services.engine.paged.fair_share import FairShare
from services.engine.paged.model_runner import NO_TOKEN, Proposal, Sampled, ScoredPrompt
from services.grammar.matcher import Matcher
from services.kv.carried_cache import SequenceCarried
from services.kv.prefix_cache import SequencePages
from services.kv.radix_tree import Lookup
from services.values.errors import InvalidRequest, NoCapacity
from services.values.rank import PullSource, TransferId
from services.values.request import FinishReason, GenerationRequest


class Phase(Enum):
    NEW = auto()  # It was not submitted, or was refused.
    WAITING = auto()  # It is queued and holds nothing.
    RECEIVING = auto()  # Its pages are reserved; prefill writes them.
    LANDED = auto()  # Its pages are written and its first token known, but the batch has no slot yet.
    PULLING = auto()  # A source writes its pages, or it waits for other pages instead.
    FILLING = auto()  # A tier's thread writes some of its pages, from a tier below the pool.
    COMPUTING = auto()  # Its prompt chunks are computed here.
    DECODING = auto()  # It gets one token a step, or several with drafts.
    ENDED = auto()


RUNNING = (Phase.COMPUTING, Phase.DECODING)  # These are in the batch.
WITH_SLOT = (*RUNNING, Phase.PULLING, Phase.FILLING)


class PromptTimer:
    """It measures a sequence's PromptTime, whose parts add up:

    queues    submitted, renegotiated, sent back
    waits     let in, with its pages
    computes  a step begins with a chunk of its prompt
    token     the prompt has been computed: nothing counts until it queues again
    """

    def __init__(self) -> None:
        self._parts = [0.0] * 3
        self._part: int | None = None
        self._since_s = 0.0
        self._before: int | None = None  # The rank had computed so many prompt tokens when this began.

    def counts_from(self, rank_tokens: int) -> None:
        """Note what the rank has computed of all prompts since its start, when this one comes."""
        if self._before is None:
            self._before = rank_tokens

    def queues(self, now_s: float) -> None:
        self._turn(0, now_s)

    def waits(self, now_s: float) -> None:
        self._turn(1, now_s)

    def computes(self, now_s: float) -> None:
        self._turn(2, now_s)

    def token(self, now_s: float, rank_tokens: int) -> PromptTime:
        self._turn(None, now_s)
        assert self._before is not None
        queued_s, waited_s, computed_s = self._parts
        time = PromptTime(queued_s, waited_s, computed_s, rank_tokens - self._before)
        self._parts, self._before = [0.0] * 3, None
        return time

    def _turn(self, part: int | None, now_s: float) -> None:
        if self._part is not None:
            self._parts[self._part] += now_s - self._since_s
        self._part, self._since_s = part, now_s


@dataclass(slots=True, eq=False)
class Sequence:
    """It is the mutable state of one request; only the engine's thread touches it.

    Invariants: `computed <= len(ids)`; while COMPUTING the KV of ids[:max(computed, stored)] is in the pages;
    while DECODING computed == len(ids) - 1: the newest token's KV is stored by the next step.
    """

    request: GenerationRequest
    arrival: int  # It is the order of submission, which a retracted sequence keeps.
    receives: bool = False  # Its first admission leads to RECEIVING instead of COMPUTING.
    transfer_id: TransferId | None = None  # In the prefill role it takes pages as they are computed.
    single_token: bool = False  # In the prefill role it ends after the first token.
    ids: list[int] = field(default_factory=list)
    phase: Phase = Phase.NEW
    source: PullSource | None = None  # It is asked once, when the sequence is first admitted.
    pulls_to: int = 0  # While PULLING: the source is said to hold so many of its tokens.
    awaits: "Sequence | None" = None  # When this one was admitted, that one was pulling its beginning.
    only_pulls: bool = False  # It is a prefix that this rank takes over from another, and is never computed.
    lacking_pages: int = 0  # It is to get so many others: a source may still write those that it had.
    pages: SequencePages | None = None
    carried: SequenceCarried | None = None  # It is set while it has pages.
    computed: int = 0  # It counts tokens.
    stored: int = 0  # The K and V of so many tokens came with its pages, so it must not write them.
    borders: list[int] = field(default_factory=list)  # It keeps checkpoints at these positions, which ascend.
    # It has the last common border with each sequence that was computing when this one began to, or later.
    common: "dict[Sequence, int]" = field(default_factory=dict)
    offered: int = 0  # In the prefill role the transfer has been offered the pages of these tokens.
    draft_sent: int = sys.maxsize  # Of the tokens offered, the draft model had the KV of so many by then.
    transfer_open: bool = False
    submitted_s: float = 0.0
    admitted_s: float | None = None
    timer: PromptTimer = field(default_factory=PromptTimer)
    # These are estimated at submission, for the load report.
    uncached_tokens: int = 0  # Their K and V are not here.
    uncomputed_tokens: int = 0  # They are to be computed here.
    in_common: int = 0  # So many of its first tokens a prompt brings that came before it.
    first_token: Sampled | None = None  # It is set while LANDED.
    proposal: Proposal | None = None  # The step that runs verifies it.
    prefix_limit: int | None = None  # So many tokens of its prompt may be matched; None allows all.
    reused_tokens: int = 0  # Others had computed these.
    brought_tokens: int = 0  # Of these, so many came from a tier.
    retractions: int = 0
    place: float = 0.0  # It stands here among its tenant's own; by arrival where this is equal.
    started_at: float = 0.0  # Its tenant had had so much when it was let in.
    came_tokens: int = 0  # So many tokens, its own included, were to be computed of prompts when it came.
    expected_tokens: int | None = None  # So many were expected of its own; None from when it begins.
    withheld_tokens: int = 0  # Steps had room for so many more of its prompt (Limits.prompt_room).
    owed_tokens: int = 0  # Its tenant was charged for so many that are not computed yet.
    # The gate keeps these while it waits.
    overtaken: int = 0
    overtaken_since_s: float | None = None
    lookup: Lookup | None = None
    looked_up_at: int = -1  # It is the gate's count of news then.
    ahead_bytes: int | None = None  # A tier in files was told to read so many ahead of its turn.
    ending_ids: frozenset[int] = frozenset()
    matcher: Matcher | None = None  # It stands at the end of the output ids.
    scores: ScoredPrompt | None = (
        None  # It is set where scores of its prompt are requested and computed here, until they are reported.
    )

    def __post_init__(self) -> None:
        self.ids = list(self.request.all_ids)
        self.ending_ids = self.request.ending_ids

    @property
    def due_s(self) -> float | None:
        left_s = self.request.left_s
        return None if left_s is None else self.submitted_s + left_s

    @property
    def num_output(self) -> int:
        return len(self.ids) - len(self.request.prompt_ids)

    @property
    def remaining_tokens(self) -> int:
        return len(self.ids) - self.computed if self.phase is Phase.COMPUTING else 0

    @property
    def own_tokens(self) -> int:
        """Return how many of its ids are to be computed that no prompt brings which came before it."""
        found = self.computed if self.phase is Phase.COMPUTING else len(self.ids) - self.uncomputed_tokens
        return len(self.ids) - max(found, self.in_common)

    @property
    def matchable_tokens(self) -> int | None:
        """Return how many of its ids may be matched; None allows all.

        Where the next token is computed here, the last id must be computed too, for its logits. Where scores
        of the prompt's tokens are requested, the token before each of them must be computed.
        """
        if self.receives:
            return self.prefix_limit
        return min(len(self.ids) - 1, self.scorable_from)

    @property
    def scorable_from(self) -> int:
        """Return where it must begin to compute to score its prompt's tokens; len(ids) without scores."""
        return len(self.ids) if self.scores is None else self.scores.matchable_tokens

    def __repr__(self) -> str:
        return (
            f"<Sequence {self.request.request_id} {self.phase.name} ids={len(self.ids)} "
            f"computed={self.computed} pages={self.pages!r}>"
        )


class PromptCharges:
    """A prompt costs its tenant what is computed for it, charged ahead.

    let in    what is to be computed is charged, and owed
    computed  so much less is owed
    reused    others had computed it: it is owed no more, and given back
    ended     what is still owed is given back
    """

    def __init__(self, shares: FairShare) -> None:
        self._shares = shares

    def let_in(self, seq: Sequence) -> None:
        """Charge a prompt when it is let in the first time: that one computes again is not its tenant's
        doing."""
        if seq.retractions == 0:
            seq.owed_tokens = min(seq.uncomputed_tokens, len(seq.ids) - seq.computed)
            self._shares.charge(seq.request.share, seq.owed_tokens)

    def computed(self, seq: Sequence) -> None:
        seq.owed_tokens = min(seq.owed_tokens, len(seq.ids) - seq.computed)

    def reused(self, seq: Sequence) -> None:
        owed = seq.owed_tokens
        self.computed(seq)
        self._shares.charge(seq.request.share, seq.owed_tokens - owed)

    def ended(self, seq: Sequence) -> None:
        self._shares.charge(seq.request.share, -seq.owed_tokens)
        seq.owed_tokens = 0


def check_prompt(seq: Sequence, vocab_size: int, max_context_tokens: int) -> None:
    if not seq.ids:
        raise InvalidRequest("prompt must not be empty")
    if max(seq.ids) >= vocab_size or min(seq.ids) < 0:
        raise InvalidRequest(f"prompt has a token id outside the vocabulary of {vocab_size}")
    seq.request.sampling.check_vocabulary(vocab_size)
    if len(seq.ids) >= max_context_tokens + seq.single_token:
        raise NoCapacity(
            f"prompt has {len(seq.ids)} tokens; this rank holds {max_context_tokens} with the answer"
        )


def newest_token(
    seq: Sequence,
    sampled: Sampled,
    finished: FinishReason | None,
    drafts: tuple[int, int],
    first: tuple[float, int] | None,
) -> Token:
    """Return the newest token as an event, with the scores of the prompt's tokens the first time.

    `drafts` counts the drafts that its step (verified, accepted). `first` is for a token that
    follows the prompt, or one that was computed again: when that is, and what the rank has computed by then.
    """
    time = NO_TIME if first is None else seq.timer.token(*first)
    told, seq.scores = None if seq.scores is None else seq.scores.whole(), None
    reused, brought = seq.reused_tokens, seq.brought_tokens
    return Token(sampled.token_id, sampled.logprobs, finished, *drafts, time, reused, told, brought)


def finish_reason(seq: Sequence, max_context_tokens: int) -> FinishReason | None:
    sampling = seq.request.sampling
    if seq.ids[-1] in seq.ending_ids and seq.num_output >= sampling.min_tokens:
        return FinishReason.STOP
    if seq.matcher is not None and seq.matcher.ends_here:
        return FinishReason.STOP
    if sampling.max_tokens is not None and seq.num_output >= sampling.max_tokens:
        return FinishReason.LENGTH
    return FinishReason.LENGTH if len(seq.ids) >= max_context_tokens or seq.single_token else None


def follow_choice(seq: Sequence, token_id: int) -> InvalidRequest | None:
    """Advance the matcher by the chosen token; return an error where no token can come next."""
    if token_id == NO_TOKEN:
        return InvalidRequest(_dead_end(seq))
    if seq.matcher is None or token_id in seq.ending_ids:
        return None
    try:
        seq.matcher.advance((token_id,))
    # The matcher has reached one of its limits; the token itself was allowed.
    except InvalidRequest as error:
        return error
    return None


def _dead_end(seq: Sequence) -> str:
    if not seq.request.sampling.bad_token_ids:
        assert seq.matcher is not None
        return f"sampling.constraint: {seq.matcher.problem}"
    beside = " beside sampling.constraint" if seq.matcher is not None else ""
    return f"sampling.bad_words leaves no token that could come next{beside}"
