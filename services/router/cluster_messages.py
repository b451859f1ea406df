"""These messages of the API report what a router knows of ranks and prices.

ListRanks and WatchCluster report the ranks. Explain and WatchCluster report the candidates of a request, with
prices.
"""

import math

from services.index.read.mirror import RankView
from services.router.cluster import Cluster, RankStatus
from services.router.placement.candidates import Candidate, DecodeCandidate
from services.router.placement.decision import Decision, Nowhere
from services.router.placement.price import Priced
from services.values.rank import RankKey
from services.wire import convert
from services.wire.isthmus.v1 import generation_pb2


def ranks_of(cluster: Cluster) -> generation_pb2.ListRanksResponse:
    return generation_pb2.ListRanksResponse(
        ranks=map(_rank_status, cluster.status()),
        staleness_s=cluster.staleness_s,
        degraded=cluster.degraded or "",
    )


def _rank_status(status: RankStatus) -> generation_pb2.RankStatus:
    registration, progress = status.view.registration, status.progress
    return generation_pb2.RankStatus(
        rank=convert.rank_id_to_proto(registration.id),
        role=convert.role_to_proto(registration.role),
        state=status.view.condition,
        endpoint=registration.address.endpoint,
        model=registration.model,
        index_blocks=status.num_blocks,
        epoch=progress.epoch,
        next_sequence=progress.next_seq,
        record_age_s=progress.age_s,
        current=progress.current,
        trust=status.trust,
        load=convert.load_to_proto(status.now.load),
        pending_tokens=status.now.pending_tokens,
        prefill_tokens_per_s=status.now.tokens_per_s,
        excluded=status.excluded,
        unregistered_s=status.unregistered_s,
        staleness_s=status.staleness_s,
        resumable_blocks=status.num_resumable,
        resume_trust=None if status.num_resumable is None else status.resume_trust,
    )


def unserved_rank(view: RankView) -> generation_pb2.RankStatus:
    """Return the status of a rank whose model the router does not serve, so that it knows no more of it."""
    registration = view.registration
    return generation_pb2.RankStatus(
        rank=convert.rank_id_to_proto(registration.id),
        role=convert.role_to_proto(registration.role),
        state=view.condition,
        endpoint=registration.address.endpoint,
        model=registration.model,
        excluded=f"model {registration.model!r} is not served: not in --models, or it cannot be opened",
    )


def all_candidates(decision: Decision | Nowhere, pinned: RankKey | None) -> list[generation_pb2.Candidate]:
    """Return the candidates, the cheapest first, then those without a price; `pinned` is a rank."""
    if isinstance(decision, Nowhere):
        return [_unpriced(rank, pinned) for rank in decision.candidates]
    return _candidates(decision, decision.ranked, pinned)


def few_candidates(decision: Decision, pinned: RankKey | None, most: int) -> list[generation_pb2.Candidate]:
    """Return the cheapest `most` in the same order, always with the chosen one."""
    ranked = decision.ranked
    cheapest = ranked[:most]
    if decision.chosen not in cheapest:
        cheapest = (*ranked[: most - 1], decision.chosen)
    return _candidates(decision, cheapest, pinned)[:most]


def _candidates(
    decision: Decision, ranked: tuple[Priced, ...], pinned: RankKey | None
) -> list[generation_pb2.Candidate]:
    priced = [_priced(each, each is decision.chosen, pinned) for each in ranked]
    return priced + [_unpriced(rank, pinned) for rank in decision.excluded]


def _priced(priced: Priced, chosen: bool, pinned: RankKey | None) -> generation_pb2.Candidate:
    decode, prefill, source = priced.decode, priced.prefill, priced.source
    return generation_pb2.Candidate(
        decode=convert.rank_id_to_proto(decode.id),
        prefill=None if prefill is None else convert.rank_id_to_proto(prefill.id),
        plan=convert.plan_to_proto(priced.plan),
        decode_hit_tokens=decode.hit_tokens,
        prefill_hit_tokens=0 if prefill is None else prefill.hit_tokens,
        decode_indexed_tokens=decode.matched_tokens,
        prefill_indexed_tokens=0 if prefill is None else prefill.matched_tokens,
        decode_context_tokens=_context_tokens(decode),
        prefill_context_tokens=0 if prefill is None else _context_tokens(prefill),
        decode_resume_tokens=decode.resume_tokens,
        decode_indexed_resume_tokens=decode.matched_resume_tokens,
        decode_tokens_per_step=decode.tokens_per_step,
        prefill_resume_tokens=None if prefill is None else prefill.resume_tokens,
        prefill_indexed_resume_tokens=None if prefill is None else prefill.matched_resume_tokens,
        terms=[generation_pb2.CostTerm(name=name, seconds=seconds) for name, seconds in priced.terms],
        total_s=priced.total_s,
        pinned=pinned == decode.id.key,
        chosen=chosen,
        source=None if source is None else convert.rank_id_to_proto(source.id),
        source_tokens=0 if source is None else source.tokens,
        brought_tokens=0 if priced.brought is None else priced.brought.tokens,
    )


def _unpriced(rank: Candidate, pinned: RankKey | None) -> generation_pb2.Candidate:
    rank_id = convert.rank_id_to_proto(rank.id)
    if isinstance(rank, DecodeCandidate):
        return generation_pb2.Candidate(
            decode=rank_id,
            decode_hit_tokens=rank.hit_tokens,
            decode_indexed_tokens=rank.matched_tokens,
            decode_context_tokens=_context_tokens(rank),
            decode_resume_tokens=rank.resume_tokens,
            decode_indexed_resume_tokens=rank.matched_resume_tokens,
            decode_tokens_per_step=rank.tokens_per_step,
            pinned=pinned == rank.id.key,
            excluded=rank.excluded,
        )
    return generation_pb2.Candidate(
        prefill=rank_id,
        prefill_hit_tokens=rank.hit_tokens,
        prefill_indexed_tokens=rank.matched_tokens,
        prefill_context_tokens=_context_tokens(rank),
        prefill_resume_tokens=rank.resume_tokens,
        prefill_indexed_resume_tokens=rank.matched_resume_tokens,
        excluded=rank.excluded,
    )


def _context_tokens(rank: Candidate) -> int:
    return int(rank.holds_tokens) if rank.holds_tokens < math.inf else 0
