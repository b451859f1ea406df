import pytest

from services.router.request.answers.answers import counts_of
from services.values.errors import InvalidRequest
from services.wire.isthmus.v1.generation_pb2 import GenerateRequest


@pytest.mark.parametrize(
    ("fields", "counts"),
    [({}, (1, 1)), ({"n": 128}, (128, 128)), ({"best_of": 3}, (3, 1)), ({"n": 2, "best_of": 2}, (2, 2))],
)
def test_how_many_are_generated_and_answered(fields, counts):
    assert counts_of(GenerateRequest(**fields)) == counts


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"n": 0}, "^n must be between 1 and 128, got 0"),
        ({"n": 129}, "^n must be between 1 and 128, got 129"),
        ({"n": 3, "best_of": 2}, "^best_of must be between n, 3, and 128, got 2"),
        ({"best_of": 129}, "^best_of must be between n, 1, and 128, got 129"),
    ],
)
def test_what_cannot_be_is_refused_by_name(fields, says):
    with pytest.raises(InvalidRequest, match=says):
        counts_of(GenerateRequest(**fields))
