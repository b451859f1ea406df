"""These tests show who may use a router: the file of keys, and the door of HTTP."""

import hmac
import os
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from router.http.backend import FakeBackend, client
from router.http.test_leaving import PROMPTS
from router.keys.tenants import TENANT_CALLS, bearer
from services.cli.router_client import key_metadata
from services.router.api_keys import WRONG_KEY, ApiKeys, KeyRefusals
from services.router.request.router_metrics import RouterMetrics
from services.values.errors import ConfigError, Unauthenticated


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
