import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.index.write.hash_ledger import HashLedger
from services.index.write.rank_ledger import Contents, RankLedger, UntoldChanges
from services.values.kv import BlockHash, CacheEvents


def events(stored=(), removed=(), resumable=(), no_more=(), cleared=False) -> CacheEvents:
    told = (tuple(map(BlockHash, blocks)) for blocks in (stored, removed, resumable, no_more))
    added, gone, resumable_added, resumable_gone = told
    return CacheEvents(added, gone, cleared, resumable_added, resumable_gone)


def told_everything(*told: CacheEvents) -> RankLedger:
    ledger = RankLedger()
    for each in told:
        ledger.record(each, now=0.0)
    ledger.take_snapshot()
    ledger.told()
    return ledger


def test_both_kinds_are_told_together(subtests: pytest.Subtests) -> None:
    with subtests.test("a block is told held and then resumable"):
        ledger = told_everything()
        ledger.record(events(stored=(1, 2, 3), resumable=(3,)), now=0.0)
        assert ledger.take_delta(2) == UntoldChanges((1, 2), ())
        assert ledger.take_delta(2) == UntoldChanges((3,), (), (3,), ())
        assert not ledger.has_news
    with subtests.test("of a block that is evicted nothing is left"):
        # Even where the engine tells of one kind only.
        ledger = told_everything(events(stored=(1, 2), resumable=(1, 2)))
        ledger.record(events(removed=(2,)), now=0.0)
        assert ledger.take_delta(9) == UntoldChanges((), (2,), (), (2,))
        ledger.record(events(resumable=(2,)), now=0.0)
        assert not ledger.has_news and ledger.resumable == {1}
    with subtests.test("a point that moves on is news though nothing is stored"):
        ledger = told_everything(events(stored=(1, 2), resumable=(1,)))
        ledger.record(events(resumable=(2,), no_more=(1,)), now=5.0)
        assert ledger.has_news and ledger.age_s(6.5) == 1.5
        assert ledger.take_delta(9) == UntoldChanges((), (), (2,), (1,))
        assert ledger.taken_age_s(7.0) == 2.0
    with subtests.test("too much news of one kind is a snapshot of both"):
        ledger = RankLedger(HashLedger(max_untold=2))
        ledger.take_snapshot()
        ledger.record(events(stored=(1, 2, 3), resumable=(2,)), now=0.0)
        assert ledger.needs_snapshot
        snapshot = ledger.take_snapshot()
        assert (set(snapshot.held), set(snapshot.resumable)) == ({1, 2, 3}, {2})
        assert not ledger.has_news
    with subtests.test("who goes on wherever it holds tells no second kind"):
        ledger = RankLedger()
        ledger.record(events(stored=(1, 2)), now=0.0)
        assert ledger.take_snapshot() == Contents((1, 2), ())
        ledger.record(events(stored=(3,), removed=(1,)), now=0.0)
        assert ledger.take_delta(9) == UntoldChanges((3,), (1,))


blocks = st.lists(st.integers(0, 9), max_size=5, unique=True)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("events"), blocks, blocks, st.integers(1, 4), st.booleans()),
        st.tuples(st.just("tell"), st.integers(1, 4), st.booleans()),
    ),
    max_size=40,
)
Told = tuple[set[int], set[int]]


def tell(ledger: RankLedger, told: Told, max_hashes: int, fails: bool) -> Told:
    """What etcd has been told after one more write."""
    held, resumable = told
    if ledger.needs_snapshot:
        contents = ledger.take_snapshot()
        now = set(contents.held), set(contents.resumable)
    else:
        changes = ledger.take_delta(max_hashes)
        each = (changes.added, changes.removed, changes.resumable_added, changes.resumable_removed)
        assert sum(map(len, each)) <= max_hashes
        # As a mirror takes it in.
        resumable = resumable - set(changes.removed) - set(changes.resumable_removed)
        now = (held - set(changes.removed)) | set(changes.added), resumable | set(changes.resumable_added)
    if fails:
        ledger.forget_told()
        return told
    ledger.told()
    assert now[1] <= now[0]
    return now


@given(steps)
def test_what_was_told_ends_up_as_what_there_is(story: list[tuple]) -> None:
    """Of any number at most that many blocks' distance apart a rank can go on."""
    ledger, held, resumable = RankLedger(HashLedger(max_untold=8)), set[int](), set[int]()
    told: Told = set(), set()
    for step in story:
        match step:
            case ("tell", max_hashes, fails):
                told = tell(ledger, told, max_hashes, fails)
            case ("events", stored, removed, every, cleared):
                removed = [block for block in removed if block not in stored]
                held = ((set() if cleared else held) | set(stored)) - set(removed)
                before = set() if cleared else resumable
                resumable = {block for block in held if block % every == 0}
                news = resumable - before, before - resumable
                ledger.record(events(stored, removed, *news, cleared=cleared), now=0.0)
        assert (ledger.held, ledger.resumable) == (held, resumable)
    while ledger.has_news:
        told = tell(ledger, told, 3, fails=False)
    assert told == (held, resumable)
