"""Drafts come from what was said before: by the sequence itself and, if wanted, by others of its salt."""

from collections.abc import Sequence
from dataclasses import dataclass

from services.engine.paged import sequence
from services.engine.paged.drafts.acceptance import Acceptance
from services.engine.paged.drafts.drafting import Wish
from services.engine.paged.drafts.guesser import Guess, Guesser
from services.engine.paged.drafts.proposal import Proposal
from services.engine.paged.drafts.row_shares import Candidate, StepCost, share_rows
from services.engine.paged.drafts.sources.ngram_chains import OwnNgrams
from services.engine.paged.drafts.sources.shared_ngrams import SaltNgrams, SharedNgrams
from services.engine.paged.drafts.sources.siblings import Siblings
from services.engine.paged.drafts.sources.source import Source
from services.engine.paged.queue.step_time import StepTimes

# A step takes in so many ids of all sequences together: prompts that come at once, long ones, are known a
# little later rather than hold a step up. It takes 0.2 ms.
_INDEXED_A_STEP = 2048
_ADDED_AT_ONCE = 256  # So many ids of a running sequence are added to its salt's at once.
_NO_CANDIDATE = Candidate(0, 0.0)


@dataclass(frozen=True, slots=True)
class LookupSettings:
    most: int = 5  # A sequence has so many drafts in a step at most.
    shares: bool = False  # Drafts come also from others of the same salt.
    shares_unsalted: bool = False  # They do so where the salt is empty, too.
    itl_target_s: float | None = None


@dataclass(frozen=True, slots=True)
class _Drafted:
    own: OwnNgrams
    of_salt: SaltNgrams | None  # It is None where the sequence shares with nobody.
    guesser: Guesser


class Drafter:
    """It implements Drafting."""

    def __init__(self, settings: LookupSettings, page_size: int) -> None:
        self._settings = settings
        self._page_size = page_size
        self._shared = SharedNgrams()
        self._acceptance = Acceptance()
        self._drafted: dict[sequence.Sequence, _Drafted] = {}

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
        """The ids that the sequence goes on with tell as much, and more."""

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

    def _begin(self, seq: sequence.Sequence) -> _Drafted:
        own, of_salt = OwnNgrams(seq.ids), None
        sources: list[Source] = [own]
        if self._may_share(seq):
            # The others learn of the prompt only what the answer goes on from: they have what they are asked.
            of_salt = SaltNgrams(seq.ids, seq.request.cache_salt, self._shared, len(seq.request.prompt_ids))
            siblings = Siblings(seq.ids, self._page_size, lambda: seq.pages.node if seq.pages else None)
            sources = [own, siblings, of_salt]
        drafted = _Drafted(own, of_salt, Guesser(seq.ids, sources, self._acceptance))
        self._drafted[seq] = drafted
        return drafted

    def _may_share(self, seq: sequence.Sequence) -> bool:
        """Return whether it may share: speed tells what others of the salt have said, who without a salt are
        all."""
        settings = self._settings
        return settings.shares and (bool(seq.request.cache_salt) or settings.shares_unsalted)


def step_cost(step_times: StepTimes, batch: int, target_s: float | None) -> StepCost:
    """Leave drafts half at most of what the target leaves: the rest is for prompts."""
    plain_s = step_times.decode_s(batch)
    limit_s = (plain_s + target_s) / 2 if target_s is not None else None
    return StepCost(plain_s, step_times.draft_s, limit_s)
