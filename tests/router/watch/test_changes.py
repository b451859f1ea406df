from hypothesis import given
from hypothesis import strategies as st

from services.router.watch_cluster import Changes, Shown
from services.wire.isthmus.v1.common_pb2 import RankId
from services.wire.isthmus.v1.generation_pb2 import RankStatus


def status(name, generation=1, **fields):
    return RankStatus(rank=RankId(worker=name, generation=generation), **fields)


pictures = st.dictionaries(st.sampled_from("abc"), st.integers(0, 2))


@given(st.lists(pictures))
def test_who_hears_of_every_change_knows_what_there_is(shown):
    known, before = {}, {}
    for after in shown:
        as_told = [
            {name: Shown.of(status(name, incarnation)) for name, incarnation in p.items()}
            for p in (before, after)
        ]
        changes = Changes.between(*as_told)
        for each in changes.changed:
            assert before.get(each.rank.worker) != each.rank.generation
            known[each.rank.worker] = each.rank.generation
        for each in changes.gone:
            del known[each.rank.worker]
        assert known == after
        before = after


def has_changed(before, after):
    (changed, gone) = Changes.between({"d": Shown.of(before)}, {"d": Shown.of(after)})
    assert not gone and changed in ([], [after])
    return bool(changed)


def test_what_time_alone_does_is_no_change_until_it_is_seen():
    idle = status("d", staleness_s=0.1, unregistered_s=0.2, trust=0.991, resume_trust=0.5)
    assert not has_changed(idle, status("d", staleness_s=0.9, trust=0.994, resume_trust=0.5))
    assert has_changed(idle, status("d", staleness_s=1.1, trust=0.991, resume_trust=0.5))
    assert has_changed(idle, status("d", trust=0.98, resume_trust=0.5))
    assert has_changed(idle, status("d", trust=0.99))  # nothing is said of where it goes on
    assert has_changed(idle, status("d", trust=0.99, resume_trust=0.5, index_blocks=1))
