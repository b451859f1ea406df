"""An engine core with a logical clock, what it said, and a prefill rank's part played by hand."""

from dataclasses import replace

from services.engine.fake import FakeRunner, _mix, continuation
from services.engine.paged.core import EngineCore, Limits
from services.engine.paged.events import Offered, Reserved, Token
from services.engine.paged.sequence import Sequence
from services.kv.prefix_cache import PrefixCache
from services.values.request import FinishReason, GenerationRequest, SamplingParams


class CountingRunner:
    """The rank's runner, and how many tokens it was asked for; it fails in mid-batch when told to."""

    def __init__(self, rank):
        self._rank = rank

    def __getattr__(self, name):
        return getattr(self._rank.runner, name)

    def run(self, chunks):
        if self._rank.runner_fails:
            self._rank.runner.run(chunks[: len(chunks) // 2])
            raise RuntimeError("the runner has failed")
        self._rank.computed_tokens += sum(len(chunk.token_ids) for chunk in chunks)
        return self._rank.runner.run(chunks)


class Rank:
    """A core with a logical clock, and what it said."""

    def __init__(self, num_pages=32, page_size=4, chunk_size=8, cache=True, max_running=8, **limits):
        self.now = 0.0
        self.computed_tokens = 0
        self.runner_fails = False
        self.runner = FakeRunner(num_pages=num_pages, page_size=page_size)
        prefix_cache = PrefixCache(num_pages, page_size, page_size, "fake", enabled=cache)
        self.core = EngineCore(
            CountingRunner(self), prefix_cache, Limits(max_running, chunk_size, **limits), self._clock
        )
        self.tokens: dict[Sequence, list[int]] = {}
        self.finished: dict[Sequence, FinishReason] = {}
        self.reserved: dict[Sequence, Reserved] = {}
        self.offered: dict[Sequence, list[Offered]] = {}
        self._arrivals = 0

    def _clock(self) -> float:
        self.now += 0.001
        return self.now

    def let_run(self, num_requests) -> None:
        """At once, from now on."""
        self.core._limits = replace(self.core._limits, max_running_requests=num_requests)

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


class Prefill:
    """Writes exact KV into a pool, as a prefill rank would."""

    def __init__(self, runner: FakeRunner) -> None:
        self._runner = runner
        self._page_size = runner.layout.page_size

    def run(self, ids, pages, start) -> int:
        """Fill `pages` with the KV of ids[start:]; returns the token that follows."""
        for position in range(start, len(ids)):
            page = pages[(position - start) // self._page_size]
            self._runner.slots[page, position % self._page_size] = _mix(ids[position], position)
        return continuation(ids, 1)[0]
