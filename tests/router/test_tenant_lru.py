import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.tenant_lru import TenantLru

MAX_SIZE, MAX_ENTRIES = 20, 6


class Oracle:
    """All entries in the order of their last use; adds everything up again at each step."""

    def __init__(self) -> None:
        self.entries: list[tuple[str, int, int]] = []  # tenant, key, size

    def find(self, tenant: str, key: int) -> tuple[str, int, int] | None:
        return next((entry for entry in self.entries if entry[:2] == (tenant, key)), None)

    def use(self, tenant: str) -> float:
        sizes = [size for owner, _, size in self.entries if owner == tenant]
        return max(sum(sizes) / MAX_SIZE, len(sizes) / MAX_ENTRIES)

    def is_over(self) -> bool:
        return sum(size for _, _, size in self.entries) > MAX_SIZE or len(self.entries) > MAX_ENTRIES


ops = st.lists(
    st.tuples(
        st.sampled_from(["put", "put", "put", "get", "pop"]),
        st.sampled_from("abcd"),
        st.integers(0, 5),
        st.integers(0, MAX_SIZE + 2),
    ),
    max_size=60,
)


@given(ops)
def test_the_fullest_tenant_gives_up_what_it_has_not_used_for_longest(ops) -> None:
    lru, oracle = TenantLru[int, int](MAX_SIZE, MAX_ENTRIES), Oracle()
    for verb, tenant, key, size in ops:
        found = oracle.find(tenant, key)
        if verb == "get":
            assert lru.get(tenant, key) == (None if found is None else found[2])
        elif verb == "pop":
            lru.pop(tenant, key)
        if found is not None:
            oracle.entries.remove(found)
        if verb == "get" and found is not None:
            oracle.entries.append(found)
        if verb == "put":
            gone = lru.put(tenant, key, size, size)
            if size > MAX_SIZE:
                assert gone == [(key, size)]
                continue
            oracle.entries.append((tenant, key, size))
            for entry in gone:
                assert oracle.is_over()
                # Of those that use the most any may have to give up its oldest entry.
                most = max(map(oracle.use, "abcd"))
                fullest = [each for each in "abcd" if oracle.use(each) == most]
                oldest = [next(each for each in oracle.entries if each[0] == owner) for owner in fullest]
                (taken, *_) = [each for each in oldest if each[1:] == entry and lru.peek(*each[:2]) is None]
                oracle.entries.remove(taken)
            assert not oracle.is_over()
    assert len(lru) == len(oracle.entries) and lru.size == sum(size for _, _, size in oracle.entries)
    assert all(lru.peek(tenant, key) == size for tenant, key, size in oracle.entries)


def test_tenants_that_left_leave_nothing_behind() -> None:
    lru = TenantLru[int, str](100)
    for number in range(1000):
        lru.put(f"t{number}", 0, "x", 10)
    assert len(lru) == len(lru._entries) == len(lru._sizes) == 10
    assert len(lru._fullest) <= 2 * 10 + 64 + 1


def test_a_bound_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="max_entries"):
        TenantLru[int, int](10, 0)
