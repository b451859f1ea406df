"""A delta's digests are those of its units in order, in whatever pieces they come and are taken."""

from hypothesis import given
from hypothesis import strategies as st

from services.kv.page_digest import digest_of
from services.kv.tails import units_at
from services.kv.ticket import targets_of
from services.kv.transfer_plan import runs_of
from services.transfer.sending.delta_write import DeltaDigests, Sources
from services.values.kv import KvTicket, PageId
from services.values.rank import Generation, TransferId
from transfer.sending.sending_rank import HYBRID, LAYOUT, PAGE


def read_pages(pages, group):
    return (memoryview(bytes([group]) + page.to_bytes(8)) for page in pages)


def digests_of(pages, group=0):
    return [digest_of(content) for content in read_pages(pages, group)]


@given(st.data(), st.integers(1, 60), st.sampled_from([LAYOUT, HYBRID]))
def test_whatever_the_pieces(data, prompt_len, layout):
    prefix = data.draw(st.integers(0, prompt_len // PAGE))
    num_pages = -(-prompt_len // PAGE)
    table = data.draw(st.permutations(range(num_pages)).map(lambda ids: [PageId(i) for i in ids]))
    carried = tuple(
        data.draw(st.permutations(range(units_at(group, prompt_len, PAGE)))) for group in layout.carried
    )
    runs = runs_of([PageId(i) for i in range(num_pages - prefix)])
    sources = Sources()
    targets = targets_of(layout, prompt_len, carried)
    ticket = KvTicket(TransferId(1), Generation(1), prompt_len, prefix * PAGE, runs, 0.0, targets)
    digests = DeltaDigests(ticket, layout, sources)
    for page in table:
        sources.pages.append(page)
        for _ in range(data.draw(st.integers(0, 2))):
            digests.advance(read_pages, data.draw(st.integers(1, 300)))
        assert digests.values == digests_of(sources.pages[prefix:])[: len(digests.values)]
    sources.carried = carried
    while digests.advance(read_pages, 1):
        pass
    assert digests.complete
    of_carried = [digest for i, units in enumerate(carried, 1) for digest in digests_of(units, i)]
    assert digests.values == digests_of(table[prefix:]) + of_carried
