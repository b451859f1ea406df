"""Recurrent layers cut a prompt by the prompt alone, whoever shares the steps' budget.

A whole core runs over a torch runner, on a CPU.
"""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from engine.torch.bits import num_parted, recorded_logits, runner_of
from exactness.reference import random_prompt
from services.engine.paged.admitting import Limits
from services.engine.paged.core import EngineCore
from services.engine.paged.core_events import Token
from services.engine.paged.sequence import Phase, Sequence
from services.engine.torch.model import mixers
from services.kv import carried_cache
from services.kv.carried_cache import CarriedCache
from services.kv.prefix_cache import PrefixCache
from services.values.request import GenerationRequest, SamplingParams

FAMILIES = ["falcon_h1", *(pytest.param(name, marks=pytest.mark.exact) for name in ("qwen3_5", "bamba"))]
SAMPLING = SamplingParams(temperature=0.8, top_p=0.95, seed=5, ignore_eos=True)
PROMPT = random_prompt(211, seed=1)
MAX_TOKENS = 7
CHUNK = 160
# Others: (the step before which it comes, prompt tokens that it shares, own ones, output tokens)
OTHERS = {
    "one before": [(0, 0, 50, 3)],
    "many, at other times": [(0, 0, 30, 9), (0, 0, 77, 2), (2, 0, 5, 4), (2, 128, 60, 2), (3, 0, 140, 1)],
    "what it begins with, cut within a scan": [(0, 100, 0, 1), (1, 37, 40, 2)],
}


class Core:
    """An engine core over so many of the runner's pages."""

    def __init__(self, runner, chunk_size=CHUNK, num_pages=150):
        layout = runner.layout
        books = CarriedCache(
            layout,
            [memory.num_pages for memory in runner.carried_memory],
            chunk_size=chunk_size,
            copy_slot=lambda source, target: runner.copy_slots([(source, target)]),
        )
        cache = PrefixCache(num_pages, layout.page_size, 64, "model", forget=books.points.forget)
        limits = Limits(max_running_requests=8, chunk_size=chunk_size, expected_output=0.0)
        self.engine = EngineCore(runner, cache, limits, lambda: 0.0, books)
        self.ended = set()
        self.arrivals = 0

    def submit(self, ids, max_tokens, output_ids=()):
        self.arrivals += 1
        sampling = replace(SAMPLING, max_tokens=max_tokens)
        name = f"r{self.arrivals}"
        request = GenerationRequest(name, tuple(ids), sampling, output_ids_so_far=tuple(output_ids))
        seq = Sequence(request, self.arrivals)
        self.engine.submit(seq)
        return seq

    def step(self):
        self.engine.step()
        for seq, event in self.engine.take_outputs():
            if isinstance(event, Token) and event.finished is not None:
                self.ended.add(seq)
        self.engine.check()

    def run(self, *seqs):
        while not self.ended.issuperset(seqs):
            self.step()


def alone(runner, **how):
    core = Core(runner, **how)
    seq = core.submit(PROMPT, MAX_TOKENS)
    core.run(seq)
    return seq.ids


def beside(runner, others, comes_at=2, **how):
    core, seq, waiting = Core(runner, **how), None, list(others)
    for step in range(200):
        for other in [each for each in waiting if each[0] == step]:
            waiting.remove(other)
            _, num_shared, num_own, max_tokens = other
            core.submit(PROMPT[:num_shared] + random_prompt(num_own, seed=num_own), max_tokens)
        if step == comes_at:
            seq = core.submit(PROMPT, MAX_TOKENS)
        if seq in core.ended:
            return seq.ids
        core.step()
    raise AssertionError("it does not end")


def check(logits, ids, runs):
    assert runs == [ids] * len(runs)
    assert num_parted(logits, ids, len(PROMPT), 1 + len(runs)) == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_gets_the_same_bits_beside_others_and_when_it_is_computed_again(family, monkeypatch):
    be_beside_others(family, recorded_logits(monkeypatch))
    compute_again(family, recorded_logits(monkeypatch))


def be_beside_others(family, logits):
    runner = runner_of(family)
    ids = alone(runner)
    runs = [alone(runner, chunk_size=16), *(beside(runner, others) for others in OTHERS.values())]
    runs.append(beside(runner, OTHERS["many, at other times"], chunk_size=80))
    check(logits, ids, runs)


def retracted(runner):
    """Another one, which came first, takes pages of it."""
    core = Core(runner, num_pages=23)
    other = core.submit(random_prompt(139, seed=3), 60)
    while other.phase is not Phase.DECODING:
        core.step()
    seq = core.submit(PROMPT, MAX_TOKENS)
    core.run(seq, other)
    assert seq.retractions > 0
    return seq.ids


def moved(runner, ids, num_output):
    """It goes on where so many of its tokens were generated elsewhere."""
    seq = (core := Core(runner)).submit(PROMPT, MAX_TOKENS, ids[len(PROMPT) :][:num_output])
    core.run(seq)
    return seq.ids


def compute_again(family, logits):
    """One by one, as before, though in one step: after a retraction, or where a stream has moved."""
    runner = runner_of(family)
    ids = alone(runner)
    assert [retracted(runner), moved(runner, ids, 6)] == [ids] * 2
    last, least = logits[tuple(ids[:-1])], logits[tuple(ids[: len(PROMPT)])]
    assert (len(last), len(least)) == (3, 2)
    assert parted(logits, ids) == 0


def parted(logits, ids):
    times = (logits[tuple(ids[:end])] for end in range(len(PROMPT), len(ids)))
    return sum(any(not torch.equal(row, rows[0]) for row in rows) for rows in times)


def chunks_anywhere(monkeypatch):
    monkeypatch.setattr(carried_cache, "scan_tokens", lambda index_block: 1)


def scans_anywhere(monkeypatch):
    monkeypatch.setattr(mixers, "scans", lambda start, end, tokens: iter([range(start, end)]))


def ends_of_scans_otherwise(monkeypatch):
    monkeypatch.setattr(mixers, "EvenFunctions", nullcontext)


@pytest.mark.exact
def test_what_is_cut_or_computed_otherwise_is_noticed(subtests):
    for mutation in [chunks_anywhere, scans_anywhere, ends_of_scans_otherwise]:
        with (
            subtests.test("a prompt that is cut otherwise is noticed", mutation=mutation),
            pytest.MonkeyPatch.context() as monkeypatch,
        ):
            logits = recorded_logits(monkeypatch)
            runner = runner_of("falcon_h1")
            ids = alone(runner)
            mutation(monkeypatch)
            for others in OTHERS.values():
                assert beside(runner, others) == ids
            assert parted(logits, ids) > 0
    with (
        subtests.test("generated tokens that are computed as a prompt are noticed"),
        pytest.MonkeyPatch.context() as monkeypatch,
    ):
        logits = recorded_logits(monkeypatch)
        runner = runner_of("qwen3_5")
        ids = alone(runner)
        run = type(runner).run
        as_prompts = lambda self, chunks: run(self, [replace(chunk, generated=False) for chunk in chunks])  # noqa: E731
        monkeypatch.setattr(type(runner), "run", as_prompts)
        assert moved(runner, ids, 6) == ids
        assert parted(logits, ids) > 0
