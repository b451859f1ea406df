"""The first step is for nobody, and leaves nothing behind."""

from dataclasses import replace

import pytest

from checkpoints import tiny_checkpoint
from pair import FAKE, Pair
from services.engine.choose import decode_engine
from services.engine.fake import FakeRunner
from services.engine.paged.warm_up import warm_up
from services.engine.torch.runner import TorchRunner
from services.errors import ConfigError
from services.kv.prefix_cache import PrefixCache
from services.kv.types import CacheEvents, PageBooks, RankId


async def test_after_the_start_every_page_is_free_and_nothing_was_told(monkeypatch):
    ran = []
    run = FakeRunner.run
    monkeypatch.setattr(FakeRunner, "run", lambda self, chunks: ran.extend(chunks) or run(self, chunks))
    async with Pair() as pair:
        for engine in (pair.decode, pair.prefill):
            assert await engine.books() == PageBooks(64, 64, 0, 0, 0, 0)
            assert engine._core.cache.take_events() == CacheEvents()
    # A chunk and a token for each; the two start at once.
    assert sorted((chunk.start, chunk.end) for chunk in ran) == [(0, 8), (0, 8), (8, 9), (8, 9)]


async def test_the_torch_engine_computes_a_first_step_and_keeps_nothing_of_it(monkeypatch):
    ran = []
    run = TorchRunner.run
    monkeypatch.setattr(TorchRunner, "run", lambda self, chunks: ran.extend(chunks) or run(self, chunks))
    async with Pair(replace(FAKE, engine="torch", model_path=str(tiny_checkpoint()))) as pair:
        assert len(ran) == 4
        for engine in (pair.decode, pair.prefill):
            assert await engine.books() == PageBooks(64, 64, 0, 0, 0, 0)
            assert engine._core.cache.take_events() == CacheEvents()


@pytest.mark.parametrize(("num_pages", "page_size"), [(1, 1), (1, 2), (2, 1), (3, 4)])
def test_a_pool_of_hardly_anything_is_not_too_small(num_pages, page_size):
    runner = FakeRunner(num_pages=num_pages, page_size=page_size)
    cache = PrefixCache(num_pages, page_size, page_size, "m")
    warm_up(runner, cache, chunk_size=512)
    assert cache.check().free == num_pages


@pytest.mark.parametrize(("chunk_size", "prompt_len"), [(512, 512), (1023, 1023), (4096, 1023)])
def test_the_first_step_is_as_large_as_any_prompt_chunk_can_be(chunk_size, prompt_len, monkeypatch):
    runner = FakeRunner(num_pages=256, page_size=4)
    ran = []
    monkeypatch.setattr(runner, "run", ran.extend)
    warm_up(runner, PrefixCache(256, 4, 4, "m"), chunk_size)
    assert [(chunk.start, chunk.end) for chunk in ran] == [(0, prompt_len), (prompt_len, prompt_len + 1)]


async def test_what_cannot_compute_does_not_start(monkeypatch):
    def out_of_memory(self, chunks):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(FakeRunner, "run", out_of_memory)
    engine = decode_engine(replace(FAKE, num_pages=4), RankId("d", 0, 1))
    with pytest.raises(ConfigError, match="cannot compute 8 tokens in a step: out of memory"):
        await engine.start()
