"""Values survive the wire: to protobuf, to bytes, and back; what can never be right is refused by name."""

import math
from dataclasses import replace

import pytest
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from services.values.constraint import Constraint, ConstraintKind
from services.values.errors import InvalidRequest, ProtocolError
from services.values.kv import (
    DraftKv,
    GroupKind,
    GroupTarget,
    KvGroup,
    KvLayout,
    KvTicket,
    PageBooks,
    PageRun,
    PoolMemory,
)
from services.values.kv_path import KvPath, KvPathKind
from services.values.load import RankLoad
from services.values.prompt_logprobs import PromptLogprobs
from services.values.rank import (
    Generation,
    Plan,
    RankAddress,
    RankId,
    Rendezvous,
    Role,
    Room,
)
from services.values.request import (
    MAX_TIMEOUT_S,
    Admitted,
    FinishReason,
    GenerationRequest,
    Output,
    PrefillResult,
    SamplingParams,
    StartCommand,
    TokenLogprobs,
)
from services.wire import convert, convert_request
from services.wire.isthmus.v1 import common_pb2, decode_pb2, handshake_pb2, prefill_pb2

uint32 = st.integers(0, 2**32 - 1)
uint64 = st.integers(0, 2**64 - 1)
seconds = st.floats(0, 1e9)
names = st.text(min_size=1, max_size=12)
ids = st.lists(uint32, max_size=8).map(tuple)


def float32(low: float, high: float, **kwargs: bool) -> st.SearchStrategy[float]:
    return st.floats(low, high, width=32, **kwargs)


ranks = st.builds(RankId, names, uint32, uint64.map(Generation))
addresses = st.builds(RankAddress, ranks, names)
rendezvous = st.builds(Rendezvous, uint64.map(Room), ranks, ranks)
runs = st.builds(PageRun, uint32, st.integers(1, 2**32 - 1))


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
    room=uint64.map(Room),
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
)

max_tokens_and_min = st.one_of(
    st.tuples(st.none(), st.integers(0, 2**31 - 1)),
    st.integers(1, 2**31 - 1).flatmap(lambda most: st.tuples(st.just(most), st.integers(0, most))),
)
some_text = st.text(min_size=1, max_size=8)
constraints = st.one_of(
    st.just(Constraint(ConstraintKind.JSON_OBJECT)),
    st.builds(Constraint, st.just(ConstraintKind.CHOICE), st.lists(some_text, min_size=1).map(tuple)),
    *(
        st.builds(Constraint, st.just(kind), st.tuples(some_text))
        for kind in (ConstraintKind.JSON_SCHEMA, ConstraintKind.REGEX, ConstraintKind.GRAMMAR)
    ),
)
ends = st.one_of(  # min_tokens, ignore_eos, constraint
    st.tuples(max_tokens_and_min, st.booleans(), st.none()),
    st.tuples(max_tokens_and_min.map(lambda both: (both[0], 0)), st.just(False), constraints),
)
of_prompts = st.just((None, 0)) | st.tuples(st.integers(0, 20), uint32)
samplings = st.builds(
    lambda ends, of_prompt, **fields: SamplingParams(
        max_tokens=ends[0][0],
        min_tokens=ends[0][1],
        ignore_eos=ends[1],
        constraint=ends[2],
        prompt_logprobs=of_prompt[0],
        prompt_logprobs_start=of_prompt[1],
        **fields,
    ),
    ends,
    of_prompts,
    temperature=float32(0, 100),
    top_p=float32(0, 1, exclude_min=True),
    top_k=uint32,
    min_p=float32(0, 1),
    seed=uint64,
    stop=st.lists(names, max_size=4).map(tuple),
    stop_token_ids=ids,
    frequency_penalty=float32(-2, 2),
    presence_penalty=float32(-2, 2),
    repetition_penalty=float32(0, 100, exclude_min=True),
    logprobs=st.none() | st.integers(0, 20),
    logit_bias=st.dictionaries(uint32, float32(-100, 100), max_size=4).map(
        lambda biases: tuple(sorted(biases.items()))
    ),
    bad_words=st.lists(names, max_size=3).map(tuple),
    bad_token_ids=st.lists(st.lists(uint32, min_size=1, max_size=3).map(tuple), max_size=3).map(tuple),
    include_stop_str_in_output=st.booleans(),
)
logprob_values = st.floats(max_value=0, allow_nan=False, width=32)
logprobs = st.builds(
    TokenLogprobs, uint32, logprob_values, st.lists(st.tuples(uint32, logprob_values), max_size=3).map(tuple)
)
prompt_logprobs = st.tuples(st.integers(0, 5), st.integers(0, 3)).map(
    lambda shape: PromptLogprobs(
        shape[1], *[bytes(4 * shape[0])] * 2, *[b"\1\2\3\4" * shape[0] * shape[1]] * 2
    )
)
requests = st.builds(
    GenerationRequest,
    request_id=names,
    prompt_ids=ids,
    sampling=samplings,
    output_ids_so_far=ids,
    cache_salt=st.text(max_size=8),
    priority=st.integers(-(2**31), 2**31 - 1),
    plan=st.sampled_from(Plan),
    eos_token_ids=ids,
)
commands = st.builds(
    StartCommand,
    requests,
    addresses,
    st.none() | st.floats(1e-9, MAX_TIMEOUT_S),
    st.text(max_size=8),
)
admissions = st.builds(
    Admitted,
    *[uint32] * 4,
    *[uint64] * 2,
    *[seconds] * 4,
    st.sampled_from(Plan),
    carried_bytes=st.dictionaries(st.sampled_from(GroupKind).map(lambda kind: kind.value), uint64),
    constraint_s=seconds,
)
outputs = st.builds(
    Output,
    ids,
    st.lists(logprobs, max_size=3).map(tuple),
    st.none() | admissions,
    st.none() | st.sampled_from(FinishReason),
    uint32,
    uint32,
    st.none() | prompt_logprobs,
)
prefill_results = st.builds(
    PrefillResult,
    uint32,
    st.none() | logprobs,
    uint32,
    uint32,
    uint64,
    seconds,
    seconds,
    st.none() | prompt_logprobs,
)


def over_the_wire(pb: Message) -> Message:
    return type(pb).FromString(pb.SerializeToString())


@given(layouts, uint32)
def test_a_layout_round_trips_beside_its_version(layout, version):
    pb = over_the_wire(convert.layout_to_proto(layout))
    assert convert.layout_from_proto(pb, version) == replace(layout, handshake_version=version)


@pytest.mark.parametrize(
    ("noun", "values"),
    [
        ("rank_id", ranks),
        ("address", addresses),
        ("rendezvous", rendezvous),
        ("run", runs),
        ("memory", memories),
        ("ticket", tickets),
        ("load", loads),
    ],
)
def test_kv_values_round_trip(noun, values):
    to_proto, from_proto = getattr(convert, f"{noun}_to_proto"), getattr(convert, f"{noun}_from_proto")

    @given(values)
    def check(value):
        assert from_proto(over_the_wire(to_proto(value))) == value

    check()


@pytest.mark.parametrize(
    ("noun", "values"),
    [
        ("sampling", samplings),
        ("logprobs", logprobs),
        ("admitted", admissions),
        ("prefill_result", prefill_results),
    ],
)
def test_request_values_round_trip(noun, values):
    to_proto = getattr(convert_request, f"{noun}_to_proto")
    from_proto = getattr(convert_request, f"{noun}_from_proto")

    @given(values)
    def check(value):
        assert from_proto(over_the_wire(to_proto(value))) == value

    check()


@given(st.lists(runs, max_size=4).map(tuple))
def test_runs_round_trip(value):
    assert convert.runs_from_proto(convert.runs_to_proto(value)) == value


@pytest.mark.parametrize("plan", Plan)
def test_plan_round_trips(plan):
    assert convert.plan_from_proto(convert.plan_to_proto(plan)) is plan


@pytest.mark.parametrize("role", Role)
def test_role_round_trips(role):
    assert convert.role_from_proto(convert.role_to_proto(role)) is role


@pytest.mark.parametrize("reason", FinishReason)
def test_finish_reason_round_trips(reason):
    number = convert_request.finish_reason_to_proto(reason)
    assert convert_request.finish_reason_from_proto(number) is reason


@given(commands, uint64)
def test_start_round_trips(command, generation):
    pb = over_the_wire(convert_request.start_to_proto(command, Generation(generation)))
    assert pb.decode_generation == generation
    assert convert_request.start_from_proto(pb) == command


@given(names, outputs)
def test_output_round_trips(request_id, output):
    pb = over_the_wire(convert_request.output_to_proto(request_id, output))
    assert pb.request_id == request_id
    assert convert_request.output_from_proto(pb) == output


@given(requests, rendezvous, st.text(max_size=8))
def test_prefill_request_round_trips(request, meeting, traceparent):
    pb = over_the_wire(convert_request.prefill_request_to_proto(request, meeting, traceparent))
    assert tuple(pb.prompt_ids) == request.all_ids
    assert pb.traceparent == traceparent
    assert convert_request.prefill_request_from_proto(pb) == (replace(request, plan=Plan.REMOTE), meeting)


def test_prompt_logprobs_of_sizes_that_do_not_fit_are_refused():
    packed = common_pb2.PackedLogprobs(num_top=1, logprobs=bytes(8), ranks=bytes(8), top_ids=bytes(8))
    with pytest.raises(ProtocolError, match="prompt_logprobs"):
        convert_request.output_from_proto(decode_pb2.RequestOutput(prompt_logprobs=packed))


def test_locked_pages_are_counted_as_used():
    load = RankLoad(books=PageBooks(total=10, free=1, cached=2, locked=3, private=4, quarantined=0))
    pb = convert.load_to_proto(load)
    assert pb.used_pages == 7
    assert convert.load_from_proto(pb).books.balanced


def test_a_way_of_kv_that_a_later_version_knows_is_unknown_to_us():
    pb = common_pb2.RankLoad(kv_paths=[common_pb2.KvPath(kind="tachyons", lanes="t/0")])
    assert convert.load_from_proto(pb).kv_paths == (KvPath(KvPathKind.UNKNOWN, "", "t/0"),)


def test_an_unset_sampling_field_takes_its_default():
    assert convert_request.sampling_from_proto(common_pb2.SamplingParams()) == SamplingParams()


def test_a_set_zero_is_not_an_unset_field():
    pb = common_pb2.SamplingParams(temperature=0, logprobs=0)
    sampling = convert_request.sampling_from_proto(pb)
    assert sampling.temperature == 0
    assert sampling.logprobs == 0


@pytest.mark.parametrize(
    ("field_name", "value"),
    [
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", -0.5),
        ("top_p", math.nan),
        ("top_p", 0),
        ("min_p", math.nan),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("min_tokens", -1),
        ("frequency_penalty", math.nan),
        ("presence_penalty", -math.inf),
        ("repetition_penalty", 0),
        ("repetition_penalty", math.nan),
        ("logprobs", 21),
        ("prompt_logprobs", 21),
        ("prompt_logprobs_start", 1),
        ("stop", ["a"] * 17),
        ("stop", ["a" * 1025]),
        ("stop", [""]),
        ("stop_token_ids", [7] * 1025),
        ("logit_bias", {7: 100.5}),
        ("logit_bias", {7: math.nan}),
        ("logit_bias", dict.fromkeys(range(1025), 1)),
        ("bad_words", ["a"] * 65),
        ("bad_words", ["a" * 1025]),
        ("bad_words", [""]),
        ("bad_token_ids", [common_pb2.TokenSequence()]),
        ("bad_token_ids", [common_pb2.TokenSequence(ids=[7])] * 1025),
        ("bad_token_ids", [common_pb2.TokenSequence(ids=[7] * 65_537)]),
    ],
)
def test_sampling_out_of_range_is_refused_by_name(field_name, value):
    pb = common_pb2.SamplingParams(**{field_name: value})
    with pytest.raises(InvalidRequest, match=rf"^sampling\.{field_name}(\[7\])? must be .{{,200}}$"):
        convert_request.sampling_from_proto(pb)


def test_the_longest_stops_that_there_may_be():
    pb = common_pb2.SamplingParams(stop=["é" * 1024] * 16, stop_token_ids=range(1024))
    sampling = convert_request.sampling_from_proto(pb)
    assert sampling.stop == ("é" * 1024,) * 16
    assert sampling.stop_token_ids == tuple(range(1024))


@pytest.mark.parametrize(
    ("field_name", "value"),
    [
        ("top_k", 2**32),
        ("max_tokens", 2**31),
        ("stop_token_ids", (-1,)),
        ("stop", ("\ud800",)),
    ],
)
def test_sampling_that_does_not_fit_the_wire_is_refused_by_name(field_name, value):
    with pytest.raises(InvalidRequest, match=field_name):
        convert_request.sampling_to_proto(SamplingParams(**{field_name: value}))


RANK = RankId("w", 0, Generation(7))
RANK_PB = convert.rank_id_to_proto(RANK)
LAYOUT = KvLayout(64, 4096, 1, 1, (KvGroup(GroupKind.FULL_ATTENTION, (0,), 1, 8, "float32"),))
TICKET = KvTicket(Room(1), Generation(7), 64, 0, (PageRun(3, 1),), 1.0)


def changed(pb: Message, **fields: object) -> Message:
    for name, value in fields.items():
        setattr(pb, name, value)
    return pb


@pytest.mark.parametrize("name", ["page_size", "page_bytes", "tp_size"])
def test_a_layout_without_sizes_is_refused(name):
    with pytest.raises(ProtocolError, match=name):
        convert.layout_from_proto(changed(convert.layout_to_proto(LAYOUT), **{name: 0}), 1)


@pytest.mark.parametrize("kind", [0, 99])
def test_a_layout_of_unknown_groups_is_refused(kind):
    pb = convert.layout_to_proto(LAYOUT)
    pb.groups[0].kind = kind
    with pytest.raises(ProtocolError, match="kind"):
        convert.layout_from_proto(pb, 1)


WINDOWED = KvLayout(
    16,
    64,
    1,
    groups=(
        *LAYOUT.groups,
        KvGroup(GroupKind.CHUNKED_WINDOW, (1,), 1, 1, "float32", window=8, unit_bytes=64),
    ),
)


@pytest.mark.parametrize("kind", [GroupKind.SLIDING_WINDOW, GroupKind.CHUNKED_WINDOW])
def test_a_window_of_nothing_is_refused(kind):
    pb = convert.layout_to_proto(
        replace(WINDOWED, groups=(LAYOUT.groups[0], replace(WINDOWED.groups[1], kind=kind)))
    )
    assert convert.layout_from_proto(pb, 1).groups[1].kind is kind
    pb.groups[1].window = 0
    with pytest.raises(ProtocolError, match="window"):
        convert.layout_from_proto(pb, 1)


@pytest.mark.parametrize("places", [(1,), (0, 0), (1, 0)])
def test_a_layout_whose_first_group_is_not_alone_of_full_attention_is_refused(places):
    groups = tuple(replace(WINDOWED.groups[place], unit_bytes=64) for place in places)
    with pytest.raises(ProtocolError, match="full attention"):
        convert.layout_from_proto(convert.layout_to_proto(replace(WINDOWED, groups=groups)), 1)


@pytest.mark.parametrize("number", [0, 99])
@pytest.mark.parametrize(
    "from_proto",
    [convert.plan_from_proto, convert.role_from_proto, convert_request.finish_reason_from_proto],
)
def test_an_unknown_enum_value_is_refused(from_proto, number):
    with pytest.raises(ProtocolError, match=str(number)):
        from_proto(number)


@pytest.mark.parametrize("until", [math.nan, math.inf])
def test_a_ticket_whose_lease_is_no_time_is_refused(until):
    with pytest.raises(ProtocolError, match="write_until_s"):
        convert.ticket_from_proto(changed(convert.ticket_to_proto(TICKET), write_until_s=until))


def test_an_empty_run_is_refused():
    with pytest.raises(ProtocolError, match="num_pages"):
        convert.run_from_proto(handshake_pb2.PageRun(first_page=1))


@pytest.mark.parametrize(
    ("from_proto", "pb"),
    [
        (convert.rank_id_from_proto, common_pb2.RankId()),
        (convert.address_from_proto, common_pb2.RankAddress(endpoint="h:1")),
        (convert.address_from_proto, common_pb2.RankAddress(id=RANK_PB)),
        (convert.rendezvous_from_proto, prefill_pb2.Rendezvous(room=1, decode=RANK_PB)),
        (convert.memory_from_proto, handshake_pb2.PoolMemory(num_pages=0, kind="DRAM")),
        (convert.memory_from_proto, handshake_pb2.PoolMemory(num_pages=1, kind="DISK")),
        (convert.load_from_proto, common_pb2.RankLoad(step_s=math.nan)),
        (convert_request.logprobs_from_proto, common_pb2.TokenLogprobs()),
        (convert_request.admitted_from_proto, decode_pb2.Admitted(plan=1, transfer_s=math.inf)),
        (convert_request.start_from_proto, decode_pb2.Start(request_id="r")),
        (convert_request.start_from_proto, decode_pb2.Start(plan=common_pb2.PLAN_LOCAL)),
        (convert_request.start_from_proto, decode_pb2.Start(request_id="r", plan=common_pb2.PLAN_REMOTE)),
        (convert_request.start_from_proto, decode_pb2.Start(request_id="r", plan=2, timeout_s=-1)),
        (convert_request.start_from_proto, decode_pb2.Start(request_id="r", plan=2, timeout_s=math.nan)),
        (
            convert_request.prefill_request_from_proto,
            prefill_pb2.PrefillRequest(request_id="r", prompt_ids=[1], num_output_ids=2),
        ),
        (
            convert_request.output_from_proto,
            decode_pb2.RequestOutput(request_id="r", error=decode_pb2.RequestError(code=13)),
        ),
    ],
)
def test_what_can_never_be_right_is_refused(from_proto, pb):
    with pytest.raises(ProtocolError):
        from_proto(pb)


@pytest.mark.parametrize(
    ("timeout_s", "bounded_s"), [(60.0, 60.0), (9e9, MAX_TIMEOUT_S), (1e300, MAX_TIMEOUT_S)]
)
def test_no_router_gives_a_rank_more_time_than_grpc_can_tell(timeout_s, bounded_s):
    request = GenerationRequest("r", (1,), SamplingParams(), plan=Plan.LOCAL)
    pb = convert_request.start_to_proto(StartCommand(request, timeout_s=timeout_s), Generation(1))
    assert convert_request.start_from_proto(pb).timeout_s == bounded_s


@pytest.mark.parametrize("timeout_s", [0.0, -3.0])
def test_a_deadline_that_has_passed_does_not_become_none(timeout_s):
    request = GenerationRequest("r", (1,), SamplingParams(), plan=Plan.LOCAL)
    pb = convert_request.start_to_proto(StartCommand(request, timeout_s=timeout_s), Generation(1))
    assert 0 < convert_request.start_from_proto(pb).timeout_s < 1e-6


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({}, r"\.constraint must have one of json_object, json_schema, regex, grammar, choice$"),
        ({"json_object": False}, r"\.constraint\.json_object must be true; leave it out instead$"),
        ({"json_schema": ""}, r"\.constraint\.json_schema must not be empty$"),
        ({"choice": common_pb2.Choice()}, r"\.constraint\.choice must not be empty$"),
        ({"choice": common_pb2.Choice(texts=["a", ""])}, r"\.constraint\.choice must not be empty$"),
        (
            {"choice": common_pb2.Choice(texts=["é" * 16384] * 3)},
            r"\.constraint\.choice must be at most 65536 bytes, got 98304$",
        ),
        ({"regex": "a" * 65537}, r"\.constraint\.regex must be at most 65536 bytes, got 65537$"),
    ],
)
def test_a_constraint_that_is_none_is_refused_by_name(fields, problem):
    pb = common_pb2.SamplingParams(constraint=common_pb2.Constraint(**fields))
    with pytest.raises(InvalidRequest, match=f"^sampling{problem}"):
        convert_request.sampling_from_proto(pb)


@pytest.mark.parametrize("field", ["min_tokens", "ignore_eos"])
def test_a_constraint_alone_says_where_an_answer_may_end(field):
    pb = common_pb2.SamplingParams(constraint=common_pb2.Constraint(regex="a*"), **{field: 1})
    with pytest.raises(InvalidRequest, match=rf"^sampling\.{field} must be .* beside a constraint"):
        convert_request.sampling_from_proto(pb)
