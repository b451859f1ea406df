"""A peer that tells SGLang's prefill the wrong tale: refused with the reason, and the rank goes on.

SGLang itself believes every ticket. One that is wrong would have it write over other requests' KV, and one
that it cannot read would end the thread that serves all peers.
"""

import asyncio
import secrets
import time
from contextlib import asynccontextmanager

import pytest

from engine.sglang.frames import registration
from engine.sglang.random_ids import random_ids
from engine.sglang.real_cluster import ERROR_WITHIN_S, PAGE
from services.decode.prefill_leg import PrefillChannels, PrefillLeg
from services.engine.sglang.directory import look_up
from services.engine.sglang.inside import frames
from services.net import channels, grpc_errors
from services.transfer.hello import Hello
from services.values.errors import IsthmusError, PeerFailed
from services.values.kv import PageId, PageRun, PoolMemory
from services.values.rank import Generation, RankId, Rendezvous, Role, TransferId
from services.values.request import GenerationRequest, SamplingParams
from services.wire import convert
from services.wire.isthmus.v1 import handshake_pb2, handshake_pb2_grpc

pytestmark = pytest.mark.asyncio(loop_scope="session")

NUM_PAGES = 513
PROMPT_LEN = 5 * PAGE + 3
FORGED = RankId("forged", 0, Generation(7))


class ForgedDecode:
    """A decode rank that exists only on the wire: the memory it names is nobody's."""

    def __init__(self, prefill):
        self.prefill = prefill
        self.transfer_id = TransferId(secrets.randbits(60) + 1)

    def hello(self, **opaque):
        memory, agent_metadata, _ = frames.memory_of_registration(registration(f17=b"DRAM,DRAM,DRAM,DRAM"))
        memory.agent_name = f"forged-{self.transfer_id:x}"
        memory.opaque.update({int(index[1:]): frame for index, frame in opaque.items()})
        pool = PoolMemory(0, NUM_PAGES)
        own = Hello(FORGED, self.prefill.layout, pool, "sglang-nixl", agent_metadata)
        message = own.message(time.monotonic())
        message.hello.engine_memory.CopyFrom(memory)
        return message

    def ticket(self, prefix_len=PAGE, num_pages=5, **fields):
        """As it should be after one page of hit; the caller changes what is to be wrong."""
        values = {
            "room": self.transfer_id,
            "prefill_generation": self.prefill.id.generation,
            "prompt_len": PROMPT_LEN,
            "decode_prefix_len": prefix_len,
            "runs": convert.runs_to_proto([PageRun(PageId(7), num_pages)]),
            "tickets_of_room": 1,
            "aux_slot": 0,
        }
        values |= fields
        ticket = {name: value for name, value in values.items() if value is not None}
        return handshake_pb2.HandshakeMessage(ticket=handshake_pb2.KvTicket(**ticket))

    async def prefill_leg(self):
        request = GenerationRequest(
            f"forged-{self.transfer_id:x}",
            tuple(random_ids(PROMPT_LEN, "forged")),
            SamplingParams(temperature=0, max_tokens=4),
        )
        channels = PrefillChannels(None)
        try:
            leg = PrefillLeg(channels, self.prefill.address, None, "")
            return await leg(request, Rendezvous(self.transfer_id, FORGED, self.prefill.id))
        finally:
            await channels.close()

    @asynccontextmanager
    async def stream(self, hello):
        """The Handshake of SGLang's own process, greeted."""
        (endpoint,) = (await look_up(self.prefill.address.endpoint, None)).endpoints.values()
        async with channels.open_channel(endpoint) as channel:
            call = handshake_pb2_grpc.HandshakeStub(channel).Connect()
            await call.write(hello)
            with grpc_errors.renaming():
                assert (await call.read()).WhichOneof("message") == "hello"
            yield call

    async def last_word(self, call):
        async with asyncio.timeout(ERROR_WITHIN_S):
            while True:
                message = await call.read()
                if message.status.state != handshake_pb2.Status.STATE_ACCEPTED:
                    assert message.status.room == self.transfer_id
                    return message.status


@pytest.fixture
async def forged(cluster):
    return ForgedDecode(await cluster.registration(Role.PREFILL))


async def check_goes_on(cluster):
    """No page stays with a request, and the next one is served."""
    await cluster.until_idle()
    tokens, _ = await cluster.generate(random_ids(40, "after a wrong ticket"), 5)
    assert len(tokens) == 5


WRONG = {
    "a prefix inside a page": ({"prefix_len": PAGE + 1}, "REFUSED"),
    "a prefix beyond the prompt": ({"prefix_len": 6 * PAGE, "runs": []}, "REFUSED"),
    "pages for another prefix": ({"prefix_len": 2 * PAGE}, "REFUSED"),
    "pages outside of the pool": ({"runs": convert.runs_to_proto([PageRun(PageId(511), 5)])}, "REFUSED"),
    "another life of the rank": ({"prefill_generation": 1}, "REFUSED"),
    "what SGLang cannot read": ({"aux_slot": None}, "REFUSED"),
    "another prompt": ({"num_pages": 6, "prompt_len": PROMPT_LEN + PAGE}, "FAILED"),
    "memory that is nobody's": ({}, "FAILED"),
}


# What is refused before SGLang sees it tests/engine/sglang/inside/streams shows of every case; here is one of
# each kind, and the others are slow.
USUAL = {
    ("pages for another prefix", "request"),
    ("what SGLang cannot read", "ticket"),
    ("another prompt", "ticket"),
    ("memory that is nobody's", "request"),
    ("pages outside of the pool", "ticket"),
    ("another life of the rank", "ticket"),
}
ORDERS = [
    pytest.param(case, first, marks=[] if (case, first) in USUAL else pytest.mark.slow)
    for case in WRONG
    for first in ("request", "ticket")
]


@pytest.mark.parametrize(("case", "first"), ORDERS)
async def test_a_wrong_ticket_fails_its_request_with_the_reason(cluster, forged, case, first):
    changed, state = WRONG[case]
    async with forged.stream(forged.hello()) as call:
        if first == "ticket":
            await call.write(forged.ticket(**changed))
        if first == "ticket" and state == "REFUSED":
            status = await forged.last_word(call)
        leg = asyncio.create_task(forged.prefill_leg())
        if first == "request":
            await cluster.until_waiting(Role.PREFILL)
            await call.write(forged.ticket(**changed))
        began = time.monotonic()
        with pytest.raises(PeerFailed) as failed:
            async with asyncio.timeout(ERROR_WITHIN_S):
                await leg
        print(f"{case}, {first} first: failed after {time.monotonic() - began:.2f} s")
        if first == "request" or state == "FAILED":
            status = await forged.last_word(call)
    assert status.state == handshake_pb2.Status.State.Value(f"STATE_{state}") and status.reason
    assert status.reason in str(failed.value)
    await check_goes_on(cluster)


async def test_a_hello_that_sglang_cannot_read_is_refused(cluster, forged):
    for opaque in ({"f13": b"\x01"}, {"f21": b"two"}, {"f99": b""}):
        with pytest.raises(IsthmusError):
            async with forged.stream(forged.hello(**opaque)):
                pass
    await check_goes_on(cluster)


async def test_a_decode_rank_that_ends_in_the_middle_frees_the_prefill_rank(cluster, forged):
    async with forged.stream(forged.hello()) as call:
        leg = asyncio.create_task(forged.prefill_leg())
        await call.write(forged.ticket())
        assert (await call.read()).status.state == handshake_pb2.Status.STATE_ACCEPTED
    with pytest.raises(PeerFailed):
        async with asyncio.timeout(ERROR_WITHIN_S):
            await leg
    await check_goes_on(cluster)
