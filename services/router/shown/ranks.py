"""ListRanks and WatchCluster report the ranks so."""

from services.router.cluster import Cluster, RankStatus
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
