import pytest

from services.values.errors import InvalidRequest
from services.values.request import SamplingParams


def test_ids_are_within_the_vocabulary_and_bans_of_several_look_back(subtests):
    for sampling, name in [
        (SamplingParams(logit_bias=((3, 1.0), (10, 1.0))), "logit_bias"),
        (SamplingParams(bad_token_ids=((9,), (3, 10))), "bad_token_ids"),
    ]:
        with subtests.test(sampling=sampling):
            sampling.check_vocabulary(11)
            with pytest.raises(
                InvalidRequest, match=rf"^sampling\.{name} must be .* below the .* size 10, got 10$"
            ):
                sampling.check_vocabulary(10)
    with subtests.test("only bans of several tokens look back"):
        assert not SamplingParams(bad_token_ids=((1,), (2,)), logit_bias=((1, 2.0),)).heeds_output
        assert SamplingParams(bad_token_ids=((1,), (2, 3))).heeds_output
