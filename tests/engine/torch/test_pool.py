import ctypes
import errno
from pathlib import Path

import pytest
import torch

from engine.torch.attention.paging import alike
from services.engine.torch import pool as pool_module
from services.engine.torch.pool import KvPool
from services.values.errors import ConfigError, ProtocolError, Unavailable
from services.values.kv import GroupKind, KvGroup


def make_pool(num_pages=5, page_size=8, dtype=torch.bfloat16):
    group = KvGroup(GroupKind.FULL_ATTENTION, (0, 1, 2), 2, 4, str(dtype).removeprefix("torch."))
    return KvPool(group, num_pages=num_pages, page_size=page_size, device=torch.device("cpu"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_page_is_one_run_of_bytes_at_the_address_that_the_layout_says(dtype):
    pool = make_pool(dtype=dtype)
    content = alike(pool.kv)
    assert content.shape == (5, 3, 2, 2, 8, 4)
    assert content.is_contiguous()
    assert pool.unit_bytes == 3 * 2 * 2 * 8 * 4 * dtype.itemsize
    for page in range(5):
        assert content[page].data_ptr() == pool.memory.base_address + page * pool.unit_bytes
    for layer in range(3):
        keys, values = pool.layer(layer)
        content[:, layer, 0], content[:, layer, 1] = layer + 1, -layer - 1
        assert keys.shape == values.shape == (5, 2, 8, 4)
        assert (keys == layer + 1).all()
        assert (values == -layer - 1).all()


@pytest.mark.parametrize("v_head_dim", [5, 3, 0])
def test_keys_and_values_may_differ_in_width(v_head_dim):
    """A page is, layer by layer, all heads' K, then all heads' V: nothing between, and nothing twice."""
    group = KvGroup(GroupKind.SLIDING_WINDOW, (1, 3), 2, 4, "float32", v_head_dim=v_head_dim, window=9)
    pool = KvPool(group, num_pages=5, page_size=8, device=torch.device("cpu"))
    assert pool.unit_bytes == 2 * 2 * 8 * (4 + v_head_dim) * 4
    assert pool.kv.is_latent == (v_head_dim == 0)
    numbers = pool.kv.numbers
    numbers.copy_(torch.arange(len(numbers)))
    read = [number.flatten(1) for layer in range(2) for number in pool.layer(layer)]
    assert torch.equal(torch.cat(read, dim=1), numbers.view(5, -1))
    assert read[1].shape[1] == 2 * 8 * v_head_dim


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pages_are_read_as_their_bytes(dtype):
    pool = make_pool(dtype=dtype)
    pool.kv.numbers.copy_(torch.rand(len(pool.kv.numbers)))
    whole = ctypes.string_at(pool.memory.base_address, 5 * pool.unit_bytes)
    wanted = [3, 0, 1, 4, 2, 4]
    firsts = [page * pool.unit_bytes for page in wanted]
    expected = [whole[first : first + pool.unit_bytes] for first in firsts]
    assert [bytes(page) for page in pool.read_pages(wanted)] == expected


def test_the_pool_says_where_it_is():
    pool = make_pool()
    assert (pool.memory.num_pages, pool.memory.kind, pool.memory.device_id) == (5, "DRAM", 0)


def test_the_pool_starts_at_a_memory_page_and_is_zero():
    pool = make_pool()
    assert pool.memory.base_address % 4096 == 0
    assert not pool.kv.numbers.any()


def test_a_closed_pool_holds_no_memory_and_is_not_read():
    pool = make_pool()
    pool.close()
    assert pool.kv.numbers.untyped_storage().nbytes() == 0
    with pytest.raises(ProtocolError, match="closed"):
        pool.read_pages([0])


@pytest.mark.parametrize(("num_pages", "page_size"), [(0, 8), (4, 0), (2**50, 8)])
def test_an_impossible_pool_is_refused(num_pages, page_size):
    with pytest.raises(ConfigError, match="KV pool"):
        make_pool(num_pages, page_size)


@pytest.mark.parametrize(("num_pages", "error"), [(5, Unavailable), (2**40, ConfigError)])
def test_memory_that_others_hold_may_be_free_another_time(num_pages, error, monkeypatch):
    """More than there is in all never will be."""

    def fail(size_bytes):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(pool_module, "map_memory", fail)
    with pytest.raises(error, match=r"does not fit on cpu: .*Cannot allocate memory"):
        make_pool(num_pages)


def test_memory_is_taken_as_pages_are_written():
    """A pool of a gigabyte of which three pages are written: not a gigabyte of the machine's."""
    before_kb = resident_kb()
    pool = make_pool(num_pages=(1 << 30) // make_pool(num_pages=1).unit_bytes)
    for page in (0, 1000, 500_000):
        pool.kv.numbers.view(pool.memory.num_pages, -1)[page] = 1
    assert resident_kb() - before_kb < 64 << 10


def resident_kb():
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0])
