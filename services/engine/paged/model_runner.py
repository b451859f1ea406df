"""This is the boundary between the engine core (pages, tree, batches) and what computes tokens.

It includes log-probabilities of a prompt's tokens: which rows of a chunk report them, and what they have
reported.

    position     0   1   2   3   4   5         a prompt of 6 tokens, requested from 3 on
    its row      .   .   3   4   5   next      the row of a token reports on the token behind it

So the sequence uses nothing that is cached behind position 2, and rows 2, 3 and 4 report, in any chunks.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from services.grammar.matcher import MaskCounts, MaskRequest, Matcher
from services.tier.copies import Staging
from services.values.adapter import Adapter
from services.values.errors import PeerFailed
from services.values.kv import KvLayout, PageId, PoolMemory
from services.values.prompt_logprobs import PromptLogprobs
from services.values.request import GenerationRequest, SamplingParams, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Scoring:
    """Rows of a chunk are to report the log-probability of each id, given the tokens before it."""

    first: int  # It is the position of the first id, on which the row before it reports.
    token_ids: Sequence[int]
    num_top: int
    tell: Callable[[PromptLogprobs], None]  # The step calls it once, with all log-probabilities.

    @property
    def rows(self) -> range:
        return range(self.first - 1, self.first - 1 + len(self.token_ids))


@dataclass(slots=True, eq=False)
class ScoredPrompt:
    prompt_ids: Sequence[int]
    next: int  # It is the position of the first token that is not yet reported.
    num_top: int
    pieces: list[PromptLogprobs] = field(default_factory=list)

    @property
    def matchable_tokens(self) -> int:
        return self.next - 1

    def asked_of(self, start: int, end: int) -> Scoring | None:
        """Return what a chunk of positions [start, end) is to report, or None where it reports nothing.

        The chunk may recompute tokens that were reported before, but may not skip any.
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
    """Return None where no scores are requested. Raise InvalidRequest where they are not available."""
    scored, num_top = request.scored, request.sampling.prompt_logprobs
    return None if num_top is None else ScoredPrompt(request.prompt_ids, scored.start, num_top)


def check_told(told: PromptLogprobs | None, request: GenerationRequest) -> None:
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

    Nobody changes one. It is not frozen, because there is one for each token of each step, and a frozen one
    takes three times as long to make.

    The chunk's tokens are at positions [start, start + len(token_ids)). The KV of [0, start) is in the pages
    already, and the state after `start` tokens is in the slot (which counts as zeros at 0). Page i of `pages`
    holds positions [i * page_size, (i + 1) * page_size).
    """

    token_ids: Sequence[int]
    start: int
    pages: Sequence[PageId]
    sample: bool  # The token that follows the chunk is to be chosen.
    sampling: SamplingParams
    # These are read only where `sample` is set. `history` has all ids up to the chunk's last one, without
    # drafts; its last `num_output_ids` ids were generated (for penalties, min_tokens, bad_token_ids).
    history: Sequence[int] = ()
    num_output_ids: int = 0
    eos_token_ids: tuple[int, ...] = ()
    # The next fields concern the groups beside full attention (KvLayout.carried).
    store_from: int = 0  # Full attention's K and V before it are in the pages, where others may read them.
    tails: tuple[TailPages, ...] = ()  # They have one entry for each windowed group, in the layout's order.
    # The slot has the recurrent state, before and after; no other chunk of the step has the same slot.
    slot: int | None = None
    # So many last tokens are drafts: each is kept if it is what would be chosen. `history` ends before them.
    num_drafts: int = 0
    matcher: Matcher | None = None  # It is set where the chunk samples, and stands at the end of `history`.
    # Its tokens were chosen here or elsewhere, one by one: recurrent layers compute them one by one again.
    generated: bool = False
    # It tells what else the rows are to report, about the prompt's next tokens.
    scoring: Scoring | None = None
    adapter: Adapter | None = None
    # Of chunks that have the same object here, the `pages` of one are the first of the other's. Nobody else
    # reads a page that the chunk's tokens are written to, before another step.
    table: object | None = None

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)

    @property
    def drafts(self) -> Sequence[int]:
        return self.token_ids[len(self.token_ids) - self.num_drafts :]

    @property
    def banned_ids(self) -> frozenset[int]:
        """Return the ids that must not come next, because each would complete a sequence of bad_token_ids.

        Tokens before the output do not count as part of such a sequence.
        """
        bad = self.sampling.bad_token_ids
        longest = min(max(map(len, bad), default=1) - 1, self.num_output_ids)
        last = tuple(self.history[len(self.history) - longest :]) if longest else ()
        return frozenset(ids[-1] for ids in bad if len(ids) == 1 or last[1 - len(ids) :] == ids[:-1])


NO_TOKEN = -1


@dataclass(slots=True, unsafe_hash=True)
class Sampled:
    """Nobody changes one; as with chunks there are many.

    NO_TOKEN means that constraint and bans together allow no token of the vocabulary.
    """

    token_id: int
    logprobs: TokenLogprobs | None = None


class RunnerFailed(Exception):
    """A step could not be computed, for the reason that is its cause; the step's KV is undefined."""


class DraftModel(Protocol):
    """A small model beside a runner's own drafts what that may choose next.

    Its KV shadows the target's: its pool has as many pages, which are allocated by the same ids. It has no
    books, and nobody waits for it. What it lacks of a sequence it computes, or it does not draft. It affects
    how fast tokens come, and never which tokens: where it fails there are no drafts. Only the engine's thread
    calls it.
    """

    @property
    def memory(self) -> PoolMemory:
        """Return its pool: page i shadows page i of full attention; `layout.draft` describes a page."""

    @property
    def step_s(self) -> float:
        """Return the recent seconds per round, with one draft for each sequence; 0 where that is unknown."""

    def lent(self, pages: Sequence[PageId]) -> None:
        """Note that these pages of the target have a new owner, to whom nothing in them belongs."""

    def received(self, pages: Sequence[PageId], num_tokens: int) -> None:
        """Note that its KV of `num_tokens` tokens was received into these pages, from the start of the first
        one on."""

    def held_tokens(self, pages: Sequence[PageId]) -> int:
        """Return the number of leading tokens, of a sequence with these pages, whose KV it has."""

    def propose(self, chunks: Sequence[Chunk], counts: Sequence[int]) -> list[tuple[int, ...]]:
        """Return for each decoding sequence up to so many ids that may follow its newest one.

        A chunk has what the sequence computes next, without drafts: the newest token, which `history`
        includes. There are no drafts where the draft model lacks more KV of the sequence than a step
        computes; each call computes some of it.
        """


class RunnerAdapters(Protocol):
    """A chunk may name an adapter that is loaded; the others' rows are not affected."""

    @property
    def loaded(self) -> Collection[Adapter]: ...

    def read(self, name: str, directory: Path) -> Any:
        """Return what `put` takes, which has an `adapter`. Any thread may call it.

        Raises ConfigError where the adapter is damaged, or does not fit the model, or is not served. Raises
        Unavailable where it cannot be read now.
        """

    def put(self, read: Any) -> None:
        """Compute chunks that name it from now on."""

    def drop(self, adapter: Adapter) -> None:
        """Give it up; no chunk names it any more."""


class ModelRunner(Protocol):
    """Only the engine's thread calls its methods, except for `read_pages`."""

    @property
    def draft(self) -> DraftModel | None:
        """Return the draft model, if any.

        With one, `run` also has it compute prompt chunks, and `read_pages` reads its pool as the group behind
        the layout's last.
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
        """Return the limit on drafts in one step, over all chunks."""

    @property
    def adapters(self) -> RunnerAdapters: ...

    def run(self, chunks: Sequence[Chunk]) -> list[tuple[Sampled, ...]]:
        """Compute one step: store every chunk's KV into its pages, and choose the requested tokens.

        When it returns, the KV is in memory, where a transport may read it. Chunks of any lengths may be
        mixed. No two chunks write the same page; they may read the same ones.

        A chunk with drafts gets the choices before each of them and after the last, up to the first that
        differs from its draft: 1 to num_drafts + 1 choices, the same as without drafts. Its slot then has the
        state after start + that many tokens. The KV of wrong drafts stays in its pages, until these positions
        are written again.

        A chunk gets none of its banned ids, and with a matcher only ids that it allows; the matcher is not
        advanced. What its scoring requests is reported before it returns, unless it raises; that takes little
        memory for all chunks together.

        Returns:
            One entry per chunk, which is () where `sample` is not set.
        """

    def when_launched(self, call: Callable[[], None]) -> bool:
        """Call this in each step as soon as a device computes it, before waiting for the device.

        Where steps are launched slowly, it is called before. Return False where `run` has no such moment, and
        never calls it.
        """

    @property
    def mask_counts(self) -> MaskCounts: ...

    @property
    def steps_by_way(self) -> Mapping[str, int]:
        """Return how many steps were replayed from a graph, and how many computed anew; it is empty if there
        is only one way."""

    def copy_slots(self, moves: Sequence[tuple[int, int]]) -> None:
        """Copy states between two steps, from the first slot of each move to the second.

        When it returns they are in memory, where a transport may read and write the slots.
        """

    def read_pages(self, pages: Sequence[PageId], group: int = 0) -> Iterator[memoryview]:
        """Yield the bytes of each unit of a group's pool, copied to the host's memory where they are
        elsewhere.

        The bytes are valid until the next ones are taken, or this thread reads again. Any thread may call it.
        """

    def staging(self, slot_bytes: int) -> Staging | None:
        """Return what copies a tier's slots to and from all pools; None where the host reads them in place.

        Raises Unavailable where it lacks memory now.
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
