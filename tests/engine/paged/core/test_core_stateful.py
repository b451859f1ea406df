"""Whatever happens to a core in whatever order: the books balance, nobody starves, every token is right.

Submissions of all kinds, steps, transfers that land, fail or are renegotiated, pulls and grants, prefixes
that are taken over, quarantines, aborts and evictions, on a pool that is too small. `pytest -m exact`
runs it longer.
"""

from dataclasses import replace
from functools import partial

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from engine.paged.core_rank import Guesses, Rank, check_carried
from services.engine.fake import FakeModel, fake_state, fake_window
from services.engine.paged.admitting import Patience
from services.engine.paged.model_runner import RunnerFailed
from services.engine.paged.pulls import Granted, Refused
from services.engine.paged.sequence import Phase
from services.values.kv import GroupKind
from services.values.request import TenantShare

FOREVER_S = 1e9
CARRIED = [
    (),
    (),
    (fake_state(),),
    (fake_window(5),),
    (fake_window(3), fake_state()),
    (fake_state(), fake_window(4, GroupKind.CHUNKED_WINDOW)),
    (fake_window(1), fake_window(7)),
]
ANY = st.integers(0, 99)
REQUESTS = st.tuples(
    st.sampled_from(["local", "local", "remote", "remote", "transfer", "pull", "transfer that pulls"]),
    st.integers(0, 12),  # tokens of the prefix that all share
    st.lists(st.integers(0, 2), min_size=1, max_size=8),
    st.integers(1, 10),  # max_tokens
    st.sampled_from([0, 0, 0, 1, -1]),  # priority
    st.sampled_from(["", "", "", "one", "other"]),  # tenant
)


class CoreMachine(RuleBasedStateMachine):
    @initialize(
        page_size=st.sampled_from([1, 2, 4]),
        pool_tokens=st.integers(24, 44),
        chunk_size=st.integers(1, 9),
        cache=st.booleans(),
        max_running=st.integers(1, 5),
        expected_output=st.sampled_from([0.0, 0.5, 1.0]),
        overtakes=st.integers(0, 3),
        wait_s=st.sampled_from([0.0, 0.01, 0.05, FOREVER_S, FOREVER_S]),  # a look at the clock takes 0.001
        window=st.integers(1, 8),
        shorter_first=st.sampled_from([0.0, 0.5, 1.0, 1.0, 30.0]),
        itl_target_s=st.sampled_from([None, None, 0.0005, 0.0025]),
        carried=st.sampled_from(CARRIED),
        room_for=st.integers(1, 6),
        block_pages=st.integers(1, 2),
        drafts=st.none() | st.randoms(use_true_random=False),
        shares=st.booleans(),
    )
    def start(self, page_size, pool_tokens, overtakes, wait_s, window, drafts, shares, **settings):
        self.shares = shares
        self.page_size = page_size
        self.overtakes, self.wait_s, self.max_running = overtakes, wait_s, settings["max_running"]
        self.rank = Rank(
            num_pages=pool_tokens // page_size,
            page_size=page_size,
            patience=Patience(overtakes, wait_s, window),
            drafting=None if drafts is None else self._guesses(drafts),
            **settings,
        )
        self.core = self.rank.core
        self.aside, self.granted, self.transfers_made = {}, {}, 0
        self.sent, self.transfers, self.quarantined, self.taking = [], [], [], []
        self._watch_evictions()

    def _guesses(self, chance):
        lengths = iter(lambda: chance.randrange(6), None)
        return Guesses(
            lambda *args: self.rank.expected(*args), lengths, lambda seq, index: chance.random() < 0.8
        )

    def _watch_evictions(self):
        """No page that anybody holds is ever evicted."""
        cache = self.core.cache

        def watched(evict, *args, **options):
            pages = evict(*args, **options)
            held = {page for sequence in cache._sequences for page in sequence.pages}
            assert held.isdisjoint(pages)
            return pages

        for name in ("evict", "evict_older"):
            setattr(cache._tree, name, partial(watched, getattr(cache._tree, name)))

    def in_phase(self, *phases):
        return [seq for seq in self.sent if seq.phase in phases]

    def pick(self, candidates, number):
        return candidates[number % len(candidates)]

    # -- what may happen --------------------------------------------------------------------------

    @rule(requests=st.lists(REQUESTS, min_size=1, max_size=4))
    def submit(self, requests):
        for request in requests:
            self._submit(*request)

    def _submit(self, kind, shared, rest, max_tokens, priority, tenant):
        transfer_id = len(self.sent) if kind.startswith("transfer") else None
        about = {"priority": priority, "cache_salt": tenant}
        if self.shares and tenant:  # Not every router says whose its requests are.
            about["share"] = TenantShare(tenant, len(tenant), 100 * max_tokens)
        if kind.endswith(("pull", "pulls")):
            about["held"] = 8
        seq = self.rank.submit(
            [7] * shared + rest, max_tokens, receives=kind == "remote", transfer_id=transfer_id, **about
        )
        self.sent.append(seq)
        if transfer_id is not None:
            self.transfers.append(seq)

    @rule(times=st.integers(1, 8))
    def step(self, times):
        for _ in range(times):
            out_of_patience = {seq: seq.overtaken for seq in self.sent if self._has_waited_long(seq)}
            self.rank.step()
            self.nobody_is_overtaken_too_often()
            for seq, overtaken in out_of_patience.items():
                assert seq.overtaken <= overtaken

    def _has_waited_long(self, seq):
        since_s = seq.overtaken_since_s
        return since_s is not None and self.rank.now - since_s >= self.wait_s

    @rule(number=ANY)
    @precondition(lambda self: self.in_phase(Phase.RECEIVING))
    def land(self, number):
        self._land(self.pick(self.in_phase(Phase.RECEIVING), number))

    def _land(self, seq):
        self.rank.land(seq)

    @rule(number=ANY, garbled=st.booleans())
    @precondition(lambda self: self.in_phase(Phase.RECEIVING))
    def transfer_fails(self, number, garbled):
        """Half of it was written perhaps, perhaps by a writer who has not stopped."""
        seq = self.pick(self.in_phase(Phase.RECEIVING), number)
        if garbled:
            self._garble(self.rank.reserved[seq])
        self.core.cancel(seq, quarantine=True)
        self.sent.remove(seq)
        self.quarantined.append(seq)

    @rule(number=ANY)
    @precondition(lambda self: self.quarantined)
    def writer_stops(self, number):
        """It may write until then."""
        seq = self.quarantined.pop(number % len(self.quarantined))
        self._garble(self.rank.reserved[seq])
        self.core.end_quarantine(seq)

    @rule(number=ANY, end=ANY)
    @precondition(lambda self: self.pulling())
    def a_source_has_written(self, number, end):
        seq = self.pick(self.pulling(), number)
        self.rank.pull(seq, self._some_end(seq, end))

    def pulling(self):
        own = [seq for seq in self.in_phase(Phase.PULLING) if not seq.lacking_pages]
        return own + [seq for seq in self.taking if seq.phase is Phase.PULLING]

    @rule(
        shared=st.integers(0, 12),
        rest=st.lists(st.integers(0, 2), min_size=1, max_size=8),
        tenant=st.sampled_from(["", "one"]),
        idle_s=st.sampled_from([0.0, 0.01, 0.2, 100.0]),
        protected=st.integers(0, 12),
    )
    def another_leaves(self, shared, rest, tenant, idle_s, protected):
        retractions = self.core.retractions
        if (seq := self.rank.take_over([7] * shared + rest, tenant, idle_s, protected)) is not None:
            self.taking.append(seq)
            assert not len(self.core._gate) and self.core.retractions == retractions

    @rule(number=ANY, garbled=st.booleans())
    @precondition(lambda self: self.taking)
    def a_take_over_ends(self, number, garbled):
        """Its source has been done with, or nobody was asked yet."""
        seq = self.taking.pop(number % len(self.taking))
        if garbled and seq.phase is Phase.PULLING:
            self._garble(self.rank.reserved[seq])
        self.core.pulls.taking.end(seq)

    def _some_end(self, seq, number):
        wanted = self.rank.wanted[seq]
        unit = self.core.carried.index_block if self.rank.groups else self.page_size
        return self.pick([e for e in range(0, wanted.end + 1, unit) if e > wanted.resumes_at], number)

    @rule(number=ANY, written=st.booleans())
    @precondition(lambda self: self.pulling())
    def a_source_fails(self, number, written):
        seq = self.pick(self.pulling(), number)
        if written:
            self._garble(self.rank.reserved[seq])
        self.core.pulls.failed(seq)

    @rule(number=ANY, end=ANY, leaves=st.booleans())
    @precondition(lambda self: self.pulling())
    def a_source_may_write_still(self, number, end, leaves):
        seq = self.pick(self.pulling(), number)
        end, reserved, transfer_id = self._some_end(seq, end), self.rank.reserved[seq], self.transfers_made
        self.transfers_made += 1
        pages = reserved.delta_pages[: max(0, end - reserved.prefix_len) // self.page_size]
        self.aside[transfer_id] = replace(reserved, delta_pages=pages)
        self.core.pulls.set_aside(seq, transfer_id, end)
        if leaves and seq in self.sent:
            self.core.cancel(seq)
            self.sent.remove(seq)
        else:
            self.core.pulls.failed(seq)

    @rule()
    @precondition(lambda self: self.aside)
    def a_source_writes_and_stops(self):
        transfer_id, reserved = self.aside.popitem()
        self._garble(reserved)
        self.core.pulls.end_aside(transfer_id)

    @rule(
        shared=st.integers(0, 12),
        rest=st.lists(st.integers(0, 2), max_size=4),
        tenant=st.sampled_from(["", "one"]),
    )
    def another_asks(self, shared, rest, tenant):
        transfer_id, ids = self.transfers_made, [7] * shared + rest
        self.transfers_made += 1
        granted = self.core.pulls.grant(transfer_id, ids, tenant, 1)
        assert self.core.pulls.grant(transfer_id, ids, tenant, 1) is None or isinstance(granted, Refused)
        if isinstance(granted, Granted):
            self.granted[transfer_id] = granted, ids
            self._check_granted(transfer_id)

    @rule()
    @precondition(lambda self: self.granted)
    def another_has_read(self):
        transfer_id = next(iter(self.granted))
        self._check_granted(transfer_id)
        del self.granted[transfer_id]
        self.core.pulls.grant_ended(transfer_id)

    def _check_granted(self, transfer_id):
        """The pages that were granted are there, and hold what the tokens compute to."""
        granted, ids = self.granted[transfer_id]
        model = FakeModel(ids[: granted.end], self.rank.groups)
        stored = self.rank.runner.slots[list(granted.pages)].reshape(-1).tolist()
        assert stored == model.values[0]
        check_carried(self.rank.runner, granted.end, granted.carried, model, self.page_size)

    def _garble(self, reserved):
        self.rank.runner.slots[list(reserved.delta_pages)] = 12345
        for pool, units in zip(self.rank.runner.carried_pools, reserved.carried, strict=True):
            pool[list(units)] = 54321

    @rule(number=ANY, start=st.integers(0, 8))
    @precondition(lambda self: self.in_phase(Phase.RECEIVING))
    def renegotiate(self, number, start):
        seq = self.pick(self.in_phase(Phase.RECEIVING), number)
        start = start // self.page_size * self.page_size
        if start < self.rank.reserved[seq].prefix_len:
            self.core.renegotiate(seq, start)

    @rule(number=ANY)
    @precondition(lambda self: self.sent)
    def abort(self, number):
        seq = self.sent.pop(number % len(self.sent))
        self.core.cancel(seq)

    @rule(number=ANY)
    @precondition(lambda self: self.transfers)
    def transfer_ends(self, number):
        seq = self.transfers.pop(number % len(self.transfers))
        self.rank.check_transfer(seq)
        self.core.transfer_ended(seq)

    @rule(num_pages=st.integers(1, 50))
    def evict(self, num_pages):
        self.core.cache.make_room(num_pages)

    @rule(times=st.integers(1, 5))
    def checkpoints_are_evicted(self, times):
        for _ in range(times):
            self.core.carried.points.evict()

    @rule()
    def the_runner_fails(self):
        """With half of the batch computed; who was admitted or retracted for it stays so."""
        self.rank.runner_fails = True
        try:
            self.core.step()
        except RunnerFailed:
            for seq in self.core.fail_active():
                if seq in self.sent:
                    self.sent.remove(seq)
        finally:
            self.rank.runner_fails = False
        self.rank.take()

    # -- what always holds ------------------------------------------------------------------------

    @invariant()
    def the_books_balance(self):
        if hasattr(self, "core"):
            self.core.check()
            for seq in self.core._active:
                assert 0 <= seq.owed_tokens <= len(seq.ids)

    @invariant()
    def nobody_is_overtaken_too_often(self):
        for seq in getattr(self, "sent", ()):
            assert seq.overtaken <= self.overtakes
            assert seq.transfer_id is None or seq.retractions == 0

    @invariant()
    def no_more_run_than_may(self):
        if hasattr(self, "core"):
            with_slot = (Phase.COMPUTING, Phase.DECODING, Phase.PULLING)
            running = [s for s in self.core._active if s.phase in with_slot]
            assert len(running) <= self.max_running

    @invariant()
    def what_was_said_is_right(self):
        for seq, tokens in self.rank.tokens.items() if hasattr(self, "rank") else ():
            assert tokens == self.rank.expected(seq.request.prompt_ids, len(tokens))

    def teardown(self):
        if not hasattr(self, "core"):
            return
        for seq in self.quarantined:
            self.core.end_quarantine(seq)
        for seq in self.transfers:
            self.core.transfer_ended(seq)
        while self.aside:
            self.a_source_writes_and_stops()
        for seq in self.taking:
            self.core.pulls.taking.end(seq)
        while self.granted:
            self.another_has_read()
        # Each step computes something, retractions included; a token or a chunk has been computed often then.
        steps = 40 * (10 + sum(len(seq.ids) + 10 for seq in self.sent))
        while waiting := [seq for seq in self.sent if seq not in self.rank.finished]:
            steps -= 1
            assert steps > 0, f"starved: {waiting}"
            progressed = self.core.step()
            self.rank.take()
            for seq in (receiving := self.in_phase(Phase.RECEIVING)):
                self._land(seq)
            for seq in (pulling := self.pulling()):
                self.rank.pull(seq)
            assert progressed or receiving or pulling, self.core.load()
        for seq in self.sent:
            prompt = seq.request.prompt_ids
            context = self.core.max_context_tokens - len(prompt)
            expected = 1 if seq.single_token else min(seq.request.sampling.max_tokens, context)
            assert self.rank.tokens[seq] == self.rank.expected(prompt, expected)
        self.core.cache.clear()
        assert all(books.free == books.total for books in self.core.carried.check())
        books = self.core.check()
        assert books.free == books.total


CoreMachine.TestCase.settings = settings(max_examples=50, stateful_step_count=40)
TestCore = CoreMachine.TestCase


@pytest.mark.exact
@pytest.mark.timeout(900)
def test_for_longer():
    run_state_machine_as_test(CoreMachine, settings=settings(max_examples=150, stateful_step_count=60))
