"""Observed requests are messages here, and messages observed requests."""

from services.router.replay.observed import Fleet, Observation, Observed
from services.wire import convert
from services.wire.isthmus.v1 import generation_pb2


def load_to_proto(observation: Observation) -> generation_pb2.ModelLoad:
    """Return the message of an observation whose times are before 0."""
    fleet = observation.fleet
    return generation_pb2.ModelLoad(
        model=fleet.model,
        prefill_ranks=fleet.prefill,
        decode_ranks=fleet.decode,
        routers=fleet.routers,
        block_tokens=fleet.block_tokens,
        chunk_tokens=fleet.chunk_tokens,
        prefill_pool_tokens=fleet.prefill_pool_tokens,
        decode_pool_tokens=fleet.decode_pool_tokens,
        kv_bytes_per_token=fleet.kv_bytes_per_token,
        carried_bytes=fleet.carried_bytes,
        plans=sorted(map(convert.plan_to_proto, fleet.plans)),
        window_s=fleet.window_s,
        tokens_per_s=fleet.tokens_per_s,
        step_s=fleet.step_s,
        computes_in_order=fleet.computes_in_order,
        requests=map(_request_to_proto, observation.requests),
    )


def _request_to_proto(seen: Observed) -> generation_pb2.ObservedRequest:
    return generation_pb2.ObservedRequest(
        age_s=-seen.arrival_s,
        prompt_tokens=seen.prompt_tokens,
        output_tokens=seen.output_tokens,
        computed_tokens=seen.computed_tokens,
        reused_tokens=seen.reused_tokens,
        moved_tokens=seen.moved_tokens,
        ttft_s=seen.ttft_s,
        duration_s=seen.duration_s,
        queue_s=seen.queue_s,
        compute_s=seen.compute_s,
        transfer_s=seen.transfer_s,
        remote=seen.is_remote,
        running=not seen.is_over,
        conversation=seen.conversation,
        blocks=seen.blocks,
    )


def load_from_proto(message: generation_pb2.ModelLoad) -> Observation:
    fleet = Fleet(
        message.model,
        message.prefill_ranks,
        message.decode_ranks,
        message.routers,
        message.block_tokens,
        message.chunk_tokens,
        message.prefill_pool_tokens,
        message.decode_pool_tokens,
        message.kv_bytes_per_token,
        message.carried_bytes,
        frozenset(map(convert.plan_from_proto, message.plans)),
        message.window_s,
        message.tokens_per_s,
        message.step_s,
        message.computes_in_order,
    )
    return Observation(fleet, [_request_from_proto(request) for request in message.requests])


def _request_from_proto(message: generation_pb2.ObservedRequest) -> Observed:
    return Observed(
        -message.age_s,
        message.prompt_tokens,
        message.output_tokens,
        message.computed_tokens,
        message.reused_tokens,
        message.moved_tokens,
        message.ttft_s,
        message.duration_s,
        message.queue_s,
        message.compute_s,
        message.transfer_s,
        message.remote,
        not message.running,
        message.conversation,
        list(message.blocks),
    )
