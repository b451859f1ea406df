"""Texts by salt: each finds its own, and all together are bounded."""

from services.engine.paged.draft_sources import Trail
from services.engine.paged.shared_ngrams import SharedNgrams


def told(shared, salt, ids):
    ring = shared.of(salt)
    return ring.match(ids, Trail(), 4) if ring is not None else None


def test_texts_by_salt(subtests):
    with subtests.test("nobody finds what another salt said"):
        shared = SharedNgrams()
        shared.add("a", [1, 2, 3, 4])
        shared.add("b", [5, 6, 7, 8])
        assert list(told(shared, "a", [1, 2, 3])[0].ids) == [4]
        assert told(shared, "b", [1, 2, 3]) is None
        assert told(shared, "", [1, 2, 3]) is None

    with subtests.test("the salt not used for longest goes and memory is bounded"):
        one = SharedNgrams()
        one.add("a", [1, 2, 3, 4])
        shared = SharedNgrams(max_bytes=3 * one.size_bytes)
        for salt in "abc":
            shared.add(salt, [1, 2, 3, 4])
        assert told(shared, "a", [1, 2, 3])
        shared.add("d", [1, 2, 3, 4])
        assert [bool(told(shared, salt, [1, 2, 3])) for salt in "abcd"] == [True, False, True, True]
        shared.add("a", range(5000))  # whose ring grows
        assert shared.size_bytes <= 3 * one.size_bytes
        assert told(shared, "a", [1, 2, 3])
