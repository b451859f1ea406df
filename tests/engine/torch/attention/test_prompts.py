"""Prompts that attend together: the tables, what is done with flash attention, and who is left out."""

import logging
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.torch.attention.kernels.plain_parts import attend_parts_plainly
from engine.torch.attention.paging import empty, reach_view_of
from engine.torch.attention.plain_prompts import attend_rows_plainly, gather_plainly, varlen_plainly
from engine.torch.attention.reach_cases import CHUNKED, cases, chunk_of, expected, made_of
from engine.torch.attention.reach_cases import attended as attended_by
from engine.torch.sequences import Carried, PageTables, Sequence, generate
from exactness.checkpoints import tiny_checkpoint
from exactness.reference import count_near_ties, random_prompt, reference_generation
from services.engine.torch import pools as runner_pools
from services.engine.torch.attention import kernel_choice, prompts
from services.engine.torch.attention.attention_trial import KernelWrong, require_gathered, require_packed
from services.engine.torch.attention.kernel_choice import choose_packings
from services.engine.torch.attention.page_pieces import OnDevice
from services.engine.torch.attention.paged_kv import PageShape, Scores
from services.engine.torch.attention.prompts import Packing, is_for_flash
from services.engine.torch.attention.step_view import Reach
from services.engine.torch.runner import TorchRunner
from services.kv.tails import PoolSizes

TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 0.03}
PACKING = Packing(gather_plainly)
HEADS = frozenset({4})


@pytest.fixture(autouse=True)
def flash(monkeypatch):
    """Each call of flash attention, by its number of chunks."""
    calls = []

    def attend(query, key, value, cu_seq_q, *others, **named):
        calls.append(len(cu_seq_q) - 1)
        return varlen_plainly(query, key, value, cu_seq_q, *others, **named)

    monkeypatch.setattr(prompts, "varlen_attn", attend)
    return calls


def packable(case):
    """Flash attention has one head dimension, and so has a case of it."""
    return replace(case, shape=case.shape._replace(head_dim=8, v_head_dim=8), softcap=None)


def check(case, on_device=None, packing=PACKING):
    made = made_of(case)
    output, pool = expected(case, made)
    got = attended_by(case, made, on_device, packing)
    torch.testing.assert_close(got.double(), output, atol=TOLERANCE[case.dtype], rtol=TOLERANCE[case.dtype])
    assert torch.equal(made.pool.numbers.nan_to_num(7), pool.numbers.nan_to_num(7))


@settings(max_examples=2 * settings().max_examples)
@given(
    case=cases(),
    gather=st.sampled_from([gather_plainly, prompts.gather_plainly]),
    packed_bytes=st.sampled_from([1, 4000, 1 << 20]),
    in_parts=st.booleans(),
    half=st.booleans(),
)
def test_each_token_attends_to_what_it_sees(case, gather, packed_bytes, in_parts, half):
    dtype = torch.bfloat16 if half else torch.float32
    case = replace(packable(case), dtype=dtype)
    on_device = OnDevice(attend_parts_plainly, 2 * case.group, num_programs=16) if in_parts else None
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(prompts, "_PACKED_BYTES", packed_bytes)
        check(case, on_device, Packing(gather))


@given(case=cases(), packed_bytes=st.sampled_from([1, 4000, 1 << 20]), in_parts=st.booleans())
def test_soft_caps_and_two_widths_are_for_a_kernel_of_ours(case, packed_bytes, in_parts):
    on_device = OnDevice(attend_parts_plainly, 2 * case.group, num_programs=16) if in_parts else None
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(prompts, "_PACKED_BYTES", packed_bytes)
        patched.setattr(prompts, "varlen_attn", reads_nothing)
        check(case, on_device, Packing(gather_plainly, attend=attend_rows_plainly))


def reads_nothing(*_):
    raise AssertionError("nothing is to be gathered")


def view_of(chunks, reach=Reach(0), packing=PACKING, page_size=16):  # noqa: B008
    pool = empty(PageShape(2, 2, page_size, 8, 8), num_pages=20)
    return reach_view_of(pool, chunks, reach=reach, packing=packing)


def test_who_attends_together(subtests, flash):
    prompt, tail = chunk_of(0, 37, [3, 1, 2], Reach(0), 16), chunk_of(30, 20, [4, 5, 6, 7], Reach(0), 16)
    with subtests.test("all chunks do in one call"):
        (call,) = view_of([prompt, tail]).packed.calls
        assert call.row_starts.tolist() == [0, 37, 57]
        assert call.seen_starts.tolist() == [0, 37, 87]
        assert call.reads.tolist() == [
            *([3, 0, 16, 0], [1, 0, 16, 16], [2, 0, 5, 32]),
            *([4, 0, 16, 37], [5, 0, 16, 53], [6, 0, 16, 69], [7, 0, 2, 85]),
        ]
        assert (call.rows, call.longest, call.most_seen, call.num_seen) == (slice(0, 57), 37, 50, 87)
        assert not call.are_whole
    with subtests.test("so many as may be gathered at once"), pytest.MonkeyPatch.context() as patched:
        patched.setattr(prompts, "_PACKED_BYTES", 90 * 2 * 2 * 8 * 4)
        calls = view_of([prompt, tail, prompt, prompt]).packed.calls
        assert [call.rows for call in calls] == [slice(0, 57), slice(57, 131)]
        assert [call.are_whole for call in calls] == [False, True]
    with subtests.test("where windows are chunks, each window's tokens are a chunk"):
        late = chunk_of(30, 20, [4, 5, 6, 7], Reach(0), 16)
        (call,) = view_of([prompt, late], Reach(0, CHUNKED, 20)).packed.calls
        assert call.row_starts.tolist() == [0, 20, 37, 47, 57]
        assert call.seen_starts.tolist() == [0, 20, 37, 57, 67]
        assert call.reads.tolist() == [
            *([3, 0, 16, 0], [1, 0, 4, 16]),
            *([1, 4, 16, 20], [2, 0, 5, 32]),
            *([5, 4, 16, 37], [6, 0, 8, 49]),
            *([6, 8, 16, 57], [7, 0, 2, 65]),
        ]
        assert view_of([prompt], Reach(0, CHUNKED, 20)).packed.calls[0].are_whole
    with subtests.test("so does all where packing was not chosen"):
        assert view_of([prompt], packing=None).packed is None
    with subtests.test("soft caps do with flash attention, and sinks where they were found wrong"):
        packed = view_of([prompt], packing=replace(PACKING, has_sinks=False)).packed
        assert packed.serves(Scores(1.0))
        assert not packed.serves(Scores(1.0, softcap=3.0))
        assert not packed.serves(Scores(1.0, sinks=torch.zeros(4)))
        assert view_of([prompt]).packed.serves(Scores(1.0, sinks=torch.zeros(4)))
        by_rows = view_of([prompt], packing=replace(PACKING, attend=attend_rows_plainly)).packed
        assert by_rows.serves(Scores(1.0, softcap=3.0))


def test_of_whole_prompts_nothing_is_gathered(flash):
    pool = empty(PageShape(2, 2, 16, 8, 8), num_pages=2)
    require_whole = replace(PACKING, gather=reads_nothing)
    with pytest.raises(AssertionError, match="nothing is to be gathered"):
        require_packed(require_whole, pool, 4)
    assert flash == []  # Chunks that begin further on are tried first.
    view = view_of([chunk_of(0, 37, [3, 1, 2], Reach(0), 16), chunk_of(0, 5, [4], Reach(0), 16)])
    numbers = torch.randn(42, 2, 8)
    attend = (torch.randn(42, 4, 8), (numbers, numbers), view.kv, 0, Scores(1.0))
    prompts.attend_packed(replace(view.packed, packing=require_whole), *attend)
    assert flash == [2]


def test_numbers_that_flash_attention_cannot_read_are_copied():
    numbers = torch.randn(7, 2, 8)
    assert prompts._aligned(numbers) is numbers
    assert prompts._aligned(numbers.transpose(0, 1)).data_ptr() == numbers.data_ptr()
    for odd in [
        torch.randn(7, 2, 9)[..., :8],
        torch.randn(16, 7)[:8].T[:, None],
        torch.randn(17)[1:].view(1, 2, 8),
    ]:
        aligned = prompts._aligned(odd)
        assert torch.equal(aligned, odd)
        assert aligned.storage_offset() == 0
        assert aligned.is_contiguous()


def on_a_gpu(monkeypatch, kernel, dtype=torch.bfloat16, head_dim=8, capability=(9, 0), v_head_dim=None):
    """A pool that says it is on a GPU; it is tried on the CPU."""
    v_head_dim = head_dim if v_head_dim is None else v_head_dim
    num_kv_heads = 2 if v_head_dim else 1
    pool = empty(PageShape(3, num_kv_heads, 16, head_dim, v_head_dim), num_pages=2, dtype=dtype)
    monkeypatch.setattr(kernel_choice, "require_gathered", lambda tried, kv: require_gathered(tried, pool))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(
        kernel_choice, "require_packed", lambda tried, kv, heads: require_packed(tried, pool, heads)
    )
    module = SimpleNamespace(gather_pages=kernel)
    monkeypatch.setitem(sys.modules, "services.engine.torch.attention.gather_kernel", module)
    numbers = SimpleNamespace(device=torch.device("cuda", 0), dtype=dtype)
    is_latent = pool.is_latent
    return SimpleNamespace(numbers=numbers, shape=pool.shape, compute_dtype=dtype, is_latent=is_latent)


def of_another_layer(reads, num_tokens, kv, layer):
    return gather_plainly(reads, num_tokens, kv, layer - 1)


def of_whole_pages(reads, num_tokens, kv, layer):
    moved = reads.clone()
    moved[:, 1] = 0
    return gather_plainly(moved, num_tokens, kv, layer)


def does_not_compile(*_):
    raise RuntimeError("no C compiler")


def flash_of(change, monkeypatch):
    monkeypatch.setattr(prompts, "varlen_attn", lambda *args, **named: varlen_plainly(*args, **change(named)))


@pytest.mark.exact
def test_what_is_chosen_on_a_gpu(subtests, caplog):
    with subtests.test("what is right"), pytest.MonkeyPatch.context() as patched:
        cuda = on_a_gpu(patched, gather_plainly)
        assert choose_packings([cuda], [HEADS], [False]) == (Packing(gather_plainly),)
        assert choose_packings([cuda], [frozenset({2, 8})], [False]) == (Packing(gather_plainly),)
        assert not caplog.records
    for kernel in [of_another_layer, of_whole_pages, does_not_compile]:
        with (
            subtests.test("torch gathers where a kernel is wrong", kernel=kernel),
            pytest.MonkeyPatch.context() as patched,
        ):
            caplog.clear()
            assert choose_packings([on_a_gpu(patched, kernel)], [HEADS], [False]) == (
                Packing(prompts.gather_plainly),
            )
            (record,) = caplog.records
            assert record.levelno == logging.WARNING
            assert record.getMessage().startswith("gather_kernel_unusable error=")
    changes = [
        lambda named: named | {"window_size": (named["window_size"][0], 1)},  # one token too many
        lambda named: named | {"window_size": (-1, 0)},
        lambda named: named | {"scale": 1.0},
    ]
    for change in changes:
        with subtests.test("no torch that is wrong"), pytest.MonkeyPatch.context() as patched:
            cuda = on_a_gpu(patched, gather_plainly)
            flash_of(change, patched)
            caplog.clear()
            assert choose_packings([cuda], [HEADS], [False]) == (None,)
            (record,) = caplog.records
            assert record.getMessage().startswith("prompts_not_packed sinks=False error=KernelWrong")
    with subtests.test("without sinks where those are wrong"), pytest.MonkeyPatch.context() as patched:
        caplog.clear()
        cuda = on_a_gpu(patched, gather_plainly)

        def no_log_sums(*args, return_aux=None, **named):
            output = varlen_plainly(*args, **named)
            return output if return_aux is None else (output, torch.zeros(output.shape[1], len(output)))

        patched.setattr(prompts, "varlen_attn", no_log_sums)
        assert choose_packings([cuda], [HEADS], [False]) == (Packing(gather_plainly, has_sinks=False),)
        (record,) = caplog.records
        assert record.getMessage().startswith("prompts_not_packed sinks=True error=KernelWrong")


@pytest.mark.exact
def test_what_is_chosen_for_soft_caps(subtests, monkeypatch, caplog):
    def uncapped(*tables_and_scores):
        *tables, scores = tables_and_scores
        return attend_rows_plainly(*tables, Scores(scores.scaling, None, scores.sinks))

    cuda = on_a_gpu(monkeypatch, gather_plainly)
    narrow = on_a_gpu(monkeypatch, gather_plainly, v_head_dim=4)
    for kernel, is_right in [(attend_rows_plainly, True), (uncapped, False), (does_not_compile, False)]:
        module = SimpleNamespace(attend_rows=kernel)
        monkeypatch.setitem(sys.modules, "services.engine.torch.attention.prompt_kernel", module)
        chosen = Packing(gather_plainly, attend=kernel) if is_right else None
        for pool, is_capped in [(cuda, True), (narrow, False), (narrow, True)]:
            with subtests.test(kernel=kernel, is_capped=is_capped):
                caplog.clear()
                assert choose_packings([pool], [HEADS], [is_capped]) == (chosen,)
                assert is_right or caplog.text.count("prompts_not_packed sinks=False error=") == 1
        assert choose_packings([cuda], [HEADS], [False]) == (Packing(gather_plainly),)


def test_a_latent_is_only_gathered(monkeypatch, flash):
    """Keys and values, which are made of it, are tried in each graph."""
    latent = on_a_gpu(monkeypatch, gather_plainly, v_head_dim=0)
    assert choose_packings([latent], [HEADS], [False]) == (Packing(gather_plainly),)
    assert not flash


def test_what_flash_attention_does_not_take_is_not_tried(monkeypatch):
    for settings_of in [
        {"dtype": torch.float32},
        {"head_dim": 12},
        {"head_dim": 264},
        {"capability": (7, 5)},
    ]:
        assert choose_packings(
            [on_a_gpu(monkeypatch, does_not_compile, **settings_of)], [HEADS], [False]
        ) == (None,)
    assert choose_packings([empty(PageShape(3, 2, 16, 8, 8), dtype=torch.bfloat16)], [HEADS], [False]) == (
        None,
    )
    for dims, packable_ in [((8, 8), True), ((256, 256), True), ((192, 128), False), ((576, 0), False)]:
        assert is_for_flash(empty(PageShape(1, 1, 16, *dims), dtype=torch.float16)) == packable_


@pytest.mark.exact
@pytest.mark.parametrize("family", ["gpt_oss", "gemma3", "gemma4", "llama4", "qwen3_moe", "qwen3_5"])
@pytest.mark.parametrize("in_parts", [False, True])
def test_greedy_output_is_that_of_transformers(family, in_parts, flash, monkeypatch):
    """Prompts join in chunks while others decode."""
    monkeypatch.setattr(
        runner_pools,
        "choose_in_place",
        lambda pools, num_heads: [
            OnDevice(attend_parts_plainly, max(heads), num_programs=16)
            if in_parts and len(heads) == 1
            else None
            for heads in num_heads
        ],
    )
    monkeypatch.setattr(runner_pools, "choose_packings", lambda pools, *_: [PACKING] * len(pools))
    directory = tiny_checkpoint(family)
    sizes = PoolSizes(max_running_requests=6, chunk_size=160)
    runner = TorchRunner(directory, num_pages=128, page_size=16, sizes=sizes, self_check=False)
    tables = PageTables(runner)
    sequences = [
        Sequence(random_prompt(n, seed=n), tables.take(n + 8), size, carried=Carried(tables))
        for n, size in ((5, 1), (17, 5), (131, 21), (90, 65))
    ]
    generate(runner, sequences, 8)
    assert max(flash) > 1
    near_ties = 0
    for sequence in sequences:
        prompt, output = tuple(sequence.ids[: sequence.prompt_len]), sequence.output_ids
        near_ties += count_near_ties(reference_generation(directory, prompt, len(output)), output)
    assert near_ties <= 1


def test_the_check_can_fail():
    with pytest.raises(KernelWrong, match="prompts together differ"):
        require_packed(Packing(of_another_layer), empty(PageShape(3, 2, 16, 8, 8)), 4)
