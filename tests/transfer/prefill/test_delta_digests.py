"""A delta's digests are those of its pages in token order, in whatever pieces they come and are taken."""

from hypothesis import given
from hypothesis import strategies as st

from services.kv.page_digest import digest_of
from services.kv.transfer_plan import runs_of
from services.transfer.prefill.delta_digests import DeltaDigests
from services.values.kv import KvTicket, PageId
from services.values.rank import Generation, Room

PAGE = 4  # tokens


def read_pages(pages):
    return (memoryview(page.to_bytes(8)) for page in pages)


def digests_of(pages):
    return [digest_of(content) for content in read_pages(pages)]


@given(st.data(), st.integers(1, 60))
def test_whatever_the_pieces(data, prompt_len):
    prefix = data.draw(st.integers(0, prompt_len // PAGE))
    num_pages = -(-prompt_len // PAGE)
    table = data.draw(st.permutations(range(num_pages)).map(lambda ids: [PageId(i) for i in ids]))
    runs = runs_of([PageId(i) for i in range(num_pages - prefix)])
    sources = []
    ticket = KvTicket(Room(1), Generation(1), prompt_len, prefix * PAGE, runs, 0.0)
    digests = DeltaDigests(ticket, PAGE, sources)
    for page in table:
        sources.append(page)
        for _ in range(data.draw(st.integers(0, 2))):
            digests.advance(read_pages, data.draw(st.integers(1, 3)))
        assert digests.values == digests_of(sources[prefix:])[: len(digests.values)]
    while digests.advance(read_pages, 1):
        assert len(digests.values) <= num_pages - prefix
    assert digests.complete
    assert digests.values == digests_of(table[prefix:])
