import ctypes
import errno
from pathlib import Path

import pytest
import torch

from engine.torch.attention.paging import alike
from services.engine.torch import pools as pool_module
from services.engine.torch.pools import KvPool
from services.values.errors import ConfigError, ProtocolError, Unavailable
from services.values.kv import GroupKind, KvGroup


def make_pool(num_pages=5, page_size=8, dtype=torch.bfloat16):
    group = KvGroup(GroupKind.FULL_ATTENTION, (0, 1, 2), 2, 4, str(dtype).removeprefix("torch."))
    return KvPool(group, num_pages=num_pages, page_size=page_size, device=torch.device("cpu"))


def test_a_page_is_one_run_of_bytes(subtests):
    for dtype in [torch.float32, torch.bfloat16, torch.float16]:
        with subtests.test("a page is one run of bytes at the address that the layout says", dtype=dtype):
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
    # A page is, layer by layer, all heads' K, then all heads' V: nothing between, and nothing twice.
    for v_head_dim in [5, 3, 0]:
        with subtests.test("keys and values may differ in width", v_head_dim=v_head_dim):
            group = KvGroup(
                GroupKind.SLIDING_WINDOW, (1, 3), 2, 4, "float32", v_head_dim=v_head_dim, window=9
            )
            pool = KvPool(group, num_pages=5, page_size=8, device=torch.device("cpu"))
            assert pool.unit_bytes == 2 * 2 * 8 * (4 + v_head_dim) * 4
            assert pool.kv.is_latent == (v_head_dim == 0)
            numbers = pool.kv.numbers
            numbers.copy_(torch.arange(len(numbers)))
            read = [number.flatten(1) for layer in range(2) for number in pool.layer(layer)]
            assert torch.equal(torch.cat(read, dim=1), numbers.view(5, -1))
            assert read[1].shape[1] == 2 * 8 * v_head_dim
    for dtype in [torch.float32, torch.bfloat16]:
        with subtests.test("pages are read as their bytes", dtype=dtype):
            pool = make_pool(dtype=dtype)
            pool.kv.numbers.copy_(torch.rand(len(pool.kv.numbers)))
            whole = ctypes.string_at(pool.memory.base_address, 5 * pool.unit_bytes)
            wanted = [3, 0, 1, 4, 2, 4]
            firsts = [page * pool.unit_bytes for page in wanted]
            expected = [whole[first : first + pool.unit_bytes] for first in firsts]
            assert [bytes(page) for page in pool.read_pages(wanted)] == expected


def test_a_pools_memory(subtests):
    with subtests.test("the pool says where it is"):
        pool = make_pool()
        assert (pool.memory.num_pages, pool.memory.kind, pool.memory.device_id) == (5, "DRAM", 0)
    with subtests.test("the pool starts at a memory page and is zero"):
        pool = make_pool()
        assert pool.memory.base_address % 4096 == 0
        assert not pool.kv.numbers.any()
    with subtests.test("a closed pool holds no memory and is not read"):
        pool = make_pool()
        pool.close()
        assert pool.kv.numbers.untyped_storage().nbytes() == 0
        with pytest.raises(ProtocolError, match="closed"):
            pool.read_pages([0])
    with subtests.test("memory is taken as pages are written"):
        # A pool of a gigabyte of which three pages are written: not a gigabyte of the machine's.
        before_kb = resident_kb()
        pool = make_pool(num_pages=(1 << 30) // make_pool(num_pages=1).unit_bytes)
        for page in (0, 1000, 500_000):
            pool.kv.numbers.view(pool.memory.num_pages, -1)[page] = 1
        assert resident_kb() - before_kb < 64 << 10


def test_what_does_not_fit_is_refused(subtests):
    for num_pages, page_size in [(0, 8), (4, 0), (2**50, 8)]:
        with (
            subtests.test("an impossible pool is refused", num_pages=num_pages),
            pytest.raises(ConfigError, match="KV pool"),
        ):
            make_pool(num_pages, page_size)
    # More than there is in all never will be.
    for num_pages, error in [(5, Unavailable), (2**40, ConfigError)]:
        with (
            subtests.test("memory that others hold may be free another time", num_pages=num_pages),
            pytest.MonkeyPatch.context() as monkeypatch,
        ):

            def fail(size_bytes):
                raise OSError(errno.ENOMEM, "Cannot allocate memory")

            monkeypatch.setattr(pool_module, "map_memory", fail)
            with pytest.raises(error, match=r"does not fit on cpu: .*Cannot allocate memory"):
                make_pool(num_pages)


def resident_kb():
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0])
