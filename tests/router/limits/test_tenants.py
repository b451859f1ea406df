"""The file of tenants, and what it lets them do."""

import json
import math
import os
import time
from contextlib import ExitStack
from unittest.mock import MagicMock

import grpc
import pytest
from opentelemetry.trace import INVALID_SPAN
from prometheus_client import CollectorRegistry, generate_latest

from router.http.backend import FakeBackend, chat, client, models_of
from router.request.test_generation import LosingCluster
from router.test_generation_service import serving
from services.cli.local.local_cluster import LocalCluster, Shape
from services.router.callers import ANYBODY, Caller, calling
from services.router.connections.rank_connections import DecodeRankLost
from services.router.generation_service import GenerationService
from services.router.quotas import LIMITS, TenantLimits
from services.router.request.generation import Generator
from services.router.tenants import OTHERS, Tenant, TenantCollector, Tenants, read_tenants
from services.values.errors import (
    ConfigError,
    ContextExceeded,
    Forbidden,
    InvalidRequest,
    NoCapacity,
    NotFound,
    OverLimit,
    Unavailable,
)
from services.wire.isthmus.v1 import generation_pb2, generation_pb2_grpc


def test_what_a_file_says_of_tenants(subtests):
    with subtests.test("all of it"):
        limits = {"requests_per_minute": 6, "prompt_tokens_per_minute": 7, "output_tokens_per_minute": 8}
        acme = {"weight": 0.5, **limits, "concurrent_requests": 9, "max_priority": 2, "cache_salt": "s"}
        assert read_tenants(json.dumps({"acme": acme, "labs": {}})) == {
            OTHERS: Tenant(OTHERS),
            "acme": Tenant("acme", 0.5, TenantLimits(6, 7, 8, 9), max_priority=2, cache_salt="\x1es"),
            "labs": Tenant("labs"),
        }
        assert read_tenants('{"*": {"weight": 2}}') == {OTHERS: Tenant(OTHERS, 2.0)}
    for text, problem in [
        ("{", "must be JSON"),
        ("[]", "must be an object with a member"),
        ('{"a": {}, "a": {}}', "'a' is there twice"),
        ('{"a": {"weight": 1, "weight": 2}}', "'weight' is there twice"),
        ('{"a": 1}', "a: must be an object"),
        ('{"": {}}', "a tenant's name has"),
        ('{"other": {}}', "a tenant's name has"),
        ('{"a": {"wieght": 1}}', "a.wieght: is not known; weight, requests_per_minute"),
        ('{"a": {"weight": 0}}', "a.weight: must be a number from 0.01 to 1000, got 0"),
        ('{"a": {"weight": true}}', "a.weight: must be a number"),
        ('{"a": {"weight": NaN}}', "a.weight: must be a number"),
        ('{"a": {"requests_per_minute": 0}}', "a.requests_per_minute: must be an integer from 1"),
        ('{"a": {"requests_per_minute": null}}', "a.requests_per_minute: must be an integer from 1"),
        (f'{{"a": {{"requests_per_minute": {10**400}}}}}', "a.requests_per_minute: must be an integer"),
        ('{"a": {"cache_salt": ""}}', "a.cache_salt: must be a string"),
        ('{"a": {"concurrent_requests": 1.5}}', "a.concurrent_requests: must be an integer"),
        ('{"a": {"max_priority": -1}}', "a.max_priority: must be an integer"),
        ('{"a": {"cache_salt": 1}}', "a.cache_salt: must be a string"),
        ('{"*": {"cache_salt": "s"}}', "has none"),
    ]:
        with subtests.test(text=text):
            with pytest.raises(ConfigError) as refused:
                read_tenants(text)
            assert problem in str(refused.value)


def written(path, **tenants):
    new = path.with_suffix(".new")
    new.write_text(json.dumps(tenants))
    os.replace(new, path)
    return path


def test_the_file_is_read_again_and_a_spoilt_one_changes_nothing(tmp_path, caplog):
    with pytest.raises(ConfigError, match=r"--tenants: .*No such file"):
        Tenants(tmp_path / "nowhere")
    path, now = written(tmp_path / "tenants", acme={"requests_per_minute": 1}), [0.0]
    tenants = Tenants(path, clock=lambda: now[0])
    tenants.account("acme").enter()
    with pytest.raises(OverLimit, match="'acme' is over requests_per_minute: 1 allowed; try again in 60 s"):
        tenants.account("acme").enter()
    written(path, acme={"requests_per_minute": 2}, labs={})
    tenants.account("acme").enter()  # What was taken under the old limit still counts.
    with pytest.raises(OverLimit, match="2 allowed; try again in 30 s"):
        tenants.account("acme").enter()
    path.write_text("{")
    assert tenants.account("labs").tenant.name == "labs" and tenants.account("labs").tenant.name == "labs"
    assert sum("tenants_unreadable" in record.message for record in caplog.records) == 1
    written(path, labs={})
    assert tenants.account("acme").tenant.name == OTHERS
    assert (tenants.accounts["acme"].requests, tenants.account("acme").requests) == (2, 0)


def test_tenants_without_a_name_in_the_file_share_a_limit_and_a_series(tmp_path):
    path = written(tmp_path / "tenants", **{"acme": {}, "*": {"concurrent_requests": 2}})
    tenants, registry = Tenants(path, num_routers=lambda: 2), CollectorRegistry()
    registry.register(TenantCollector(tenants.accounts, dict))
    tenants.account("one").enter()
    with pytest.raises(OverLimit, match="2 allowed, of which this router has 1") as refused:
        tenants.account("two").enter()
    assert refused.value.retry_after_s == 1.0
    tenants.account("one").leave()
    tenants.account("two").enter()
    page = generate_latest(registry).decode()
    assert 'isthmus_tenant_refused_total{limit="concurrent_requests",tenant="other"} 1.0' in page
    assert 'isthmus_tenant_refused_total{limit="requests_per_minute",tenant="acme"} 0.0' in page
    assert "two" not in page


@pytest.fixture
def served(tmp_path, character_tokenizer):
    """Make a generator, and the cluster that it would use."""

    def make(clock=time.monotonic, **tenants):
        cluster, path = LosingCluster(1, moves_penalties=False), written(tmp_path / "tenants", **tenants)
        limits = {"max_attempts": 1, "max_wait_s": 1.0, "request_timeout_s": 60.0}
        limited = Tenants(path, clock=clock)
        return Generator("m", character_tokenizer, cluster, MagicMock(), **limits, tenants=limited), cluster

    return make


async def ask(generator, **fields):
    """Return once a rank has failed the request, or raise why it was refused."""
    request = generation_pb2.GenerateRequest(**({"text": "abc", "tenant": "acme"} | fields))
    with pytest.raises(DecodeRankLost):
        async for _ in generator.generate(request):
            pass


async def test_over_its_limit_a_tenants_request_reaches_no_rank(served, subtests):
    for limit, others in [
        ({"requests_per_minute": 1}, {}),
        ({"prompt_tokens_per_minute": 3}, {}),
        ({"output_tokens_per_minute": 1}, {}),
    ]:
        with subtests.test(limit=limit):
            generator, cluster = served(acme=limit, **others)
            await ask(generator)
            assert len(cluster.excluded) == 1
            with pytest.raises(OverLimit, match=next(iter(limit))) as refused:
                await ask(generator)
            assert refused.value.retry_after_s >= 1 and len(cluster.excluded) == 1
            generator._metrics.rejected.assert_called_once_with(refused.value)
            await ask(generator, tenant="labs")
            assert generator._limited.account("acme").quota.running == 0
    with subtests.test("concurrent requests, until the one that runs has ended however it does"):
        generator, _ = served(acme={"concurrent_requests": 1})
        running = generator.generate(generation_pb2.GenerateRequest(text="abc", tenant="acme"))
        await anext(running)
        with pytest.raises(OverLimit, match="concurrent_requests"):
            await ask(generator)
        await running.aclose()
        with pytest.raises(InvalidRequest):
            await ask(generator, priority=1)
        await ask(generator)
    with subtests.test("what was sent to no rank is given back"):
        generator, cluster = served(acme={"requests_per_minute": 1, "prompt_tokens_per_minute": 3})
        place = cluster.place
        cluster.place = MagicMock(side_effect=Unavailable("no rank"))
        for _ in range(2):
            with pytest.raises(Unavailable):
                await anext(generator.generate(generation_pb2.GenerateRequest(text="abc", tenant="acme")))
        cluster.place = place
        await ask(generator)
        with pytest.raises(OverLimit):
            await ask(generator)
    with subtests.test("but not the request that was invalid, which cost the router its text"):
        generator, cluster = served(acme={"requests_per_minute": 1})
        with pytest.raises(ContextExceeded):
            await ask(generator, text="a" * 150)
        with pytest.raises(OverLimit, match="requests_per_minute"):
            await ask(generator)
        assert not cluster.excluded
    with subtests.test("nor is one counted that the cluster, which is full, refuses before its text is read"):
        generator, cluster = served(acme={"requests_per_minute": 1})
        room, cluster.check_room = cluster.check_room, MagicMock(side_effect=NoCapacity("full"))
        for _ in range(2):
            with pytest.raises(NoCapacity, match="full"):
                await ask(generator)
        cluster.check_room = room
        await ask(generator)
    with subtests.test("a prompt that came while others took theirs"):
        generator, cluster = served(acme={"prompt_tokens_per_minute": 3})
        account = generator._limited.account("acme")
        encode = generator._encoder

        def encoder(*args):
            account.quota.take_prompt(3, account._clock())
            return encode(*args)

        generator._encoder = encoder
        with pytest.raises(OverLimit, match="prompt_tokens_per_minute"):
            await ask(generator)
        assert not cluster.excluded


async def test_a_tenant_has_its_own_priority_and_salt(served, subtests):
    with subtests.test("priority"):
        generator, _ = served(acme={"max_priority": 2})
        await ask(generator, priority=2)
        with pytest.raises(InvalidRequest, match=r"at most 2 for this tenant \(--tenants\), got 3"):
            await ask(generator, priority=3)
        with pytest.raises(InvalidRequest, match="at most 0 on this server"):
            await ask(generator, tenant="labs", priority=1)
    with subtests.test("salt"):
        generator, cluster = served(acme={"cache_salt": "shared"})
        hashed, sent = [], []
        hash_it, start = cluster.hash, cluster._start
        cluster.hash = lambda ids, salt, more: hashed.append(salt) or hash_it(ids, salt, more)
        cluster._start = lambda message, prompt: sent.append(message.cache_salt) or start(message, prompt)
        await ask(generator)
        await ask(generator, tenant="labs")
        assert hashed == sent == ["\x1eshared", "labs"]  # Nobody can be named as a configured salt.


async def test_ranks_are_told_whose_a_request_is_and_what_its_session_has_had(served):
    generator, cluster = served(acme={"weight": 4})
    told, start = [], cluster._start
    cluster._start = lambda message, prompt: told.append(message) or start(message, prompt)
    for fields in [{"conversation_id": "c"}] * 2 + [{"conversation_id": "d"}, {}, {"tenant": "labs"}]:
        await ask(generator, **fields)
    shares = [(each.share.tenant, each.share.weight, each.share.session_tokens) for each in told]
    # The rank says that it computed one token of each prompt, and generates one.
    assert shares == [("acme", 4, 0), ("acme", 4, 2), ("acme", 4, 0), ("acme", 4, 0), (OTHERS, 1, 0)]


async def test_what_a_tenant_has_used(served, subtests):
    generator, _ = served(acme={"weight": 4, "concurrent_requests": 1})
    running = generator.generate(generation_pb2.GenerateRequest(text="abc", tenant="acme"))
    await anext(running)
    with pytest.raises(OverLimit):
        await ask(generator)
    used = generation_pb2.TenantUsage(
        tenant="acme",
        weight=4,
        running_requests=1,
        held_tokens=4,  # a prompt of three, and one generated
        requests=1,
        prompt_tokens=1,  # as the rank reports it
        computed_tokens=1,
        completion_tokens=1,
        refused=dict.fromkeys(LIMITS, 0) | {"concurrent_requests": 1},
        limits={"concurrent_requests": 1},
    )
    others = generation_pb2.TenantUsage(tenant=OTHERS, weight=1, refused=dict.fromkeys(LIMITS, 0))
    service = GenerationService(generator, None, generator._limited)
    for caller, wanted in [
        (ANYBODY, [others, used]),
        (Caller("acme"), [used]),
        (Caller("labs"), []),  # It is not in the file, nor are others.
        (Caller("acme", is_operator=True), [others, used]),
    ]:
        with subtests.test("usage", caller=caller), calling(caller):
            answer = await service.ListTenants(generation_pb2.ListTenantsRequest(), None)
            assert list(answer.tenants) == wanted
    with subtests.test("a key of neither"), calling(Caller()), pytest.raises(Forbidden):
        await service.ListTenants(generation_pb2.ListTenantsRequest(), None)
    await running.aclose()
    with calling(Caller("acme")):
        (used,) = (await service.ListTenants(generation_pb2.ListTenantsRequest(), None)).tenants
    assert (used.running_requests, used.held_tokens) == (0, 0)
    with subtests.test("a router without the file"), pytest.raises(NotFound, match="--tenants"):
        await GenerationService(generator, None).ListTenants(generation_pb2.ListTenantsRequest(), None)


def test_who_runs_few_for_its_weight_is_not_refused_for_load(served):
    generator, _ = served(heavy={"weight": 3}, light={})
    with ExitStack() as stack:
        for name, number in (("heavy", 2), ("light", 1), ("one", 4), ("two", 3)):
            for _ in range(number):
                asked = generator._read(generation_pb2.GenerateRequest(text="a", tenant=name), math.inf)
                stack.enter_context(generator._track(asked, INVALID_SPAN))
        # Of the weights 3, 1 and 1 of three tenants, for the two without a name in the file count as one.
        assert generator._tenants == {"heavy": 2, "light": 1, OTHERS: 7}
        assert generator._runs_few("heavy") and not generator._runs_few("light")


async def test_http_says_which_limit_and_when_to_come_again():
    answer = await chat(FakeBackend(OverLimit("tenant 'acme' is over requests_per_minute", 12.5)))
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "13")
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    assert "requests_per_minute" in error["message"]


LOOKS = {
    "Tokenize": generation_pb2.TokenizeRequest(request={"text": "abc"}),
    "Explain": generation_pb2.ExplainRequest(request={"text": "abc"}),
    "Detokenize": generation_pb2.DetokenizeRequest(token_ids=[5]),
    "/tokenize": {"prompt": "abc"},
    "/detokenize": {"tokens": [5]},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "abc"}]},
}


async def looked(path, generator, tenant):
    """Return a call's status over gRPC or HTTP, after how many seconds to come again, and what it says."""
    if path[0] == "/":
        async with client(generator, models=models_of(generator)) as http:
            answer = await http.post(path, json=LOOKS[path], headers={"x-isthmus-tenant": tenant})
            return answer.status_code, answer.headers.get("retry-after"), answer.text
    asked = LOOKS[path]
    (asked if path == "Detokenize" else asked.request).tenant = tenant
    async with serving(GenerationService(models_of(generator), None)) as stub:
        try:
            await getattr(stub, path)(asked, timeout=20)
        except grpc.aio.AioRpcError as error:
            wait_ms = dict(error.trailing_metadata()).get("grpc-retry-pushback-ms")
            return error.code(), wait_ms and wait_ms.removesuffix("000"), error.details()
        return grpc.StatusCode.OK, None, ""


async def test_calls_that_generate_nothing_have_a_rate_of_their_own(served, subtests):
    """A client that counts before it asks loses no answer by that, and cannot count without end."""
    for path in LOOKS:
        with subtests.test(path):
            limits = {"requests_per_minute": 2, "prompt_tokens_per_minute": 3}
            generator, cluster = served(clock=lambda: 0.0, acme=limits)
            cluster.explain, cluster.ranks = (
                MagicMock(side_effect=Unavailable("no rank")),
                lambda role: ["d0"],
            )
            good, over = (
                (200, 429) if path[0] == "/" else (grpc.StatusCode.OK, grpc.StatusCode.RESOURCE_EXHAUSTED)
            )
            if path == "Explain":
                good = grpc.StatusCode.UNAVAILABLE
            assert [(await looked(path, generator, "acme"))[0] for _ in range(2)] == [good, good]
            for _ in range(2):
                status, retry_after, text = await looked(path, generator, "acme")
                assert (status, retry_after) == (over, "30"), text
                assert "over requests_per_minute with calls that generate nothing: 2 allowed" in text
            assert (await looked(path, generator, "labs"))[0] == good
            account = generator._limited.account("acme")
            assert (account.refused["requests_per_minute"], account.requests, account.quota.running) == (
                2,
                0,
                0,
            )
            await ask(generator)  # Its requests and prompt tokens are all still there.


async def test_a_limit_of_all_tenants_does_not_keep_a_local_cluster_from_its_start(tmp_path):
    """`isthmus up` asks again and again whether all ranks are there, for no tenant in particular."""
    shape = Shape(tmp_path, tmp_path, prefill_workers=1, decode_workers=1, decode_dp_size=2)
    cluster = LocalCluster(shape, lambda name, line: None)
    tenants = Tenants(written(tmp_path / "tenants", **{"*": {"requests_per_minute": 2}}))
    num_decode, excluded = 1, "is not connected"

    class Router(generation_pb2_grpc.GenerationServicer):
        async def ListModels(self, request, context):
            model = generation_pb2.Model(id="m", prefill_ranks=1, decode_ranks=num_decode)
            return generation_pb2.ListModelsResponse(models=[model])

        async def Explain(self, request, context):
            tenants.account(request.request.tenant).look()
            candidate = generation_pb2.Candidate(excluded=excluded)
            return generation_pb2.ExplainResponse(candidates=[candidate])

    async with serving(Router()) as stub:
        assert not any([await cluster._serves(stub) for _ in range(5)])
        num_decode = 2
        assert not any([await cluster._serves(stub) for _ in range(2)])
        assert await cluster._serves(stub), "the router says that all ranks are up, and explains no more"


async def test_a_list_of_more_prompts_than_may_ever_run_is_refused_for_good(served, subtests):
    generator, _ = served(acme={"concurrent_requests": 2}, free={})
    generator.check_together("acme", 2)
    generator.check_together("free", 256)
    with pytest.raises(InvalidRequest, match="prompt has 3 prompts, but this tenant may run 2 at once"):
        generator.check_together("acme", 3)
    with subtests.test("over HTTP"):
        backend = FakeBackend()
        backend.most_together = 2
        async with client(backend) as asking:
            bodies = ({"prompt": ["a"] * number, "max_tokens": 1, "model": ""} for number in (2, 3))
            answers = [await asking.post("/v1/completions", json=body) for body in bodies]
        assert answers[1].status_code == 400
        assert answers[1].json()["error"]["param"] == "prompt"
        assert answers[0].status_code != 400
