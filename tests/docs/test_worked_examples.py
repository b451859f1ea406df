"""The numbers of the examples in docs/design.md are what the code says. Where one differs the failure shows
the whole block as it is to be."""

from pathlib import Path

import pytest

from services.kv.block_hash import scope_seed, sequence_hashes
from services.kv.ticket import make_ticket, targets_of
from services.kv.transfer_plan import merge_moves
from services.router.placement.candidates import DecodeCandidate, PlacementRequest, PrefillCandidate
from services.router.placement.decision import place
from services.router.placement.price import PriceList, PriceWeights
from services.router.placement.sources import Holder, sources_of
from services.router.ranks.learned import PullPace
from services.values.kv import GroupKind, KvGroup, KvLayout, PageId
from services.values.rank import Generation, RankId, TransferId

DESIGN = (Path(__file__).parents[2] / "docs" / "design.md").read_text()
MODEL, INDEX_BLOCK = "qwen3-8b", 4
PROMPT, OTHER_END, OTHER_START = range(1, 11), (1, 2, 3, 4, 5, 6, 7, 99, 9, 10), (9, 9, 9, 9, 5, 6, 7, 8)
DELTA_PAGES = [PageId(page) for page in (7, 8, 9, 2)]
SOURCE_PAGES = [PageId(page) for page in (40, 41, 42, 43)]
BYTES_PER_S, TOKENS_PER_S = 5e9, 8_000.0


def hashes():
    def line(ids, salt=""):
        names = sequence_hashes(ids, INDEX_BLOCK, scope_seed(MODEL, salt))
        told = " ".join(str(token) for token in ids) + (f", salt {salt!r}" if salt else "")
        return f"{told:<34}" + "  ".join(f"{name:016x}" for name in names)

    return "\n".join([line(PROMPT), line(OTHER_END), line(OTHER_START), line(PROMPT, "acme")])


def ticket():
    made = make_ticket(TransferId(0x5CA1AB1E), Generation(0x77E1), 100, 48, DELTA_PAGES, 512.5)
    runs = runs_line(made.runs)
    return (
        f"room={made.transfer_id:08x} prefill_generation={made.prefill_generation:04x} "
        f"prompt_len={made.prompt_len} "
        f"decode_prefix_len={made.decode_prefix_len}\nruns=[{runs}] write_until_s={made.write_until_s}"
    )


def carried():
    full = KvGroup(GroupKind.FULL_ATTENTION, (0,), 1, 8, "float32")
    window = KvGroup(GroupKind.SLIDING_WINDOW, (1,), 1, 8, "float32", window=32, unit_bytes=1)
    state = KvGroup(GroupKind.RECURRENT, (2,), 0, 0, "float32", unit_bytes=1)
    layout = KvLayout(16, 1 << 10, 1, groups=(full, window, state))
    targets = targets_of(layout, 100, ((5, 6, 7), (3,)))
    made = make_ticket(TransferId(1), Generation(1), 100, 48, DELTA_PAGES, 1.0, targets=targets)
    lines = [f"runs=[{runs_line(made.runs)}]"]
    lines += [f"group {t.group}: from token {t.start_token}, [{runs_line(t.runs)}]" for t in made.targets]
    return "\n".join(lines)


def runs_line(runs):
    return ", ".join(f"{run.first_page} x{run.num_pages}" for run in runs)


D0 = DecodeCandidate(RankId("d0", 0, Generation(1)), 1_600, 4_000, TOKENS_PER_S, 8, 0.02, 50_000, 0, queued=2)
D1 = DecodeCandidate(RankId("d1", 0, Generation(2)), 0, 0, TOKENS_PER_S, 4, 0.02, 500, 50_000)
P0 = PrefillCandidate(RankId("p0", 0, Generation(3)), 512, 0, TOKENS_PER_S, 50_000)
REQUEST = PlacementRequest(2_000, 128 * 2**10, 512)


def prices():
    decodes, p0, request = [D0, D1], P0, REQUEST
    decision = place(request, decodes, [p0], bandwidth, PriceWeights(), tie=0.5)
    listed = PriceList(request, PriceWeights(), bandwidth, decodes, [p0])
    sender = listed.sender(p0)
    ways = []
    for decode in decodes:
        receiver = listed.receiver(decode)
        ways.append((f"remote p0 -> {decode.id.worker}", listed.remote_terms(receiver, sender, BYTES_PER_S)))
        ways.append((f"local        {decode.id.worker}", listed.local_terms(receiver)))
    ways.sort(key=lambda way: sum(way[1].values()))
    assert decision.chosen.total_s == pytest.approx(sum(ways[0][1].values()))
    return "\n".join(price_line(name, terms) for name, terms in ways)


def pulls():
    """The source of both others is d0."""
    layout = KvLayout(page_size=1, page_bytes=128 * 2**10, model_fingerprint=1)
    holder = Holder(D0.id, layout, D0.hit_tokens, D0.hit_tokens, D0.running)
    pace = PullPace(0.005, BYTES_PER_S)
    d1, p0 = (
        rank._replace(sources=sources_of(rank, layout, [holder], lambda source, own: pace))
        for rank in (D1, P0)
    )
    listed = PriceList(REQUEST, PriceWeights(), bandwidth, [D0, d1], [p0])
    [of_d1], [of_p0] = d1.sources, p0.sources
    receiver, sender = listed.receiver(D0), listed.sender(p0, of_p0)
    ways = [
        ("remote d0 -> p0 -> d0", listed.remote_terms(receiver, sender, BYTES_PER_S)),
        ("local        d0 -> d1", listed.local_terms(listed.receiver(d1), of_d1)),
    ]
    decision = place(REQUEST, [D0, d1], [p0], bandwidth, PriceWeights(), tie=0.5)
    assert decision.chosen.total_s == pytest.approx(sum(ways[0][1].values()))
    return "\n".join(price_line(name, terms) for name, terms in ways)


def price_line(name, terms):
    told = "  ".join(f"{term} {1e3 * seconds:.1f}" for term, seconds in terms.items() if seconds)
    return f"{name}  {1e3 * sum(terms.values()):5.1f} = {told}"


def bandwidth(_prefill, _decode):
    return BYTES_PER_S


def test_an_example_says_what_the_code_says(subtests):
    for example in [hashes, ticket, carried, prices, pulls]:
        with subtests.test(example.__name__):
            text = example()
            assert f"```\n{text}\n```" in DESIGN, f"in docs/design.md:\n{text}"


def test_the_seed_is_the_models_and_neighbours_travel_together():
    assert f"seed `{scope_seed(MODEL):016x}`" in DESIGN

    moves = merge_moves(SOURCE_PAGES, DELTA_PAGES)
    assert [(move.source_page, move.target_page, move.num_pages) for move in moves] == [
        (40, 7, 3),
        (43, 2, 1),
    ]
    assert "40..42 to 7..9, and 43 to 2" in DESIGN
