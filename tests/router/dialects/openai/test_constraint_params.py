"""These tests show what the answer must be, in the words of several servers."""

import json

import pytest

from router.http.backend import HI, FakeBackend, client, response
from services.values.errors import InvalidRequest
from services.wire.isthmus.v1.common_pb2 import Choice, Constraint

SCHEMA = {"type": "object", "properties": {"größe": {"type": "integer"}}}
OF_SCHEMA = Constraint(json_schema=json.dumps(SCHEMA, ensure_ascii=False))
PATHS = {
    "/v1/chat/completions": {"messages": HI},
    "/v1/completions": {"prompt": "Hi"},
}


async def test_each_way_to_ask(subtests: pytest.Subtests) -> None:
    for path in PATHS:
        for body, expected in [
            ({"response_format": {"type": "text"}}, None),
            ({"response_format": None, "guided_regex": None, "structured_outputs": {}, "grammar": ""}, None),
            (
                {"structured_outputs": {"json": None, "json_object": False, "disable_any_whitespace": True}},
                None,
            ),
            ({"response_format": {"type": "json_object"}}, Constraint(json_object=True)),
            (
                {
                    "response_format": {
                        "type": "json_schema",
                        "json_schema": {"name": "a", "strict": True, "description": "b", "schema": SCHEMA},
                    }
                },
                OF_SCHEMA,
            ),
            ({"guided_json": SCHEMA}, OF_SCHEMA),
            ({"guided_json": OF_SCHEMA.json_schema}, OF_SCHEMA),
            ({"guided_regex": "a+"}, Constraint(regex="a+")),
            ({"guided_choice": ["a", "b"]}, Constraint(choice=Choice(texts=["a", "b"]))),
            ({"guided_grammar": 'root ::= "a"'}, Constraint(grammar='root ::= "a"')),
            ({"structured_outputs": {"json": SCHEMA}}, OF_SCHEMA),
            ({"structured_outputs": {"choice": ["a"]}}, Constraint(choice=Choice(texts=["a"]))),
            ({"structured_outputs": {"json_object": True}}, Constraint(json_object=True)),
            ({"json_schema": json.dumps(SCHEMA, ensure_ascii=False)}, OF_SCHEMA),
            ({"regex": "a+"}, Constraint(regex="a+")),
            ({"ebnf": 'root ::= "a"'}, Constraint(grammar='root ::= "a"')),
            ({"grammar": 'root ::= "a"'}, Constraint(grammar='root ::= "a"')),
        ]:
            with subtests.test(path=path, body=body):
                backend = FakeBackend()
                async with client(backend) as http:
                    answer = await http.post(path, json={**PATHS[path], **body})
                assert answer.status_code == 200
                (request,) = backend.requests
                assert request.sampling.HasField("constraint") == (expected is not None)
                assert request.sampling.constraint == (expected or Constraint())


async def test_what_is_refused_is_told_by_what_the_body_calls_it(subtests: pytest.Subtests) -> None:
    for body, param in [
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}, None),
        ({"guided_json": SCHEMA}, "guided_json"),
        ({"structured_outputs": {"json": SCHEMA}}, "structured_outputs.json"),
    ]:
        with subtests.test(body=body):
            param = param or "response_format"
            refused = InvalidRequest(
                "sampling.constraint.json_schema", 'is not supported: Unimplemented keys: ["not"]'
            )
            async with client(FakeBackend(refused)) as http:
                answer = await http.post("/v1/completions", json={"prompt": "Hi", **body})
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, param)
            assert error["message"] == f'{param} is not supported: Unimplemented keys: ["not"]'
    with subtests.test("a name that is no text is refused in one that is"):
        body = r'{"prompt": "Hi", "structured_outputs": {"\ud800": 1}}'
        async with client(FakeBackend()) as http:
            answer = await http.post("/v1/completions", content=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, r"structured_outputs.\ud800")
    with subtests.test("what else is refused keeps its name and a stream its beginning"):
        body = {"prompt": "Hi", "regex": "a", "stream": True}
        async with client(FakeBackend(InvalidRequest("sampling.min_tokens", "must be 0"))) as http:
            answer = await http.post("/v1/completions", json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "min_tokens")
        broken = FakeBackend(
            response("Hello", [72]), InvalidRequest("sampling.constraint", ": nothing goes on")
        )
        async with client(broken) as http:
            answer = await http.post("/v1/completions", json=body)
        assert "Hello" in answer.text and '"regex nothing goes on"' in answer.text
        assert broken.closed.is_set()
