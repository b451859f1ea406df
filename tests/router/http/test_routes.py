import pytest
from prometheus_client import CollectorRegistry

from router.http.backend import HI, FakeBackend, client
from router.http.test_leaving import PROMPTS
from services.router.http.bounded_connection import APIS, HttpMetrics


async def test_models_and_health() -> None:
    async with client(FakeBackend()) as http:
        models = (await http.get("/v1/models")).json()
        assert (await http.get("/v1/models/tiny")).json() == models["data"][0]
        assert (await http.get("/v1/models/")).json() == models
        unknown = await http.get("/v1/models/tin")
        assert (await http.get("/health")).status_code == 200
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, 404)
    async with client(FakeBackend(models=("Qwen/Qwen3-8B",))) as http:
        assert (await http.get("/v1/models/Qwen/Qwen3-8B")).json()["id"] == "Qwen/Qwen3-8B"
    assert models["object"] == "list"
    assert models["data"] == [
        {"id": "tiny", "object": "model", "created": 1234, "owned_by": "isthmus", "max_model_len": 512}
    ]
    backend = FakeBackend()
    backend.unusable = "no decode rank is registered"
    async with client(backend) as http:
        answer = await http.get("/health")
    assert (answer.status_code, answer.json()["error"]["message"]) == (503, backend.unusable)
    async with client(FakeBackend(models=())) as http:
        assert (await http.get("/v1/models")).json()["data"] == []


async def test_paths_that_are_served_and_others(subtests: pytest.Subtests) -> None:
    with subtests.test("unknown paths and methods answer with error objects"):
        async with client(FakeBackend()) as http:
            for answer, status in (
                (await http.get("/v1/nothing"), 404),
                (await http.get("/v1/completions"), 405),
            ):
                assert answer.status_code == status
                assert answer.json()["error"]["code"] == status
    with subtests.test("a path with a slash at its end is served and never redirected"):
        async with client(FakeBackend()) as http:
            for path in ("/v1/models/", "/v1/models/tiny/", "/health/", "/v1/models//"):
                assert (await http.get(path)).status_code == 200, path
            answer = await http.post("/v1/chat/completions/", json={"model": "tiny", "messages": HI})
            assert answer.status_code == 200
            assert (await http.get("/nothing/")).status_code == 404


async def test_calls_are_counted_by_api() -> None:
    registry = CollectorRegistry()
    async with client(FakeBackend(), count=HttpMetrics(registry).count_call) as http:
        for path, body in PROMPTS.items():
            assert (await http.post(path, json=body)).status_code == 200
            assert (await http.post(path, json={})).status_code == 400
    for api in APIS:
        assert registry.get_sample_value("isthmus_http_calls_total", {"api": api}) == 2
    assert len(APIS) == len(PROMPTS)
