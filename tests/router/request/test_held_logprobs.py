import pytest

from router.dialects.prompts_told import scored
from services.router.request.answers import HeldLogprobs
from services.values.errors import InvalidRequest
from services.wire.isthmus.v1.generation_pb2 import GenerateResponse

ANSWERS = GenerateResponse(logprobs=[scored(1, -1.0), scored(2, -1.0)])
PROMPTS = GenerateResponse(prompt_logprobs=[scored(1, -1.0, 1, 5, 6)])


def test_each_token_counts_with_the_others_beside_it_and_a_prompt_as_often_as_it_is_told():
    held = HeldLogprobs()
    held.add(GenerateResponse(text="a"))
    assert held.count == 0
    held.add(ANSWERS)
    held.add(PROMPTS)
    assert held.count == 2 + 3
    held = HeldLogprobs(times_prompt=4, most=14)
    held.add(PROMPTS)
    held.add(ANSWERS)
    assert held.count == 14
    with pytest.raises(InvalidRequest, match=r"sampling\.logprobs .* 14 of them"):
        held.add(ANSWERS)
