import pytest

from etcd.real_etcd import client, running, until
from services.etcd.etcd_client import Etcd, TxnResult
from services.etcd.etcd_errors import EtcdNoSpace
from services.index.keys import ClusterKeys, pin_name
from services.index.pins import KnownPin, Pin, PinSettings, PinWriter, decode_pin, encode_pin
from services.values.errors import ProtocolError, Unavailable
from services.values.rank import Generation, RankId

D0, D1 = (RankId(worker, 0, Generation(2**64 - 1)) for worker in ("d0", "d1"))
SETTINGS = PinSettings(gather_s=0.001, life_s=100.0, max_queued=250, max_backoff_s=0.05)


def unknown(name: str) -> KnownPin | None:
    """A mirror that has seen nothing."""


def test_pins_survive_the_wire_or_are_named(subtests: pytest.Subtests) -> None:
    for pin in [Pin(D0), Pin(D0, D1)]:
        with subtests.test(pin=pin):
            assert decode_pin(encode_pin(pin)) == pin
    with subtests.test("torn pins are named"):
        for value in (b"", b"\xff"):
            with pytest.raises(ProtocolError):
                decode_pin(value)


async def test_pins_are_written_under_one_lease_in_few_transactions(
    etcd: Etcd, keys: ClusterKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = PinWriter(etcd, keys, unknown, SETTINGS)
    sizes: list[int] = []
    txn = etcd.txn

    async def count(compares, success, failure=(), *, idempotent=False) -> TxnResult:
        sizes.append(len(success))
        return await txn(compares, success, failure, idempotent=idempotent)

    monkeypatch.setattr(etcd, "txn", count)
    conversations = [f"Gespräch/{number} \n" for number in range(230)]
    for conversation in conversations:
        writer.pin(conversation, D0, D1)
    async with running(writer.run()):
        await until(lambda: writer.written == 230)
    assert sizes == [100, 100, 30]
    _, kvs = await etcd.snapshot(keys.prefix)
    assert {kv.key for kv in kvs} == {keys.pin(pin_name(conversation)) for conversation in conversations}
    assert len({kv.lease_id for kv in kvs}) == 1 and kvs[0].lease_id != 0
    assert {decode_pin(kv.value) for kv in kvs} == {Pin(D0, D1)}


async def test_only_what_changed_or_is_half_expired_is_written(etcd: Etcd, keys: ClusterKeys) -> None:
    now = 1000.0
    etcd.clock = lambda: now
    known: dict[str, KnownPin] = {}
    writer = PinWriter(etcd, keys, known.get, SETTINGS)

    async def written_after(decode: RankId) -> int:
        writer.pin("c", decode)
        writer.pin("c", decode)
        while writer._queue:
            await writer.write_some()
        _, kvs = await etcd.snapshot(keys.prefix)
        known.update({pin_name("c"): KnownPin(decode_pin(kv.value), kv.mod_revision) for kv in kvs})
        return writer.written

    assert await written_after(D0) == 1
    assert await written_after(D0) == 1
    assert await written_after(D1) == 2
    writer.pin("c", D0)
    assert await written_after(D1) == 2  # there and back again
    now += 49
    assert await written_after(D1) == 2
    now += 1
    assert await written_after(D1) == 3


async def test_a_conversation_that_another_router_moved_is_moved_back(etcd: Etcd, keys: ClusterKeys) -> None:
    now = 1000.0
    etcd.clock = lambda: now
    known: dict[str, KnownPin] = {}
    ours, other = (PinWriter(etcd, keys, known.get, SETTINGS) for _ in range(2))

    async def write(writer: PinWriter, decode: RankId) -> None:
        writer.pin("c", decode)
        while writer._queue:
            await writer.write_some()

    async def come_back() -> Pin:
        _, (kv,) = await etcd.snapshot(keys.prefix)
        known[pin_name("c")] = KnownPin(decode_pin(kv.value), kv.mod_revision)
        return known[pin_name("c")].pin

    await write(ours, D0)
    assert await come_back() == Pin(D0)
    await write(other, D1)
    assert ours.recent("c") == Pin(D0)  # it cannot know yet
    assert await come_back() == Pin(D1)
    assert ours.recent("c") is None
    now += SETTINGS.recent_s
    await write(ours, D0)
    assert await come_back() == Pin(D0)
    now += SETTINGS.recent_s
    known.clear()  # etcd has lost everything
    ours.pin("c", D0)
    assert ours.recent("c") == Pin(D0) and len(ours._queue) == 1


async def test_of_two_pins_of_one_conversation_the_later_stands(etcd: Etcd, keys: ClusterKeys) -> None:
    known: dict[str, KnownPin] = {}
    ours, other = (PinWriter(etcd, keys, known.get, SETTINGS) for _ in range(2))
    for writer, decode in ((ours, D0), (other, D1)):
        writer.pin("c", decode)
        await writer.write_some()
    _, (kv,) = await etcd.snapshot(keys.prefix)
    assert decode_pin(kv.value) == Pin(D1)
    known[pin_name("c")] = KnownPin(Pin(D1), kv.mod_revision)
    assert (ours.recent("c"), other.recent("c")) == (None, Pin(D1))
    ours.pin("c", D0)  # what it wrote last is not what etcd has
    assert len(ours._queue) == 1


async def test_a_lost_lease_is_replaced(etcd: Etcd, keys: ClusterKeys) -> None:
    writer = PinWriter(etcd, keys, unknown, SETTINGS)
    async with running(writer.run()):
        writer.pin("a", D0)
        await until(lambda: writer.written == 1)
        await etcd.revoke_lease(writer._lease._lease_id)
        writer.pin("b", D0)
        await until(lambda: writer.written == 2)


async def test_the_queue_is_bounded_while_etcd_is_away(caplog: pytest.LogCaptureFixture) -> None:
    async with client("127.0.0.1:1", timeout_s=0.1) as nowhere:
        writer = PinWriter(nowhere, ClusterKeys("c"), unknown, SETTINGS)
        async with running(writer.run()) as (task,):
            for number in range(300):
                writer.pin(f"{number}", D0)
            assert (len(writer._queue), writer.dropped) == (250, 50)
            await until(lambda: caplog.text.count("pins_write_failed queued=250") >= 2)
            writer.pin("300", D0)
            assert (len(writer._queue), writer.dropped) == (250, 51)
            assert not task.done()


async def test_when_etcd_is_full_pins_are_given_up(
    etcd: Etcd, keys: ClusterKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = PinWriter(etcd, keys, unknown, SETTINGS)
    txn, failures = etcd.txn, [EtcdNoSpace("full"), Unavailable("away")]

    async def fail_first(*arguments: object, **options: object) -> TxnResult:
        if failures:
            raise failures.pop(0)
        return await txn(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(etcd, "txn", fail_first)
    async with running(writer.run()):
        writer.pin("a", D0)
        await until(lambda: writer.dropped == 1)
        writer.pin("b", D0)
        await until(lambda: writer.written == 1)
    _, kvs = await etcd.snapshot(keys.prefix)
    assert [kv.key for kv in kvs] == [keys.pin(pin_name("b"))]
