"""Packed steps of every family generate what transformers does, and what is lost or stale is noticed."""

import itertools
from functools import cache

import pytest
import torch

from bench.families import FAMILIES
from engine.torch.sequences import Carried, PageTables, Sequence, generate, kv_of, step
from exactness.checkpoints import tiny_checkpoint
from exactness.reference import count_near_ties, random_prompt, reference_generation
from services.engine.torch.runner import TorchRunner
from services.kv.tails import PoolSizes
from services.values.errors import ProtocolError
from services.values.kv import GroupKind

WINDOWED_MISTRAL = "mistral-window"
SERVED = [WINDOWED_MISTRAL, *(name for name in FAMILIES if name != "jamba")]
RECURRENT = ["qwen3_5", "falcon_h1"]
WITH_WINDOWS = ["gpt_oss", "gemma3"]
CARRYING = [
    pytest.param(family, marks=() if family in ("falcon_h1", *WITH_WINDOWS) else pytest.mark.exact)
    for family in (
        *RECURRENT,
        "qwen3_5_moe",
        "qwen3_next",
        "nemotron_h",
        "bamba",
        *WITH_WINDOWS,
        "gemma4",
        "llama4",
    )
]
LENGTHS = (5, 17, 131, 115, 1)
BORDER = 64


def checkpoint(family):
    return tiny_checkpoint("mistral", window=24) if family == WINDOWED_MISTRAL else tiny_checkpoint(family)


@cache
def runner_of(family, page_size=16):
    """One for all tests: a family's pools hold what others have left there."""
    sizes = PoolSizes(max_running_requests=6, chunk_size=160)
    return TorchRunner(
        checkpoint(family), num_pages=2048 // page_size, page_size=page_size, sizes=sizes, self_check=False
    )


def assert_as_transformers(family, sequences, max_near_ties=0):
    near_ties = 0
    for sequence in sequences:
        prompt = tuple(sequence.ids[: sequence.prompt_len])
        expected = reference_generation(checkpoint(family), prompt, len(sequence.output_ids))
        near_ties += count_near_ties(expected, sequence.output_ids)
    assert near_ties <= max_near_ties


def check_packed(family, page_size, chunk_sizes, max_tokens):
    runner = runner_of(family, page_size)
    tables = PageTables(runner)
    sequences = [
        Sequence(random_prompt(n, seed=n), tables.take(n + max_tokens), size, carried=Carried(tables))
        for n, size in zip(LENGTHS, chunk_sizes, strict=True)
    ]
    generate(runner, sequences, max_tokens)
    assert_as_transformers(family, sequences, max_near_ties=1)


def test_greedy_output_is_that_of_transformers(subtests):
    for family in ("deepseek_v3", WINDOWED_MISTRAL, *RECURRENT, *WITH_WINDOWS):
        with subtests.test(family=family):
            check_packed(family, 16, (1, 5, 21, 65, 1), max_tokens=16)


CUTS = [(1, 1, 3, 2, 1), (7,) * 5, (65,) * 5, (2, 3, 33, 7, 1)]
# One of each kind of memory: the others of a kind have two cuts each, by turns.
EACH_KIND = (WINDOWED_MISTRAL, "qwen3_5", "falcon_h1", "gemma3", "gpt_oss", "deepseek_v3")
IN_CUTS = [
    (family, cut)
    for number, family in enumerate(SERVED)
    for cut in range(len(CUTS))
    if family in EACH_KIND or (cut - number) % len(CUTS) < 2
]


@pytest.mark.exact
@pytest.mark.parametrize(("family", "cut"), IN_CUTS)
def test_greedy_output_is_that_of_transformers_however_it_is_cut(family, cut):
    """Pages of either size have every cut, and every family of EACH_KIND."""
    page_size = (1, 64)[(SERVED.index(family) + cut) % 2]
    check_packed(family, page_size, CUTS[cut], max_tokens=24)


class Resumed:
    """A sequence whose first BORDER tokens `first` has computed, then gone on; the other one goes on there.

    It has a copy of the state, the pages up to the border, those of the tails, and else pages of its own.
    """

    def __init__(self, family, max_tokens=12):
        self.runner = runner_of(family)
        self.tables = PageTables(self.runner, seed=3)
        self.max_tokens = max_tokens
        prompt = random_prompt(100, seed=7)
        self.first = self._sequence(prompt, self.tables.take(100 + max_tokens), start=0)
        while self.first.start < BORDER:
            step(self.runner, [self.first])
        assert self.first.start == BORDER
        tails = self.first.carried.kept_at(BORDER)
        kept = None if self.tables.slots is None else self.tables.slots.pop()
        if kept is not None:
            self.runner.copy_slots([(self.first.carried.slot, kept)])
        generate(self.runner, [self.first], max_tokens)
        own = self.tables.take(100 + max_tokens - BORDER)
        pages = [*self.first.pages[: BORDER // 16], *own]
        self.resumed = self._sequence(prompt, pages, start=BORDER, tails=tails)
        if kept is not None:
            self.runner.copy_slots([(kept, self.resumed.carried.slot)])

    def _sequence(self, prompt, pages, start, tails=None):
        return Sequence(prompt, pages, 32, start=start, carried=Carried(self.tables, keeps=True, tails=tails))

    @property
    def slot(self):
        return self.resumed.carried.slot

    def output(self):
        generate(self.runner, [self.resumed], self.max_tokens)
        return tuple(self.resumed.output_ids)


@pytest.mark.parametrize("family", CARRYING)
def test_a_copied_state_and_a_tail_are_all_that_is_needed_to_go_on(family):
    run = Resumed(family)
    run.output()
    assert_as_transformers(family, [run.first, run.resumed])
    store_no_rows_that_attention_holds(family)


def store_no_rows_that_attention_holds(family):
    """They are computed, and not stored."""
    run = Resumed(family)
    shared = run.first.pages[: 96 // 16]
    run.resumed.pages[: len(shared)] = shared
    run.resumed.store_from = 96
    kv = run.runner._pools.layers.pools[0]
    pages = kv.numbers.view(kv.num_pages, -1)[shared]
    before = pages.clone()
    # What others hold is read; so it would be seen if it were not.
    run.output()
    assert_as_transformers(family, [run.resumed])
    assert torch.equal(kv.numbers.view(kv.num_pages, -1)[shared], before)


def stale(run):
    """Four tokens ago."""
    run.runner.run([chunk_of(run, 0, BORDER - 4, 0)])
    # The slot holds that state now, and the pages what they did.


def a_block_off(run):
    run.runner.run([chunk_of(run, 0, BORDER // 2, 0)])


def of_another_branch(run):
    run.runner.run([chunk_of(run, 0, BORDER, 500)])


def never_zeroed(run):
    other = run.runner._pools.slots.of_state
    for state in other.values():
        state[run.slot] += 0.5


def chunk_of(run, start, end, seed):
    """Make a chunk of another sequence in the slot of the resumed one, on pages of its own."""
    prompt = run.resumed.ids if not seed else random_prompt(end, seed)
    other = Sequence(
        prompt[:end], run.tables.take(end), end, carried=Carried(run.tables, keeps=True, slot=run.slot)
    )
    return other.next_chunk()


@pytest.mark.exact
def test_what_is_not_the_positions_is_noticed(subtests):
    for family, mutate in itertools.product(RECURRENT, [stale, a_block_off, of_another_branch, never_zeroed]):
        with subtests.test("a state that is not the positions is noticed", family=family, mutate=mutate):
            run = Resumed(family)
            mutate(run)
            assert run.output() != tuple(run.first.output_ids)
    for family in WITH_WINDOWS:
        with subtests.test("a tail without its first page is noticed", family=family):
            run = Resumed(family)
            first = min(run.resumed.carried.pages[0])
            kv = run.runner._pools.layers.pools[1]
            kv.numbers.view(kv.num_pages, -1)[run.resumed.carried.pages[0][first]] = 0
            assert run.output() != tuple(run.first.output_ids)


def test_a_window_that_is_kept_whole_still_ends_where_it_should():
    """Mistral: nothing is carried, and what lies before the window changes nothing."""
    runner = runner_of(WINDOWED_MISTRAL)
    assert runner.carried_memory == ()
    prompt = random_prompt(100, seed=1)
    sequence = Sequence(prompt, PageTables(runner).take(130), 100)
    generate(runner, [sequence], 1)
    kv_of(runner)[sequence.pages[: (100 - 24) // 16]] = torch.nan
    generate(runner, [sequence], 16)
    assert_as_transformers(WINDOWED_MISTRAL, [sequence])


def test_a_slot_is_a_sequences_own(subtests):
    with subtests.test("two sequences never share a slot"):
        run = Resumed("qwen3_5")
        run.first.carried.slot = run.slot
        with pytest.raises(ProtocolError, match="slots of their own"):
            run.runner.run([run.first.next_chunk(), run.resumed.next_chunk()])
    for slot in [None, -1, 1000]:
        with subtests.test("a slot that is none is refused", slot=slot):
            run = Resumed("falcon_h1")
            run.resumed.carried.slot = slot
            with pytest.raises(ProtocolError, match="slots of their own"):
                run.runner.run([run.resumed.next_chunk()])
    with subtests.test("states are those of recurrent models alone"):
        assert runner_of("qwen3_5").layout.groups[-1].kind is GroupKind.RECURRENT
        with pytest.raises(ProtocolError, match="no recurrent state"):
            runner_of("gpt_oss").copy_slots([(0, 1)])


def test_each_pool_is_read_as_the_layout_says(subtests):
    for family in ["qwen3_5", "gpt_oss", "deepseek_v3"]:
        with subtests.test(family=family):
            runner = runner_of(family)
            memory = (runner.memory, *runner.carried_memory)
            assert len(memory) == len(runner.layout.groups) == len(runner.layout.unit_bytes)
            for group, (pool, unit_bytes) in enumerate(zip(memory, runner.layout.unit_bytes, strict=True)):
                units = list(runner.read_pages([0, pool.num_pages - 1], group))
                assert [len(unit) for unit in units] == [unit_bytes] * 2
            with pytest.raises(ProtocolError, match="no group"):
                runner.read_pages([0], len(memory))
