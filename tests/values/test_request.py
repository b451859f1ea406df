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


def test_the_field_of_a_peers_error_is_read_from_its_sentence(subtests):
    for field, problem in [
        ("sampling.top_p", "must be above 0"),
        ("sampling.constraint", ": nothing goes on"),
        ("chat.messages[2].content", "cannot be used"),
        ("prompt", "must hold at least one token"),
        ("prompt[12]", "must be below the vocabulary's size 5, got 9"),
        ("token_ids.ids[3]", "must be below the vocabulary's size 5, got 9"),
        ("", "there is no such thing"),
    ]:
        with subtests.test(field=field):
            sent = InvalidRequest(field, problem) if field else InvalidRequest(problem)
            error = InvalidRequest.received(str(sent))
            assert (error.field, error.problem, str(error)) == (field, problem, str(sent))
