"""These tests show what a worker's process shows while its model loads."""

import asyncio
import urllib.request
from dataclasses import replace

from cluster.harness import FAKE_RANK
from services.decode.decode_service import decode_roles
from services.engine.paged.shell.decode_engine import PagedDecodeEngine
from services.host.ports import free_ports
from services.process import signals
from services.rank import main as rank


async def page(port):
    url = f"http://127.0.0.1:{port}/metrics"
    return await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=10).read().decode())


async def test_every_rank_of_a_process_can_be_scraped_while_the_first_engine_starts(monkeypatch):
    loading = asyncio.Event()

    async def load(engine):
        loading.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(PagedDecodeEngine, "start", load)
    monkeypatch.setattr(signals, "stop_on_signals", asyncio.Event)
    ports = free_ports("127.0.0.1", 2)
    base = replace(FAKE_RANK, etcd=("127.0.0.1:1",), cluster="c")
    configs = [replace(base, rank_index=index, metrics_port=port) for index, port in enumerate(ports)]
    own_ids = [rank.own_rank_id(config) for config in configs]
    roles = [role for own_id in own_ids for role in decode_roles(base, [own_id])]
    running = asyncio.create_task(rank.run_ranks(configs, own_ids, roles))
    try:
        async with asyncio.timeout(20):
            await loading.wait()
        for index, port in enumerate(ports):
            labels = f'isthmus_cluster="c",model="fake",rank="{index}",role="decode",worker="w"'
            assert f"process_start_time_seconds{{{labels}}}" in await page(port)
    finally:
        running.cancel()
        await asyncio.wait([running])
