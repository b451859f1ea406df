"""Who may use a router: the file of keys, and the doors of both APIs."""

import asyncio
import hmac
import os
import re
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from prometheus_client import CollectorRegistry

from router.http.backend import FakeBackend, client
from router.http.test_leaving import PROMPTS
from services.cli.client import key_metadata
from services.net import channels, grpc_errors, servers
from services.net.bytes_in_flight import BytesInFlight
from services.router.http.routes import http_app
from services.router.keys import callers
from services.router.keys.api_keys import ApiKeys, GrpcDoor
from services.router.keys.refusals import WRONG_KEY, KeyRefusals
from services.router.request.telemetry.metrics import RouterMetrics
from services.router.server import GENERATE, GenerationService, add_to_server, generate_handler
from services.router.watch.watch import Watch
from services.values.errors import ConfigError, Forbidden, Unauthenticated
from services.wire.isthmus.v1 import generation_pb2, generation_pb2_grpc


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "keys"
    path.write_text("first-key\n\n  second-key  \n")
    return path


@pytest.fixture
def counted():
    return []


@pytest.fixture
def keys(file, counted):
    return ApiKeys(file, KeyRefusals(lambda *labels: counted.append(labels)))


def test_commands_show_the_files_first_key_and_without_one_no_router_starts(subtests, file, tmp_path):
    with subtests.test("commands show the files first key"):
        assert key_metadata(None) == ()
        assert key_metadata(file) == (("authorization", "Bearer first-key"),)
        (empty := tmp_path / "empty").write_text("\n")
        for path in (empty, tmp_path / "nowhere"):
            with pytest.raises(ConfigError, match="--api-key-file"):
                key_metadata(path)
    with subtests.test("without a key no router starts"):
        (empty := tmp_path / "empty").write_text("\n")
        for path, problem in ((tmp_path / "nowhere", "No such file"), (empty, "holds no key")):
            with pytest.raises(ConfigError, match=f"--api-key-file: .*{problem}"):
                ApiKeys(path)


def is_let_in(keys, authorization):
    try:
        keys.check(authorization)
    except Unauthenticated:
        return False
    return True


def test_a_key_is_one_of_the_files(subtests, keys, monkeypatch):
    for authorization, let_in in [
        ("Bearer first-key", True),
        ("bearer second-key", True),
        ("Bearer  second-key", True),
        ("Bearer first-ke", False),
        ("Bearer first-key2", False),
        ("Bearer first-key second-key", False),
        ("Bearer \xe9", False),
        ("Bearer ", False),
        ("Bearer", False),
        ("Basic first-key", False),
        ("first-key", False),
        ("", False),
        (None, False),
    ]:
        with subtests.test(authorization=authorization):
            assert is_let_in(keys, authorization) is let_in
    with subtests.test("every key is compared whichever fits"):
        compared, compare = [], hmac.compare_digest
        monkeypatch.setattr(hmac, "compare_digest", lambda *args: compared.append(1) or compare(*args))
        for key in ("first-key", "second-key", "neither"):
            is_let_in(keys, f"Bearer {key}")
        assert len(compared) == 6


SPOILT = {
    "deleted": os.remove,
    "emptied": lambda path: path.write_text(""),
    "blank": lambda path: path.write_text(" \n"),
    "garbled": lambda path: path.write_bytes(b"\xff"),
    "no file": lambda path: (path.unlink(), path.mkdir()),
}


def test_a_file_without_a_key_lets_nobody_in_until_it_has_one_again(tmp_path, subtests, caplog):
    for name, spoil in SPOILT.items():
        with subtests.test(name):
            caplog.clear()
            (file := tmp_path / name).write_text("first-key\n")
            keys = ApiKeys(file)
            spoil(file)
            for _ in range(3):
                assert not is_let_in(keys, "Bearer first-key")
                assert not is_let_in(keys, "Bearer ")
            (record,) = caplog.records
            assert record.levelname == "ERROR" and "api_keys_revoked" in record.message
            (new := file.with_name("new")).write_text("third-key")
            if file.is_dir():
                file.rmdir()
            os.replace(new, file)
            assert is_let_in(keys, "Bearer third-key")
            assert not is_let_in(keys, "Bearer first-key")


def test_a_file_that_changes_or_was_unreadable_is_read_again(subtests, keys, file, monkeypatch, caplog):
    with subtests.test("what was unreadable for a moment is read again though it has not changed"):
        read = Path.read_text

        def fails(path, **options):
            raise PermissionError("not now")

        os.utime(file, ns=(1, 1))
        monkeypatch.setattr(Path, "read_text", fails)
        assert not is_let_in(keys, "Bearer first-key")
        monkeypatch.setattr(Path, "read_text", read)
        assert is_let_in(keys, "Bearer first-key")
    with subtests.test("a file that changes is read again"):
        (new := file.with_name("new")).write_text("third-key")
        os.replace(new, file)
        assert is_let_in(keys, "Bearer third-key")
        assert not is_let_in(keys, "Bearer first-key")


# -- what an operator is told ------------------------------------------------------------------------


def test_refusals_are_all_counted_and_logged_now_and_then(subtests, caplog):
    with subtests.test("refusals are all counted and logged now and then"):
        counted, now = [], [100.0]
        refusals = KeyRefusals(lambda *labels: counted.append(labels), clock=lambda: now[0])
        for second in (100.0, 100.1, 109.9, 110.0, 130.0):
            now[0] = second
            refusals.note("http", "10.0.0.7", Unauthenticated(WRONG_KEY))
        assert counted == [("http", "wrong_key")] * 5
        assert caplog.messages == [
            f"unauthenticated front=http peer=10.0.0.7 reason=wrong_key unlogged={unlogged}"
            for unlogged in (0, 2, 0)
        ]
        assert {record.levelname for record in caplog.records} == {"WARNING"}
    with subtests.test("refusals have series from the start"):
        registry = CollectorRegistry()
        metrics = RouterMetrics(registry)
        labels = {"front": "grpc", "reason": "no_key"}
        assert registry.get_sample_value("isthmus_unauthenticated_total", labels) == 0
        metrics.unauthenticated("grpc", "no_key")
        assert registry.get_sample_value("isthmus_unauthenticated_total", labels) == 1


# -- what a key is good for --------------------------------------------------------------------------


def test_a_file_that_cannot_be_understood_lets_nobody_in(tmp_path, subtests, caplog):
    for spoil in ("third-key tenant=", "third-key operators", "third-key\nthird-key operator"):
        with subtests.test(spoil=spoil):
            caplog.clear()
            (file := tmp_path / "keys").write_text("first-key\n\n  second-key  \n")
            keys = ApiKeys(file)
            (new := file.with_name("new")).write_text(f"first-key\n{spoil}\n")
            os.replace(new, file)
            assert not is_let_in(keys, "Bearer first-key")
            assert "line 2" in caplog.text or "line 3" in caplog.text
            assert "third" not in caplog.text and "first" not in caplog.text
            with pytest.raises(ConfigError, match=r"--api-key-file: .*keys: line"):
                ApiKeys(file)


@pytest.fixture
def of_tenants(file):
    file.write_text("bare-key\nacme-key tenant=acme\nb-key tenant=b\nours-key operator\n")
    return ApiKeys(file)


def bearer(key):
    return {"authorization": f"Bearer {key}-key"}


TENANT_CALLS = [
    # Key, tenant that is named, and whose request it is; None: it is refused.
    ("bare", "", ""),
    ("bare", "b", "b"),
    ("ours", "b", "b"),
    ("acme", "", "acme"),
    ("acme", "acme", "acme"),
    ("acme", "b", None),
]


async def test_over_http_a_key_says_whose_a_request_is(subtests, of_tenants):
    for key, named, tenant in TENANT_CALLS:
        for path in PROMPTS:
            for by in ["header", "salt"]:
                with subtests.test(key=key, path=path, by=by):
                    backend = FakeBackend()
                    headers = bearer(key) | ({"x-isthmus-tenant": named} if named and by == "header" else {})
                    body = PROMPTS[path] | ({"cache_salt": named} if named and by == "salt" else {})
                    async with client(backend, keys=of_tenants) as http:
                        answer = await http.post(path, json=body, headers=headers)
                    if tenant is None:
                        assert answer.status_code == 403 and "'b' is not this API key's" in answer.text
                        assert backend.rejections == ["Forbidden"] and not backend.requests
                    else:
                        assert answer.status_code == 200
                        assert [request.tenant for request in backend.requests] == [tenant]


async def test_the_models_path_is_an_operators_to_know(of_tenants):
    keys = {"acme": False, "bare": False, "ours": True}
    async with client(FakeBackend(), keys=of_tenants, model_path="/srv/m") as http:
        for key, is_told in keys.items():
            for path in ("/server_info", "/model_info"):
                told = (await http.get(path, headers=bearer(key))).json()
                assert told["model_path"] == ("/srv/m" if is_told else "tiny"), (key, path)
                assert ("/srv/m" in str(told)) == is_told


async def test_request_ids_are_per_tenant_over_http(of_tenants):
    """A tenant must not learn from a suffix that another has a request of that id."""
    backend = FakeBackend()
    backend.running = {("acme", "a"), ("b", "b")}
    told = {}
    async with client(backend, keys=of_tenants) as http:
        for request_id, key, named in (
            ("a", "acme", ""),
            ("b", "acme", ""),
            ("b", "bare", "b"),
            ("a", "bare", ""),
        ):
            headers = (
                bearer(key) | {"x-request-id": request_id} | ({"x-isthmus-tenant": named} if named else {})
            )
            answer = await http.post("/v1/completions", json={"prompt": "Hi"}, headers=headers)
            told[request_id, key, named] = answer.headers["x-request-id"] == request_id
    assert list(told.values()) == [False, True, False, True]


async def test_a_file_of_bound_and_unbound_keys_is_warned_of(tmp_path, caplog):
    path = tmp_path / "keys"
    for text, unbound in (
        ("a\nb\n", 0),
        ("a tenant=a\nb tenant=b\nours operator\n", 0),
        ("a tenant=a\nb\nc\nours operator\n", 2),
    ):
        caplog.clear()
        path.write_text(text)
        ApiKeys(path)
        assert ("api_keys_mixed" in caplog.text) == bool(unbound)
        assert f"unbound={unbound}" in caplog.text or not unbound


async def test_a_stored_response_is_its_tenants_whichever_key_shows(of_tenants):
    of_b = bearer("bare") | {"x-isthmus-tenant": "b"}
    async with client(FakeBackend(), keys=of_tenants) as http:
        stored = (await http.post("/v1/responses", json={"input": "Hi"}, headers=bearer("acme"))).json()["id"]
        statuses = {}
        for who, headers in (("acme", bearer("acme")), ("bare", bearer("bare")), ("b", of_b)):
            statuses[who] = (await http.get(f"/v1/responses/{stored}", headers=headers)).status_code
        refused = await http.get(f"/v1/responses/{stored}", headers=bearer("acme") | of_b | bearer("acme"))
        again = {"input": "And?", "previous_response_id": stored}
        assert (await http.post("/v1/responses", json=again, headers=bearer("acme"))).status_code == 200
    assert statuses == {"acme": 200, "bare": 404, "b": 404} and refused.status_code == 403


# -- HTTP --------------------------------------------------------------------------------------------


async def test_all_of_http_but_health_asks_for_a_key(keys, counted, caplog):
    backend = FakeBackend()
    async with client(backend, keys=keys) as http:
        for method, path in (
            ("POST", "/v1/completions"),
            ("POST", "/v1/chat/completions"),
            ("GET", "/v1/models"),
            ("GET", "/v1/nothing"),
        ):
            for headers in ({}, {"authorization": "Bearer wrong"}):
                answer = await http.request(method, path, headers=headers)
                assert answer.status_code == 401
                assert answer.headers["www-authenticate"] == "Bearer"
                assert answer.headers["x-request-id"]
                error = answer.json()["error"]
                assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
                assert error["param"] is None and "key" in error["message"]
        assert (await http.get("/health")).status_code == 200
        known = {"authorization": "Bearer second-key"}
        assert (await http.get("/v1/models", headers=known)).status_code == 200
        answer = await http.post("/v1/completions", json={"prompt": "Hi"}, headers=known)
        assert answer.status_code == 200
    assert len(backend.requests) == 1
    assert counted == 4 * [("http", "no_key"), ("http", "wrong_key")]
    assert "unauthenticated front=http" in caplog.text and "Bearer" not in caplog.text


# -- gRPC --------------------------------------------------------------------------------------------


class Player:
    def time_limit_s(self, timeout_s):
        return 60.0

    async def generate(self, request, timeout_s, traceparent, **_):
        yield generation_pb2.GenerateResponse(text=f"Hi {request.tenant}")

    async def tokenize(self, request):
        return generation_pb2.TokenizeResponse(token_ids=[len(request.tenant)], max_context_tokens=9)

    def list_models(self):
        return generation_pb2.ListModelsResponse(models=[generation_pb2.Model(id="m")])

    def abort(self, request_id, tenant):
        return tenant in (None, "acme")

    def rejected(self, error):
        self.rejections.append(type(error).__name__)

    def __init__(self):
        self.rejections = []


async def told_of(asked):
    """A watch that says whose requests it shows."""
    yield generation_pb2.WatchClusterResponse(degraded=repr(asked.tenant))


async def told_for_ever(asked):
    while True:
        yield generation_pb2.WatchClusterResponse(degraded=repr(asked.tenant))
        await asyncio.sleep(0.01)


class ToldWatch(Watch):
    def __init__(self, told):
        self.responses = told


def service_of(player, told):
    return GenerationService(player, SimpleNamespace(), ToldWatch(told))


@asynccontextmanager
async def serving(keys, player, told=told_of, bounds=None):
    service = service_of(player, told)
    server = await servers.open_server(
        "127.0.0.1:0",
        partial(add_to_server, service),
        [],
        interceptors=[GrpcDoor(keys)],
        busy={GENERATE: generate_handler(service)},
        bounds=bounds or servers.ClientBounds(),
    )
    async with channels.open_channel(f"127.0.0.1:{server.port}") as channel:
        yield channel
    await server.stop()


@pytest.fixture
async def channel(keys):
    async with serving(keys, Player()) as channel:
        yield channel


async def list_models(channel, metadata):
    stub = generation_pb2_grpc.GenerationStub(channel)
    return await stub.ListModels(generation_pb2.ListModelsRequest(), timeout=20, metadata=metadata)


async def generate(channel, metadata):
    stub = generation_pb2_grpc.GenerationStub(channel)
    return [
        r.text async for r in stub.Generate(generation_pb2.GenerateRequest(), timeout=20, metadata=metadata)
    ]


async def test_calls_of_every_kind_ask_for_a_key(channel, subtests, counted, caplog):
    for call in (list_models, generate):
        with subtests.test(call=call.__name__):
            counted.clear()
            assert await call(channel, (("authorization", "Bearer first-key"),))
            for metadata in ((), (("authorization", "Bearer wrong"),)):
                with pytest.raises(grpc.aio.AioRpcError) as refusal:
                    await call(channel, metadata)
                assert refusal.value.code() is grpc.StatusCode.UNAUTHENTICATED
                assert isinstance(grpc_errors.error_from(refusal.value), Unauthenticated)
            assert counted == [("grpc", "no_key"), ("grpc", "wrong_key")]
    assert re.search(r"unauthenticated front=grpc peer=ipv4:127\.0\.0\.1:\d+ reason=no_key", caplog.text)


async def test_reflection_asks_for_a_key_and_health_does_not(channel):
    answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=20)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    for key, is_told in (("first-key", True), ("wrong", False)):
        stream = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
            iter([request]), metadata=(("authorization", f"Bearer {key}"),)
        )
        if is_told:
            assert [response.HasField("list_services_response") async for response in stream] == [True]
        else:
            with pytest.raises(grpc.aio.AioRpcError) as refusal:
                await stream.read()
            assert refusal.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_who_shows_no_key_is_refused_before_a_message_is_read(channel):
    """None is sent here: who asked for it would wait."""
    for method in ("Generate", "Abort", "WatchCluster"):
        call = channel.stream_stream(f"/isthmus.v1.Generation/{method}")(timeout=10)
        assert await call.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_over_grpc_a_key_says_whose_a_request_is(subtests, of_tenants):
    for key, named, tenant in TENANT_CALLS:
        with subtests.test(key=key):
            request = generation_pb2.GenerateRequest(tenant=named)
            metadata, player = tuple(bearer(key).items()), Player()
            async with serving(of_tenants, player) as channel:
                stub = generation_pb2_grpc.GenerationStub(channel)
                generating = stub.Generate(request, timeout=20, metadata=metadata)
                tokenize = generation_pb2.TokenizeRequest(request=request)
                watching = stub.WatchCluster(
                    generation_pb2.WatchClusterRequest(tenant=named), timeout=20, metadata=metadata
                )
                if tenant is None:
                    for call in (
                        generating.read(),
                        stub.Tokenize(tokenize, metadata=metadata),
                        watching.read(),
                    ):
                        with pytest.raises(grpc.aio.AioRpcError) as refusal:
                            await call
                        assert refusal.value.code() is grpc.StatusCode.PERMISSION_DENIED
                        assert isinstance(grpc_errors.error_from(refusal.value), Forbidden)
                    assert player.rejections == ["Forbidden"]
                else:
                    assert [response.text async for response in generating] == [f"Hi {tenant}"]
                    assert list((await stub.Tokenize(tokenize, metadata=metadata)).token_ids) == [len(tenant)]
                    assert [response.degraded async for response in watching] == [repr(tenant)]
    for key, sees_all in [("bare", False), ("acme", False), ("ours", True)]:
        with subtests.test(key=key):
            async with serving(of_tenants, Player()) as channel:
                watching = generation_pb2_grpc.GenerationStub(channel).WatchCluster(
                    generation_pb2.WatchClusterRequest(all_tenants=True),
                    timeout=20,
                    metadata=tuple(bearer(key).items()),
                )
                if sees_all:
                    assert [response.degraded async for response in watching] == ["None"]
                else:
                    with pytest.raises(grpc.aio.AioRpcError) as refusal:
                        await watching.read()
                    assert refusal.value.code() is grpc.StatusCode.PERMISSION_DENIED
    with subtests.test("a key with a tenant aborts its own alone"):
        async with serving(of_tenants, Player()) as channel:
            stub = generation_pb2_grpc.GenerationStub(channel)
            request = generation_pb2.AbortRequest(request_id="r")
            for key, found in (("acme", True), ("b", False), ("bare", True)):
                answer = await stub.Abort(request, timeout=20, metadata=tuple(bearer(key).items()))
                assert answer.found is found


async def test_a_watch_ends_with_its_key(file, subtests):
    for name, left in (
        ("an operator's key is taken out", "bare-key\n"),
        ("it is no operator's any more", "bare-key\nours-key\n"),
    ):
        with subtests.test(name):
            file.write_text("bare-key\nours-key operator\n")
            await watch_until_its_key_goes(file, left)


async def watch_until_its_key_goes(file, left):
    of_tenants, metadata = ApiKeys(file), tuple(bearer("ours").items())
    async with serving(of_tenants, Player(), told_for_ever) as channel:
        request = generation_pb2.WatchClusterRequest(all_tenants=True)
        stub = generation_pb2_grpc.GenerationStub(channel)
        watching = stub.WatchCluster(request, timeout=20, metadata=metadata)
        for _ in range(3):
            assert (await watching.read()).degraded == "None"
        (new := file.with_name("new")).write_text(left)
        os.replace(new, file)
        async with asyncio.timeout(20):
            while (response := await watching.read()) is not grpc.aio.EOF:
                assert response.degraded == "None"
        assert await watching.code() is grpc.StatusCode.OK


async def test_a_key_that_goes_before_the_first_response_is_refused(of_tenants, file):
    async def told_late(asked):
        file.write_text("bare-key\n")
        yield generation_pb2.WatchClusterResponse()

    async with client(FakeBackend(), ToldWatch(told_late), keys=of_tenants) as http:
        answer = await http.get("/v1/cluster/watch", headers=bearer("acme"))
    assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")


async def test_over_http_a_request_has_the_tenant_of_its_key(of_tenants):
    backend, body = FakeBackend(), {"prompt": "Hi"}
    async with client(backend, keys=of_tenants) as http:
        for path in ("/v1/completions", "/tokenize"):
            assert (await http.post(path, json=body, headers=bearer("acme"))).status_code == 200
            other = {**bearer("acme"), "x-isthmus-tenant": "b"}
            assert (await http.post(path, json=body, headers=other)).status_code == 403
    assert [request.tenant for request in backend.requests] == ["acme", "acme"]


async def test_a_watch_over_http_ends_with_its_key(of_tenants, file):
    sent = []

    async def receive():
        await asyncio.Event().wait()

    async def send(message):
        sent.append(message)
        if len(sent) == 4:
            (new := file.with_name("new")).write_text("bare-key\n")
            os.replace(new, file)

    headers = [(name.encode(), value.encode()) for name, value in bearer("acme").items()]
    scope = {
        "type": "http",
        "method": "GET",
        "path": "/v1/cluster/watch",
        "headers": headers,
        "query_string": b"",
    }
    app = http_app(FakeBackend(), ToldWatch(told_for_ever), keys=of_tenants)
    await asyncio.wait_for(app(scope, receive, send), 20)
    assert sent[0]["status"] == 200 and not sent[-1]["body"] and len(sent) == 5


async def test_what_a_call_holds_is_its_keys_tenants(of_tenants):
    """What reads the message stands around the door, and asks for each call on a connection anew."""
    owners = []
    in_flight = BytesInFlight(2000, 1000, owner=lambda: owners.append(callers.tenant_by_key()))
    named = ("acme", "acme"), ("ours", None), ("b", "b"), ("bare", None)
    async with serving(of_tenants, Player(), bounds=servers.ClientBounds(in_flight=in_flight)) as channel:
        for key, _ in named:
            await generate(channel, tuple(bearer(key).items()))
    async with client(FakeBackend(), keys=of_tenants, in_flight=in_flight) as http:
        for key, _ in named:
            await http.get("/v1/models", headers=bearer(key))
    assert owners == 2 * [tenant for _, tenant in named]
