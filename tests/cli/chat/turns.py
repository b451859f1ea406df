"""Answers as the tests of the chat have them."""

from services.cli.conversation import StreamedAnswer
from services.wire.isthmus.v1 import common_pb2, generation_pb2

DECODE = common_pb2.RankId(worker="decode", rank=1)
PREFILL = common_pb2.RankId(worker="prefill", rank=0)


class Clock:
    """Tells what it is set to."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def finish(prompt=255, found=192, moved=40 << 10, reason=common_pb2.FINISH_REASON_STOP):
    local = moved == 0
    usage = generation_pb2.Usage(
        prompt_tokens=prompt,
        completion_tokens=5,
        decode_prefix_len=found,
        delta_tokens=0 if local else prompt - found,
        kv_bytes_moved=moved,
    )
    placement = generation_pb2.Placement(
        decode=DECODE,
        prefill=None if local else PREFILL,
        plan=common_pb2.PLAN_LOCAL if local else common_pb2.PLAN_REMOTE,
        predicted_prefix_len=208,
        reason="pinned",
    )
    stages = generation_pb2.StageTimes(
        tokenize_s=0.002, route_s=0.00001, prefill_compute_s=0.012, transfer_s=0.004, first_token_s=0.018
    )
    return generation_pb2.Finish(
        reason=reason, usage=usage, placement=placement, stages=stages, answer_id="a1"
    )


def answered(*responses, clock=None):
    """Each response comes half a second after the one before."""
    clock = clock or Clock()
    answer = StreamedAnswer(clock)
    for fields in responses:
        clock.now += 0.5
        answer.take(generation_pb2.GenerateResponse(**fields))
    return answer


def plain_answer(**fields):
    return answered(
        {"text": "Hi", "token_ids": [7, 8]}, {"token_ids": [9, 10, 11], "finish": finish(**fields)}
    )
