import logging
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from engine.torch.attention.kernels.plain_parts import (
    attend_parts_plainly,
    of_other_numbers,
    store_kv_plainly,
)
from engine.torch.attention.paging import empty
from services.engine.torch.attention import kernel_choice
from services.engine.torch.attention.attention_trial import require_agreement, require_stored
from services.engine.torch.attention.kernel_choice import choose_in_place, end_threads
from services.engine.torch.attention.page_pieces import OnDevice
from services.engine.torch.attention.paged_kv import PageShape
from services.engine.torch.attention.step_view import InPlace
from services.values.errors import ConfigError

NUM_HEADS = 4
HEADS = frozenset({NUM_HEADS})
LATENT = empty(PageShape(3, 1, 16, 8, 0))
MODULE = "services.engine.torch.attention.gpu_attention_kernel"


def pool(dtype=torch.float32, page_size=16):
    return empty(PageShape(3, 2, page_size, 8, 8), num_pages=2, dtype=dtype)


def pool_on_a_gpu(monkeypatch):
    """A pool that says it is on a GPU, and what is computed there on the CPU."""
    properties = SimpleNamespace(multi_processor_count=8)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(
        kernel_choice, "require_agreement", lambda on_device, kv: require_agreement(on_device, pool())
    )
    monkeypatch.setattr(kernel_choice, "require_stored", lambda store, kv: require_stored(store, pool()))
    monkeypatch.setattr(kernel_choice, "require_causal", lambda kv, num_heads: None)
    return SimpleNamespace(numbers=SimpleNamespace(device=torch.device("cuda", 0)), is_latent=False)


def install(monkeypatch, attend, store=store_kv_plainly):
    module = ModuleType(MODULE)
    module.attend_parts, module.store_kv = attend, store
    monkeypatch.setitem(sys.modules, MODULE, module)


def test_on_a_gpu(subtests, caplog):
    with (
        subtests.test("on a gpu the kernel is taken that works"),
        pytest.MonkeyPatch.context() as monkeypatch,
    ):
        cuda = pool_on_a_gpu(monkeypatch)
        install(monkeypatch, attend_parts_plainly)
        assert choose_in_place([cuda], [HEADS]) == (
            OnDevice(attend_parts_plainly, NUM_HEADS, num_programs=16, store=store_kv_plainly),
        )
    for store, reason in [(failing, "no C compiler"), (storing_keys_alone, "KernelWrong")]:
        with (
            subtests.test("one that stores otherwise is not, and torch stores", store=store),
            pytest.MonkeyPatch.context() as monkeypatch,
        ):
            cuda = pool_on_a_gpu(monkeypatch)
            caplog.clear()
            install(monkeypatch, attend_parts_plainly, store)
            (chosen,) = choose_in_place([cuda], [HEADS])
            assert chosen == OnDevice(attend_parts_plainly, NUM_HEADS, num_programs=16)
            (record,) = caplog.records
            assert record.getMessage().startswith("store_kernel_unusable error=")
            assert reason in record.getMessage()
    with (
        subtests.test("a pool whose layers differ in heads gathers"),
        pytest.MonkeyPatch.context() as monkeypatch,
    ):
        # The kernel's tables are for one number of them.
        cuda = pool_on_a_gpu(monkeypatch)
        caplog.clear()
        tried = []
        monkeypatch.setattr(kernel_choice, "require_causal", lambda kv, num_heads: tried.append(num_heads))
        install(monkeypatch, attend_parts_plainly)
        caplog.set_level(logging.INFO)
        assert choose_in_place([cuda], [frozenset({4, 8})]) == (None,)
        assert sorted(tried) == [4, 8]
        assert "layers of one pool have [4, 8] heads" in caplog.text
    for attend, reason in [(failing, "no C compiler"), (of_other_numbers, "KernelWrong")]:
        with (
            subtests.test("a kernel that does not work is left alone and that is said", attend=attend),
            pytest.MonkeyPatch.context() as monkeypatch,
        ):
            cuda = pool_on_a_gpu(monkeypatch)
            caplog.clear()
            install(monkeypatch, attend)
            assert choose_in_place([cuda], [HEADS]) == (None,)
            (record,) = caplog.records
            assert record.levelno == logging.WARNING
            assert record.getMessage().startswith("attention_kernel_unusable error=")
            assert reason in record.getMessage()
    with subtests.test("so is one that is not there"), pytest.MonkeyPatch.context() as monkeypatch:
        cuda = pool_on_a_gpu(monkeypatch)
        caplog.clear()
        monkeypatch.setitem(sys.modules, MODULE, None)  # as without Triton
        assert choose_in_place([cuda], [HEADS]) == (None,)
        assert "attention_kernel_unusable error=" in caplog.text
    with (
        subtests.test("without a torch that attends nothing serves"),
        pytest.MonkeyPatch.context() as monkeypatch,
    ):
        cuda = pool_on_a_gpu(monkeypatch)

        def refuse(kv, num_heads):
            raise ConfigError("this torch does not attend as it should")

        install(monkeypatch, attend_parts_plainly)
        monkeypatch.setattr(kernel_choice, "require_causal", refuse)
        with pytest.raises(ConfigError, match="does not attend"):
            choose_in_place([cuda], [HEADS])


def storing_keys_alone(keys, values, *places):
    store_kv_plainly(keys, torch.zeros_like(values), *places)


def failing(*_):
    raise RuntimeError("no C compiler")


def test_on_a_cpu_threads_read_the_pages(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert choose_in_place([pool()], [HEADS]) == (InPlace(),)
    assert choose_in_place([pool(torch.float64)], [HEADS]) == (None,)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    chosen, latent, half = choose_in_place([pool(), LATENT, pool(torch.bfloat16)], [HEADS] * 3)
    assert latent is None  # the model expands it
    assert chosen is half  # threads of a runner, not of a pool
    assert chosen.num_threads == 3
    end_threads([chosen, latent, half])
    with pytest.raises(RuntimeError, match="after shutdown"):
        chosen.executor.submit(print)
