"""Unequal tensor parallelism, two nodes and DP attention, each with a pair of real SGLangs of its own: slow.

With tensor parallelism 2 every rank is two processes, each with half of the heads and a Handshake of its
own. A wider prefill writes its slices to one decode process, a narrower one to several.
"""

import asyncio
import os
import sys
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from engine.pair import FAKE, Pair
from engine.sglang.random_ids import random_ids
from exactness.checkpoints import tiny_checkpoint
from exactness.reference import count_near_ties, reference_generation
from services.host.ports import free_ports

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PAGE = 16
ANSWER = 9


def settings(*engine_args, model=None):
    return replace(
        FAKE,
        engine="sglang",
        model=str(model or tiny_checkpoint("qwen3")),
        dtype="float32",
        page_size=PAGE,
        index_block=PAGE,
        kv_pages=64,
        transport="nixl",
        chunk_size=2 * PAGE,
        engine_arg=("--num-reserved-decode-tokens=16", *engine_args),
    )


def tensor_parallel(size, model=None):
    return settings(f"--tp-size={size}", model=model)


def pages(tokens):
    return -(-tokens // PAGE)


async def converse(pair, name, length, **ranks):
    """Three turns, and the last of them again: each is transformers' own, and moves what decode lacks."""
    ids, known = random_ids(length, name), 0
    for turn in range(3):
        answer = await check_turn(pair, ids, known, **ranks)
        last, known = ids, (len(ids) + ANSWER - 1) // PAGE * PAGE
        ids = [*ids, *answer.tokens, *random_ids(3, f"{name}/{turn}")]
    await check_turn(pair, last, len(last) // PAGE * PAGE, **ranks)


async def check_turn(pair, ids, known, **ranks):
    answer = await pair.generate(ids, ANSWER, **ranks)
    model = Path(pair.settings.model)
    count_near_ties(reference_generation(model, tuple(ids), ANSWER), answer.tokens)
    admitted = answer.admitted
    assert admitted.decode_prefix_len == known
    assert admitted.kv_bytes_moved == (pages(len(ids)) - known // PAGE) * pair.decode.layout.page_bytes
    return answer


async def abort_in_the_middle(pair, **ranks):
    async with pair.outputs(pair.request(random_ids(200, "abort"), 500), **ranks) as outputs:
        await anext(outputs)


@pytest.mark.parametrize("prefill_tp,decode_tp", [(2, 1), (1, 2), (2, 2)])
async def test_tensor_parallel_pairs(prefill_tp, decode_tp):
    """PAGE * 4 becomes a full hit at its second sending, for which nothing but the first token crosses: with
    a wider prefill upstream once waited for ever."""
    async with Pair(tensor_parallel(decode_tp), tensor_parallel(prefill_tp)) as pair:
        assert pair.decode.layout.page_bytes == pair.prefill.layout.page_bytes
        for length in (1, PAGE * 3 - 1, PAGE * 4):
            await converse(pair, f"alone {length}", length)
        await asyncio.gather(*(converse(pair, f"together {i}", 20 + 7 * i) for i in range(3)))
        full = random_ids(PAGE * 4, "full")
        await check_turn(pair, full, 0)
        await check_turn(pair, full, PAGE * 4)
        await abort_in_the_middle(pair)
        await pair.assert_nothing_held()
        await converse(pair, "after an abort", 30)


@pytest.mark.parametrize("prefill_tp,decode_tp", [(2, 2), (1, 2)])
async def test_a_head_that_two_processes_hold_counts_once(prefill_tp, decode_tp):
    """With more processes than KV heads each holds one, so that both have the same."""
    model = tiny_checkpoint("qwen3", num_kv_heads=1)
    async with Pair(tensor_parallel(decode_tp, model), tensor_parallel(prefill_tp, model)) as pair:
        await converse(pair, "one head", PAGE * 2 + 3)
        await pair.assert_nothing_held()


# DP attention pads a batch with what SGLang 0.5.23 asks of its attention backend, by a method that only the
# backend for CPUs with AMX has: AttributeError in model_executor/forward_batch_info.py, at the first forward.
FILL_VALUE = """
import importlib.abc, importlib.machinery, sys

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "sglang.srt.layers.attention.torch_native_backend":
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            module.TorchNativeAttnBackend.get_cpu_graph_seq_len_fill_value = lambda self: 1

        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Finder())
"""


async def test_dp_attention(tmp_path, monkeypatch):
    """Two DP ranks over the processes of one tensor parallel group, in both roles; every rank with every."""
    (tmp_path / "sitecustomize.py").write_text(FILL_VALUE)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", ""))))
    dp_attention = settings("--tp-size=2", "--enable-dp-attention")
    async with Pair(dp_attention, dp_attention, dp_size=2) as pair:
        for decode in range(2):
            for prefill in range(2):
                name = f"from {prefill} to {decode}"
                await converse(pair, name, PAGE * 2 + 5, decode=decode, prefill=prefill)
        await abort_in_the_middle(pair, decode=1, prefill=1)
        await pair.assert_nothing_held()


FIRST, SECOND = "127.0.0.1", "127.0.0.2"
END_S = 60.0


def over_two_nodes():
    """Settings of a worker's first node; SGLang's rendezvous is the second of the ports."""
    ours = free_ports(FIRST, 1)[0]
    settings = tensor_parallel(2)
    nodes = ("--nnodes=2", f"--dist-init-addr={FIRST}:{ours + 1}")
    return replace(settings, host=FIRST, engine_arg=(*settings.engine_arg, *nodes))


@asynccontextmanager
async def following(role, settings):
    """The service of the second node, as it is started there."""
    flags = [
        *(f"--{name}={getattr(settings, name.replace('-', '_'))}" for name in SAME),
        *(f"--engine-arg={text}" for text in (*settings.engine_arg, "--node-rank=1")),
        *("--engine=sglang", f"--worker={role}-0-1", f"--host={SECOND}", "--etcd=127.0.0.1:1"),
    ]
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", f"services.{role}", *flags)
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            process.terminate()
        await asyncio.wait_for(process.wait(), END_S)


SAME = (
    "model",
    "dtype",
    "page-size",
    "index-block",
    "kv-pages",
    "chunk-size",
    "num-threads",
    "max-running-requests",
)


def parts(process):
    """SGLang's processes below a service."""
    import psutil

    below = psutil.Process(process.pid).children(recursive=True)
    return [each for each in below if "sglang::scheduler" in " ".join(each.cmdline())]


async def test_a_worker_over_two_nodes_is_one_worker():
    decode, prefill = over_two_nodes(), over_two_nodes()
    async with AsyncExitStack() as stack:
        followers = {
            role: await stack.enter_async_context(following(role, settings))
            for role, settings in (("decode", decode), ("prefill", prefill))
        }
        pair = await stack.enter_async_context(Pair(decode, prefill))
        assert {active.endpoint.split(":")[0] for active in pair.prefill._worker.actives} == {FIRST, SECOND}
        await converse(pair, "alone", 47)
        await asyncio.gather(*(converse(pair, f"together {i}", 20 + 7 * i) for i in range(3)))
        await abort_in_the_middle(pair)
        await pair.assert_nothing_held()

        lost = asyncio.create_task(pair.decode.crashed())
        await asyncio.sleep(0)
        assert not lost.done()
        (part,) = parts(followers["decode"])
        part.kill()
        await asyncio.wait_for(lost, END_S)
    assert [follower.returncode for follower in followers.values()] == [0, 0]
