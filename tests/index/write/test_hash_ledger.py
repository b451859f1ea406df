import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.index.write.hash_ledger import HashLedger
from services.values.kv import BlockHash, CacheEvents


def stored(*blocks: int) -> CacheEvents:
    return CacheEvents(stored=tuple(map(BlockHash, blocks)))


def removed(*blocks: int) -> CacheEvents:
    return CacheEvents(removed=tuple(map(BlockHash, blocks)))


def told_everything(*blocks: int) -> HashLedger:
    ledger = HashLedger()
    ledger.record(stored(*blocks), now=0.0)
    assert set(ledger.take_snapshot()) == set(blocks)
    ledger.told()
    return ledger


def test_store_and_evict_cancel_out(subtests: pytest.Subtests) -> None:
    with subtests.test("store then evict cancels out"):
        ledger = told_everything()
        ledger.record(stored(1, 2), now=0.0)
        ledger.record(removed(2, 1), now=0.0)
        assert not ledger.has_news and ledger.age_s(9.0) == 0.0
    with subtests.test("evict then store is told again and can still be evicted"):
        ledger = told_everything(1)
        ledger.record(removed(1), now=0.0)
        ledger.record(stored(1), now=0.0)
        ledger.record(removed(1), now=0.0)
        assert ledger.take_delta(10) == ((), (1,))
        ledger.record(stored(1), now=0.0)
        assert ledger.take_delta(10) == ((1,), ())


def test_news_and_its_age(subtests: pytest.Subtests) -> None:
    with subtests.test("age is that of the oldest untold event"):
        ledger = told_everything()
        ledger.record(stored(1), now=10.0)
        ledger.record(stored(2), now=11.0)
        assert ledger.age_s(12.5) == 2.5
        assert ledger.take_delta(1) == ((1,), ())
        assert ledger.age_s(12.5) == 2.5  # the rest may be as old as the first
        ledger.take_delta(1)
        assert ledger.age_s(12.5) == 0.0
    with subtests.test("what does not reach etcd is as old as before"):
        ledger = told_everything()
        ledger.record(stored(1), now=10.0)
        ledger.take_delta(10)
        assert ledger.age_s(11.0) == 0.0
        ledger.forget_told()
        assert ledger.age_s(12.0) == 2.0
        ledger.take_snapshot()
        ledger.forget_told()
        assert ledger.age_s(13.0) == 3.0
        ledger.take_snapshot()
        ledger.told()
        ledger.forget_told()  # a new lease: all is told again, but nothing is news
        assert ledger.age_s(14.0) == 0.0
    with subtests.test("too much news becomes a snapshot"):
        ledger = HashLedger(max_untold=3)
        ledger.take_snapshot()
        ledger.record(stored(1, 2, 3), now=0.0)
        assert not ledger.needs_snapshot
        ledger.record(stored(4), now=0.0)
        assert ledger.needs_snapshot
        assert set(ledger.take_snapshot()) == {1, 2, 3, 4}


blocks = st.lists(st.integers(0, 12), max_size=6, unique=True)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("stored"), blocks),
        st.tuples(st.just("removed"), blocks),
        st.tuples(st.just("cleared"), blocks),
        st.tuples(st.just("tell"), st.integers(1, 4)),
        st.tuples(st.just("fail"), st.integers(1, 4)),
    ),
    max_size=40,
)


def tell(ledger: HashLedger, told: set[int], max_hashes: int, fails: bool) -> set[int]:
    """What etcd has been told after one more write."""
    if ledger.needs_snapshot:
        told_now = set(ledger.take_snapshot())
    else:
        added, gone = ledger.take_delta(max_hashes)
        assert len(added) + len(gone) <= max_hashes
        assert not set(added) & set(gone)
        assert set(gone) <= told
        told_now = (told - set(gone)) | set(added)
    if fails:
        ledger.forget_told()
        return told
    return told_now


@given(steps)
def test_what_was_told_ends_up_as_what_is_held(story: list[tuple[str, object]]) -> None:
    ledger, held, told = HashLedger(), set(), set()
    for verb, argument in story:
        match verb, argument:
            case (("tell" | "fail"), int()):
                told = tell(ledger, told, argument, fails=verb == "fail")
            case "stored", list():
                held |= set(argument)
                ledger.record(stored(*argument), now=0.0)
            case "removed", list():
                held -= set(argument)
                ledger.record(removed(*argument), now=0.0)
            case "cleared", list():
                held = set(argument)
                ledger.record(CacheEvents(stored=tuple(map(BlockHash, argument)), cleared=True), now=0.0)
        assert ledger.held == held
    while ledger.has_news:
        told = tell(ledger, told, 3, fails=False)
    assert told == held
