"""Drafts come from earlier text or from a small model, as the operator chooses.

The engine core asks Drafting for drafts, and finds pages for them. Earlier text is the sequence's own and, if
the operator wants it, that of others with its salt. A small model gives each sequence as many drafts as are
worth their cost; one that fails costs drafts and no request.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from services.engine.paged import sequence
from services.engine.paged.carrying import Carrying
from services.engine.paged.chunks import chunk_of, most_drafts, usable_drafts
from services.engine.paged.draft_chances import Acceptance, Candidate, StepCost, share_rounds, share_rows
from services.engine.paged.draft_sources import Guess, Guesser, OwnNgrams, Siblings, Source
from services.engine.paged.model_runner import Chunk, DraftModel, ModelRunner, Proposal
from services.engine.paged.shared_ngrams import SaltNgrams, SharedNgrams
from services.engine.paged.step_time import StepTimes
from services.kv.prefix_cache import PrefixCache


@dataclass(frozen=True, slots=True)
class Wish:
    seq: sequence.Sequence
    most: int


class Drafting(Protocol):
    """Only the engine's thread calls it. Its drafts never change what is generated."""

    def propose(
        self, wishes: Sequence[Wish], max_drafts: int, step_times: StepTimes
    ) -> Sequence[Proposal | None]:
        """Return for each wish what to verify, if anything; at most `max_drafts` ids together."""

    def note(self, seq: sequence.Sequence, proposal: Proposal, num_accepted: int) -> None:
        """Note that a step has verified it: its first `num_accepted` ids were right, and are in seq.ids."""

    def ended(self, seq: sequence.Sequence) -> None:
        """Note that a sequence needs no more drafts, whether it ever did or not. Its ids are still there."""


class RoomAhead:
    """It finds pages, and units of per-request state, for drafts; it takes only what nobody needs now."""

    def __init__(
        self, cache: PrefixCache, carrying: Carrying, runner: ModelRunner, max_context_tokens: int
    ) -> None:
        self._cache = cache
        self._carrying = carrying
        self._runner = runner
        self._page_size = runner.layout.page_size
        self._max_context_tokens = max_context_tokens

    def most_drafts(self, seq: sequence.Sequence) -> int:
        return self._carrying.most_ahead(seq, most_drafts(seq, self._max_context_tokens))

    def chunk_of(self, seq: sequence.Sequence, proposal: Proposal | None) -> Chunk:
        if proposal is None:
            self._carrying.chunk_end(seq, len(seq.ids))
            return chunk_of(seq, 1, self._page_size)
        ids = usable_drafts(seq, proposal.ids, self.most_drafts(seq), self._runner.vocab_size)
        end = len(seq.ids) + self._grow(seq, len(ids))
        ids = ids[: self._carrying.chunk_end(seq, end) - len(seq.ids)]
        seq.proposal = replace(proposal, ids=ids) if ids else None
        return chunk_of(seq, 1, self._page_size, ids)

    def give_back(self, seq: sequence.Sequence) -> None:
        """Give back pages that only wrong drafts reached: nobody is to be retracted for lack of them."""
        assert seq.pages is not None
        needed = -(-len(seq.ids) // self._page_size)
        if len(seq.pages.pages) > needed:
            self._cache.shorten(seq.pages, needed)

    def _grow(self, seq: sequence.Sequence, num_drafts: int) -> int:
        """Return how many drafts get slots; nothing cached is evicted for them, and nobody retracted."""
        assert seq.pages is not None
        missing = -(-(len(seq.ids) + num_drafts) // self._page_size) - len(seq.pages.pages)
        if (can_have := min(missing, self._cache.books().free)) > 0:
            self._cache.extend(seq.pages, can_have)
        return min(num_drafts, len(seq.pages.pages) * self._page_size - len(seq.ids))


# A step indexes at most so many ids of all sequences together, in 0.2 ms. Long prompts that come at the same
# time are indexed a little later, so that no step is held up.
_INDEXED_A_STEP = 2048
_ADDED_AT_ONCE = 256  # A running sequence adds its ids to its salt's texts in pieces of this size.
_NO_CANDIDATE = Candidate(0, 0.0)


@dataclass(frozen=True, slots=True)
class LookupSettings:
    most: int = 5  # It limits the drafts of a sequence in a step.
    shares: bool = False  # Drafts also come from other sequences of the same salt.
    shares_unsalted: bool = False  # This applies to sequences without a salt, too.
    itl_target_s: float | None = None


@dataclass(frozen=True, slots=True)
class _LookedUp:
    own: OwnNgrams
    of_salt: SaltNgrams | None  # It is None where the sequence shares with nobody.
    guesser: Guesser


class Drafter:
    def __init__(self, settings: LookupSettings, page_size: int) -> None:
        self._settings = settings
        self._page_size = page_size
        self._shared = SharedNgrams()
        self._acceptance = Acceptance()
        self._drafted: dict[sequence.Sequence, _LookedUp] = {}

    def __repr__(self) -> str:
        return f"Drafter(sequences={len(self._drafted)} {self._shared!r})"

    def propose(
        self, wishes: Sequence[Wish], max_drafts: int, step_times: StepTimes
    ) -> Sequence[Proposal | None]:
        guesses = self._guesses(wishes)
        if not any(guesses):
            return [None] * len(wishes)
        candidates = [Candidate(len(g.ids), g.chance) if g is not None else _NO_CANDIDATE for g in guesses]
        cost = step_cost(step_times, len(wishes), self._settings.itl_target_s)
        counts = share_rows(candidates, len(wishes), max_drafts, cost)
        return [
            Proposal(guess.source, guess.ids[:count]) if guess is not None and count else None
            for guess, count in zip(guesses, counts, strict=True)
        ]

    def note(self, seq: sequence.Sequence, proposal: Proposal, num_accepted: int) -> None:
        """The ids of the sequence tell as much, and more, so nothing is noted here."""

    def ended(self, seq: sequence.Sequence) -> None:
        drafted = self._drafted.pop(seq, None)
        if drafted is not None and drafted.of_salt is not None and drafted.of_salt.num_new:
            drafted.of_salt.add()

    def _guesses(self, wishes: Sequence[Wish]) -> list[Guess | None]:
        guesses, may_index = list[Guess | None](), _INDEXED_A_STEP
        for wish in wishes:
            drafted = self._drafted.get(wish.seq) or self._begin(wish.seq)
            may_index -= drafted.own.index(may_index)
            if drafted.of_salt is not None and drafted.of_salt.num_new >= _ADDED_AT_ONCE:
                drafted.of_salt.add()
            most = min(wish.most, self._settings.most)
            guesses.append(drafted.guesser.guess(most) if most > 0 else None)
        return guesses

    def _begin(self, seq: sequence.Sequence) -> _LookedUp:
        own, of_salt = OwnNgrams(seq.ids), None
        sources: list[Source] = [own]
        if self._may_share(seq):
            # The salt's texts get only the end of the prompt, which the answer continues: the others have
            # prompts of their own.
            of_salt = SaltNgrams(seq.ids, seq.request.kv_scope, self._shared, len(seq.request.prompt_ids))
            siblings = Siblings(seq.ids, self._page_size, lambda: seq.pages.node if seq.pages else None)
            sources = [own, siblings, of_salt]
        drafted = _LookedUp(own, of_salt, Guesser(seq.ids, sources, self._acceptance))
        self._drafted[seq] = drafted
        return drafted

    def _may_share(self, seq: sequence.Sequence) -> bool:
        """Return whether it may share. The speed reveals what others with the same salt have generated; all
        sequences without a salt share the empty one."""
        settings = self._settings
        return settings.shares and (bool(seq.request.cache_salt) or settings.shares_unsalted)


def step_cost(step_times: StepTimes, batch: int, target_s: float | None) -> StepCost:
    """Return the cost of a step, with a limit that leaves half of the target's spare time to prompts."""
    plain_s = step_times.decode_s(batch)
    limit_s = (plain_s + target_s) / 2 if target_s is not None else None
    return StepCost(plain_s, step_times.draft_s, limit_s)


log = logging.getLogger(__name__)

_MOST_IN_A_ROW = 5  # After so many failures in a row it is not used any more.


class DraftFailures:
    def __init__(self, what: str) -> None:
        self._what = what
        self._in_a_row = 0

    @property
    def gave_up(self) -> bool:
        return self._in_a_row >= _MOST_IN_A_ROW

    @contextmanager
    def noting(self) -> Iterator[None]:
        try:
            yield
        except Exception:
            self._in_a_row += 1
            log.exception(
                "draft_failed what=%s in_a_row=%d gave_up=%s", self._what, self._in_a_row, self.gave_up
            )
        else:
            self._in_a_row = 0


_KIND = "draft", 0
# A sequence that is not worth a draft tries one every so many steps. All try in the same step, because a
# round takes as long for one as for all; one in 32 that costs a fifth of a step is 0.6 %. After wrong drafts
# a sequence takes every second of these occasions, then every fourth, every eighth. A newcomer begins with
# every eighth where hardly any draft is right.
_TRY_EVERY = 32
_LONGEST_REST = 8
_HOPELESS = 0.1  # It is a chance of a draft.


@dataclass(slots=True)
class _Modelled:
    acceptance: Acceptance
    rest: int  # It takes one of so many occasions.


class ModelDrafter:
    def __init__(
        self, draft: DraftModel, page_size: int, most: int, itl_target_s: float | None = None
    ) -> None:
        self._draft = draft
        self._page_size = page_size
        self._most = most
        self._itl_target_s = itl_target_s
        self._acceptance = Acceptance()
        self._failures = DraftFailures("drafts")
        self._steps = 0
        self._drafted: dict[sequence.Sequence, _Modelled] = {}

    def __repr__(self) -> str:
        return f"ModelDrafter(sequences={len(self._drafted)} chance={self._acceptance.chance(_KIND):.2f})"

    def propose(
        self, wishes: Sequence[Wish], max_drafts: int, step_times: StepTimes
    ) -> Sequence[Proposal | None]:
        if not wishes:
            return []  # Nobody decodes.
        counts = self._counts(wishes, max_drafts, step_cost(step_times, len(wishes), self._itl_target_s))
        proposals: list[Proposal | None] = [None] * len(wishes)
        asked = [index for index, count in enumerate(counts) if count]
        if asked and not self._failures.gave_up:
            chunks = [chunk_of(wishes[index].seq, 1, self._page_size) for index in asked]
            with self._failures.noting():
                drafts = self._draft.propose(chunks, [counts[index] for index in asked])
                for index, ids in zip(asked, drafts, strict=True):
                    proposals[index] = Proposal(_KIND[0], ids) if ids else None
        return proposals

    def note(self, seq: sequence.Sequence, proposal: Proposal, num_accepted: int) -> None:
        drafted = self._drafted[seq]
        drafted.acceptance.note(_KIND, num_accepted, min(num_accepted + 1, len(proposal.ids)))
        drafted.rest = 1 if num_accepted else min(_LONGEST_REST, 2 * drafted.rest)

    def ended(self, seq: sequence.Sequence) -> None:
        self._drafted.pop(seq, None)

    def _counts(self, wishes: Sequence[Wish], max_drafts: int, cost: StepCost) -> list[int]:
        candidates = [
            Candidate(min(wish.most, self._most), self._of(wish.seq).acceptance.chance(_KIND))
            for wish in wishes
        ]
        counts = share_rounds(candidates, len(wishes), max_drafts, cost, self._draft.step_s)
        self._steps += 1
        occasion, steps_since = divmod(self._steps, _TRY_EVERY)
        if steps_since == 0:
            self._try_again(occasion, wishes, counts, max_drafts, cost)
        return counts

    def _try_again(
        self, occasion: int, wishes: Sequence[Wish], counts: list[int], max_drafts: int, cost: StepCost
    ) -> None:
        guessing_s = self._draft.step_s * max(1, *counts)
        for index, wish in enumerate(wishes):
            total, drafted = sum(counts), self._of(wish.seq)
            step_s = cost.plain_s + guessing_s + (total + 1) * cost.draft_s
            if counts[index] or not wish.most or total == max_drafts or not cost.allows(step_s):
                continue
            if occasion % drafted.rest == 0:
                counts[index] = 1

    def _of(self, seq: sequence.Sequence) -> _Modelled:
        if seq not in self._drafted:
            hopeless = self._acceptance.chance(_KIND) < _HOPELESS
            self._drafted[seq] = _Modelled(Acceptance(self._acceptance), _LONGEST_REST if hopeless else 1)
        return self._drafted[seq]


Mode = Literal["off", "lookup", "tree", "draft"]


@dataclass(frozen=True, slots=True)
class Speculation:
    """`lookup` continues as the sequence itself did, `tree` also as others of its salt did, `draft` as a
    small model does."""

    mode: Mode = "off"
    draft_tokens: int = 5  # It limits the drafts of a sequence in a step.
    unsalted: bool = False  # It allows `tree` for the empty salt, too.

    def drafting(self, runner: ModelRunner, itl_target_s: float | None) -> Drafting | None:
        page_size = runner.layout.page_size
        if self.mode == "off":
            return None
        if self.mode == "draft":
            assert runner.draft is not None  # EngineConfig ensures this.
            return ModelDrafter(runner.draft, page_size, self.draft_tokens, itl_target_s)
        shares = self.mode == "tree"
        return Drafter(LookupSettings(self.draft_tokens, shares, self.unsalted, itl_target_s), page_size)
