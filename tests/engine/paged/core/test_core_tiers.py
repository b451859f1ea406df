"""A core with tiers below its pool, whose copies are run by hand."""

import errno
import os
import random
import shutil
from dataclasses import replace

from engine.paged.core_rank import Rank
from services.engine.fake import continuation, fake_state, fake_window
from services.engine.paged.sequence import Phase
from services.engine.paged.tiered_pool import TieredPool
from services.engine.paged.tiering import FillHooks, Tiering
from services.kv.tiers import use_order
from services.kv.tiers.block import SlotState
from services.kv.tiers.books import TierBooks
from services.kv.tiers.records import LateTier, SlotKind, Stored
from services.kv.tiers.tier_keys import ROOT, keys_of, layout_id, scope
from services.kv.tiers.write_budget import WriteBudget
from services.tier import slab as slabs
from services.tier.copies import HostStaging, LoadCopy, Move, Store
from services.tier.shared import SharedFiles
from services.tier.slab import FileCalls, SlabShape
from services.values.kv import GroupKind
from services.values.rank_reports import RankLoad
from services.values.request import TenantShare

PAGE, BLOCK = 4, 8
CARRIED = (
    (fake_state(20),),
    (fake_window(10),),
    (fake_window(6, GroupKind.CHUNKED_WINDOW), fake_state()),
    (fake_window(30), fake_window(12), fake_state(3)),
)


class ByHand:
    """The tier's thread, whose copies run when they are told to."""

    def __init__(self, slabs, staging, done):
        self.slabs, self.staging, self.done = slabs, staging, done
        self.waiting = []
        self.takes, self.most = True, 99
        self.running = None

    @property
    def num_writes(self):
        return sum(isinstance(copy, Store | Move) for copy in self.waiting)

    may_read_ahead = True

    def submit(self, copy):
        takes = self.takes and len(self.waiting) < self.most
        if takes:
            self.waiting.append(copy)
        return takes

    def run(self, kind=object):
        for copy in [copy for copy in self.waiting if isinstance(copy, kind)]:
            self.waiting.remove(copy)
            copy.run(self.slabs, self.staging)
            self.done(copy)


class TieredRank(Rank):
    def __init__(
        self, num_slots=(64,), num_pages=24, tiers=None, in_files=(), budget=None, shared=None, **rank
    ):
        """`tiers` are another life's slabs; `shared`: the directory of all files, and the name of its own."""
        super().__init__(num_pages=num_pages, page_size=PAGE, block_pages=BLOCK // PAGE, **rank)
        self.faults = {}
        self.read_ahead = []
        self.told, self.told_of_points = set(), set()  # as who follows the events knows what its tiers hold
        core, runner = self.core, self.runner
        pool = TieredPool(core.cache, core.carried, runner.draft, runner.layout, BLOCK)
        shapes = [SlabShape(layout_id(pool.layout, BLOCK), pool.slot_bytes, count) for count in num_slots]
        self.slabs = tiers or [slabs.open_memory(None, shape, self.calls()) for shape in shapes]
        others = None
        if shared is not None:
            self.slabs, in_files = [slabs.open_file(*shared, shapes[0], self.calls())], (True,)
            others = SharedFiles(shared[0] / shapes[0].layout_id.hex(), shared[1], shapes[0], self.calls())
        books = TierBooks(num_slots, in_files)
        books.load([slab.records() for slab in self.slabs])
        staging = HostStaging(
            pool.slot_bytes, pool.layout.unit_bytes, (runner.memory, *runner.carried_memory)
        )
        self.others = others
        self.tiers = core.tiers = Tiering(
            *(books, lambda done: self._begin(staging, done), pool),
            *(num_pages // 2, self._clock, lambda: None, budget, others),
        )
        hooks = (core._publish, core._offer, core._catch_up, core._reserve, core.load)
        self.tiers.attach(FillHooks(*hooks, core._charges.reused, core._carrying, core._active))
        core.cache._note_lent = lambda pages: self.tiers.storing.lent(pages)

    def step(self):
        super().step()
        events = self.tiers.books.take_events()
        self.told |= set(events.stored)
        self.told -= set(events.removed)
        self.told_of_points |= set(events.resumable_stored)
        self.told_of_points -= set(events.resumable_removed)

    def _begin(self, staging, done):
        self.thread = ByHand(
            [*self.slabs, *([self.others] if self.others is not None else [])], staging, done
        )
        return self.thread

    def calls(self):
        def pread(fd, buffers, at):
            if at in self.faults:
                raise self.faults[at]
            return os.preadv(fd, buffers, at)

        def will_need(fd, at, count):
            self.read_ahead.append(at)
            pread(fd, [], at)

        return FileCalls(pread=pread, will_need=will_need)

    def slot_at(self, place):
        shape = self.slabs[place.tier].shape
        return shape.slots_at + place.slot * shape.slot_bytes

    def generate(self, prompt, max_tokens=3, **request):
        """Its tokens, with all copies run at once."""
        seq = self.submit(prompt, max_tokens, **request)
        while seq not in self.finished:
            self.turn()
        self.turn()  # what it left is stored
        return self.tokens[seq]

    def turn(self):
        self.now += 1.0
        self.step()
        held = self.tiers.books._blocks.values()
        of_kind = {kind: set() for kind in SlotKind}
        for block in held:
            if block.state is SlotState.HELD:
                of_kind[block.kind].add(block.block_hash)
        assert (self.told, self.told_of_points) == (of_kind[SlotKind.BLOCK], of_kind[SlotKind.END])
        assert 0 not in self.told, "a block without its hash"
        self.thread.run()
        self.core.check()

    def keep_all(self, most_turns):
        """It leaves."""
        storing, turns = self.tiers.storing, 0
        storing.keep_all(True)
        while not storing.has_kept_all:
            self.turn()
            turns += 1
            assert turns <= most_turns

    def fill_pool(self, seed, count=3):
        for number in range(count):
            prompt = prompt_of(100 * seed + number, 40)
            assert self.generate(prompt) == self.expected(prompt, 3)


def with_stored(prompt, **rank):
    """A rank that has the prompt's whole blocks in its tier alone."""
    rank = TieredRank(**rank)
    rank.generate(prompt)
    rank.fill_pool(2)
    return rank


def prompt_of(seed, length):
    return random.Random(seed).choices(range(500), k=length)


def waiting(prompt, **rank):
    """A rank whose pool another request has filled, and the prompt's request, which waits for it to end."""
    rank = with_stored(prompt, **rank)
    rank.submit(prompt_of(50, 60), 30)
    rank.step()
    seq = rank.submit(prompt, 3)
    return rank, seq


def test_what_lies_in_a_file_is_read_ahead_while_its_request_waits():
    prompt = prompt_of(1, 40)
    rank, seq = waiting(prompt, in_files=(True,))
    rank.turn()
    rank.turn()
    blocks = rank.tiers.books.find(rank.tiers._finding.wanted(seq))
    assert (seq.phase, len(blocks)) == (Phase.WAITING, 4)
    assert rank.read_ahead == [rank.slot_at(block.place) for block in blocks], "once each, in order"
    assert rank.tiers.counts.tokens_ahead == 4 * BLOCK
    while seq not in rank.finished:
        rank.turn()
    assert rank.tokens[seq] == continuation(prompt, 3)


def test_nothing_is_read_ahead_that_lies_in_memory_or_takes_longer_than_computing():
    prompt = prompt_of(1, 40)
    in_memory, _ = waiting(prompt)
    in_memory.turn()
    slow, _ = waiting(prompt, in_files=(True,))
    slow.tiers._health.trust[0].bytes_per_s = 1.0
    computes = RankLoad(prefill_tokens_per_s=1000.0)
    slow.tiers.attach(replace(slow.tiers._hooks, load=lambda: computes))
    slow.turn()
    assert in_memory.read_ahead == slow.read_ahead == []


def test_a_disk_that_fails_while_it_reads_ahead_costs_no_request():
    prompt = prompt_of(1, 40)
    rank, seq = waiting(prompt, in_files=(True,))
    blocks = rank.tiers.books.find(rank.tiers._finding.wanted(seq))
    rank.faults[rank.slot_at(blocks[0].place)] = OSError(errno.EIO, "I/O error")
    while seq not in rank.finished:
        rank.turn()
    assert rank.tokens[seq] == continuation(prompt, 3)
    assert rank.tiers.counts.errors == 2 and len(rank.read_ahead) == 1, "ahead, and in its turn"


def test_what_was_evicted_is_read_instead_of_computed():
    rank = TieredRank()
    prompts = [prompt_of(seed, 40) for seed in range(4)]  # two fit
    for prompt in prompts:
        rank.generate(prompt)
    rank.turn()
    computed = rank.computed_tokens
    for prompt in prompts:
        assert rank.generate(prompt) == continuation(prompt, 3)
    # Of 40 tokens 39 may be matched: 4 blocks and one page of the fifth, which is no whole block.
    assert rank.computed_tokens - computed <= 4 * (8 + 2)
    assert rank.tiers.counts.hits >= 3 and rank.tiers.counts.loads == {"whole": rank.tiers.counts.hits}


def test_with_windows_and_states_what_was_evicted_is_read_up_to_its_checkpoint(subtests):
    for carried in CARRIED:
        with subtests.test(carried=[group.kind.value for group in carried]):
            rank = TieredRank(num_slots=(300,), carried=carried)
            prompts = [prompt_of(seed, 43) for seed in range(4)]  # two fit
            for prompt in prompts:
                rank.generate(prompt)
            rank.turn()
            computed = rank.computed_tokens
            for prompt in prompts:
                assert rank.generate(prompt) == rank.expected(prompt, 3)
            # The last border is at 40, and after the first token each step computes one.
            assert rank.computed_tokens - computed == 4 * (3 + 2)
            assert rank.tiers.counts.loads["whole"] >= 3
            life = TieredRank(tiers=rank.slabs, num_slots=(300,), carried=carried)
            for prompt in prompts:
                assert life.generate(prompt) == rank.expected(prompt, 3)
            assert life.computed_tokens == 4 * (3 + 2), "a checkpoint does not outlive its rank"


def test_a_state_that_was_evicted_is_copied_no_more():
    """There are enough pages, and too few states."""
    rank = TieredRank(num_slots=(300,), num_pages=400, carried=(fake_state(20),), room_for=16)
    prompts = [prompt_of(seed, 11) for seed in range(32)]
    for prompt in prompts[:16]:
        rank.run([rank.submit(prompt, 3)])
    rank.now += 1.0
    rank.step()
    late = [copy for copy in rank.thread.waiting if len(copy.blocks) > 1]
    assert late, "states are short, so theirs are to be stored"
    rank.thread.waiting = [copy for copy in rank.thread.waiting if copy not in late]
    rank.thread.run()
    rank.thread.takes = False
    for prompt in prompts[16:]:
        rank.run([rank.submit(prompt, 3)])  # All states are others' by now.
    rank.thread.waiting, rank.thread.takes = late, True
    rank.turn()
    rank.turn()
    overtaken = rank.tiers.counts.overtaken
    rank.core.cache.clear()
    for prompt in prompts[:16]:
        assert rank.generate(prompt) == rank.expected(prompt, 3)
    assert overtaken > 0


def test_a_state_that_does_not_come_whole_is_computed(subtests):
    prompt, carried = prompt_of(1, 43), (fake_window(30), fake_state(20))
    for ends in ("corrupt", "failed", "late", "cancelled", "refused"):
        with subtests.test(ends):
            rank = TieredRank(num_slots=(300,), carried=carried)
            rank.generate(prompt)
            rank.fill_pool(2)
            rank.core.cache.clear()
            rank.thread.takes = ends != "refused"
            computed, seq = rank.computed_tokens, rank.submit(prompt)
            rank.step()
            loads = [copy for copy in rank.thread.waiting if isinstance(copy, LoadCopy)]
            assert [piece.block.kind.name for load in loads for piece in load.pieces][5:] == [
                *(["PART"] * 6 + ["END"] if loads else []),
            ]
            place = loads[0].pieces[-2].place if loads else None
            if ends == "corrupt":
                os.pwrite(rank.slabs[0]._fd, b"\xee", rank.slot_at(place))
            elif ends == "failed":
                rank.faults[rank.slot_at(place)] = OSError(5, "I/O error")
            elif ends == "late":
                rank.now += 31.0
                rank.step()
            elif ends == "cancelled":
                rank.core.cancel(seq)
                before = [pool.copy() for pool in (rank.runner.slots, *rank.runner.carried_pools)]
                rank.thread.run(LoadCopy)
                now = (rank.runner.slots, *rank.runner.carried_pools)
                assert all((old == new).all() for old, new in zip(before, now, strict=True))
                seq = rank.submit(prompt)
            rank.thread.takes = True
            while seq not in rank.finished:
                rank.turn()
            assert rank.tokens[seq] == rank.expected(prompt, 5)
            due = 3 if ends == "cancelled" else 43  # Who is asked again finds all of it.
            assert rank.computed_tokens - computed == due + 4


def test_a_state_is_that_of_its_prefix_alone():
    rank = TieredRank(num_slots=(300,), carried=(fake_state(20),))
    prompts = [[*prompt_of(seed, 24), *prompt_of(9, 19)] for seed in range(4)]  # of equal ends
    for _ in range(2):
        for prompt in prompts:
            assert rank.generate(prompt) == rank.expected(prompt, 3)


def test_a_rank_that_idles_stores_what_goes_next_and_then_sleeps():
    rank = TieredRank()
    seq = rank.submit(prompt_of(1, 60), 3)
    while seq not in rank.finished:
        rank.step()
    idle_s = rank.tiers.idle_s
    assert idle_s is not None and not rank.thread.waiting, "it has looked too early"
    rank.now += idle_s
    rank.step()
    assert len(rank.thread.waiting) == 7
    rank.thread.run()
    rank.now += 1.0
    rank.step()
    assert rank.tiers.idle_s is None and not rank.thread.waiting


def test_a_rank_whose_tier_takes_no_more_sleeps_until_one_copy_has_ended():
    rank = TieredRank()
    seq = rank.submit(prompt_of(1, 60), 3)
    while seq not in rank.finished:
        rank.step()
    rank.now += rank.tiers.idle_s
    rank.thread.most = 1
    rank.step()
    assert len(rank.thread.waiting) == 1 and rank.tiers.idle_s is None
    rank.thread.most = 99
    rank.thread.run()
    rank.now += 1.0
    rank.step()
    assert len(rank.thread.waiting) == 6


def test_a_slow_tier_is_left_alone_and_what_a_fast_one_has_before_it_is_read():
    rank = TieredRank(num_slots=(5, 64))
    prompt = prompt_of(1, 60)
    rank.generate(prompt)
    for _ in range(5):
        rank.tiers.storing._looked_at = None
        rank.turn()
    rank.core.cache.clear()
    computes = RankLoad(prefill_tokens_per_s=1000.0)
    rank.tiers.attach(replace(rank.tiers._hooks, load=lambda: computes))
    rank.tiers._health.trust[1].note_read(1, 1e6)
    seq = rank.submit(prompt)
    rank.step()
    assert seq.phase is Phase.FILLING
    (load,) = [copy for copy in rank.thread.waiting if isinstance(copy, LoadCopy)]
    stored = rank.tiers.books.find(rank.tiers._finding.wanted(seq))
    fast = [block.place.tier for block in stored].index(1)
    assert len(load.pieces) == fast > 0 and len(stored) > fast
    assert [trust.is_off(rank.now) for trust in rank.tiers._health.trust] == [False, True]
    while seq not in rank.finished:
        rank.turn()
    assert rank.tokens[seq] == continuation(prompt, 5)


def test_no_more_is_written_to_a_file_than_the_budget_allows_and_nobody_waits_for_it(subtests):
    prompts = [prompt_of(seed, 40) for seed in range(6)]
    block_bytes = BLOCK // PAGE * TieredRank().runner.layout.page_bytes
    for num_slots, in_files in (((64,), (True,)), ((8, 64), (False, True))):
        with subtests.test(in_files=in_files):
            rank = TieredRank(num_slots, in_files=in_files, budget=WriteBudget(block_bytes / 10))
            for prompt in prompts:
                assert rank.generate(prompt) == continuation(prompt, 3)
            counts = rank.tiers.counts
            assert 0 < counts.file_bytes <= block_bytes * (1 + rank.now / 10) and rank.now < 60
            seed = 6
            while rank.tiers.idle_s is None:  # The budget allowed the last write at once.
                rank.generate(prompt_of(seed := seed + 1, 40))
            assert 0 < rank.tiers.idle_s <= 10, "it is due when the budget allows the next write"
            written = counts.file_bytes
            rank.now += rank.tiers.idle_s + 0.01
            rank.turn()
            rank.turn()  # what was written is noted
            assert counts.file_bytes == written + block_bytes, "and it is not due before"


def test_what_another_rank_keeps_in_its_file_is_read_and_not_computed(tmp_path, subtests):
    prompt = prompt_of(1, 40)
    owner = with_stored(prompt, shared=(tmp_path, "d.0"))
    blocks = owner.tiers.books.find(keys_of(scope(owner.runner.layout, BLOCK, ""), prompt, BLOCK))

    def other(prompt=prompt, name="d.1"):
        rank = TieredRank(shared=(tmp_path, name))
        assert rank.generate(prompt) == continuation(prompt, 3)
        return rank, rank.tiers.counts

    with subtests.test("the first four blocks, and a neighbour that was never seen before"):
        rank, counts = other()
        assert (counts.tokens_shared, counts.hits, counts.loads) == (4 * BLOCK, 1, {"whole": 1})
        assert rank.computed_tokens == 40 - 4 * BLOCK + 2
        load = rank.tiers.rated(RankLoad())
        assert load.shared_tier_bytes_per_s > 0 == load.file_tier_bytes_per_s
    with subtests.test("likewise a checkpoint"):
        carried, longer = (fake_window(30), fake_state(20)), prompt_of(1, 43)
        with_stored(longer, shared=(tmp_path, "c.0"), carried=carried, num_slots=(300,))
        reader = TieredRank(shared=(tmp_path, "c.1"), carried=carried)
        assert reader.generate(longer) == reader.expected(longer, 3)
        assert reader.computed_tokens == 3 + 2 and reader.tiers.counts.tokens_shared == 40
    with subtests.test("what came from another is stored as what was computed is"):
        rank.fill_pool(2)
        assert len(rank.tiers.books.find([block.key for block in blocks])) >= 4
        rank.slabs[0].close()
        shutil.rmtree(tmp_path / rank.slabs[0].shape.layout_id.hex() / "d.1")
    with subtests.test("a prompt that nobody keeps waits for one look alone"):
        _, counts = other(prompt_of(9, 40), "d.2")
        assert (counts.tokens_shared, counts.misses, counts.errors) == (0, 1, 0)
    with subtests.test("an owner that overwrites the third block costs what is behind it, and is no error"):
        rank = TieredRank(shared=(tmp_path, "d.3"))
        rank.others.look()
        other_key = b"other key, 16 by"
        record = Stored(blocks[2].place.slot, other_key, ROOT, 7, 0, 1_000)
        owner.slabs[0].write(record.slot, memoryview(bytes(owner.slabs[0].shape.slot_bytes)), record)
        rank.tiers._look_again_s = rank.now + 1  # The look is as good as new.
        assert rank.generate(prompt) == continuation(prompt, 3)
        counts = rank.tiers.counts
        assert (counts.tokens_shared, counts.loads, counts.errors) == (2 * BLOCK, {"gone": 1}, 0)
    with subtests.test("a flipped byte is another rank's disk that fails, and is computed"):
        slab = owner.slabs[0]
        at = slab.shape.slots_at + blocks[1].place.slot * slab.shape.slot_bytes + 3
        flipped = os.pread(slab._fd, 1, at)[0] ^ 1
        os.pwrite(slab._fd, bytes([flipped]), at)
        _, counts = other(name="d.4")
        assert (counts.tokens_shared, counts.loads, counts.errors) == (BLOCK, {"corrupt": 1}, 1)
    with subtests.test("a rank that leaves others' files alone still brings up its own"):
        rank.tiers._health.turn_off(1, "they fail")
        assert not rank.tiers.rated(RankLoad()).tiers_off
        rank.tiers._health.turn_off(0, "its own fails")
        assert rank.tiers.rated(RankLoad()).tiers_off


def test_nobody_waits_long_for_a_look_at_what_others_keep(tmp_path):
    rank, prompt = TieredRank(shared=(tmp_path, "d.1")), prompt_of(1, 40)
    seq = rank.submit(prompt, 3)
    rank.step()
    assert seq.phase is Phase.FILLING and rank.tiers.idle_s <= 0.05
    rank.now += 0.05
    while seq not in rank.finished:
        rank.step()  # The disk never answers.
    assert rank.tokens[seq] == continuation(prompt, 3)
    counts = rank.tiers.counts
    assert (counts.hits, counts.misses) == (0, 1), "it found nothing, however late the look was"
    next_one = rank.submit(prompt_of(2, 40), 3)
    rank.step()
    assert next_one.phase is Phase.COMPUTING, "that look has taken too long, and nobody else waits for it"
    (look,) = rank.thread.waiting
    rank.thread.run()
    look.took_s = 2.0
    rank.step()
    assert look.is_over
    assert rank.tiers._look_again_s > rank.now + 39.0, "what takes long is not done often"

    own = with_stored(prompt, shared=(tmp_path, "d.2"))
    hits, own.tiers._look_again_s = own.tiers.counts.hits, 0.0
    seq = own.submit([*prompt, *prompt_of(3, 20)], 3)
    own.step()
    assert seq.phase is Phase.FILLING and own.tiers.counts.hits == hits
    own.now += 0.05
    own.step()
    assert own.tiers.counts.hits == hits + 1, "what it keeps itself is a hit all the same"


def test_a_tier_that_is_smaller_than_the_pool_keeps_what_goes_next():
    rank = TieredRank(num_slots=(8,), num_pages=40)
    prompts = [prompt_of(seed, 40) for seed in range(3)]
    for prompt in prompts:
        rank.generate(prompt)
    for _ in range(5):
        rank.turn()
    written = rank.tiers.counts.tokens_down
    first = keys_of(scope(rank.runner.layout, BLOCK, ""), prompts[0], BLOCK)
    assert len(rank.tiers.books.find(first)) == 5, "the coldest"
    for _ in range(5):
        rank.turn()
    assert rank.tiers.counts.tokens_down == written, "it writes the same again and again"


def test_a_pool_that_changed_hands_between_two_looks_is_stored_though_its_books_are_the_same():
    rank = TieredRank(num_pages=16)
    rank.generate(prompt_of(1, 60), 1)
    rank.turn()
    stored, rank.tiers.storing._look_at_s = rank.tiers.counts.tokens_down, rank.now + 100.0
    seq = rank.submit(prompt_of(2, 60), 1)  # It ends before the next look is due.
    while seq not in rank.finished:
        rank.step()
    assert stored == 56 and rank.tiers.idle_s is not None
    rank.now += 101.0
    rank.turn()
    rank.turn()
    assert rank.tiers.counts.tokens_down == 2 * stored


def test_a_rank_with_room_for_all_stores_nothing():
    rank = TieredRank(num_pages=64)
    for prompt in (prompt_of(1, 40), prompt_of(2, 40)):
        rank.generate(prompt)
        rank.generate(prompt)
    assert (rank.tiers.counts.bytes_down, len(rank.thread.waiting)) == (0, 0)


def check_all_stored(in_files):
    rank = TieredRank(num_pages=64, in_files=(in_files,))
    prompts = [prompt_of(1, 40), prompt_of(2, 40)]
    for prompt in prompts:
        rank.generate(prompt)
    storing = rank.tiers.storing
    assert rank.tiers.counts.bytes_down == 0 and storing.has_kept_all
    storing.keep_all(True)
    assert storing.has_kept_all == (not in_files)
    for _ in range(6):
        rank.turn()
    assert storing.has_kept_all
    storing.keep_all(False)
    again = TieredRank(num_pages=64, tiers=rank.slabs)
    for prompt in prompts:
        assert again.generate(prompt) == continuation(prompt, 3)
    assert again.computed_tokens <= 2 * 10 if in_files else again.computed_tokens >= 2 * 40
    stored = rank.tiers.counts.bytes_down
    rank.generate(prompt_of(3, 40))
    rank.turn()
    assert rank.tiers.counts.bytes_down == stored, "it stays, after all"


def test_a_rank_that_leaves_stores_all_where_a_later_life_finds_it(subtests):
    for in_files in (True, False):
        with subtests.test(in_files=in_files):
            check_all_stored(in_files)


def check_last_used(num_pages, num_slots, found):
    rank = TieredRank(num_pages=num_pages, num_slots=(num_slots,), in_files=(True,))
    prompts = [[*prompt_of(1, 32), *prompt_of(10 + nth, 9)] for nth in range(8)]
    for prompt in prompts:
        rank.generate(prompt)
    rank.keep_all(most_turns=4)
    again = TieredRank(num_pages=160, tiers=rank.slabs, num_slots=(num_slots,), in_files=(True,))
    for nth, prompt in enumerate(reversed(prompts), start=1):
        before = again.computed_tokens
        assert again.generate(prompt) == continuation(prompt, 3)
        assert (again.computed_tokens - before == 3) == (nth <= found), nth


def test_a_rank_that_leaves_stores_what_was_used_last_where_slots_are_few(subtests):
    """Eight prompts share four blocks, and each has one of its own. A pool of 30 pages has looked before."""
    for num_pages, num_slots, found in [(160, 12, 8), (160, 6, 2), (30, 12, 8), (30, 9, 5)]:
        with subtests.test(num_pages=num_pages, num_slots=num_slots):
            check_last_used(num_pages, num_slots, found)


def test_a_rank_that_leaves_stores_what_was_used_last_first(subtests):
    """Six prompts have five blocks each. The rank ends after so many stores of a look."""
    for carried, num_stores, found in [((), 5, 1), ((), 13, 2), ((), 99, 6), ((fake_state(8),), 9, 1)]:
        with subtests.test(carried=carried, num_stores=num_stores):
            settings = {"num_pages": 160, "in_files": (True,), "carried": carried, "num_slots": (64,)}
            rank, prompts = TieredRank(**settings), [prompt_of(nth, 41) for nth in range(6)]
            for prompt in prompts:
                rank.generate(prompt)
            rank.tiers.storing.keep_all(True)
            rank.now += 1.0
            rank.step()
            rank.thread.waiting = rank.thread.waiting[:num_stores]
            rank.thread.run()
            again = TieredRank(tiers=rank.slabs, **settings)
            for nth, prompt in enumerate(reversed(prompts), start=1):
                before = again.computed_tokens
                assert again.generate(prompt) == continuation(prompt, 3, carried)
                assert (again.computed_tokens - before <= 3) == (nth <= found), nth


def test_what_a_leaving_rank_has_kept_goes_in_order_of_use_from_its_file(subtests):
    """It has stored what was used last first; whether it stays or is started again, that is the last to go.
    Its file has room for all of six prompts, and then for one less."""
    for stays in (True, False):
        with subtests.test(stays=stays):
            settings = {"num_pages": 160, "in_files": (True,), "num_slots": (30,)}
            rank, prompts = TieredRank(**settings), [prompt_of(nth, 41) for nth in range(6)]
            for prompt in prompts:
                rank.generate(prompt)
            rank.keep_all(most_turns=9)
            rank.tiers.storing.keep_all(False)
            now = rank if stays else TieredRank(tiers=rank.slabs, **settings)
            books = now.tiers.books
            for num_left in (5, 4):
                block = books.claim(bytes([num_left]) * 16, ROOT, 1)
                books.written(block, 0)
                blocks = [books.find(keys_of(scope_of(now), prompt, BLOCK)) for prompt in prompts]
                lengths = [len(found) for found in blocks]
                assert lengths == sorted(lengths) and sum(lengths) == 25 + num_left - 1
            assert books.claim(bytes(15) + b"x", ROOT, 1).sequence > max(
                each[-1].sequence for each in blocks[1:]
            )


def scope_of(rank):
    return rank.tiers._pool.scope("")


def test_a_rank_that_leaves_stores_the_beginning_of_what_is_longer_than_its_file(subtests):
    """The last prompt is found as far as the file has room for its blocks, with a checkpoint at their end."""
    cases = [((), 1, 8), ((), 6, 48), ((), 9, 72)]
    cases += [((fake_state(20),), 7, 32), ((fake_state(20),), 11, 40), ((fake_window(10),), 12, 64)]
    for carried, num_slots, found in cases:
        with subtests.test(carried=carried, num_slots=num_slots):
            settings = {"num_slots": (num_slots,), "in_files": (True,), "carried": carried, "num_pages": 100}
            rank = TieredRank(**settings)
            rank.generate(prompt_of(2, 40))
            first = prompt_of(1, 40)
            prompt = [*first, *rank.generate(first, 1), *prompt_of(3, 40)]
            rank.generate(prompt)
            rank.keep_all(most_turns=9)
            rank.tiers.books.check()
            again = TieredRank(tiers=rank.slabs, **settings)
            assert again.generate(prompt) == continuation(prompt, 3, carried)
            assert again.computed_tokens == len(prompt) + 2 - found


def test_a_rank_that_leaves_moves_what_its_memory_tier_holds_to_its_file():
    """Memory and a file lie below the pool; the second rank has time for a few moves."""
    for num_turns, at_least in ((40, 4), (3, 1)):
        rank = TieredRank(num_slots=(24, 64), in_files=(False, True))
        prompts = [prompt_of(seed, 40) for seed in range(4)]
        for prompt in prompts:
            rank.generate(prompt)
        storing, books = rank.tiers.storing, rank.tiers.books
        before = [books.free_slots(tier) for tier in range(2)]
        assert before[1] == 64, "memory has had room"
        storing.keep_all(True)
        for _ in range(num_turns):
            if not storing.has_kept_all:
                rank.turn()
        assert storing.has_kept_all == (num_turns == 40)
        books.check()
        settings = {"num_pages": 64, "num_slots": (24, 64), "in_files": (False, True)}
        memory = slabs.open_memory(None, rank.slabs[0].shape, rank.calls())
        again, found = TieredRank(tiers=[memory, rank.slabs[1]], **settings), 0
        for prompt in prompts:
            before = again.computed_tokens
            assert again.generate(prompt) == continuation(prompt, 3)
            found += again.computed_tokens - before <= 10
        assert found >= at_least, (num_turns, found)


def test_a_rank_that_leaves_moves_what_was_used_last_where_its_files_are_smaller(subtests):
    """Eight prompts have five blocks each. The files have room for a few of them, or memory has."""
    cases = [((24, 8), 1), ((24, 12), 2), ((40, 20), 4), ((24, 10, 10), 4), ((8, 40), 8)]
    for num_slots, found in cases:
        with subtests.test(num_slots=num_slots):
            settings = {"num_slots": num_slots, "in_files": (False, *(True for _ in num_slots[1:]))}
            rank = TieredRank(num_pages=120 if found == 8 else 24, **settings)
            prompts = [prompt_of(seed, 40) for seed in range(8)]
            for prompt in prompts:
                rank.generate(prompt)
            rank.keep_all(most_turns=40)
            rank.tiers.books.check()
            memory = slabs.open_memory(None, rank.slabs[0].shape, rank.calls())
            again = TieredRank(num_pages=200, tiers=[memory, *rank.slabs[1:]], **settings)
            for nth, prompt in enumerate(reversed(prompts), start=1):
                before = again.computed_tokens
                assert again.generate(prompt) == continuation(prompt, 3)
                assert nth > found or again.computed_tokens - before <= 10, nth


def test_a_rank_that_stays_after_all_moves_what_was_used_last_when_it_leaves_then(subtests):
    """Eight prompts have five blocks each, and the file has room for four, or three; it leaves three times,
    and the first time it is called off at once."""
    for num_slots, in_between, found in [
        ((24, 20), (4, 5), 4),
        ((24, 20), (2, 4, 1), 4),
        ((40, 15), (0, 7), 3),
    ]:
        with subtests.test(num_slots=num_slots, in_between=in_between):
            check_stays(num_slots, in_between, found)


def test_a_rank_that_leaves_waits_until_its_file_is_in_order(subtests, monkeypatch):
    """All that the file has was used since, and one block is put where it belongs at a time."""
    monkeypatch.setattr(use_order, "_MOST_PUT_BACK", 1)
    for in_between in [(0, 1, 2, 3, 4, 5), (3, 2, 1, 0, 4)]:
        with subtests.test(in_between=in_between):
            check_stays((24, 20), in_between, 4)


def check_stays(num_slots, in_between, found):
    settings = {"num_slots": num_slots, "in_files": (False, True)}
    rank, used = TieredRank(**settings), []
    for nth in (0, 1, 2, 3, *in_between):
        used = [*(each for each in used if each != nth), nth]
        rank.generate(prompt_of(nth, 40))
        if nth == 1:
            rank.tiers.storing.keep_all(True)
            rank.turn()
        elif nth == 3:
            rank.keep_all(most_turns=40)
        rank.tiers.storing.keep_all(False)
    rank.keep_all(most_turns=40)
    memory = slabs.open_memory(None, rank.slabs[0].shape, rank.calls())
    again = TieredRank(num_pages=200, tiers=[memory, *rank.slabs[1:]], **settings)
    for nth in used[: -found - 1 : -1]:
        before = again.computed_tokens
        assert again.generate(prompt_of(nth, 40)) == continuation(prompt_of(nth, 40), 3)
        assert again.computed_tokens - before <= 10, nth


def test_a_rank_that_leaves_stores_no_more_than_twice_what_fits_though_requests_go_on(subtests):
    """Each request leaves five blocks, and the file has room for two requests."""
    for num_slots, carried in [((10,), ()), ((20, 10), ()), ((12,), (fake_state(20),))]:
        with subtests.test(num_slots=num_slots, carried=carried):
            check_bound(num_slots, carried)


def check_bound(num_slots, carried):
    in_files = (False, True)[-len(num_slots) :]
    rank = TieredRank(num_slots=num_slots, in_files=in_files, num_pages=100, carried=carried)
    storing, written, most = rank.tiers.storing, [], 2 * num_slots[-1]
    submit = rank.thread.submit

    def noting(copy):
        written.extend(copy.blocks if isinstance(copy, Store) else ())
        return submit(copy)

    rank.thread.submit = noting
    storing.keep_all(True)
    for nth in range(9):
        rank.generate(prompt_of(nth, 40))
    assert most - len(carried) <= len(written) <= most, (len(written), most)
    while not storing.has_kept_all:
        rank.turn()
    storing.keep_all(False)
    rank.keep_all(most_turns=9)
    assert len(written) > most, "it leaves once more"


def test_a_file_that_is_opened_while_its_rank_leaves_gets_what_is_cached(subtests):
    """It has what an earlier life left, all of which may go."""
    for num_slots, num_records in [((0,), 0), ((0,), 300), ((24, 0), 0), ((24, 0), 300)]:
        with subtests.test(num_slots=num_slots, num_records=num_records):
            check_opened_late(num_slots, num_records)


def check_opened_late(num_slots, num_records):
    in_files = (False, True)[-len(num_slots) :]
    rank = TieredRank(num_slots=num_slots, in_files=in_files, num_pages=24 if len(num_slots) > 1 else 60)
    prompts, tier = [prompt_of(nth, 40) for nth in range(4)], len(num_slots) - 1
    for prompt in prompts:
        rank.generate(prompt)
    storing, books = rank.tiers.storing, rank.tiers.books
    storing.keep_all(True)
    rank.turn()
    assert storing.has_kept_all, "nothing to wait for"
    shape = replace(rank.slabs[0].shape, num_slots=300)
    records = [Stored(n, n.to_bytes(16), ROOT, n, 0, n) for n in range(1, num_records)]
    rank.slabs[tier] = rank.thread.slabs[tier] = slabs.open_memory(None, shape, rank.calls())
    rank.thread.put = lambda *_: True
    assert rank.tiers.open_late(LateTier.of(tier, 300, records), rank.slabs[tier])
    rank.turn()
    assert not storing.has_kept_all
    for _ in range(20):
        rank.turn()
    assert storing.has_kept_all and not books.has_late
    books.check()
    settings = {"num_slots": (*num_slots[:-1], 300), "in_files": in_files}
    memory = [slabs.open_memory(None, slab.shape, rank.calls()) for slab in rank.slabs[:-1]]
    again = TieredRank(num_pages=200, tiers=[*memory, rank.slabs[-1]], **settings)
    for prompt in prompts:
        before = again.computed_tokens
        assert again.generate(prompt) == continuation(prompt, 3)
        assert again.computed_tokens - before <= 10


def check_keeping(seed):
    chance = random.Random(seed)
    carried = chance.choice([(), *CARRIED])
    num_slots = chance.choice([(6,), (12,), (20,), (40,), (12, 30), (8, 40), (20, 12), (6, 10, 20)])
    in_files = tuple(tier > 0 or chance.random() < 0.5 for tier in range(len(num_slots) - 1))
    settings = {"num_slots": num_slots, "in_files": (*in_files, True), "carried": carried}
    rank, prompts = TieredRank(num_pages=chance.choice([30, 60, 160]), **settings), []
    for _ in range(chance.randrange(3, 12)):
        begun = prompts and chance.random() < 0.6
        shared = chance.choice(prompts)[: chance.randrange(8, 50)] if begun else []
        prompts.append([*shared, *prompt_of(chance.randrange(1000), chance.randrange(5, 50))][:90])
    storing = rank.tiers.storing
    for prompt in prompts:
        rank.generate(prompt, chance.randrange(1, 5))
        if chance.random() < 0.3:
            storing.keep_all(chance.random() < 0.5)
    rank.keep_all(most_turns=30)
    again = TieredRank(num_pages=200, tiers=rank.slabs, **settings)
    for prompt in reversed(prompts):
        assert again.generate(prompt) == continuation(prompt, 3, carried)


def test_keeping_ends_and_what_is_kept_is_right(subtests):
    """Writes stay bounded where parts of a checkpoint push out blocks that are stored again (seed 298)."""
    for seed in (*range(8), 298):
        with subtests.test(seed=seed):
            check_keeping(seed)


def test_what_the_thread_has_no_room_for_is_stored_later(subtests):
    for leaves in (True, False):
        with subtests.test(leaves=leaves):
            rank = TieredRank(num_pages=160 if leaves else 24, in_files=(True,))
            rank.thread.takes = False
            for nth in range(2):
                rank.generate(prompt_of(nth, 40))
            rank.tiers.storing.keep_all(leaves)
            rank.turn()
            assert rank.tiers.books.num_blocks == 0 and rank.tiers.idle_s is not None
            rank.thread.takes = True
            for _ in range(2):
                rank.turn()
            assert rank.tiers.books.num_blocks == 10 and rank.tiers.storing.has_kept_all


def test_a_rank_that_leaves_does_not_rest_between_looks():
    rank = TieredRank(num_pages=160, in_files=(True,))
    rank.generate(prompt_of(1, 40))
    cache, storing = rank.core.cache, rank.tiers.storing
    next_to_go = cache.next_to_go

    def slowly():
        rank.now += 1.0
        return next_to_go()

    cache.next_to_go = slowly
    storing.keep_all(True)
    rank.turn()
    assert rank.tiers.books.num_blocks == 5 and storing._look_at_s < rank.now


def test_the_next_life_finds_what_the_last_one_has_stored():
    rank = TieredRank()
    rank.fill_pool(1)
    again = TieredRank(tiers=rank.slabs)
    rank.tiers.books.check()
    prompt = prompt_of(100, 40)
    assert again.generate(prompt) == continuation(prompt, 3)
    assert again.computed_tokens <= 10


def test_a_page_that_was_evicted_is_copied_no_more():
    rank = TieredRank()
    prompt = prompt_of(1, 40)
    rank.generate(prompt)
    rank.submit(prompt_of(2, 40))
    while not rank.thread.waiting:
        rank.now += 1.0
        rank.step()
    late, rank.thread.waiting, rank.thread.takes = rank.thread.waiting, [], False
    rank.fill_pool(3)  # all pages are somebody else's by now
    rank.thread.waiting, rank.thread.takes = late, True
    rank.turn()
    rank.turn()
    assert rank.tiers.counts.overtaken > 0
    assert rank.generate(prompt) == continuation(prompt, 3)


def test_a_slot_that_came_changed_is_computed_instead():
    rank = TieredRank()
    prompt = prompt_of(1, 40)
    rank.generate(prompt)
    rank.fill_pool(2)
    block = list(rank.tiers.books._blocks.values())[1]
    os.pwrite(rank.slabs[0]._fd, b"\xee\xee", rank.slot_at(block.place) + 9)
    assert rank.generate(prompt) == continuation(prompt, 3)
    assert rank.tiers.counts.loads["corrupt"] == 1


def test_a_block_is_another_one_behind_another_prefix():
    """The fake's KV is of a token and its position, so here the same tokens come one block earlier."""
    first, second, third = (prompt_of(seed, BLOCK) for seed in range(1, 4))
    rank = TieredRank()
    rank.generate([*first, *second, *third, 1])
    rank.fill_pool(5)
    prompt = [*first, *third, 1]
    assert rank.generate(prompt) == continuation(prompt, 3)


def test_who_shares_a_prefix_waits_for_its_read_and_goes_on_from_there():
    rank = TieredRank(num_pages=48)
    long = prompt_of(1, 64)
    rank.generate(long)
    rank.fill_pool(2, 5)
    short, rest = rank.submit([*long[:33], 9]), rank.submit([*long, 9])
    rank.step()
    assert (short.phase, rest.phase) == (Phase.FILLING, Phase.FILLING)
    assert [len(copy.pieces) for copy in rank.thread.waiting if isinstance(copy, LoadCopy)] == [4]
    rank.thread.run(LoadCopy)
    rank.step()
    assert short.phase is not Phase.FILLING
    assert [len(copy.pieces) for copy in rank.thread.waiting if isinstance(copy, LoadCopy)] == [4]
    while len(rank.finished) < 8:
        rank.turn()
    for seq in (short, rest):
        assert rank.tokens[seq] == continuation(seq.request.prompt_ids, 5)


def test_a_read_that_comes_to_nothing_costs_time_alone(subtests):
    for ends in ("late", "cancelled", "failed", "refused"):
        with subtests.test(ends):
            check_read(ends)


def check_read(ends):
    rank = TieredRank()
    prompt = prompt_of(1, 40)
    rank.generate(prompt)
    rank.fill_pool(2)
    if ends == "refused":
        rank.thread.takes = False
    seq = rank.submit(prompt)
    rank.step()
    if ends == "refused":
        assert seq.phase is not Phase.FILLING
        rank.thread.takes = True
    else:
        assert seq.phase is Phase.FILLING and rank.tiers.idle_s <= 1.0
        (load,) = [copy for copy in rank.thread.waiting if isinstance(copy, LoadCopy)]
    if ends == "failed":
        rank.faults[rank.slot_at(load.pieces[2].place)] = OSError(5, "I/O error")
    elif ends == "cancelled":
        rank.core.cancel(seq)
        rank.core.check()
        before = rank.runner.slots.copy()
        rank.thread.run(LoadCopy)
        assert (rank.runner.slots == before).all(), "pages of nobody were written"
    elif ends == "late":
        rank.now += 1.0
        rank.step()
        assert seq.phase is not Phase.FILLING
    while rank.core._active or rank.core._gate:
        rank.turn()
    rank.turn()
    if ends != "cancelled":
        assert rank.tokens[seq] == continuation(prompt, 5)
    assert rank.generate(prompt) == continuation(prompt, 3)


def test_who_receives_is_written_to_only_when_its_tier_has_filled_it(subtests):
    prompt = prompt_of(1, 40)
    for ends, due in {"whole": 40, "corrupt": 16, "late": 0, "cancelled": 0}.items():
        with subtests.test(ends):
            rank = with_stored(prompt)
            seq = rank.submit(prompt, receives=True)
            rank.step()
            assert (seq.phase, rank.reserved[seq].fills) == (Phase.RECEIVING, True)
            (load,) = [copy for copy in rank.thread.waiting if isinstance(copy, LoadCopy)]
            if ends == "corrupt":
                os.pwrite(rank.slabs[0]._fd, b"\xee", rank.slot_at(load.pieces[2].place))
            elif ends == "late":
                rank.now += 11.0
                rank.step()
            elif ends == "cancelled":
                rank.core.cancel(seq)
            before = rank.runner.slots.copy()
            rank.thread.run(LoadCopy)
            rank.step()
            if ends in ("late", "cancelled"):
                assert (rank.runner.slots == before).all(), "pages were written that others may write"
            if ends != "cancelled":
                reserved, computed = rank.reserved[seq], rank.computed_tokens
                assert (reserved.fills, reserved.prefix_len, seq.reused_tokens) == (False, due, due)
                rank.land(seq)
                rank.run([seq])
                assert rank.tokens[seq] == continuation(prompt, 5)
                assert rank.computed_tokens - computed == 4, "a token each step after the first"
            assert rank.core.check().locked == 0


def test_two_that_receive_share_a_read_and_each_may_be_written_to_once_it_is_over():
    prompt = prompt_of(1, 40)
    rank = with_stored(prompt, num_pages=32)
    seqs = [rank.submit([*prompt, number], receives=True) for number in range(2)]
    rank.step()
    assert [len(copy.pieces) for copy in rank.thread.waiting if isinstance(copy, LoadCopy)] == [5]
    assert all(rank.reserved[seq].fills for seq in seqs)
    rank.thread.run(LoadCopy)
    rank.step()
    assert [rank.reserved[seq].prefix_len for seq in seqs] == [40, 40]
    for seq in seqs:
        rank.land(seq)
    rank.run(seqs)
    for seq in seqs:
        assert rank.tokens[seq] == continuation(seq.request.prompt_ids, 5)


def test_a_source_is_asked_only_for_what_makes_it_better_than_the_own_tier(subtests):
    prompt = prompt_of(1, 60)  # 7 blocks, 56 tokens
    for name, (rates, held, is_asked) in {
        "it holds no more": ((0.0, 0.0), 56, False),
        "it holds a page more": ((0.0, 0.0), 59, False),
        "it holds much more, and rates are unknown": ((0.0, 0.0), 100, True),
        "computing what only it holds takes longer than reading": ((1e6, 1000.0), 100, True),
        "reading takes longer than that": ((9e3, 1000.0), 100, False),
        "reading takes longer than computing all": ((1e3, 1000.0), 100, True),
    }.items():
        with subtests.test(name):
            rank = with_stored(prompt, num_pages=40)
            for seed in range(3, 9):
                rank.generate(prompt_of(seed, 60))
            longer = [*prompt, *prompt_of(99, 50)]
            assert rank.tiers._block_bytes == 64  # 448 bytes are read in 50 ms at 9 kB/s.
            rank.tiers._health.trust[0].bytes_per_s = rates[0]
            computes = RankLoad(prefill_tokens_per_s=rates[1])
            rank.tiers.attach(replace(rank.tiers._hooks, load=lambda load=computes: load))
            assert rank.tiers.suffices(rank.submit(longer, held=held), 0, held) is not is_asked
            rank.step()
            assert bool(rank.wanted) is is_asked
            (seq,) = rank.core._active
            assert seq.phase is (Phase.PULLING if is_asked else Phase.FILLING)


def test_whoever_has_no_source_any_more_asks_its_tier(subtests):
    prompt = prompt_of(1, 40)
    longer = [*prompt, *prompt_of(9, 40)]
    for ends in ("refused", "landed", "set aside"):
        with subtests.test(ends):
            rank = with_stored(prompt, num_pages=72)
            rank.core.cache.clear()
            seq, other = (rank.submit([*longer, number], held=80) for number in range(2))
            rank.step()
            assert (seq.phase, other.phase, other.awaits) == (Phase.PULLING, Phase.COMPUTING, seq)
            computed = rank.computed_tokens
            late = rank.reserved[seq].delta_pages
            if ends == "landed":
                rank.pull(seq, 16)
            elif ends == "set aside":
                rank.core.pulls.set_aside(seq, 7, 80)
                rank.core.pulls.refill()
            else:
                rank.core.pulls.failed(seq)
            assert seq.phase is Phase.FILLING
            rank.step()
            assert other.phase is Phase.FILLING and rank.computed_tokens == computed
            rank.thread.run(LoadCopy)
            if ends == "set aside":
                rank.runner.slots[list(late)] = 499  # The source writes after all.
                rank.core.pulls.end_aside(7)
            while len(rank.finished) < 6:
                rank.turn()
            for each in (seq, other):
                assert rank.tokens[each] == continuation(each.request.prompt_ids, 5)
                assert each.reused_tokens >= 40
            assert rank.computed_tokens - computed <= 2 * (8 + 41) and rank.tiers.counts.hits == 2


def test_a_tier_that_keeps_failing_is_left_alone_for_a_while():
    rank = TieredRank()
    prompts = [prompt_of(seed, 40) for seed in range(1, 5)]
    for prompt in prompts:
        rank.generate(prompt)
    rank.fill_pool(9)
    for block in rank.tiers.books._blocks.values():
        if block.parent is None:
            rank.faults[rank.slot_at(block.place)] = OSError(5, "I/O error")
    for prompt in prompts:
        assert rank.generate(prompt) == continuation(prompt, 3)
        if rank.tiers.figures().is_off:
            break
    assert rank.tiers.counts.errors == 3
    hits = rank.tiers.counts.hits
    rank.fill_pool(9)
    assert rank.tiers.counts.hits == hits
    rank.faults.clear()
    rank.now += 31
    assert not rank.tiers.figures().is_off


def test_errors_in_a_row_are_of_the_tier_that_fails_and_only_a_whole_read_ends_the_row(subtests):
    prompt = prompt_of(1, 40)

    def reading(prompt=prompt):
        rank.core.cache.clear()
        seq = rank.submit(prompt, 1)
        rank.step()
        assert seq.phase is Phase.FILLING
        return next(copy for copy in rank.thread.waiting if isinstance(copy, LoadCopy))

    with subtests.test("a disk that fails after a good block each time"):
        rank = with_stored(prompt)
        trust = rank.tiers._health.trust[0]
        for number, each in enumerate((prompt, prompt_of(200, 40)), start=1):
            rank.faults[rank.slot_at(reading(each).pieces[1].place)] = OSError(5, "I/O error")
            rank.thread.run(LoadCopy)
            while rank.core._active:
                rank.turn()
            assert trust._errors[True] == number
    with subtests.test("a late read is the fault of the tier that the thread is at"):
        rank = with_stored(prompt, num_slots=(64, 64))
        load = reading()
        move = Move(rank.tiers.books.begin_move(0))
        move.at_tier, rank.thread.running = 1, move
        rank.now += 31.0
        rank.step()
        assert [trust._errors[True] for trust in rank.tiers._health.trust] == [0, 1]
        assert load.is_stopped


def test_a_block_that_cannot_be_read_moves_nowhere_and_is_no_fault_of_the_next_tier():
    rank = TieredRank(num_slots=(6, 64))
    rank.generate(prompt_of(1, 40))
    rank.fill_pool(2)
    rank.turn()
    books = rank.tiers.books
    leaf = next(filter(books._may_move, books._nearest))
    rank.faults[rank.slot_at(leaf.place)] = OSError(5, "I/O error")
    rank.tiers.storing._move_one(0)
    rank.thread.run()
    rank.step()
    errors = [trust._errors for trust in rank.tiers._health.trust]
    assert errors == [{True: 1, False: 0}, {True: 0, False: 0}] and leaf.key not in books
    rank.core.check()


def test_whatever_happens_answers_are_the_oracles_and_nothing_is_lost():
    for seed in range(12):
        _live(random.Random(seed), CARRIED[seed % 4] if seed % 2 else ())


def _live(rng, carried):
    num_slots = (rng.choice([12 if carried else 6, 40]), 12)[: rng.choice([1, 2])]
    rank = TieredRank(num_slots=num_slots, num_pages=20, max_running=4, carried=carried)
    begin = [prompt_of(seed, 40) for seed in range(3)]
    seqs, aside = [], set()
    for number in range(160):
        match rng.randrange(12):
            case 0 | 1:
                prompt = [*rng.choice(begin)[: rng.randrange(1, 40)], *prompt_of(rng.randrange(4), 8)]
                how = rng.choice([{}, {}, {"receives": True}, {"held": rng.randrange(len(prompt) + 1)}])
                seqs.append(rank.submit(prompt, rng.randrange(1, 6), **how))
            case 2 if seqs:
                rank.core.cancel(rng.choice(seqs))
            case 3:
                rank.thread.run(LoadCopy)
            case 4:
                rank.thread.run(Store)
            case 5:
                rank.thread.run()
            case 6 if len(rank.tiers.books):
                place = rng.choice(list(rank.tiers.books._blocks.values())).place
                if rng.random() < 0.5:
                    rank.faults = {rank.slot_at(place): OSError(5, "I/O error")}
                else:
                    os.pwrite(rank.slabs[place.tier]._fd, rng.randbytes(3), rank.slot_at(place) + 11)
            case 7 | 8:
                _write_from_elsewhere(rank, rng, number, aside)
            case _:
                rank.now += rng.choice([0.0, 0.05, 1.1])
                rank.step()
        rank.core.check()
    for transfer in aside:
        rank.core.pulls.end_aside(transfer)
    while rank.core._active or rank.core._gate:
        _write_from_elsewhere(rank, rng, None, set())
        rank.turn()
    for _ in range(50):
        rank.turn()
        if not rank.thread.waiting and rank.tiers._ended.empty():
            break
    assert not any(block.busy for block in rank.tiers.books._all()), "a slot is held for nobody"
    for seq, tokens in rank.tokens.items():
        assert tokens == rank.expected(seq.request.prompt_ids, len(tokens))
    assert all(seq in rank.finished or seq.phase is Phase.ENDED for seq in seqs)
    books = rank.core.check()
    assert books.locked == books.private == books.quarantined == 0


def _write_from_elsewhere(rank, rng, transfer, aside):
    """What prefill ranks and sources do at some time, for those that nobody else writes to."""
    receive = [s for s in rank.core._active if s.phase is Phase.RECEIVING and not rank.reserved[s].fills]
    pull = [s for s in rank.core._active if s.phase is Phase.PULLING and not s.lacking_pages]
    if receive and rng.random() < 0.6:
        rank.land(rng.choice(receive))
    elif pull:
        seq = rng.choice(pull)
        match rng.randrange(3):
            case 0 if rank.wanted[seq].expected_end > rank.wanted[seq].resumes_at:
                rank.pull(seq)
            case 1 if transfer is not None:
                rank.core.pulls.set_aside(seq, transfer, rank.wanted[seq].expected_end)
                aside.add(transfer)
            case _:
                rank.core.pulls.failed(seq)
        rank.take()


class FailingSlots:
    def write(self, *_arguments):
        raise OSError(errno.EIO, "a test's")


def test_what_is_stored_twice_is_never_a_new_owners_kv():
    """A failed write drops the blocks behind it, whose copies still wait, and they are stored once more."""
    rank = TieredRank(num_pages=24, num_slots=(64,))
    prompt = prompt_of(1, 40)

    def serve(ids, output):
        seq = rank.submit(ids, output)
        while seq not in rank.finished:
            rank.now += 1.0
            rank.step()

    serve(prompt, 3)
    serve(prompt_of(2, 12), 3)
    for _ in range(2):
        rank.now += 1.0
        rank.step()
    first = rank.thread.waiting.pop(0)
    first.run([FailingSlots()], rank.thread.staging)
    rank.thread.done(first)
    serve(prompt_of(3, 4), 2)
    stores = [copy for copy in rank.thread.waiting if isinstance(copy, Store)]
    keys = [block.key for copy in stores if not copy.is_stopped for block in copy.blocks]
    assert len(keys) == len(set(keys))
    assert any(copy.is_stopped for copy in stores)
    for number in range(3):  # These take the pages before anything was copied.
        serve(prompt_of(200 + number, 80), 3)
    rank.thread.run()
    life = TieredRank(num_pages=24, num_slots=(64,), tiers=rank.slabs)
    life.generate(prompt[:BLOCK] + prompt_of(9, 20))
    life.fill_pool(7)
    seq = life.submit(prompt, 3)
    while seq not in life.finished:
        life.turn()
    assert life.tokens[seq] == life.expected(prompt, 3)


def test_a_tenant_is_not_charged_for_what_a_tier_brings():
    def had(rank):
        seq = rank.submit(prompt_of(1, 40), 3, share=TenantShare("acme"))
        while seq not in rank.finished:
            rank.turn()
        return rank.core._shares.had("acme"), seq.brought_tokens

    computing = TieredRank()
    computing.fill_pool(2)
    computed, none = had(computing)
    less, brought = had(with_stored(prompt_of(1, 40)))
    assert none == 0 < brought
    assert less == computed - brought
