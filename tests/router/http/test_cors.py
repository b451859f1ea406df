"""Web pages of other origins: none may call the API unless it is allowed."""

from router.http.backend import FakeBackend, client
from services.router.api_keys import ApiKeys

PAGE = "https://chat.example"
ASKS = {
    "origin": PAGE,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization, content-type, x-isthmus-conversation",
}


async def test_pages_that_are_allowed_may_call_and_no_others(subtests, tmp_path):
    for allowed in [PAGE, "*"]:
        with subtests.test(allowed=allowed):
            (file := tmp_path / "keys").write_text("key")
            keys = ApiKeys(file)
            async with client(
                FakeBackend(), keys=keys, allowed_origins=("https://other.example", allowed)
            ) as http:
                asked = await http.options("/v1/chat/completions", headers=ASKS)
                assert asked.status_code == 200  # though a browser shows no key here
                assert asked.headers["access-control-allow-origin"] in (PAGE, "*")
                assert "authorization" in asked.headers["access-control-allow-headers"].lower()
                for headers, status in (({}, 401), ({"authorization": "Bearer key"}, 200)):
                    body = {"prompt": "Hi"}
                    answer = await http.post(
                        "/v1/completions", json=body, headers={"origin": PAGE, **headers}
                    )
                    assert answer.status_code == status
                    assert answer.headers["access-control-allow-origin"] in (PAGE, "*")
                    assert "x-request-id" in answer.headers["access-control-expose-headers"]
    for allowed in [(), ("https://other.example",)]:
        with subtests.test(allowed=allowed):
            async with client(FakeBackend(), allowed_origins=allowed) as http:
                asked = await http.options("/v1/chat/completions", headers=ASKS)
                answer = await http.post("/v1/completions", json={"prompt": "Hi"}, headers={"origin": PAGE})
            assert asked.status_code in (400, 405)
            for told in (asked, answer):
                assert "access-control-allow-origin" not in told.headers
