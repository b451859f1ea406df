import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from etcd.deletions import delete
from etcd.real_etcd import FAST, client, running, until
from etcd.silent_member import SilentMember
from services.etcd.connection import EtcdStream
from services.etcd.embedded import EmbeddedEtcd
from services.etcd.etcd_client import Etcd, delete_range_op, put_op
from services.etcd.etcd_errors import EtcdTooLarge
from services.etcd.watch import PrefixWatch, WatchBatch
from services.index.keys import ClusterKeys
from services.values.errors import Unavailable


class Follower:
    """A dict that does what the batches say."""

    def __init__(self, etcd: Etcd, prefix: bytes, idle_timeout_s: float = 10.0) -> None:
        self.watch = PrefixWatch(etcd, prefix, idle_timeout_s=idle_timeout_s)
        self.prefix = prefix
        self.state: dict[bytes, bytes] = {}
        self.batches: list[WatchBatch] = []

    async def follow(self) -> None:
        async for batch in self.watch.batches():
            self.batches.append(batch)
            for change in batch.changes:
                name = change.key.removeprefix(self.prefix)
                if change.value is None:
                    assert name in self.state
                    del self.state[name]
                else:
                    self.state[name] = change.value


@asynccontextmanager
async def following(etcd: Etcd, prefix: bytes, **options: float) -> AsyncIterator[Follower]:
    follower = Follower(etcd, prefix, **options)
    async with running(follower.follow()):
        await until(lambda: follower.watch.trouble is None)
        yield follower


async def test_what_was_there_then_what_changes(etcd: Etcd, keys: ClusterKeys) -> None:
    await etcd.put(keys.prefix + b"old", b"1")
    async with following(etcd, keys.prefix) as follower:
        assert follower.batches[0].listed and follower.state == {b"old": b"1"}
        await etcd.put(keys.prefix + b"new", b"2")
        await delete(etcd, keys.prefix + b"old")
        await until(lambda: follower.state == {b"new": b"2"})
        assert follower.watch.listings == 1


async def test_one_revision_is_one_batch_even_in_fragments(etcd: Etcd, keys: ClusterKeys) -> None:
    async with following(etcd, keys.prefix) as follower:
        for name in b"abcd":
            await etcd.put(keys.prefix + bytes([name]), bytes(700_000))
        await until(lambda: len(follower.state) == 4)
        # 70 deletions and one put in one transaction; and, after it, more than one fragment's worth.
        puts = [put_op(keys.prefix + b"x%d" % number, bytes(10_000)) for number in range(70)]
        result = await etcd.txn([], [*puts, delete_range_op(keys.prefix + b"a", keys.prefix + b"b")])
        await until(lambda: follower.watch.revision >= result.revision)
        (batch,) = [batch for batch in follower.batches if batch.revision == result.revision]
        assert len([change for change in batch.changes if change.mod_revision == result.revision]) == 71


async def test_a_slow_reader_gets_fragments_joined(etcd: Etcd, keys: ClusterKeys) -> None:
    start = await etcd.current_revision()
    for _ in range(3):
        await etcd.txn([], [put_op(keys.prefix + b"%d" % number, bytes(300_000)) for number in range(4)])
    watch = PrefixWatch(etcd, keys.prefix)
    watch.revision, watch._must_list = start, False  # as after a reconnect: 3.6 MB to catch up on
    batches: list[list[int]] = []
    async for batch in watch.batches():
        batches.append([change.mod_revision - start for change in batch.changes])
        if sum(map(len, batches)) >= 12:
            break
    assert [revision for batch in batches for revision in batch] == [1] * 4 + [2] * 4 + [3] * 4
    assert all(batch.count(revision) == 4 for batch in batches for revision in batch)


async def test_after_a_crash_it_goes_on_where_it_was(own_server: EmbeddedEtcd) -> None:
    async with client(own_server.endpoint) as etcd, following(etcd, b"p/") as follower:
        await etcd.put(b"p/a", b"1")
        await until(lambda: follower.state == {b"a": b"1"})
        await own_server.kill()
        await until(lambda: follower.watch.trouble is not None)
        await own_server.start()
        await delete(etcd, b"p/a")
        await etcd.put(b"p/b", b"2")
        await until(lambda: follower.state == {b"b": b"2"} and follower.watch.trouble is None)
        assert follower.watch.listings == 1


async def test_compacted_while_away_the_difference_comes(own_server: EmbeddedEtcd) -> None:
    async with client(own_server.endpoint) as etcd, client(own_server.endpoint) as writer:
        watch = PrefixWatch(etcd, b"p/")
        batches = watch.batches()
        for name in (b"p/kept", b"p/gone"):
            await writer.put(name, b"1")
        assert len((await anext(batches)).changes) == 2
        assert (await anext(batches)).complete
        # The generator stands still, so it is disconnected for as long as this takes.
        await delete(writer, b"p/gone")
        await writer.put(b"p/passing", b"")
        await delete(writer, b"p/passing")
        await writer.put(b"p/new", b"2")
        await writer.compact(await writer.current_revision())
        news, gone = await anext(batches), await anext(batches)
        assert (news.listed, news.complete, gone.complete, news.rewound) == (True, False, True, False)
        assert [(change.key, change.value) for change in news.changes] == [(b"p/new", b"2")]
        assert [(change.key, change.value) for change in gone.changes] == [(b"p/gone", None)]
        assert watch.listings == 2
        await batches.aclose()


async def test_keys_that_are_not_remembered_come_anew_with_each_listing(
    own_server: EmbeddedEtcd,
) -> None:
    async with client(own_server.endpoint) as etcd, client(own_server.endpoint) as writer:
        watch = PrefixWatch(etcd, b"p/", unremembered=b"p/many/")
        batches = watch.batches()
        for name in (b"p/kept", b"p/many/1", b"p/many/2"):
            await writer.put(name, b"1")
        assert len((await anext(batches)).changes) == 3
        assert (await anext(batches)).complete
        await writer.put(b"p/many/3", b"1")
        assert [change.key for change in (await anext(batches)).changes] == [b"p/many/3"]
        # The generator stands still: its stream breaks, and it does not open the next one.
        await own_server.kill()
        await own_server.start()
        await delete(writer, b"p/many/1")
        await writer.put(b"p/kept", b"2")
        await writer.compact(await writer.current_revision())
        news, gone = await anext(batches), await anext(batches)
        assert [change.key for change in news.changes] == [b"p/kept", b"p/many/2", b"p/many/3"]
        assert (gone.complete, gone.changes, watch.listings) == (True, (), 2)
        assert watch._delivered.keys() == {b"p/kept"}
        await batches.aclose()


async def test_the_first_prefix_is_listed_first_and_all_at_one_revision(
    etcd: Etcd, keys: ClusterKeys
) -> None:
    names = [b"a/%d" % number for number in range(150)] + [b"m/1", b"m/2", b"z/1"]
    for name in names:
        await etcd.put(keys.prefix + name, b"")
    batches = PrefixWatch(etcd, keys.prefix, first=keys.prefix + b"m/").batches()
    listed = [await anext(batches)]
    while not listed[-1].complete:
        listed.append(await anext(batches))
    await batches.aclose()
    order = [change.key.removeprefix(keys.prefix) for batch in listed for change in batch.changes]
    assert sorted(order) == sorted(names) and order[:2] == [b"m/1", b"m/2"]
    assert [batch.first for batch in listed] == [True] + [False] * (len(listed) - 1)
    assert len(listed) > 4 and len({batch.revision for batch in listed}) == 1


async def test_a_listing_that_breaks_off_is_made_up_for(
    etcd: Etcd, keys: ClusterKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(300):
        await etcd.put(keys.prefix + b"%03d" % number, b"1")
    unary, pages = etcd.connection.unary, []

    async def break_off(method, request, **options):
        if method.name == "Range":
            pages.append(request.key)
            if len(pages) == 2:
                await delete(etcd, keys.prefix + b"000")
                raise Unavailable("broken off")
        return await unary(method, request, **options)

    monkeypatch.setattr(etcd.connection, "unary", break_off)
    async with following(etcd, keys.prefix) as follower:
        assert set(follower.state) == {b"%03d" % number for number in range(1, 300)}
        # What the first attempt delivered did not come again.
        assert sum(len(batch.changes) for batch in follower.batches) == 300 + 1


async def test_a_page_that_is_too_large_is_asked_for_in_parts(
    etcd: Etcd, keys: ClusterKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(10):
        await etcd.put(keys.prefix + b"%d" % number, b"1")
    unary = etcd.connection.unary

    async def refuse_large(method, request, **options):
        if request.limit > 8:
            raise EtcdTooLarge("Received message larger than max")
        return await unary(method, request, **options)

    monkeypatch.setattr(etcd.connection, "unary", refuse_large)
    _, kvs = await etcd.snapshot(keys.prefix, page_keys=120)
    assert len(kvs) == 10


async def test_an_etcd_that_lost_its_memory_is_read_from_the_beginning(tmp_path: Path) -> None:
    async with EmbeddedEtcd(tmp_path / "first", extra_arguments=FAST) as server:
        port = int(server.endpoint.rpartition(":")[2])
        async with client(server.endpoint) as etcd, following(etcd, b"p/") as follower:
            for _ in range(20):
                await etcd.put(b"p/a", b"1")
            await etcd.put(b"p/b", b"1")
            await until(lambda: len(follower.state) == 2)
            await server.kill()
            async with EmbeddedEtcd(tmp_path / "second", client_port=port, extra_arguments=FAST):
                await etcd.put(b"p/a", b"2")
                await until(lambda: follower.state == {b"a": b"2"})
                assert any(batch.rewound for batch in follower.batches)
                await etcd.put(b"p/c", b"3")
                await until(lambda: follower.state == {b"a": b"2", b"c": b"3"})


async def follow_to_another(folder: Path, value: bytes, leased: bool) -> None:
    async with (
        EmbeddedEtcd(folder / "other", extra_arguments=FAST) as server,
        client(server.endpoint) as etcd,
    ):
        await etcd.put(b"p/a", value, (await etcd.grant_lease(60))[0] if leased else 0)
        await etcd.put(b"p/b", b"1")
    async with EmbeddedEtcd(folder / "one", extra_arguments=FAST) as server:
        port = int(server.endpoint.rpartition(":")[2])
        async with client(server.endpoint) as etcd, following(etcd, b"p/") as follower:
            await etcd.put(b"p/a", b"1")
            await until(lambda: follower.state == {b"a": b"1"})
            await server.kill()
            async with EmbeddedEtcd(folder / "other", client_port=port, extra_arguments=FAST):
                await until(lambda: follower.watch.listings == 2)
                assert any(batch.rewound for batch in follower.batches)
                await until(lambda: follower.state == {b"a": value, b"b": b"1"})


async def test_another_etcd_that_wrote_the_same_key_at_the_same_revision_is_another(
    tmp_path: Path, subtests: pytest.Subtests
) -> None:
    """Under a lease it may even be the same value: a rank registers with the same words."""
    for value, leased in [(b"2", False), (b"1", True)]:
        with subtests.test(value=value):
            await follow_to_another(tmp_path / value.decode(), value, leased)


async def stay_quiet(etcd: Etcd, prefix: bytes, monkeypatch: pytest.MonkeyPatch, answers: bool) -> None:
    opened, progress = [], []
    write = EtcdStream.write

    async def spy(self: EtcdStream, request: object) -> None:
        is_progress = request.WhichOneof("request_union") == "progress_request"  # type: ignore[attr-defined]
        (progress if is_progress else opened).append(request)
        if answers or not is_progress:
            await write(self, request)

    monkeypatch.setattr(EtcdStream, "write", spy)
    idle_timeout_s = 1.0 if answers else 0.1  # a busy etcd answers after a tenth of a second, too
    async with following(etcd, prefix, idle_timeout_s=idle_timeout_s) as follower:
        await until(lambda: len(progress) >= 3)
        assert len(opened) == 1 if answers else len(opened) > 1
        assert follower.watch.trouble is None
        await etcd.put(prefix + b"a", b"1")
        await until(lambda: follower.state == {b"a": b"1"})
        assert follower.watch.listings == 1


async def test_a_quiet_watch_is_no_trouble(
    etcd: Etcd, keys: ClusterKeys, monkeypatch: pytest.MonkeyPatch, subtests: pytest.Subtests
) -> None:
    for answers in (True, False):
        with subtests.test(answers=answers), monkeypatch.context() as patching:
            await stay_quiet(etcd, keys.prefix + str(answers).encode(), patching, answers)


async def test_a_member_that_falls_silent_is_left_by_the_watch(
    etcd: Etcd, etcd_endpoint: str, keys: ClusterKeys
) -> None:
    async with (
        SilentMember(etcd_endpoint) as member,
        client(member.endpoint, etcd_endpoint) as reader,
    ):
        reader.connection._current = 0
        async with following(reader, keys.prefix, idle_timeout_s=0.5) as follower:
            await member.fall_silent()
            await etcd.put(keys.prefix + b"a", b"1")
            await until(lambda: follower.state == {b"a": b"1"})
            assert follower.watch.listings == 1


async def test_what_compaction_took_from_a_quiet_etcd_is_listed_once(
    etcd: Etcd, keys: ClusterKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the newest key was written nothing can be read any more: that may be another past, or not."""
    opened = []
    write = EtcdStream.write

    async def spy(self: EtcdStream, request: object) -> None:
        if request.WhichOneof("request_union") != "progress_request":  # type: ignore[attr-defined]
            opened.append(request)
            await write(self, request)

    monkeypatch.setattr(EtcdStream, "write", spy)
    async with following(etcd, keys.prefix, idle_timeout_s=0.1) as follower:
        await etcd.put(keys.prefix + b"a", b"1")
        await until(lambda: follower.state == {b"a": b"1"})
        await etcd.put(b"elsewhere", b"")
        await etcd.put(b"elsewhere", b"")
        await etcd.compact(await etcd.current_revision())
        await until(lambda: follower.watch.listings == 2)
        assert any(batch.rewound for batch in follower.batches)
        before = len(opened)
        await until(lambda: len(opened) >= before + 4)
        assert follower.watch.listings == 2 and follower.watch.trouble is None
        await etcd.put(keys.prefix + b"a", b"2")
        await until(lambda: follower.state == {b"a": b"2"})


async def test_closing_the_stream_leaves_nothing_behind(etcd: Etcd, keys: ClusterKeys) -> None:
    before = asyncio.all_tasks()
    async with following(etcd, keys.prefix):
        pass
    await until(lambda: asyncio.all_tasks() <= before)
