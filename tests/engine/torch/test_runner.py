import random
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.torch.sequences import Carried, PageTables, Sequence, generate, kv_of, step
from exactness.checkpoints import tiny_checkpoint
from exactness.reference import check_half_precision, count_near_ties, random_prompt, reference_generation
from services.cli.model.make_model import ARCHITECTURES
from services.engine.paged.model_runner import Chunk, ModelRunner
from services.engine.torch import checkpoint
from services.engine.torch import runner as torch_runner
from services.engine.torch.attention.paged_kv import PagedKv, PageShape
from services.engine.torch.attention.step_view import view_step
from services.engine.torch.model import packed_model
from services.engine.torch.model.self_check import ROUNDING
from services.engine.torch.runner import TorchRunner
from services.kv.tails import PoolSizes
from services.values.errors import ConfigError, ProtocolError
from services.values.request import SamplingParams

GREEDY = SamplingParams(temperature=0)
NUM_PAGE_TOKENS = 2048


def make_runner(architecture="llama", page_size=16, **settings):
    num_pages = NUM_PAGE_TOKENS // page_size
    settings = {"self_check": False} | settings
    return TorchRunner(tiny_checkpoint(architecture), num_pages=num_pages, page_size=page_size, **settings)


def test_greedy_output_is_that_of_transformers_unless_a_page_is_lost(subtests):
    for architecture, page_size in [("llama", 1), ("qwen2", 16), ("qwen3", 1), ("mistral", 16)]:
        with subtests.test(
            "greedy output is that of transformers", architecture=architecture, page_size=page_size
        ):
            runner = make_runner(architecture, page_size)
            tables = PageTables(runner)
            prompts = [random_prompt(length, seed=length) for length in (1, 33, 100, 150)]
            # Smaller than a page, no divisor of it, the whole prompt, and more.
            sequences = [
                Sequence(p, tables.take(len(p) + 24), size)
                for p, size in zip(prompts, (7, 5, 64, 500), strict=True)
            ]
            generate(runner, sequences, 24)
            num_near_ties = sum(
                count_near_ties(
                    reference_generation(tiny_checkpoint(architecture), prompt, 24), sequence.output_ids
                )
                for prompt, sequence in zip(prompts, sequences, strict=True)
            )
            assert num_near_ties <= 1
    with subtests.test("a page that is lost or misplaced changes the output"):
        # The comparison above can fail: each of these is a fault that an engine might have.
        prompt = random_prompt(150, seed=150)
        expected = reference_generation(tiny_checkpoint(), prompt, 24).token_ids

        def output_after(damage):
            runner = make_runner()
            sequence = Sequence(prompt, PageTables(runner).take(180), 150)
            generate(runner, [sequence], 1)
            damage(kv_of(runner), sequence.pages)
            generate(runner, [sequence], 24)
            return tuple(sequence.output_ids)

        def swap(kv, pages):
            kv[[pages[2], pages[3]]] = kv[[pages[3], pages[2]]].clone()

        assert output_after(lambda kv, pages: None) == expected
        for page in range(10):
            assert output_after(lambda kv, pages, page=page: kv[pages[page]].zero_()) != expected
        assert output_after(lambda kv, pages: kv[pages[4], 0].zero_()) != expected
        # Keys carry their positions, so pages that are swapped whole are no loss, and only then.
        assert output_after(swap) == expected


def recorded_views(monkeypatch):
    """Those of the steps."""
    recorded = []

    def recording(*args):
        view = view_step(*args)
        recorded.extend(view.by_reach.values())
        return view

    monkeypatch.setattr(packed_model, "view_step", recording)
    return recorded


def test_shared_prefixes_are_read_together(subtests):
    for page_size in [1, 16, 64]:
        with (
            subtests.test("sequences read the pages of their prefix together", page_size=page_size),
            pytest.MonkeyPatch.context() as monkeypatch,
        ):
            views = recorded_views(monkeypatch)
            share_a_prefix(page_size)
            of_three = [
                num_pages
                for view in views
                if view.decode
                for num_pages in pages_read_by(3, view.decode.reads)
            ]
            assert sum(of_three) >= 10 * 128 // page_size  # all of the prefix, in most steps
    for architecture, page_size in [("llama", 16), ("qwen3", 64)]:
        with (
            subtests.test(
                "prefixes of prefixes are read together beside prompts",
                architecture=architecture,
                page_size=page_size,
            ),
            pytest.MonkeyPatch.context() as monkeypatch,
        ):
            views = recorded_views(monkeypatch)
            read_prefixes_of_prefixes(architecture, page_size, views)


def pages_read_by(num_readers, pieces):
    return np.diff(pieces.page_starts)[np.diff(pieces.reader_starts) == num_readers]


def share_a_prefix(page_size):
    runner = make_runner(page_size=page_size)
    tables = PageTables(runner)
    prefix = random_prompt(128, seed=1)
    prompts = [prefix + random_prompt(n, seed=n) for n in (40, 2, 17)]
    first = Sequence(prompts[0], tables.take(200), 64)
    generate(runner, [first], 1)
    shared = first.pages[: 128 // page_size]
    others = [Sequence(p, shared + tables.take(72), 16, start=128) for p in prompts[1:]]
    generate(runner, [first, *others], 16)
    assert_as_transformers(prompts, [first, *others])


def assert_as_transformers(prompts, sequences, architecture="llama"):
    for prompt, sequence in zip(prompts, sequences, strict=True):
        expected = reference_generation(tiny_checkpoint(architecture), prompt, len(sequence.output_ids))
        assert count_near_ties(expected, sequence.output_ids) == 0


def read_prefixes_of_prefixes(architecture, page_size, views):
    runner = make_runner(architecture, page_size)
    assert kv_of(runner).shape[1] > 1  # layers
    outer, inner = random_prompt(128, seed=1), random_prompt(128, seed=2)
    free = random.Random(page_size).sample(range(runner.memory.num_pages), runner.memory.num_pages)
    num_pages = 128 // page_size
    pages_of_outer, pages_of_inner, free = (
        free[:num_pages],
        free[num_pages : 2 * num_pages],
        free[2 * num_pages :],
    )
    prompts, sequences = [], []

    def add(prefix, pages, length, start):
        prompts.append(prefix + random_prompt(length, seed=100 + len(prompts)))
        count = -(-(length + 24) // page_size)
        own, free[:] = free[:count], free[count:]
        sequences.append(Sequence(prompts[-1], pages + own, 16, start=start))

    add(outer + inner, pages_of_outer + pages_of_inner, 5, 0)
    while not sequences[0].output_ids:
        step(runner, sequences)
    for length in (3, 20, 40):
        add(outer + inner, pages_of_outer + pages_of_inner, length, 256)
    for length in (1, 60, 33):
        add(outer, pages_of_outer, length, 128)
    add((), [], 70, 0)
    generate(runner, sequences, 12)
    assert_as_transformers(prompts, sequences, architecture)
    of_readers = [np.diff(view.decode.reads.reader_starts) for view in views if view.decode]
    assert any({4, 7} <= set(counts.tolist()) for counts in of_readers)  # the inner prefix, the outer one
    with_prompts = [view.decode.reads for view in views if view.decode and view.spans]
    assert any((np.diff(pieces.reader_starts) > 1).any() for pieces in with_prompts)


def test_two_ranks_of_a_process_load_their_models_one_after_the_other(monkeypatch):
    """Else torch's default dtype could be the wrong one for good."""
    made_by, both, alone = checkpoint.AutoModelForCausalLM, threading.Barrier(2), []

    def make(*args, **kwargs):
        try:
            both.wait(timeout=0.2)
        except threading.BrokenBarrierError:
            alone.append(True)
        return made_by.from_pretrained(*args, **kwargs)

    monkeypatch.setattr(checkpoint, "AutoModelForCausalLM", SimpleNamespace(from_pretrained=make))
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda dtype: make_runner(dtype=dtype), ["bfloat16", "float16"]))
    assert alone == [True, True]
    assert torch.get_default_dtype() == torch.float32


def half_precise_output(dtype, prompt, architecture="llama", damage=lambda kv, pages: None):
    runner = make_runner(architecture, dtype=dtype)
    sequence = Sequence(prompt, PageTables(runner).take(len(prompt) + 40), 64)
    generate(runner, [sequence], 1)
    damage(kv_of(runner), sequence.pages)
    generate(runner, [sequence], 33)
    return sequence.output_ids


@pytest.mark.exact  # the kernel is compiled for it, for 12 s
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_half_precision_is_as_near_to_float32_as_that_of_transformers(architecture, dtype):
    directory, prompt = tiny_checkpoint(architecture), random_prompt(150, seed=5)
    output = half_precise_output(dtype, prompt, architecture)
    check_half_precision(directory, prompt, output, getattr(torch, dtype))
    if architecture != "llama":
        return
    # A page that is lost is no rounding.
    output = half_precise_output(dtype, prompt, architecture, damage=lambda kv, pages: kv[pages[3]].zero_())
    with pytest.raises(AssertionError, match="below the best in float32"):
        check_half_precision(directory, prompt, output, getattr(torch, dtype))


def test_a_step_depends_on_nothing_but_its_chunks(subtests):
    with subtests.test("only the chunks that ask are sampled"):
        runner = make_runner()
        chunks = [Sequence(random_prompt(9, seed=n), [n], 9 - n).next_chunk() for n in range(3)]
        assert [len(choices) for choices in runner.run(chunks)] == [1, 0, 0]
        assert runner.run(chunks[1:]) == [(), ()]
        assert runner.run([]) == []
    with subtests.test("a step writes its own slots and no others"):
        runner = make_runner()
        kv_of(runner).fill_(7)
        runner.run([Chunk([5, 6, 7], 15, [9, 2], False, GREEDY)])
        touched = (kv_of(runner) != 7).any(dim=(1, 2, 3, 5)).nonzero().tolist()
        assert touched == [[2, 0], [2, 1], [9, 15]]
    with subtests.test("what another sequence left behind changes nothing"):
        # Not even a KV that overflowed: weight 0 times infinity is not 0.
        prompt = random_prompt(75, seed=2)
        outputs = []
        for left_behind in (0, torch.inf):
            runner = make_runner()
            kv_of(runner).fill_(left_behind)
            # Lengths that differ, so that the copied tails are cut at the longest.
            sequences = [Sequence(prompt[:n], PageTables(runner, n).take(100), 32) for n in (75, 66)]
            sequences[1].pages = [page for page in range(128) if page not in sequences[0].pages][:7]
            generate(runner, sequences, 20)
            outputs.append([sequence.output_ids for sequence in sequences])
        assert outputs[0] == outputs[1]
    with subtests.test("what is sampled does not depend on the batch"):
        prompt = random_prompt(60, seed=3)
        params = SamplingParams(temperature=0.7, top_p=0.9, seed=11)
        alone = make_runner()
        expected = Sequence(prompt, PageTables(alone).take(100), 60, sampling=params)
        generate(alone, [expected], 20)
        runner = make_runner()
        tables = PageTables(runner, seed=1)
        others = [Sequence(random_prompt(n, seed=n), tables.take(n + 20), 16) for n in (5, 40)]
        sequence = Sequence(prompt, tables.take(100), 13, sampling=params)
        generate(runner, [*others, sequence], 20)
        assert sequence.output_ids == expected.output_ids
        assert len(set(sequence.output_ids)) > 5


def test_a_runner_is_what_its_settings_say(subtests):
    with subtests.test("a runner says what it is"):
        runner: ModelRunner = make_runner(page_size=32)
        assert (runner.vocab_size, runner.max_context_tokens) == (512, 4096)
        assert (runner.memory.num_pages, runner.layout.page_size) == (64, 32)
    for dtype in ["bfloat16", "float16"]:
        with subtests.test("the layout says so where precision is half", dtype=dtype):
            runner = make_runner(dtype=dtype)
            assert runner.layout.groups[0].dtype == dtype
            assert runner.layout.page_bytes == make_runner().layout.page_bytes // 2
    with subtests.test("the number of threads is set"):
        make_runner(num_threads=2)
        assert torch.get_num_threads() == 2
        torch.set_num_threads(1)
    with subtests.test("close frees the pool"):
        runner = make_runner()
        runner.close()
        assert runner._pools.layers.pools[0].numbers.untyped_storage().nbytes() == 0


def test_what_cannot_work_is_refused_with_the_reason(subtests):
    for token_ids, start in [([], 3), ([1, 2], 15)]:
        with (
            subtests.test("a chunk without tokens or room is refused", token_ids=token_ids),
            pytest.raises(ProtocolError, match="chunk"),
        ):
            make_runner().run([Chunk(token_ids, start, [0], False, GREEDY)])
    for settings, reason in [
        ({"device": "tpu"}, "device"),
        ({"device": "meta"}, "device"),
        ({"device": "cuda:99"}, "CUDA"),
        ({"num_pages": 0}, "pages"),
        ({"num_threads": 0}, "num_threads"),
        ({"dtype": "int8"}, "int8"),
    ]:
        with (
            subtests.test("settings that cannot work are refused with the reason", settings=settings),
            pytest.raises(ConfigError, match=reason),
        ):
            TorchRunner(tiny_checkpoint(), **{"num_pages": 4, "page_size": 16} | settings)


def recorded_waits(monkeypatch):
    """Record when the runner waits for its device, and for what."""
    told = []
    monkeypatch.setattr(torch_runner, "finish_step", lambda device: told.append("over"))
    monkeypatch.setattr(torch_runner, "abandon_step", lambda device, error: told.append(error))
    return told


def a_chunk():
    return Chunk([5, 6, 7], 0, [0], True, GREEDY, [5, 6, 7])


def test_what_the_device_may_still_write_is_waited_for(subtests):
    with (
        subtests.test("a step is waited for once it is computed"),
        pytest.MonkeyPatch.context() as monkeypatch,
    ):
        told = recorded_waits(monkeypatch)
        sample = torch_runner.sample
        monkeypatch.setattr(torch_runner, "sample", lambda *args: told.append("computed") or sample(*args))
        make_runner().run([a_chunk()])
        assert told == ["computed", "over"]
    with subtests.test("a copied state is waited for"), pytest.MonkeyPatch.context() as monkeypatch:
        # Its slot may be lent to a transfer next.
        told = recorded_waits(monkeypatch)
        runner = TorchRunner(tiny_checkpoint("qwen3_5"), num_pages=4, page_size=16, self_check=False)
        monkeypatch.setattr(runner._pools.slots, "copy", told.append)
        runner.copy_slots([(0, 1)])
        assert told == [[(0, 1)], "over"]
    for stage in ["sample", "finish_step"]:
        with (
            subtests.test("what a failed step may still write is waited for", stage=stage),
            pytest.MonkeyPatch.context() as monkeypatch,
        ):
            told = recorded_waits(monkeypatch)

            def fail(*_):
                raise RuntimeError("no more")

            monkeypatch.setattr(torch_runner, stage, fail)
            with pytest.raises(RuntimeError, match="no more") as failure:
                make_runner().run([a_chunk()])
            assert told == [failure.value]


@torch.inference_mode()
def rounded_generation(directory, prompt, num_tokens):
    """What transformers generates where each K and V is rounded as float8 pages round them."""
    model = AutoModelForCausalLM.from_pretrained(directory, attn_implementation=ROUNDING)
    ids = list(prompt)
    for _ in range(num_tokens):
        logits = model(torch.tensor([ids]), use_cache=False, logits_to_keep=1).logits
        ids.append(int(logits[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.exact
def test_keys_and_values_of_8_bits_are_those_of_transformers_rounded(subtests):
    for architecture in ("llama", "gemma3"):
        with subtests.test("however the prompt is cut", architecture=architecture):
            sizes = PoolSizes(max_running_requests=6, chunk_size=160)
            runner = make_runner(architecture, kv_dtype="fp8_e4m3", sizes=sizes)
            assert {group.dtype for group in runner.layout.groups} == {"float8_e4m3fn"}
            assert 4 * runner.layout.page_bytes == make_runner(architecture, sizes=sizes).layout.page_bytes
            tables, prompt = PageTables(runner), random_prompt(70, seed=3)
            sequences = [
                Sequence(prompt, tables.take(90), size, carried=Carried(tables)) for size in (1, 7, 33, 500)
            ]
            generate(runner, sequences, 16)
            expected = rounded_generation(tiny_checkpoint(architecture), prompt, 16)
            assert [sequence.output_ids == expected for sequence in sequences] == [True] * 4


def test_keys_and_values_of_8_bits(subtests):
    with subtests.test("what is larger than its numbers is the largest one"):
        pages = PagedKv(torch.zeros(4, dtype=torch.float8_e4m3fn), PageShape(1, 1, 1, 2, 2), torch.float32)
        rounded = pages.rounded(torch.tensor([1e4, -1e4, 448.0, 17.0])).float()
        assert rounded.tolist() == [448.0, -448.0, 448.0, 16.0]
    with subtests.test("latents are refused"), pytest.raises(ConfigError, match="--kv-dtype"):
        make_runner("deepseek_v3", kv_dtype="fp8_e4m3")
