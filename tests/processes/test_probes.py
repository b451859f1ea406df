"""Probes and SIGTERM of real processes: started, ready, live, and a stop that loses no request."""

import asyncio
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from net.certificates import make_certificates
from processes.harness import LONG_S, ProcessCluster, until
from services.host.ports import free_ports


async def probes(port):
    """{probe: status}; empty while nothing listens."""
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=LONG_S) as client:
        try:
            return {name: (await client.get(f"/{name}")).status_code for name in ("startup", "ready", "live")}
        except httpx.TransportError:
            return {}


WAITING = {"startup": 200, "ready": 503, "live": 200}
SERVING = {"startup": 200, "ready": 200, "live": 200}
STOPPING = WAITING


async def until_probes(port, expected):
    async def match():
        return await probes(port) == expected

    await until(match, f"the probes on {port} say {expected}")


@pytest.mark.long
async def test_probes_and_an_orderly_stop(tmp_path, model_dir):
    worker_port, router_port = free_ports("127.0.0.1", 2)
    async with ProcessCluster(
        tmp_path,
        model_dir,
        decode_dp_size=1,
        rank_flags=("--fake-step-s=0.1",),
        router_flags=(f"--health-port={router_port}",),
    ) as cluster:
        worker = await start_like(
            cluster, "decode", "--worker=probed", "--dp-size=2", f"--health-port={worker_port}"
        )
        # Without etcd no rank can register, and a router knows none: they have started all the same, for a
        # kubelet ends what does not within its time; they live, and heed a signal.
        waiting_port, ignorant_port = free_ports("127.0.0.1", 2)
        # Their certificate has ended as well.
        ended = make_certificates(tmp_path / "ended", "IP:127.0.0.1", days=-1)
        tls = [f"--tls-cert={ended}/cert.pem", f"--tls-key={ended}/key.pem"]
        flags = ("--worker=waiting", "--etcd=127.0.0.1:1", f"--health-port={waiting_port}", *tls)
        waiting = await start_like(cluster, "decode", *flags)
        flags = ("--port=0", "--http-port=0", "--name=ignorant", "--etcd=127.0.0.1:1", *tls)
        ignorant = await start_like(cluster, "router", *flags, f"--health-port={ignorant_port}")
        for port in (waiting_port, ignorant_port):
            await until_probes(port, WAITING)
            answer = httpx.get(f"http://127.0.0.1:{port}/ready").text
            assert "waiting for etcd" in answer and f"the certificate {ended}/cert.pem ended at" in answer
        await until(lambda: cluster.events("registration_failed", "waiting/0"), "it has only to register")
        assert await waiting.stop() == await ignorant.stop() == 0
        (exited,) = cluster.events("rank_exited", "waiting")
        assert exited.fields["code"] == "0"

        await until_probes(worker_port, SERVING)
        worker.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(LONG_S):
            assert await worker.process.wait() == 0
        await until_probes(router_port, SERVING)
        router, (http_port,) = cluster.local.children["router"], cluster.local.http_ports
        await finish_what_runs(router, router_port, http_port)


async def start_like(cluster, role, *flags):
    """A further child: as the first one of its role, but for `flags`."""
    _, _, module, *inherited = cluster.local.children[role].command
    names = {flag.split("=")[0] for flag in flags}
    inherited = [flag for flag in inherited if flag.split("=")[0] not in names]
    name = f"{role}-{len(cluster.local.children)}"
    return await cluster.local.start_child(name, module, [*inherited, *flags])


async def finish_what_runs(router, router_port, http_port):
    """Told to stop, it takes nothing new and lets the stream end."""
    body = {"prompt": "hello", "max_tokens": 60, "ignore_eos": True, "stream": True}
    async with (
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{http_port}", timeout=LONG_S) as client,
        client.stream("POST", "/v1/completions", json=body) as answer,
    ):
        lines = answer.aiter_lines()
        await anext(lines)
        router.process.send_signal(signal.SIGTERM)
        await until_probes(router_port, STOPPING)
        await until(lambda: refuses(http_port), "no new request over HTTP")
        assert [line async for line in lines if line][-1] == "data: [DONE]"
    async with asyncio.timeout(LONG_S):
        assert await router.process.wait() == 0


async def refuses(port):
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except ConnectionRefusedError:
        return True
    writer.close()
    return False


def catches(pid, number):
    caught = re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())[1]
    return int(caught, 16) >> (number - 1) & 1


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_rank_that_is_told_to_end_while_its_model_loads_ends_well(number, model_dir, tmp_path):
    """At each of these moments: while libraries are imported, the model is made, tried and packed."""
    flags = [f"--model={model_dir}", "--worker=w", "--rank-index=0", "--etcd=127.0.0.1:1", "--kv-pages=16"]
    for moment_s in (0.7, 2.5, 4.0, 5.5):
        with (tmp_path / "log").open("wb+") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "services.decode", *flags], stdout=log, stderr=log
            )
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(moment_s)
            while moment_s < 1 and catches(process.pid, signal.SIGINT):
                time.sleep(0.02)  # On a crowded machine Python itself still starts, and would raise.
            process.send_signal(number)
            assert process.wait(60) in (0, -number)
            log.seek(0)
            said = log.read().decode()
        assert "terminate" not in said and "Traceback" not in said, said
