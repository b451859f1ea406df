"""The engine core around the fake runner: whatever happens, the tokens are right and the books balance."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.engine.fake import FakeRunner, _mix, continuation
from services.engine.paged.core import EngineCore, Limits, Offered, Reserved, Token
from services.engine.paged.runner import Sampled
from services.engine.paged.sequence import Phase, Sequence
from services.errors import InvalidRequest, NoCapacity
from services.kv.prefix_cache import PrefixCache
from services.request import FinishReason, GenerationRequest, SamplingParams


class Rank:
    """A core with a logical clock, and what it said."""

    def __init__(self, num_pages=32, page_size=4, chunk_size=8, cache=True, max_running=8):
        self.now = 0.0
        self.runner = FakeRunner(num_pages=num_pages, page_size=page_size)
        prefix_cache = PrefixCache(num_pages, page_size, page_size, "fake", enabled=cache)
        self.core = EngineCore(self.runner, prefix_cache, Limits(max_running, chunk_size), self._clock)
        self.tokens: dict[Sequence, list[int]] = {}
        self.finished: dict[Sequence, FinishReason] = {}
        self.reserved: dict[Sequence, Reserved] = {}
        self.offered: dict[Sequence, list[Offered]] = {}
        self._arrivals = 0

    def _clock(self) -> float:
        self.now += 0.001
        return self.now

    def submit(self, prompt, max_tokens=5, *, receives=False, room=None, **request) -> Sequence:
        self._arrivals += 1
        sampling = SamplingParams(temperature=0, max_tokens=max_tokens)
        seq = Sequence(
            GenerationRequest(f"r{self._arrivals}", tuple(prompt), sampling, **request),
            self._arrivals,
            receives=receives,
            room=room,
            single_token=room is not None,
            room_open=room is not None,
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
                case Offered():
                    self.offered.setdefault(seq, []).append(event)
                case Token():
                    assert seq not in self.finished
                    self.tokens.setdefault(seq, []).append(event.token_id)
                    if event.finished is not None:
                        self.finished[seq] = event.finished
        self.core.check()

    def run(self, seqs, max_steps=500) -> None:
        for _ in range(max_steps):
            if all(seq in self.finished for seq in seqs):
                return
            self.step()
        raise AssertionError(f"not finished after {max_steps} steps: {self.core.load()}")


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("prompt_len", [1, 15, 16, 17, 40])
@pytest.mark.parametrize("chunk_size", [1, 7, 64])
def test_tokens_are_exact(page_size, prompt_len, chunk_size):
    rank = Rank(num_pages=128, page_size=page_size, chunk_size=chunk_size)
    prompt = [(i * 7) % 500 for i in range(prompt_len)]
    seq = rank.submit(prompt, 20)
    rank.run([seq])
    assert rank.tokens[seq] == continuation(prompt, 20)
    assert rank.finished[seq] is FinishReason.LENGTH
    assert rank.core.check().private == 0


def test_second_turn_reuses_the_first_answer_included():
    rank = Rank(page_size=4, num_pages=64)
    first = rank.submit(range(10), 10)
    rank.run([first])
    turn = list(range(10)) + rank.tokens[first] + [3, 1]
    second = rank.submit(turn, 4)
    rank.run([second])
    # The newest token's KV is never stored: 19 tokens are, 16 of them in whole pages.
    assert rank.reserved[second].prefix_len == 16
    assert rank.tokens[second] == continuation(turn, 4)


def test_retraction_goes_on_with_the_same_tokens():
    rank = Rank(num_pages=12, page_size=4)
    prompts = [[i, i + 1, i + 2] for i in range(3)]
    seqs = [rank.submit(p, 20) for p in prompts]
    rank.run(seqs)
    assert rank.core.retractions > 0
    for seq, prompt in zip(seqs, prompts, strict=True):
        assert rank.tokens[seq] == continuation(prompt, 20)


def test_output_so_far_counts_as_output():
    rank = Rank()
    so_far = continuation([5, 6, 7], 3)
    seq = rank.submit([5, 6, 7], 5, output_ids_so_far=tuple(so_far))
    rank.run([seq])
    assert so_far + rank.tokens[seq] == continuation([5, 6, 7], 5)


def test_prefill_offers_every_page_once_and_keeps_it_for_the_room():
    rank = Rank(page_size=4, chunk_size=6)
    seq = rank.submit(range(18), 5, room=77)
    rank.run([seq])
    spans = [(o.start_token, o.end_token) for o in rank.offered[seq]]
    assert spans == [(0, 4), (4, 12), (12, 18)]
    assert rank.tokens[seq] == continuation(range(18), 1)
    books = rank.core.check()
    assert books.private + books.locked == 5  # the room may still read them
    rank.core.room_ended(seq)
    assert rank.core.check().locked == rank.core.check().private == 0


def test_received_kv_is_used_as_it_landed():
    rank = Rank(page_size=4)
    prompt = list(range(11))
    seq = rank.submit(prompt, 6, receives=True)
    rank.step()
    assert seq.phase is Phase.RECEIVING
    donor = FakeRunner(num_pages=8, page_size=4)
    donor_core = EngineCore(donor, PrefixCache(8, 4, 4, "fake"), Limits(), lambda: 0.0)
    other = Sequence(GenerationRequest("d", tuple(prompt), SamplingParams(max_tokens=1)), 1)
    donor_core.submit(other)
    pages = None
    while other.phase is not Phase.ENDED:
        donor_core.step()
        pages = list(other.pages.pages) if other.pages else pages
    for source, target in zip([0, 1, 2], rank.reserved[seq].delta_pages, strict=True):
        rank.runner._slots[target] = donor._slots[source]
    first = continuation(prompt, 1)[0]
    rank.core.landed(seq, Sampled(first))
    rank.run([seq])
    assert rank.tokens[seq] == continuation(prompt, 6)


def test_quarantined_pages_are_lent_to_nobody():
    rank = Rank(num_pages=4, page_size=4)
    seq = rank.submit(range(11), 2, receives=True)
    rank.step()
    rank.core.cancel(seq, quarantine=True)
    assert rank.core.check().quarantined == 3
    waiting = rank.submit(range(100, 110), 2)
    rank.step()
    assert waiting.phase is Phase.WAITING
    rank.core.end_quarantine(seq)
    rank.run([waiting])
    assert rank.core.check().quarantined == 0


def test_refusals():
    rank = Rank(num_pages=4, page_size=4)
    with pytest.raises(InvalidRequest, match="empty"):
        rank.submit([])
    with pytest.raises(InvalidRequest, match="vocabulary"):
        rank.submit([512])
    with pytest.raises(NoCapacity, match="holds 16"):
        rank.submit(range(16))
    seq = rank.submit(range(15))
    rank.run([seq])
    assert rank.tokens[seq] == continuation(range(15), 1)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_interleaving_is_exact_and_balances(data):
    """Submissions with shared prefixes, cancels and steps in any order on a pool that is too small."""
    page_size = data.draw(st.sampled_from([1, 2, 4]))
    rank = Rank(
        num_pages=data.draw(st.integers(24 // page_size, 40 // page_size)),
        page_size=page_size,
        chunk_size=data.draw(st.integers(1, 9)),
        cache=data.draw(st.booleans()),
        max_running=4,
    )
    live: list[Sequence] = []
    for _ in range(data.draw(st.integers(1, 25))):
        action = data.draw(st.sampled_from(["submit", "step", "step", "cancel"]))
        if action == "submit":
            shared = data.draw(st.integers(0, 8))
            prompt = [7] * shared + data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=6))
            live.append(rank.submit(prompt, data.draw(st.integers(1, 8))))
        elif action == "cancel" and live:
            rank.core.cancel(live.pop(data.draw(st.integers(0, len(live) - 1))))
            rank.core.check()
        else:
            rank.step()
    rank.run(live)
    for seq in live:
        assert rank.tokens[seq] == continuation(seq.request.prompt_ids, seq.request.sampling.max_tokens)
    books = rank.core.check()
    assert books.locked == books.private == 0


def test_a_step_says_when_only_the_outside_can_help():
    """Or the engine thread would spin as long as a prefill, a writer or a room takes."""
    rank = Rank(num_pages=4, page_size=4)
    receiving = rank.submit(range(11), 2, receives=True)
    assert rank.core.step()
    waiting = rank.submit(range(100, 110), 2)
    assert not rank.core.step()
    rank.core.cancel(receiving)
    assert rank.core.step()
    rank.run([waiting])
    assert not rank.core.step()


def test_those_of_lower_priority_give_way_first():
    rank = Rank(num_pages=12, page_size=4)
    low = [rank.submit([i, i + 1, i + 2], 20) for i in range(2)]
    high = rank.submit([9, 9, 9], 20, priority=1)
    rank.run([*low, high])
    assert rank.core.retractions > 0
    assert next(iter(rank.finished)) is high


class Prefill:
    """Writes exact KV into a pool, as a prefill rank would."""

    def __init__(self, runner: FakeRunner) -> None:
        self._runner = runner
        self._page_size = runner.layout.page_size

    def run(self, ids, pages, start) -> int:
        """Fill `pages` with the KV of ids[start:]; returns the token that follows."""
        for position in range(start, len(ids)):
            page = pages[(position - start) // self._page_size]
            self._runner._slots[page, position % self._page_size] = _mix(ids[position], position)
        return continuation(ids, 1)[0]


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_either_role_is_exact_and_balances(data):
    """Receivers that land, fail or are quarantined, retractions and priorities; or rooms that read on."""
    page_size = data.draw(st.sampled_from([1, 2, 4]))
    rank = Rank(
        num_pages=data.draw(st.integers(24 // page_size, 40 // page_size)),
        page_size=page_size,
        chunk_size=data.draw(st.integers(1, 9)),
        cache=data.draw(st.booleans()),
        max_running=4,
    )
    kinds = data.draw(st.sampled_from([("local", "remote"), ("room",)]))
    prefill = Prefill(rank.runner)
    sent, quarantined, rooms = [], [], []

    def receiving():
        return [s for s in sent if s.phase is Phase.RECEIVING]

    def land(seq):
        reserved = rank.reserved[seq]
        first = prefill.run(seq.ids, reserved.delta_pages, reserved.prefix_len)
        rank.core.landed(seq, Sampled(first))

    def check_rooms():
        for seq in rooms:
            ids = seq.request.prompt_ids
            for offered in rank.offered.get(seq, []):
                for number, page in enumerate(offered.pages):
                    start = offered.start_token + number * page_size
                    for position in range(start, min(start + page_size, offered.end_token)):
                        slot = rank.runner._slots[page, position % page_size]
                        assert slot == _mix(ids[position], position)

    actions = ["submit", "submit", "step", "step", "step", "land", "cancel", "unquarantine", "end_room"]
    for _ in range(data.draw(st.integers(1, 40))):
        action = data.draw(st.sampled_from(actions))
        if action == "submit":
            prompt = [7] * data.draw(st.integers(0, 8))
            prompt += data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=6))
            kind = data.draw(st.sampled_from(kinds))
            room = len(sent) if kind == "room" else None
            seq = rank.submit(
                prompt,
                data.draw(st.integers(1, 8)),
                receives=kind == "remote",
                room=room,
                priority=data.draw(st.integers(0, 1)),
            )
            sent.append(seq)
            rooms += [seq] if room is not None else []
        elif action == "land" and receiving():
            land(data.draw(st.sampled_from(receiving())))
        elif action == "cancel" and sent:
            seq = sent.pop(data.draw(st.integers(0, len(sent) - 1)))
            if seq.phase is Phase.RECEIVING and data.draw(st.booleans()):
                quarantined.append(seq)
                rank.core.cancel(seq, quarantine=True)
            rank.core.cancel(seq)
        elif action == "unquarantine" and quarantined:
            rank.core.end_quarantine(quarantined.pop())
        elif action == "end_room" and rooms:
            rank.core.room_ended(rooms.pop(data.draw(st.integers(0, len(rooms) - 1))))
        else:
            rank.step()
        rank.core.check()
        check_rooms()

    for seq in quarantined:
        rank.core.end_quarantine(seq)
    for seq in rooms:
        rank.core.room_ended(seq)
    while any(seq not in rank.finished for seq in sent):
        progressed = rank.core.step()
        rank.take()
        landing = receiving()
        for seq in landing:
            land(seq)
        rank.take()
        assert progressed or landing or all(seq in rank.finished for seq in sent), rank.core.load()
    for seq in sent:
        tokens = 1 if seq.single_token else seq.request.sampling.max_tokens
        assert rank.tokens[seq] == continuation(seq.request.prompt_ids, tokens)
    books = rank.core.check()
    assert books.locked == books.private == books.quarantined == 0


def test_who_waits_for_pages_is_matched_again_only_when_there_are_more(monkeypatch):
    """A long prompt takes longer to match than a step; those that decode would feel it at every token."""
    rank = Rank(num_pages=10, page_size=4)
    running = rank.submit(range(4), 20)
    rank.step()
    waiting = rank.submit(range(100, 134), 2)
    opened = []
    cache_open = rank.core.cache.open
    monkeypatch.setattr(rank.core.cache, "open", lambda *args: opened.append(1) or cache_open(*args))
    for _ in range(10):
        rank.step()
    assert waiting.phase is Phase.WAITING
    assert len(opened) == 1
    rank.run([running, waiting])
    assert rank.tokens[waiting] == continuation(range(100, 134), 2)
