"""A whole Isthmus cluster on real SGLang, and SGLang alone; processes on this machine's CPU."""

import asyncio
import json
import os
import random
import re
import urllib.request
from contextlib import AsyncExitStack

import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine.sglang.settings import sglang_settings
from services.cli.local.local_cluster import LocalCluster, Shape
from services.cli.router_client import responses
from services.engine.sglang.service.leftovers import RunFolder
from services.etcd.connection import EtcdSettings
from services.etcd.etcd_client import Etcd
from services.host.ports import free_ports
from services.index.joining import decode_registration
from services.index.keys import ClusterKeys
from services.net import channels
from services.values.errors import IsthmusError
from services.values.rank import RankKey
from services.wire.isthmus.v1 import common_pb2, generation_pb2, generation_pb2_grpc

PAGE = 16
START_S = 400.0
# An error comes within 5 s where each process has a core; tests also run where a dozen share two. What SGLang
# alone would take is 300 s.
ERROR_WITHIN_S = 60.0
RANK_FLAGS = (
    "--engine=sglang",
    f"--page-size={PAGE}",
    "--kv-pages=512",
    "--max-running-requests=8",
    "--chunk-size=64",
    "--dtype=float32",
    "--engine-arg=--num-reserved-decode-tokens=64",
)


class SglangCluster:
    """`async with SglangCluster(model, folder) as cluster`: 1 router, 1 prefill, 1 decode of 2 DP ranks.

    A rank more is another process that loads SGLang's libraries, ten seconds of a core.
    """

    def __init__(self, model, folder, rank_flags=RANK_FLAGS, decode_dp_size=2):
        self.model = model
        self.log_path = folder / "cluster.log"
        self.temporary = folder / "t"  # sockets lie in it: their paths must be short
        self.shape = Shape(
            model=model,
            data_dir=folder / "etcd",
            decode_dp_size=decode_dp_size,
            rank_flags=rank_flags,
            common_flags=(f"--index-block={PAGE}",),
            router_flags=("--plans=remote",),
            ready_timeout_s=START_S,
        )

    async def __aenter__(self):
        self._stack = await AsyncExitStack().__aenter__()
        log = self._stack.enter_context(self.log_path.open("w"))

        def show_line(name, line):
            print(f"{name:<8}| {line[:2000]}", file=log, flush=True)

        self.temporary.mkdir()
        try:
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("TMPDIR", str(self.temporary))
                self.processes = await self._stack.enter_async_context(LocalCluster(self.shape, show_line))
        except BaseException:
            print(self.log_path.read_text()[-20000:])
            raise
        self.channel = await self._stack.enter_async_context(
            channels.open_channel(self.processes.router_endpoint())
        )
        self.stub = generation_pb2_grpc.GenerationStub(self.channel)
        return self

    async def __aexit__(self, *exc):
        await self._stack.aclose()
        assert not self.run_folders(), "a worker that was stopped has left its temporary files behind"

    def run_folders(self):
        """Temporary files: a folder for each worker that runs, and nothing else but what is compiled."""
        return sorted(p.name for p in self.temporary.iterdir() if not p.name.startswith("torchinductor_"))

    async def generate(self, ids, max_tokens, timeout_s=60, on_token=None, **fields):
        """(token ids, Finish); `on_token` is called whenever tokens come."""
        request = generation_pb2.GenerateRequest(
            token_ids=generation_pb2.TokenIds(ids=ids),
            sampling=common_pb2.SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True),
            **fields,
        )
        tokens, finish = [], None
        async for response in responses(self.channel, request, timeout_s=timeout_s):
            tokens.extend(response.token_ids)
            if response.token_ids and on_token is not None:
                on_token()
            if response.HasField("finish"):
                finish = response.finish
        assert finish is not None, "the stream ended without a finish"
        return tokens, finish

    async def until_indexed(self, decode, ids, conversation="", timeout_s=10.0):
        """The router's mirror knows that the decode rank holds all of `ids`."""
        prompt = generation_pb2.TokenIds(ids=ids)
        request = generation_pb2.GenerateRequest(token_ids=prompt, conversation_id=conversation)
        async with asyncio.timeout(timeout_s):
            while True:
                explanation = await self.stub.Explain(generation_pb2.ExplainRequest(request=request))
                hits = {(c.decode.worker, c.decode.rank): c.decode_hit_tokens for c in explanation.candidates}
                if hits.get((decode.worker, decode.rank), 0) >= len(ids):
                    return
                await asyncio.sleep(0.05)

    async def registration(self, role, rank=0):
        """What a rank says of itself now."""
        key = ClusterKeys("default").registration(RankKey(role.value, rank))
        async with Etcd(EtcdSettings(self.processes.etcd_endpoints), rng=random.Random()) as etcd:
            return decode_registration((await etcd.get(key)).value)

    def gauges(self, name, role):
        """A gauge of every rank of a role, by its labels, as Prometheus would read it now."""
        ready = re.findall(
            r"rank_ready rank=(\S+) role=(\S+) .*metrics_port=(\d+)", self.log_path.read_text()
        )
        ports = {rank: port for rank, found, port in ready if found == role}  # a rank's last life counts
        values = []
        for port in ports.values():
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=2) as response:
                families = text_string_to_metric_families(response.read().decode())
            values += [sample for family in families for sample in family.samples if sample.name == name]
        return values

    def note_start(self):
        """What the ranks hold before the first request; for the one test that asks."""
        self.at_start = [
            (role, gauge.name, gauge.value)
            for role in ("prefill", "decode")
            for name in ("isthmus_kv_pages", "isthmus_publisher_blocks")
            for gauge in self.gauges(name, role)
            if gauge.labels.get("state") != "free"
        ]

    async def until_prefilling(self, position, timeout_s=20.0):
        """SGLang's prefill has computed a chunk since the log was `position` long."""
        await self._until(lambda: "Prefill batch" in self.log_path.read_text()[position:], timeout_s)

    @property
    def log_length(self):
        return len(self.log_path.read_text())

    async def until_waiting(self, role, timeout_s=20.0):
        """A request is with a rank of the role, queued or running."""
        await self._until(lambda: any(sample.value for sample in self._running(role.value)), timeout_s)

    async def until_idle(self, timeout_s=45.0):
        """Nothing runs, and no page is held by a request: deferred release included."""
        await self._until(self._idle, timeout_s)

    def _idle(self):
        try:
            return self._held() == 0
        except OSError:  # a rank is on its way back
            return False

    def _held(self):
        held = [
            sample.value
            for role in ("prefill", "decode")
            for sample in self.gauges("isthmus_kv_pages", role)
            if sample.labels["state"] in ("private", "quarantined")
        ]
        running = [sample.value for role in ("prefill", "decode") for sample in self._running(role)]
        return sum(held) + sum(running)

    def _running(self, role):
        return self.gauges("isthmus_running_requests", role) + self.gauges("isthmus_waiting_requests", role)

    async def _until(self, condition, timeout_s):
        async with asyncio.timeout(timeout_s):
            while not await asyncio.to_thread(condition):
                await asyncio.sleep(0.05)

    def kill_schedulers(self, role):
        """SIGKILL to SGLang's scheduler processes of a role, as a crash would."""
        import psutil

        supervisor = psutil.Process(self.processes.children[role].process.pid)
        schedulers = [p for p in supervisor.children(recursive=True) if "sglang::scheduler" in _name(p)]
        assert schedulers
        for process in schedulers:
            process.kill()

    async def until_placeable(self, timeout_s):
        """A request gets an answer again."""
        async with asyncio.timeout(timeout_s):
            while True:
                try:
                    await self.generate([5, 6, 7], 1, timeout_s=10)
                    return
                except IsthmusError:
                    await asyncio.sleep(1)


def _name(process):
    try:
        return " ".join(process.cmdline())
    except Exception as error:  # it has just ended
        return repr(error)


class AggregatedSglang:
    """One SGLang that prefills and decodes, without anything of ours."""

    def __init__(self, model, folder):
        self._model = model
        self._log_path = folder / "aggregated.log"

    async def __aenter__(self):
        settings = sglang_settings(self._model, dtype="float32")
        (port,) = free_ports("127.0.0.1", 1)
        ours = ("--disaggregation", "--kv-events-config")
        arguments = [text for text in settings.arguments(port) if not text.startswith(ours)]
        # Their libraries come with SGLang, and this module is imported where that is not.
        from services.engine.sglang.service.sglang_process import SglangHttp, SglangProcess

        self._folder = RunFolder.open()
        environment = self._folder.environment(settings.environment(os.environ))
        self._process = SglangProcess(arguments, environment)
        self._http = SglangHttp(port)
        await self._process.start()
        try:
            async with asyncio.timeout(START_S):
                while not await self._http.healthy():
                    assert not self._process.ended.is_set(), self._process.last_error()
                    await asyncio.sleep(0.2)
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *exc):
        await self._process.stop()
        await self._http.close()
        self._folder.close()

    async def generate(self, ids, max_tokens):
        sampling = {"temperature": 0, "max_new_tokens": max_tokens, "ignore_eos": True}
        body = {"input_ids": ids, "sampling_params": sampling}
        return (await asyncio.to_thread(self._post, "/generate", body))["output_ids"]

    def _post(self, path, body):
        headers = {"Content-Type": "application/json"}
        asked = urllib.request.Request(self._http.base + path, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(asked, timeout=ERROR_WITHIN_S) as response:
            return json.load(response)
