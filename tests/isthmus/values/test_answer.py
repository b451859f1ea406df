"""These tests show what responses come to."""

from isthmus.values.answer import Growing
from services.wire.isthmus.v1.common_pb2 import FINISH_REASON_LENGTH, TokenLogprob, TokenLogprobs
from services.wire.isthmus.v1.generation_pb2 import Finish, GenerateResponse


def test_what_is_told_of_a_long_prompt_comes_in_several_responses():
    growing = Growing()
    for token_id in (1, 2, 3):
        scored = TokenLogprobs(chosen=TokenLogprob(token_id=token_id, logprob=-0.5, rank=2))
        growing.add(GenerateResponse(request_id="r", prompt_logprobs=[scored]))
    growing.add(GenerateResponse(request_id="r", text="a", finish=Finish(reason=FINISH_REASON_LENGTH)))
    told = growing.answer().prompt_logprobs
    assert [(token.chosen.token_id, token.chosen.rank) for token in told] == [(1, 2), (2, 2), (3, 2)]
