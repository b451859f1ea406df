"""What one router knows of all ranks, as a table: a column for each figure, kept as it changes. Pure.

A decision takes two sides of it (sides.py), with the figures as they are now and what each rank holds of the
prompt. Decode ranks come first, then prefill ranks, so that both are reckoned with at once.

Of 4,096 tokens that the index says a rank holds (`matched`) some count (`hit`): as far as its word is
trusted, or what was sent there and is to be there soon. A rank that tells its resume points goes on computing
at one of them, though it hold more (`matched_resume`, `resume`: what the index says, and what of it counts).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

import numpy as np

from services.index.read.prefix_index import PrefixIndex
from services.router.placement import exclusion
from services.router.placement.candidates import Candidate, DecodeCandidate, PrefillCandidate, PromptToPlace
from services.router.placement.sides import Flags, Numbers, Rows, Side, lowest
from services.router.ranks.balance import Balance, Figures, Liveness
from services.router.ranks.speeds import kept_of
from services.values.rank import Plan, RankId, RankKey
from services.values.registration import Registration


class RankTable:
    """The ranks that there are now; made anew when these change."""

    def __init__(
        self,
        decodes: Sequence[Registration],
        prefills: Sequence[Registration],
        balance: Balance,
        index: PrefixIndex,
        is_connected: Callable[[RankKey], bool],
        index_block: int,
    ) -> None:
        """`index_block` in tokens."""
        self.ranks = (*decodes, *prefills)
        self._num_decodes = len(decodes)
        self.ids = [rank.id for rank in self.ranks]
        self._keys = [rank.key for rank in self.ids]
        self.rows = {key: row for row, key in enumerate(self._keys)}
        self._balance, self._index, self._is_connected = balance, index, is_connected
        self._block = index_block
        self._holds = np.array([float(rank.max_context_tokens) for rank in self.ranks])
        # A decode rank needs room for one more token.
        self._most_prompt = self._holds - np.repeat((1.0, 0.0), (len(decodes), len(prefills)))
        self._telling = np.array([rank.tells_resume_points for rank in self.ranks], np.bool_)
        self._telling_rows = np.flatnonzero(self._telling)
        self.telling = [self._keys[row] for row in self._telling_rows.tolist()]
        self.own = np.ones(len(self.ranks), np.bool_)
        self._apart: Mapping[RankKey, str] = {}
        self.receives = np.ones(len(self.ranks), np.bool_)
        self._figures = np.zeros((len(Figures._fields), len(self.ranks)))
        self.known = Figures(*self._figures)  # the same, by name
        self._unreported, self._computing = (
            set[int](),
            set[int](),
        )  # rows that do not say a rate, that compute
        self._is_out = np.zeros(len(self.ranks), np.bool_)  # whatever the request, but for what has failed
        self._columns: Rows = np.zeros(0, np.intp)
        self._column_changes = -1
        for key in self._keys:
            self.update(key)
        self._divide()

    # -- what changes -----------------------------------------------------------------------------

    def update(self, key: RankKey) -> None:
        """Something else is known of the rank, or its stream is up or down."""
        if (row := self.rows.get(key)) is not None:
            figures = self._balance.figures(key, self.ranks[row].layout.page_size)
            self._figures[:, row] = figures
            _note(self._unreported, row, figures.tokens_per_s <= 0)
            _note(self._computing, row, figures.num_behind >= 0)
            self._is_out[row] = (
                self.ranks[row].draining
                or (row < self._num_decodes and not self._is_connected(key))
                or self._balance.takes_nothing(key)
            )

    def set_apart(self, apart: Mapping[RankKey, str]) -> None:
        """Their layout is another than the one of plan remote, in what."""
        self._apart = apart
        self.receives = np.array([key not in apart for key in self._keys], np.bool_)
        self._divide()

    def set_own(self, own: frozenset[RankKey]) -> None:
        """They are this router's share."""
        self.own = np.array([key in own for key in self._keys], np.bool_)
        self._divide()

    # -- what one request sees --------------------------------------------------------------------

    def sides(self, asked: PromptToPlace, *, with_hits: bool = True) -> tuple[Side, Side]:
        """Return the decode ranks and the prefill ranks; without hits where waits alone are asked for."""
        now, known = self._balance.clock(), self.known
        rate, is_measured = self._rates(known, now)
        pending, queued = self._pending(known, rate, now)
        wait_s = pending / rate
        compute_wait_s = wait_s if is_measured is None else wait_s * is_measured
        queue_wait_s = known.queue_wait_s
        if asked.answers > 1:
            queue_wait_s = queue_wait_s + (asked.answers - 1) * known.per_request_s
        hits = self._hits(asked, now) if with_hits else _no_hits(len(self.ranks))
        seen = _Seen(self, asked, hits, pending, rate, queued, queue_wait_s, wait_s, compute_wait_s)
        decodes, prefills = self._parts
        if asked.at is not None:
            decodes = self._part(*self._rows_at(asked.at))
        if Plan.REMOTE not in asked.plans:
            prefills = self._part(len(self.ids), len(self.ids))
        is_open = self._is_open(asked)
        return seen.side(decodes, is_open, seen.decode), seen.side(prefills, is_open, seen.prefill)

    def _rows_at(self, life: RankId) -> tuple[int, int]:
        """Return where the row of this decode rank begins and ends; (0, 0): it is not there."""
        row = self.rows.get(life.key, self._num_decodes)
        return (row, row + 1) if row < self._num_decodes and self.ids[row] == life else (0, 0)

    def _part(self, first: int, stop: int) -> "_Part":
        cut, known = slice(first, stop), self.known
        rows = {key: row for row, key in enumerate(self._keys[cut])}
        receives = self.receives[cut]
        return _Part(
            cut,
            *(self.ids[cut], rows, self.own[cut], self._holds[cut], receives, bool(receives.all())),
            *(known.free_tokens[cut], known.cached_tokens[cut], known.running[cut], known.token_s[cut]),
            known.waiting_tokens[cut],
        )

    def _divide(self) -> None:
        """What of the roles' rows changes with no request is cut once."""
        num_decodes = self._num_decodes
        self._parts = self._part(0, num_decodes), self._part(num_decodes, len(self.ids))

    # -- may it be chosen -------------------------------------------------------------------------

    def _is_open(self, asked: PromptToPlace) -> Flags:
        """Return which rows exclusion.of_rank gives no reason against."""
        is_out = self._is_out | (self._most_prompt < asked.prompt_tokens)
        if self._apart:
            first = self._num_decodes if Plan.LOCAL in asked.plans else 0
            is_out[first:] |= ~self.receives[first:]
        for key in self._balance.failing:
            if (row := self.rows.get(key)) is not None and not is_out[row]:
                is_out[row] = bool(self._balance.liveness(key))
        for life in asked.tried:
            if (row := self.rows.get(life.key)) is not None and self.ids[row] == life:
                is_out[row] = True
        is_open: Flags = np.logical_not(is_out)
        return is_open

    def tokens_per_step(self, row: int) -> float:
        """That a sequence gets there; 0: not known."""
        return self._balance.load(self._keys[row]).tokens_per_step

    def exclusion(self, row: int, asked: PromptToPlace) -> str:
        """Return why the rank of this row cannot be chosen; empty: it can."""
        rank, key = self.ranks[row], self._keys[row]
        liveness, differs_in = self._balance.liveness(key), self._apart.get(key, "")
        is_connected = row >= self._num_decodes or self._is_connected(key)
        return exclusion.of_rank(rank, exclusion.Standing(liveness, is_connected, differs_in), asked)

    # -- figures ----------------------------------------------------------------------------------

    def _rates(self, known: Figures[Numbers], now: float) -> tuple[Numbers, Flags | None]:
        """Return the tokens of prompts a second, and where they were measured; None: everywhere."""
        if not self._unreported:
            return known.tokens_per_s, None
        reported, is_learned = known.tokens_per_s > 0, known.learned_tokens_per_s > 0
        usual = self._balance.usual_tokens_per_s
        kept = np.where(is_learned, kept_of(now - known.learned_s), 0.0)
        faded = usual + (known.learned_tokens_per_s - usual) * kept
        return np.where(reported, known.tokens_per_s, faded), np.logical_or(reported, is_learned)

    def _pending(self, known: Figures[Numbers], rate: Numbers, now: float) -> tuple[Numbers, Numbers]:
        """Return the tokens that pend and the requests that are queued, as Balance.now has them."""
        done = np.minimum(self._balance.chunk_tokens, (now - known.reported_s) * rate)
        pending = np.maximum(0.0, known.pending_tokens - np.floor(done, out=done)) + known.unseen_tokens
        queued = known.queued
        if self._computing:
            rows = list(self._computing)
            passed_s = now - known.oldest_sent_s[rows]
            ours = known.computing_tokens[rows] - np.floor(passed_s * rate[rows])
            is_late = ours > pending[rows]
            if np.count_nonzero(is_late):
                late, queued = np.array(rows)[is_late], queued.copy()
                pending[late] = ours[is_late]
                queued[late] = np.maximum(queued[late], known.num_behind[late])
        return pending, queued

    # -- hits -------------------------------------------------------------------------------------

    def _hits(self, asked: PromptToPlace, now: float) -> "_Hits":
        trust = self._balance.trust
        matched = self._matched(asked)
        hit = matched
        if doubted := trust.doubted():
            hit = matched.copy()
            for key in doubted:
                if (row := self.rows.get(key)) is not None:
                    hit[row] = trust.worth(key, int(matched[row]), now)
        hit = self._with_guesses(asked, hit, now)
        reused, most_reused = hit, asked.most_reused
        is_limited = asked.reusable_tokens != inf
        if is_limited:
            reused = np.minimum(hit, most_reused)
        if not self.telling:
            return _Hits(matched, hit, reused, is_limited=is_limited)
        matched_resume, resume = self._resumed(asked, matched, now)
        reused = np.where(self._telling, np.minimum(hit, resume), reused)
        return _Hits(matched, hit, reused, matched_resume, self._telling, is_limited)

    def _matched(self, asked: PromptToPlace) -> Numbers:
        """Return how much of the prompt the index says that each holds, in tokens."""
        index = self._index
        held = index.held(asked.hashes)
        if self._column_changes != index.column_changes:
            self._columns, self._column_changes = index.columns(self._keys), index.column_changes
        return held.depths_of(self._columns, self._block)

    def _with_guesses(self, asked: PromptToPlace, hit: Numbers, now: float) -> Numbers:
        """Return the hits with what was sent there and is to be there soon, where that is more."""
        guessed = self._balance.predictions.of(asked.hashes, now)
        if not guessed or not len(hit):
            return hit
        beyond, hit = guessed.beyond(lowest(hit) / self._block), hit.copy()
        for key in beyond:
            row, tokens = self.rows.get(key), guessed.depth(key) * self._block
            if row is not None and tokens > hit[row]:
                hit[row] = tokens
        return hit

    def _resumed(self, asked: PromptToPlace, matched: Numbers, now: float) -> tuple[Numbers, Numbers]:
        """Return the tokens after which those that tell can go on: by the index, and what that is worth."""
        hashes, balance, block = asked.hashes, self._balance, self._block
        furthest = asked.most_reused // block
        most = np.minimum(matched // block, furthest)[self._telling_rows].astype(int).tolist()
        found = self._index.resume_points.deepest(hashes, dict(zip(self.telling, most, strict=True)))
        guessed = balance.resume_guesses.deepest(hashes, dict.fromkeys(self.telling, furthest), now)
        by_index, worth = np.zeros(len(self.ranks)), np.zeros(len(self.ranks))
        for key, depth in found.items():
            by_index[self.rows[key]] = depth * block
            worth[self.rows[key]] = balance.resume_trust.worth(key, depth * block, now)
        for key, depth in guessed.items():
            row = self.rows[key]
            worth[row] = max(worth[row], depth * block)
        return by_index, worth


class _Part(NamedTuple):
    """What a side's first columns are, whatever is asked."""

    cut: slice  # its rows of the table
    ids: Sequence[RankId]
    rows: Mapping[RankKey, int]
    own: Flags
    holds: Numbers
    receives: Flags
    all_receive: bool
    free: Numbers
    evictable: Numbers
    running: Numbers
    token_s: Numbers
    waiting: Numbers


class _Seen(NamedTuple):
    """What one request sees of a table's rows, as figures of all of them."""

    table: RankTable
    asked: PromptToPlace
    hits: "_Hits"
    pending: Numbers
    rate: Numbers
    queued: Numbers
    queue_wait_s: Numbers
    wait_s: Numbers
    compute_wait_s: Numbers

    def side(self, part: _Part, is_open: Flags, candidate: Callable[[int, str], Candidate]) -> Side:
        """Return the side of these rows of the table."""
        cut, first, hits = part.cut, part.cut.start, self.hits
        is_open, hit, wait_s = is_open[cut], hits.hit[cut], self.wait_s[cut]
        return Side(
            part.ids,
            part.rows,
            lambda row, why: candidate(row + first, why),
            lambda row: self._why(row + first),
            part.own,
            part.holds,
            part.receives,
            part.all_receive,
            part.free,
            part.evictable,
            part.running,
            part.token_s,
            part.waiting,
            self.rate[cut],
            self.queue_wait_s[cut],
            self.queued[cut],
            is_open,
            bool(np.count_nonzero(is_open) == len(part.ids)),
            hit,
            hit if hits.reused is hits.hit else hits.reused[cut],
            wait_s,
            wait_s if self.compute_wait_s is self.wait_s else self.compute_wait_s[cut],
        )

    def decode(self, row: int, excluded: str) -> DecodeCandidate:
        table, hits = self.table, self.hits
        rank, known = table.ranks[row], table.known
        matched_resume, resume = hits.resumed(row)
        # By position: by name it takes twice as long.
        return DecodeCandidate(
            rank.address.id,
            int(hits.hit.item(row)),
            int(self.pending.item(row)),
            self.rate.item(row),
            int(known.running.item(row)),
            known.token_s.item(row),
            int(known.free_tokens.item(row)),
            int(known.cached_tokens.item(row)),
            excluded,
            int(self.queued.item(row)),
            int(hits.matched.item(row)),
            int(known.waiting_tokens.item(row)),
            table.own.item(row),
            self.queue_wait_s.item(row),
            self.compute_wait_s.item(row),
            rank.max_context_tokens,
            table.receives.item(row),
            resume,
            matched_resume,
            table.tokens_per_step(row),
        )

    def prefill(self, row: int, excluded: str) -> PrefillCandidate:
        table, hits = self.table, self.hits
        rank, known = table.ranks[row], table.known
        matched_resume, resume = hits.resumed(row)
        return PrefillCandidate(
            rank.address.id,
            int(hits.hit.item(row)),
            int(self.pending.item(row)),
            self.rate.item(row),
            int(known.free_tokens.item(row)),
            int(known.cached_tokens.item(row)),
            excluded,
            int(self.queued.item(row)),
            int(hits.matched.item(row)),
            table.own.item(row),
            self.compute_wait_s.item(row),
            rank.max_context_tokens,
            resume,
            matched_resume,
        )

    def _why(self, row: int) -> str:
        # What has failed may be let in again since.
        return self.table.exclusion(row, self.asked) or Liveness.FAILED.value


def _note(rows: set[int], row: int, is_one: bool) -> None:
    if is_one:
        rows.add(row)
    else:
        rows.discard(row)


@dataclass(frozen=True, slots=True)
class _Hits:
    """What each row holds of a prompt, in tokens."""

    matched: Numbers
    hit: Numbers
    reused: Numbers
    matched_resume: Numbers | None = None  # None: nobody tells resume points
    telling: Flags | None = None
    is_limited: bool = False  # not all that is held may be reused

    def resumed(self, row: int) -> tuple[int | None, int | None]:
        """Return matched_resume_tokens and resume_tokens of a candidate."""
        if self.matched_resume is not None and self.telling is not None and self.telling[row]:
            return int(self.matched_resume[row]), int(self.reused[row])
        return None, int(self.reused[row]) if self.is_limited else None


def _no_hits(num_ranks: int) -> _Hits:
    nothing = np.zeros(num_ranks)
    return _Hits(nothing, nothing, nothing)
