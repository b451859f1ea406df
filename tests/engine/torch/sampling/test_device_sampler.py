"""The host's part of choosing tokens on a GPU; numpy stands for the kernels."""

import itertools
import logging
import sys
from types import ModuleType, SimpleNamespace

import torch

from engine.torch.sampling.plain_draws import chunk_of, launch_plainly
from engine.torch.sampling.test_sampling_rows import CASES, VOCAB_SIZE, random_logits
from engine.torch.sampling.test_step_masks import masks_of
from services.engine.paged.model_runner import NO_TOKEN, Sampled
from services.engine.torch.sampling import device_sampler
from services.engine.torch.sampling.device_sampler import DeviceSampler, also_for, open_sampler
from services.engine.torch.sampling.step_masks import RowMasks
from services.engine.torch.sampling.torch_sampler import sample

CPU = torch.device("cpu")
KERNELS = "services.engine.torch.sampling.draw_kernels"


def install(monkeypatch, launch=launch_plainly):
    module = ModuleType(KERNELS)
    module.FIELDS, module.MAX_VOCAB_SIZE, module.launch = 8, 1 << 20, launch
    module.Scratch = SimpleNamespace(of=lambda num_rows, *_: SimpleNamespace(num_rows=num_rows))
    monkeypatch.setitem(sys.modules, KERNELS, module)


def all_chunks():
    return [
        chunk_of([1, 2, 3, seed], 2, seed=seed, **params)
        for seed, params in enumerate(
            [*CASES.values(), {"bad_token_ids": ((3,),)}, {"logit_bias": ((9, 50.0),), "temperature": 0}]
        )
    ]


def test_it_chooses_as_sample_does(subtests, monkeypatch):
    install(monkeypatch)
    chunks = all_chunks()
    for kind, block in itertools.product(["peaked", "ties", "equal"], [1 << 24, 3 * VOCAB_SIZE]):
        with subtests.test("rows of all kinds", kind=kind, block=block):
            monkeypatch.setattr(device_sampler, "_BLOCK", block)
            logits = random_logits(len(chunks), kind, 1)
            before = logits.clone()
            expected = sample(logits, chunks)
            sampler = DeviceSampler(CPU, VOCAB_SIZE)
            for most_probable in (None, logits.argmax(1)):
                assert sampler(logits, chunks, most_probable=most_probable) == expected
                assert sample(logits, chunks, most_probable=most_probable) == expected
            assert torch.equal(logits, before)
            assert [sampler(logits[n : n + 1], chunks[n : n + 1]) for n in range(len(chunks))] == [
                [each] for each in expected
            ]
    sampler = DeviceSampler(CPU, VOCAB_SIZE)
    with subtests.test("plain rows take what is told"):
        plain = [chunk_of([1], temperature=0)] * 3
        told = torch.tensor([5, 6, 7])
        assert [each.token_id for each in sampler(logits[:3], plain, most_probable=told)] == [5, 6, 7]
        assert sampler(logits[:3], plain) == sample(logits[:3], plain)
    with subtests.test("rows need not lie in one piece"):
        apart = random_logits(len(chunks), "peaked", 1).T.contiguous().T
        assert sampler(apart, chunks) == sample(apart, chunks)
    with subtests.test("another vocabulary is none of its"):
        assert sampler(logits[:, :500], chunks) == sample(logits[:, :500], chunks)
    with subtests.test("a row that overflowed takes the first of the highest"):
        for value, row in itertools.product((torch.inf, torch.nan), range(len(chunks))):
            logits = random_logits(len(chunks), "peaked", 2)
            logits[row, 17] = value
            assert sampler(logits, chunks) == sample(logits, chunks)


def test_the_kernels_scratch_is_of_a_block_from_the_start(monkeypatch):
    launched = []

    def launch(logits, table, chosen, scratch, *, cuts):
        launched.append((len(table), scratch))
        launch_plainly(logits, table, chosen, scratch, cuts=cuts)

    install(monkeypatch, launch)
    for vocab_size, block, num_rows, rows in [(300, 900, 3, [3, 3, 1]), (300, 200, 1, [1] * 7)]:
        monkeypatch.setattr(device_sampler, "_BLOCK", block)
        sampler = DeviceSampler(CPU, vocab_size)
        assert sampler._scratch.num_rows == num_rows
        launched.clear()
        sampler(torch.randn(7, vocab_size), [chunk_of([1])] * 7)
        assert launched == [(each, sampler._scratch) for each in rows]


def test_masks_and_bans_leave_what_they_allow(monkeypatch, subtests):
    install(monkeypatch)
    chunks = [*all_chunks()[:8], chunk_of([1], bad_token_ids=tuple((i,) for i in range(300)))]
    logits = 3 * torch.randn(9, 300, generator=torch.Generator().manual_seed(4))
    sampler = DeviceSampler(CPU, 300)
    for allowed in ({5, 70, 299}, set()):
        with subtests.test("they are those of sample()", allowed=allowed):
            masks = RowMasks(masks_of([allowed] * 9), {0: 3, 2: 1, 5: 0, 6: 2})
            found = sampler(logits, chunks, masks, logits.argmax(1))
            assert found == sample(logits, chunks, masks)
            assert found[8] == Sampled(NO_TOKEN)
    with subtests.test("nothing is as high as anything"):
        assert sampler(torch.full_like(logits, -torch.inf), chunks) == sample(
            torch.full_like(logits, -torch.inf), chunks
        )


def test_kernels_that_do_not_work_are_left_alone(monkeypatch, subtests, caplog):
    made = DeviceSampler
    monkeypatch.setattr(device_sampler, "DeviceSampler", lambda device, vocab_size: made(CPU, vocab_size))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    cuda = torch.device("cuda", 0)

    def shifted(logits, table, chosen, scratch, *, cuts):
        launch_plainly(logits, table, chosen, scratch, cuts=cuts)
        chosen += 1

    def failing(*_, **__):
        raise RuntimeError("no C compiler")

    with subtests.test("on a CPU there are none"):
        assert open_sampler(CPU, 300, torch.float32) is None
    with subtests.test("those that agree are taken"):
        install(monkeypatch)
        sampler = open_sampler(cuda, 300, torch.bfloat16)
        assert isinstance(sampler, made) and sampler.tried == {torch.bfloat16, torch.float64}
    with subtests.test("logits of another type, such as a draft's, are tried as well"):
        assert also_for(None, torch.float32) is None
        assert also_for(sampler, torch.float32) is sampler
        assert sampler.tried == {torch.bfloat16, torch.float64, torch.float32}
        monkeypatch.setattr(sampler, "_launch", failing)
        assert also_for(sampler, torch.float16) is None
        assert also_for(sampler, torch.float32) is sampler
    for launch, reason in [(failing, "no C compiler"), (shifted, "SamplerWrong")]:
        with subtests.test("others are not, and that is said", reason=reason):
            caplog.clear()
            caplog.set_level(logging.WARNING)
            install(monkeypatch, launch)
            assert open_sampler(cuda, 300, torch.bfloat16) is None
            assert "sampling_kernels_unusable error=" in caplog.text
            assert reason in caplog.text
    with subtests.test("nor those of a vocabulary too large"):
        install(monkeypatch)
        assert open_sampler(cuda, (1 << 20) + 1, torch.float32) is None
