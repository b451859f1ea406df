"""These tests show what every dialect says of sampling in the same words."""

from typing import Any

import pytest

from services.router.dialects.json_body import Body, InvalidParameter
from services.router.dialects.sampling import read_sampling
from services.wire.isthmus.v1.common_pb2 import SamplingParams


def read(**body: Any) -> SamplingParams:
    return read_sampling(Body(body, "params."), None, None)


def test_what_is_said_of_sampling(subtests: pytest.Subtests) -> None:
    with subtests.test("biases are by ids and bad words are texts"):
        biased = read(logit_bias={"5": -100, "0": 1.5, "4294967295": None}, bad_words=["a", "b c"])
        assert dict(biased.logit_bias) == {5: -100.0, 0: 1.5, 2**32 - 1: 0.0}
        assert list(biased.bad_words) == ["a", "b c"]
    for name in ["include_stop_str_in_output", "no_stop_trim"]:
        with subtests.test(name=name):
            assert read(**{name: True}).include_stop_str_in_output
    for nothing in [{}, {"logit_bias": None, "bad_words": None}, {"logit_bias": {}}, {"logit_bias": []}]:
        with subtests.test(nothing=nothing):
            assert read(**nothing) == SamplingParams()


def test_what_is_wrong_is_told_by_its_name(subtests: pytest.Subtests) -> None:
    for body, param in [
        ({"logit_bias": [[5, 1]]}, "params.logit_bias"),
        ({"logit_bias": {"five": 1}}, "params.logit_bias"),
        ({"logit_bias": {"-1": 1}}, "params.logit_bias"),
        ({"logit_bias": {"4294967296": 1}}, "params.logit_bias"),
        ({"logit_bias": {"²": 1}}, "params.logit_bias"),
        ({"logit_bias": {"9" * 5000: 1}}, "params.logit_bias"),
        ({"logit_bias": {"0" * 10 + "9" * 10: 1}}, "params.logit_bias"),
        ({"logit_bias": {"0" * 5000: 1}}, "params.logit_bias"),
        ({"logit_bias": {"5": True}}, "params.logit_bias.5"),
        ({"logit_bias": {"5": "1"}}, "params.logit_bias.5"),
        ({"bad_words": "a"}, "params.bad_words"),
        ({"bad_words": ["a", 5]}, "params.bad_words[1]"),
        ({"bad_words": ["a"] * 65}, "params.bad_words"),
    ]:
        with subtests.test(body=body):
            with pytest.raises(InvalidParameter) as caught:
                read(**body)
            assert caught.value.param == param
