"""A router learns from what becomes of its requests. Pure.

sent --> admitted (what the ranks really had) --> finished --> ended
  |          |                                       |
  |          |                                       +--> the answer predicted where it was made
  |          +--> speeds and trust learned, index corrected, also of a source; prompt predicted at both ranks
  +--> prompt predicted where it will be computed

A request may also come to the end of a decode rank's pool: `length_means` says what that is for its client.
"""

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from math import inf

from services.index.read.prefix_index import PrefixIndex
from services.kv.block_hash import extend_hash
from services.router.placement.candidates import Candidate, SourceCandidate
from services.router.placement.price import Priced
from services.router.ranks.balance import Balance
from services.values.kv import BlockHash
from services.values.rank import Plan, RankKey
from services.values.request import Admitted, FinishReason, Pulled

_PREDICTION_S = 5.0  # by then the rank's own events have come


@dataclass(frozen=True, slots=True)
class _Believed:
    """The index said this of a rank when it was chosen, and had read so far in the rank's records.

    `blocks` are those that it holds; with `resuming` those up to where it goes on computing.
    """

    rank: RankKey
    blocks: int
    resuming: bool
    progress: object


class Outcomes:
    """One router's requests report here what became of them."""

    def __init__(
        self,
        index: PrefixIndex,
        balance: Balance,
        progress: Callable[[RankKey], object],
        index_block: int,
    ) -> None:
        """`progress` is the placer's; an index block has `index_block` tokens."""
        self.cacheless: Container[RankKey] = ()  # ranks at which nothing will be cached
        self.lending: Container[RankKey] = ()  # ranks that others may pull from
        self.telling: Container[RankKey] = ()  # ranks that tell their resume points
        self._index = index
        self._balance = balance
        self._progress = progress
        self._block = index_block
        # Of a request's own ranks and of its source, until it is admitted or ends.
        self._believed: dict[str, tuple[_Believed, ...]] = {}
        self._promised: dict[str, _Believed] = {}

    def sent(
        self,
        request_id: str,
        hashes: Sequence[BlockHash],
        prompt_tokens: int,
        chosen: Priced,
        reusable_tokens: float = inf,
    ) -> None:
        """The request went out; see Asked.reusable_tokens."""
        decode, prefill = chosen.decode, chosen.prefill
        prefill_key = prefill.id.key if prefill is not None else None
        uncached_tokens = max(1, prompt_tokens - chosen.reused_tokens)
        self._balance.sent(request_id, decode.id.key, prefill_key, uncached_tokens)
        # Prompts are matched when their turn to be computed comes: by then this one is in the tree.
        computing, ttl_s = prefill_key or decode.id.key, 2 * chosen.total_s + _PREDICTION_S
        self._predict(computing, hashes, ttl_s, prompt_tokens)
        ranks: tuple[Candidate, ...] = (decode,) if prefill is None else (decode, prefill)
        self._believed[request_id] = tuple(self._believe(rank, computing, reusable_tokens) for rank in ranks)
        if (source := chosen.source) is not None:
            self._promised[request_id] = self._promise(source)

    def admitted(
        self, request_id: str, hashes: Sequence[BlockHash], chosen: Priced, admitted: Admitted
    ) -> None:
        """Learn from the decode rank what it and the prefill rank really had."""
        decode = chosen.decode.id.key
        prefill = chosen.prefill.id.key if chosen.prefill is not None else None
        self._balance.admitted(request_id)
        self._balance.observe_admitted(decode, prefill, admitted)
        delivered, computing = {decode: admitted.decode_prefix_len}, prefill or decode
        if prefill is not None:
            delivered[prefill] = admitted.prefill_prefix_len
        delivered[computing] -= admitted.pulled_tokens  # it had the others itself
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
        """Note that a request ended well: its decode rank will soon report prompt and answer."""
        block, decode = self._block, chosen.decode.id.key
        longer = list(hashes)  # of the prompt; a long one takes tens of milliseconds to hash again
        # The newest token's KV was never computed.
        for end in range((len(longer) + 1) * block, len(all_ids), block):
            parent = longer[-1] if longer else None
            longer.append(extend_hash(parent, all_ids[end - block : end], seed))
        passed_a_block = len(longer) > len(hashes) or chosen.plan is Plan.LOCAL
        computed = len(all_ids) if passed_a_block else 0
        self._predict(decode, longer, _PREDICTION_S, computed, is_there=True)

    def ended(self, request_id: str) -> None:
        """Note that it is in flight no more, however it ended."""
        self._believed.pop(request_id, None)
        self._promised.pop(request_id, None)
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
        """Predict that the rank will tell the blocks, which are there perhaps already. Where it computes so
        many tokens and tells its checkpoints, it has one at the last block boundary before the last token."""
        if rank not in self.cacheless:
            tells = computed_tokens and rank in self.telling
            resumable = min(len(hashes), (computed_tokens - 1) // self._block) if tells else 0
            self._balance.predict(rank, hashes, ttl_s, resumable)
            if is_there and rank in self.lending:
                self._balance.there.add(rank, hashes, self._balance.clock(), ttl_s, resumable)

    def _believe(self, rank: Candidate, computing: RankKey, reusable_tokens: float) -> _Believed:
        """Return what is believed of a rank. Who computes does not report what it must not reuse."""
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

    def _learn_from(
        self, promised: _Believed, computing: RankKey, hashes: Sequence[BlockHash], pulled: Pulled
    ) -> None:
        """Learn from what came of the source; of what it holds, where it has said that."""
        self._balance.observe_pulled(promised.rank, computing, pulled)
        if pulled.held_tokens is not None:
            self._compare(promised, hashes, pulled.held_tokens)

    def _compare(self, believed: _Believed, hashes: Sequence[BlockHash], delivered_tokens: int) -> None:
        """Learn how far the index can be trusted, and correct it where it was wrong.

        Should it have taken in records of the rank meanwhile, they told it themselves; and those blocks,
        computed for this request, may be among what they added.
        """
        rank, balance = believed.rank, self._balance
        # The last block is never all a hit: the prompt's last token is computed in any case.
        expected = min(believed.blocks, len(hashes)) * self._block
        tolerated = min(expected, delivered_tokens + self._block)
        trust = balance.resume_trust if believed.resuming else balance.trust
        trust.observe(rank, expected, tolerated, balance.clock())
        if tolerated < expected and self._progress(rank) == believed.progress:
            blocks, present_depth = hashes[: believed.blocks], delivered_tokens // self._block
            if believed.resuming:  # of what it holds beyond it said nothing
                self._index.resume_points.remove(rank, blocks[present_depth:])
            else:
                self._index.correct(rank, blocks, present_depth)


def length_means(
    *, num_tokens: int, output_tokens: int, max_tokens: int | None, model_tokens: int, longest_tokens: int
) -> FinishReason | None:
    """Return what it is for the client that a decode rank ended its request with LENGTH.

    It is None where another rank holds more. `num_tokens` are the prompt's and the output's together,
    `longest_tokens` what the roomiest rank holds, `model_tokens` the model's context.
    """
    if num_tokens >= model_tokens or (max_tokens is not None and output_tokens >= max_tokens):
        return FinishReason.LENGTH
    return FinishReason.CAPACITY if num_tokens >= longest_tokens else None
