"""This module translates request values to protobuf and back: sampling, logprobs, commands, outputs, the
prefill call.

An error that a client can make (sampling) raises InvalidRequest and names the field; one that only our own
services can make raises ProtocolError, as in convert.py. Probabilities and penalties are 32-bit floats in
messages, so they are rounded to that.
"""

from collections.abc import Mapping
from typing import Any

from services.values.adapter import Adapter
from services.values.errors import InvalidRequest, ProtocolError
from services.values.prompt_logprobs import PromptLogprobs
from services.values.rank import Plan, PullSource, Rendezvous
from services.values.rank_reports import MAX_COMING_BLOCKS, Coming
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
from services.wire import convert
from services.wire.fields import finite, given_fields, message_of, shared_fields, value_of
from services.wire.isthmus.v1 import common_pb2, decode_pb2, prefill_pb2

_FINISH_TO_PROTO = {
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORTED: common_pb2.FINISH_REASON_ABORTED,
    FinishReason.CAPACITY: common_pb2.FINISH_REASON_CAPACITY,
    FinishReason.TOOL_CALLS: common_pb2.FINISH_REASON_TOOL_CALLS,
}
_FINISH_FROM_PROTO: dict[int, FinishReason] = {number: reason for reason, number in _FINISH_TO_PROTO.items()}


def sampling_to_proto(sampling: SamplingParams) -> common_pb2.SamplingParams:
    """Return the message. Raises InvalidRequest if a number does not fit its field (a top_k of 2**32)."""
    names = shared_fields(SamplingParams, common_pb2.SamplingParams.DESCRIPTOR).all
    given = {name: getattr(sampling, name) for name in names}
    try:
        pb = common_pb2.SamplingParams(**given)
    except ValueError:
        _name_misfit(given)
        raise
    if sampling.constraint is not None:
        pb.constraint.CopyFrom(constraint_to_proto(sampling.constraint))
    if sampling.logit_bias:
        pb.logit_bias.update(dict(sampling.logit_bias))
    for ids in sampling.bad_token_ids:
        pb.bad_token_ids.add(ids=ids)
    return pb


def _name_misfit(given: Mapping[str, Any]) -> None:
    """Raise InvalidRequest for the first value that does not fit; protobuf's own error does not name it."""
    for name, value in given.items():
        try:
            common_pb2.SamplingParams(**{name: value})
        except ValueError as error:
            raise InvalidRequest(f"sampling.{name}", f": {error}") from error


def sampling_from_proto(pb: common_pb2.SamplingParams, **instead: int) -> SamplingParams:
    """Return the sampling with defaults filled in; values of `instead` replace those of the message. The seed
    is 0 if unset, so that a router draws one.

    Raises InvalidRequest that names a field whose value is out of range or no number.
    """
    constraint = constraint_from_proto(pb.constraint) if pb.HasField("constraint") else None
    return SamplingParams(
        **(given_fields(SamplingParams, pb) | instead),
        constraint=constraint,
        logit_bias=tuple(sorted(pb.logit_bias.items())),
        bad_token_ids=tuple(tuple(each.ids) for each in pb.bad_token_ids),
    )


def constraint_to_proto(constraint: Constraint) -> common_pb2.Constraint:
    pb = common_pb2.Constraint()
    match constraint.kind:
        case ConstraintKind.JSON_OBJECT:
            pb.json_object = True
        case ConstraintKind.CHOICE:
            pb.choice.texts.extend(constraint.texts)
        case kind:
            setattr(pb, kind.value, constraint.text)
    return pb


def constraint_from_proto(pb: common_pb2.Constraint) -> Constraint:
    """Return the constraint. Raises InvalidRequest if the message has none, or several."""
    name = pb.WhichOneof("kind")
    if name is None:
        kinds = ", ".join(kind.value for kind in ConstraintKind)
        raise InvalidRequest("sampling.constraint", f"must have one of {kinds}")
    kind = ConstraintKind(name)
    match kind:
        case ConstraintKind.JSON_OBJECT:
            if not pb.json_object:
                raise InvalidRequest("sampling.constraint.json_object", "must be true; leave it out instead")
            return Constraint(kind)
        case ConstraintKind.CHOICE:
            return Constraint(kind, tuple(pb.choice.texts))
        case _:
            return Constraint(kind, (getattr(pb, name),))


def finish_reason_to_proto(reason: FinishReason) -> common_pb2.FinishReason:
    return _FINISH_TO_PROTO[reason]


def finish_reason_from_proto(number: int) -> FinishReason:
    return convert.known("finish_reason", _FINISH_FROM_PROTO, number)


def logprobs_to_proto(logprobs: TokenLogprobs) -> common_pb2.TokenLogprobs:
    return common_pb2.TokenLogprobs(
        chosen=common_pb2.TokenLogprob(token_id=logprobs.token_id, logprob=logprobs.logprob),
        top=[common_pb2.TokenLogprob(token_id=token, logprob=value) for token, value in logprobs.top],
    )


def logprobs_from_proto(pb: common_pb2.TokenLogprobs) -> TokenLogprobs:
    if not pb.HasField("chosen"):
        raise ProtocolError("logprobs.chosen is unset")
    top = tuple((entry.token_id, entry.logprob) for entry in pb.top)
    return TokenLogprobs(pb.chosen.token_id, pb.chosen.logprob, top)


def prompt_logprobs_to_proto(logprobs: PromptLogprobs | None) -> common_pb2.PackedLogprobs | None:
    return None if logprobs is None else message_of(common_pb2.PackedLogprobs, logprobs)


def prompt_logprobs_from_proto(
    pb: prefill_pb2.PrefillResponse | decode_pb2.RequestOutput,
) -> PromptLogprobs | None:
    if not pb.HasField("prompt_logprobs"):
        return None
    try:
        return value_of(PromptLogprobs, pb.prompt_logprobs)
    except ValueError as error:
        raise ProtocolError(f"prompt_logprobs: {error}") from error


def start_from_proto(pb: decode_pb2.Start) -> StartCommand:
    """Return the command. It lacks `pb.decode_generation`, which the receiver compares with its own."""
    plan = convert.plan_from_proto(pb.plan)
    if plan is Plan.REMOTE and not pb.HasField("prefill"):
        raise ProtocolError("start.prefill is unset under plan remote")
    if finite("start.timeout_s", pb.timeout_s) < 0:
        raise ProtocolError(f"start.timeout_s must not be negative, got {pb.timeout_s}")
    _check_request_id(pb.request_id)
    request = value_of(
        GenerationRequest,
        pb,
        sampling=sampling_from_proto(pb.sampling),
        plan=plan,
        pull_from=_source_from_proto(pb),
        share=_share_from_proto(pb),
        adapter=_adapter_from_proto(pb),
    )
    return StartCommand(
        request=request,
        prefill=convert.address_from_proto(pb.prefill) if pb.HasField("prefill") else None,
        timeout_s=min(pb.timeout_s, MAX_TIMEOUT_S) or None,
        traceparent=pb.traceparent,
        sampling=pb.sampling.SerializeToString() if plan is Plan.REMOTE else b"",
    )


def coming_to_proto(coming: Coming | None) -> decode_pb2.Coming | None:
    if coming is None:
        return None
    return message_of(decode_pb2.Coming, coming, rank=convert.rank_id_to_proto(coming.rank))


def coming_from_proto(pb: decode_pb2.Coming) -> Coming:
    coming = value_of(Coming, pb, rank=convert.rank_id_from_proto(pb.rank))
    if coming.for_s < 0 or coming.resumable > len(coming.blocks):
        raise ProtocolError(
            f"coming lasts {coming.for_s} s, with a checkpoint after {coming.resumable} of "
            f"{len(coming.blocks)} blocks"
        )
    if len(coming.blocks) > MAX_COMING_BLOCKS or len(set(coming.blocks)) < len(coming.blocks):
        raise ProtocolError(f"coming must have at most {MAX_COMING_BLOCKS} blocks, each once")
    return coming


def admitted_to_proto(admitted: Admitted) -> decode_pb2.Admitted:
    plan, carried_bytes = convert.plan_to_proto(admitted.plan), admitted.carried_bytes
    pulled = _pulled_to_proto(admitted.pulled)
    return message_of(decode_pb2.Admitted, admitted, plan=plan, carried_bytes=carried_bytes, pulled=pulled)


def admitted_from_proto(pb: decode_pb2.Admitted) -> Admitted:
    plan, carried_bytes = convert.plan_from_proto(pb.plan), dict(pb.carried_bytes)
    return value_of(Admitted, pb, plan=plan, carried_bytes=carried_bytes, pulled=_pulled_from_proto(pb))


def _pulled_to_proto(pulled: Pulled | None) -> common_pb2.Pulled | None:
    return None if pulled is None else message_of(common_pb2.Pulled, pulled)


def _pulled_from_proto(pb: decode_pb2.Admitted | prefill_pb2.PrefillResponse) -> Pulled | None:
    return value_of(Pulled, pb.pulled) if pb.HasField("pulled") else None


def _adapter_from_proto(pb: decode_pb2.Start | prefill_pb2.PrefillRequest) -> Adapter | None:
    return convert.adapter_from_proto(pb.adapter) if pb.HasField("adapter") else None


def _source_from_proto(pb: decode_pb2.Start | prefill_pb2.PrefillRequest) -> PullSource | None:
    return convert.source_from_proto(pb.pull_from) if pb.HasField("pull_from") else None


def share_to_proto(share: TenantShare | None) -> common_pb2.TenantShare | None:
    return None if share is None else message_of(common_pb2.TenantShare, share)


def _share_from_proto(pb: decode_pb2.Start | prefill_pb2.PrefillRequest) -> TenantShare | None:
    """Return the share. Raises ProtocolError where nothing could be divided by its weight."""
    if not pb.HasField("share"):
        return None
    share = value_of(TenantShare, pb.share)
    if share.weight <= 0:
        raise ProtocolError(f"share.weight must be above 0, got {share.weight}")
    return share


def output_to_proto(request_id: str, output: Output) -> decode_pb2.RequestOutput:
    return decode_pb2.RequestOutput(
        request_id=request_id,
        token_ids=output.token_ids,
        logprobs=[logprobs_to_proto(entry) for entry in output.logprobs],
        admitted=None if output.admitted is None else admitted_to_proto(output.admitted),
        finished=None if output.finished is None else finish_reason_to_proto(output.finished),
        drafted_tokens=output.drafted_tokens,
        accepted_draft_tokens=output.accepted_draft_tokens,
        prompt_logprobs=prompt_logprobs_to_proto(output.prompt_logprobs),
    )


def output_from_proto(pb: decode_pb2.RequestOutput) -> Output:
    """Return the output. The caller must check `pb.error` first: such an output is no Output."""
    end = pb.WhichOneof("end")
    if end == "error":
        raise ProtocolError(f"request {pb.request_id} ended in an error: {pb.error.message}")
    return Output(
        token_ids=tuple(pb.token_ids),
        logprobs=tuple(logprobs_from_proto(entry) for entry in pb.logprobs),
        admitted=admitted_from_proto(pb.admitted) if pb.HasField("admitted") else None,
        finished=finish_reason_from_proto(pb.finished) if end == "finished" else None,
        drafted_tokens=pb.drafted_tokens,
        accepted_draft_tokens=pb.accepted_draft_tokens,
        prompt_logprobs=prompt_logprobs_from_proto(pb),
    )


def prefill_request_to_proto(
    request: GenerationRequest, rendezvous: Rendezvous, traceparent: str = "", sampling: bytes | None = None
) -> prefill_pb2.PrefillRequest:
    """Return the prefill call of a decode rank's request.

    `sampling` is the serialized message of the router, which is passed on unchanged, with fields of a newer
    router that this rank does not know. If it is None, the message is made of the request's values.
    """
    pb = message_of(
        prefill_pb2.PrefillRequest,
        request,
        prompt_ids=request.all_ids,
        num_output_ids=len(request.output_ids_so_far),
        sampling=sampling_to_proto(request.sampling) if sampling is None else None,
        rendezvous=convert.rendezvous_to_proto(rendezvous),
        traceparent=traceparent,
        pull_from=None if request.pull_from is None else convert.source_to_proto(request.pull_from),
        share=share_to_proto(request.share),
        adapter=None if request.adapter is None else convert.adapter_to_proto(request.adapter),
    )
    if sampling is not None:
        pb.sampling.ParseFromString(sampling)
    return pb


def prefill_request_from_proto(pb: prefill_pb2.PrefillRequest) -> tuple[GenerationRequest, Rendezvous]:
    """Return the request, under plan remote, the only one that calls prefill, and where ranks meet."""
    ids = tuple(pb.prompt_ids)
    prompt_len = len(ids) - pb.num_output_ids
    if prompt_len < 0:
        raise ProtocolError(f"num_output_ids is {pb.num_output_ids} but there are {len(ids)} prompt_ids")
    _check_request_id(pb.request_id)
    request = value_of(
        GenerationRequest,
        pb,
        prompt_ids=ids[:prompt_len],
        sampling=sampling_from_proto(pb.sampling),
        output_ids_so_far=ids[prompt_len:],
        plan=Plan.REMOTE,
        pull_from=_source_from_proto(pb),
        share=_share_from_proto(pb),
        adapter=_adapter_from_proto(pb),
    )
    return request, convert.rendezvous_from_proto(pb.rendezvous)


def prefill_result_to_proto(result: PrefillResult) -> prefill_pb2.PrefillResponse:
    logprobs = result.first_token_logprobs
    sent = None if logprobs is None else logprobs_to_proto(logprobs)
    return message_of(
        prefill_pb2.PrefillResponse,
        result,
        first_token_logprobs=sent,
        prompt_logprobs=prompt_logprobs_to_proto(result.prompt_logprobs),
        pulled=_pulled_to_proto(result.pulled),
    )


def prefill_result_from_proto(pb: prefill_pb2.PrefillResponse) -> PrefillResult:
    has_logprobs = pb.HasField("first_token_logprobs")
    logprobs = logprobs_from_proto(pb.first_token_logprobs) if has_logprobs else None
    packed, pulled = prompt_logprobs_from_proto(pb), _pulled_from_proto(pb)
    return value_of(PrefillResult, pb, first_token_logprobs=logprobs, prompt_logprobs=packed, pulled=pulled)


def _check_request_id(text: str) -> None:
    if not text:
        raise ProtocolError("request_id must not be empty")
