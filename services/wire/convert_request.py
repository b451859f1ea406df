"""Request values to protobuf and back: sampling, logprobs, commands, outputs, the prefill call.

What a client can get wrong (sampling) raises InvalidRequest and names the field; what only our own
services write raises ProtocolError, as in convert.py. Probabilities and penalties are 32-bit floats
on the wire, so they come back rounded to that.
"""

from typing import Any

from services.values.errors import InvalidRequest, ProtocolError
from services.values.rank import Generation, Plan, Rendezvous
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
from services.wire import convert
from services.wire.isthmus.v1 import common_pb2, decode_pb2, prefill_pb2

_FINISH_TO_PROTO = {
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORTED: common_pb2.FINISH_REASON_ABORTED,
    FinishReason.CAPACITY: common_pb2.FINISH_REASON_CAPACITY,
}
_FINISH_FROM_PROTO: dict[int, FinishReason] = {number: reason for reason, number in _FINISH_TO_PROTO.items()}

# Fields that carry presence on the wire; left out of SamplingParams' arguments when unset, so that
# the dataclass stays the only list of defaults.
_OPTIONAL_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "max_tokens",
    "min_tokens",
    "repetition_penalty",
    "logprobs",
)
_PLAIN_SAMPLING = ("ignore_eos", "frequency_penalty", "presence_penalty")
_REPEATED_SAMPLING = ("stop", "stop_token_ids")

# On the wire 0 seconds means "no deadline"; a deadline that has just passed must not become none.
_LEAST_TIMEOUT_S = 1e-9


def sampling_to_proto(sampling: SamplingParams) -> common_pb2.SamplingParams:
    """Raises InvalidRequest when a number does not fit its field (a top_k of 2**32, say)."""
    pb = common_pb2.SamplingParams()
    for name in (*_OPTIONAL_SAMPLING, *_PLAIN_SAMPLING, *_REPEATED_SAMPLING):
        value = getattr(sampling, name)
        if value is None:
            continue
        try:
            if name in _REPEATED_SAMPLING:
                getattr(pb, name).extend(value)
            else:
                setattr(pb, name, value)
        except ValueError as error:  # protobuf's own sentence does not name the field
            raise InvalidRequest(f"sampling.{name}: {error}") from error
    return pb


def sampling_from_proto(pb: common_pb2.SamplingParams) -> SamplingParams:
    """Fills in the defaults; the seed is 0 when unset, so a router draws one beforehand.

    Raises InvalidRequest, naming the field, when a value is out of its range or not a number.
    """
    values: dict[str, Any] = {name: getattr(pb, name) for name in _PLAIN_SAMPLING}
    values |= {name: getattr(pb, name) for name in _OPTIONAL_SAMPLING if pb.HasField(name)}
    values |= {name: tuple(getattr(pb, name)) for name in _REPEATED_SAMPLING}
    return SamplingParams(**values)


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


def start_to_proto(command: StartCommand, decode_generation: Generation) -> decode_pb2.Start:
    """`decode_generation` is the life of the decode rank that the command is meant for."""
    request = command.request
    return decode_pb2.Start(
        request_id=request.request_id,
        prompt_ids=request.prompt_ids,
        output_ids_so_far=request.output_ids_so_far,
        sampling=sampling_to_proto(request.sampling),
        cache_salt=request.cache_salt,
        priority=request.priority,
        plan=convert.plan_to_proto(request.plan),
        prefill=None if command.prefill is None else convert.address_to_proto(command.prefill),
        decode_generation=decode_generation,
        timeout_s=0.0 if command.timeout_s is None else max(command.timeout_s, _LEAST_TIMEOUT_S),
        eos_token_ids=request.eos_token_ids,
        traceparent=command.traceparent,
    )


def start_from_proto(pb: decode_pb2.Start) -> StartCommand:
    """The receiver compares `pb.decode_generation` with its own; the command does not carry it."""
    plan = convert.plan_from_proto(pb.plan)
    if plan is Plan.REMOTE and not pb.HasField("prefill"):
        raise ProtocolError("start.prefill is unset under plan remote")
    if convert.finite("start.timeout_s", pb.timeout_s) < 0:
        raise ProtocolError(f"start.timeout_s must not be negative, got {pb.timeout_s}")
    request = GenerationRequest(
        request_id=_request_id(pb.request_id),
        prompt_ids=tuple(pb.prompt_ids),
        sampling=sampling_from_proto(pb.sampling),
        output_ids_so_far=tuple(pb.output_ids_so_far),
        cache_salt=pb.cache_salt,
        priority=pb.priority,
        plan=plan,
        eos_token_ids=tuple(pb.eos_token_ids),
    )
    return StartCommand(
        request=request,
        prefill=convert.address_from_proto(pb.prefill) if pb.HasField("prefill") else None,
        timeout_s=min(pb.timeout_s, MAX_TIMEOUT_S) or None,
        traceparent=pb.traceparent,
    )


def admitted_to_proto(admitted: Admitted) -> decode_pb2.Admitted:
    return decode_pb2.Admitted(
        prompt_tokens=admitted.prompt_tokens,
        decode_prefix_len=admitted.decode_prefix_len,
        prefill_prefix_len=admitted.prefill_prefix_len,
        computed_tokens=admitted.computed_tokens,
        kv_bytes_moved=admitted.kv_bytes_moved,
        kv_bytes_prompt=admitted.kv_bytes_prompt,
        decode_queue_s=admitted.decode_queue_s,
        prefill_queue_s=admitted.prefill_queue_s,
        prefill_compute_s=admitted.prefill_compute_s,
        transfer_s=admitted.transfer_s,
        plan=convert.plan_to_proto(admitted.plan),
        first_decode_step_s=admitted.first_decode_step_s,
    )


def admitted_from_proto(pb: decode_pb2.Admitted) -> Admitted:
    return Admitted(
        prompt_tokens=pb.prompt_tokens,
        decode_prefix_len=pb.decode_prefix_len,
        prefill_prefix_len=pb.prefill_prefix_len,
        computed_tokens=pb.computed_tokens,
        kv_bytes_moved=pb.kv_bytes_moved,
        kv_bytes_prompt=pb.kv_bytes_prompt,
        decode_queue_s=convert.finite("admitted.decode_queue_s", pb.decode_queue_s),
        prefill_queue_s=convert.finite("admitted.prefill_queue_s", pb.prefill_queue_s),
        prefill_compute_s=convert.finite("admitted.prefill_compute_s", pb.prefill_compute_s),
        transfer_s=convert.finite("admitted.transfer_s", pb.transfer_s),
        plan=convert.plan_from_proto(pb.plan),
        first_decode_step_s=convert.finite("admitted.first_decode_step_s", pb.first_decode_step_s),
    )


def output_to_proto(request_id: str, output: Output) -> decode_pb2.RequestOutput:
    return decode_pb2.RequestOutput(
        request_id=request_id,
        token_ids=output.token_ids,
        logprobs=[logprobs_to_proto(entry) for entry in output.logprobs],
        admitted=None if output.admitted is None else admitted_to_proto(output.admitted),
        finished=None if output.finished is None else finish_reason_to_proto(output.finished),
    )


def output_from_proto(pb: decode_pb2.RequestOutput) -> Output:
    """The caller looks for `pb.error` first: an output that ends in an error is no Output."""
    end = pb.WhichOneof("end")
    if end == "error":
        raise ProtocolError(f"request {pb.request_id} ended in an error: {pb.error.message}")
    return Output(
        token_ids=tuple(pb.token_ids),
        logprobs=tuple(logprobs_from_proto(entry) for entry in pb.logprobs),
        admitted=admitted_from_proto(pb.admitted) if pb.HasField("admitted") else None,
        finished=finish_reason_from_proto(pb.finished) if end == "finished" else None,
    )


def prefill_request_to_proto(
    request: GenerationRequest, rendezvous: Rendezvous, traceparent: str = ""
) -> prefill_pb2.PrefillRequest:
    return prefill_pb2.PrefillRequest(
        request_id=request.request_id,
        prompt_ids=request.all_ids,
        num_output_ids=len(request.output_ids_so_far),
        sampling=sampling_to_proto(request.sampling),
        cache_salt=request.cache_salt,
        priority=request.priority,
        rendezvous=convert.rendezvous_to_proto(rendezvous),
        eos_token_ids=request.eos_token_ids,
        traceparent=traceparent,
    )


def prefill_request_from_proto(pb: prefill_pb2.PrefillRequest) -> tuple[GenerationRequest, Rendezvous]:
    """The request comes back under plan remote: no other plan calls prefill."""
    ids = tuple(pb.prompt_ids)
    prompt_len = len(ids) - pb.num_output_ids
    if prompt_len < 0:
        raise ProtocolError(f"num_output_ids is {pb.num_output_ids} but there are {len(ids)} prompt_ids")
    request = GenerationRequest(
        request_id=_request_id(pb.request_id),
        prompt_ids=ids[:prompt_len],
        sampling=sampling_from_proto(pb.sampling),
        output_ids_so_far=ids[prompt_len:],
        cache_salt=pb.cache_salt,
        priority=pb.priority,
        plan=Plan.REMOTE,
        eos_token_ids=tuple(pb.eos_token_ids),
    )
    return request, convert.rendezvous_from_proto(pb.rendezvous)


def prefill_result_to_proto(result: PrefillResult) -> prefill_pb2.PrefillResponse:
    logprobs = result.first_token_logprobs
    return prefill_pb2.PrefillResponse(
        first_token_id=result.first_token_id,
        first_token_logprobs=None if logprobs is None else logprobs_to_proto(logprobs),
        prefill_prefix_len=result.prefill_prefix_len,
        computed_tokens=result.computed_tokens,
        kv_bytes_moved=result.kv_bytes_moved,
        queue_s=result.queue_s,
        compute_s=result.compute_s,
    )


def prefill_result_from_proto(pb: prefill_pb2.PrefillResponse) -> PrefillResult:
    has_logprobs = pb.HasField("first_token_logprobs")
    return PrefillResult(
        first_token_id=pb.first_token_id,
        first_token_logprobs=logprobs_from_proto(pb.first_token_logprobs) if has_logprobs else None,
        prefill_prefix_len=pb.prefill_prefix_len,
        computed_tokens=pb.computed_tokens,
        kv_bytes_moved=pb.kv_bytes_moved,
        queue_s=convert.finite("prefill_result.queue_s", pb.queue_s),
        compute_s=convert.finite("prefill_result.compute_s", pb.compute_s),
    )


def _request_id(text: str) -> str:
    if not text:
        raise ProtocolError("request_id must not be empty")
    return text
