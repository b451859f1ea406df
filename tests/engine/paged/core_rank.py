"""An engine core with a logical clock, what it said, and a prefill rank's part played by hand."""

from dataclasses import replace

from services.engine.fake import VOCAB_SIZE, FakeModel, FakeRunner, continuation
from services.engine.paged.admitting import Limits
from services.engine.paged.core import EngineCore
from services.engine.paged.core_events import (
    NO_TIME,
    Carried,
    Failed,
    Offered,
    PromptTime,
    Reserved,
    Token,
    Wanted,
)
from services.engine.paged.model_runner import Proposal, Sampled, scores_of
from services.engine.paged.sequence import Sequence
from services.engine.paged.take_overs import Declined
from services.kv.carried_cache import CarriedCache
from services.kv.prefix_cache import PrefixCache
from services.kv.tails import tail_pages, units_for
from services.values.kv import GroupKind
from services.values.prompt_logprobs import PromptLogprobs
from services.values.rank import Generation, PullSource, RankAddress, RankId
from services.values.request import FinishReason, GenerationRequest, SamplingParams

ELSEWHERE = RankAddress(RankId("elsewhere", 0, Generation(1)), "")


class CountingRunner:
    """The rank's runner, and how many tokens it was asked for; it fails in mid-batch when told to.

    Published pages are never written, nor a state by two.
    """

    def __init__(self, rank):
        self._rank = rank

    def __getattr__(self, name):
        return getattr(self._rank.runner, name)

    def run(self, chunks):
        self._rank.now += self._rank.step_s
        if self._rank.runner_fails:
            self._rank.runner.run(chunks[: len(chunks) // 2])
            raise RuntimeError("the runner has failed")
        published = {node.page for node in self._rank.core.cache._tree.nodes()}
        page_size = self._rank.runner.layout.page_size
        for chunk in chunks:
            written = range(max(chunk.start, chunk.store_from), chunk.end)
            assert published.isdisjoint(chunk.pages[position // page_size] for position in written)
        slots = [chunk.slot for chunk in chunks if chunk.slot is not None]
        assert len(slots) == len(set(slots))
        self._rank.computed_tokens += sum(len(chunk.token_ids) for chunk in chunks)
        return self._rank.runner.run(chunks)


class Rank:
    """A core with a logical clock, and what it said."""

    def __init__(
        self,
        num_pages=32,
        page_size=4,
        chunk_size=8,
        cache=True,
        max_running=8,
        carried=(),
        room_for=8,
        block_pages=1,
        drafting=None,
        max_step_drafts=1024,
        **limits,
    ):
        """The pools of what is carried have room for so many sequences that receive."""
        self.now = 0.0
        self.step_s = 0.0  # that a batch takes
        self.computed_tokens = 0
        self.runner_fails = False
        self.groups = carried
        block = block_pages * page_size
        units = [units_for(group, page_size, chunk_size, room_for) for group in carried]
        self.runner = FakeRunner(
            num_pages=num_pages,
            page_size=page_size,
            carried=carried,
            carried_units=units,
            max_step_drafts=max_step_drafts,
        )
        books = CarriedCache(
            self.runner.layout,
            units,
            index_block=block,
            chunk_size=chunk_size,
            copy_slot=lambda source, target: self.runner.copy_slots([(source, target)]),
        )
        prefix_cache = PrefixCache(
            num_pages,
            page_size,
            block,
            "fake",
            enabled=cache,
            forget=books.points.forget,
            clock=lambda: self.now,
        )
        limits = Limits(max_running, chunk_size, **limits)
        self.core = EngineCore(CountingRunner(self), prefix_cache, limits, self._clock, books, drafting)
        self.carried: dict[Sequence, Carried] = {}
        self.tokens: dict[Sequence, list[int]] = {}
        self.times: dict[Sequence, list[PromptTime]] = {}  # of each time that its prompt was computed
        self.told: dict[Sequence, PromptLogprobs] = {}
        self.finished: dict[Sequence, FinishReason] = {}
        self.failed: dict[Sequence, str] = {}
        self.reserved: dict[Sequence, Reserved] = {}
        self.wanted: dict[Sequence, Wanted] = {}
        self.offered: dict[Sequence, list[Offered]] = {}
        self._arrivals = 0

    def _clock(self) -> float:
        self.now += 0.001
        return self.now

    def submit(
        self, prompt, max_tokens=5, *, receives=False, transfer_id=None, scored=None, held=None, **request
    ) -> Sequence:
        """`scored`: what is asked of its prompt's tokens, of SamplingParams; `held`: as much of it as another
        rank is said to hold."""
        self._arrivals += 1
        sampling = SamplingParams(temperature=0, max_tokens=max_tokens, **(scored or {}))
        asked = GenerationRequest(f"r{self._arrivals}", tuple(prompt), sampling, **request)
        seq = Sequence(
            asked,
            self._arrivals,
            scores=scores_of(asked),
            receives=receives,
            transfer_id=transfer_id,
            single_token=transfer_id is not None,
            transfer_open=transfer_id is not None,
            source=None if held is None else PullSource(ELSEWHERE, held),
        )
        self.core.submit(seq)
        return seq

    def step(self) -> None:
        self.core.step()
        self.take()

    def take(self) -> None:
        for seq, event in self.core.take_outputs():
            match event:
                case Reserved():
                    self.reserved[seq] = event
                    if event.wanted is not None:
                        self.wanted[seq] = event.wanted
                case Failed():
                    self.failed[seq] = type(event.error).__name__
                case Offered():
                    self.offered.setdefault(seq, []).append(event)
                case Carried():
                    assert seq not in self.carried
                    self.carried[seq] = event
                    self.check_transfer(seq)
                case Token():
                    assert seq not in self.finished
                    assert event.prompt_logprobs is None or seq not in self.tokens
                    self.note_time(seq, event.time)
                    if event.prompt_logprobs is not None:
                        self.told[seq] = event.prompt_logprobs
                    self.tokens.setdefault(seq, []).append(event.token_id)
                    if event.finished is not None:
                        self.finished[seq] = event.finished
                case int():
                    assert seq not in self.finished
                    self.tokens[seq].append(event)
        self.core.check()

    def note_time(self, seq, time) -> None:
        if time == NO_TIME:
            return
        times = self.times.setdefault(seq, [])
        times.append(time)
        told_s = sum(sum(each[:3]) for each in times)
        assert min(time) >= 0 and told_s <= self.now - seq.submitted_s + 1e-9
        assert sum(each.rank_tokens for each in times) <= self.computed_tokens

    def land(self, *seqs) -> None:
        """A prefill rank has written what they receive."""
        for seq in seqs:
            reserved = self.reserved[seq]
            first = Prefill(self.runner).run(
                seq.ids, reserved.delta_pages, reserved.prefix_len, reserved.carried
            )
            self.core.landed(seq, Sampled(first))
        self.take()

    def pull(self, seq, end=None) -> None:
        """A source has written what it lacks up to `end`, or as far as it was said to hold."""
        wanted = self.wanted[seq]
        end = wanted.expected_end if end is None else end
        if self.groups and end != wanted.expected_end:
            self.core.pulls.up_to(seq, end)
            self.take()
        self.write_pulled(seq, end)
        self.core.pulls.landed(seq, end, with_draft=False)
        self.take()

    def write_pulled(self, seq, end) -> None:
        reserved, page_size = self.reserved[seq], self.runner.layout.page_size
        start = min(reserved.prefix_len, end)
        pages = reserved.delta_pages[: (end - start) // page_size]
        Prefill(self.runner).run(seq.ids[:end], pages, start, reserved.carried)

    def take_over(self, ids, salt, idle_s, protected_tokens) -> Sequence | None:
        """Begin to take over what another rank has cached; None where it is not wanted."""
        request = GenerationRequest("over", tuple(ids), SamplingParams(max_tokens=1), cache_salt=salt)
        seq = Sequence(request, 0)
        reserved = self.core.pulls.taking.begin(seq, idle_s, protected_tokens)
        if isinstance(reserved, Declined):
            return None
        self.reserved[seq], self.wanted[seq] = reserved, reserved.wanted
        return seq

    def limit(self, **changes) -> None:
        """From now on."""
        for part in (self.core.figures, self.core._slots):
            part.limits = replace(part.limits, **changes)

    def let_run(self, num_requests) -> None:
        """At once, from now on."""
        self.limit(max_running_requests=num_requests)

    def expected(self, prompt, num_tokens) -> list[int]:
        return continuation(prompt, num_tokens, self.groups)

    def check_transfer(self, seq) -> None:
        """What a prefill rank has offered of a prompt is what that computes to."""
        prompt, page_size = seq.request.all_ids, self.runner.layout.page_size
        model = FakeModel(prompt, self.groups)
        pages = [page for offered in self.offered.get(seq, ()) for page in offered.pages]
        stored = self.runner.slots[pages].reshape(-1).tolist()[: len(prompt)]
        assert stored == model.values[0][: len(stored)]
        if seq in self.carried:
            assert len(stored) == len(prompt)
            check_carried(self.runner, len(prompt), self.carried[seq].units, model, page_size)

    def run(self, seqs, max_steps=500) -> None:
        for _ in range(max_steps):
            if all(seq in self.finished for seq in seqs):
                return
            self.step()
        raise AssertionError(f"not finished after {max_steps} steps: {self.core.load()}")


class Guesses:
    """It implements Drafting: of each sequence's next tokens, which `continuation` knows, as many as
    `lengths` says, in turn; every one that `is_right` says no of is another token."""

    def __init__(self, continuation, lengths, is_right=lambda seq, index: True):
        self._continuation, self._lengths, self._is_right = continuation, lengths, is_right
        self.noted: dict[Sequence, list[tuple[int, int]]] = {}  # (drafts, accepted) of each step
        self.over: list[Sequence] = []

    def propose(self, wishes, max_drafts, step_times):
        proposals = []
        for wish in wishes:
            assert wish.seq not in self.over
            count = next(self._lengths)
            right = self._continuation(wish.seq.ids, count)
            ids = [
                token if self._is_right(wish.seq, i) else (token + 1) % VOCAB_SIZE
                for i, token in enumerate(right)
            ]
            proposals.append(Proposal("guess", tuple(ids)) if count else None)
        return proposals

    def note(self, seq, proposal, num_accepted):
        assert 0 <= num_accepted <= len(proposal.ids)
        assert list(proposal.ids[:num_accepted]) == seq.ids[len(seq.ids) - num_accepted :]
        self.noted.setdefault(seq, []).append((len(proposal.ids), num_accepted))

    def ended(self, seq):
        assert seq not in self.over
        self.over.append(seq)


class Prefill:
    """Writes exact KV into a pool, as a prefill rank would."""

    def __init__(self, runner: FakeRunner) -> None:
        self._runner = runner
        self._page_size = runner.layout.page_size

    def run(self, ids, pages, start, carried=()) -> int:
        """Fill `pages` with the KV of ids[start:], and `carried` units; returns the token that follows."""
        model = FakeModel(ids, self._runner.layout.carried)
        self._fill(self._runner.slots, pages, start, model.values[0])
        groups = zip(
            self._runner.layout.carried, self._runner.carried_pools, carried, model.values[1:], strict=True
        )
        for group, pool, units, values in groups:
            if group.kind is GroupKind.RECURRENT:
                pool[units[0]] = values[-1]
            else:
                tail = tail_pages(group, len(ids), self._page_size)
                assert len(units) == len(tail)
                self._fill(pool, units, tail.start * self._page_size, values)
        return model.next_token

    def _fill(self, pool, pages, start, values) -> None:
        for position in range(start, min(len(values), start + len(pages) * self._page_size)):
            page = pages[(position - start) // self._page_size]
            pool[page, position % self._page_size] = values[position]


def check_carried(runner, prompt_len, units, model, page_size) -> None:
    """The units hold what is carried at the prompt's end."""
    groups = zip(runner.layout.carried, runner.carried_pools, units, model.values[1:], strict=True)
    for group, pool, held, values in groups:
        if group.kind is GroupKind.RECURRENT:
            assert [pool[slot, 0] for slot in held] == values[-1:]
            continue
        tail = tail_pages(group, prompt_len, page_size)
        assert len(held) == len(tail)
        first = tail.start * page_size if tail else prompt_len
        assert pool[list(held)].reshape(-1).tolist()[: prompt_len - first] == values[first:]
