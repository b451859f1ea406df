"""Deliberate mistakes, to see whether the tests notice: `pytest --mutate=NAME` must fail.

A plugin that is always loaded; without the option it does nothing.
"""

import pytest
from hypothesis import Phase, settings


def wrong_page(patch: pytest.MonkeyPatch) -> None:
    """The first page of every write is another one than it should be, and nobody compares digests.

    (Two pages in each other's place would not do: attention does not care for the order of what it reads.)
    """
    from services.engine.paged.shell import transferring_engine

    wrong_page_with_digests(patch)
    patch.setattr(transferring_engine, "is_sampled", lambda transfer_id, share: False)


def wrong_page_with_digests(patch: pytest.MonkeyPatch) -> None:
    """The first page of every write is another one than it should be."""
    from services.transfer.sending import delta_write

    merge_moves = delta_write.merge_moves

    def mutated(sources, targets, group):
        if group == 0 and sources:
            sources = [sources[0] ^ 1, *sources[1:]]
        return merge_moves(sources, targets, group)

    patch.setattr(delta_write, "merge_moves", mutated)


def prefix_off_by_one_page(patch: pytest.MonkeyPatch) -> None:
    """Decode claims one page more than it holds, asks for one less, and checks neither bytes nor digests."""
    from services.engine.paged.shell import delta, transferring_engine

    make_ticket = delta.make_ticket

    def mutated(transfer_id, generation, prompt_len, prefix_len, pages, write_until_s, **wanted):
        page_size = next(s for s in (1, 4, 16, 64) if -(-(prompt_len - prefix_len) // s) == len(pages))
        if len(pages) > 1:
            prefix_len, pages = prefix_len + page_size, pages[1:]
        return make_ticket(transfer_id, generation, prompt_len, prefix_len, pages, write_until_s, **wanted)

    patch.setattr(delta, "make_ticket", mutated)
    patch.setattr(delta, "_check_bytes", lambda moved, expected: None)
    patch.setattr(transferring_engine, "is_sampled", lambda transfer_id, share: False)


def stale_generation(patch: pytest.MonkeyPatch) -> None:
    """A prefill rank takes what was meant for an earlier life of it, and decode does not look either."""
    from dataclasses import replace

    from services.engine.paged.shell.prefill_engine import PagedPrefillEngine
    from services.transfer.receiving import sender_links as links
    from services.transfer.sending import transfers

    check_ticket, prefill = transfers.check_ticket, PagedPrefillEngine.prefill

    def any_ticket(ticket, prompt_len, layout, memory, own_generation):
        check_ticket(
            replace(ticket, prefill_generation=own_generation), prompt_len, layout, memory, own_generation
        )

    async def any_rendezvous(self, request, rendezvous):
        return await prefill(self, request, replace(rendezvous, prefill=self._own_id))

    def any_life(message):
        peer, stamp_s = read_hello(message)
        return replace(peer, rank=AnyRank(peer.rank)), stamp_s

    class AnyRank:
        def __init__(self, rank):
            self._rank = rank

        def __eq__(self, other):
            return True

        def __hash__(self):
            return 0

        def __getattr__(self, name):
            return getattr(self._rank, name)

    read_hello = links.read_hello
    patch.setattr(transfers, "check_ticket", any_ticket)
    patch.setattr(PagedPrefillEngine, "prefill", any_rendezvous)
    patch.setattr(links, "read_hello", any_life)


def grant_unlocked(patch: pytest.MonkeyPatch) -> None:
    """A source holds nothing of what it grants: it may be evicted and written anew while it is read."""
    from services.engine.paged.pulls import Pulls

    grant = Pulls.grant

    def mutated(pulls, transfer_id, *request):
        granted = grant(pulls, transfer_id, *request)
        pulls.grant_ended(transfer_id)
        return granted

    patch.setattr(Pulls, "grant", mutated)


def grant_one_page_more(patch: pytest.MonkeyPatch) -> None:
    """A source grants a page behind what it has of the prompt."""
    from dataclasses import replace

    from services.engine.paged.pulls import Granted, Pulls

    grant = Pulls.grant

    def mutated(pulls, transfer_id, ids, salt, least_end):
        granted = grant(pulls, transfer_id, ids, salt, least_end)
        page_size = pulls._cache.page_size
        if not isinstance(granted, Granted) or granted.end + page_size > len(ids):
            return granted
        more = next(page for page in range(pulls._cache.num_pages) if page not in granted.pages)
        return replace(granted, end=granted.end + page_size, pages=(*granted.pages, more))

    patch.setattr(Pulls, "grant", mutated)


def point_of_another_border(patch: pytest.MonkeyPatch) -> None:
    """A source lends the tails and the state of another checkpoint than the one whose position it grants."""
    from dataclasses import replace

    from services.engine.paged.pulls import Granted, Pulls
    from services.kv.tails import units_at

    grant = Pulls.grant

    def mutated(pulls, transfer_id, *request):
        granted, points = grant(pulls, transfer_id, *request), list(pulls._carried.points)
        if not isinstance(granted, Granted):
            return granted
        other = next((point for point in points if point.position != granted.end), None)
        if other is None:
            return granted
        pools = pulls._carried._pools
        units = iter(other.tails)
        carried = tuple(next(units) if p.group.kind.is_windowed else (other.slot,) for p in pools)
        if [*map(len, carried)] != [units_at(p.group, granted.end, pulls._cache.page_size) for p in pools]:
            return granted
        return replace(granted, carried=carried)

    patch.setattr(Pulls, "grant", mutated)


def pull_failed_without_quarantine(patch: pytest.MonkeyPatch) -> None:
    """Whoever gives a source up computes in the pages that it may still write."""
    from services.kv import handshake
    from services.kv.handshake import PullEffect, PullEvent, PullState

    given_up = (PullState.OVER, (PullEffect.COMPUTE,))
    patch.setitem(handshake.PULL, (PullState.STOPPING, PullEvent.LATE), given_up)


def publish_before_landed(patch: pytest.MonkeyPatch) -> None:
    """The tokens that a source is to write count from its grant on."""
    from services.kv import handshake
    from services.kv.handshake import PullEffect, PullEvent, PullState

    published = (PullState.FILLING, (PullEffect.SEND_TICKET, PullEffect.PUBLISH))
    patch.setitem(handshake.PULL, (PullState.ASKED, PullEvent.GRANTED), published)
    patch.setitem(handshake.PULL, (PullState.FILLING, PullEvent.LANDED), (PullState.OVER, ()))


def tier_without_digest(patch: pytest.MonkeyPatch) -> None:
    """Nobody compares what comes up from a tier with what went down."""
    from services.tier import copies

    patch.setattr(copies, "is_whole", lambda content, digest: True)


def tier_wrong_parent(patch: pytest.MonkeyPatch) -> None:
    """A block below the pool is named by its own tokens, whatever came before it."""
    from services.engine.paged import tier_storing
    from services.kv.tiers import tier_keys

    next_key = tier_keys.next_key

    def mutated(scope_key, parent, packed_block):
        return next_key(scope_key, tier_keys.ROOT, packed_block)

    patch.setattr(tier_keys, "next_key", mutated)
    patch.setattr(tier_storing, "next_key", mutated)


def demote_after_eviction(patch: pytest.MonkeyPatch) -> None:
    """Pages are copied down though they have been evicted and are somebody else's."""
    from services.engine.paged.tier_storing import Storing

    patch.setattr(Storing, "lent", lambda self, pages: None)


def demote_state_after_eviction(patch: pytest.MonkeyPatch) -> None:
    """A checkpoint is copied down though it has been evicted and its state is somebody else's."""
    from services.engine.paged.tier_storing import Storing

    patch.setattr(Storing, "_copy_no_more", lambda self, point: None)


def resume_before_the_state(patch: pytest.MonkeyPatch) -> None:
    """Who has read the pages up to a checkpoint goes on there, though its state or its tails did not come."""
    from services.engine.paged.tiering import Tiering

    take = Tiering._take_read

    def mutated(self, fill):
        if take(self, fill) or not fill.found.parts:
            return True
        fill.seq.computed = fill.found.end
        fill.seq.stored = max(fill.seq.stored, fill.found.end)
        return True

    patch.setattr(Tiering, "_take_read", mutated)


def state_of_another_border(patch: pytest.MonkeyPatch) -> None:
    """A checkpoint below the pool is named by its layout alone, not by the block at whose end it lies."""
    from services.engine.paged.tiered_pool import TieredPool
    from services.kv.tiers.tier_keys import ROOT

    part_keys = TieredPool.part_keys

    def mutated(self, salt, block_key, position):
        return part_keys(self, salt, ROOT, position)

    patch.setattr(TieredPool, "part_keys", mutated)


def ticket_promises_tier(patch: pytest.MonkeyPatch) -> None:
    """A decode rank has prefill write less than it lacks: what its tier is to fill counts as filled."""
    from services.engine.paged.sequence import Phase
    from services.engine.paged.tiering import Tiering

    enter = Tiering.enter

    def mutated(self, seq, **options):
        if not enter(self, seq, **options) or seq.phase is not Phase.RECEIVING:
            return seq in self._fills
        fill = self._fills[seq]
        seq.stored = max(seq.stored, (fill.found.first + len(fill.found.blocks)) * self._block_tokens)
        return False

    patch.setattr(Tiering, "enter", mutated)


def fill_where_a_source_writes(patch: pytest.MonkeyPatch) -> None:
    """Whoever gives a source up reads its tier into the pages that the source may still write."""
    from services.engine.paged.pulls import Pulls

    patch.setattr(Pulls, "set_aside", lambda self, seq, transfer_id, end: self.failed(seq))
    patch.setattr(Pulls, "end_aside", lambda self, transfer_id: None)


def closure_off(patch: pytest.MonkeyPatch) -> None:
    """A tier lets a block go though its children are still there."""
    from services.kv.tiers import books

    def drop(self, block):
        children, block.children = block.children, set()
        real(self, block)
        block.children = children

    real = books.TierBooks.drop
    patch.setattr(books.TierBooks, "drop", drop)


def tier_keeps_its_losses(patch: pytest.MonkeyPatch) -> None:
    """Routers are not told what a tier lets go: they send requests there for it."""
    from dataclasses import replace

    from services.kv.tiers.books import TierBooks

    take = TierBooks.take_events
    patch.setattr(TierBooks, "take_events", lambda books: replace(take(books), removed=()))


def leaving_writes_without_end(patch: pytest.MonkeyPatch) -> None:
    """A rank that leaves stores whatever its requests leave, however often its file was full of it."""
    from services.engine.paged import tier_storing

    patch.setattr(tier_storing, "_MOST_KEPT", 1 << 20)


def take_over_evicts_younger(patch: pytest.MonkeyPatch) -> None:
    """A prefix taken over from a rank that leaves displaces what was used since, as one used now does."""
    from services.kv.prefix_cache import PrefixCache

    def mutated(cache, pages, num_pages, *, protected):
        num_pages = min(num_pages, cache.available_pages)
        cache.extend(pages, num_pages)
        return num_pages

    patch.setattr(PrefixCache, "extend_idle", mutated)


MUTATIONS = {
    f.__name__: f
    for f in (
        wrong_page,
        wrong_page_with_digests,
        prefix_off_by_one_page,
        stale_generation,
        grant_unlocked,
        grant_one_page_more,
        point_of_another_border,
        pull_failed_without_quarantine,
        publish_before_landed,
        tier_without_digest,
        tier_wrong_parent,
        demote_after_eviction,
        demote_state_after_eviction,
        resume_before_the_state,
        state_of_another_border,
        closure_off,
        ticket_promises_tier,
        fill_where_a_source_writes,
        tier_keeps_its_losses,
        leaving_writes_without_end,
        take_over_evicts_younger,
    )
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--mutate", choices=sorted(MUTATIONS), help="make a deliberate mistake")


def pytest_configure(config: pytest.Config) -> None:
    """Let hypothesis stop at the first example that fails: to find the smallest one takes up to 94 s."""
    if config.getoption("--mutate"):
        found = settings(phases=(Phase.explicit, Phase.generate), database=None)
        settings.register_profile("mutated", found)
        settings.load_profile("mutated")


@pytest.fixture(scope="session", autouse=True)
def mutation(request):
    name = request.config.getoption("--mutate")
    if name is None:
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        MUTATIONS[name](patch)
        yield
