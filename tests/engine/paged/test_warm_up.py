"""The first steps are for nobody, and leave nothing behind."""

from dataclasses import replace

import pytest

from engine.pair import FAKE, Pair, core_of
from exactness.checkpoints import tiny_checkpoint
from services.engine.choose import decode_engine
from services.engine.fake import FakeRunner
from services.engine.paged.shell.warm_up import warm_up
from services.engine.torch.runner import TorchRunner
from services.kv.carried_cache import CarriedCache
from services.kv.prefix_cache import PrefixCache
from services.values.errors import ConfigError, Unavailable
from services.values.kv import CacheEvents, PageBooks
from services.values.rank import RankId


async def test_a_start_computes_for_nobody_or_fails(subtests):
    with (
        subtests.test("after the start every page is free and nothing was told"),
        pytest.MonkeyPatch.context() as monkeypatch,
    ):
        ran = []
        run = FakeRunner.run
        monkeypatch.setattr(FakeRunner, "run", lambda self, chunks: ran.extend(chunks) or run(self, chunks))
        async with Pair() as pair:
            for engine in (pair.decode, pair.prefill):
                assert await engine.books() == PageBooks(64, 64, 0, 0, 0, 0)
                assert core_of(engine).take_cache_events() == CacheEvents()
        # A chunk and a token for each; the two start at once.
        assert sorted((chunk.start, chunk.end) for chunk in ran) == [(0, 8), (0, 8), (8, 9), (8, 9)]

    for reason, error in [
        ("CUDA out of memory. Tried to allocate 2.00 GiB", Unavailable),
        ("CUDA error: uncorrectable ECC error encountered", Unavailable),
        ("CUDA error: no kernel image is available for execution on the device", ConfigError),
        ("mat1 and mat2 shapes cannot be multiplied", ConfigError),
    ]:
        with subtests.test(reason=reason, error=error), pytest.MonkeyPatch.context() as monkeypatch:

            def fail(self, chunks, reason=reason):
                raise RuntimeError(reason)

            monkeypatch.setattr(FakeRunner, "run", fail)
            engine = decode_engine(replace(FAKE, kv_pages=4), RankId("d", 0, 1))
            with pytest.raises(error, match=f"cannot compute 8 tokens in a step: {reason}"):
                await engine.start()


@pytest.mark.exact
async def test_the_torch_engine_computes_a_first_step_and_keeps_nothing_of_it(monkeypatch):
    ran = []
    run = TorchRunner.run
    monkeypatch.setattr(TorchRunner, "run", lambda self, chunks: ran.extend(chunks) or run(self, chunks))
    async with Pair(replace(FAKE, engine="torch", model=str(tiny_checkpoint()))) as pair:
        assert len(ran) == 4
        for engine in (pair.decode, pair.prefill):
            assert await engine.books() == PageBooks(64, 64, 0, 0, 0, 0)
            assert core_of(engine).take_cache_events() == CacheEvents()


def test_which_steps_are_tried(subtests):
    for num_pages, page_size in [(1, 1), (1, 2), (2, 1), (3, 4)]:
        with subtests.test(
            "a pool of hardly anything is not too small", num_pages=num_pages, page_size=page_size
        ):
            runner = FakeRunner(num_pages=num_pages, page_size=page_size)
            cache = PrefixCache(num_pages, page_size, page_size, "m")
            warm_up(runner, cache, CarriedCache(runner.layout, ()), chunk_size=512)
            assert cache.check().free == num_pages

    for chunk_size, prompt_len in [(512, 512), (1023, 1023), (4096, 1023)]:
        with (
            subtests.test(
                "the first step is as large as any prompt chunk can be",
                chunk_size=chunk_size,
                prompt_len=prompt_len,
            ),
            pytest.MonkeyPatch.context() as monkeypatch,
        ):
            runner = FakeRunner(num_pages=256, page_size=4)
            ran = []
            monkeypatch.setattr(runner, "run", ran.extend)
            warm_up(runner, PrefixCache(256, 4, 4, "m"), CarriedCache(runner.layout, ()), chunk_size)
            assert [(chunk.start, chunk.end) for chunk in ran] == [
                (0, prompt_len),
                (prompt_len, prompt_len + 1),
            ]

    for num_pages, context, chunk_size, expected in [
        (64, 4096, 8, [(0, 8), (8, 9), (247, 255)]),  # the pool's, of 256
        (64, 100, 8, [(0, 8), (8, 9), (91, 99)]),  # the model's
        (64, 4096, 200, [(0, 200), (200, 201), (55, 255)]),
        (64, 4096, 255, [(0, 255), (255, 256)]),  # no prompt has a second chunk
        (64, 4096, 512, [(0, 255), (255, 256)]),
        (1, 4096, 1, [(0, 1), (1, 2), (2, 3)]),
    ]:
        with subtests.test(
            "on a gpu the last chunk of the longest prompt is tried too",
            num_pages=num_pages,
            context=context,
            chunk_size=chunk_size,
            expected=expected,
        ):
            runner, ran = on_a_gpu(num_pages, 4, max_context_tokens=context)
            cache = PrefixCache(num_pages, 4, 4, "m")
            warm_up(runner, cache, CarriedCache(runner.layout, ()), chunk_size)
            assert [(chunk.start, chunk.end) for chunk in ran] == expected
            assert all(len(set(chunk.pages)) == -(-chunk.end // 4) for chunk in ran)
            assert cache.check() == PageBooks(num_pages, num_pages, 0, 0, 0, 0)
            assert cache.take_events() == CacheEvents()

    with subtests.test("a context that does not fit beside the pool fails the start with advice"):
        runner, _ = on_a_gpu(64, 4)
        run = runner.run

        def out_of_memory(chunks):
            if chunks[0].start > 8:
                raise RuntimeError("out of memory")
            return run(chunks)

        runner.run = out_of_memory
        cache = PrefixCache(64, 4, 4, "m")
        with pytest.raises(Unavailable, match=r"8 tokens after 247 others .* out of memory .* --kv-pages"):
            warm_up(runner, cache, CarriedCache(runner.layout, ()), chunk_size=8)
        assert cache.check().free == 64


def on_a_gpu(num_pages, page_size, **settings):
    """A runner that says so; and the chunks that it runs."""
    runner = FakeRunner(num_pages=num_pages, page_size=page_size, **settings)
    runner.memory = replace(runner.memory, kind="VRAM")
    run, ran = runner.run, []
    runner.run = lambda chunks: ran.extend(chunks) or run(chunks)
    return runner, ran
