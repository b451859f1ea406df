"""Hello, and the bytes of the handshake: a change of either breaks ranks of different versions."""

from dataclasses import replace
from pathlib import Path

import pytest

from services.transfer.hello import Hello, check_hello, read_hello
from services.values.errors import ProtocolError
from services.values.kv import (
    DraftKv,
    GroupKind,
    GroupTarget,
    KvGroup,
    KvLayout,
    KvTicket,
    PageRun,
    PoolMemory,
    PullGrant,
    PullRequest,
)
from services.values.rank import Generation, RankId, TransferId
from services.wire import convert
from services.wire.isthmus.v1 import handshake_pb2 as pb

GOLDEN = Path(__file__).parent / "golden"
LAYOUT = KvLayout(
    64, 1 << 20, 0x1122334455667788, 2, (KvGroup(GroupKind.FULL_ATTENTION, (0, 1), 8, 128, "bfloat16"),)
)
GROUPS = (
    *LAYOUT.groups,
    KvGroup(GroupKind.SLIDING_WINDOW, (2, 3), 4, 128, "bfloat16", window=1024, unit_bytes=1 << 19),
    KvGroup(GroupKind.RECURRENT, (4, 5), 0, 0, "bfloat16", unit_bytes=65_011_712),
)
HELLO = Hello(
    RankId("decode-a", 3, Generation(0xFFEEDDCCBBAA9988)),
    LAYOUT,
    PoolMemory(0x7F0000001000, 4096, "VRAM", 1),
    "nixl",
    b"\x00agent\xff",
)
HYBRID_HELLO = replace(
    HELLO,
    layout=replace(LAYOUT, groups=GROUPS),
    carried_memory=(PoolMemory(0x7F1000000000, 512, "VRAM", 1), PoolMemory(0x7F2000000000, 40, "VRAM", 1)),
)
DRAFT_GROUP = KvGroup(GroupKind.FULL_ATTENTION, (0,), 2, 64, "float16", unit_bytes=1 << 14)
DRAFT_HELLO = replace(
    HYBRID_HELLO,
    layout=replace(HYBRID_HELLO.layout, draft=DraftKv(0x8877665544332211, DRAFT_GROUP)),
    draft_memory=PoolMemory(0x7F3000000000, 4096, "VRAM", 1),
)
TICKET = KvTicket(
    transfer_id=TransferId(0x0123456789ABCDEF),
    prefill_generation=Generation(0xFFEEDDCCBBAA9988),
    prompt_len=300,
    decode_prefix_len=128,
    runs=(PageRun(7, 2), PageRun(4000, 1)),
    write_until_s=1234.5,
    aux_slot=0,
)
MESSAGES = {
    "hello": HELLO.message(1000.25),
    "hello_of_a_hybrid": HYBRID_HELLO.message(1000.25),
    "hello_with_a_draft": DRAFT_HELLO.message(1000.25),
    "ticket_of_a_hybrid": pb.HandshakeMessage(
        ticket=convert.ticket_to_proto(
            replace(
                TICKET,
                targets=(GroupTarget(1, 192, (PageRun(9, 2),)), GroupTarget(2, 300, (PageRun(5, 1),))),
            )
        )
    ),
    "ticket": pb.HandshakeMessage(ticket=convert.ticket_to_proto(TICKET)),
    "status": pb.HandshakeMessage(
        status=pb.Status(
            room=TICKET.transfer_id,
            state=pb.Status.STATE_FAILED,
            reason="the write lease is over",
            bytes_moved=3 << 20,
            hit=pb.HIT_KIND_PARTIAL,
            descriptors=2,
        )
    ),
    "ticket_with_digests": pb.HandshakeMessage(
        ticket=convert.ticket_to_proto(replace(TICKET, want_digests=True))
    ),
    "status_with_digests": pb.HandshakeMessage(
        status=pb.Status(
            room=TICKET.transfer_id,
            state=pb.Status.STATE_LANDED,
            bytes_moved=2 << 20,
            hit=pb.HIT_KIND_PARTIAL,
            descriptors=1,
            page_digests=[0x1122334455667788, 0xFFEEDDCCBBAA9988],
        )
    ),
    "status_of_a_hybrid": pb.HandshakeMessage(
        status=pb.Status(
            room=TICKET.transfer_id,
            state=pb.Status.STATE_LANDED,
            bytes_moved=(3 << 20) + (2 << 19) + 65_011_712,
            hit=pb.HIT_KIND_PARTIAL,
            descriptors=4,
            group_bytes=[3 << 20, 2 << 19, 65_011_712],
        )
    ),
    "status_unsettled": pb.HandshakeMessage(
        status=pb.Status(room=TICKET.transfer_id, state=pb.Status.STATE_FAILED, reason="cut", unsettled=True)
    ),
    "abort_ack_unsettled": pb.HandshakeMessage(
        abort_ack=pb.AbortAck(room=TICKET.transfer_id, unsettled=True)
    ),
    "pull_request": pb.HandshakeMessage(
        pull_request=convert.pull_request_to_proto(
            PullRequest(
                TICKET.transfer_id, TICKET.prefill_generation, "tenant", (1, 2, 128_000), 128, 129, 1234.5
            )
        )
    ),
    "pull_grant": pb.HandshakeMessage(
        pull_grant=convert.pull_grant_to_proto(PullGrant(TICKET.transfer_id, 256, with_draft=True))
    ),
    "status_of_a_refused_pull": pb.HandshakeMessage(
        status=pb.Status(
            room=TICKET.transfer_id, state=pb.Status.STATE_REFUSED, reason="evicted", held_tokens=64
        )
    ),
    "abort": pb.HandshakeMessage(abort=pb.Abort(room=TICKET.transfer_id)),
    "abort_ack": pb.HandshakeMessage(abort_ack=pb.AbortAck(room=TICKET.transfer_id)),
    "renew": pb.HandshakeMessage(renew=pb.RenewLease(room=TICKET.transfer_id, write_until_s=1244.5)),
}


def test_the_bytes_of_messages_are_as_pinned_and_read_as_meant(subtests):
    for name in MESSAGES:
        with subtests.test("the bytes of a message are as pinned", name=name):
            pinned = bytes.fromhex((GOLDEN / f"{name}.hex").read_text())
            assert MESSAGES[name].SerializeToString(deterministic=True).hex() == pinned.hex()
            assert pb.HandshakeMessage.FromString(pinned) == MESSAGES[name]

    with subtests.test("what is read from the pinned bytes is what was meant"):
        pinned = {name: pb.HandshakeMessage.FromString(m.SerializeToString()) for name, m in MESSAGES.items()}
        assert read_hello(pinned["hello"]) == (HELLO, 1000.25)
        assert read_hello(pinned["hello_of_a_hybrid"]) == (HYBRID_HELLO, 1000.25)
        assert read_hello(pinned["hello_with_a_draft"]) == (DRAFT_HELLO, 1000.25)
        assert convert.ticket_from_proto(pinned["ticket"].ticket) == TICKET


def test_hellos_that_are_refused(subtests):
    for change, reason in [
        (lambda m: m.hello.ClearField("rank"), "worker"),
        (lambda m: setattr(m.hello, "monotonic_s", float("nan")), "monotonic_s"),
        (lambda m: setattr(m.hello.layout, "page_size", 0), "page_size"),
        (lambda m: m.hello.layout.groups.append(m.hello.layout.groups[0]), "unit_bytes"),
        (lambda m: setattr(m.hello.memory, "kind", "TAPE"), "TAPE"),
        (lambda m: m.abort.SetInParent(), "must be Hello"),
        (lambda m: m.Clear(), "must be Hello"),
    ]:
        with subtests.test("a hello that can never be right is refused", change=change, reason=reason):
            message = HELLO.message(0.0)
            change(message)
            with pytest.raises(ProtocolError, match=reason):
                read_hello(message)

    for pools in [0, 1, 3]:
        with subtests.test("a hello with another number of pools than groups is refused", pools=pools):
            memory = (HYBRID_HELLO.carried_memory * 2)[:pools]
            message = replace(HYBRID_HELLO, carried_memory=memory).message(0.0)
            with pytest.raises(ProtocolError, match=f"carried_memory has {pools} pools, its layout 2"):
                read_hello(message)

    with subtests.test("pools that no group has are refused"):
        message = replace(HELLO, carried_memory=(PoolMemory(0, 1),)).message(0.0)
        with pytest.raises(ProtocolError, match="carried_memory has 1 pools, its layout 0"):
            read_hello(message)

    with subtests.test("a draft and its pool come together"):
        for part in (replace(DRAFT_HELLO, draft_memory=None), replace(HELLO, draft_memory=PoolMemory(0, 1))):
            with pytest.raises(ProtocolError, match="but not both"):
                read_hello(part.message(0.0))
        message = DRAFT_HELLO.message(0.0)
        message.hello.layout.draft.group.unit_bytes = 0
        with pytest.raises(ProtocolError, match=r"draft\.group\.unit_bytes"):
            read_hello(message)

    with subtests.test("a pool in memory of no kind is refused"):
        message = HYBRID_HELLO.message(0.0)
        message.hello.carried_memory[1].kind = "TAPE"
        with pytest.raises(ProtocolError, match="TAPE"):
            read_hello(message)


def test_ranks_that_do_not_fit_are_told_why(subtests):
    with subtests.test("only the same draft crosses"):
        # Who has none, or another, pairs all the same.
        own, group = DRAFT_HELLO.layout, DRAFT_GROUP
        others = [
            DraftKv(1, group),
            DraftKv(own.draft.model_fingerprint, replace(group, dtype="float32")),
            None,
        ]
        for draft in others:
            layout = replace(own, draft=draft)
            check_hello(DRAFT_HELLO, replace(DRAFT_HELLO, layout=layout))
            for shared in (own.shared_with(layout), layout.shared_with(own)):
                assert shared == HYBRID_HELLO.layout
                assert DRAFT_HELLO.memories_of(shared) == HYBRID_HELLO.memories
        assert own.shared_with(own).unit_bytes == (1 << 20, 1 << 19, 65_011_712, 1 << 14)
        assert DRAFT_HELLO.memories_of(own) == (*HYBRID_HELLO.memories, DRAFT_HELLO.draft_memory)

    for version in [0, 2]:
        with subtests.test("a peer of another version is told so", version=version):
            message = HELLO.message(0.0)
            message.hello.version = version
            peer, _ = read_hello(message)
            with pytest.raises(ProtocolError, match=f"in handshake_version: ours is 1, the peer's {version}"):
                check_hello(HELLO, peer)

    with subtests.test("ranks that do not fit are told why"):
        check_hello(HELLO, replace(HELLO, layout=replace(LAYOUT, tp_size=8)))  # TP degrees may differ
        with pytest.raises(ProtocolError, match="transports differ: ours is nixl, the peer's local"):
            check_hello(HELLO, replace(HELLO, transport="local"))
        for field, value in UNLIKE_OURS.items():
            with pytest.raises(ProtocolError, match=field):
                check_hello(HELLO, replace(HELLO, layout=replace(LAYOUT, **{field: value})))


UNLIKE_OURS = {"handshake_version": 2, "page_size": 16, "page_bytes": 7, "model_fingerprint": 1, "groups": ()}
