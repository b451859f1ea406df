"""Requests and answers survive the wire; what is out of range is refused by name."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.values.errors import InvalidRequest, ProtocolError
from services.values.kv import BlockHash, GroupKind
from services.values.prompt_logprobs import PromptLogprobs
from services.values.rank import Generation, Plan, RankAddress, RankId, Rendezvous
from services.values.rank_reports import Coming
from services.values.request import (
    MAX_TIMEOUT_S,
    Admitted,
    Constraint,
    ConstraintKind,
    FinishReason,
    GenerationRequest,
    Output,
    PrefillResult,
    Pulled,
    SamplingParams,
    StartCommand,
    TenantShare,
    TokenLogprobs,
)
from services.wire import convert, convert_request
from services.wire.fields import message_of
from services.wire.isthmus.v1 import common_pb2, decode_pb2, prefill_pb2
from wire.wire_values import (
    addresses,
    check_round_trips,
    float32,
    ids,
    names,
    over_the_wire,
    ranks,
    rendezvous,
    seconds,
    sources,
    uint32,
    uint64,
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
shares = st.builds(TenantShare, names, st.floats(1e-3, 1e3), uint64)
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
    pull_from=st.none() | sources,
    share=st.none() | shares,
)
commands = st.builds(
    StartCommand,
    requests,
    addresses,
    st.none() | st.floats(1e-9, MAX_TIMEOUT_S),
    st.text(max_size=8),
)
pulled = st.none() | st.builds(Pulled, uint32, uint64, seconds, names, st.none() | uint32)
admissions = st.builds(
    Admitted,
    *[uint32] * 4,
    *[uint64] * 2,
    *[seconds] * 4,
    st.sampled_from(Plan),
    carried_bytes=st.dictionaries(st.sampled_from(GroupKind).map(lambda kind: kind.value), uint64),
    constraint_s=seconds,
    pulled=pulled,
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
    pulled,
    uint32,
    st.none() | uint32,
)


comings = st.builds(
    lambda rank, blocks, for_s, share: Coming(rank, blocks, for_s, int(share * len(blocks))),
    ranks,
    st.lists(uint64.map(BlockHash), max_size=8, unique=True).map(tuple),
    seconds,
    st.floats(0, 1),
)


def test_a_coming_prompt_that_cannot_be_is_refused(subtests):
    rank = convert.rank_id_to_proto(RankId("d", 0, Generation(1)))
    for wrong in (
        {"for_s": 1.0},
        {"rank": rank, "for_s": math.nan},
        {"rank": rank, "for_s": -1.0},
        {"rank": rank, "blocks": [7], "resumable": 2},
        {"rank": rank, "blocks": [7, 8, 7]},
    ):
        with subtests.test(wrong=wrong), pytest.raises(ProtocolError):
            convert_request.coming_from_proto(decode_pb2.Coming(**wrong))


def test_request_values_round_trip(subtests):
    for noun, values in [
        ("sampling", samplings),
        ("logprobs", logprobs),
        ("admitted", admissions),
        ("prefill_result", prefill_results),
        ("coming", comings),
    ]:
        with subtests.test(noun=noun):
            check_round_trips(convert_request, noun, values)


def test_finish_reasons_round_trip_and_no_others(subtests):
    for reason in FinishReason:
        with subtests.test(reason=reason):
            number = convert_request.finish_reason_to_proto(reason)
            assert convert_request.finish_reason_from_proto(number) is reason
    for number in [0, 99]:
        with subtests.test(number=number), pytest.raises(ProtocolError, match=str(number)):
            convert_request.finish_reason_from_proto(number)


def start_of(command, generation):
    """A router's message that says the same."""
    return message_of(
        decode_pb2.Start,
        command.request,
        sampling=convert_request.sampling_to_proto(command.request.sampling),
        plan=convert.plan_to_proto(command.request.plan),
        prefill=None if command.prefill is None else convert.address_to_proto(command.prefill),
        decode_generation=generation,
        timeout_s=command.timeout_s or 0.0,
        traceparent=command.traceparent,
        pull_from=None
        if command.request.pull_from is None
        else convert.source_to_proto(command.request.pull_from),
        share=convert_request.share_to_proto(command.request.share),
    )


@given(commands, uint64)
def test_start_round_trips(command, generation):
    pb = over_the_wire(start_of(command, Generation(generation)))
    assert pb.decode_generation == generation
    told = convert_request.start_from_proto(pb)
    assert replace(told, sampling=b"") == command
    assert told.sampling == (pb.sampling.SerializeToString() if command.request.plan is Plan.REMOTE else b"")


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


def test_a_prefill_rank_gets_sampling_as_the_router_wrote_it():
    """With what only a newer router and prefill rank know."""
    sampling = SamplingParams(temperature=0.3, seed=7, logit_bias=((3, 0.1),), bad_token_ids=((1, 2),))
    rank = RankId("prefill", 0, Generation(1))
    request, meeting = GenerationRequest("r", (1, 2), sampling), Rendezvous(1, rank, rank)
    newer = convert_request.sampling_to_proto(sampling).SerializeToString() + b"\xf8\x7f\x01"
    command = convert_request.start_from_proto(
        decode_pb2.Start(
            request_id="r",
            sampling=common_pb2.SamplingParams.FromString(newer),
            plan=common_pb2.PLAN_REMOTE,
            prefill=convert.address_to_proto(RankAddress(rank, "host:1")),
        )
    )
    assert command.sampling == newer
    handed_on = over_the_wire(convert_request.prefill_request_to_proto(request, meeting, "", newer))
    assert handed_on.sampling.SerializeToString() == newer
    handed_on.sampling.DiscardUnknownFields()
    assert handed_on == convert_request.prefill_request_to_proto(request, meeting)


def test_what_can_never_be_right_is_refused(subtests):
    with subtests.test("prompt logprobs of sizes that do not fit are refused"):
        packed = common_pb2.PackedLogprobs(num_top=1, logprobs=bytes(8), ranks=bytes(8), top_ids=bytes(8))
        with pytest.raises(ProtocolError, match="prompt_logprobs"):
            convert_request.output_from_proto(decode_pb2.RequestOutput(prompt_logprobs=packed))
    for from_proto, pb in [
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
            convert_request.start_from_proto,
            decode_pb2.Start(request_id="r", plan=2, share=common_pb2.TenantShare(tenant="a")),
        ),
        (
            convert_request.output_from_proto,
            decode_pb2.RequestOutput(request_id="r", error=decode_pb2.RequestError(code=13)),
        ),
    ]:
        with subtests.test(from_proto=from_proto), pytest.raises(ProtocolError):
            from_proto(pb)


def test_what_is_unset_takes_its_default(subtests):
    with subtests.test("an unset sampling field takes its default"):
        assert convert_request.sampling_from_proto(common_pb2.SamplingParams()) == SamplingParams()
    with subtests.test("a set zero is not an unset field"):
        pb = common_pb2.SamplingParams(temperature=0, logprobs=0)
        sampling = convert_request.sampling_from_proto(pb)
        assert sampling.temperature == 0
        assert sampling.logprobs == 0


def test_sampling_out_of_range_is_refused_by_name(subtests):
    for field_name, value in [
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
    ]:
        with subtests.test(field_name=field_name):
            pb = common_pb2.SamplingParams(**{field_name: value})
            with pytest.raises(InvalidRequest, match=rf"^sampling\.{field_name}(\[7\])? must be .{{,200}}$"):
                convert_request.sampling_from_proto(pb)
    with subtests.test("the longest stops that there may be"):
        pb = common_pb2.SamplingParams(stop=["é" * 1024] * 16, stop_token_ids=range(1024))
        sampling = convert_request.sampling_from_proto(pb)
        assert sampling.stop == ("é" * 1024,) * 16
        assert sampling.stop_token_ids == tuple(range(1024))
    for field_name, value in [
        ("top_k", 2**32),
        ("max_tokens", 2**31),
        ("stop_token_ids", (-1,)),
        ("stop", ("\ud800",)),
    ]:
        with subtests.test(field_name=field_name), pytest.raises(InvalidRequest, match=field_name):
            convert_request.sampling_to_proto(SamplingParams(**{field_name: value}))


def test_a_rank_is_given_no_more_time_than_grpc_can_tell(subtests):
    for timeout_s, bounded_s in [(60.0, 60.0), (9e9, MAX_TIMEOUT_S), (1e300, MAX_TIMEOUT_S)]:
        with subtests.test(timeout_s=timeout_s):
            request = GenerationRequest("r", (1,), SamplingParams(), plan=Plan.LOCAL)
            pb = start_of(StartCommand(request, timeout_s=timeout_s), Generation(1))
            assert convert_request.start_from_proto(pb).timeout_s == bounded_s


def test_a_constraint_that_is_none_or_not_alone_is_refused_by_name(subtests):
    for fields, problem in [
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
    ]:
        with subtests.test(fields=fields):
            pb = common_pb2.SamplingParams(constraint=common_pb2.Constraint(**fields))
            with pytest.raises(InvalidRequest, match=f"^sampling{problem}"):
                convert_request.sampling_from_proto(pb)
    for field in ["min_tokens", "ignore_eos"]:
        with subtests.test(field=field):
            pb = common_pb2.SamplingParams(constraint=common_pb2.Constraint(regex="a*"), **{field: 1})
            with pytest.raises(InvalidRequest, match=rf"^sampling\.{field} must be .* beside a constraint"):
                convert_request.sampling_from_proto(pb)
