"""What is wrong with a constraint is told by what the body of each API calls it."""

import pytest

from router.http.backend import HI, FakeBackend, post
from services.values.errors import InvalidRequest

SCHEMA = {"type": "json_schema", "schema": {"uniqueItems": True}}


async def test_a_constraint_is_named(subtests: pytest.Subtests) -> None:
    for stream in [False, True]:
        for path, body, param in [
            ("/v1/responses", {"input": "Hi", "text": {"format": {**SCHEMA, "name": "n"}}}, "text.format"),
            ("/v1/responses", {"input": "Hi", "guided_json": {}}, "guided_json"),
            (
                "/v1/messages",
                {"messages": HI, "max_tokens": 5, "output_config": {"format": SCHEMA}},
                "output_config.format",
            ),
            ("/v1/messages", {"messages": HI, "max_tokens": 5, "output_format": SCHEMA}, "output_format"),
            (
                "/generate",
                {"text": "Hi", "sampling_params": {"json_schema": "{}"}},
                "sampling_params.json_schema",
            ),
        ]:
            with subtests.test(stream=stream, path=path):
                backend = FakeBackend(
                    InvalidRequest("sampling.constraint.json_schema", "asks for uniqueItems")
                )
                answer = await post(backend, path, {**body, "stream": stream})
                assert answer.status_code == 400
                assert answer.json()["error"]["message"] == f"{param} asks for uniqueItems"
                assert backend.requests[0].sampling.constraint.json_schema
