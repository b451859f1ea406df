"""A router learns from the outcomes of its requests. Pure.

sent --> admitted (what the ranks really had) --> finished --> ended
  |          |                                       |
  |          |                                       +--> the answer is predicted at its decode rank
  |          +--> speeds and trust are learned, the index is corrected (also about a source),
  |               and the prompt is predicted at both ranks
  +--> the prompt is predicted at the rank that will compute it

A request may also reach the end of a decode rank's pool: `length_means` tells what that is for its client.
"""

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from math import inf

from services.index.read.prefix_index import PrefixIndex
from services.kv.block_hash import extend_hash
from services.router.placement.candidates import Candidate, SourceCandidate
from services.router.placement.price import Priced
from services.router.ranks.balance import Balance
from services.router.ranks.learned import Trust
from services.values.kv import BlockHash
from services.values.rank import Plan, RankKey
from services.values.rank_reports import MAX_COMING_BLOCKS, Coming
from services.values.request import Admitted, FinishReason, Pulled

_PREDICTION_S = 5.0  # The rank's own events come within this time.


@dataclass(frozen=True, slots=True)
class _Believed:
    """This is what the index said of a rank when it was chosen, and how far it had read the rank's records
    then.

    `blocks` is the number of blocks that the rank holds; with `resuming`, the blocks before its last
    checkpoint.
    """

    rank: RankKey
    blocks: int
    resuming: bool
    progress: object


class Outcomes:
    def __init__(
        self,
        index: PrefixIndex,
        balance: Balance,
        progress: Callable[[RankKey], object],
        index_block: int,
    ) -> None:
        self.cacheless: Container[RankKey] = ()  # ranks at which nothing will be cached
        self.lending: Container[RankKey] = ()  # ranks that others may pull from
        self.telling: Container[RankKey] = ()  # ranks that report their checkpoints
        self._index = index
        self._balance = balance
        self._progress = progress
        self._block = index_block
        # These are about a request's own ranks and about its source, until it is admitted or ends.
        self._believed: dict[str, tuple[_Believed, ...]] = {}
        self._promised: dict[str, _Believed] = {}
        # By the index the tiers of who computes hold so many tokens, or others' files do.
        self._below: dict[str, tuple[int, Trust]] = {}

    def sent(
        self,
        request_id: str,
        hashes: Sequence[BlockHash],
        prompt_tokens: int,
        chosen: Priced,
        reusable_tokens: float = inf,
    ) -> None:
        decode, prefill = chosen.decode, chosen.prefill
        prefill_key = prefill.id.key if prefill is not None else None
        uncached_tokens = max(1, prompt_tokens - chosen.reused_tokens)
        holder = prefill or decode
        guessed_tokens = max(0, holder.reused_tokens - holder.indexed_reused_tokens)
        self._balance.sent(request_id, decode.id.key, prefill_key, uncached_tokens, guessed_tokens)
        # A prompt is matched when its turn to be computed comes, and by then this one is in the rank's tree.
        computing = prefill_key or decode.id.key
        self._predict(computing, hashes, _expected_s(chosen), prompt_tokens)
        ranks: tuple[Candidate, ...] = (decode,) if prefill is None else (decode, prefill)
        self._believed[request_id] = tuple(self._believe(rank, computing, reusable_tokens) for rank in ranks)
        if (source := chosen.source) is not None:
            self._promised[request_id] = self._promise(source)
        if (brought := chosen.brought) is not None:
            trust = self._balance.shared_trust if brought.shared_tokens else self._balance.tier_trust
            self._below[request_id] = int(min(brought.matched_tokens, reusable_tokens)), trust

    def coming(self, hashes: Sequence[BlockHash], prompt_tokens: int, chosen: Priced) -> Coming | None:
        """Return what other routers should predict of a prompt that is sent; None where nothing is cached."""
        rank = (chosen.prefill or chosen.decode).id
        if rank.key in self.cacheless:
            return None
        blocks = tuple(hashes[:MAX_COMING_BLOCKS])
        resumable = self._resumable(rank.key, hashes, prompt_tokens)
        return Coming(rank, blocks, _expected_s(chosen), resumable if resumable <= len(blocks) else 0)

    def admitted(
        self, request_id: str, hashes: Sequence[BlockHash], chosen: Priced, admitted: Admitted
    ) -> None:
        decode = chosen.decode.id.key
        prefill = chosen.prefill.id.key if chosen.prefill is not None else None
        self._balance.observe_pace(request_id, admitted)
        self._balance.admitted(request_id)
        self._balance.observe_admitted(decode, prefill, admitted)
        delivered, computing = {decode: admitted.decode_prefix_len}, prefill or decode
        if prefill is not None:
            delivered[prefill] = admitted.prefill_prefix_len
        # It held the others itself.
        delivered[computing] -= admitted.pulled_tokens + admitted.brought_tokens
        if (below := self._below.pop(request_id, None)) is not None:
            indexed, trust = below
            self._learn_of_tiers(trust, computing, indexed - delivered[computing], admitted.brought_tokens)
        for believed in self._believed.pop(request_id, ()):
            self._compare(believed, hashes, delivered[believed.rank])
        for rank in delivered:
            computed = admitted.prompt_tokens if rank == computing else 0
            self._predict(rank, hashes, _PREDICTION_S, computed, is_there=True)
        promised = self._promised.pop(request_id, None)
        if promised is not None and admitted.pulled is not None:
            self._learn_from(promised, computing, hashes, admitted.pulled)

    def finished(
        self, hashes: Sequence[BlockHash], chosen: Priced, all_ids: Sequence[int], seed: int
    ) -> None:
        """Note that a request ended well: its decode rank will soon report the blocks of its prompt and
        answer."""
        block, decode = self._block, chosen.decode.id.key
        longer = list(hashes)  # To hash a long prompt again would take tens of milliseconds.
        # The newest token's KV was never computed.
        for end in range((len(longer) + 1) * block, len(all_ids), block):
            parent = longer[-1] if longer else None
            longer.append(extend_hash(parent, all_ids[end - block : end], seed))
        passed_a_block = len(longer) > len(hashes) or chosen.plan is Plan.LOCAL
        computed = len(all_ids) if passed_a_block else 0
        self._predict(decode, longer, _PREDICTION_S, computed, is_there=True)

    def ended(self, request_id: str) -> None:
        self._believed.pop(request_id, None)
        self._promised.pop(request_id, None)
        self._below.pop(request_id, None)
        self._balance.ended(request_id)

    def _predict(
        self,
        rank: RankKey,
        hashes: Sequence[BlockHash],
        ttl_s: float,
        computed_tokens: int = 0,
        *,
        is_there: bool = False,
    ) -> None:
        """Predict that the rank will report the blocks; `is_there` says that it holds them already."""
        if rank not in self.cacheless:
            resumable = self._resumable(rank, hashes, computed_tokens)
            self._balance.predict(rank, hashes, ttl_s, resumable)
            if is_there and rank in self.lending:
                self._balance.there.add(rank, hashes, self._balance.clock(), ttl_s, resumable)

    def _resumable(self, rank: RankKey, hashes: Sequence[BlockHash], computed_tokens: int) -> int:
        """Return after how many of the blocks a rank has a checkpoint that computes so many tokens: the last
        one before the last token, where it reports its checkpoints."""
        tells = computed_tokens and rank in self.telling
        return min(len(hashes), (computed_tokens - 1) // self._block) if tells else 0

    def _believe(self, rank: Candidate, computing: RankKey, reusable_tokens: float) -> _Believed:
        """Return what is believed of a rank. The rank that computes does not report what it must not
        reuse."""
        key, tokens = rank.id.key, rank.matched_tokens
        if key == computing:
            tokens = int(min(tokens, reusable_tokens))
        resuming = key == computing and rank.matched_resume_tokens is not None
        if resuming:
            tokens = rank.matched_resume_tokens or 0
        return _Believed(key, tokens // self._block, resuming, self._progress(key))

    def _promise(self, source: SourceCandidate) -> _Believed:
        key = source.id.key
        return _Believed(key, source.matched_tokens // self._block, key in self.telling, self._progress(key))

    def _learn_of_tiers(self, trust: Trust, rank: RankKey, expected: int, brought_tokens: int) -> None:
        """Learn how far the index can be trusted about what lies below the rank's pool.

        It is not corrected: what was too slow to be brought up is there all the same.
        """
        tolerated = min(expected, brought_tokens + self._block)
        trust.observe(rank, expected, tolerated, self._balance.clock())

    def _learn_from(
        self, promised: _Believed, computing: RankKey, hashes: Sequence[BlockHash], pulled: Pulled
    ) -> None:
        self._balance.observe_pulled(promised.rank, computing, pulled)
        if pulled.held_tokens is not None:
            self._compare(promised, hashes, pulled.held_tokens)

    def _compare(self, believed: _Believed, hashes: Sequence[BlockHash], delivered_tokens: int) -> None:
        """Learn how far the index can be trusted, and correct it where it was wrong.

        It is not corrected if it has read records of the rank in the meantime: these report the same change,
        and they may have added the blocks that were computed for this request.
        """
        rank, balance = believed.rank, self._balance
        # The last block is never a full hit, because the prompt's last token is always computed.
        expected = min(believed.blocks, len(hashes)) * self._block
        tolerated = min(expected, delivered_tokens + self._block)
        trust = balance.resume_trust if believed.resuming else balance.trust
        trust.observe(rank, expected, tolerated, balance.clock())
        if tolerated < expected and self._progress(rank) == believed.progress:
            blocks, present_depth = hashes[: believed.blocks], delivered_tokens // self._block
            if believed.resuming:  # It has said nothing about what it holds beyond them.
                self._index.checkpoints.remove(rank, blocks[present_depth:])
            else:
                self._index.correct(rank, blocks, present_depth)


def _expected_s(chosen: Priced) -> float:
    """Return for how long it is predicted that the rank which computes a prompt will hold it."""
    return 2 * chosen.total_s + _PREDICTION_S


def length_means(
    *, num_tokens: int, output_tokens: int, max_tokens: int | None, model_tokens: int, longest_tokens: int
) -> FinishReason | None:
    """Return what it means for the client that a decode rank ended its request with LENGTH.

    It is None where another rank holds more. `num_tokens` counts the prompt and the output together,
    `longest_tokens` is the most that any rank holds, and `model_tokens` is the model's context.
    """
    if num_tokens >= model_tokens or (max_tokens is not None and output_tokens >= max_tokens):
        return FinishReason.LENGTH
    return FinishReason.CAPACITY if num_tokens >= longest_tokens else None
