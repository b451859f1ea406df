import pytest

from services.values.errors import InvalidRequest
from services.values.request import SamplingParams


@pytest.mark.parametrize(
    ("sampling", "name"),
    [
        (SamplingParams(logit_bias=((3, 1.0), (10, 1.0))), "logit_bias"),
        (SamplingParams(bad_token_ids=((9,), (3, 10))), "bad_token_ids"),
    ],
)
def test_ids_outside_the_vocabulary_are_refused_by_name(sampling, name):
    sampling.check_vocabulary(11)
    with pytest.raises(InvalidRequest, match=rf"^sampling\.{name} must be .* below the .* size 10, got 10$"):
        sampling.check_vocabulary(10)


def test_only_bans_of_several_tokens_look_back():
    assert not SamplingParams(bad_token_ids=((1,), (2,)), logit_bias=((1, 2.0),)).heeds_output
    assert SamplingParams(bad_token_ids=((1,), (2, 3))).heeds_output
