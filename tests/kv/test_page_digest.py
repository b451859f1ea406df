"""These tests show what is sampled, and which pages differ, against what is said of them by hand."""

from hypothesis import given
from hypothesis import strategies as st

from services.kv.page_digest import differing_pages, digest_of, is_sampled
from services.values.kv import PageId
from services.values.rank import TransferId

transfers = st.integers(0, 2**64 - 1).map(TransferId)
shares = st.floats(0, 1)


@given(transfers, shares, shares)
def test_a_larger_share_has_all_that_a_smaller_one_has(transfer_id, one, other):
    assert is_sampled(transfer_id, min(one, other)) <= is_sampled(transfer_id, max(one, other))
    assert not is_sampled(transfer_id, 0.0)
    assert is_sampled(transfer_id, 1.0)


@given(shares, st.integers(1, 200))
def test_of_transfers_spread_evenly_it_is_that_share(share, num_transfers):
    spread = [TransferId(2**64 * i // num_transfers) for i in range(num_transfers)]
    assert abs(sum(is_sampled(transfer_id, share) for transfer_id in spread) - share * num_transfers) <= 1


contents = st.binary(min_size=1, max_size=32)


@given(st.data(), st.lists(contents, min_size=1, max_size=8))
def test_exactly_the_pages_that_differ_are_named(data, written):
    pages = data.draw(st.permutations(range(100)).map(lambda ids: [PageId(i) for i in ids[: len(written)]]))
    landed = dict(zip(pages, (data.draw(st.just(page) | contents) for page in written), strict=True))
    digests = [digest_of(memoryview(page)) for page in written]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(pages)), min_size=2, max_size=2)))
    groups = [pages[: cuts[0]], pages[cuts[0] : cuts[1]], pages[cuts[1] :]]
    expected = [
        (group, page)
        for group, of_group in enumerate(groups)
        for page in of_group
        if landed[page] != written[pages.index(page)]
    ]

    def read_pages(read, group):
        assert set(read) <= set(groups[group])
        return (memoryview(landed[page]) for page in read)

    assert list(differing_pages(digests, groups, read_pages)) == expected


@given(st.binary(min_size=1, max_size=512), st.data())
def test_one_bit_is_enough(content, data):
    bit = data.draw(st.integers(0, 8 * len(content) - 1))
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    assert digest_of(memoryview(changed)) != digest_of(memoryview(content))
