import pytest

from services.router.callers import ANYBODY, Caller
from services.router.watch_cluster import WatchOptions, read_watch_options
from services.values.errors import Forbidden, InvalidRequest
from services.wire.isthmus.v1.generation_pb2 import WatchClusterRequest

ACME, BARE, OPERATOR = Caller("acme"), Caller(), Caller(is_operator=True)


def asked(caller=ANYBODY, **fields):
    return read_watch_options(WatchClusterRequest(**fields), caller)


def test_intervals_tenants_and_candidates(subtests):
    for interval_s, taken_s in [(0, 1.0), (0.1, 0.1), (60, 60.0)]:
        with subtests.test(interval_s=interval_s):
            assert asked(interval_s=interval_s) == WatchOptions(taken_s, "")
    for interval_s in [-1, 0.05, 61, float("nan"), float("inf")]:
        with (
            subtests.test(interval_s=interval_s),
            pytest.raises(InvalidRequest, match=r"^interval_s must be"),
        ):
            asked(interval_s=interval_s)
    with subtests.test("a tenant must be an id and not beside all"):
        with pytest.raises(InvalidRequest, match=r"^tenant must be"):
            asked(tenant="a\n")
        with pytest.raises(InvalidRequest, match=r"^tenant must be empty"):
            asked(tenant="a", all_tenants=True)
    with subtests.test("candidates are told unless they are not wanted"):
        for scope in ({}, {"all_tenants": True}):
            assert asked(**scope).wants_candidates and not asked(**scope, no_candidates=True).wants_candidates


def test_whose_requests_are_seen(subtests):
    for caller, tenant, watched in [
        (ANYBODY, "", ""),
        (BARE, "b", "b"),
        (ACME, "", "acme"),
        (ACME, "acme", "acme"),
        (OPERATOR, "b", "b"),
    ]:
        with subtests.test(caller=caller):
            watch = asked(caller, tenant=tenant)
            assert [name for name in ("", "acme", "b") if watch.sees(name)] == [watched]
    with (
        subtests.test("another tenants requests are not shown"),
        pytest.raises(Forbidden, match="'b' is not this API key's"),
    ):
        asked(ACME, tenant="b")
    for caller in [ANYBODY, OPERATOR, Caller("acme", is_operator=True)]:
        with subtests.test(caller=caller):
            assert asked(caller, all_tenants=True).sees("anybody")
    for caller in [ACME, BARE]:
        with subtests.test(caller=caller), pytest.raises(Forbidden, match="operator"):
            asked(caller, all_tenants=True)
