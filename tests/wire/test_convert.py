"""Values survive the wire: to protobuf, to bytes, and back; what can never be right is refused by name."""

import math
from dataclasses import replace

import pytest
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from services.values.errors import ProtocolError
from services.values.kv import (
    DraftKv,
    GroupKind,
    GroupTarget,
    KvGroup,
    KvLayout,
    KvPath,
    KvPathKind,
    KvTicket,
    PageBooks,
    PageRun,
    PoolMemory,
    PullGrant,
    PullRequest,
)
from services.values.rank import (
    Generation,
    Plan,
    RankId,
    Role,
    TransferId,
)
from services.values.rank_reports import Overtaken, RankLoad, overtaken_of
from services.wire import convert
from services.wire.isthmus.v1 import common_pb2, handshake_pb2, prefill_pb2
from wire.wire_values import (
    addresses,
    check_round_trips,
    ids,
    names,
    over_the_wire,
    ranks,
    rendezvous,
    runs,
    seconds,
    sources,
    uint32,
    uint64,
)


def groups(kinds):
    return st.builds(
        KvGroup,
        st.sampled_from(kinds),
        ids,
        uint32,
        uint32,
        names,
        st.none() | uint32,
        st.integers(1, 2**32 - 1),
        st.integers(1, 2**64 - 1),
    )


attention = groups([GroupKind.FULL_ATTENTION])
carried = groups([kind for kind in GroupKind if kind is not GroupKind.FULL_ATTENTION])
targets = st.builds(GroupTarget, uint32, uint32, st.lists(runs, max_size=3).map(tuple))
layouts = st.builds(
    KvLayout,
    page_size=st.integers(1, 2**32 - 1),
    page_bytes=st.integers(1, 2**64 - 1),
    model_fingerprint=uint64,
    tp_size=st.integers(1, 2**32 - 1),
    groups=st.builds(lambda first, others: (first, *others), attention, st.lists(carried, max_size=2)),
    draft=st.none() | st.builds(DraftKv, uint64, attention),
)
memories = st.builds(PoolMemory, uint64, st.integers(1, 2**32 - 1), st.sampled_from(["DRAM", "VRAM"]), uint32)
tickets = st.builds(
    KvTicket,
    transfer_id=uint64.map(TransferId),
    prefill_generation=uint64.map(Generation),
    prompt_len=uint32,
    decode_prefix_len=uint32,
    runs=st.lists(runs, max_size=4).map(tuple),
    write_until_s=seconds,
    targets=st.lists(targets, max_size=3).map(tuple),
    aux_slot=st.none() | uint32,
)
# The wire adds locked and private pages up, so only books without locked pages come back the same.
books = st.builds(PageBooks, uint32, uint32, uint32, st.just(0), uint32, uint32)
kv_paths = st.builds(KvPath, st.sampled_from(KvPathKind), st.text(), st.text())
loads = st.builds(
    RankLoad,
    uint32,
    uint32,
    uint64,
    books,
    seconds,
    seconds,
    st.booleans(),
    kv_paths=st.lists(kv_paths, max_size=3).map(tuple),
    tokens_per_step=seconds,
    granted_pages=uint32,
    memory_tier_bytes_per_s=seconds,
    file_tier_bytes_per_s=seconds,
    shared_tier_bytes_per_s=seconds,
    tiers_off=st.booleans(),
    common_tokens=st.none() | uint64,
    overtaken=st.lists(st.builds(Overtaken, uint64, uint64, uint32), max_size=3).map(tuple),
)
pull_requests = st.builds(
    PullRequest,
    uint64.map(TransferId),
    uint64.map(Generation),
    st.text(max_size=8),
    ids,
    uint32,
    uint32,
    seconds,
)
pull_grants = st.builds(PullGrant, uint64.map(TransferId), uint32, st.booleans())


@given(layouts, uint32)
def test_a_layout_round_trips_beside_its_version(layout, version):
    pb = over_the_wire(convert.layout_to_proto(layout))
    assert convert.layout_from_proto(pb, version) == replace(layout, handshake_version=version)


def test_kv_values_round_trip(subtests):
    for noun, values in [
        ("rank_id", ranks),
        ("address", addresses),
        ("rendezvous", rendezvous),
        ("run", runs),
        ("memory", memories),
        ("ticket", tickets),
        ("load", loads),
        ("source", sources),
        ("pull_request", pull_requests),
        ("pull_grant", pull_grants),
    ]:
        with subtests.test(noun=noun):
            check_round_trips(convert, noun, values)


def test_of_a_load_as_many_overtaken_prompts_are_read_as_a_rank_sends():
    told = overtaken_of((2.0**bits, 9) for bits in range(64) for _ in range(3))
    load = RankLoad(overtaken=told)
    pb = over_the_wire(convert.load_to_proto(load))
    assert convert.load_from_proto(pb) == load
    for _ in range(1000):
        pb.overtaken.add(below_tokens=2, tokens=9, prompts=1)
    assert convert.load_from_proto(pb) == load


@given(st.lists(runs, max_size=4).map(tuple))
def test_runs_round_trip(value):
    assert convert.runs_from_proto(convert.runs_to_proto(value)) == value


def test_plans_and_roles_round_trip_and_no_others(subtests):
    for plan in Plan:
        with subtests.test(plan=plan):
            assert convert.plan_from_proto(convert.plan_to_proto(plan)) is plan
    for role in Role:
        with subtests.test(role=role):
            assert convert.role_from_proto(convert.role_to_proto(role)) is role
    for number in [0, 99]:
        for from_proto in [convert.plan_from_proto, convert.role_from_proto]:
            with (
                subtests.test(number=number, from_proto=from_proto),
                pytest.raises(ProtocolError, match=str(number)),
            ):
                from_proto(number)


def test_locked_pages_are_counted_as_used():
    load = RankLoad(books=PageBooks(total=10, free=1, cached=2, locked=3, private=4, quarantined=0))
    pb = convert.load_to_proto(load)
    assert pb.used_pages == 7
    assert convert.load_from_proto(pb).books.balanced


def test_a_way_of_kv_that_a_later_version_knows_is_unknown_to_us():
    pb = common_pb2.RankLoad(kv_paths=[common_pb2.KvPath(kind="tachyons", lanes="t/0")])
    assert convert.load_from_proto(pb).kv_paths == (KvPath(KvPathKind.UNKNOWN, "", "t/0"),)


RANK = RankId("w", 0, Generation(7))
RANK_PB = convert.rank_id_to_proto(RANK)
LAYOUT = KvLayout(64, 4096, 1, 1, (KvGroup(GroupKind.FULL_ATTENTION, (0,), 1, 8, "float32"),))
TICKET = KvTicket(TransferId(1), Generation(7), 64, 0, (PageRun(3, 1),), 1.0)


def changed(pb: Message, **fields: object) -> Message:
    for name, value in fields.items():
        setattr(pb, name, value)
    return pb


def test_a_layout_that_can_never_be_right_is_refused(subtests):
    for name in ["page_size", "page_bytes", "tp_size"]:
        with subtests.test(name=name), pytest.raises(ProtocolError, match=name):
            convert.layout_from_proto(changed(convert.layout_to_proto(LAYOUT), **{name: 0}), 1)
    for kind in [0, 99]:
        with subtests.test(kind=kind):
            pb = convert.layout_to_proto(LAYOUT)
            pb.groups[0].kind = kind
            with pytest.raises(ProtocolError, match="kind"):
                convert.layout_from_proto(pb, 1)
    for kind in [GroupKind.SLIDING_WINDOW, GroupKind.CHUNKED_WINDOW]:
        with subtests.test(kind=kind):
            pb = convert.layout_to_proto(
                replace(WINDOWED, groups=(LAYOUT.groups[0], replace(WINDOWED.groups[1], kind=kind)))
            )
            assert convert.layout_from_proto(pb, 1).groups[1].kind is kind
            pb.groups[1].window = 0
            with pytest.raises(ProtocolError, match="window"):
                convert.layout_from_proto(pb, 1)
    for places in [(1,), (0, 0), (1, 0)]:
        with subtests.test(places=places):
            groups = tuple(replace(WINDOWED.groups[place], unit_bytes=64) for place in places)
            with pytest.raises(ProtocolError, match="full attention"):
                convert.layout_from_proto(convert.layout_to_proto(replace(WINDOWED, groups=groups)), 1)


WINDOWED = KvLayout(
    16,
    64,
    1,
    groups=(
        *LAYOUT.groups,
        KvGroup(GroupKind.CHUNKED_WINDOW, (1,), 1, 1, "float32", window=8, unit_bytes=64),
    ),
)


def test_what_can_never_be_right_is_refused(subtests):
    for until in [math.nan, math.inf]:
        with subtests.test(until=until), pytest.raises(ProtocolError, match="write_until_s"):
            convert.ticket_from_proto(changed(convert.ticket_to_proto(TICKET), write_until_s=until))
    with subtests.test("an empty run is refused"), pytest.raises(ProtocolError, match="num_pages"):
        convert.run_from_proto(handshake_pb2.PageRun(first_page=1))
    for from_proto, pb in [
        (convert.rank_id_from_proto, common_pb2.RankId()),
        (convert.address_from_proto, common_pb2.RankAddress(endpoint="h:1")),
        (convert.address_from_proto, common_pb2.RankAddress(id=RANK_PB)),
        (convert.rendezvous_from_proto, prefill_pb2.Rendezvous(room=1, decode=RANK_PB)),
        (convert.memory_from_proto, handshake_pb2.PoolMemory(num_pages=0, kind="DRAM")),
        (convert.memory_from_proto, handshake_pb2.PoolMemory(num_pages=1, kind="DISK")),
        (convert.load_from_proto, common_pb2.RankLoad(step_s=math.nan)),
        (convert.source_from_proto, common_pb2.PullSource(tokens=4)),
        (convert.pull_request_from_proto, handshake_pb2.PullRequest(token_ids=bytes(5))),
        (convert.pull_request_from_proto, handshake_pb2.PullRequest(keep_until_s=math.inf)),
    ]:
        with subtests.test(from_proto=from_proto), pytest.raises(ProtocolError):
            from_proto(pb)
