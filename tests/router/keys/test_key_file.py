import pytest

from services.router.api_keys import digest, read_keys
from services.router.callers import ANYBODY, Caller, calling, current
from services.values.errors import ConfigError, Forbidden


def test_what_a_key_is_good_for(subtests):
    for line, caller in [
        ("k", Caller()),
        ("  k\t", Caller()),
        ("k tenant=acme", Caller("acme")),
        ("k  operator", Caller(is_operator=True)),
        ("k operator tenant=a=b", Caller("a=b", is_operator=True)),
    ]:
        with subtests.test(line=line):
            assert read_keys(f"\n{line}\n\nother\n") == {digest("k"): caller, digest("other"): Caller()}
    with subtests.test("a key may stand there twice if it is the same"):
        assert len(read_keys("k tenant=a\nk tenant=a\n")) == 1
    for line, problem in [
        ("s3cret tenant=", "a tenant's name has"),
        (f"s3cret tenant={'x' * 129}", "a tenant's name has"),
        ("s3cret tenant=a tenant=b", r"must be KEY \[tenant=NAME\] \[operator\]"),
        ("s3cret operator operator", "must be KEY"),
        ("s3cret admin", "must be KEY"),
        ("first operator", "another's, too"),
    ]:
        with subtests.test(line=line):
            with pytest.raises(ConfigError, match=f"line 3.*{problem}") as refused:
                read_keys(f"first\n\n{line}\n")
            assert "s3cret" not in str(refused.value) and "first" not in str(refused.value)


def test_whose_a_request_is(subtests):
    with subtests.test("whose a request is"):
        assert Caller().tenant_of("b") == "b" and Caller().tenant_of("") == ""
        assert Caller("a").tenant_of("") == Caller("a").tenant_of("a") == "a"
        with pytest.raises(Forbidden):
            Caller("a").tenant_of("b")
    with subtests.test("without keys anybody is an operator"):
        assert current() == ANYBODY and ANYBODY.is_operator and ANYBODY.tenant_of("b") == "b"
        with calling(Caller("a")):
            assert current() == Caller("a")
        assert current() == ANYBODY
