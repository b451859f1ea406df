from hypothesis import given
from hypothesis import strategies as st

from services.router.watch.changes import Changes

pictures = st.dictionaries(st.integers(0, 5), st.integers(0, 2))


@given(st.lists(pictures))
def test_who_hears_of_every_change_knows_what_there_is(shown):
    known, before = {}, {}
    for after in shown:
        as_pairs = [{key: (key, state) for key, state in picture.items()} for picture in (before, after)]
        changes = Changes.between(*as_pairs)
        assert all(before.get(key) != state for key, state in changes.changed)
        for key, _ in changes.gone:
            del known[key]
        known.update(changes.changed)
        assert known == after
        before = after
