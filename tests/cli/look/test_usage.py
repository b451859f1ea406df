"""These tests look at what `isthmus usage` prints."""

from services.cli.look.usage import format_usage
from services.wire.isthmus.v1.generation_pb2 import ListTenantsResponse, TenantUsage


def test_usage_names_what_each_tenant_had_and_its_limits():
    acme = TenantUsage(
        tenant="acme",
        weight=4,
        running_requests=2,
        held_tokens=900,
        requests=17,
        prompt_tokens=1500,
        computed_tokens=1000,
        reused_tokens=500,
        completion_tokens=80,
        kv_bytes_moved=2 << 20,
        refused={"requests_per_minute": 3, "concurrent_requests": 1},
        limits={"requests_per_minute": 600, "concurrent_requests": 8},
    )
    lines = format_usage(ListTenantsResponse(tenants=[TenantUsage(tenant="*", weight=1), acme])).splitlines()
    cells = [line.split() for line in lines]
    assert ["*", "1", "0", "0", "0", "0", "0", "0", "0", "0", "0", "B"] in cells
    assert ["acme", "4", "2", "900", "17", "4", "1500", "1000", "500", "80", "2.0", "MiB"] in cells
    assert lines[-1] == "acme: concurrent_requests 8 (1 refused), requests_per_minute 600 (3 refused)"
