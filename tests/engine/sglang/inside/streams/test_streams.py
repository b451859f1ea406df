"""Both ends of SGLang's Handshake over real gRPC; SGLang itself is two lists of frames."""

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial

from engine.sglang.frames import metadata, registration
from services.engine.sglang.inside import frames
from services.engine.sglang.inside.frames import ReturnAddress
from services.engine.sglang.inside.handshake_streams import DecodeStreams, PrefillStreams
from services.net import channels, servers
from services.transfer.hello import Hello
from services.values.errors import ProtocolError
from services.values.kv import DraftKv, GroupKind, KvGroup, KvLayout, PoolMemory
from services.values.rank import Generation, RankId
from services.wire.isthmus.v1 import handshake_pb2, handshake_pb2_grpc

PAGE = 16
LAYOUT = KvLayout(page_size=PAGE, page_bytes=4096, model_fingerprint=7)
NUM_PAGES, NUM_SLOTS = 513, 8
FULL = KvGroup(GroupKind.FULL_ATTENTION, (0,), 2, 16, "float32")
STATE = KvGroup(GroupKind.RECURRENT, (1,), 0, 0, "float32", unit_bytes=7000)
HYBRID = replace(LAYOUT, groups=(FULL, STATE))
DRAFT = DraftKv(9, KvGroup(GroupKind.FULL_ATTENTION, (0,), 1, 32, "float32", unit_bytes=640))
DRAFTING = replace(LAYOUT, draft=DRAFT)
OTHER_DRAFT = replace(LAYOUT, draft=replace(DRAFT, model_fingerprint=8))


async def until(condition, timeout_s=5.0):
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


class Prefill:
    """One prefill process: `delivered` is what SGLang's thread would read."""

    def __init__(self, generation=5, writer_rank=0, layout=LAYOUT, tp_rank=0, unreadable=()):
        rank, pools = RankId("p", 0, Generation(generation)), [PoolMemory(0, 99)] * len(layout.unit_bytes)
        own = Hello.of(rank, layout, pools, "sglang-nixl", b"")
        self.delivered, self.refused = [], []

        def own_message():
            message = own.message(0.0)
            message.hello.writer_rank, message.hello.tp_rank = writer_rank, tp_rank
            return message

        def deliver(parts):
            if parts[1] in unreadable:
                raise ProtocolError("SGLang cannot read it")
            self.delivered.append(parts)

        self.streams = PrefillStreams(own, own_message, deliver, lambda *word: self.refused.append(word))

    @asynccontextmanager
    async def listening(self, port=0):
        add = partial(handshake_pb2_grpc.add_HandshakeServicer_to_server, self.streams)
        server = await servers.open_server(f"127.0.0.1:{port}", add, [])
        try:
            yield f"127.0.0.1:{server.port}"
        finally:
            await server.stop()

    def say(self, parts, number=1):
        self.streams.send(ReturnAddress("isthmus", number).endpoint, frames.message_of_prefill(parts))


class Decode:
    """One decode process."""

    def __init__(self, layout=LAYOUT, rank=0):
        memory, agent_metadata, _ = frames.memory_of_registration(registration())
        pages, slots = PoolMemory(0, NUM_PAGES), PoolMemory(0, NUM_SLOTS)
        pools = [pages, *[slots] * len(layout.carried), pages]
        own = Hello.of(RankId("d", rank, Generation(3)), layout, pools, "sglang-nixl", agent_metadata)
        self.delivered, self.lost = [], []

        def own_message():
            message = own.message(0.0)
            message.hello.engine_memory.CopyFrom(memory)
            return message

        self.streams = DecodeStreams(
            own,
            own_message,
            channels.open_channel,
            self.delivered.append,
            lambda *word: self.lost.append(word),
        )

    def send(self, endpoint, parts, prompt_len=0):
        self.streams.send(endpoint, frames.message_of_decode(parts, prompt_len))


def ticket(transfer_id=9, pages=(4, 5, 6), prefix=2 * PAGE, prompt_len=5 * PAGE, **fields):
    return metadata(transfer_id, pages, prefix=prefix, **fields), prompt_len


async def test_transfers_from_ticket_to_last_word(subtests):
    with subtests.test("a transfer from ticket to last word"):
        prefill, decode = Prefill(writer_rank=2), Decode()
        async with prefill.listening() as endpoint:
            decode.send(endpoint, *ticket())
            await until(lambda: len(prefill.delivered) == 2)
            register, ticketed = prefill.delivered
            assert register[:2] == [b"NixlMsgGuard", b"None"]  # SGLang must know the peer before its ticket
            assert ticketed[1:4] == [b"9", b"isthmus", b"1"]
            assert ticketed[9] == b"32"
            prefill.say([b"KV_STATUS", b"9", b"4", b"2", b""])
            await until(lambda: decode.delivered)
            assert decode.delivered == [[b"KV_STATUS", b"9", b"4", b"2", b""]]
            assert not decode.lost and not prefill.refused
    with subtests.test("a full hit is a ticket without pages"):
        prefill, decode = Prefill(), Decode()
        async with prefill.listening() as endpoint:
            decode.send(endpoint, *ticket(pages=(), prefix=5 * PAGE))
            await until(lambda: len(prefill.delivered) == 2)
            assert prefill.delivered[1][5] == b"" and prefill.delivered[1][10] == b"0"
    with subtests.test("an abort is acknowledged with its generation"):
        prefill, decode = Prefill(writer_rank=1), Decode()
        async with prefill.listening() as endpoint:
            decode.send(endpoint, *ticket())
            decode.send(endpoint, [b"ABORT", b"9", b"10.0.0.1", b"41234", b"12"])
            await until(lambda: len(prefill.delivered) == 3)
            assert prefill.delivered[2] == [b"ABORT", b"9", b"isthmus", b"1", b"12"]
            prefill.say([b"ABORT_ACK", b"9", b"1", b"12"])
            await until(lambda: decode.delivered)
            assert decode.delivered == [[b"ABORT_ACK", b"9", b"1", b"12"]]


async def test_where_a_state_goes_is_checked(subtests):
    for slots, said in [([5], None), ([], "targets of the groups"), ([NUM_SLOTS], "outside")]:
        with subtests.test(slots=slots, said=said):
            prefill, decode = Prefill(layout=HYBRID), Decode(layout=HYBRID)
            parts, prompt_len = ticket()
            message = frames.message_of_decode(parts, prompt_len)
            runs = [handshake_pb2.PageRun(first_page=slot, num_pages=1) for slot in slots]
            if runs:
                message.ticket.targets.add(group=1, start_token=prompt_len, runs=runs)
            async with prefill.listening() as endpoint:
                decode.streams.send(endpoint, message)
                await until(lambda prefill=prefill: len(prefill.delivered) == 2 or prefill.refused)
                assert bool(prefill.refused) == (said is not None)
                assert said is None or said in prefill.refused[0][1]


async def test_words_stay_in_order_and_none_waits():
    prefill, decode = Prefill(), Decode()
    async with prefill.listening() as endpoint:
        for transfer_id in range(1, 101):  # before there is a stream
            decode.send(endpoint, *ticket(transfer_id))
            decode.send(endpoint, [b"ABORT", str(transfer_id).encode(), b"x", b"1", b"7"])
        await until(lambda: len(prefill.delivered) == 201)
        transfers = [parts[1] for parts in prefill.delivered[1:]]
        assert transfers == [str(transfer_id).encode() for transfer_id in range(1, 101) for _ in range(2)]


async def test_what_is_refused_never_reaches_sglang(subtests):
    for name, wrong in zip(
        ["unaligned", "short", "few", "twice", "outside", "beyond", "none", "dummy-beyond"],
        [
            ticket(prefix=2 * PAGE + 1),
            ticket(prefix=PAGE),
            ticket(pages=(4, 5)),
            ticket(pages=(4, 5, 4)),
            ticket(pages=(4, 5, NUM_PAGES)),
            ticket(prefix=6 * PAGE, pages=()),
            ticket(pages=()),
            ticket(prefix=6 * PAGE, pages=(), dummy=b"1"),
        ],
        strict=True,
    ):
        with subtests.test(name):
            prefill, decode = Prefill(), Decode()
            async with prefill.listening() as endpoint:
                decode.send(endpoint, *wrong)
                await until(lambda decode=decode: decode.delivered)
                (status,) = decode.delivered
                assert status[:3] == [b"KV_STATUS", b"9", b"0"] and status[4]
                assert prefill.refused == [(9, status[4].decode())]
                assert len(prefill.delivered) == 1  # the registration
                decode.send(endpoint, *ticket(10))  # and the stream goes on
                await until(lambda prefill=prefill: len(prefill.delivered) == 2)
    with subtests.test("what sglang cannot read is refused and the stream goes on"):
        prefill, decode = Prefill(unreadable=[b"9"]), Decode()
        async with prefill.listening() as endpoint:
            decode.send(endpoint, *ticket(9))
            decode.send(endpoint, *ticket(10))
            await until(lambda: decode.delivered and len(prefill.delivered) == 2)
            assert [parts[:3] for parts in decode.delivered] == [[b"KV_STATUS", b"9", b"0"]]
            assert prefill.refused == [(9, "SGLang cannot read it")]
            assert prefill.delivered[1][1] == b"10"
        mute = Prefill(unreadable=[frames.REGISTRATION])
        async with mute.listening() as endpoint:
            decode.send(endpoint, *ticket())
            await until(lambda: any("SGLang cannot read it" in reason for _, reason in decode.lost))
            assert not mute.delivered and not mute.streams._streams
    with subtests.test("a ticket for another life is refused"):
        # The generation in a ticket is that of the Hello it follows; a stale one can only be forged.
        prefill, decode = Prefill(generation=5), Decode()
        async with prefill.listening() as endpoint, channels.open_channel(endpoint) as channel:
            call = handshake_pb2_grpc.HandshakeStub(channel).Connect()
            await call.write(decode.streams._own_message())
            await call.read()
            parts, prompt_len = ticket()
            message = frames.message_of_decode(parts, prompt_len)
            message.ticket.prefill_generation = 4
            await call.write(message)
            status = (await call.read()).status
            assert status.state == handshake_pb2.Status.STATE_REFUSED
            assert "generation" in status.reason
            assert len(prefill.delivered) == 1


async def test_layouts_pair_or_end_the_stream_with_the_reason(subtests):
    with subtests.test("layouts that differ end the stream with the reason"):
        prefill, decode = Prefill(), Decode(layout=KvLayout(PAGE, 8192, 7))
        async with prefill.listening() as endpoint:
            decode.send(endpoint, *ticket())
            await until(lambda: decode.lost)
            assert decode.lost[0][0] == endpoint and "page_bytes" in decode.lost[0][1]
            assert not prefill.delivered
    with subtests.test("a wider prefill whose processes share heads is refused"):
        one_head = (KvGroup(GroupKind.FULL_ATTENTION, (0,), 1, 8, "float32"),)
        wide, narrow = (KvLayout(PAGE, 4096, 7, tp_size, one_head) for tp_size in (2, 1))
        prefill, decode = Prefill(layout=wide), Decode(layout=narrow)
        async with prefill.listening() as endpoint:
            decode.send(endpoint, *ticket())
            await until(lambda: decode.lost)
            assert "1 KV heads over 2 processes" in decode.lost[0][1]
            assert not prefill.delivered
    for name, of_prefill in zip(["decode alone", "both"], [LAYOUT, DRAFTING], strict=True):
        with subtests.test(name):
            prefill, decode = Prefill(layout=of_prefill), Decode(layout=DRAFTING)
            async with prefill.listening() as endpoint:
                decode.send(endpoint, *ticket())
                await until(lambda prefill=prefill: len(prefill.delivered) == 2)
    # SGLang sends what prefill has, by position.
    for of_decode, reason in [
        (LAYOUT, "prefill speculates and decode does not"),
        (OTHER_DRAFT, "with different drafts"),
    ]:
        with subtests.test(of_decode=of_decode, reason=reason):
            prefill, decode = Prefill(layout=DRAFTING), Decode(layout=of_decode)
            async with prefill.listening() as endpoint:
                decode.send(endpoint, *ticket())
                await until(lambda decode=decode: decode.lost)
            assert reason in decode.lost[0][1] and not prefill.delivered


async def test_a_prefill_process_that_is_not_there_is_told(subtests):
    with subtests.test("nobody there is told"):
        decode = Decode()
        decode.send("127.0.0.1:9", *ticket())
        await until(lambda: decode.lost, timeout_s=10)
    with subtests.test("a prefill process that ends is noticed and found again"):
        prefill, decode = Prefill(generation=5), Decode()
        async with prefill.listening() as endpoint:
            decode.send(endpoint, *ticket())
            await until(lambda: len(prefill.delivered) == 2)
        await until(lambda: decode.lost)
        next_life = Prefill(generation=6)
        port = int(endpoint.rpartition(":")[2])
        async with next_life.listening(port) as same:
            decode.send(same, *ticket(10))
            await until(lambda: len(next_life.delivered) == 2)
            assert not next_life.refused  # the ticket was meant for the life that answered


async def test_a_decode_process_that_ends_has_its_open_transfers_aborted():
    prefill, decode = Prefill(), Decode()
    async with prefill.listening() as endpoint:
        for transfer_id in (9, 10):
            decode.send(endpoint, *ticket(transfer_id))
        await until(lambda: len(prefill.delivered) == 3)
        prefill.say([b"KV_STATUS", b"9", b"4", b"0", b""])
        await until(lambda: decode.delivered)
        for task in list(decode.streams._tasks):
            task.cancel()
        await until(lambda: len(prefill.delivered) == 4)
        assert prefill.delivered[3] == [b"ABORT", b"10", b"isthmus", b"1"]  # nobody waits for an ack
        prefill.say([b"KV_STATUS", b"10", b"0", b"0", b"aborted"])  # to a stream that is gone: no error


async def test_tensor_parallel_pairs(subtests):
    """Which processes speak, and how many tickets and last words a transfer takes, by SGLang's own mapping.

    Delta, then a full hit: with a wider prefill, upstream once waited for ever on empty chunks.
    """
    for prefill_tp, decode_tp in [(1, 1), (2, 1), (1, 2)]:
        with subtests.test(prefill_tp=prefill_tp, decode_tp=decode_tp):
            prefills = [Prefill(writer_rank=rank, tp_rank=rank) for rank in range(prefill_tp)]
            decodes = [Decode(rank=0) for _ in range(decode_tp)]
            async with prefills[0].listening() as first, prefills[-1].listening() as last:
                endpoints = [first, last][:prefill_tp]
                for transfer_id, kwargs in ((9, {}), (10, {"pages": (), "prefix": 5 * PAGE})):
                    for rank, decode in enumerate(decodes):
                        targets = endpoints if prefill_tp > 1 else [endpoints[rank * prefill_tp // decode_tp]]
                        for endpoint in targets:
                            decode.send(
                                endpoint,
                                *ticket(transfer_id, required=max(1, decode_tp // prefill_tp), **kwargs),
                            )
                for prefill in prefills:
                    await until(
                        lambda prefill=prefill, decode_tp=decode_tp: len(prefill.delivered) == decode_tp * 3
                    )
                    transfers = [parts for parts in prefill.delivered if parts[1] != b"None"]
                    assert {parts[7] for parts in transfers} == {
                        str(max(1, decode_tp // prefill_tp)).encode()
                    }
                    for parts in transfers:
                        prefill.say([b"KV_STATUS", parts[1], b"4", b"0", b""], number=int(parts[3]))
                for decode in decodes:
                    await until(
                        lambda decode=decode, prefill_tp=prefill_tp: len(decode.delivered) == 2 * prefill_tp
                    )
                    writers = {parts[3] for parts in decode.delivered if parts[1] == b"10"}
                    assert len(writers) == prefill_tp  # SGLang counts distinct writers until it has them all
