"""The router's metrics beside its APIs."""

import httpx
import prometheus_client
import pytest

from router.http.backend import FakeBackend, app_of
from services.observe.prometheus import MetricsPage
from services.router.api_keys import ApiKeys


@pytest.fixture
def page():
    registry = prometheus_client.CollectorRegistry()
    prometheus_client.Counter("asked", "Requests.", registry=registry).inc(3)
    return MetricsPage(registry, {"role": "router"})


def client(page, keys=None):
    app = app_of(FakeBackend(), metrics=page, keys=keys)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://router")


async def test_they_are_in_the_format_that_is_asked_for(page):
    async with client(page) as http:
        plain = await http.get("/metrics")
        assert 'asked_total{role="router"} 3.0' in plain.text.splitlines()
        assert plain.headers["content-type"].startswith("text/plain; version=")
        wanted = {"accept": "application/openmetrics-text; version=1.0.0"}
        opened = await http.get("/metrics", headers=wanted)
        assert opened.headers["content-type"].startswith("application/openmetrics-text")
        assert opened.text.endswith("# EOF\n")


async def test_keys_are_asked_for_and_one_tenants_sees_none(page, tmp_path):
    (file := tmp_path / "keys").write_text("plain-key\none-tenants tenant=a\nour-own tenant=a operator\n")
    async with client(page, ApiKeys(file)) as http:
        statuses = [
            (await http.get("/metrics", headers=headers)).status_code
            for headers in (
                {},
                {"authorization": "Bearer plain-key"},
                {"authorization": "Bearer one-tenants"},
                {"authorization": "Bearer our-own"},
            )
        ]
    assert statuses == [401, 200, 403, 200]
