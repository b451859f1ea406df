"""`isthmus index` lists what every rank holds, as a router or etcd reports it."""

import asyncio
import random
from dataclasses import dataclass

from services.cli import screen
from services.cli.router_client import RanksConfig, ask_for_ranks
from services.cli.table import format_rank, format_table
from services.etcd.etcd_client import Etcd
from services.index.keys import ClusterKeys
from services.index.read.mirror import Mirror, RankView
from services.settings.flags import load
from services.values.errors import Unavailable, root_cause
from services.values.rank import RankKey
from services.wire import convert
from services.wire.isthmus.v1 import generation_pb2

_LISTING_TIMEOUT_S = 10.0
# These are shown if a rank reports where it can continue computing.
_OF_RESUMING = {"resumable", "resume trust"}
_WHEREVER_IT_HOLDS = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexConfig(RanksConfig):
    """Print the ranks of a cluster, what each holds, and its trust and load.

    They come from a router, since only routers know trust and load; with --etcd the index is read from etcd.
    """


def run(argv: list[str]) -> int:
    config = load(IndexConfig, argv, prog="isthmus index")
    if config.etcd:
        print(asyncio.run(_read_etcd(config)))
    else:
        print(format_answer(asyncio.run(ask_for_ranks(config)), screen.width()))
    return 0


async def _read_etcd(config: IndexConfig) -> str:
    async with Etcd(config.etcd_settings(), rng=random.Random()) as etcd:
        mirror = Mirror(etcd, ClusterKeys(config.cluster), None)
        following = asyncio.create_task(mirror.run())
        read = asyncio.create_task(mirror.ready.wait())
        tasks = (following, read)
        await asyncio.wait(tasks, timeout=_LISTING_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    if isinstance(outcomes[0], Exception):
        raise root_cause(outcomes[0])
    if not mirror.ready.is_set():
        raise Unavailable(f"the index could not be read: {mirror.degraded}")
    return format_ranks(mirror, screen.width())


def format_answer(answer: generation_pb2.ListRanksResponse, width: int | None = None) -> str:
    """Format the table of ranks.

    `resumable` counts blocks at whose end the rank can continue computing ("all" if it can do so anywhere).
    `behind` is the age of our knowledge of the rank. `pages` are those in use + those that are cached and can
    be evicted / all. `pending` counts prompt tokens. `KV by` names the paths by which a prefill rank has sent
    KV.
    """
    lines = [f"the index is {answer.staleness_s:.3f} s behind the ranks"]
    if answer.degraded:
        lines.append(f"degraded: {answer.degraded}")
    return "\n".join([*lines, _table([_answered(rank) for rank in answer.ranks], width)])


_LEAD = ("rank", "role", "state", "blocks")


def _table(rows: list[dict[str, object]], width: int | None) -> str:
    if not rows:
        return "no rank is registered"
    resuming = any(row["resumable"] != _WHEREVER_IT_HOLDS for row in rows)
    headings = [heading for heading in rows[0] if resuming or heading not in _OF_RESUMING]
    return format_table(headings, [[row[heading] for heading in headings] for row in rows], width, _LEAD)


def _answered(rank: generation_pb2.RankStatus) -> dict[str, object]:
    load = rank.load
    return {
        "rank": format_rank(rank.rank),
        "role": convert.role_from_proto(rank.role).value,
        "state": rank.state,
        "generation": f"{rank.rank.generation:016x}",
        "blocks": rank.index_blocks,
        "resumable": rank.resumable_blocks if rank.HasField("resumable_blocks") else _WHEREVER_IT_HOLDS,
        "epoch": rank.epoch,
        "sequence": rank.next_sequence,
        "record age": _age(rank.record_age_s, rank.current),
        "behind": f"{rank.staleness_s:.3f} s",
        "trust": f"{rank.trust:.2f}",
        "resume trust": f"{rank.resume_trust:.2f}" if rank.HasField("resume_trust") else "",
        "running": load.running,
        "waiting": load.waiting,
        "pending": rank.pending_tokens,
        "tokens/s": f"{rank.prefill_tokens_per_s:.0f}",
        "pages": f"{load.used_pages}+{load.cached_pages}/{load.total_pages}",
        "KV by": ", ".join(sorted({path.kind for path in load.kv_paths})),
        "note": _note(rank),
    }


def _note(rank: generation_pb2.RankStatus) -> str:
    gone = f"no key in etcd for {rank.unregistered_s:.0f} s" if rank.unregistered_s else ""
    return ", ".join(filter(None, (rank.excluded, gone)))


def format_ranks(mirror: Mirror, width: int | None = None) -> str:
    ranks = sorted(mirror.ranks.items(), key=lambda item: item[0])
    return _table([_mirrored(mirror, key, view) for key, view in ranks], width)


def _mirrored(mirror: Mirror, key: RankKey, view: RankView) -> dict[str, object]:
    registration, progress, index = view.registration, mirror.progress(key), mirror.index
    reports = registration.reports_checkpoints
    return {
        "rank": str(key),
        "role": registration.role.value,
        "state": view.condition,
        "generation": f"{registration.id.generation:016x}",
        "blocks": index.num_blocks(key),
        "resumable": index.checkpoints.num_blocks(key) if reports else _WHEREVER_IT_HOLDS,
        "epoch": progress.epoch,
        "sequence": progress.next_seq,
        "record age": _age(progress.age_s, progress.current),
        "pages": registration.total_pages,
        "endpoint": registration.address.endpoint,
        "model": registration.model,
    }


def _age(age_s: float, current: bool) -> str:
    return f"{age_s:.3f} s" if current else "incomplete"
