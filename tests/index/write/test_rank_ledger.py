import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.index.write.rank_ledger import RankLedger
from services.values.kv import BlockHash, CacheEvents


def events(stored=(), removed=(), resumable=(), no_more=(), cleared=False, files=((), ())) -> CacheEvents:
    told = (tuple(map(BlockHash, blocks)) for blocks in (stored, removed, resumable, no_more, *files))
    added, gone, *marks = told
    return CacheEvents(added, gone, cleared, *marks)


def told_everything(*told: CacheEvents) -> RankLedger:
    ledger = RankLedger()
    for each in told:
        ledger.record(each, now=0.0)
    ledger.take_snapshot()
    ledger.reported()
    return ledger


def test_store_and_evict_cancel_out(subtests: pytest.Subtests) -> None:
    with subtests.test("store then evict cancels out"):
        ledger = told_everything()
        ledger.record(events(stored=(1, 2)), now=0.0)
        ledger.record(events(removed=(2, 1)), now=0.0)
        assert not ledger.has_news and ledger.age_s(9.0) == 0.0
    with subtests.test("evict then store is told again and can still be evicted"):
        ledger = told_everything(events(stored=(1,)))
        ledger.record(events(removed=(1,)), now=0.0)
        ledger.record(events(stored=(1,)), now=0.0)
        ledger.record(events(removed=(1,)), now=0.0)
        assert ledger.take_delta(10) == events(removed=(1,))
        ledger.record(events(stored=(1,)), now=0.0)
        ledger.record(events(removed=(1,)), now=0.0)
        assert not ledger.has_news  # etcd has heard that it is gone
        ledger.record(events(stored=(1,)), now=0.0)
        assert ledger.take_delta(10) == events(stored=(1,))


def test_news_and_its_age(subtests: pytest.Subtests) -> None:
    with subtests.test("age is that of the oldest unreported event"):
        ledger = told_everything()
        ledger.record(events(stored=(1,)), now=10.0)
        ledger.record(events(stored=(2,)), now=11.0)
        assert ledger.age_s(12.5) == 2.5
        assert ledger.take_delta(1) == events(stored=(1,))
        assert ledger.age_s(12.5) == 2.5  # the rest may be as old as the first
        ledger.take_delta(1)
        assert ledger.age_s(12.5) == 0.0
    with subtests.test("what does not reach etcd is as old as before"):
        ledger = told_everything()
        ledger.record(events(stored=(1,)), now=10.0)
        ledger.take_delta(10)
        assert ledger.age_s(11.0) == 0.0
        ledger.forget_reported()
        assert ledger.age_s(12.0) == 2.0
        ledger.record(events(removed=(2,)), now=12.0)
        assert ledger.age_s(12.0) == 2.0
        ledger.take_snapshot()
        ledger.forget_reported()
        assert ledger.age_s(13.0) == 3.0
        ledger.take_snapshot()
        ledger.reported()
        ledger.forget_reported()  # a new lease: all is told again, but nothing is news
        assert ledger.age_s(14.0) == 0.0
    with subtests.test("too much news becomes a snapshot"):
        ledger = RankLedger(max_unreported=3)
        ledger.take_snapshot()
        ledger.record(events(stored=(1, 2, 3)), now=0.0)
        assert not ledger.needs_snapshot
        ledger.record(events(stored=(4,)), now=0.0)
        assert ledger.needs_snapshot
        assert set(ledger.take_snapshot().stored) == {1, 2, 3, 4}


def test_both_kinds_are_told_together(subtests: pytest.Subtests) -> None:
    with subtests.test("a block is told held and then resumable"):
        ledger = told_everything()
        ledger.record(events(stored=(1, 2, 3), resumable=(3,)), now=0.0)
        assert ledger.take_delta(2) == events((1, 2), ())
        assert ledger.take_delta(2) == events((3,), (), (3,), ())
        assert not ledger.has_news
    with subtests.test("of a block that is evicted nothing is left"):
        # Even where the engine tells of one kind only.
        ledger = told_everything(events(stored=(1, 2), resumable=(1, 2)))
        ledger.record(events(removed=(2,)), now=0.0)
        assert ledger.take_delta(9) == events((), (2,), (), (2,))
        ledger.record(events(resumable=(2,)), now=0.0)
        assert not ledger.has_news and ledger.resumable == {1}
    with subtests.test("a point that moves on is news though nothing is stored"):
        ledger = told_everything(events(stored=(1, 2), resumable=(1,)))
        ledger.record(events(resumable=(2,), no_more=(1,)), now=5.0)
        assert ledger.has_news and ledger.age_s(6.5) == 1.5
        assert ledger.take_delta(9) == events((), (), (2,), (1,))
        assert ledger.taken_age_s(7.0) == 2.0
    with subtests.test("too much news of one kind is a snapshot of both"):
        ledger = RankLedger(max_unreported=2)
        ledger.take_snapshot()
        ledger.record(events(stored=(1, 2, 3), resumable=(2,)), now=0.0)
        assert ledger.needs_snapshot
        snapshot = ledger.take_snapshot()
        assert (set(snapshot.stored), set(snapshot.resumable_stored)) == ({1, 2, 3}, {2})
        assert not ledger.has_news
    with subtests.test("both kinds together may be too much"):
        ledger = RankLedger(max_unreported=2)
        ledger.take_snapshot()
        ledger.record(events(stored=(1,), resumable=(1,)), now=0.0)
        assert not ledger.needs_snapshot
        ledger.record(events(stored=(2,)), now=0.0)
        assert ledger.needs_snapshot
    with subtests.test("who goes on wherever it holds tells no second kind"):
        ledger = RankLedger()
        ledger.record(events(stored=(1, 2)), now=0.0)
        assert ledger.take_snapshot() == events(stored=(1, 2), cleared=True)
        ledger.record(events(stored=(3,), removed=(1,)), now=0.0)
        assert ledger.take_delta(9) == events((3,), (1,))


blocks = st.lists(st.integers(0, 9), max_size=5, unique=True)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("events"), blocks, blocks, st.integers(1, 4), st.booleans()),
        st.tuples(st.just("tell"), st.integers(1, 4), st.booleans()),
    ),
    max_size=40,
)
Told = tuple[set[int], set[int], set[int]]


def tell(ledger: RankLedger, told: Told, max_hashes: int, fails: bool) -> Told:
    """What etcd has been told after one more write."""
    held, resumable, files = told
    if ledger.needs_snapshot:
        contents = ledger.take_snapshot()
        assert contents.cleared
        now = set(contents.stored), set(contents.resumable_stored), set(contents.files_stored)
    else:
        changes = ledger.take_delta(max_hashes)
        marks = (changes.resumable_stored, changes.resumable_removed)
        marks += (changes.files_stored, changes.files_removed)
        assert sum(map(len, (changes.stored, changes.removed, *marks))) <= max_hashes
        assert not set(changes.stored) & set(changes.removed)
        assert set(changes.removed) <= held
        # As a mirror takes it in.
        resumable = resumable - set(changes.removed) - set(changes.resumable_removed)
        files = files - set(changes.removed) - set(changes.files_removed)
        now = (
            (held - set(changes.removed)) | set(changes.stored),
            resumable | set(changes.resumable_stored),
            files | set(changes.files_stored),
        )
    if fails:
        ledger.forget_reported()
        return told
    ledger.reported()
    assert now[1] <= now[0] and now[2] <= now[0]
    return now


@given(steps)
def test_what_was_told_ends_up_as_what_there_is(story: list[tuple]) -> None:
    """Of any number at most that many blocks' distance apart a rank can go on, and the next ones are in
    files."""
    ledger, held, resumable, files = RankLedger(max_unreported=8), set[int](), set[int](), set[int]()
    told: Told = set(), set(), set()
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
                lay_in_files = set() if cleared else files
                files = {block for block in held if block % every == 1}
                moved = files - lay_in_files, lay_in_files - files
                ledger.record(events(stored, removed, *news, cleared=cleared, files=moved), now=0.0)
        assert (ledger.held, ledger.resumable) == (held, resumable)
    while ledger.has_news:
        told = tell(ledger, told, 3, fails=False)
    assert told == (held, resumable, files)


one_kind = st.lists(st.integers(0, 12), max_size=6, unique=True)
steps_of_one_kind = st.lists(
    st.one_of(
        st.tuples(st.just("stored"), one_kind),
        st.tuples(st.just("removed"), one_kind),
        st.tuples(st.just("cleared"), one_kind),
        st.tuples(st.just("tell"), st.integers(1, 4)),
        st.tuples(st.just("fail"), st.integers(1, 4)),
    ),
    max_size=40,
)


@given(steps_of_one_kind)
def test_what_was_told_ends_up_as_what_is_held(story: list[tuple[str, object]]) -> None:
    ledger, held = RankLedger(), set[int]()
    told: Told = set(), set(), set()
    for verb, argument in story:
        match verb, argument:
            case (("tell" | "fail"), int()):
                told = tell(ledger, told, argument, fails=verb == "fail")
            case "stored", list():
                held |= set(argument)
                ledger.record(events(stored=argument), now=0.0)
            case "removed", list():
                held -= set(argument)
                ledger.record(events(removed=argument), now=0.0)
            case "cleared", list():
                held = set(argument)
                ledger.record(events(stored=argument, cleared=True), now=0.0)
        assert ledger.held == held
    while ledger.has_news:
        told = tell(ledger, told, 3, fails=False)
    assert told == (held, set(), set())
