"""What one message to a router holds."""

from services.decode import attach
from services.wire.isthmus.v1.common_pb2 import PackedLogprobs
from services.wire.isthmus.v1.decode_pb2 import RequestOutput


def test_outputs_that_tell_of_long_prompts_take_messages_of_their_own(monkeypatch):
    monkeypatch.setattr(attach, "MAX_PROMPT_BYTES", 250)
    sizes = [0, 100, 100, 100, 0, 900, 100, 100]
    outputs = [RequestOutput(request_id=str(nth)) for nth in range(len(sizes))]
    for output, size in zip(outputs, sizes, strict=True):
        if size:
            output.prompt_logprobs.CopyFrom(PackedLogprobs(logprobs=bytes(size)))
    messages, left = [], outputs
    while left:
        fitting, left = attach._fitting(left)
        messages.append([output.request_id for output in fitting])
    assert messages == [["0", "1", "2"], ["3", "4"], ["5"], ["6", "7"]]
