"""The boundary between the engine core (pages, tree, batches) and what computes tokens.

Log-probabilities of a prompt's tokens are a part of it: which rows of a chunk report them, and what they have
reported.

    position     0   1   2   3   4   5         a prompt of 6, asked for from 3 on
    its row      .   .   3   4   5   next      the row of a token tells of the one behind it

So who computes takes nothing from the cache past position 2, and rows 2, 3 and 4 are asked, in any chunks.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from services.grammar.matcher import MaskCounts, MaskRequest, Matcher
from services.values.errors import PeerFailed
from services.values.kv import KvLayout, PageId, PoolMemory
from services.values.prompt_logprobs import PromptLogprobs
from services.values.request import GenerationRequest, SamplingParams, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Scoring:
    """A chunk's rows are asked for each id how probable it is behind the tokens before it."""

    first: int  # It is the position of the first id, whose row is the one before.
    token_ids: Sequence[int]
    num_top: int
    tell: Callable[[PromptLogprobs], None]  # The step calls it once, with all of them.

    @property
    def rows(self) -> range:
        return range(self.first - 1, self.first - 1 + len(self.token_ids))


@dataclass(slots=True, eq=False)
class ScoredPrompt:
    """It belongs to one sequence and is touched by the engine's thread only."""

    prompt_ids: Sequence[int]
    next: int  # It is the position of the first token about which nothing has been reported.
    num_top: int
    pieces: list[PromptLogprobs] = field(default_factory=list)

    @property
    def matchable_tokens(self) -> int:
        return self.next - 1

    def asked_of(self, start: int, end: int) -> Scoring | None:
        """Return what is requested of a chunk of positions [start, end), or None where nothing is.

        The chunk may compute again what has been reported, and skip nothing.
        """
        assert start < self.next, (
            f"nobody computes what tells of token {self.next}: a chunk starts at {start}"
        )
        token_ids = self.prompt_ids[self.next : end + 1]
        return Scoring(self.next, token_ids, self.num_top, self._take) if token_ids else None

    def whole(self) -> PromptLogprobs:
        assert self.next == len(self.prompt_ids), f"told of {self.next} tokens of {len(self.prompt_ids)}"
        return PromptLogprobs.joined(self.pieces, self.num_top)

    def _take(self, told: PromptLogprobs) -> None:
        self.pieces.append(told)
        self.next += len(told)


def scores_of(request: GenerationRequest) -> ScoredPrompt | None:
    """Return None where no scores are requested. Raises InvalidRequest where they cannot be had."""
    scored, num_top = request.scored, request.sampling.prompt_logprobs
    return None if num_top is None else ScoredPrompt(request.prompt_ids, scored.start, num_top)


def check_told(told: PromptLogprobs | None, request: GenerationRequest) -> None:
    """Raises PeerFailed where a prefill rank has reported other tokens than it was asked for."""
    num_told = None if told is None else (len(told), told.num_top)
    num_top = request.sampling.prompt_logprobs
    asked = None if num_top is None else (len(request.scored), num_top)
    if num_told != asked:
        raise PeerFailed(f"prefill told of (tokens, others) {num_told} of the prompt where {asked} were due")


@dataclass(frozen=True, slots=True)
class Proposal:
    source: str
    ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class TailPages:
    """Page i of `pages` holds the positions of page first_page + i of the sequence, for one windowed group.

    The pages begin with the tail that the chunk's first token sees, and end with the page of its last one.
    """

    first_page: int
    pages: Sequence[PageId]


@dataclass(slots=True)
class Chunk:
    """A chunk is what one sequence contributes to a step: tokens whose KV is to be computed and stored.

    Nobody changes one. It is not frozen, for there is one for each token of each step, and what is frozen
    takes thrice as long to make.

    The chunk's tokens are at positions [start, start + len(token_ids)); the KV of [0, start) is in the pages
    already, and the state after `start` tokens in the slot (which is taken for zeros at 0). Page i of `pages`
    holds positions [i * page_size, (i + 1) * page_size).
    """

    token_ids: Sequence[int]
    start: int
    pages: Sequence[PageId]
    sample: bool  # The token that follows the chunk is chosen.
    sampling: SamplingParams
    # Only read when `sample` is set. `history` is every id up to and with the chunk's last one, drafts apart;
    # its last `num_output_ids` ids are generated ones (penalties, min_tokens, bad_token_ids).
    history: Sequence[int] = ()
    num_output_ids: int = 0
    eos_token_ids: tuple[int, ...] = ()
    # What follows is about the groups beside full attention (KvLayout.carried).
    store_from: int = 0  # Full attention's K and V before it are in the pages, where others may read them.
    tails: tuple[TailPages, ...] = ()  # They have one entry for each windowed group, in the layout's order.
    # It has the recurrent state, before and after; no other chunk of the step has it.
    slot: int | None = None
    # Its last tokens are guesses: each is to be kept where it is what would have been chosen. `history` ends
    # before them.
    num_drafts: int = 0
    matcher: Matcher | None = None  # It is set where the chunk samples, and stands at the end of `history`.
    # Its tokens were chosen here or elsewhere, one by one: recurrent layers compute them so again.
    generated: bool = False
    scoring: Scoring | None = None  # It is what else the rows report, about the prompt's next tokens.

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)

    @property
    def drafts(self) -> Sequence[int]:
        return self.token_ids[len(self.token_ids) - self.num_drafts :]

    @property
    def banned_ids(self) -> frozenset[int]:
        """Return the ids that must not come next, as each would end a sequence of bad_token_ids.

        What came before the output is no part of such a sequence.
        """
        bad = self.sampling.bad_token_ids
        longest = min(max(map(len, bad), default=1) - 1, self.num_output_ids)
        last = tuple(self.history[len(self.history) - longest :]) if longest else ()
        return frozenset(ids[-1] for ids in bad if len(ids) == 1 or last[1 - len(ids) :] == ids[:-1])


NO_TOKEN = -1


@dataclass(frozen=True, slots=True)
class Sampled:
    """NO_TOKEN says that constraint and bans together allow no token that the vocabulary has."""

    token_id: int
    logprobs: TokenLogprobs | None = None


class RunnerFailed(Exception):
    """A step could not be computed, for the reason that is its cause; its KV is undefined."""


class DraftModel(Protocol):
    """A small model beside a runner's own drafts what that may choose next.

    Its KV is a shadow of the target's: a pool of its own with as many pages, allocated by the same ids. It
    has no books, nobody waits for it, and what it lacks of a sequence it computes or does not draft. It
    decides how fast tokens come, never which nor whether: where it fails there are no drafts. It is called
    from the engine's thread only.
    """

    @property
    def memory(self) -> PoolMemory:
        """Return its pool: page i shadows page i of full attention; `layout.draft` says what one is."""

    @property
    def step_s(self) -> float:
        """Return the seconds that one draft for each sequence of a batch took lately; 0 where it is not known
        yet."""

    def lent(self, pages: Sequence[PageId]) -> None:
        """Note that the target's pages were allocated anew: nothing in them belongs to who has them now."""

    def received(self, pages: Sequence[PageId], num_tokens: int) -> None:
        """Note that its KV of `num_tokens` tokens came by wire into these pages, from the first one's start
        on."""

    def held_tokens(self, pages: Sequence[PageId]) -> int:
        """Return of how many leading tokens of a sequence with these pages it has the KV."""

    def propose(self, chunks: Sequence[Chunk], counts: Sequence[int]) -> list[tuple[int, ...]]:
        """Return for each decoding sequence up to so many ids that may follow its newest one.

        A chunk is what the sequence computes next, without drafts: that newest token, `history` with it.
        There are none where the draft's KV of the sequence lacks more than a step computes; each call goes on
        with that.
        """


class ModelRunner(Protocol):
    """Every method but `read_pages` is called from the engine's thread only."""

    @property
    def draft(self) -> DraftModel | None:
        """Return the draft model, if any.

        Then `run` has it compute prompt chunks, too, and `read_pages` reads its pool as the group behind the
        layout's last.
        """

    @property
    def layout(self) -> KvLayout: ...

    @property
    def memory(self) -> PoolMemory: ...

    @property
    def carried_memory(self) -> tuple[PoolMemory, ...]:
        """Return the pools of the layout's other groups, in its order."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_context_tokens(self) -> int: ...

    @property
    def max_step_drafts(self) -> int:
        """Return the most drafts in one step, of all its chunks together."""

    def run(self, chunks: Sequence[Chunk]) -> list[tuple[Sampled, ...]]:
        """Compute one step: store every chunk's KV into its pages, choose the tokens asked for.

        When it returns, the KV is in memory and may be read by a transport. Chunks of any lengths may be
        mixed. No two chunks write the same page; they may read the same ones.

        A chunk with drafts gets the choice before each of them and after the last, as they would be without
        drafts, up to the first that is not what was guessed: 1 to num_drafts + 1 of them. Its slot then has
        the state after start + that many tokens. The KV of drafts that were wrong stays behind in its pages;
        whoever writes these positions next writes over it.

        A chunk gets none of its banned ids, and with a matcher only what that allows; the matcher stays where
        it is. What its scoring requests is reported before it returns, unless it raises; for all chunks
        together that takes little memory.

        Returns:
            One entry per chunk, () where `sample` is not set.
        """

    @property
    def mask_counts(self) -> MaskCounts: ...

    @property
    def steps_by_way(self) -> Mapping[str, int]:
        """Return how many steps were replayed from a graph, and how many computed anew; it is empty where
        there is one way only."""

    def copy_slots(self, moves: Sequence[tuple[int, int]]) -> None:
        """Copy states, from the first slot of each move to the second; it is called between steps.

        When it returns they are in memory: a transport may read and write the slots.
        """

    def read_pages(self, pages: Sequence[PageId], group: int = 0) -> Iterator[memoryview]:
        """Yield the bytes of each unit of a group's pool, copied to the host's memory where they are
        elsewhere.

        What it gives is valid until the next is taken, or this thread reads anew. Any thread may call.
        """

    def close(self) -> None: ...


def keep_accepted(drafts: Sequence[int], choices: Sequence[Sampled]) -> tuple[Sampled, ...]:
    """Return the choices before each draft and after the last, up to the first that is not its draft."""
    for index, (draft, choice) in enumerate(zip(drafts, choices, strict=False)):
        if choice.token_id != draft:
            return tuple(choices[: index + 1])
    return tuple(choices)


def masks_asked(chunks: Sequence[Chunk]) -> list[MaskRequest]:
    return [MaskRequest(c.matcher, c.drafts) for c in chunks if c.sample and c.matcher is not None]
