import pytest

from services.router.keys.callers import ANYBODY, Caller
from services.router.watch.asked import Asked, read_asked
from services.values.errors import Forbidden, InvalidRequest
from services.wire.isthmus.v1.generation_pb2 import WatchClusterRequest

ACME, BARE, OPERATOR = Caller("acme"), Caller(), Caller(is_operator=True)


def asked(caller=ANYBODY, **fields):
    return read_asked(WatchClusterRequest(**fields), caller)


@pytest.mark.parametrize(("interval_s", "taken_s"), [(0, 1.0), (0.1, 0.1), (60, 60.0)])
def test_intervals(interval_s, taken_s):
    assert asked(interval_s=interval_s) == Asked(taken_s, "")


def test_candidates_are_told_unless_they_are_not_wanted():
    for scope in ({}, {"all_tenants": True}):
        assert asked(**scope).wants_candidates and not asked(**scope, no_candidates=True).wants_candidates


@pytest.mark.parametrize("interval_s", [-1, 0.05, 61, float("nan"), float("inf")])
def test_an_interval_that_cannot_be_is_named(interval_s):
    with pytest.raises(InvalidRequest, match=r"^interval_s must be"):
        asked(interval_s=interval_s)


def test_a_tenant_must_be_an_id_and_not_beside_all():
    with pytest.raises(InvalidRequest, match=r"^tenant must be"):
        asked(tenant="a\n")
    with pytest.raises(InvalidRequest, match=r"^tenant must be empty"):
        asked(tenant="a", all_tenants=True)


@pytest.mark.parametrize(
    ("caller", "tenant", "watched"),
    [(ANYBODY, "", ""), (BARE, "b", "b"), (ACME, "", "acme"), (ACME, "acme", "acme"), (OPERATOR, "b", "b")],
)
def test_whose_requests_are_seen(caller, tenant, watched):
    watch = asked(caller, tenant=tenant)
    assert [name for name in ("", "acme", "b") if watch.sees(name)] == [watched]


def test_another_tenants_requests_are_not_shown():
    with pytest.raises(Forbidden, match="'b' is not this API key's"):
        asked(ACME, tenant="b")


@pytest.mark.parametrize("caller", [ANYBODY, OPERATOR, Caller("acme", is_operator=True)])
def test_an_operator_sees_everybodys(caller):
    assert asked(caller, all_tenants=True).sees("anybody")


@pytest.mark.parametrize("caller", [ACME, BARE])
def test_nobody_else_does(caller):
    with pytest.raises(Forbidden, match="operator"):
        asked(caller, all_tenants=True)
