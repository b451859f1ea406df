"""The page over HTTP: what is served, to whom, and with which headers."""

import re

import pytest

from router.http.backend import FakeBackend, client
from services.router.api_keys import ApiKeys
from services.router.http.page import STATIC, Page, page_files

pytestmark = pytest.mark.long

PAGE = Page()


def page_client(**options):
    return client(FakeBackend(), page=PAGE, **options)


async def test_every_file_is_served_as_it_is():
    async with page_client() as http:
        index = await http.get("/")
        named = re.findall(r'(?:href|src)="(page/[^"]+)"', index.text)
        assert len(named) == 4
        root = named[0].rpartition("/")[0]
        for path in STATIC.rglob("*"):
            if path.is_file():
                answer = await http.get(f"/{root}/{path.relative_to(STATIC)}")
                assert (answer.status_code, answer.content) == (200, path.read_bytes())
                assert "immutable" in answer.headers["cache-control"]
        assert [(await http.get(f"/{name}")).status_code for name in named] == [200] * 4
        icon = await http.get("/favicon.ico")
    assert (index.headers["content-type"], index.headers["cache-control"]) == (
        "text/html; charset=utf-8",
        "no-cache",
    )
    assert (icon.status_code, icon.headers["content-type"]) == (200, "image/x-icon")


async def test_nothing_may_run_in_it_but_its_own_files():
    async with page_client() as http:
        for path in PAGE.paths:
            headers = (await http.get(path)).headers
            policy = dict(part.split(" ", 1) for part in headers["content-security-policy"].split("; "))
            assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
            assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
            assert "unsafe" not in headers["content-security-policy"]
            assert headers["x-content-type-options"] == "nosniff"
            assert headers["referrer-policy"] == "no-referrer"


async def test_a_browser_that_has_a_file_is_sent_it_no_more():
    async with page_client() as http:
        tag = (await http.get("/")).headers["etag"]
        for has in (tag, f"W/{tag}", f'"other", {tag}', "*"):
            answer = await http.get("/", headers={"if-none-match": has})
            assert (answer.status_code, answer.content, answer.headers["etag"]) == (304, b"", tag)
            assert "content-security-policy" in answer.headers
        for has in ('"other"', ""):
            assert (await http.get("/", headers={"if-none-match": has})).status_code == 200


async def test_head_is_get_without_its_body():
    async with page_client() as http:
        got, asked = await http.get("/"), await http.head("/")
    del got.headers["x-request-id"], asked.headers["x-request-id"]
    assert (asked.status_code, asked.headers) == (200, got.headers)


async def test_no_other_path_is_there(subtests):
    root = next(path for path in PAGE.paths if path.endswith("/main.js")).removesuffix("/main.js")
    async with page_client() as http:
        for path in (
            "/page",
            "/page/",
            "/page/main.js",
            "/page/0000000000000000/main.js",
            "/page/../config.py",
            "/page/%2e%2e/%2e%2e/config.py",
            f"{root}/../../files.py",
            f"{root}/%2e%2e/files.py",
            f"{root}//etc/passwd",
            "/index.html",
        ):
            with subtests.test(path=path):
                answer = await http.get(path)
                assert (answer.status_code, answer.json()["error"]["code"]) == (404, 404)
        assert (await http.post("/", json={})).status_code == 405


async def test_the_page_needs_no_key_and_its_data_does(tmp_path):
    (file := tmp_path / "keys").write_text("key")
    async with page_client(keys=ApiKeys(file)) as http:
        assert {(await http.get(path)).status_code for path in PAGE.paths} == {200}
        for path in ("/v1/models", "/v1/cluster/watch", "/page/", "/nothing"):
            assert (await http.get(path)).status_code == 401


async def test_without_it_there_is_nothing():
    async with client(FakeBackend()) as http:
        assert {(await http.get(path)).status_code for path in PAGE.paths} == {404}


def test_another_file_has_another_address(tmp_path):
    for name in ("index.html", "favicon.ico", "main.js"):
        (tmp_path / name).write_bytes(b'<script src="page/main.js">')
    before = page_files(tmp_path)
    (tmp_path / "main.js").write_bytes(b"other")
    after = page_files(tmp_path)
    assert before.keys() & after.keys() == {"/", "/favicon.ico"}
    assert before["/"].etag != after["/"].etag
