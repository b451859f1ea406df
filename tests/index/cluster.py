"""Ranks and mirrors of a test's cluster."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

from etcd.real_etcd import running, until
from services.etcd.etcd_client import Etcd
from services.index.joining import Schema
from services.index.keys import ClusterKeys
from services.index.read.mirror import Mirror
from services.index.write.membership import Membership
from services.index.write.prefix_writer import LogLimits
from services.index.write.publisher import PublisherSettings
from services.values.kv import BlockHash, CacheEvents, GroupKind, KvGroup, KvLayout
from services.values.rank import Generation, RankAddress, RankId, Role
from services.values.rank_reports import Registration

SCHEMA = Schema(index_block=64, hash_scheme="xxh3-64/1")
# Snapshots every few deltas and in several chunks, so that every path is walked.
EAGER = PublisherSettings(
    flush_s=0.001,
    max_delta_hashes=50,
    no_space_backoff_s=0.5,
    log=LogLimits(max_deltas=4, max_chunk_hashes=40),
)


def registration(worker: str = "d0", generation: int = 1, role: Role = Role.DECODE) -> Registration:
    group = KvGroup(GroupKind.FULL_ATTENTION, (0, 1), num_kv_heads=2, head_dim=16, dtype="float32")
    return Registration(
        role=role,
        address=RankAddress(RankId(worker, 0, Generation(generation)), "127.0.0.1:7000"),
        layout=KvLayout(page_size=16, page_bytes=8192, model_fingerprint=2**64 - 1, groups=(group,)),
        model="tiny",
        max_context_tokens=2048,
        total_pages=100,
        engine="fake",
        model_path="/models/tiny",
        capabilities=("abort", "local"),
        model_context_tokens=4096,
        shared_files="0123456789abcdef",
    )


class FakeRank:
    """An engine's cache events by hand, and what the tree then holds."""

    def __init__(
        self,
        etcd: Etcd,
        keys: ClusterKeys,
        its: Registration,
        ttl_s: int = 5,
        settings: PublisherSettings = EAGER,
        with_tiers: bool = False,
        shared_files: Callable[[], str] | None = None,
    ) -> None:
        self.id = its.id
        self.held: set[int] = set()
        self.resumable: set[int] = set()
        self.below: set[int] = set()
        self.files: set[int] = set()
        self._read = partial(etcd.get, keys.registration(its.id.key))
        self.membership = Membership(
            etcd,
            keys,
            SCHEMA,
            its,
            ttl_s=ttl_s,
            publisher_settings=settings,
            with_tiers=with_tiers,
            shared_files=shared_files,
        )
        self._below_events: asyncio.Queue[CacheEvents] = asyncio.Queue()
        self._events: asyncio.Queue[CacheEvents] = asyncio.Queue()

    async def lease_id(self) -> int:
        """Under which it is registered."""
        found = await self._read()
        assert found is not None
        return found.lease_id

    def store(self, *blocks: int) -> None:
        self.held |= set(blocks)
        self._events.put_nowait(CacheEvents(stored=tuple(map(BlockHash, blocks))))

    def evict(self, *blocks: int) -> None:
        """Where it can go on at one of them, no more."""
        lost = self.resumable & set(blocks)
        self.held -= set(blocks)
        self.resumable -= lost
        removed, resumable_removed = tuple(map(BlockHash, blocks)), tuple(map(BlockHash, lost))
        self._events.put_nowait(CacheEvents(removed=removed, resumable_removed=resumable_removed))

    def resume(self, *blocks: int) -> None:
        """It can go on at the end of these, which it holds, and nowhere else."""
        added, removed = set(blocks) - self.resumable, self.resumable - set(blocks)
        self.resumable = set(blocks)
        stored, gone = tuple(map(BlockHash, added)), tuple(map(BlockHash, removed))
        self._events.put_nowait(CacheEvents(resumable_stored=stored, resumable_removed=gone))

    def demote(self, blocks: set[int], files: set[int]) -> None:
        """Let its tiers hold these, and files these of them."""
        old, self.below, self.files = (self.below, self.files), blocks, files
        told = (blocks - old[0], old[0] - blocks, files - old[1], old[1] - files)
        stored, removed, *moved = (tuple(map(BlockHash, each)) for each in told)
        self._below_events.put_nowait(
            CacheEvents(stored, removed, files_stored=moved[0], files_removed=moved[1])
        )

    def clear(self) -> None:
        self.held.clear()
        self.resumable.clear()
        self._events.put_nowait(CacheEvents(cleared=True))

    async def events(self) -> AsyncIterator[CacheEvents]:
        while True:
            yield await self._events.get()

    async def below_events(self) -> AsyncIterator[CacheEvents]:
        while True:
            yield await self._below_events.get()

    async def run(self) -> None:
        await self.membership.run(self.events(), self.below_events())

    def is_mirrored_below(self, mirror: Mirror) -> bool:
        key, index = self.id.key, mirror.below.index
        in_files = {block for block in self.below if index.held_below([block]).in_files(key, 0, 1)}
        return (
            index.num_blocks(key) == len(self.below)
            and all(index.match(key, [block]) for block in self.below)
            and in_files == self.files
        )

    def is_mirrored_by(self, mirror: Mirror) -> bool:
        key, points = self.id.key, mirror.index.checkpoints
        return (
            mirror.index.generation(key) == self.id.generation
            and mirror.index.num_blocks(key) == len(self.held)
            and all(mirror.index.match(key, [block]) for block in self.held)
            and points.num_blocks(key) == len(self.resumable)
            and all(points.deepest([block], {key: 1}) for block in self.resumable)
        )


@asynccontextmanager
async def mirroring(
    etcd: Etcd,
    keys: ClusterKeys,
    router: str = "r0",
    observe: Callable[[float], None] = lambda staleness_s: None,
) -> AsyncIterator[Mirror]:
    mirror = Mirror(etcd, keys, router, probe_interval_s=0.05, observe_staleness=observe)
    async with running(mirror.run()):
        await until(mirror.ready.is_set)
        yield mirror
