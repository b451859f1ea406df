"""These tests show what SGLang is asked of a prompt's tokens, and tells, in its words and in ours."""

import pytest

from services.engine.paged.model_runner import check_told
from services.engine.sglang.service.request_arguments import (
    check_scored,
    prompt_logprobs_of,
    scoring_arguments,
)
from services.values.errors import InvalidRequest
from services.values.prompt_logprobs import ScoredToken
from services.values.request import GenerationRequest, SamplingParams

# As SGLang 0.5.23 tells of [5, 6, 7, 8] from 1 on: the first one is null.
TOKENS = [[None, 6, None], [-1.5, 7, None], [-0.5, 8, None]]
TOPS = [None, [[-0.25, 3, None], [-1.5, 7, None]], [[-0.5, 8, None], [-0.75, 3, None]]]


def request(start=2, num_top=2, prompt=(5, 6, 7, 8), so_far=()):
    sampling = SamplingParams(prompt_logprobs=num_top, prompt_logprobs_start=start)
    return GenerationRequest("r", prompt, sampling, output_ids_so_far=so_far)


def test_it_is_asked_to_match_no_more_than_may_be_reused():
    assert scoring_arguments(request()) == {
        "return_logprob": True,
        "logprob_start_len": 1,
        "top_logprobs_num": 2,
    }
    assert scoring_arguments(request(start=0))["logprob_start_len"] == 0
    assert scoring_arguments(GenerationRequest("r", (5,), SamplingParams())) == {}


def test_what_is_told_of_a_prompt(subtests):
    # Of a stream that moved its output is prompt to SGLang.
    for so_far in [(), (9, 9)]:
        with subtests.test(so_far=so_far):
            more = [[-9.0, 9, None]] * len(so_far)
            meta = {"input_token_logprobs": TOKENS + more, "input_top_logprobs": TOPS + [[]] * len(more)}
            told = prompt_logprobs_of(request(so_far=so_far), meta)
            check_told(told, request())
            assert list(told.tokens()) == [
                ScoredToken(-1.5, 2, ((3, -0.25), (7, -1.5))),
                ScoredToken(-0.5, 1, ((8, -0.5), (3, -0.75))),
            ]
    with subtests.test("a rank that it does not tell is not known"):
        told = prompt_logprobs_of(request(num_top=0), {"input_token_logprobs": TOKENS})
        assert list(told.tokens()) == [ScoredToken(-1.5, 0, ()), ScoredToken(-0.5, 0, ())]
    with subtests.test("of fewer others those that there are"):
        meta = {"input_token_logprobs": TOKENS, "input_top_logprobs": [None, TOPS[1][:1], TOPS[2]]}
        assert [len(token.top) for token in prompt_logprobs_of(request(), meta).tokens()] == [1, 2]
    with subtests.test("what was not asked for is not told"):
        assert prompt_logprobs_of(GenerationRequest("r", (5,), SamplingParams()), {}) is None


def test_more_than_a_line_holds_is_refused():
    check_scored(request(num_top=20, prompt=(5,) * 9_500))
    with pytest.raises(InvalidRequest, match="sglang tells 200000 at most"):
        check_scored(request(num_top=20, prompt=(5,) * 9_600))
    with pytest.raises(InvalidRequest, match="prompt_logprobs_start"):
        check_scored(request(start=4))
