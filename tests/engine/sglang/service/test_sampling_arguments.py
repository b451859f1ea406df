"""Our sampling parameters as SGLang's, and what it does not offer."""

from dataclasses import replace

import pytest

from services.engine.sglang.service.request_arguments import (
    check_resumption,
    check_sampling,
    sampling_arguments,
)
from services.values.errors import InvalidRequest, Unavailable
from services.values.request import Constraint, ConstraintKind, GenerationRequest, SamplingParams


def test_what_sglang_cannot_give_is_refused(subtests):
    for sampling in [
        SamplingParams(logprobs=0),
        SamplingParams(min_tokens=1),
        SamplingParams(bad_token_ids=((7,), (8, 9))),
        SamplingParams(bad_token_ids=((7,),), constraint=Constraint(ConstraintKind.JSON_OBJECT)),
    ]:
        with subtests.test(sampling=sampling):
            with pytest.raises(InvalidRequest, match="sglang"):
                check_sampling(sampling)
            check_sampling(SamplingParams(temperature=0.7, seed=3, top_k=5))


def test_sampling_as_sglangs_arguments(subtests):
    for max_tokens, so_far, expected in [(10, 0, 10), (10, 4, 6), (None, 4, 91), (500, 0, 95)]:
        with subtests.test(max_tokens=max_tokens, so_far=so_far, expected=expected):
            request = GenerationRequest(
                "r", (1, 2, 3, 4, 5), SamplingParams(max_tokens=max_tokens), output_ids_so_far=(9,) * so_far
            )
            assert sampling_arguments(request, 100)["max_new_tokens"] == expected
    with subtests.test("stop tokens end it unless it is to go on"):
        sampling = SamplingParams(stop_token_ids=(7,))
        request = GenerationRequest("r", (1,), sampling, eos_token_ids=(2,))
        assert sampling_arguments(request, 100)["stop_token_ids"] == [2, 7]
        request = GenerationRequest(
            "r", (1,), SamplingParams(stop_token_ids=(7,), ignore_eos=True), eos_token_ids=(2,)
        )
        assert sampling_arguments(request, 100)["stop_token_ids"] == [7]
    with subtests.test("biases are sglangs and a ban outweighs every logit"):
        sampling = SamplingParams(logit_bias=((3, -2.0), (7, 5.0)), bad_token_ids=((7,),))
        check_sampling(sampling)
        assert sampling_arguments(GenerationRequest("r", (1,), sampling), 100)["logit_bias"] == {
            "3": -2.0,
            "7": -1e30,
        }
        assert "logit_bias" not in sampling_arguments(GenerationRequest("r", (1,), SamplingParams()), 100)
    for constraint, expected in [
        (Constraint(ConstraintKind.JSON_OBJECT), {"json_schema": '{"type":"object"}'}),
        (Constraint(ConstraintKind.JSON_SCHEMA, ('{"const":1}',)), {"json_schema": '{"const":1}'}),
        (Constraint(ConstraintKind.REGEX, ("a+",)), {"regex": "a+"}),
        (Constraint(ConstraintKind.GRAMMAR, ('root ::= "a"',)), {"ebnf": 'root ::= "a"'}),
        (Constraint(ConstraintKind.CHOICE, ("a", 'b"', "a")), {"ebnf": 'start: "a" | "b\\""'}),
        (None, {}),
    ]:
        with subtests.test(constraint=constraint, expected=expected):
            request = GenerationRequest("r", (1,), SamplingParams(constraint=constraint))
            check_sampling(request.sampling)
            arguments = sampling_arguments(request, 100)
            assert {name: arguments.get(name) for name in expected} == expected
            assert len({"json_schema", "regex", "ebnf"}.intersection(arguments)) == len(expected)


def test_what_cannot_be_taken_up_from_another_rank(subtests):
    for name in ["frequency_penalty", "presence_penalty", "repetition_penalty"]:
        with subtests.test(name=name):
            penalized = SamplingParams(**{name: 0.5})
            moved = GenerationRequest("r", (1, 2), penalized, output_ids_so_far=(9,))
            with pytest.raises(Unavailable, match="penalties or a constraint"):
                check_resumption(moved)
            check_resumption(replace(moved, output_ids_so_far=()))
            check_resumption(replace(moved, sampling=SamplingParams(temperature=0.7)))
    with subtests.test("a constraint is begun by one rank alone"):
        # To SGLang what was generated elsewhere is prompt.
        constrained = SamplingParams(constraint=Constraint(ConstraintKind.REGEX, ("ab",)))
        moved = GenerationRequest("r", (1, 2), constrained, output_ids_so_far=(9,))
        with pytest.raises(Unavailable, match="penalties or a constraint"):
            check_resumption(moved)
        check_resumption(replace(moved, output_ids_so_far=()))
