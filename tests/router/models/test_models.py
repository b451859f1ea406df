"""The models of a router, with generators that compute nothing."""

from collections.abc import Mapping
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from router.http.backend import FakeBackend, client
from services.router.dialects.sampling import SamplingDefaults
from services.router.models import Models, ModelsCollector
from services.router.served_model import Model
from services.values.adapter import model_and_adapter
from services.values.errors import NotFound, Unavailable
from services.wire.isthmus.v1 import generation_pb2
from services.wire.isthmus.v1.generation_pb2 import GenerateRequest


class Ranks:
    """In the place of a cluster: only whether it has ranks matters."""

    def __init__(self, number: int) -> None:
        self.number = number

    def ranks(self, role: object) -> range:
        return range(self.number)


class Backend(FakeBackend):
    def __init__(self, name: str, context: int) -> None:
        super().__init__()
        self.name, self.context = name, context

        self.adapters: dict[str, int] = {}  # With the numbers of their ranks.

    def list_models(self) -> generation_pb2.ListModelsResponse:
        ranks = {"": 2, **self.adapters}
        models = [
            generation_pb2.Model(
                id=f"{self.name}:{name}" if name else self.name,
                max_context_tokens=self.context,
                decode_ranks=number,
                base=self.name if name else "",
            )
            for name, number in ranks.items()
        ]
        return generation_pb2.ListModelsResponse(models=models)

    def check_usable(self, model: str = "") -> None:
        super().check_usable()
        if (name := model_and_adapter(model, self.name)) and name not in self.adapters:
            raise NotFound(name)


def model(name: str, ranks: int = 2, context: int = 512, **defaults: Any) -> Model:
    cluster: Any = Ranks(ranks)
    backend: Any = Backend(name, context)
    return Model(name, backend, cluster, SamplingDefaults(**defaults), "", CollectorRegistry())


def served(
    *others: Model, aliases: Mapping[str, Mapping[str, float]], failed: tuple[str, ...] = ()
) -> Models:
    models = Models()
    models.open(model("old"))
    models.set({other.name: other for other in others}, aliases, failed)
    return models


def ask(name: str, **fields: str) -> GenerateRequest:
    return GenerateRequest(model=name, **fields)


def own_side(models: Models, name: str) -> GenerateRequest:
    """A request to the alias whose own side is this model."""
    for number in range(100):
        request = ask("both", conversation_id=str(number))
        if models.take(request).name == name:
            models.taken.clear()
            return ask("both", conversation_id=str(number))
    raise AssertionError(name)


def test_a_call_goes_to_the_model_that_it_names(subtests: pytest.Subtests) -> None:
    new = model("new", temperature=0.5, top_k=7)
    models = served(new, aliases={"both": {"old": 1, "new": 1}}, failed=("broken",))
    with subtests.test("by its name, with that model's defaults"):
        request = ask("new", text="Hi")
        request.sampling.top_k = 3
        assert models.take(request) is new
        assert (request.model, request.sampling.temperature, request.sampling.top_k) == ("new", 0.5, 3)
    with subtests.test("to the default, which refuses unknown names"):
        assert models.take(ask("")) is models.take(ask("unknown")) is models.default
    with subtests.test("an alias is replaced in all prompts of the call"):
        requests = own_side(models, "new"), ask("both", conversation_id="another")
        assert models.take(*requests) is new
        assert [request.model for request in requests] == ["new", "new"]
        assert [request.sampling.top_k for request in requests] == [7, 7]
    with subtests.test("what cannot be opened is told"), pytest.raises(Unavailable, match=r"'broken'.*log"):
        models.take(ask("broken"))
    assert models.default.generator.rejections == ["Unavailable"]  # type: ignore[attr-defined]


def test_another_side_answers_while_the_own_one_cannot() -> None:
    new = model("new")
    models = served(new, aliases={"both": {"old": 1, "new": 1}})
    request = own_side(models, "new")
    new.generator.unusable = "no decode rank is registered"  # type: ignore[attr-defined]
    assert models.take(GenerateRequest.FromString(request.SerializeToString())) is models.default
    assert models.taken == {("both", "old", False): 1}
    models.default.generator.unusable = "neither"  # type: ignore[attr-defined]
    assert models.take(GenerateRequest.FromString(request.SerializeToString())) is new, "its error is told"
    models.set({}, {"both": {"gone": 1}}, ("gone",))
    with pytest.raises(Unavailable, match="'both'"):
        models.take(request)
    samples = [sample for metric in ModelsCollector(models).collect() for sample in metric.samples]
    assert {(sample.name, *sample.labels.values(), sample.value) for sample in samples} == {
        ("isthmus_model_served", "gone", 0.0),
        ("isthmus_alias_calls_total", "both", "old", "other", 1.0),
        ("isthmus_alias_calls_total", "both", "new", "own", 1.0),
    }


def test_a_side_may_be_an_adapter(subtests: pytest.Subtests) -> None:
    """A canary between a model and its adapter: without ranks that have it the model answers all."""
    models = served(model("new"), aliases={"both": {"old": 1, "old:a": 1}, "never": {"new:a": 1}})
    backend: Any = models.default.generator
    asked = [ask("both", conversation_id=str(number)) for number in range(50)]

    def sides_taken() -> list[str]:
        taken = []
        for request in asked:
            call = GenerateRequest.FromString(request.SerializeToString())
            assert models.take(call) is models.default
            taken.append(call.model)
        return taken

    with subtests.test("before it is loaded"):
        assert {*sides_taken()} == {"old"}
        assert [(m.id, m.decode_ranks) for m in models.list_models().models][-2:] == [
            ("both", 2),
            ("never", 0),
        ]
    backend.adapters = {"a": 1}
    with subtests.test("a conversation stays on its side"):
        first = sides_taken()
        assert {*first} == {"old", "old:a"} and sides_taken() == first
    with subtests.test("ranks with the adapter are the model's"):
        assert models.list_models().models[-2].decode_ranks == 2
    with subtests.test("unloaded again"):
        own = first.count("old:a")
        backend.adapters = {}
        models.taken.clear()
        assert {*sides_taken()} == {"old"} and models.taken["both", "old", False] == own
    with subtests.test("the only side is told why"):
        request = ask("never")
        assert (models.take(request).name, request.model) == ("new", "new:a")


def test_what_is_listed_has_or_had_ranks() -> None:
    new, never = model("new", context=128), model("never", ranks=0)
    models = served(new, never, aliases={"both": {"old": 1, "new": 1}, "none": {"never": 1}})
    listed = [(each.id, each.max_context_tokens, each.decode_ranks) for each in models.list_models().models]
    assert listed == [("old", 512, 2), ("new", 128, 2), ("both", 128, 4)]
    new.cluster.number = 0  # type: ignore[attr-defined]
    never.cluster.number = 1  # type: ignore[attr-defined]
    assert models.served_names() == ["old", "new", "never", "both", "none"]
    models.set({}, {}, ())
    assert models.served_names() == ["old"]


def test_a_router_is_healthy_while_any_model_is() -> None:
    models = served(model("new"), aliases={})
    models.default.generator.unusable = "no ranks"  # type: ignore[attr-defined]
    models.check_usable()
    models.set({}, {}, ())
    with pytest.raises(Unavailable, match="no ranks"):
        models.check_usable()


def test_a_model_that_leaves_ends_what_it_has_begun() -> None:
    new = model("new")
    models = served(new, aliases={})
    new.generator.running.add(("", "r"))  # type: ignore[attr-defined]
    models.set({}, {}, ())
    assert models.is_running("", "r")
    models.left(new)
    assert not models.is_running("", "r")


async def test_over_http_the_alias_is_echoed_and_a_header_has_the_model(subtests: pytest.Subtests) -> None:
    models = served(model("new"), aliases={"both": {"old": 1, "new": 1}})
    async with client(FakeBackend(), models=models) as http:
        for stream in (False, True):
            for named, header in (("both", "new"), ("new", None)):
                with subtests.test(stream=stream, named=named):
                    conversation = own_side(models, "new").conversation_id
                    body = {"model": named, "prompt": "Hi", "stream": stream, "conversation_id": conversation}
                    answer = await http.post("/v1/completions", json=body)
                    assert answer.status_code == 200 and f'"model":"{named}"' in answer.text.replace(" ", "")
                    assert answer.headers.get("x-isthmus-model") == header
        listed = (await http.get("/v1/models")).json()["data"]
        assert [each["id"] for each in listed] == ["old", "new", "both"]
        with subtests.test("a stored response's chain stays on its side"):
            first = {"model": "both", "input": "What is 2 + 2?"}
            answers = [await http.post("/v1/responses", json=first)]
            for _ in range(4):
                body = {"model": "both", "input": "And?", "previous_response_id": answers[-1].json()["id"]}
                answers.append(await http.post("/v1/responses", json=body))
            assert {answer.status_code for answer in answers} == {200}
            assert len({answer.headers["x-isthmus-model"] for answer in answers}) == 1


def test_names_with_colons(subtests):
    models = Models()
    models.open(model("llama:8b"))
    models.set({"llama": model("llama")}, {}, ["lost"])
    for name, wanted in [
        ("llama:8b", "llama:8b"),
        ("llama:8b:a", "llama:8b"),
        ("llama:x", "llama"),
        ("", "llama:8b"),
    ]:
        with subtests.test(name):
            assert models.take(ask(name)).name == wanted
    with subtests.test("an adapter of one that cannot be opened"), pytest.raises(Unavailable, match="'lost'"):
        models.take(ask("lost:a"))
