import pytest

from services.router.request.answers import counts_of
from services.values.errors import InvalidRequest
from services.wire.isthmus.v1.generation_pb2 import GenerateRequest

REFUSED = [
    ({"n": 0}, "^n must be between 1 and 128, got 0"),
    ({"n": 129}, "^n must be between 1 and 128, got 129"),
    ({"n": 3, "best_of": 2}, "^best_of must be between n, 3, and 128, got 2"),
    ({"best_of": 129}, "^best_of must be between n, 1, and 128, got 129"),
]


def test_how_many_are_generated_and_answered(subtests):
    for fields, counts in [
        ({}, (1, 1)),
        ({"n": 128}, (128, 128)),
        ({"best_of": 3}, (3, 1)),
        ({"n": 2, "best_of": 2}, (2, 2)),
    ]:
        with subtests.test(fields=fields, counts=counts):
            assert counts_of(GenerateRequest(**fields)) == counts
    for fields, says in REFUSED:
        with subtests.test(fields=fields, says=says), pytest.raises(InvalidRequest, match=says):
            counts_of(GenerateRequest(**fields))
